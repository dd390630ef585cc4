//! dp-profile as its users meet it.

use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use planner::Profile;
use planner::profile::{LossKind, Reading};

fn dp_profile() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dp-profile"));
    command.env("NO_COLOR", "1");
    command
}

fn zoo(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../models/zoo")
        .join(model)
}

/// Standard error of a run that must fail with `code`, in one line, without a panic and without output.
fn failure(arguments: &[&str], code: i32) -> String {
    let output = dp_profile().args(arguments).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    assert!(output.stdout.is_empty());
    if code == 1 {
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
    stderr
}

#[test]
fn weights_that_layers_share_are_named() {
    let model =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/cases/g4_tied_embedding.onnx");
    if !model.exists() {
        eprintln!("skipped: {} is not there", model.display());
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let profile = directory.path().join("profile.json");
    let run = dp_profile()
        .arg(&model)
        .args(["--budget", "50ms", "-o"])
        .arg(&profile)
        .output();
    assert!(run.unwrap().status.success());
    let profile = Profile::load(&profile).unwrap();
    assert_eq!(profile.tied.len(), 1);
    let tied = &profile.tied[0];
    assert_eq!((tied.tensor.as_str(), tied.parameter_bytes), ("E", 60));
    assert_eq!(tied.layers, ["embed", "head"]);
}

#[test]
fn lenet_gives_a_profile_that_the_planner_accepts() {
    let directory = tempfile::tempdir().unwrap();
    let [profile, csv] = ["profile.json", "layers.csv"].map(|name| directory.path().join(name));
    let output = dp_profile()
        .arg(zoo("lenet5.onnx"))
        .args(["--batch", "4", "--budget", "1s", "--csv"])
        .arg(&csv)
        .arg("-o")
        .arg(&profile)
        .output()
        .unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(
        stdout.contains("whole step") && stdout.contains("/3/Conv"),
        "{stdout}"
    );

    let profile = Profile::load(&profile).unwrap();
    assert_eq!(profile.batch_size, 4);
    // Four images of 28 x 28 floats, read by the first layer only.
    let inputs: Vec<u64> = profile.layers.iter().map(|l| l.input_bytes).collect();
    assert_eq!(inputs[0], 4 * 28 * 28 * 4);
    assert!(inputs[1..].iter().all(|&bytes| bytes == 0), "{inputs:?}");
    let names: Vec<&str> = profile
        .layers
        .iter()
        .map(|layer| layer.name.as_str())
        .collect();
    assert!(
        names.contains(&"/0/Conv") && names.contains(&"/11/Gemm"),
        "{names:?}"
    );
    let parameters: u64 = profile
        .layers
        .iter()
        .map(|layer| layer.parameter_bytes)
        .sum();
    assert_eq!(parameters, 4 * 61_706, "LeNet-5 has 61,706 weights");
    for layer in &profile.layers {
        assert_eq!(
            layer.optimizer_bytes, layer.parameter_bytes,
            "SGD with momentum keeps one velocity per weight"
        );
        assert_eq!(
            layer.forward_samples_ms.len(),
            profile.whole_step_samples_ms.len()
        );
        assert!(
            layer.forward_ms > 0.0 && layer.backward_ms > 0.0,
            "{layer:?}"
        );
    }
    // The first convolution's activations after the pool: 4 x 6 x 14 x 14 floats.
    assert!(
        profile
            .edges
            .iter()
            .any(|edge| edge.bytes == 4 * 6 * 14 * 14 * 4),
        "{:?}",
        profile.edges
    );
    assert_eq!(
        fs::read_to_string(csv).unwrap().lines().count(),
        profile.layers.len() + 1
    );
}

#[test]
fn json_on_stdout_is_the_profile() {
    let output = dp_profile()
        .arg(zoo("mlp_digits.onnx"))
        .args(["--batch", "2", "--budget", "200ms", "--json"])
        .args(["--untie", "--bn", "train", "--loss", "mse"])
        .output()
        .unwrap();
    let profile: Profile = serde_json::from_slice(&output.stdout).unwrap();
    profile.validate().unwrap();
    // How the model was read stands in it.
    let reading = Reading {
        untie: true,
        train_batch_norm: true,
        loss: LossKind::Mse,
        ..Reading::default()
    };
    assert_eq!(profile.reading, Some(reading));
}

#[test]
fn a_missing_or_broken_model_is_one_line_with_its_path() {
    assert!(failure(&["no-such.onnx"], 1).contains("no-such.onnx"));

    let directory = tempfile::tempdir().unwrap();
    let cut = directory.path().join("cut.onnx");
    let whole = fs::read(zoo("lenet5.onnx")).unwrap();
    fs::write(&cut, &whole[..whole.len() / 2]).unwrap();
    let profile = directory.path().join("profile.json");
    let stderr = failure(&[cut.to_str().unwrap(), "-o", profile.to_str().unwrap()], 1);
    assert!(stderr.contains("cut.onnx"), "{stderr}");
    assert!(!profile.exists(), "nothing may be written");
}

#[test]
fn flags_without_sense_are_usage_errors_with_a_hint() {
    let model = zoo("lenet5.onnx");
    let model = model.to_str().unwrap();
    assert!(failure(&[model, "--budget", "60"], 2).contains("60s"));
    assert!(failure(&[model, "--batch", "0"], 2).contains("--batch"));
    assert!(failure(&[model, "--threads", "0"], 2).contains("--threads"));
    assert!(failure(&[model, "--dim", "batch"], 2).contains("NAME=SIZE"));
    assert!(failure(&[], 2).contains("MODEL.onnx"));
}

#[test]
fn a_device_that_is_not_there_is_one_line() {
    let model = zoo("lenet5.onnx");
    let model = model.to_str().unwrap();
    assert!(failure(&[model, "--device", "tpu"], 1).contains("cuda:N"));
    let stderr = failure(&[model, "--device", "cuda:0", "--budget", "1s"], 1);
    assert!(stderr.contains("--device cpu"), "{stderr}");
}

#[test]
fn an_output_path_that_cannot_be_written_is_named() {
    let stderr = failure(
        &[
            zoo("mlp_digits.onnx").to_str().unwrap(),
            "--batch",
            "2",
            "--budget",
            "100ms",
            "-o",
            "no/such/directory/profile.json",
        ],
        1,
    );
    assert!(stderr.contains("no/such/directory"), "{stderr}");
}

#[test]
fn a_batch_beyond_the_machine_is_refused() {
    let model = zoo("mlp_digits.onnx");
    let stderr = failure(&[model.to_str().unwrap(), "--batch", "4000000000"], 1);
    assert!(stderr.contains("smaller --batch"), "{stderr}");
}
