//! dp-plan on clusters of servers: what the flags and a cluster file lead to, and what is refused.

use std::fs;
use std::path::PathBuf;

use assert_cmd::Command;
use planner::Plan;
use serde_json::{Value, json};

/// Layers of (seconds, weights), tensors between them in bytes.
fn profile(folder: &tempfile::TempDir, layers: &[(f64, u64)], bytes: &[u64]) -> PathBuf {
    let layer = |(i, &(seconds, weights)): (usize, &(f64, u64))| {
        json!({
            "name": format!("L{i}"), "kind": "Gemm",
            "forward_ms": seconds * 1e3 / 3.0, "backward_ms": seconds * 2e3 / 3.0,
            "parameter_bytes": weights, "stash_bytes": 0,
        })
    };
    let edge = |(i, &bytes): (usize, &u64)| {
        json!({
            "from": format!("L{i}"), "to": format!("L{}", i + 1), "tensor": format!("t{i}"), "bytes": bytes,
        })
    };
    let text = json!({
        "schema": "dp.profile/1",
        "model": {"file": "model.onnx", "sha256": "0".repeat(64)},
        "device": "cpu", "batch_size": 32, "threads": 1,
        "layers": layers.iter().enumerate().map(layer).collect::<Vec<Value>>(),
        "edges": bytes.iter().enumerate().map(edge).collect::<Vec<Value>>(),
    });
    let path = folder.path().join("profile.json");
    fs::write(&path, text.to_string()).unwrap();
    path
}

fn run(arguments: &[&str], profile: &PathBuf) -> (i32, String, String) {
    let output = Command::cargo_bin("dp-plan")
        .unwrap()
        .arg(profile)
        .args(arguments)
        .output()
        .unwrap();
    (
        output.status.code().unwrap(),
        String::from_utf8(output.stdout).unwrap(),
        String::from_utf8(output.stderr).unwrap(),
    )
}

fn plan(arguments: &[&str], profile: &PathBuf) -> Value {
    let arguments: Vec<&str> = arguments.iter().copied().chain(["--json"]).collect();
    let (code, out, err) = run(&arguments, profile);
    assert_eq!(code, 0, "{err}");
    serde_json::from_str(&out).unwrap()
}

/// Stages A, B, C want 1, 2 and 1 devices, and A sends C nearly all there is: A and C together in one server, B in the
/// other, leave only what B reads and writes on the network cards.
#[test]
fn pipeline_order_over_the_servers_is_not_the_best_order() {
    let folder = tempfile::tempdir().unwrap();
    let path = profile(&folder, &[(1.0, 0), (2.0, 0), (1.0, 0)], &[1000, 1000]);
    let mut value: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    value["edges"].as_array_mut().unwrap().push(json!({
        "from": "L0", "to": "L2", "tensor": "skip", "bytes": 1_000_000_000,
    }));
    fs::write(&path, value.to_string()).unwrap();
    let servers = [
        "--gpus",
        "4",
        "--gpus-per-server",
        "2",
        "--bw",
        "1MB/s",
        "--inner-bw",
        "100GB/s",
    ];
    let plan = plan(
        &[&servers[..], &["--stages", "L0:1,L1:2,L2:1"]].concat(),
        &path,
    );
    assert!((plan["bottleneck_s"].as_f64().unwrap() - 1.0).abs() < 1e-9);
    let servers = |stage: usize| plan["stages"][stage]["servers"].clone();
    assert_eq!(servers(0), servers(2));
    assert_ne!(servers(0)[0], servers(1)[0]);
}

#[test]
fn replicas_span_servers_and_their_ring_loads_the_network_cards() {
    let folder = tempfile::tempdir().unwrap();
    let path = profile(&folder, &[(9.0, 1000)], &[]);
    let out = folder.path().join("plan.json");
    let servers = [
        "--gpus",
        "6",
        "--gpus-per-server",
        "2",
        "--bw",
        "1kB/s",
        "--inner-bw",
        "1MB/s",
    ];
    let out_text = out.to_str().unwrap().to_owned();
    let plan = plan(&[&servers[..], &["-o", &out_text]].concat(), &path);
    assert_eq!(plan["stages"][0]["servers"], json!([0, 0, 1, 1, 2, 2]));
    assert_eq!(plan["optimal"], json!(true));
    for card in plan["cards"].as_array().unwrap() {
        // 2 * 5/36 of the weights each way.
        assert!((card["bytes_sent"].as_f64().unwrap() - 1000.0 * 10.0 / 36.0).abs() < 1e-9);
        assert!((card["load_s"].as_f64().unwrap() - 10.0 / 36.0).abs() < 1e-9);
    }
    // What was written is read again, and a replica on a device that there is not is refused.
    let loaded = Plan::load(&out).unwrap();
    assert_eq!(loaded.cluster.servers.len(), 3);
    let text = fs::read_to_string(&out).unwrap();
    fs::write(
        &out,
        text.replacen(
            "\"servers\": [\n        0,\n        0,",
            "\"servers\": [\n        0,\n        9,",
            1,
        ),
    )
    .unwrap();
    let error = Plan::load(&out).unwrap_err().to_string();
    assert!(
        error.contains("stage 0: its replicas must be on devices of the cluster"),
        "{error}"
    );
}

