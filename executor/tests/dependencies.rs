//! dp-run carries out plans, it does not make them: no solver or plotting library may come with it.

use std::process::Command;

#[test]
fn no_solver_is_linked() {
    let output = Command::new(env!("CARGO"))
        .args([
            "tree",
            "--offline",
            "--locked",
            "--edges",
            "normal",
            "--prefix",
            "none",
        ])
        .args(["--package", "executor"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let tree = String::from_utf8(output.stdout).unwrap();
    let packages: Vec<&str> = tree.lines().filter_map(|l| l.split(' ').next()).collect();
    assert!(packages.contains(&"planner") && packages.contains(&"models"));
    for unwanted in [
        "good_lp",
        "microlp",
        "highs",
        "highs-sys",
        "coin_cbc",
        "plotters",
    ] {
        assert!(!packages.contains(&unwanted), "{unwanted} is linked");
    }
}
