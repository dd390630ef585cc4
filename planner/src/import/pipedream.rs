//! PipeDream's `graph.txt`: one line per node, then one indented line per edge.
//!
//! ```text
//! node4 -- Conv2d(3, 64) -- forward_compute_time=1.5, backward_compute_time=3.0, activation_size=[64.0; 8.0], parameter_size=12.0
//!         node3 -- node4
//! ```
//!
//! Times are milliseconds, sizes bytes per minibatch. A list of activation sizes (a layer of several outputs) is
//! summed. `Input` nodes are no layers: every stage reads the data locally. `__getitem__` nodes that nobody reads
//! pick an output that is thrown away, and are none either.

use std::collections::HashMap;

use super::ImportError;
use super::draft::{Draft, DraftEdge, size, time};
use crate::profile::LayerProfile;

/// Bytes of one image of 224 x 224 pixels in three channels of f32, by which the batch size of image models shows.
const IMAGE_BYTES: u64 = 3 * 224 * 224 * 4;

struct Node {
    line: usize,
    description: String,
    forward_ms: f64,
    backward_ms: f64,
    activation_bytes: u64,
    parameter_bytes: u64,
}

impl Node {
    fn is_input(&self) -> bool {
        self.description.starts_with("Input")
    }

    fn kind(&self) -> &str {
        self.description
            .split(['(', ' '])
            .next()
            .unwrap_or_default()
    }
}

pub(super) fn parse(text: &str) -> Result<Draft, ImportError> {
    let mut nodes: Vec<(String, Node)> = Vec::new();
    let mut number: HashMap<String, usize> = HashMap::new();
    let mut arrows = Vec::new();
    for (index, text) in text.lines().enumerate() {
        let line = index + 1;
        match fields(text).as_slice() {
            [] => {}
            [from, to] => arrows.push((line, (*from).to_owned(), (*to).to_owned())),
            [id, description, costs] | [id, description, costs, _] => {
                if let Some(&first) = number.get(*id) {
                    let there: &Node = &nodes[first].1;
                    let message = format!("node `{id}` stands on line {} already", there.line);
                    return Err(ImportError::new(line, message));
                }
                number.insert((*id).to_owned(), nodes.len());
                nodes.push(((*id).to_owned(), node(line, description, costs)?));
            }
            other => {
                let message = format!(
                    "{} fields between ` -- `: a node has three (id, layer, costs), an edge two (from, to)",
                    other.len()
                );
                return Err(ImportError::new(line, message));
            }
        }
    }
    let mut edges = Vec::with_capacity(arrows.len());
    for (line, from, to) in arrows {
        let find = |id: &str| {
            number
                .get(id)
                .copied()
                .ok_or_else(|| ImportError::new(line, format!("there is no node `{id}`")))
        };
        edges.push((line, find(&from)?, find(&to)?));
    }
    draft(&nodes, &edges)
}

fn draft(nodes: &[(String, Node)], edges: &[(usize, usize, usize)]) -> Result<Draft, ImportError> {
    let mut read = vec![false; nodes.len()];
    let mut reads = vec![false; nodes.len()];
    for &(_, from, to) in edges {
        read[from] = true;
        reads[to] = true;
    }
    let mut draft = Draft {
        batch_size: batch_size(nodes),
        ..Draft::default()
    };
    let mut place = vec![None; nodes.len()];
    for (i, (id, node)) in nodes.iter().enumerate() {
        if node.is_input() {
            if reads[i] {
                let message = format!("`{id}` is an input and cannot read from another node");
                return Err(ImportError::new(node.line, message));
            }
            continue;
        }
        if !read[i] && node.kind().starts_with("__getitem__") {
            continue;
        }
        place[i] = Some(draft.layers.len());
        draft.layers.push(LayerProfile {
            name: format!("{id}/{}", node.kind()),
            kind: node.kind().to_owned(),
            forward_ms: node.forward_ms,
            backward_ms: node.backward_ms,
            parameter_bytes: node.parameter_bytes,
            stash_bytes: node.activation_bytes,
            ..LayerProfile::default()
        });
    }
    for &(line, from, to) in edges {
        if let (Some(producer), Some(reader)) = (place[from], place[to]) {
            draft.edges.push(DraftEdge {
                line,
                from: producer,
                to: reader,
                tensor: nodes[from].0.clone(),
                bytes: nodes[from].1.activation_bytes,
                gradient: true,
                gradient_bytes: None,
            });
        }
    }
    Ok(draft)
}

