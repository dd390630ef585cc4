//! Stages that the user writes down: `conv1:2,fc1:1`.

use super::{Request, Scope};
use crate::cost::Partition;
use crate::graph::LayerGraph;
use crate::layer_name::{self, LayerNameError};
use crate::profile::Profile;

/// One stage as the user names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageSpec {
    /// Its first layer: a name, or its number in execution order from 0.
    pub first: String,
    /// Its replicas.
    pub replicas: usize,
}

/// Why the stages make no partition.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandError {
    /// The text is no list of stages.
    #[error(
        "`{text}` is no stage: write FIRST_LAYER or FIRST_LAYER:REPLICAS, for example 0:2,fc1:1"
    )]
    Syntax {
        /// What was given.
        text: String,
    },
    /// No such layer.
    #[error("--stages: {0}")]
    Layer(#[from] LayerNameError),
    /// Stages that do not begin at the first layer or do not ascend.
    #[error("--stages: stage {stage} begins at layer {layer} (`{name}`): {rule}")]
    Order {
        /// Stage.
        stage: usize,
        /// Number of its first layer.
        layer: usize,
        /// Name of its first layer.
        name: String,
        /// What is asked for.
        rule: String,
    },
    /// More workers than devices.
    #[error("--stages asks for {workers} workers, --gpus gives {devices} devices: raise --gpus")]
    Devices {
        /// Sum of the replicas.
        workers: usize,
        /// Devices.
        devices: usize,
    },
}

/// Parses `FIRST[:REPLICAS],FIRST[:REPLICAS],...`.
///
/// # Errors
/// If an entry is empty or its replicas are no positive number.
pub fn parse_stages(text: &str) -> Result<Vec<StageSpec>, HandError> {
    text.split(',')
        .map(|entry| {
            let syntax = || HandError::Syntax {
                text: entry.to_owned(),
            };
            // Layer names may contain colons: only a number behind the last one is a count.
            let (first, replicas) = match entry.trim().rsplit_once(':') {
                Some((first, count)) => match count.parse::<usize>() {
                    Ok(0) => return Err(syntax()),
                    Ok(replicas) => (first, replicas),
                    Err(_) => (entry.trim(), 1),
                },
                None => (entry.trim(), 1),
            };
            if first.is_empty() {
                return Err(syntax());
            }
            Ok(StageSpec {
                first: first.to_owned(),
                replicas,
            })
        })
        .collect()
}

/// The request with each stage that the user wrote down named by the whole name of its first layer.
///
/// Layers are numbered as the profile has them, whatever order the graph is brought into.
pub(super) fn named(profile: &Profile, request: &Request) -> Result<Request, HandError> {
    let mut request = request.clone();
    if let Scope::Given(specs) = &mut request.scope {
        let names: Vec<&str> = profile.layers.iter().map(|l| l.name.as_str()).collect();
        for spec in specs {
            spec.first = names[layer_name::find(&names, &spec.first)?].to_owned();
        }
    }
    Ok(request)
}

/// The partition that the specs describe, which name layers by their whole names.
pub(super) fn partition(
    graph: &LayerGraph,
    specs: &[StageSpec],
    devices: usize,
) -> Result<Partition, HandError> {
    // Layers that are kept together are one here, named by each of them.
    let (names, places): (Vec<&str>, Vec<usize>) = graph
        .layers()
        .enumerate()
        .flat_map(|(place, layer)| layer.members.iter().map(move |name| (name.as_str(), place)))
        .unzip();
    let mut starts = Vec::new();
    for spec in specs {
        let start = places[layer_name::find(&names, &spec.first)?];
        let rule = match starts.last() {
            None if start != 0 => Some(format!(
                "the first stage begins at the first layer, `{}`",
                graph.layer(0).name
            )),
            Some(&before) if start <= before => {
                Some("each stage begins behind the one before, in execution order".to_owned())
            }
            _ => None,
        };
        if let Some(rule) = rule {
            return Err(HandError::Order {
                stage: starts.len(),
                layer: start,
                name: graph.layer(start).name.clone(),
                rule,
            });
        }
        starts.push(start);
    }
    let workers = specs
        .iter()
        .fold(0usize, |sum, spec| sum.saturating_add(spec.replicas));
    if workers > devices {
        return Err(HandError::Devices { workers, devices });
    }
    let ends = starts.iter().skip(1).copied().chain([graph.len()]);
    Ok(Partition::new(
        starts
            .iter()
            .zip(ends)
            .map(|(&start, end)| start..end)
            .collect(),
        specs.iter().map(|spec| spec.replicas).collect(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Cluster;
    use crate::cost::Formula;
    use crate::planning::{Course, Recompute, Solver};
    use crate::testing;

    fn partition_of(text: &str) -> Result<Partition, HandError> {
        let profile = testing::chain(&[1.0; 4], &[0; 4], &[1; 3]);
        let graph = LayerGraph::new(&profile);
        let request = Request {
            cluster: Cluster::flat(4, 1.0),
            solver: Solver::Dp,
            formula: Formula::Ours,
            scope: Scope::Given(parse_stages(text)?),
            recompute: Recompute::Auto,
            together: Vec::new(),
            course: Course::default(),
        };
        match named(&profile, &request)?.scope {
            Scope::Given(specs) => partition(&graph, &specs, 4),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn names_and_numbers_with_and_without_replicas() {
        let expected = Partition::new(vec![0..2, 2..4], vec![2, 1]);
        for text in ["L0:2,L2:1", "0:2,2", " 0:2 , L2 "] {
            assert_eq!(partition_of(text).as_ref(), Ok(&expected), "{text}");
        }
    }

    #[test]
    fn a_colon_in_a_name_is_no_count() {
        let specs = parse_stages("a:b:2,c:d").unwrap();
        assert_eq!((specs[0].first.as_str(), specs[0].replicas), ("a:b", 2));
        assert_eq!((specs[1].first.as_str(), specs[1].replicas), ("c:d", 1));
    }

    #[test]
    fn what_is_no_partition_is_refused() {
        assert!(matches!(partition_of(""), Err(HandError::Syntax { .. })));
        assert!(matches!(partition_of("0:0"), Err(HandError::Syntax { .. })));
        assert!(matches!(
            partition_of("L1"),
            Err(HandError::Order { stage: 0, .. })
        ));
        assert!(matches!(
            partition_of("0,2,1"),
            Err(HandError::Order { stage: 2, .. })
        ));
        assert!(matches!(partition_of("0,9"), Err(HandError::Layer(_))));
        assert!(matches!(
            partition_of("0:4,2:1"),
            Err(HandError::Devices { .. })
        ));
    }
}
