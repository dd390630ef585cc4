//! dp-run as a user meets it: results in files, errors in one line, interruptions.

mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use executor::data::array::Elements;
use executor::data::npy;
use planner::profile::Reading;
use serde_json::Value;
use tempfile::TempDir;

use common::{digits, lenet, mnist, norm_dropout_skip, plan, repository, shapes};

fn dp_run(dir: &TempDir, arguments: &[&str]) -> Output {
    command(dir, arguments).output().unwrap()
}

fn command(dir: &TempDir, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dp-run"));
    command.current_dir(dir.path()).args(arguments);
    command
}

/// A folder with `plan.json` for a model.
fn planned(model: &Path, batch: usize, replicas: &[usize]) -> TempDir {
    let dir = TempDir::new().unwrap();
    plan(model, batch, &shapes(replicas, 0))
        .save(&dir.path().join("plan.json"))
        .unwrap();
    dir
}

/// The run failed with one line on stderr that holds all of `parts`, and left nothing behind.
fn assert_error(dir: &TempDir, arguments: &[&str], code: i32, parts: &[&str]) {
    let before = fs::read_dir(dir.path()).unwrap().count();
    let output = dp_run(dir, arguments);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    for part in parts {
        assert!(stderr.contains(part), "no '{part}' in: {stderr}");
    }
    if code == 1 {
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        assert!(stderr.starts_with("error: "), "{stderr}");
    }
    assert!(output.stdout.is_empty());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), before);
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Writes an `.npy` of bytes.
fn write_bytes(path: &Path, shape: &[u64], values: &[u8]) {
    use npyz::WriterBuilder;
    let mut writer = npyz::WriteOptions::new()
        .default_dtype()
        .shape(shape)
        .writer(fs::File::create(path).unwrap())
        .begin_nd()
        .unwrap();
    writer.extend(values.iter().copied()).unwrap();
    writer.finish().unwrap();
}

#[test]
fn a_run_leaves_its_metrics_and_a_trained_model() {
    let dir = planned(&norm_dropout_skip(), 32, &[2, 1]);
    let data = digits();
    let arguments = [
        "plan.json",
        "--data",
        text(&data),
        "--epochs",
        "3",
        "--lr",
        "0.05",
        "--out",
        "trained.onnx",
        "--save-test",
        "test.npz",
        "--json",
    ];
    let output = dp_run(&dir, &arguments);
    assert!(output.status.success(), "{output:?}");
    let printed: Value = serde_json::from_slice(&output.stdout).unwrap();
    let summary = fs::read_to_string(dir.path().join("run/summary.json")).unwrap();
    let summary: Value = serde_json::from_str(&summary).unwrap();
    assert_eq!(printed, summary);
    for name in [
        "test_accuracy",
        "train_loss",
        "samples_per_s",
        "predicted_samples_per_s",
        "bubble_share",
        "wall_s",
        "bytes_sent",
    ] {
        assert!(summary[name].is_number(), "{name}");
    }
    assert!(
        summary["test_accuracy"].as_f64().unwrap() > 0.8,
        "{summary}"
    );
    assert_eq!(summary["peak_memory_bytes"].as_array().unwrap().len(), 3);

    // 1,797 samples: 270 held out, 47 full minibatches of 32 from the other 1,527.
    let metrics = fs::read_to_string(dir.path().join("run/metrics.csv")).unwrap();
    let mut lines = metrics.lines();
    assert_eq!(lines.next(), Some("step,epoch,loss,samples_per_s"));
    assert_eq!(lines.count(), 3 * 47);
    let epochs = fs::read_to_string(dir.path().join("run/epochs.csv")).unwrap();
    assert!(epochs.starts_with("epoch,train_loss,test_loss,test_accuracy,wall_s\n"));
    assert_eq!(epochs.lines().count(), 4);

    let test = fs::read(dir.path().join("test.npz")).unwrap();
    let array = |name| npy::read_from_archive("test.npz", &test, name).unwrap();
    assert_eq!(array("x").shape, [270, 1, 8, 8]);
    let (y, output) = (array("y"), array("output"));
    let (Elements::I64(labels), Elements::F32(logits)) = (&*y.elements, &*output.elements) else {
        panic!("labels are integers, outputs floats");
    };
    let right = labels
        .iter()
        .zip(logits.chunks(10))
        .filter(|&(&label, row)| row.iter().all(|&v| v <= row[label as usize]))
        .count();
    let accuracy = summary["test_accuracy"].as_f64().unwrap();
    assert!((right as f64 / 270.0 - accuracy).abs() < 1e-9);

    // The weights it wrote: without another step they give the same accuracy.
    let trained = dir.path().join("trained.onnx");
    let again = TempDir::new().unwrap();
    plan(&trained, 32, &shapes(&[1], 0))
        .save(&again.path().join("plan.json"))
        .unwrap();
    let arguments = [
        "plan.json",
        "--data",
        text(&data),
        "--steps",
        "1",
        "--lr",
        "1e-30",
        "--json",
    ];
    let output = dp_run(&again, &arguments);
    let repeated: Value = serde_json::from_slice(&output.stdout).unwrap();
    let difference =
        repeated["test_accuracy"].as_f64().unwrap() - summary["test_accuracy"].as_f64().unwrap();
    // One training forward moves the running statistics a little.
    assert!(difference.abs() < 0.03, "{repeated} {summary}");
}

