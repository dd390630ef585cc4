//! Elements of a JSON file together with the lines they stand on.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use super::ImportError;

/// The two lists that every foreign JSON format has; what else is in the file is not needed.
#[derive(Deserialize)]
struct Lists<'a> {
    #[serde(borrow)]
    nodes: Vec<&'a RawValue>,
    #[serde(borrow)]
    edges: Vec<&'a RawValue>,
}

/// Elements with the lines, from 1, on which they begin.
pub(super) type Lined<T> = Vec<(usize, T)>;

/// Parses the `nodes` and `edges` of the file.
///
/// # Errors
/// Where the text is no JSON or an element lacks a field.
pub(super) fn nodes_and_edges<N: DeserializeOwned, E: DeserializeOwned>(
    text: &str,
) -> Result<(Lined<N>, Lined<E>), ImportError> {
    let lists: Lists =
        serde_json::from_str(text).map_err(|error| at(error.line().max(1), &error))?;
    let mut lines = Lines {
        text,
        offset: 0,
        line: 1,
    };
    // The lists may stand in either order, and lines are counted in one sweep.
    let mut sweep = lists.nodes.iter().chain(&lists.edges).collect::<Vec<_>>();
    sweep.sort_by_key(|raw| lines.offset_of(raw));
    let line_of: std::collections::HashMap<usize, usize> = sweep
        .into_iter()
        .map(|raw| (lines.offset_of(raw), lines.line_of(raw)))
        .collect();
    let line = |raw: &RawValue| line_of[&lines.offset_of(raw)];
    let nodes = lists.nodes.iter().map(|raw| element(line(raw), raw));
    let nodes = nodes.collect::<Result<_, _>>()?;
    let edges = lists.edges.iter().map(|raw| element(line(raw), raw));
    Ok((nodes, edges.collect::<Result<_, _>>()?))
}

fn element<T: DeserializeOwned>(line: usize, raw: &RawValue) -> Result<(usize, T), ImportError> {
    let value = serde_json::from_str(raw.get())
        .map_err(|error| at(line + error.line().saturating_sub(1), &error))?;
    Ok((line, value))
}

fn at(line: usize, error: &serde_json::Error) -> ImportError {
    let text = error.to_string();
    // The line stands in front of the message already.
    let message = text
        .rsplit_once(" at line ")
        .map_or(text.as_str(), |(message, _)| message);
    ImportError::new(line, message)
}

/// Counts lines from element to element.
struct Lines<'a> {
    text: &'a str,
    offset: usize,
    line: usize,
}

impl Lines<'_> {
    /// Where in the text the element begins: it borrows from there.
    fn offset_of(&self, raw: &RawValue) -> usize {
        raw.get().as_ptr() as usize - self.text.as_ptr() as usize
    }

    /// The element's line; elements are asked for in the order in which they stand.
    fn line_of(&mut self, raw: &RawValue) -> usize {
        let offset = self.offset_of(raw);
        let between = &self.text.as_bytes()[self.offset..offset];
        self.line += between.iter().filter(|&&byte| byte == b'\n').count();
        self.offset = offset;
        self.line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    struct Id {
        id: usize,
    }

    #[test]
    fn elements_know_their_lines_in_either_order_of_the_lists() {
        let text =
            "{\n\"edges\": [\n{\"id\": 3}],\n\"more\": 1, \"nodes\": [{\"id\": 1},\n{\"id\": 2}]}";
        let (nodes, edges) = nodes_and_edges::<Id, Id>(text).unwrap();
        let shown: Vec<_> = nodes
            .iter()
            .chain(&edges)
            .map(|(l, e)| (*l, e.id))
            .collect();
        assert_eq!(shown, [(4, 1), (5, 2), (3, 3)]);
    }

    #[test]
    fn a_missing_field_is_told_with_its_line() {
        let text = "{\"edges\": [],\n\"nodes\": [{\"id\": 1},\n{\n\"is\": 2}]}";
        let error = nodes_and_edges::<Id, Id>(text).unwrap_err().to_string();
        assert_eq!(error, "4: missing field `id`");
        let error = nodes_and_edges::<Id, Id>("{\n\"nodes\": [").unwrap_err();
        assert_eq!(error.line, 2);
    }
}
