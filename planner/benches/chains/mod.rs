//! Profiles of random chains.

use planner::profile::{Edge, FileRef, LayerProfile, PROFILE_SCHEMA, Profile};

/// A linear congruential generator (Knuth's MMIX constants): the same layers on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// The reference to a file that nobody reads.
pub fn file(name: &str) -> FileRef {
    FileRef {
        file: name.to_owned(),
        sha256: "0".repeat(64),
    }
}

/// A profile of random layers, each reading the one before.
pub fn chain(layers: usize) -> Profile {
    let mut random = Random(1);
    let layer = |i: usize, random: &mut Random| {
        let forward_ms = 0.1 + random.below(1000) as f64 / 500.0;
        LayerProfile {
            name: format!("layer{i}"),
            kind: "Gemm".to_owned(),
            forward_ms,
            backward_ms: 2.0 * forward_ms,
            parameter_bytes: random.below(20_000_000),
            stash_bytes: random.below(10_000_000),
            ..LayerProfile::default()
        }
    };
    let layers: Vec<LayerProfile> = (0..layers).map(|i| layer(i, &mut random)).collect();
    let edges = (1..layers.len())
        .map(|i| Edge {
            from: layers[i - 1].name.clone(),
            to: layers[i].name.clone(),
            tensor: format!("tensor{i}"),
            bytes: random.below(5_000_000),
            gradient: true,
            gradient_bytes: None,
        })
        .collect();
    Profile {
        schema: PROFILE_SCHEMA.to_owned(),
        model: file("random.onnx"),
        device: "none".to_owned(),
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
