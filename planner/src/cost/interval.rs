//! The sums of every run of consecutive layers, computed once so that solvers can ask for any of them.

use std::sync::OnceLock;

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
///
/// The intervals of the execution order are summed when one from their start is first asked for: a search among
/// thousands of layers passes most starts over, and all rows would take gigabytes.
#[derive(Clone, Debug)]
pub struct IntervalTable {
    /// For each start the ends to which a stage leads, ascending.
    rows: Vec<OnceLock<Row>>,
    /// Where rows that were not asked for yet come from.
    runs: Option<Runs>,
}

/// Ends and sums of the intervals from one start.
type Row = Vec<(u32, StageSums)>;

/// What the intervals of an execution order are summed from.
#[derive(Clone, Debug)]
struct Runs {
    graph: LayerGraph,
    skips: SkipCount,
    /// For each layer the tensors that it makes and those that it reads.
    made_by: Vec<Vec<usize>>,
    read_by: Vec<Vec<usize>>,
}

impl Runs {
    fn new(graph: &LayerGraph, skips: SkipCount) -> Self {
        let mut made_by: Vec<Vec<usize>> = vec![Vec::new(); graph.len()];
        let mut read_by: Vec<Vec<usize>> = vec![Vec::new(); graph.len()];
        for (t, tensor) in graph.tensors().iter().enumerate() {
            made_by[tensor.producer].push(t);
            for &reader in &tensor.readers {
                read_by[reader].push(t);
            }
        }
        Self {
            graph: graph.clone(),
            skips,
            made_by,
            read_by,
        }
    }

    /// Time O(layers + edges).
    fn row(&self, start: usize) -> Row {
        let (layers, tensors) = (self.graph.len(), self.graph.tensors());
        let mut row = Vec::with_capacity(layers - start);
        let mut interval = StageSums::default();
        // Readers behind the interval of each tensor made in it. Sizes are whole numbers of bytes below 2^53,
        // so that adding and taking away again is exact.
        let mut behind = vec![0; tensors.len()];
        let mut received = vec![false; tensors.len()];
        for end in start..layers {
            interval.add(self.graph.layer(end));
            for &t in &self.read_by[end] {
                if tensors[t].producer < start {
                    if !std::mem::replace(&mut received[t], true) {
                        interval.traffic.input += tensors[t].bytes;
                        interval.traffic.input_gradient += tensors[t].gradient_bytes;
                    }
                } else {
                    behind[t] -= 1;
                    if behind[t] == 0 || self.skips == SkipCount::PerReader {
                        interval.traffic.output -= tensors[t].bytes;
                        interval.traffic.output_gradient -= tensors[t].gradient_bytes;
                    }
                }
            }
            for &t in &self.made_by[end] {
                behind[t] = tensors[t].readers.len();
                let stages = match self.skips {
                    SkipCount::Once => 1.0,
                    SkipCount::PerReader => behind[t] as f64,
                };
                interval.traffic.output += stages * tensors[t].bytes;
                interval.traffic.output_gradient += stages * tensors[t].gradient_bytes;
            }
            row.push((end as u32 + 1, interval));
        }
        row
    }
}

impl IntervalTable {
    /// Time and space O(layers + edges) for each start that is asked for, and once for the table.
    #[must_use]
    pub fn new(graph: &LayerGraph, skips: SkipCount) -> Self {
        Self {
            rows: vec![OnceLock::new(); graph.len()],
            runs: Some(Runs::new(graph, skips)),
        }
    }

    /// The table of any places, numbered so that stages lead from lower to higher ones: for each but the last the ends
    /// to which a stage leads, ascending, with its sums. One has to lead from the first place to the last.
    #[must_use]
    pub fn of_places(rows: Vec<Vec<(u32, StageSums)>>) -> Self {
        Self {
            rows: rows.into_iter().map(OnceLock::from).collect(),
            runs: None,
        }
    }

    fn row(&self, start: usize) -> &Row {
        self.rows[start].get_or_init(|| {
            let runs = self.runs.as_ref();
            runs.map_or_else(Vec::new, |runs| runs.row(start))
        })
    }

    /// The sums of each layer by itself, without its traffic; none if the places are not those of an execution order.
    pub fn alone(&self) -> Option<impl DoubleEndedIterator<Item = StageSums> + '_> {
        self.runs.as_ref().map(|runs| {
            runs.graph.layers().map(|layer| {
                let mut sums = StageSums::default();
                sums.add(layer);
                sums
            })
        })
    }

    /// Whether an interval holds all that lies between its places: then one from the same start to a higher end has
    /// more work.
    #[must_use]
    pub fn is_nested(&self) -> bool {
        self.runs.is_some()
    }

    /// Number of layers, or of the places behind the first.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.rows.len()
    }

    /// The stages that begin at a place: their ends, ascending, and their sums.
    pub fn stages_from(&self, start: usize) -> impl Iterator<Item = (usize, &StageSums)> {
        let row = self.row(start).iter();
        row.map(|(end, sums)| (*end as usize, sums))
    }

    /// Sums of the stage `start..end`, which must not be empty; none if there is no such stage.
    #[must_use]
    pub fn find(&self, start: usize, end: usize) -> Option<&StageSums> {
        debug_assert!(start < end && end <= self.layers());
        let row = self.row(start);
        let place = if row.len() == self.layers() - start {
            end - start - 1
        } else {
            row.binary_search_by_key(&end, |(other, _)| *other as usize)
                .ok()?
        };
        Some(&row[place].1)
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
