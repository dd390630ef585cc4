//! Graphs of real exports and of the cases with known answers; skipped where these are not at hand.

use std::path::PathBuf;

use super::*;
use crate::onnx::Model;

fn shared(path: &str) -> Option<PathBuf> {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared")).join(path);
    if !path.exists() {
        eprintln!("skipped: {} is not there", path.display());
        return None;
    }
    Some(path)
}

fn batch(batch: usize) -> BuildOptions {
    BuildOptions {
        batch: Some(batch),
        ..BuildOptions::default()
    }
}

#[test]
fn every_export_builds_or_names_what_is_missing() {
    let Some(folder) = shared("models") else {
        return;
    };
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let model = Model::open(&path).unwrap();
        match Graph::build(&model, &batch(4)) {
            Ok(graph) => {
                println!(
                    "{}: {} layers, {} nodes, {} parameters, {} states, batch {}",
                    path.display(),
                    graph.layers().len(),
                    graph.nodes().len(),
                    graph.parameters().len(),
                    graph.states().len(),
                    graph.batch_size()
                );
            }
            Err(error) => println!("{error}"),
        }
    }
}
