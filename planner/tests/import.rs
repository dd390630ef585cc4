//! Profiles of other planners through dp-plan: read directly, converted, refused.

use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use planner::Profile;
use serde_json::Value;

/// The other planners' own profiles, which are not part of this repository.
const PEERS: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../shared/data/peer-profiles"
);

const SMALL: &str = "\
node1 -- Input -- forward_compute_time=9.0, backward_compute_time=0.0, activation_size=19267584.0, parameter_size=0.0
node2 -- Conv2d(3, 64) -- forward_compute_time=5.0, backward_compute_time=9.0, activation_size=1000000.0, parameter_size=40000.0
node3 -- Linear(64, 10) -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=40.0, parameter_size=400000000.0
\tnode1 -- node2
\tnode2 -- node3
";

fn dp_plan() -> Command {
    Command::cargo_bin("dp-plan").unwrap()
}

fn stdout(command: &mut Command) -> String {
    let assert = command.assert().success();
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

/// The peer's file, or none with a line that says so.
fn peer(name: &str) -> Option<PathBuf> {
    let path = Path::new(PEERS).join(name);
    if path.exists() {
        return Some(path);
    }
    eprintln!("skipped: {} is not there", path.display());
    None
}

fn convert(source: &Path, flags: &[&str]) -> Profile {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("profile.json");
    let mut command = dp_plan();
    command.arg("convert").arg(source).args(flags);
    stdout(command.arg("-o").arg(&target));
    Profile::load(&target).unwrap()
}

/// Milliseconds forward and backward, and bytes of weights.
fn totals(profile: &Profile) -> (f64, f64, u64) {
    let layers = &profile.layers;
    (
        layers.iter().map(|l| l.forward_ms).sum(),
        layers.iter().map(|l| l.backward_ms).sum(),
        layers.iter().map(|l| l.parameter_bytes).sum(),
    )
}

#[test]
fn a_pipedream_profile_is_planned_as_its_conversion_is() {
    let folder = tempfile::tempdir().unwrap();
    let graph = folder.path().join("graph.txt");
    fs::write(&graph, SMALL).unwrap();
    let profile = folder.path().join("profile.json");
    stdout(dp_plan().arg("convert").arg(&graph).arg("-o").arg(&profile));
    let converted = Profile::load(&profile).unwrap();
    assert_eq!(converted.batch_size, 32);
    let layers: Vec<&str> = converted.layers.iter().map(|l| l.name.as_str()).collect();
    assert_eq!(layers, ["node2/Conv2d", "node3/Linear"]);
    let plan = |file: &Path| -> Value {
        let mut command = dp_plan();
        command
            .arg(file)
            .args(["--gpus", "4", "--bw", "10Gbps", "--json"]);
        serde_json::from_str(&stdout(&mut command)).unwrap()
    };
    let (direct, by_way) = (plan(&graph), plan(&profile));
    assert_eq!(direct["stages"], by_way["stages"]);
    assert_eq!(
        direct["throughput_samples_per_s"],
        by_way["throughput_samples_per_s"]
    );
    // The weights are all in the last layer: it is not replicated.
    assert_eq!(direct["stages"][1]["replicas"], 1);
}

#[test]
fn the_batch_size_can_be_given_where_the_file_does_not_tell_it() {
    let folder = tempfile::tempdir().unwrap();
    let graph = folder.path().join("graph.txt");
    fs::write(&graph, SMALL.replace("19267584.0", "0.0")).unwrap();
    assert_eq!(convert(&graph, &["--batch", "7"]).batch_size, 7);
    let mut command = dp_plan();
    command.arg(&graph).args(["--gpus", "2", "--bw", "10Gbps"]);
    let assert = command.assert().success();
    let note = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert!(note.contains("does not tell its batch size") && note.contains("--batch"));
}

#[test]
fn a_batch_size_that_contradicts_the_file_is_said_and_so_is_one_that_is_inferred() {
    let folder = tempfile::tempdir().unwrap();
    let graph = folder.path().join("graph.txt");
    fs::write(&graph, SMALL).unwrap();
    let notes = |flags: &[&str]| {
        let plan = folder.path().join("plan.json");
        let mut command = dp_plan();
        command.arg(&graph).args(["--gpus", "2", "--bw", "10Gbps"]);
        let assert = command.args(flags).arg("-o").arg(plan).assert().success();
        String::from_utf8(assert.get_output().stderr.clone()).unwrap()
    };
    assert!(notes(&[]).contains("a batch size of 32 shows in its sizes"));
    let other = notes(&["--batch", "7"]);
    assert!(other.contains("32 samples, not of --batch 7"), "{other}");
    // Such a plan names no layers that dp-run could find.
    assert!(other.contains("dp-run needs a plan from a profile of dp-profile"));
    assert_eq!(notes(&["--quiet"]), "");
}

#[test]
fn what_is_wrong_in_a_foreign_file_is_one_line_with_its_place() {
    let folder = tempfile::tempdir().unwrap();
    for (name, text, flags, expected) in [
        (
            "graph.txt",
            SMALL.replace("\tnode2", "\tnode7"),
            &[][..],
            "graph.txt:5: there is no node `node7` (read as a PipeDream profile)",
        ),
        (
            "broken.json",
            "{\"nodes\": [\n{\"TMPCs\": 1}], \"edges\": []}".to_owned(),
            &[],
            "broken.json:2: ",
        ),
        (
            "graph.txt",
            SMALL.to_owned(),
            &["--from", "piper"],
            "graph.txt:1: ",
        ),
        (
            "empty.txt",
            String::new(),
            &["--from", "pipedream"],
            "empty.txt: `layers` is empty",
        ),
    ] {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        let target = folder.path().join("profile.json");
        let mut command = dp_plan();
        command
            .arg("convert")
            .arg(&path)
            .args(flags)
            .arg("-o")
            .arg(&target);
        let assert = command.assert().code(1);
        let error = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
        assert!(error.contains(expected), "{error}");
        assert!(!target.exists());
    }
}

#[test]
fn every_profile_that_pipedream_ships_is_read_whole() {
    for model in [
        "alexnet",
        "gnmt",
        "nasnetamobile",
        "resnet50",
        "resnext101",
        "squeezenet1_0",
        "vgg16",
    ] {
        let Some(path) = peer(&format!("pipedream/{model}.graph.txt")) else {
            return;
        };
        let profile = convert(&path, &[]);
        // Sums taken from the text itself, without a parser: inputs and unread outputs cost nothing or are no layers.
        let text = fs::read_to_string(&path).unwrap();
        let sum = |key: &str| -> f64 {
            let nodes = text.lines().filter(|l| !l.contains(" -- Input"));
            nodes
                .filter_map(|line| line.split_once(key)?.1.split(", ").next())
                .map(|number| {
                    number
                        .split(" -- ")
                        .next()
                        .unwrap()
                        .trim()
                        .parse::<f64>()
                        .unwrap()
                })
                .sum()
        };
        let (forward, backward, weights) = totals(&profile);
        assert!(
            (forward - sum("forward_compute_time=")).abs() < 1e-6,
            "{model}"
        );
        assert!(
            (backward - sum("backward_compute_time=")).abs() < 1e-6,
            "{model}"
        );
        assert!(
            (weights as f64 - sum("parameter_size=")).abs() < 1e-6,
            "{model}"
        );
    }
}

#[test]
fn pipedreams_batch_sizes_and_lists_of_outputs() {
    let (Some(vgg), Some(gnmt)) = (
        peer("pipedream/vgg16.graph.txt"),
        peer("pipedream/gnmt.graph.txt"),
    ) else {
        return;
    };
    assert_eq!(convert(&vgg, &[]).batch_size, 128);
    let gnmt = convert(&gnmt, &[]);
    let lstm = gnmt.layers.iter().find(|l| l.name == "node7/LSTM").unwrap();
    assert_eq!(lstm.stash_bytes, 6_291_456 + 131_072 + 131_072);
}

#[test]
fn every_dnn_partitioning_workload_is_read_whole() {
    for (model, layers) in [
        ("LayerGraphs_bert24_inference", 32),
        ("LayerGraphs_bert24_training", 32),
        ("LayerGraphs_resnet50_inference", 177),
        ("LayerGraphs_resnet50_training", 177),
        ("OperatorGraphs_bert_l-3_inference", 0),
        ("OperatorGraphs_bert_l-3_training", 0),
        ("OperatorGraphs_resnet50_inference", 0),
        ("OperatorGraphs_resnet50_training", 0),
    ] {
        let Some(path) = peer(&format!("dnn-partitioning/{model}.json")) else {
            return;
        };
        let profile = convert(&path, &[]);
        if layers > 0 {
            assert_eq!(profile.layers.len(), layers, "{model}");
        }
        let file: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        let latencies: f64 = file["nodes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|node| node["fpgaLatency"].as_f64().unwrap())
            .sum();
        let (forward, backward, _) = totals(&profile);
        assert!(
            (forward + backward - latencies).abs() < 1e-6 * latencies,
            "{model}"
        );
        let trains = model.ends_with("training");
        assert_eq!(backward > 0.0, trains, "{model}");
        assert_eq!(profile.edges.iter().any(|e| e.gradient), trains, "{model}");
    }
}

#[test]
fn piper_profiles_tell_forward_from_backward() {
    let (Some(bert), Some(resnet)) = (peer("piper/bert32a100.json"), peer("piper/resnet.json"))
    else {
        return;
    };
    let bert = convert(&bert, &[]);
    assert_eq!((bert.layers.len(), bert.batch_size), (37, 1));
    // 30.492 ms, of which one forward is 10.193.
    let named = |name: &str| bert.layers.iter().find(|l| l.name == name).unwrap();
    let block = named("3/ParallelTransformerLayer");
    assert!((block.forward_ms - 10.193).abs() < 1e-9);
    assert!((block.backward_ms - 20.299).abs() < 1e-9);
    assert_eq!(convert(&resnet, &[]).layers.len(), 177);
}
