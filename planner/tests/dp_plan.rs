//! The program dp-plan from outside: good input, bad input, exit codes.

use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use planner::Plan;
use planner::profile::{Edge, FileRef, LayerProfile, PROFILE_SCHEMA, Profile};
use serde_json::Value;

fn dp_plan() -> Command {
    let mut command = Command::cargo_bin("dp-plan").unwrap();
    command.env("COLUMNS", "100");
    command
}

/// A chain of layers: seconds forward, seconds backward, weights; bytes between neighbours.
fn chain(layers: &[(f64, f64, u64)], bytes: &[u64]) -> Profile {
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
        layers: layers
            .iter()
            .enumerate()
            .map(|(i, &(forward, backward, parameter_bytes))| LayerProfile {
                name: format!("L{i}"),
                kind: "Gemm".to_owned(),
                forward_ms: forward * 1e3,
                backward_ms: backward * 1e3,
                parameter_bytes,
                ..LayerProfile::default()
            })
            .collect(),
        edges: bytes
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
            .collect(),
        tied: Vec::new(),
        whole_step_ms: None,
        whole_step_samples_ms: Vec::new(),
        communication_s_per_byte: 0.0,
    }
}

fn small() -> Profile {
    chain(
        &[
            (0.01, 0.02, 4_000_000),
            (0.01, 0.02, 400_000_000),
            (0.01, 0.02, 4_000_000),
        ],
        &[1_000_000, 1_000_000],
    )
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn profile(&self, profile: &Profile) -> PathBuf {
        let path = self.path("profile.json");
        profile.save(&path).unwrap();
        path
    }

    /// A profile that `Profile::save` would refuse.
    fn spoiled(&self, change: impl FnOnce(&mut Value)) -> PathBuf {
        let mut value = serde_json::to_value(small()).unwrap();
        change(&mut value);
        let path = self.path("profile.json");
        fs::write(&path, value.to_string()).unwrap();
        path
    }
}

/// Runs with four devices on 10 Gbps; the JSON object that it prints.
fn planned(profile: &Path, flags: &[&str]) -> Value {
    let output = dp_plan()
        .arg(profile)
        .args(["--gpus", "4", "--bw", "10Gbps", "--json"])
        .args(flags)
        .assert()
        .success();
    serde_json::from_slice(&output.get_output().stdout).unwrap()
}

/// Runs, expects the exit code and a single line on stderr, and returns it.
fn refused(profile: &Path, flags: &[&str], code: i32) -> String {
    let assert = dp_plan().arg(profile).args(flags).assert().code(code);
    let output = assert.get_output();
    assert!(output.stdout.is_empty());
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    text
}

const FOUR: [&str; 4] = ["--gpus", "4", "--bw", "10Gbps"];

#[test]
fn json_has_the_names_that_scripts_rely_on() {
    let folder = Folder::new();
    let plan = planned(&folder.profile(&small()), &[]);
    for name in [
        "bottleneck_s",
        "lower_bound_s",
        "gap",
        "optimal",
        "bottleneck",
        "period_s",
        "throughput_samples_per_s",
        "workers",
        "schedule",
        "bytes_per_minibatch",
    ] {
        assert!(!plan[name].is_null(), "{name}");
    }
    for name in [
        "layers",
        "replicas",
        "depth",
        "versions",
        "compute_s",
        "sync_s",
        "memory_bytes",
    ] {
        assert!(!plan["stages"][0][name].is_null(), "{name}");
    }
    for baseline in ["data_parallel", "model_parallel", "straight"] {
        for name in [
            "bottleneck_s",
            "throughput_samples_per_s",
            "bytes_per_minibatch",
        ] {
            assert!(
                plan["baselines"][baseline][name].is_f64(),
                "{baseline} {name}"
            );
        }
    }
    assert_eq!(plan["schedule"], "1f1b");
    assert!(plan["period_s"].as_f64() >= plan["bottleneck_s"].as_f64());
}

