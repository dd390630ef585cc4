//! Piper's profiles: JSON with a variant of every layer for each degree of tensor parallelism.
//!
//! Read is degree 1. Times are seconds for one microbatch, forward and backward together; the variant that recomputes
//! its forward takes one forward more, which tells the two apart. A layer needs `memoryUsageA` bytes for each
//! microbatch in flight and `memoryUsageB` once.

use std::collections::{BTreeMap, HashMap};

use serde::Deserialize;

use super::ImportError;
use super::draft::{Draft, DraftEdge, size, time};
use super::json;
use crate::profile::LayerProfile;

#[derive(Deserialize)]
struct Node {
    id: u64,
    #[serde(default)]
    name: String,
    #[serde(rename = "TMPCs")]
    degrees: BTreeMap<String, Vec<Variant>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Variant {
    #[serde(default)]
    id: String,
    time_per_sample: f64,
    parameter_size: f64,
    memory_usage_a: f64,
    memory_usage_b: f64,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Link {
    source_id: u64,
    dest_id: u64,
    communication_cost: f64,
}

/// Share of the forward where no variant tells it: a backward costs about twice as much.
const FORWARD_SHARE: f64 = 1.0 / 3.0;

pub(super) fn parse(text: &str) -> Result<Draft, ImportError> {
    let (nodes, links) = json::nodes_and_edges::<Node, Link>(text)?;
    let mut draft = Draft {
        notes: vec![
            "Piper's times are read as seconds for one microbatch, at tensor-parallel degree 1"
                .to_owned(),
        ],
        ..Draft::default()
    };
    let mut number = HashMap::new();
    let mut guessed = 0;
    for (line, node) in &nodes {
        if number.insert(node.id, draft.layers.len()).is_some() {
            let message = format!("two nodes have the id {}", node.id);
            return Err(ImportError::new(*line, message));
        }
        let (layer, told) = layer(*line, node)?;
        guessed += usize::from(!told);
        draft.layers.push(layer);
    }
    if guessed > 0 {
        draft.notes.push(format!(
            "{guessed} layers have no variant that recomputes: a third of their time is taken as the forward"
        ));
    }
    // A node of several outputs has edges of several sizes: each size is a tensor of its own.
    let mut sizes: HashMap<usize, Vec<u64>> = HashMap::new();
    for (line, link) in &links {
        let find = |id: u64| {
            let missing = || ImportError::new(*line, format!("there is no node {id}"));
            number.get(&id).copied().ok_or_else(missing)
        };
        let (from, to) = (find(link.source_id)?, find(link.dest_id)?);
        let bytes = size(*line, "communicationCost", link.communication_cost)?;
        let known = sizes.entry(from).or_default();
        let output = known.iter().position(|&b| b == bytes).unwrap_or_else(|| {
            known.push(bytes);
            known.len() - 1
        });
        draft.edges.push(DraftEdge {
            line: *line,
            from,
            to,
            tensor: format!("{}:{output}", link.source_id),
            bytes,
            gradient: true,
            gradient_bytes: None,
        });
    }
    Ok(draft)
}

/// The layer, and whether the file tells its forward from its backward.
fn layer(line: usize, node: &Node) -> Result<(LayerProfile, bool), ImportError> {
    let variants = node.degrees.get("1").map_or(&[][..], Vec::as_slice);
    let recomputes = |variant: &&Variant| variant.id.contains("recomp");
    let Some(plain) = variants.iter().find(|v| !recomputes(v)) else {
        let message = "`TMPCs` has no variant of degree \"1\" that keeps its activations";
        return Err(ImportError::new(line, message));
    };
    let both = time(line, "timePerSample", plain.time_per_sample)?;
    let told = variants
        .iter()
        .find(recomputes)
        .map(|again| again.time_per_sample - both)
        .filter(|forward| (0.0..=both).contains(forward));
    let forward = told.unwrap_or(both * FORWARD_SHARE);
    let parameter_bytes = size(line, "parameterSize", plain.parameter_size)?;
    let once = size(line, "memoryUsageB", plain.memory_usage_b)?;
    let name = if node.name.is_empty() {
        "node"
    } else {
        &node.name
    };
    let layer = LayerProfile {
        name: format!("{}/{name}", node.id),
        kind: name.to_owned(),
        forward_ms: forward * 1e3,
        backward_ms: (both - forward) * 1e3,
        parameter_bytes,
        // What is there once beyond the weights and their gradient.
        optimizer_bytes: once.saturating_sub(parameter_bytes.saturating_mul(2)),
        stash_bytes: size(line, "memoryUsageA", plain.memory_usage_a)?,
        ..LayerProfile::default()
    };
    Ok((layer, told.is_some()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(id: u64, variants: &str) -> String {
        format!(
            "{{\"id\": {id}, \"name\": \"block\", \"TMPCs\": {{\"1\": [{variants}], \"2\": []}}}}"
        )
    }

    fn variant(id: &str, seconds: f64) -> String {
        format!(
            "{{\"id\": \"{id}\", \"timePerSample\": {seconds}, \"parameterSize\": 10.0, \"memoryUsageA\": 7, \"memoryUsageB\": 25.0}}"
        )
    }

    #[test]
    fn recomputing_tells_forward_from_backward() {
        let both = [variant("vanilla", 3.0), variant("activation recomp", 4.0)].join(",");
        let text = format!(
            "{{\"nodes\": [{},\n{}], \"edges\": [{{\"sourceId\": 5, \"destId\": 3, \"communicationCost\": 8.0}}]}}",
            node(3, &both),
            node(5, &variant("vanilla", 3.0))
        );
        let draft = parse(&text).unwrap();
        let layer = &draft.layers[0];
        assert_eq!((layer.forward_ms, layer.backward_ms), (1000.0, 2000.0));
        assert_eq!(layer.parameter_bytes, 10);
        assert_eq!((layer.optimizer_bytes, layer.stash_bytes), (5, 7));
        assert_eq!((draft.edges[0].from, draft.edges[0].to), (1, 0));
        assert_eq!(draft.notes.len(), 2);
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line() {
        let error = |nodes: &str, edges: &str| {
            let text = format!("{{\"nodes\": [\n{nodes}],\n\"edges\": [{edges}]}}");
            parse(&text).map(|_| ()).unwrap_err().to_string()
        };
        let good = node(1, &variant("vanilla", 1.0));
        let edge = |to: u64, cost: f64| {
            format!("{{\"sourceId\": 1, \"destId\": {to}, \"communicationCost\": {cost}}}")
        };
        assert_eq!(error(&good, &edge(9, 1.0)), "3: there is no node 9");
        assert!(error(&good, &edge(1, -1.0)).contains("3: `communicationCost` is -1"));
        assert!(error(&format!("{good},\n{good}"), "").contains("3: two nodes have the id 1"));
        assert!(error(&node(1, ""), "").contains("2: `TMPCs` has no variant"));
        assert!(error(&node(1, &variant("vanilla", -1.0)), "").contains("`timePerSample` is -1"));
    }
}
