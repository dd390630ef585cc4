//! Stages: the part of the model that a worker runs, and which tensors pass between them.

use std::collections::{HashMap, HashSet};

use models::graph::{Graph, ValueId};
use planner::schedule::{StageLink, StageShape};

use crate::error::RunError;
use crate::work::Work;

/// Tensors that pass between two stages, by position in the program of the stage that holds this.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The other stage.
    pub stage: usize,
    /// Positions among the program's outputs (towards later stages) or inputs (from earlier ones); both
    /// ends list the same tensors in the same order.
    pub positions: Vec<usize>,
    /// Whether gradients come back.
    pub gradient: bool,
}

/// One stage.
#[derive(Debug)]
pub struct Stage {
    /// Its number.
    pub index: usize,
    /// Replicas, depth and delay.
    pub shape: StageShape,
    /// Whether it keeps its inputs only and runs forward again before each backward.
    pub recompute: bool,
    /// Number of the worker that is replica 0.
    pub first_worker: usize,
    /// The layers as one unit that runs forward and backward.
    pub program: Work,
    /// Positions among the program's inputs of the graph's own inputs, and which of those it is.
    pub graph_inputs: Vec<(usize, usize)>,
    /// What it gives to later stages.
    pub outgoing: Vec<Link>,
    /// What it takes from earlier stages.
    pub incoming: Vec<Link>,
    /// Position among the program's outputs of the value that the loss reads, in the stage that makes it.
    pub loss_output: Option<usize>,
}

impl Stage {
    /// The link to stage `to`; panics when there is none, which a schedule made from the links rules out.
    pub fn link_to(&self, to: usize) -> &Link {
        find(&self.outgoing, to)
    }

    /// The link from stage `from`.
    pub fn link_from(&self, from: usize) -> &Link {
        find(&self.incoming, from)
    }
}

/// The stage that a worker belongs to.
pub fn of_worker(stages: &[Stage], worker: usize) -> &Stage {
    let mut stages = stages.iter().rev();
    stages
        .find(|stage| stage.first_worker <= worker)
        .expect("stage 0 begins with worker 0")
}

fn find(links: &[Link], stage: usize) -> &Link {
    links
        .iter()
        .find(|link| link.stage == stage)
        .expect("schedules are made from these links")
}

/// Cuts a graph into stages. `layers` names each stage's layers.
///
/// # Errors
/// When layers are missing, unknown, or in an order in which a stage would need what a later one makes;
/// when stages share a weight; when no stage makes the value that the loss reads.
pub fn cut(
    graph: &Graph,
    layers: &[Vec<String>],
    shapes: &[StageShape],
    loss_value: ValueId,
) -> Result<Vec<Stage>, RunError> {
    let programs: Vec<Work> = assign(graph, layers)?
        .iter()
        .map(|layers| Work::Layers(graph.program(layers, &[loss_value])))
        .collect();
    check_weights(graph, &programs)?;
    let name = |value: ValueId| graph.values()[value].name.clone();
    connect(programs, shapes, loss_value, graph.inputs(), &name)
}