#[test]
fn baselines_and_synthetic_data_run_the_same_plan() {
    let dir = planned(&lenet(), 8, &[2, 1]);
    for baseline in ["dp", "single"] {
        let arguments = [
            "plan.json",
            "--synthetic",
            "--steps",
            "7",
            "--baseline",
            baseline,
            "--json",
        ];
        let output = dp_run(&dir, &arguments);
        assert!(output.status.success(), "{output:?}");
        let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(summary["mode"], baseline);
        assert_eq!(summary["minibatches"], 7);
        let workers = summary["peak_memory_bytes"].as_array().unwrap().len();
        assert_eq!(workers, if baseline == "dp" { 3 } else { 1 });
        assert!(summary["test_accuracy"].is_null());
    }
}

#[test]
fn adam_and_mean_squared_error_train() {
    let dir = planned(&lenet(), 8, &[1, 1]);
    let arguments = [
        "plan.json",
        "--synthetic",
        "--steps",
        "40",
        "--loss",
        "mse",
        "--optimizer",
        "adam",
        "--lr",
        "0.001",
        "--init",
        "xavier",
        "--json",
    ];
    let output = dp_run(&dir, &arguments);
    assert!(output.status.success(), "{output:?}");
    let metrics = fs::read_to_string(dir.path().join("run/metrics.csv")).unwrap();
    let losses: Vec<f32> = metrics
        .lines()
        .skip(1)
        .map(|line| line.split(',').nth(2).unwrap().parse().unwrap())
        .collect();
    let mean = |part: &[f32]| part.iter().sum::<f32>() / part.len() as f32;
    assert!(mean(&losses[32..]) < 0.9 * mean(&losses[..8]), "{losses:?}");
}

/// The losses of a run of three minibatches, and what it says on stderr.
fn losses(dir: &TempDir, flags: &[&str]) -> (Vec<String>, String) {
    let data = digits();
    let fixed = [
        "plan.json",
        "--data",
        text(&data),
        "--steps",
        "3",
        "--seed",
        "5",
    ];
    let output = dp_run(dir, &[&fixed, flags].concat());
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{stderr}");
    let metrics = fs::read_to_string(dir.path().join("run/metrics.csv")).unwrap();
    let rows = metrics.lines().skip(1);
    let losses = rows.map(|row| row.split(',').nth(2).unwrap().to_owned());
    (losses.collect(), stderr)
}

#[test]
fn a_model_is_read_as_it_was_profiled_unless_a_flag_says_otherwise() {
    // Its dropout in inference form: the initializer `training` (field 9 is its raw data) is false.
    let mut bytes = fs::read(norm_dropout_skip()).unwrap();
    let on = b"training\x4a\x01\x01";
    let place = bytes.windows(on.len()).position(|part| part == on).unwrap();
    bytes[place + on.len() - 1] = 0;
    let folder = TempDir::new().unwrap();
    let model = folder.path().join("inference.onnx");
    fs::write(&model, bytes).unwrap();

    let unsaid = planned(&model, 16, &[1, 1]);
    let said = TempDir::new().unwrap();
    let mut read = plan(&model, 16, &shapes(&[1, 1], 0));
    read.reading = Some(Reading {
        training_form: true,
        ..Reading::default()
    });
    read.save(&said.path().join("plan.json")).unwrap();

    let (inference, _) = losses(&unsaid, &[]);
    let (training, _) = losses(&unsaid, &["--training-form"]);
    assert_ne!(inference, training);
    let (followed, stderr) = losses(&said, &[]);
    assert_eq!(followed, training);
    assert!(!stderr.contains("--training-form"), "{stderr}");
    let (agreed, stderr) = losses(&said, &["--training-form"]);
    assert_eq!(agreed, training);
    assert!(!stderr.contains("--training-form"), "{stderr}");
    let (contradicted, stderr) = losses(&said, &["--training-form=false"]);
    assert_eq!(contradicted, inference);
    let warning = "warning: --training-form=false where the model was profiled with true";
    assert!(stderr.contains(warning), "{stderr}");
}

