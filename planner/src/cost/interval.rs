//! The sums of every run of consecutive layers, computed once so that solvers can ask for any of them.

use super::stage::StageSums;
use crate::graph::LayerGraph;

/// How to count a tensor that layers behind the end of an interval read.
///
/// Into how many stages those readers fall is not known yet when a solver looks at one interval.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SkipCount {
    /// As if all were in one stage: no plan can do better.
    Once,
    /// As if each were in a stage of its own: no plan can do worse.
    PerReader,
}

/// Sums of all intervals `[start, end)` between two places: those of the execution order, or others
/// ([`IntervalTable::of_places`]).
#[derive(Clone, Debug)]
pub struct IntervalTable {
    /// Intervals at most: one less than the places.
    layers: usize,
    /// Row by row: for each start all ends. None where no stage lies between the two.
    sums: Vec<Option<StageSums>>,
    /// Whether an interval holds all that lies between its places: then a longer one has more work.
    nested: bool,
}

impl IntervalTable {
    /// Time and space O(layers^2 + layers * edges).
    #[must_use]
    pub fn new(graph: &LayerGraph, skips: SkipCount) -> Self {
        let layers = graph.len();
        let tensors = graph.tensors();
        let mut made_by: Vec<Vec<usize>> = vec![Vec::new(); layers];
        let mut read_by: Vec<Vec<usize>> = vec![Vec::new(); layers];
        for (t, tensor) in tensors.iter().enumerate() {
            made_by[tensor.producer].push(t);
            for &reader in &tensor.readers {
                read_by[reader].push(t);
            }
        }
        let mut sums = Vec::with_capacity(layers * (layers + 1) / 2);
        for start in 0..layers {
            let mut interval = StageSums::default();
            // Readers behind the interval of each tensor made in it. Sizes are whole numbers of bytes below 2^53,
            // so that adding and taking away again is exact.
            let mut behind = vec![0; tensors.len()];
            let mut received = vec![false; tensors.len()];
            for end in start..layers {
                interval.add(graph.layer(end));
                for &t in &read_by[end] {
                    if tensors[t].producer < start {
                        if !std::mem::replace(&mut received[t], true) {
                            interval.traffic.input += tensors[t].bytes;
                            interval.traffic.input_gradient += tensors[t].gradient_bytes();
                        }
                    } else {
                        behind[t] -= 1;
                        if behind[t] == 0 || skips == SkipCount::PerReader {
                            interval.traffic.output -= tensors[t].bytes;
                            interval.traffic.output_gradient -= tensors[t].gradient_bytes();
                        }
                    }
                }
                for &t in &made_by[end] {
                    behind[t] = tensors[t].readers.len();
                    let stages = match skips {
                        SkipCount::Once => 1.0,
                        SkipCount::PerReader => behind[t] as f64,
                    };
                    interval.traffic.output += stages * tensors[t].bytes;
                    interval.traffic.output_gradient += stages * tensors[t].gradient_bytes();
                }
                sums.push(Some(interval));
            }
        }
        Self {
            layers,
            sums,
            nested: true,
        }
    }

    /// The table of any `places`, numbered so that stages lead from lower to higher ones: `sums` of start and end, none
    /// where no stage lies between them. One has to lie between the first place and the last.
    #[must_use]
    pub fn of_places(places: usize, sums: impl Fn(usize, usize) -> Option<StageSums>) -> Self {
        let starts = 0..places - 1;
        let pairs = starts.flat_map(|start| (start + 1..places).map(move |end| (start, end)));
        Self {
            layers: places - 1,
            sums: pairs.map(|(start, end)| sums(start, end)).collect(),
            nested: false,
        }
    }

    /// Whether an interval from the same start to a higher end always has more work.
    #[must_use]
    pub fn is_nested(&self) -> bool {
        self.nested
    }

    /// Number of layers, or of the places behind the first.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Sums of the stage `start..end`, which must not be empty; none if there is no such stage.
    #[must_use]
    pub fn find(&self, start: usize, end: usize) -> Option<&StageSums> {
        debug_assert!(start < end && end <= self.layers);
        // Rows before this one have layers, layers - 1, ... entries.
        let row = start * self.layers - start * start.saturating_sub(1) / 2;
        self.sums[row + end - start - 1].as_ref()
    }

    /// Sums of a stage that there is.
    ///
    /// # Panics
    /// If no stage lies between the two places.
    #[must_use]
    pub fn get(&self, start: usize, end: usize) -> &StageSums {
        self.find(start, end)
            .expect("only stages that are in the table are asked for")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn sums_and_borders_of_a_chain() {
        let profile = testing::chain(&[3.0, 6.0, 9.0], &[10, 20, 30], &[7, 5]);
        let table = IntervalTable::new(&LayerGraph::new(&profile), SkipCount::Once);
        let middle = table.get(1, 2);
        assert_eq!(middle.parameters, 20.0);
        assert_eq!((middle.traffic.input, middle.traffic.output), (7.0, 5.0));
        let tail = table.get(1, 3);
        assert!((tail.forward - 5e-3).abs() < 1e-12);
        assert_eq!((tail.traffic.input, tail.traffic.output), (7.0, 0.0));
        assert_eq!(table.get(0, 3).traffic.sent(), 0.0);
    }

    #[test]
    fn a_skip_is_counted_once_or_per_reader() {
        // L0's tensor is read by L1, L2 and L3.
        let mut profile = testing::chain(&[1.0; 4], &[0; 4], &[7, 5, 3]);
        for to in ["L2", "L3"] {
            let mut edge = profile.edges[0].clone();
            edge.to = to.to_owned();
            profile.edges.push(edge);
        }
        let graph = LayerGraph::new(&profile);
        let once = IntervalTable::new(&graph, SkipCount::Once);
        let each = IntervalTable::new(&graph, SkipCount::PerReader);
        assert_eq!(once.get(0, 1).traffic.output, 7.0);
        assert_eq!(each.get(0, 1).traffic.output, 21.0);
        assert_eq!(once.get(0, 2).traffic.output, 7.0 + 5.0);
        assert_eq!(each.get(0, 2).traffic.output, 14.0 + 5.0);
        // Two readers in one stage receive it once.
        assert_eq!(each.get(2, 4).traffic.input, 7.0 + 5.0);
    }
}