#[test]
fn a_slow_device_is_left_idle_where_it_would_hold_the_others_up() {
    let folder = tempfile::tempdir().unwrap();
    let path = profile(&folder, &[(6.0, 0)], &[]);
    let cluster = folder.path().join("cluster.toml");
    fs::write(
        &cluster,
        "bw = \"10Gbps\"\n[[server]]\nname = \"fast\"\ngpus = 2\n[[server]]\nname = \"slow\"\ngpus = 1\nspeed = 0.25\n",
    )
    .unwrap();
    let plan = plan(&["--cluster", cluster.to_str().unwrap()], &path);
    // Three in a round robin would go at the slow one's pace: 6 / 0.25 / 3 = 8 s.
    assert_eq!(plan["workers"], json!(2));
    assert!((plan["bottleneck_s"].as_f64().unwrap() - 3.0).abs() < 1e-9);
    assert!((plan["period_s"].as_f64().unwrap() - 3.0).abs() < 1e-9);
    assert_eq!(plan["optimal"], json!(true));
    assert!(
        (plan["baselines"]["data_parallel"]["bottleneck_s"]
            .as_f64()
            .unwrap()
            - 8.0)
            .abs()
            < 1e-9
    );
}

#[test]
fn a_device_of_little_memory_does_not_spoil_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let path = profile(&folder, &[(6.0, 1_000_000)], &[]);
    let cluster = folder.path().join("cluster.toml");
    fs::write(
        &cluster,
        "bw = \"10Gbps\"\n[[server]]\ndevices = [{ gpus = 2, memory = \"1GB\" }, { gpus = 1, memory = \"1MB\" }]\n",
    )
    .unwrap();
    let plan = plan(&["--cluster", cluster.to_str().unwrap()], &path);
    assert_eq!(plan["workers"], json!(2));
}

#[test]
fn the_table_says_where_the_stages_are() {
    let folder = tempfile::tempdir().unwrap();
    let path = profile(&folder, &[(3.0, 0), (1.0, 1000)], &[1000]);
    let servers = [
        "--gpus",
        "4",
        "--gpus-per-server",
        "2",
        "--bw",
        "1kB/s",
        "--inner-bw",
        "1MB/s",
    ];
    let (code, out, _) = run(&servers, &path);
    assert_eq!(code, 0);
    assert!(
        out.contains("4 devices in 2 servers, 8.00 kbps between them, 8.00 Mbps inside"),
        "{out}"
    );
    assert!(out.contains("0 x2, 1 x2"), "{out}");
    assert!(
        out.contains("Fullest network card: server 1 sends"),
        "{out}"
    );
}

#[test]
fn what_does_not_fit_or_make_sense_is_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = profile(&folder, &[(3.0, 1_000_000)], &[]);
    let cluster = folder.path().join("cluster.toml");
    let file = cluster.to_str().unwrap();
    let servers = "[[server]]\ngpus = 2\nbw = \"1Gbps\"\nmemory = \"1MB\"\n";
    for (text, arguments, code, says) in [
        (
            servers,
            &["--cluster", file][..],
            3,
            "no plan fits 1MB per worker on 2 devices",
        ),
        ("[[server]", &["--cluster", file], 1, "cluster.toml: "),
        (
            servers,
            &["--cluster", file, "--gpus", "3"],
            2,
            "cluster.toml has: 2",
        ),
        (
            servers,
            &["--cluster", file, "--bw", "1Gbps"],
            2,
            "cannot be used with",
        ),
        (servers, &["--cluster", "missing.toml"], 1, "missing.toml"),
        (
            servers,
            &["--gpus", "4", "--bw", "1Gbps", "--gpus-per-server", "2"],
            2,
            "--inner-bw",
        ),
        (
            servers,
            &[
                "--gpus",
                "4",
                "--bw",
                "local",
                "--gpus-per-server",
                "2",
                "--inner-bw",
                "1Gbps",
            ],
            2,
            "--bw local is for one process",
        ),
    ] {
        fs::write(&cluster, text).unwrap();
        let (exit, out, err) = run(arguments, &path);
        assert_eq!((exit, out.as_str()), (code, ""), "{err}");
        assert!(err.contains(says), "{err}");
        assert!(code == 2 || err.trim_end().lines().count() == 1, "{err}");
    }
}