#[test]
fn wrong_plans_and_models_are_refused() {
    let dir = planned(&lenet(), 8, &[1, 1]);
    let data = mnist();
    let other = norm_dropout_skip();
    let data_flags = ["--data", text(&data)];
    assert_error(
        &dir,
        &["missing.json", data_flags[0], data_flags[1]],
        1,
        &["missing.json"],
    );
    assert_error(
        &dir,
        &[
            "plan.json",
            "--model",
            text(&other),
            data_flags[0],
            data_flags[1],
        ],
        1,
        &["plan.json", "sha256", "--model", "norm_dropout_skip.onnx"],
    );
    let moved = fs::read_to_string(dir.path().join("plan.json"))
        .unwrap()
        .replace("lenet5.onnx", "gone.onnx");
    fs::write(dir.path().join("moved.json"), moved).unwrap();
    assert_error(
        &dir,
        &["moved.json", data_flags[0], data_flags[1]],
        1,
        &["gone.onnx", "--model"],
    );
    let mut wrong = plan(&lenet(), 8, &shapes(&[1, 1], 0));
    wrong.stages[1].layers.pop();
    wrong.save(&dir.path().join("short.json")).unwrap();
    assert_error(
        &dir,
        &["short.json", data_flags[0], data_flags[1]],
        1,
        &["no stage has the model's layer"],
    );
    let mut wrong = plan(&lenet(), 8, &shapes(&[1, 1], 0));
    let (first, second) = wrong.stages.split_at_mut(1);
    std::mem::swap(&mut first[0].layers, &mut second[0].layers);
    wrong.save(&dir.path().join("swapped.json")).unwrap();
    assert_error(
        &dir,
        &["swapped.json", data_flags[0], data_flags[1]],
        1,
        &["stage 0 reads", "stage 1 makes"],
    );
}

#[test]
fn wrong_data_is_refused_with_both_sides_named() {
    let dir = planned(&lenet(), 8, &[1, 1]);
    let small = digits();
    let data = mnist();
    assert_error(
        &dir,
        &["plan.json", "--data", "missing.npz"],
        1,
        &["missing.npz", "No such file"],
    );
    assert_error(
        &dir,
        &["plan.json", "--data", text(&small)],
        1,
        &["[1797, 8, 8]", "[8, 8]", "[1, 28, 28]"],
    );
    assert_error(
        &dir,
        &["plan.json", "--data", text(&data), "--x-name", "images"],
        1,
        &["no array images", "x, y", "--x-name"],
    );
    let not_data = repository("data/README.md");
    assert_error(
        &dir,
        &["plan.json", "--data", text(&not_data)],
        1,
        &["README.md", "neither .npz, .npy nor IDX"],
    );
    let images = dir.path().join("images.npy");
    let labels = dir.path().join("labels.npy");
    write_bytes(&images, &[10, 28, 28], &[1; 7840]);
    write_bytes(&labels, &[10], &[0, 1, 2, 3, 4, 5, 6, 7, 8, 10]);
    assert_error(
        &dir,
        &["plan.json", "--data", "images.npy"],
        1,
        &["images.npy", "--labels"],
    );
    assert_error(
        &dir,
        &[
            "plan.json",
            "--data",
            "images.npy",
            "--labels",
            "labels.npy",
        ],
        1,
        &["labels.npy", "from 0 to 10", "10 classes (0 to 9)"],
    );
    write_bytes(&labels, &[10], &[0; 10]);
    assert_error(
        &dir,
        &[
            "plan.json",
            "--data",
            "images.npy",
            "--labels",
            "labels.npy",
            "--test-fraction",
            "0.5",
        ],
        1,
        &["5 training samples", "minibatch of 8"],
    );
    let mut truncated = fs::read(&data).unwrap();
    truncated.truncate(100_000);
    fs::write(dir.path().join("cut.npz"), truncated).unwrap();
    assert_error(&dir, &["plan.json", "--data", "cut.npz"], 1, &["cut.npz"]);
}

