//! Small profiles for tests.

use crate::profile::{Edge, FileRef, LayerProfile, PROFILE_SCHEMA, Profile};

/// A chain `L0 -> L1 -> ...`: a third of each time forward, the rest backward.
pub fn chain(compute_ms: &[f64], parameter_bytes: &[u64], edge_bytes: &[u64]) -> Profile {
    assert_eq!(compute_ms.len(), parameter_bytes.len());
    assert_eq!(compute_ms.len(), edge_bytes.len() + 1);
    let layers = compute_ms
        .iter()
        .zip(parameter_bytes)
        .enumerate()
        .map(|(i, (ms, &parameter_bytes))| LayerProfile {
            name: format!("L{i}"),
            kind: "Gemm".to_owned(),
            forward_ms: ms / 3.0,
            backward_ms: ms * 2.0 / 3.0,
            parameter_bytes,
            ..LayerProfile::default()
        })
        .collect();
    let edges = edge_bytes
        .iter()
        .enumerate()
        .map(|(i, &bytes)| Edge {
            from: format!("L{i}"),
            to: format!("L{}", i + 1),
            tensor: format!("t{i}"),
            bytes,
            gradient: true,
            gradient_bytes: None,
        })
        .collect();
    Profile {
        schema: PROFILE_SCHEMA.to_owned(),
        model: FileRef {
            file: "model.onnx".to_owned(),
            sha256: "0".repeat(64),
        },
        device: "cpu".to_owned(),
        batch_size: 32,
        threads: 1,
        optimizer: None,
        reading: None,
        layers,
        edges,
        tied: Vec::new(),
        whole_step_ms: None,
        whole_step_samples_ms: Vec::new(),
        communication_s_per_byte: 0.0,
    }
}
