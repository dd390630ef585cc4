//! Texts and rows of tokens: what is learned from them, and what is said when they do not fit.

mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

use common::{plan, repository, shapes};

/// A folder with a plan for CharGPT and a text.
fn folder(text: &str, replicas: &[usize]) -> TempDir {
    let dir = TempDir::new().unwrap();
    plan(
        &repository("models/zoo/chargpt.onnx"),
        4,
        &shapes(replicas, 0),
    )
    .save(&dir.path().join("plan.json"))
    .unwrap();
    fs::write(dir.path().join("text.txt"), text).unwrap();
    dir
}

fn dp_run(dir: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dp-run"));
    command.current_dir(dir).arg("plan.json").args(arguments);
    command.output().unwrap()
}

/// The run failed with one line that holds all of `parts`.
fn assert_error(dir: &Path, arguments: &[&str], parts: &[&str]) {
    let output = dp_run(dir, arguments);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    for part in parts {
        assert!(stderr.contains(part), "no '{part}' in: {stderr}");
    }
}

const ADAMW: [&str; 4] = ["--optimizer", "adamw", "--lr", "0.005"];

#[test]
fn a_pipeline_learns_what_comes_next_in_a_text() {
    // Every letter tells the next one.
    let dir = folder(&"the quick\n".repeat(900), &[1, 1]);
    let flags = [
        "--data",
        "text:text.txt",
        "--seq",
        "64",
        "--epochs",
        "4",
        "--json",
    ];
    let output = dp_run(dir.path(), &[&flags[..], &ADAMW].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert!(stderr.contains("10 different characters"), "{stderr}");
    let vocabulary = fs::read_to_string(dir.path().join("run/vocab.json")).unwrap();
    let vocabulary: Vec<char> = serde_json::from_str(&vocabulary).unwrap();
    assert_eq!(vocabulary[..3], ['\n', ' ', 'c']);
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    // By chance one of ten is right.
    assert!(
        summary["test_accuracy"].as_f64().unwrap() > 0.8,
        "{summary}"
    );
}

#[test]
fn token_files_are_texts_without_letters() {
    let dir = folder("", &[1]);
    let tokens: Vec<u16> = (0..2000).map(|i| i % 7).collect();
    let bytes: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
    fs::write(dir.path().join("tokens.bin"), &bytes).unwrap();
    let flags = ["--data", "tokens.bin", "--steps", "3"];
    let output = dp_run(dir.path(), &[&flags[..], &ADAMW].concat());
    assert!(output.status.success());
    assert!(!dir.path().join("run/vocab.json").exists());
}

#[test]
fn what_does_not_fit_is_one_line() {
    let many: String = ('\u{100}'..'\u{200}').cycle().take(5000).collect();
    let dir = folder(&many, &[1]);
    let dir = dir.path();
    assert_error(
        dir,
        &["--data", "text:text.txt"],
        &["from 0 to 255", "among 77"],
    );
    assert_error(dir, &["--data", "text:nothing.txt"], &["nothing.txt"]);
    assert_error(dir, &["--data", "text:"], &["text:FILE"]);
    fs::write(dir.join("short.txt"), "short").unwrap();
    assert_error(dir, &["--data", "text:short.txt"], &["5 tokens", "64"]);
    fs::write(dir.join("latin.txt"), [0xE9, b'a']).unwrap();
    assert_error(dir, &["--data", "text:latin.txt"], &["no UTF-8"]);
    fs::write(dir.join("odd.bin"), [1, 2, 3]).unwrap();
    assert_error(dir, &["--data", "odd.bin"], &["16-bit"]);
    let flags = ["--data", "text:text.txt", "--seq", "32"];
    assert_error(dir, &flags, &["--seq 32", "64", "--dim"]);
    let flags = ["--data", "text:text.txt", "--class-axis", "3"];
    assert_error(dir, &flags, &["output", "axes"]);
}