#[test]
fn the_plan_file_holds_what_is_printed_and_can_be_run() {
    let folder = Folder::new();
    let profile = folder.profile(&small());
    let file = folder.path("plan.json");
    let printed = planned(&profile, &["-o", file.to_str().unwrap()]);
    let plan = Plan::load(&file).unwrap();
    assert_eq!(serde_json::to_value(&plan).unwrap(), printed);
    assert_eq!(
        plan.profile.sha256,
        planner::file::sha256_of_file(&profile).unwrap()
    );
    let layers: Vec<&String> = plan.stages.iter().flat_map(|s| &s.layers).collect();
    assert_eq!(layers, ["L0", "L1", "L2"]);
    for minibatches in [0, 1, 5, 101] {
        plan.schedule_for(minibatches).unwrap();
    }
}

#[test]
fn both_solvers_print_the_same_plan() {
    let folder = Folder::new();
    let profile = folder.profile(&small());
    for memory in [&[][..], &["--memory", "2GiB"]] {
        let dp = planned(&profile, memory);
        let ilp = planned(&profile, &[memory, &["--solver", "ilp"]].concat());
        assert_eq!(dp["bottleneck_s"], ilp["bottleneck_s"]);
        assert_eq!(dp["workers"], ilp["workers"]);
    }
}

#[test]
fn uneven_replicas_are_found_under_the_published_formulas() {
    let shared = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/cases");
    let case = Path::new(shared).join("g6_plan_uneven_replicas.profile.json");
    let Ok(text) = fs::read_to_string(&case) else {
        eprintln!("skipped: {} is not there", case.display());
        return;
    };
    let case: Value = serde_json::from_str(&text).unwrap();
    let expect = Path::new(shared).join("g6_plan_uneven_replicas.expect.json");
    let expect: Value = serde_json::from_str(&fs::read_to_string(expect).unwrap()).unwrap();
    let number = |v: &Value| v.as_f64().unwrap();
    let nodes = case["nodes"].as_array().unwrap();
    let layers: Vec<(f64, f64, u64)> = nodes
        .iter()
        .map(|n| {
            let weights = n["param_bytes"].as_u64().unwrap();
            (number(&n["fwd"]), number(&n["bwd"]), weights)
        })
        .collect();
    let bytes: Vec<u64> = case["edges"]
        .as_array()
        .unwrap()
        .iter()
        .map(|e| e["bytes"].as_u64().unwrap())
        .collect();
    let folder = Folder::new();
    let profile = folder.profile(&chain(&layers, &bytes));
    for formula in ["paper", "release"] {
        for solver in ["dp", "ilp"] {
            let plan = planned(&profile, &["--model", formula, "--solver", solver]);
            let optimum = &expect["optimum"][formula];
            let close = |a: &Value, b: &Value| (number(a) - number(b)).abs() < 1e-9;
            assert!(close(&plan["bottleneck_s"], &optimum["bottleneck_s"]));
            let stages = plan["stages"].as_array().unwrap();
            let replicas: Vec<Value> = stages.iter().map(|s| s["replicas"].clone()).collect();
            assert_eq!(Value::from(replicas), optimum["replicas"]);
            let first = stages[0]["layers"].as_array().unwrap().len();
            assert_eq!(Value::from(vec![first]), optimum["cuts"]);
            let data_parallel = &plan["baselines"]["data_parallel"]["bottleneck_s"];
            assert!(close(
                data_parallel,
                &expect["pure_data_parallel_s"][formula]
            ));
        }
    }
}

#[test]
fn stages_by_hand_are_judged_against_the_bound() {
    let folder = Folder::new();
    let profile = folder.profile(&small());
    let plan = planned(&profile, &["--stages", "L0:2,2:1"]);
    assert_eq!(plan["stages"][0]["replicas"], 2);
    assert_eq!(plan["stages"][0]["layers"].as_array().unwrap().len(), 2);
    assert_eq!(plan["optimal"], false);
    assert!(plan["gap"].as_f64().unwrap() > 0.0);
    let error = refused(
        &profile,
        &[&FOUR[..], &["--stages", "0,nobody"]].concat(),
        2,
    );
    assert!(error.contains("no layer `nobody`"), "{error}");
}