#[test]
fn wrong_flags_are_usage_errors() {
    let dir = planned(&lenet(), 8, &[1, 1]);
    let data = mnist();
    let with = |flag: &'static str, value: &'static str, part: &'static str| {
        let arguments = ["plan.json", "--data", text(&data), flag, value];
        assert_error(&dir, &arguments, 2, &[part]);
    };
    with("--epochs", "0", "0 is not in 1..");
    with("--lr", "-1", "a number above 0");
    with("--momentum", "1", "below 1");
    with("--test-fraction", "1.5", "such as 0.15");
    with("--optimizer", "sgdd", "'sgd'");
    assert_error(&dir, &["plan.json"], 2, &["--data"]);
    let arguments = ["plan.json", "--data", text(&data), "--device", "cuda:99"];
    assert_error(&dir, &arguments, 1, &["cuda:99"]);
}

#[test]
fn a_diverging_run_stops_with_a_word() {
    let dir = planned(&lenet(), 8, &[2, 1]);
    let data = mnist();
    let arguments = [
        "plan.json",
        "--data",
        text(&data),
        "--lr",
        "1e6",
        "--out",
        "trained.onnx",
    ];
    let output = dp_run(&dir, &arguments);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(
        stderr.contains("diverged") && stderr.contains("--lr"),
        "{stderr}"
    );
    let errors = stderr.lines().filter(|line| !line.starts_with("warning: "));
    assert_eq!(errors.count(), 1, "{stderr}");
    assert!(!dir.path().join("trained.onnx").exists());
    assert!(!dir.path().join("run/summary.json").exists());
}

#[cfg(unix)]
#[test]
fn an_interrupted_run_writes_what_is_there() {
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;

    let dir = planned(&lenet(), 8, &[2, 1]);
    let data = mnist();
    let arguments = [
        "plan.json",
        "--data",
        text(&data),
        "--epochs",
        "1000",
        "--out",
        "trained.onnx",
    ];
    let mut child = command(&dir, &arguments)
        .stderr(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // A machine of few cores gets a warning first.
    let mut stderr = BufReader::new(child.stderr.take().unwrap())
        .lines()
        .skip_while(|line| {
            line.as_ref()
                .is_ok_and(|line| line.starts_with("warning: "))
        });
    // The first epoch has ended, the second is under way.
    let first = stderr.next().unwrap().unwrap();
    assert!(first.starts_with("epoch 1/1000"), "{first}");
    let killed = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status()
        .unwrap();
    assert!(killed.success());
    let rest: Vec<String> = stderr.map(Result::unwrap).collect();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{rest:?}");
    assert!(
        rest.iter().any(|line| line.starts_with("stopped after")),
        "{rest:?}"
    );
    assert!(dir.path().join("trained.onnx").exists());
    let summary = fs::read_to_string(dir.path().join("run/summary.json")).unwrap();
    let summary: Value = serde_json::from_str(&summary).unwrap();
    assert_eq!(summary["interrupted"], true);
    // Whole rounds of the replicated stage: 1,062 minibatches in the first epoch, an even number after.
    assert_eq!(summary["minibatches"].as_u64().unwrap() % 2, 0);
}

#[test]
fn a_plan_may_be_deeper_than_an_epoch_is_long() {
    let dir = planned(&lenet(), 8, &[1]);
    let path = dir.path().join("plan.json");
    let mut plan: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    plan["stages"][0]["depth"] = 1_000_000_000.into();
    fs::write(&path, plan.to_string()).unwrap();
    let output = dp_run(&dir, &["plan.json", "--synthetic", "--steps", "3"]);
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn the_trained_model_may_go_into_the_folder_that_the_run_makes() {
    let dir = planned(&lenet(), 8, &[1]);
    let data = mnist();
    let arguments = [
        "plan.json",
        "--data",
        text(&data),
        "--steps",
        "2",
        "--dir",
        "new/run",
        "--out",
        "new/run/t.onnx",
    ];
    let output = dp_run(&dir, &arguments);
    assert!(output.status.success(), "{output:?}");
    assert!(dir.path().join("new/run/t.onnx").exists());
}

#[test]
fn outputs_that_cannot_be_written_are_refused_before_training() {
    let dir = planned(&lenet(), 8, &[1, 1]);
    let data = mnist();
    for flag in ["--out", "--save-test"] {
        let arguments = ["plan.json", "--data", text(&data), flag, "missing/file"];
        assert_error(&dir, &arguments, 1, &["missing/file", "make it first"]);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_standard_output_is_one_line_and_loses_no_summary() {
    let dir = planned(&lenet(), 8, &[1, 1]);
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let output = command(&dir, &["plan.json", "--synthetic", "--steps", "2"])
        .stdout(full)
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("standard output"), "{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    assert!(dir.path().join("run/summary.json").exists());
}
