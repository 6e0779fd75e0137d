//! `baton up` as a tree of processes.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic like tests")]

mod common;

use common::{Handle, Server, children, command_line, run, signal, until};
use serde_json::{Value, json};

const TIMED: [&str; 9] = ["up", "--engine", "timed", "--replicas", "2", "--port", "0", "--time-scale", "0.1"];

fn chat(server: &Server, stream: bool) -> (u16, String) {
    let message = json!({"role": "user", "content": "What is the capital of France?"});
    server.post("/v1/chat/completions", &json!({"messages": [message], "max_tokens": 8, "stream": stream}))
}

fn replica_process(server: &Server, name: &str) -> Option<u32> {
    children(server.pid()).into_iter().find(|pid| command_line(*pid).ends_with(&["--id".into(), name.into(), String::new()]))
}

fn all_ready(server: &Server) -> bool {
    server.replicas().iter().all(|replica| replica["state"] == "ready")
}

#[test]
fn a_fleet_answers_and_ends_with_its_processes_on_sigterm() {
    let mut server = Server::start(&TIMED);
    let (status, body) = chat(&server, false);
    assert_eq!(status, 200, "{body}");
    let answer: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(answer["usage"]["completion_tokens"], 8);
    let (status, stream) = chat(&server, true);
    assert_eq!(status, 200);
    assert!(stream.starts_with("data: {") && stream.trim_end().ends_with("data: [DONE]"), "{stream}");
    let replicas: Vec<Handle> = children(server.pid()).into_iter().map(Handle::of).collect();
    assert_eq!(replicas.len(), 2);
    signal(server.pid(), libc::SIGTERM);
    assert_eq!(server.wait().code(), Some(0));
    replicas.iter().for_each(Handle::wait_for_end);
}

#[test]
fn no_replica_outlives_an_up_that_was_killed() {
    let mut server = Server::start(&TIMED);
    let replicas: Vec<Handle> = children(server.pid()).into_iter().map(Handle::of).collect();
    assert_eq!(replicas.len(), 2);
    signal(server.pid(), libc::SIGKILL);
    server.wait();
    replicas.iter().for_each(Handle::wait_for_end);
}

#[test]
fn a_killed_replica_comes_back_and_no_request_fails_meanwhile() {
    let server = Server::start(&TIMED);
    let before = until("replica process", || replica_process(&server, "r0"));
    signal(before, libc::SIGKILL);
    let mut answered = 0;
    let after = until("second life of the replica", || {
        let (status, body) = chat(&server, answered % 2 == 0);
        assert_eq!(status, 200, "{body}");
        answered += 1;
        replica_process(&server, "r0").filter(|pid| *pid != before)
    });
    until("ready fleet", || all_ready(&server).then_some(()));
    assert_ne!(before, after);
    // A round that goes to each in turn reaches the new one.
    let (status, body) = common::http(&server.url, "PUT", "/baton/v1/policy", r#"{"name": "round-robin"}"#);
    assert_eq!(status, 200, "{body}");
    for _ in 0..2 {
        assert_eq!(chat(&server, false).0, 200);
    }
    let indexed = |replica: &Value| replica["life"].as_u64().unwrap_or(0);
    assert!(indexed(&server.replicas()[0]) > indexed(&server.replicas()[1]), "{:?}", server.replicas());
}

#[test]
fn bench_measures_a_fleet_and_compares_policies() {
    let server = Server::start(&TIMED);
    let load = ["--workload", "agent", "--tasks", "2", "--rate", "50", "--scale-shape", "0.05", "--think-scale", "0", "--seed", "3"];
    let output = run(&[["bench", "--url", &server.url, "--json"].as_slice(), &load].concat());
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["requests"], &report["errors"], &report["refused"]), (&json!(40), &json!(0), &json!(0)), "{report}");
    assert!(report["hit_rate"].as_f64().unwrap() > 0.5, "{report}");
    assert_eq!(report["ttft_ms"]["count"], 40);

    let output = run(&[["bench", "--url", &server.url, "--json", "--compare", "random,price"].as_slice(), &load].concat());
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let comparison: Value = serde_json::from_slice(&output.stdout).unwrap();
    let policies: Vec<&Value> = comparison["runs"].as_array().unwrap().iter().map(|run| &run["policy"]).collect();
    assert_eq!(policies, ["random", "price"]);
    assert!(comparison["ratios_to_first"]["price"]["hit_rate"].is_number());
    let (_, policy) = server.get("/baton/v1/policy");
    assert_eq!(serde_json::from_str::<Value>(&policy).unwrap()["name"], "price");

    let output = run(&[["bench", "--url", &server.url, "--compare", "price,nope"].as_slice(), &load].concat());
    assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stderr));
}