/// Samples per minibatch, if there is one input and it holds whole images.
fn batch_size(nodes: &[(String, Node)]) -> Option<usize> {
    let mut inputs = nodes.iter().filter(|(_, node)| node.is_input());
    let (Some((_, input)), None) = (inputs.next(), inputs.next()) else {
        return None;
    };
    let images = input.activation_bytes / IMAGE_BYTES;
    (images > 0 && input.activation_bytes % IMAGE_BYTES == 0)
        .then(|| usize::try_from(images).ok())
        .flatten()
}

/// What stands between `--`s that have white space around them.
fn fields(line: &str) -> Vec<&str> {
    let mut fields = Vec::new();
    let mut start = 0;
    for (at, _) in line.match_indices("--") {
        let white = |c: Option<char>| c.is_none_or(char::is_whitespace);
        if white(line[..at].chars().next_back()) && white(line[at + 2..].chars().next()) {
            fields.push(line[start..at].trim());
            start = at + 2;
        }
    }
    fields.push(line[start..].trim());
    if fields == [""] {
        return Vec::new();
    }
    fields
}

fn node(line: usize, description: &str, costs: &str) -> Result<Node, ImportError> {
    let costs = key_values(line, costs)?;
    let get = |key: &str| {
        costs.get(key).copied().ok_or_else(|| {
            let message = format!(
                "`{key}=` is missing: a node has forward_compute_time, backward_compute_time, activation_size and parameter_size"
            );
            ImportError::new(line, message)
        })
    };
    let number = |key: &str| get(key).and_then(|text| self::number(line, key, text));
    let sum = |key: &str| -> Result<f64, ImportError> {
        let text = get(key)?;
        let list = text.strip_prefix('[').and_then(|t| t.strip_suffix(']'));
        list.unwrap_or(text)
            .split([';', ','])
            .filter(|part| list.is_none() || !part.trim().is_empty())
            .map(|part| self::number(line, key, part))
            .sum()
    };
    let times = ["forward_compute_time", "backward_compute_time"];
    let sizes = ["activation_size", "parameter_size"];
    Ok(Node {
        line,
        description: description.to_owned(),
        forward_ms: time(line, times[0], number(times[0])?)?,
        backward_ms: time(line, times[1], number(times[1])?)?,
        activation_bytes: size(line, sizes[0], sum(sizes[0])?)?,
        parameter_bytes: size(line, sizes[1], sum(sizes[1])?)?,
    })
}

fn number(line: usize, key: &str, text: &str) -> Result<f64, ImportError> {
    text.trim().parse().map_err(|_| {
        let message = format!("`{key}` is `{}`: write a number", text.trim());
        ImportError::new(line, message)
    })
}

