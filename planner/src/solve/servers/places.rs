//! Where stages may begin and end: downsets of the layer graph, few enough to try all pairs.

use crate::cost::StageSums;
use crate::cost::interval::IntervalTable;
use crate::graph::LayerGraph;

/// A tensor that leaves a place: it is made by a layer of the place and read by one outside.
#[derive(Clone, Debug)]
pub struct Crossing {
    /// The layer that makes it.
    pub producer: usize,
    /// The layers outside that read it.
    pub readers: Vec<usize>,
    /// Bytes per minibatch.
    pub bytes: f64,
    /// Bytes of the gradient that comes back.
    pub gradient_bytes: f64,
}

/// Downsets of a layer graph, smaller ones first: from the empty one to all layers.
#[derive(Clone, Debug)]
pub struct Places {
    sets: Vec<Vec<bool>>,
    /// Sums of the stage between each two places, none where there is no stage.
    table: IntervalTable,
    crossings: Vec<Vec<Crossing>>,
}

impl Places {
    /// The places of these downsets, each with the layers it holds.
    #[must_use]
    pub fn new(graph: &LayerGraph, sets: Vec<Vec<bool>>) -> Self {
        let stages = |start: usize| {
            let ends = (start + 1..sets.len()).filter(|&end| {
                let pairs = sets[start].iter().zip(&sets[end]);
                pairs.into_iter().all(|(&before, &until)| until || !before)
            });
            let sums = |end: usize| stage_sums(graph, &sets[start], &sets[end]);
            ends.map(|end| (end as u32, sums(end))).collect()
        };
        let table = IntervalTable::of_places((0..sets.len() - 1).map(stages).collect());
        let crossings = sets.iter().map(|set| crossings(graph, set)).collect();
        Self {
            sets,
            table,
            crossings,
        }
    }

    /// Runs of the execution order that end at these cuts, which ascend from 0 to the number of layers.
    #[must_use]
    pub fn of_cuts(graph: &LayerGraph, cuts: &[usize]) -> Self {
        let prefix = |&cut: &usize| (0..graph.len()).map(|layer| layer < cut).collect();
        Self::new(graph, cuts.iter().map(prefix).collect())
    }

    /// Number of places.
    #[must_use]
    pub fn count(&self) -> usize {
        self.sets.len()
    }

    /// Sums of the stage between two places: its traffic to later stages as if all were one.
    #[must_use]
    pub fn sums(&self, start: usize, end: usize) -> Option<&StageSums> {
        self.table.find(start, end)
    }

    /// Tensors that leave the place.
    #[must_use]
    pub fn crossings(&self, place: usize) -> &[Crossing] {
        &self.crossings[place]
    }

    /// Whether the place holds the layer.
    #[must_use]
    pub fn holds(&self, place: usize, layer: usize) -> bool {
        self.sets[place][layer]
    }

    /// The layers between two places, ascending.
    pub fn layers(&self, start: usize, end: usize) -> impl Iterator<Item = usize> + '_ {
        let sets = (&self.sets[start], &self.sets[end]);
        (0..sets.0.len()).filter(move |&layer| sets.1[layer] && !sets.0[layer])
    }
}

/// Sums of the layers in `until` and not in `before`; what later stages read counts once.
fn stage_sums(graph: &LayerGraph, before: &[bool], until: &[bool]) -> StageSums {
    let mut sums = StageSums::default();
    for (i, layer) in graph.layers().enumerate() {
        if until[i] && !before[i] {
            sums.add(layer);
        }
    }
    for tensor in graph.tensors() {
        if before[tensor.producer] {
            if tensor.readers.iter().any(|&r| until[r] && !before[r]) {
                sums.traffic.input += tensor.bytes;
                sums.traffic.input_gradient += tensor.gradient_bytes;
            }
        } else if until[tensor.producer] && tensor.readers.iter().any(|&r| !until[r]) {
            sums.traffic.output += tensor.bytes;
            sums.traffic.output_gradient += tensor.gradient_bytes;
        }
    }
    sums
}

