//! The same runs over MPI as in one process, on this machine: `make mpi-test` installs MPI and runs them.
#![cfg(feature = "mpi")]

mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use common::{deep, digits, lenet, mnist, norm_dropout_skip, plan, shapes};

/// mpirun of Open MPI with so many ranks of dp-run-worker; nothing, with a word, where there is none.
fn mpirun(dir: &TempDir, ranks: usize, arguments: &[&str]) -> Option<Command> {
    let version = Command::new("mpirun").arg("--version").output();
    if !version.is_ok_and(|o| String::from_utf8_lossy(&o.stdout).contains("Open MPI")) {
        eprintln!("skipped: mpirun of Open MPI is not installed");
        return None;
    }
    let mut command = Command::new("mpirun");
    command
        .current_dir(dir.path())
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .args(["--oversubscribe", "--bind-to", "none", "-n"])
        .arg(ranks.to_string())
        .arg(env!("CARGO_BIN_EXE_dp-run-worker"))
        .args(arguments);
    Some(command)
}

fn planned(model: &Path, batch: usize, replicas: &[usize], delay: usize) -> TempDir {
    let dir = TempDir::new().unwrap();
    plan(model, batch, &shapes(replicas, delay))
        .save(&dir.path().join("plan.json"))
        .unwrap();
    dir
}

fn successful(mut command: Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    output
}

/// Step, epoch and loss of each row of `metrics.csv`, as text.
fn losses(dir: &Path) -> Vec<String> {
    let text = fs::read_to_string(dir.join("metrics.csv")).unwrap();
    let rows = text.lines().skip(1);
    rows.map(|row| row.rsplit_once(',').unwrap().0.to_owned())
        .collect()
}

/// Runs a plan both ways; losses, test figures and weights must have the same bits.
fn assert_same(model: &Path, data: &Path, batch: usize, replicas: &[usize], delay: usize) {
    let dir = planned(model, batch, replicas, delay);
    let flags = |name: &str| -> Vec<String> {
        let data = data.display().to_string();
        let text = format!(
            "plan.json --data {data} --epochs 2 --steps 101 --lr 0.03 --seed 3 --device cpu --dir {name} --out {name}.onnx --json"
        );
        text.split(' ').map(str::to_owned).collect()
    };
    let over_mpi = flags("mpi");
    let over_mpi: Vec<&str> = over_mpi.iter().map(String::as_str).collect();
    let Some(command) = mpirun(&dir, replicas.iter().sum(), &over_mpi) else {
        return;
    };
    successful(command);
    let mut command = Command::new(env!("CARGO_BIN_EXE_dp-run"));
    command.current_dir(dir.path()).args(flags("local"));
    successful(command);

    let path = |name: &str| dir.path().join(name);
    assert_eq!(losses(&path("mpi")), losses(&path("local")));
    assert_eq!(
        fs::read(path("mpi.onnx")).unwrap(),
        fs::read(path("local.onnx")).unwrap()
    );
    let summary = |name: &str| -> serde_json::Value {
        serde_json::from_slice(&fs::read(path(name).join("summary.json")).unwrap()).unwrap()
    };
    let (mpi, local) = (summary("mpi"), summary("local"));
    for name in [
        "test_accuracy",
        "test_loss",
        "train_loss",
        "minibatches",
        "bytes_sent",
    ] {
        assert_eq!(mpi[name], local[name], "{name}");
    }
}

#[test]
fn a_straight_pipeline_has_the_same_bits_over_mpi() {
    assert_same(&lenet(), &mnist(), 16, &[1, 1], 0);
}

#[test]
fn replicas_have_the_same_bits_over_mpi() {
    assert_same(&norm_dropout_skip(), &digits(), 8, &[3, 1], 1);
}

#[test]
fn uneven_replicas_and_a_last_partial_round_have_the_same_bits_over_mpi() {
    assert_same(&norm_dropout_skip(), &digits(), 8, &[1, 2, 1], 0);
}

#[test]
fn ranks_that_do_not_fit_are_told_so_once() {
    let dir = planned(&lenet(), 8, &[1, 1], 0);
    let arguments = ["plan.json", "--synthetic", "--steps", "2"];
    let Some(mut command) = mpirun(&dir, 3, &arguments) else {
        return;
    };
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    let errors = stderr.lines().filter(|l| l.starts_with("error: "));
    assert_eq!(
        errors.collect::<Vec<_>>(),
        [
            "error: plan.json: it has 2 workers, and MPI gave 3 processes (mpirun -n 2 dp-run-worker …)"
        ]
    );
    let mut alone = Command::new(env!("CARGO_BIN_EXE_dp-run-worker"));
    let output = alone
        .current_dir(dir.path())
        .args(arguments)
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr.contains("MPI gave 1 processes: start it with mpirun or srun"),
        "{stderr}"
    );
}

#[test]
fn a_diverging_run_ends_with_its_reason_on_all_ranks() {
    let dir = planned(&lenet(), 16, &[2, 1], 0);
    let data = mnist().display().to_string();
    let arguments = ["plan.json", "--data", &data, "--lr", "1e20"];
    let Some(mut command) = mpirun(&dir, 3, &arguments) else {
        return;
    };
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    let errors: Vec<&str> = stderr
        .lines()
        .filter(|l| l.starts_with("error: "))
        .collect();
    assert!(
        matches!(errors[..], [one] if one.contains("training diverged; lower --lr")),
        "{stderr}"
    );
}

/// Process numbers of the ranks that `mpirun` started.
fn children(mpirun: u32) -> Vec<u32> {
    let path = format!("/proc/{mpirun}/task/{mpirun}/children");
    let text = fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace()
        .map(|n| n.parse().unwrap())
        .collect()
}