/// Stages of these programs, in their order. What none of them makes must be among the `inputs` of the model; `name`
/// tells a value's.
///
/// # Errors
/// When a stage would need what a later one makes; when no stage makes the value that the loss reads.
pub fn connect(
    programs: Vec<Work>,
    shapes: &[StageShape],
    loss_value: ValueId,
    inputs: &[ValueId],
    name: &dyn Fn(ValueId) -> String,
) -> Result<Vec<Stage>, RunError> {
    let mut producer = HashMap::new();
    for (stage, program) in programs.iter().enumerate() {
        for (position, &value) in program.outputs().iter().enumerate() {
            producer.insert(value, (stage, position));
        }
    }
    if !producer.contains_key(&loss_value) {
        return Err(RunError::Model(format!(
            "the value '{}' that the loss reads does not come out of any stage",
            name(loss_value)
        )));
    }

    let mut first_worker = 0;
    let mut stages: Vec<Stage> = Vec::new();
    for (index, (program, &shape)) in programs.into_iter().zip(shapes).enumerate() {
        let mut graph_inputs = Vec::new();
        let mut incoming: Vec<Link> = Vec::new();
        for (position, &value) in program.inputs().iter().enumerate() {
            let Some(&(from, _)) = producer.get(&value) else {
                let input = inputs.iter().position(|&input| input == value);
                let input = input.expect("what no stage makes is an input of the graph");
                graph_inputs.push((position, input));
                continue;
            };
            if from >= index {
                return Err(RunError::Model(format!(
                    "stage {index} reads '{}', which stage {from} makes: stages must follow the order of the layers",
                    name(value)
                )));
            }
            let gradient = program.input_gradients()[position];
            match incoming.iter_mut().find(|link| link.stage == from) {
                Some(link) => {
                    link.positions.push(position);
                    link.gradient |= gradient;
                }
                None => incoming.push(Link {
                    stage: from,
                    positions: vec![position],
                    gradient,
                }),
            }
        }
        for link in &incoming {
            let positions = link.positions.iter();
            let sent = positions
                .map(|&p| producer[&program.inputs()[p]].1)
                .collect();
            stages[link.stage].outgoing.push(Link {
                stage: index,
                positions: sent,
                gradient: link.gradient,
            });
        }
        stages.push(Stage {
            index,
            shape,
            recompute: false,
            first_worker,
            loss_output: program.outputs().iter().position(|&v| v == loss_value),
            program,
            graph_inputs,
            outgoing: Vec::new(),
            incoming,
        });
        first_worker += shape.replicas;
    }
    Ok(stages)
}

/// Positions of each stage's layers in the graph, from their names.
fn assign(graph: &Graph, layers: &[Vec<String>]) -> Result<Vec<Vec<usize>>, RunError> {
    let known: HashMap<&str, usize> = graph
        .layers()
        .iter()
        .enumerate()
        .map(|(position, layer)| (layer.name.as_str(), position))
        .collect();
    let mut placed = HashSet::new();
    let mut stages = Vec::new();
    for (index, names) in layers.iter().enumerate() {
        let mut positions = Vec::new();
        for name in names {
            let &position = known.get(name.as_str()).ok_or_else(|| {
                RunError::Plan(format!(
                    "stage {index} names the layer '{name}', which the model does not have: profile and plan it anew"
                ))
            })?;
            placed.insert(name.as_str());
            positions.push(position);
        }
        positions.sort_unstable();
        stages.push(positions);
    }
    match graph
        .layers()
        .iter()
        .find(|l| !placed.contains(l.name.as_str()))
    {
        Some(layer) => Err(RunError::Plan(format!(
            "no stage has the model's layer '{}': profile and plan the model anew",
            layer.name
        ))),
        None => Ok(stages),
    }
}

/// Every weight belongs to one stage: two would step it apart.
fn check_weights(graph: &Graph, programs: &[Work]) -> Result<(), RunError> {
    let mut owner = HashMap::new();
    for (stage, program) in programs.iter().enumerate() {
        for &parameter in program.weights() {
            if let Some(other) = owner.insert(parameter, stage) {
                return Err(RunError::Plan(format!(
                    "stages {other} and {stage} both use the weight '{}': a plan for 1F1B keeps its layers in one stage; train the model as it was profiled (--untie)",
                    graph.parameters()[parameter].name
                )));
            }
        }
    }
    Ok(())
}

/// The links of a schedule over these stages.
pub fn links(stages: &[Stage]) -> Vec<StageLink> {
    stages
        .iter()
        .flat_map(|stage| {
            stage.outgoing.iter().map(|link| StageLink {
                from: stage.index,
                to: link.stage,
                gradient: link.gradient,
            })
        })
        .collect()
}