fn crossings(graph: &LayerGraph, set: &[bool]) -> Vec<Crossing> {
    let inside = graph.tensors().iter().filter(|t| set[t.producer]);
    let crossing = inside.filter_map(|tensor| {
        let readers: Vec<usize> = tensor
            .readers
            .iter()
            .copied()
            .filter(|&r| !set[r])
            .collect();
        (!readers.is_empty()).then_some(Crossing {
            producer: tensor.producer,
            readers,
            bytes: tensor.bytes,
            gradient_bytes: tensor.gradient_bytes,
        })
    });
    crossing.collect()
}

/// At most `most` cuts of the execution order, from 0 to the number of layers: all of them if they are few, else those
/// that `wanted` names and, spread evenly over the work, those that least crosses.
#[must_use]
pub fn thin_cuts(graph: &LayerGraph, wanted: &[usize], most: usize) -> Vec<usize> {
    let layers = graph.len();
    if layers < most {
        return (0..=layers).collect();
    }
    let work: Vec<f64> = graph.layers().map(|l| l.forward + l.backward).collect();
    let total: f64 = work.iter().sum();
    let mut crossing = vec![0.0; layers + 1];
    for tensor in graph.tensors() {
        let last = tensor.readers.last().copied().unwrap_or(tensor.producer);
        for bytes in &mut crossing[tensor.producer + 1..=last] {
            *bytes += tensor.bytes;
        }
    }
    let mut cuts: Vec<usize> = wanted.iter().copied().chain([0, layers]).collect();
    let buckets = most.saturating_sub(cuts.len()).max(1);
    let mut best: Vec<Option<usize>> = vec![None; buckets];
    let mut done = 0.0;
    for cut in 1..layers {
        done += work[cut - 1];
        let bucket = ((done / total * buckets as f64) as usize).min(buckets - 1);
        if best[bucket].is_none_or(|other| crossing[cut] < crossing[other]) {
            best[bucket] = Some(cut);
        }
    }
    cuts.extend(best.into_iter().flatten());
    cuts.sort_unstable();
    cuts.dedup();
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn thin_cuts_keep_what_is_wanted_and_prefer_narrow_places() {
        // Every fourth tensor is small.
        let bytes: Vec<u64> = (0..99).map(|i| if i % 4 == 3 { 1 } else { 100 }).collect();
        let graph = LayerGraph::new(&testing::chain(&[1.0; 100], &[0; 100], &bytes));
        let cuts = thin_cuts(&graph, &[6], 20);
        assert!(cuts.len() <= 20 && cuts.contains(&6));
        assert_eq!((cuts[0], cuts[cuts.len() - 1]), (0, 100));
        assert!(
            cuts[1..cuts.len() - 1]
                .iter()
                .all(|&c| c == 6 || c % 4 == 0),
            "{cuts:?}"
        );
        let few = LayerGraph::new(&testing::chain(&[1.0; 3], &[0; 3], &[1; 2]));
        assert_eq!(thin_cuts(&few, &[], 20), [0, 1, 2, 3]);
    }

    #[test]
    fn crossings_are_what_is_read_outside() {
        let mut profile = testing::chain(&[1.0; 3], &[0; 3], &[7, 5]);
        let mut skip = profile.edges[0].clone();
        skip.to = "L2".to_owned();
        profile.edges.push(skip);
        let places = Places::of_cuts(&LayerGraph::new(&profile), &[0, 1, 2, 3]);
        assert_eq!(places.crossings(1)[0].readers, [1, 2]);
        assert_eq!(places.crossings(2).len(), 2);
        assert_eq!(places.layers(1, 3).collect::<Vec<_>>(), [1, 2]);
        assert!(places.crossings(3).is_empty());
    }
}
