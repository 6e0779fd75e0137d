//! The official `openai` client of Python against a fleet of real replicas: the checks are in `tests/e2e/openai_client.py`.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic like tests")]

mod common;

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use common::Server;

/// Two answers at once, and few enough for a small machine.
const REPLICAS: &str = "2";

#[test]
fn the_official_client_finds_what_it_expects() {
    let python = virtual_environment(&e2e().join("requirements.txt"));
    baton_testkit::smollm2();
    let server = Server::start(&["up", "--engine", "cpu", "--replicas", REPLICAS, "--port", "0"]);
    let output = Command::new(python).arg(e2e().join("openai_client.py")).arg(&server.url).stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.lines().filter(|line| line.starts_with("ok ")).count() >= 25, "{text}");
}

fn e2e() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/e2e")
}

/// Python of an environment with these requirements, made once under `target`.
fn virtual_environment(requirements: &Path) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    fs::create_dir_all(folder).unwrap();
    let lock = File::create(folder.join("openai-client.lock")).unwrap();
    // Test processes that start together take turns.
    lock.lock().unwrap();
    let venv = folder.join("openai-client");
    let (python, marker) = (venv.join("bin/python"), venv.join("requirements.txt"));
    let wanted = fs::read(requirements).unwrap();
    if fs::read(&marker).ok().as_ref() != Some(&wanted) {
        let made = Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv).output();
        let made = made.unwrap_or_else(|error| panic!("this test needs python3 on the PATH: {error}"));
        check(&made, "python3 -m venv failed; install Python's venv module");
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement"];
        let installed = Command::new(&python).args(pip).arg(requirements).output().unwrap();
        check(&installed, "pip could not install the openai client; this test needs a package index");
        fs::write(&marker, wanted).unwrap();
    }
    python
}

fn check(output: &Output, advice: &str) {
    assert!(output.status.success(), "{advice}\n{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
}