#[test]
fn the_memory_of_each_stage_adds_up() {
    let folder = Folder::new();
    let profile = folder.profile(&small());
    let plan = planned(&profile, &["--stages", "0:2,2:1"]);
    for stage in plan["stages"].as_array().unwrap() {
        let shares = stage["memory"].as_object().unwrap().values();
        let sum: f64 = shares.map(|bytes| bytes.as_f64().unwrap()).sum();
        assert_eq!(sum.ceil(), stage["memory_bytes"].as_f64().unwrap());
    }
}

#[test]
fn straight_plans_of_any_kind_have_no_replicas() {
    let folder = Folder::new();
    let profile = folder.profile(&small());
    let plan = planned(&profile, &["--straight", "--schedule", "auto"]);
    let stages = plan["stages"].as_array().unwrap();
    assert!(stages.iter().all(|stage| stage["replicas"] == 1));
    let kinds = plan["schedules"].as_array().unwrap();
    assert!(kinds.iter().all(|row| row["schedule"] != "data-parallel"));
}

#[test]
fn quiet_json_is_json_alone() {
    let folder = Folder::new();
    let profile = folder.profile(&small());
    assert_eq!(planned(&profile, &["--quiet"])["schema"], "dp.plan/1");
}

#[test]
fn straight_pipelines_have_no_replicas() {
    let folder = Folder::new();
    let plan = planned(&folder.profile(&small()), &["--straight"]);
    let stages = plan["stages"].as_array().unwrap();
    assert!(stages.iter().all(|s| s["replicas"] == 1));
}

#[test]
fn skips_are_paid_for_and_bounded() {
    let mut profile = small();
    let mut skip = profile.edges[0].clone();
    skip.to = "L2".to_owned();
    profile.edges.push(skip);
    let folder = Folder::new();
    let path = folder.profile(&profile);
    let plan = planned(&path, &["--stages", "0,1,2"]);
    assert_eq!(plan["links"].as_array().unwrap().len(), 3);
    // Three tensors of 1 MB cross, and come back.
    assert_eq!(plan["bytes_per_minibatch"], 6e6);
}

#[test]
fn the_table_names_stages_bottleneck_and_alternatives() {
    let folder = Folder::new();
    let assert = dp_plan()
        .arg(folder.profile(&small()))
        .args(FOUR)
        .assert()
        .success();
    let text = String::from_utf8(assert.get_output().stdout.clone()).unwrap();
    insta::assert_snapshot!(text);
}