/// `key=value` pairs between commas; a value in brackets may hold commas itself.
fn key_values(line: usize, text: &str) -> Result<HashMap<&str, &str>, ImportError> {
    let mut pairs = HashMap::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let Some((key, behind)) = rest.split_once('=') else {
            let message = format!("`{rest}` is no `key=value`");
            return Err(ImportError::new(line, message));
        };
        let behind = behind.trim_start();
        let end = if behind.starts_with('[') {
            let message = || ImportError::new(line, format!("`{key}=[` has no `]`"));
            behind.find(']').ok_or_else(message)? + 1
        } else {
            behind.find(',').unwrap_or(behind.len())
        };
        let (value, tail) = behind.split_at(end);
        if pairs.insert(key.trim(), value.trim()).is_some() {
            let message = format!("`{}` stands there twice", key.trim());
            return Err(ImportError::new(line, message));
        }
        rest = tail.trim_start().trim_start_matches(',').trim_start();
    }
    Ok(pairs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::import::draft::in_execution_order;

    const COSTS: &str = "forward_compute_time=1.5, backward_compute_time=3, activation_size=8.0, parameter_size=12.000";

    fn layers(text: &str) -> (Vec<LayerProfile>, Vec<crate::profile::Edge>) {
        let draft = parse(text).unwrap();
        in_execution_order(draft.layers, draft.edges).unwrap()
    }

    fn error(text: &str) -> String {
        match parse(text) {
            Err(error) => error.to_string(),
            Ok(draft) => in_execution_order(draft.layers, draft.edges)
                .unwrap_err()
                .to_string(),
        }
    }

    #[test]
    fn nodes_in_any_order_with_ragged_white_space() {
        let text = format!(
            "node3 -- Linear(a=1, b=(2, 3)) --   {COSTS}  -- stage_id=1\r\n  node2\t--  LSTM(  (x): y) -- forward_compute_time=1,backward_compute_time = 2 , activation_size=[6.0; 1.0; 1.0],parameter_size=0\n\n\
             node1 -- Input0 -- {COSTS}\n\tnode2 -- node3\n    node1 --   node2\n\tnode2 -- node3"
        );
        let (layers, edges) = layers(&text);
        let names: Vec<&str> = layers.iter().map(|l| l.name.as_str()).collect();
        assert_eq!(names, ["node2/LSTM", "node3/Linear"]);
        assert_eq!((layers[0].forward_ms, layers[0].backward_ms), (1.0, 2.0));
        // The list of outputs is summed; the edge that stands there twice counts once; the input is no layer.
        assert_eq!(layers[0].stash_bytes, 8);
        assert_eq!((edges.len(), edges[0].bytes), (1, 8));
        assert_eq!(layers[1].parameter_bytes, 12);
    }

    #[test]
    fn several_sources_and_sinks_and_unread_outputs() {
        let text = format!(
            "a -- Embedding(1) -- {COSTS}\nb -- Embedding(2) -- {COSTS}\nc -- Add -- {COSTS}\nd -- Loss -- {COSTS}\n\
             e -- __getitem__(1) -- {COSTS}\n\ta -- c\n\tb -- c\n\ta -- d\n\ta -- e\n"
        );
        let (layers, edges) = layers(&text);
        assert_eq!(layers.len(), 4);
        assert_eq!(edges.len(), 3);
        assert_eq!(edges.iter().filter(|e| e.tensor == "a").count(), 2);
    }

    #[test]
    fn the_batch_size_shows_in_one_input_of_whole_images() {
        let input = |bytes: u64| {
            format!(
                "node1 -- Input -- forward_compute_time=9, backward_compute_time=0, activation_size={bytes}.000, parameter_size=0\n"
            )
        };
        assert_eq!(
            parse(&input(IMAGE_BYTES * 128)).unwrap().batch_size,
            Some(128)
        );
        assert_eq!(parse(&input(IMAGE_BYTES + 1)).unwrap().batch_size, None);
        assert_eq!(parse(&input(0)).unwrap().batch_size, None);
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line() {
        let good = format!("a -- A -- {COSTS}\nb -- B -- {COSTS}\n");
        for (text, expected) in [
            (format!("{good}\ta -- z"), "3: there is no node `z`"),
            (
                format!("{good}a -- A -- {COSTS}"),
                "3: node `a` stands on line 1 already",
            ),
            (
                format!("{good}\ta -- b\n\tb -- a"),
                "this edge closes a cycle: a/A -> b/B -> a/A",
            ),
            (format!("{good}nonsense"), "3: 1 fields between ` -- `"),
            (
                format!("c -- C -- {}", COSTS.replace("3,", "x,")),
                "1: `backward_compute_time` is `x`: write a number",
            ),
            (
                format!("c -- C -- {}", COSTS.replace("1.5", "-1")),
                "1: `forward_compute_time` is -1",
            ),
            (
                format!("c -- C -- {}", COSTS.replace("8.0", "[8.0; ")),
                "1: `activation_size=[` has no `]`",
            ),
            (
                format!("c -- C -- {}", COSTS.replace("8.0", "nan")),
                "1: `activation_size` is NaN",
            ),
            (
                "c -- C -- forward_compute_time=1".to_owned(),
                "1: `backward_compute_time=` is missing",
            ),
            (
                format!("{good}i -- Input -- {COSTS}\n\ta -- i"),
                "3: `i` is an input",
            ),
        ] {
            let error = error(&text);
            assert!(error.contains(expected), "{error}");
        }
    }
}
