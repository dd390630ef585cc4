//! Emulated compute: waits as long as a profile says, tensors of its sizes, no model.

mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use planner::Plan;
use planner::file::sha256_of_file;
use serde_json::{Value, json};
use tempfile::TempDir;

use common::{plan_of, shapes};

/// Four layers: b and d read a's activations, b, c and d in turn each other's; c's output is integers. Times in
/// milliseconds.
fn profile() -> Value {
    let layer = |name: &str, parameters: u64| {
        json!({
            "name": name, "kind": "Linear", "forward_ms": 1.0, "backward_ms": 2.0, "step_ms": 0.5,
            "parameter_bytes": parameters, "stash_bytes": 0,
        })
    };
    let edge = |from: &str, to: &str, tensor: &str, bytes: u64, gradient: bool| json!({ "from": from, "to": to, "tensor": tensor, "bytes": bytes, "gradient": gradient });
    json!({
        "schema": "dp.profile/1",
        "model": { "file": "none.onnx", "sha256": "" },
        "device": "a device that is not here",
        "batch_size": 8,
        "threads": 1,
        "layers": [layer("a", 4000), layer("b", 0), layer("c", 40_000), layer("d", 400_000)],
        "edges": [
            edge("a", "b", "x", 1000, true),
            edge("a", "d", "x", 1000, true),
            edge("b", "c", "y", 400, true),
            edge("c", "d", "z", 77, false),
        ],
    })
}

/// A folder with `profile.json` and `plan.json`, the layers cut evenly into stages with these replicas.
fn planned(replicas: &[usize], delay: usize) -> TempDir {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("profile.json");
    fs::write(&path, profile().to_string()).unwrap();
    let names = ["a", "b", "c", "d"].map(str::to_owned);
    let file = json!({ "file": "profile.json", "sha256": sha256_of_file(&path).unwrap() });
    plan_of(&names, &file, 8, &shapes(replicas, delay))
        .save(&dir.path().join("plan.json"))
        .unwrap();
    dir
}

fn dp_run(dir: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dp-run"))
        .current_dir(dir)
        .args(arguments)
        .output()
        .unwrap()
}

fn emulated(dir: &Path, more: &[&str]) -> Value {
    let arguments = ["plan.json", "--emulate-compute", "--quiet"];
    let output = dp_run(dir, &[&arguments, more].concat());
    assert!(output.status.success(), "{output:?}");
    serde_json::from_str(&fs::read_to_string(dir.join("run/summary.json")).unwrap()).unwrap()
}