#[test]
fn recomputation_is_planned_where_memory_asks_for_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut profile = chain(&[(1.0, 2.0, 100), (1.0, 2.0, 100)], &[10]);
    for layer in &mut profile.layers {
        layer.stash_bytes = 1000;
    }
    let path = folder.path().join("profile.json");
    profile.save(&path).unwrap();
    let plan = |arguments: &[&str]| {
        let mut command = dp_plan();
        command
            .arg(&path)
            .args(["--gpus", "2", "--bw", "1GB/s", "--straight", "--json"]);
        let output = command.args(arguments).output().unwrap();
        let value = serde_json::from_slice::<Value>(&output.stdout).ok();
        (
            output.status.code().unwrap(),
            value,
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    // Two minibatches in flight on the first of two stages: 2000 bytes of stash do not fit.
    let (code, value, _) = plan(&["--memory", "2kB"]);
    let value = value.unwrap();
    let flags: Vec<bool> = value["stages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|stage| stage["recompute"].as_bool().unwrap_or(false))
        .collect();
    assert_eq!((code, flags), (0, vec![true, false]));
    assert!((value["bottleneck_s"].as_f64().unwrap() - 4.0).abs() < 1e-6);
    assert_eq!(value["optimal"], true);
    let (code, _, error) = plan(&["--memory", "2kB", "--recompute", "never"]);
    assert_eq!(code, 3, "{error}");
    let (code, value, _) = plan(&["--recompute", "always"]);
    let stages = value.unwrap()["stages"].clone();
    assert_eq!(code, 0);
    assert!(
        stages
            .as_array()
            .unwrap()
            .iter()
            .all(|stage| stage["recompute"] == true)
    );
    let (_, value, _) = plan(&[]);
    assert!(value.unwrap()["stages"][0].get("recompute").is_none());
}

#[test]
fn layers_that_are_to_stay_together_do() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("profile.json");
    let layer = (1.0, 2.0, 0);
    chain(&[layer; 4], &[10; 3]).save(&path).unwrap();
    let run = |arguments: &[&str]| {
        let mut command = dp_plan();
        command
            .arg(&path)
            .args(["--gpus", "2", "--bw", "1GB/s", "--straight", "--json"]);
        let output = command.args(arguments).output().unwrap();
        (
            output.status.code().unwrap(),
            serde_json::from_slice::<Value>(&output.stdout).ok(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    let stages = |arguments: &[&str]| {
        let plan = run(arguments).1.unwrap();
        let stages = plan["stages"].as_array().unwrap().iter();
        let sizes: Vec<usize> = stages
            .map(|s| s["layers"].as_array().unwrap().len())
            .collect();
        (sizes, plan["optimal"].clone())
    };
    assert_eq!(stages(&[]), (vec![2, 2], true.into()));
    assert_eq!(stages(&["--together", "L1..L3"]), (vec![1, 3], true.into()));
    assert_eq!(stages(&["--together", "0,L2"]), (vec![3, 1], true.into()));
    assert_eq!(
        stages(&["--together", "L0..L1", "--together", "1,3"]),
        (vec![4], true.into())
    );
    let explained = run(&["--together", "L1..L3", "--explain"]);
    assert_eq!(explained.0, 0, "{}", explained.2);
    for (text, says) in [
        ("L1", "names no layers to keep together"),
        ("L1..L9", "there is no layer `L9`"),
    ] {
        let (code, _, error) = run(&["--together", text]);
        assert_eq!(code, 2);
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn layers_that_share_weights_stay_together_and_have_them_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("profile.json");
    let mut profile = chain(&[(1.0, 2.0, 500), (1.0, 2.0, 0), (1.0, 2.0, 500)], &[10; 2]);
    profile.tied.push(planner::profile::Tied {
        tensor: "embedding".to_owned(),
        parameter_bytes: 500,
        optimizer_bytes: 0,
        layers: vec!["L0".to_owned(), "L2".to_owned()],
    });
    profile.save(&path).unwrap();
    let mut command = dp_plan();
    command
        .arg(&path)
        .args(["--gpus", "3", "--bw", "1GB/s", "--straight", "--json"]);
    let output = command.output().unwrap();
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(plan["stages"].as_array().unwrap().len(), 1);
    assert_eq!(plan["stages"][0]["parameter_bytes"], 500);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(
        error.contains("L0, L2 share the weights `embedding`"),
        "{error}"
    );
    // Where they could be split the one stage is not called the best.
    let mut command = dp_plan();
    command
        .arg(&path)
        .args(["--gpus", "3", "--bw", "1GB/s", "--straight", "--json"]);
    let output = command.args(["--schedule", "gpipe"]).output().unwrap();
    let split: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&plan["optimal"], &split["optimal"]),
        (&true.into(), &false.into())
    );
    assert!(split["gap"].as_f64().unwrap() > 1.5, "{}", split["gap"]);
    profile.tied[0].layers[1] = "L9".to_owned();
    assert!(profile.validate().is_err());
}

#[test]
fn every_kind_of_schedule_is_planned_and_compared() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("profile.json");
    let layer = (1.0, 2.0, 1000);
    chain(&[layer; 4], &[10; 3]).save(&path).unwrap();
    let run = |arguments: &[&str]| {
        let mut command = dp_plan();
        command.arg(&path).args(["--gpus", "4", "--bw", "1GB/s"]);
        let output = command.args(arguments).output().unwrap();
        (
            output.status.code().unwrap(),
            String::from_utf8(output.stdout).unwrap(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    let plan = |arguments: &[&str]| -> Value {
        let (code, out, error) = run(&[arguments, &["--json"]].concat());
        assert_eq!(code, 0, "{error}");
        serde_json::from_str(&out).unwrap()
    };
    // Four stages of 3 s and eight microbatches: 8 + 3 stage times for a batch of eight.
    for kind in ["1f1b-flush", "gpipe"] {
        let value = plan(&["--straight", "--schedule", kind, "--microbatches", "8"]);
        assert_eq!(
            (&value["schedule"], &value["microbatches"]),
            (&kind.into(), &8.into())
        );
        let period = value["period_s"].as_f64().unwrap();
        assert!((period - 3.0 * 11.0 / 8.0).abs() < 0.01, "{kind}: {period}");
        assert_eq!(value["stages"][0]["versions"], 1);
    }
    let value = plan(&["--straight", "--schedule", "2bw"]);
    assert!((value["period_s"].as_f64().unwrap() - 3.0).abs() < 0.1);
    assert!(
        value["stages"]
            .as_array()
            .unwrap()
            .iter()
            .all(|s| s["versions"] == 2)
    );
    let value = plan(&["--straight", "--vertical-sync"]);
    let versions: Vec<u64> = value["stages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|s| s["versions"].as_u64().unwrap())
        .collect();
    assert_eq!(versions, [versions[0]; 4]);
    let value = plan(&["--schedule", "model-parallel"]);
    assert!((value["period_s"].as_f64().unwrap() - 12.0).abs() < 0.01);
    let value = plan(&["--schedule", "data-parallel"]);
    assert_eq!(
        (value["stages"].as_array().unwrap().len(), &value["workers"]),
        (1, &4.into())
    );
    let value = plan(&["--schedule", "auto"]);
    let kinds: Vec<&str> = value["schedules"]
        .as_array()
        .unwrap()
        .iter()
        .map(|s| s["schedule"].as_str().unwrap())
        .collect();
    assert_eq!(
        kinds,
        [
            "1f1b",
            "vertical-sync",
            "2bw",
            "1f1b-flush",
            "gpipe",
            "model-parallel",
            "data-parallel"
        ]
    );
    let (code, out, _) = run(&["--schedule", "auto", "--gantt"]);
    assert_eq!(code, 0);
    assert!(out.contains("taken") && out.contains("Staleness:"), "{out}");
    for (arguments, code, says) in [
        (
            &["--schedule", "gpipe", "--vertical-sync"][..],
            2,
            "--vertical-sync is a variant of --schedule 1f1b",
        ),
        (
            &["--straight", "--schedule", "2bw", "--microbatches", "1"],
            1,
            "it takes no fewer than the minibatches in flight",
        ),
        (
            &["--schedule", "gpipe", "--memory", "1kB"],
            3,
            "no plan fits",
        ),
    ] {
        let (exit, _, error) = run(arguments);
        assert_eq!(exit, code, "{error}");
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn layers_are_placed_freely_where_that_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("profile.json");
    let out = folder.path().join("plan.json");
    // In two runs 6 + 3 at best, freely 4 + 2 on each device.
    let layers: Vec<(f64, f64, u64)> = [4.0, 2.0, 4.0, 2.0].map(|s| (s / 2.0, s / 2.0, 0)).into();
    let mut profile = chain(&layers, &[10; 3]);
    profile.layers[0].forward_ms = 4000.0;
    profile.layers[0].backward_ms = 2000.0;
    profile.layers[3].forward_ms = 0.0;
    profile.layers[3].backward_ms = 0.0;
    profile.layers[2].backward_ms = 3000.0;
    profile.save(&path).unwrap();
    let run = |arguments: &[&str]| {
        let mut command = dp_plan();
        command
            .arg(&path)
            .args(["--gpus", "2", "--bw", "1TB/s", "--json"]);
        command.args(arguments).output().unwrap()
    };
    let output = run(&["--non-contiguous", "-o", out.to_str().unwrap()]);
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    let straight: Value = serde_json::from_slice(&run(&["--straight"]).stdout).unwrap();
    let bottleneck = |plan: &Value| plan["bottleneck_s"].as_f64().unwrap();
    assert!(bottleneck(&plan) <= bottleneck(&straight));
    assert_eq!(plan["schedule"], "interleaved");
    assert!(plan["stall"].as_str().unwrap().starts_with("not simulated"));
    // The plan is read again; nobody can make a schedule of it yet.
    let loaded = Plan::load(&out).unwrap();
    assert!(
        loaded
            .schedule_for(4)
            .unwrap_err()
            .to_string()
            .contains("cannot be carried out yet")
    );
    let refused = run(&["--non-contiguous", "--schedule", "gpipe"]);
    assert_eq!(refused.status.code(), Some(2));
}

#[test]
fn help_explains_every_flag() {
    let assert = dp_plan().arg("--help").assert().success();
    let text = String::from_utf8(assert.get_output().stdout.clone()).unwrap();
    insta::assert_snapshot!(text);
}

#[test]
fn quiet_prints_nothing_and_still_writes() {
    let folder = Folder::new();
    let file = folder.path("plan.json");
    dp_plan()
        .arg(folder.profile(&small()))
        .args(FOUR)
        .args(["--quiet", "-o", file.to_str().unwrap()])
        .assert()
        .success()
        .stdout("")
        .stderr("");
    assert!(file.exists());
}

#[cfg(feature = "plot")]
#[test]
fn pictures_are_written_by_their_ending() {
    let folder = Folder::new();
    let profile = folder.profile(&small());
    let plot = |name: &str| {
        dp_plan()
            .arg(&profile)
            .args(FOUR)
            .arg("--plot")
            .arg(folder.path(name))
            .assert()
    };
    plot("both").success();
    assert!(
        fs::read(folder.path("both.png"))
            .unwrap()
            .starts_with(b"\x89PNG")
    );
    assert!(
        fs::read_to_string(folder.path("both.svg"))
            .unwrap()
            .contains("<svg")
    );
    plot("one.svg").success();
    assert!(!folder.path("one.png").exists());
    plot("one.gif").code(1);
}

#[test]
fn a_plan_is_explained_in_words_and_as_json() {
    let folder = Folder::new();
    let profile = folder.profile(&small());
    let text = swept(&profile, &[&FOUR[..], &["--explain"]].concat());
    for part in [
        "Fullest resources",
        "one step away",
        "one more device",
        "twice the bandwidth",
    ] {
        assert!(text.contains(part), "{part}");
    }
    let plan = planned(&profile, &["--explain"]);
    let explanation = &plan["explanation"];
    assert_eq!(explanation["resources"][0]["seconds"], plan["bottleneck_s"]);
    for runner_up in explanation["runner_ups"].as_array().unwrap() {
        assert!(runner_up["bottleneck_s"].as_f64() >= plan["lower_bound_s"].as_f64());
    }
}

#[test]
fn the_schedule_is_shown_and_traced() {
    let folder = Folder::new();
    let profile = folder.profile(&small());
    let trace = folder.path("trace.json");
    let flags = [&FOUR[..], &["--gantt", "--trace", trace.to_str().unwrap()]].concat();
    let text = swept(&profile, &flags);
    let rows: Vec<&str> = text.lines().filter(|l| l.starts_with("stage  ")).collect();
    // Three workers, twice; the last stage runs backward right behind its first forward.
    assert_eq!(rows.iter().filter(|r| r.contains('|')).count(), 6);
    assert!(text.contains("Steady state"));
    let last = rows.iter().find(|r| r.starts_with("stage  2.0")).unwrap();
    let (forward, backward) = (last.find("F0").unwrap(), last.find("B0").unwrap());
    assert!(
        forward < backward && !last[forward..backward].contains('.'),
        "{last}"
    );
    let value: Value = serde_json::from_str(&fs::read_to_string(trace).unwrap()).unwrap();
    let events = value["traceEvents"].as_array().unwrap();
    for category in ["forward", "backward", "step", "activations", "gradients"] {
        assert!(events.iter().any(|e| e["cat"] == category), "{category}");
    }
}

#[test]
fn every_kind_of_schedule_is_traced_with_as_many_minibatches_as_asked_for() {
    let folder = Folder::new();
    let profile = folder.profile(&small());
    for kind in [
        "1f1b",
        "2bw",
        "1f1b-flush",
        "gpipe",
        "model-parallel",
        "data-parallel",
    ] {
        let trace = folder.path(&format!("{kind}.json"));
        let asked = ["--schedule", kind, "--minibatches", "12", "--trace"];
        swept(
            &profile,
            &[&FOUR[..], &asked, &[trace.to_str().unwrap()]].concat(),
        );
        let value: Value = serde_json::from_str(&fs::read_to_string(trace).unwrap()).unwrap();
        let events = value["traceEvents"].as_array().unwrap();
        let first_stage = |e: &&Value| e["cat"] == "forward" && e["pid"] == 0;
        assert_eq!(events.iter().filter(first_stage).count(), 12, "{kind}");
    }
    let alone = [&FOUR[..], &["--minibatches", "12"]].concat();
    let assert = dp_plan().arg(&profile).args(alone).assert().code(2);
    let error = String::from_utf8_lossy(&assert.get_output().stderr).into_owned();
    assert!(error.contains("give --gantt or --trace too"), "{error}");
}

fn swept(profile: &Path, flags: &[&str]) -> String {
    let assert = dp_plan().arg(profile).args(flags).assert().success();
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

#[test]
fn a_sweep_prints_one_line_for_each_plan() {
    let folder = Folder::new();
    let profile = folder.profile(&small());
    let one = swept(&profile, &["--bw", "10Gbps", "--sweep", "gpus=1..3"]);
    assert_eq!(one.lines().count(), 4);
    assert!(
        one.lines()
            .nth(3)
            .unwrap()
            .starts_with("3,10.0 Gbps,1250000000,1-1-1,3,true,")
    );
    let both = ["--sweep", "gpus=1..3", "--sweep", "bw=1Gbps..10Gbps"];
    assert_eq!(swept(&profile, &both).lines().count(), 1 + 3 * 4);
    let json = swept(&profile, &[&both[..], &["--json"]].concat());
    let cells: Vec<Value> = serde_json::from_str(&json).unwrap();
    assert_eq!(cells.len(), 12);
    // A faster link never hurts.
    let speed = |c: &Value| c["plan_samples_per_s"].as_f64().unwrap();
    assert!(speed(&cells[11]) >= speed(&cells[2]));
    let file = folder.path("sweep.csv");
    let flags = [
        "--bw",
        "10Gbps",
        "--sweep",
        "gpus=1..3",
        "-o",
        file.to_str().unwrap(),
    ];
    assert_eq!(swept(&profile, &flags), "");
    assert_eq!(fs::read_to_string(file).unwrap(), one);
    for (flags, expected) in [
        (&["--sweep", "gpus=1..3"][..], "--bw is missing"),
        (
            &["--gpus", "2", "--bw", "1Gbps", "--sweep", "gpus=1..3"],
            "give one of them",
        ),
        (&["--sweep", "bw=1Gbps..2Gbps"], "--gpus is missing"),
        (&["--sweep", "gpus=1"], "gpus=FIRST..LAST"),
        (
            &[
                "--bw",
                "1Gbps",
                "--sweep",
                "gpus=1..2",
                "--sweep",
                "gpus=3..4",
            ],
            "twice",
        ),
    ] {
        assert!(refused(&profile, flags, 2).contains(expected));
    }
}

#[cfg(feature = "plot")]
#[test]
fn a_sweep_is_drawn() {
    let folder = Folder::new();
    let profile = folder.profile(&small());
    let lines = folder.path("lines");
    let lines = lines.to_str().unwrap();
    swept(
        &profile,
        &["--bw", "1Gbps", "--sweep", "gpus=1..3", "--plot", lines],
    );
    for name in ["lines", "lines-memory", "lines-communication"] {
        let svg = fs::read_to_string(folder.path(&format!("{name}.svg"))).unwrap();
        assert!(svg.contains("pipeline plan"), "{name}");
        assert!(folder.path(&format!("{name}.png")).exists());
    }
    let map = folder.path("map.svg");
    let both = [
        "--sweep",
        "gpus=1..3",
        "--sweep",
        "bw=1Gbps..10Gbps",
        "--plot",
    ];
    swept(&profile, &[&both[..], &[map.to_str().unwrap()]].concat());
    assert!(fs::read_to_string(map).unwrap().contains("5.00 Gbps"));
}

#[test]
fn nothing_fits_is_exit_3_with_the_nearest_miss() {
    let folder = Folder::new();
    let profile = folder.profile(&small());
    let error = refused(&profile, &[&FOUR[..], &["--memory", "500MB"]].concat(), 3);
    assert!(
        error.contains("stage 1 (L1 .. L2, x1") && error.contains("500MB"),
        "{error}"
    );
    // What it says is needed suffices.
    let needed = error.split("give it ").nth(1).unwrap();
    let needed = needed.split(' ').next().unwrap();
    planned(&profile, &["--memory", needed]);
}

#[test]
fn a_cycle_is_one_line_with_its_path() {
    let folder = Folder::new();
    let path = folder.spoiled(|v| v["edges"][1]["to"] = "L0".into());
    let error = refused(&path, &FOUR, 1);
    assert!(
        error.contains("profile.json: the layers form a cycle: L0 -> L1 -> L0"),
        "{error}"
    );
}

#[test]
fn a_negative_time_is_one_line_with_its_layer() {
    let folder = Folder::new();
    let path = folder.spoiled(|v| v["layers"][1]["forward_ms"] = (-1.0).into());
    let error = refused(&path, &FOUR, 1);
    assert!(error.contains("layer `L1`: `forward_ms` is -1"), "{error}");
}

#[test]
fn truncated_json_is_one_line_with_its_place_and_leaves_no_file() {
    let folder = Folder::new();
    let path = folder.profile(&small());
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, &text[..text.len() / 2]).unwrap();
    let file = folder.path("plan.json");
    let flags = [&FOUR[..], &["-o", file.to_str().unwrap()]].concat();
    let error = refused(&path, &flags, 1);
    assert!(
        error.contains("profile.json:") && error.contains("not a profile"),
        "{error}"
    );
    assert_eq!(fs::read_dir(folder.0.path()).unwrap().count(), 1);
}

#[test]
fn another_schema_is_refused_with_a_hint() {
    let folder = Folder::new();
    let newer = folder.spoiled(|v| v["schema"] = "dp.profile/9".into());
    let error = refused(&newer, &FOUR, 1);
    assert!(
        error.contains("`dp.profile/9`") && error.contains("dp-profile"),
        "{error}"
    );
    let other = folder.spoiled(|v| v["schema"] = "dp.plan/1".into());
    let error = refused(&other, &FOUR, 1);
    assert!(error.contains("another kind of file"), "{error}");
    let none = folder.spoiled(|v| {
        v.as_object_mut().unwrap().remove("schema");
    });
    refused(&none, &FOUR, 1);
}

#[test]
fn bad_flags_are_usage_errors_of_one_line() {
    let folder = Folder::new();
    let profile = folder.profile(&small());
    let error = refused(&profile, &["--gpus", "4", "--bw", "10"], 2);
    assert!(
        error.contains("no unit") && error.contains("10Gbps"),
        "{error}"
    );
    let error = refused(&profile, &["--gpus", "0", "--bw", "10Gbps"], 2);
    assert!(error.contains("at least 1"), "{error}");
    refused(&profile, &[&FOUR[..], &["--memory", "16"]].concat(), 2);
    refused(&profile, &[&FOUR[..], &["--latency", "-1us"]].concat(), 2);
    refused(&profile, &[&FOUR[..], &["--stages", "a:0"]].concat(), 2);
}

#[test]
fn a_missing_file_is_named() {
    let error = refused(Path::new("nowhere.json"), &FOUR, 1);
    assert!(error.contains("nowhere.json: cannot be read"), "{error}");
}

#[test]
fn a_model_without_cost_is_planned_without_a_panic() {
    let folder = Folder::new();
    let profile = folder.profile(&chain(&[(0.0, 0.0, 0), (0.0, 0.0, 0)], &[0]));
    for flags in [
        &[][..],
        &["--straight"],
        &["--solver", "ilp"],
        &["--stages", "0:2,1:2"],
    ] {
        let plan = planned(&profile, flags);
        assert_eq!(plan["bottleneck_s"], 0.0);
    }
}