fn wait_for_losses(dir: &TempDir) {
    let begun = || fs::metadata(dir.path().join("run/metrics.csv")).is_ok_and(|m| m.len() > 1000);
    let patience = Instant::now() + Duration::from_secs(120);
    while !begun() && Instant::now() < patience {
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn kill(signal: &str, process: u32) {
    let status = Command::new("kill")
        .args([signal, &process.to_string()])
        .status();
    assert!(status.unwrap().success());
}

#[test]
fn sixteen_stages_run_to_the_end_over_mpi() {
    assert_same(&deep(), &digits(), 8, &[1; 16], 0);
}

/// Runs dp-run on this machine through mpirun, and kills a worker once there are losses; what it said.
fn killed_on_hosts(signal: &str, worker: usize) -> Option<String> {
    let dir = planned(&lenet(), 8, &[2, 1], 0);
    mpirun(&dir, 1, &[])?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_dp-run"));
    command
        .current_dir(dir.path())
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .args(["plan.json", "--hosts", "localhost:3", "--synthetic"])
        .args(["--epochs", "1000000", "--quiet"]);
    let running = command.stderr(Stdio::piped()).spawn().unwrap();
    wait_for_losses(&dir);
    let [mpirun] = children(running.id())[..] else {
        panic!("dp-run starts one mpirun");
    };
    kill(signal, children(mpirun)[worker]);
    let output = running.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    Some(String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_killed_rank_ends_the_run_with_its_name() {
    if let Some(said) = killed_on_hosts("-KILL", 2) {
        let expected = "(stage 1, replica 0) was ended by signal 9 (Killed)\n";
        assert!(said.starts_with("error: rank 2 on "), "{said}");
        assert!(
            said.ends_with(expected) && said.lines().count() == 1,
            "{said}"
        );
    }
}

#[test]
fn hosts_without_room_are_refused() {
    let dir = planned(&lenet(), 8, &[2, 1], 0);
    let mut command = Command::new(env!("CARGO_BIN_EXE_dp-run"));
    command.current_dir(dir.path());
    command.args(["plan.json", "--hosts", "a,b", "--synthetic"]);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        stderr.starts_with("error: --hosts has room for 2 workers, and there are 3"),
        "{stderr}"
    );
}

#[test]
fn a_stopped_rank_ends_the_run_with_its_name() {
    let dir = planned(&lenet(), 8, &[1, 1], 0);
    let arguments = ["plan.json", "--synthetic", "--epochs", "1000000", "--quiet"];
    let Some(mut command) = mpirun(&dir, 2, &arguments) else {
        return;
    };
    let running = command.stderr(Stdio::piped()).spawn().unwrap();
    wait_for_losses(&dir);
    kill("-STOP", children(running.id())[1]);
    let output = running.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    let errors: Vec<&str> = stderr
        .lines()
        .filter(|l| l.starts_with("error: "))
        .collect();
    assert!(
        matches!(errors[..], [one] if one.starts_with("error: rank 1 on ")
            && one.contains("(stage 1, replica 0): nothing was heard of it")),
        "{stderr}"
    );
}

#[test]
fn compute_is_emulated_over_mpi() {
    let dir = TempDir::new().unwrap();
    let layers: Vec<_> = ["a", "b"]
        .map(|name| {
            serde_json::json!({
                "name": name, "kind": "Linear", "forward_ms": 1.0, "backward_ms": 2.0,
                "parameter_bytes": 400_000, "stash_bytes": 0,
            })
        })
        .into();
    let profile = serde_json::json!({
        "schema": "dp.profile/1", "model": { "file": "none.onnx", "sha256": "" }, "device": "none",
        "batch_size": 8, "threads": 1, "layers": layers,
        "edges": [{ "from": "a", "to": "b", "tensor": "x", "bytes": 300_000 }],
    });
    let path = dir.path().join("profile.json");
    fs::write(&path, profile.to_string()).unwrap();
    let sha256 = planner::file::sha256_of_file(&path).unwrap();
    let file = serde_json::json!({ "file": "profile.json", "sha256": sha256 });
    let names = ["a", "b"].map(str::to_owned);
    common::plan_of(&names, &file, 8, &shapes(&[2, 1], 0))
        .save(&dir.path().join("plan.json"))
        .unwrap();
    let arguments = ["plan.json", "--emulate-compute", "--steps", "8", "--quiet"];
    let Some(command) = mpirun(&dir, 3, &arguments) else {
        return;
    };
    successful(command);
    let summary = fs::read_to_string(dir.path().join("run/summary.json")).unwrap();
    let summary: serde_json::Value = serde_json::from_str(&summary).unwrap();
    assert_eq!(summary["bytes_sent"], 8 * 2 * 300_000 + 4 * 2 * 400_000);
    assert!(summary["emulated_compute"]["mean_lateness_s"][2].is_number());
}

#[test]
fn the_network_between_workers_is_measured() {
    let dir = TempDir::new().unwrap();
    let arguments = [
        "network",
        "--hosts",
        "localhost:2",
        "-o",
        "cluster.toml",
        "--json",
    ];
    let Some(command) = mpirun(&dir, 2, &arguments) else {
        return;
    };
    let output = successful(command);
    let figures: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(figures["schema"], "dp.network/1");
    assert!(figures["latency_s"].as_f64().unwrap() > 0.0);
    assert!(figures["hosts"][0]["inner_bytes_per_s"].as_f64().unwrap() > 0.0);
    let cluster = fs::read_to_string(dir.path().join("cluster.toml")).unwrap();
    assert!(cluster.contains("gpus = 2"), "{cluster}");
}