#[test]
fn every_byte_of_the_profile_is_sent_and_every_wait_passes() {
    let dir = planned(&[2, 1], 0);
    let summary = emulated(dir.path(), &["--steps", "12"]);
    // Per minibatch y forward and back, and x once to the stage of d and back. Rounds of two all-reduce a's weights.
    let messages = 12 * 2 * (400 + 1000);
    assert_eq!(summary["bytes_sent"], messages + 6 * 2 * 4000);
    // The second stage alone waits 6 ms of each minibatch and steps.
    let at_least = 12.0 * (2.0 * 3.0 + 2.0 * 0.5) / 1e3;
    let took = summary["training_s"].as_f64().unwrap();
    assert!(took >= at_least, "{took}");
    assert_eq!(summary["versions_held"].as_array().unwrap().len(), 3);
    assert_eq!(summary["emulated_compute"]["dilate"], 1.0);
    let late = &summary["emulated_compute"]["mean_lateness_s"];
    assert_eq!(late.as_array().unwrap().len(), 3);
    if cfg!(target_os = "linux") {
        assert!(summary["cpu_share"][0].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn nothing_is_said_of_losses() {
    let dir = planned(&[1, 1], 0);
    let summary = emulated(dir.path(), &["--steps", "3"]);
    assert!(summary["train_loss"].is_null() && summary["test_accuracy"].is_null());
    let metrics = fs::read_to_string(dir.path().join("run/metrics.csv")).unwrap();
    let mut rows = metrics.lines();
    assert_eq!(rows.next(), Some("step,epoch,loss,samples_per_s,compute"));
    assert!(rows.all(|row| row.contains(",,") && row.ends_with(",emulated")));
    let epochs = fs::read_to_string(dir.path().join("run/epochs.csv")).unwrap();
    assert!(epochs.lines().nth(1).unwrap().starts_with("1,,,,"));
    let table = dp_run(
        dir.path(),
        &["plan.json", "--emulate-compute", "--steps", "3"],
    );
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    assert!(table.contains("emulated, 1 times the profile's times"));
    assert!(!table.contains("loss"), "{table}");
}

#[test]
fn dilated_runs_take_longer_and_are_predicted_to() {
    let dir = planned(&[1, 1], 0);
    let summary = emulated(dir.path(), &["--steps", "4", "--dilate", "4"]);
    assert!(summary["training_s"].as_f64().unwrap() >= 4.0 * 4.0 * 7.0 / 1e3);
    let plan = Plan::load(&dir.path().join("plan.json")).unwrap();
    assert_eq!(
        summary["predicted_samples_per_s"],
        plan.throughput_samples_per_s / 4.0
    );
}

#[test]
fn data_parallelism_is_emulated_too() {
    let dir = planned(&[2, 1], 0);
    let summary = emulated(dir.path(), &["--steps", "6", "--baseline", "dp"]);
    // Two rounds of three; 2 (r - 1) W in each.
    assert_eq!(summary["bytes_sent"], 2 * 2 * 2 * 444_000);
    assert_eq!(summary["mode"], "dp");
}

#[test]
fn an_imported_profile_needs_no_model() {
    let dir = TempDir::new().unwrap();
    let node = |id: u32, kind: &str, bytes: u32, weights: u32| {
        format!(
            "node{id} -- {kind} -- forward_compute_time=1.000, backward_compute_time=2.000, activation_size={bytes}.000, parameter_size={weights}.000\n"
        )
    };
    let text = [
        node(1, "Linear(in_features=4)", 800, 4000),
        node(2, "ReLU()", 800, 0),
        node(3, "Linear(in_features=8)", 40, 8000),
        "\tnode1 -- node2\n\tnode2 -- node3\n".to_owned(),
    ];
    let path = dir.path().join("graph.txt");
    fs::write(&path, text.concat()).unwrap();
    let imported = planner::import::load(&path, None, Some(8)).unwrap().profile;
    let names: Vec<String> = imported.layers.iter().map(|l| l.name.clone()).collect();
    let file = json!({ "file": "graph.txt", "sha256": sha256_of_file(&path).unwrap() });
    plan_of(&names, &file, 8, &shapes(&[1, 2], 1))
        .save(&dir.path().join("plan.json"))
        .unwrap();
    let summary = emulated(dir.path(), &["--steps", "4"]);
    assert_eq!(summary["bytes_sent"], 4 * 2 * 800 + 2 * 2 * 8000);
}

#[test]
fn what_does_not_go_together_is_refused() {
    let dir = planned(&[1, 1], 0);
    let refused = |arguments: &[&str], code: i32, part: &str| {
        let output = dp_run(dir.path(), &[&["plan.json"], arguments].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{stderr}");
        assert!(stderr.contains(part), "no '{part}' in: {stderr}");
        assert!(!dir.path().join("run").exists());
    };
    refused(&["--emulate-compute", "--out", "t.onnx"], 2, "--out");
    refused(&["--dilate", "2", "--synthetic"], 2, "--synthetic");
    refused(
        &["--emulate-compute", "--dilate", "0"],
        2,
        "a factor above 0",
    );
    refused(&["--emulate-compute", "missing.json"], 1, "missing.json");
    let mut other = profile();
    other["layers"][3]["name"] = "e".into();
    other["edges"] = json!([]);
    fs::write(dir.path().join("other.json"), other.to_string()).unwrap();
    refused(
        &["--emulate-compute", "other.json"],
        1,
        "the layer 'd', which the profile does not have",
    );
    let mut tied = profile();
    tied["tied"] = json!([{ "tensor": "w", "parameter_bytes": 4000, "layers": ["a", "d"] }]);
    fs::write(dir.path().join("tied.json"), tied.to_string()).unwrap();
    refused(
        &["--emulate-compute", "tied.json"],
        1,
        "stages 0 and 1 both use the weight 'w'",
    );
    fs::write(dir.path().join("profile.json"), other.to_string()).unwrap();
    refused(&["--emulate-compute"], 1, "has changed since");
}
