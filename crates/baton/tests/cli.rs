//! What a mistake at the keyboard gives: one line on stderr that says what to do, nothing on stdout, exit code 2.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic like tests")]

mod common;

use std::{io::Write as _, net::TcpListener};

use common::{Server, baton, http, run};

#[track_caller]
fn check_bad_input(args: &[&str], part: &str) {
    let output = run(args);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(stderr.starts_with("baton: ") && stderr.contains(part), "{stderr}");
    assert!(output.stdout.is_empty());
}

#[test]
fn mistakes_are_told_in_one_line_with_exit_code_2() {
    check_bad_input(&["up", "--port", "70000"], "--port");
    check_bad_input(&["up", "--policy", "nope"], "round-robin");
    check_bad_input(&["up", "--replicas", "0"], "--replicas");
    check_bad_input(&["up", "--engine", "cpu", "--device", "h100"], "--engine timed only");
    check_bad_input(&["up", "--engine", "timed", "--threads", "2"], "--engine cpu only");
    check_bad_input(&["up", "--port", "0", "--model", "/no/such.gguf"], "no model at");
    check_bad_input(&["replica", "--port", "0", "--engine", "timed", "--model", "nope"], "llama-2-7b");
    check_bad_input(&["replica", "--port", "0", "--engine", "timed", "--device", "nope"], "h100");
    check_bad_input(&["replica", "--port", "0", "--engine", "timed", "--model", "llama-3-70b", "--device", "a10"], "no room for KV");
    check_bad_input(&["replica", "--port", "0", "--time-scale", "2"], "--engine timed only");
    check_bad_input(&["up", "--port", "0", "--engine", "timed", "--model", "nope"], "llama-2-7b");
    check_bad_input(&["up", "--port", "0", "--engine", "timed", "--device", "nope"], "h100");
    check_bad_input(&["up", "--port", "0", "--engine", "timed", "--model", "llama-3-70b", "--device", "a10"], "no room for KV");
    check_bad_input(&["up", "--port", "0", "--engine", "cpu", "--model", "/"], "cannot read /config.json");
    check_bad_input(&["replica", "--port", "0", "--engine", "timed", "--tbt-target", "0s"], "--tbt-target");
    check_bad_input(&["serve"], "--config");
    check_bad_input(&["serve", "--config", "/no/such.toml"], "--print-config");
    check_bad_input(&["check-config", "/no/such.toml"], "--print-config");
    check_bad_input(&["check-config"], "FILE");
    check_bad_input(&["bench", "--url", "https://example.org"], "http://");
    check_bad_input(&["bench", "--workload", "agent", "--requests", "3"], "--tasks");
    check_bad_input(&["bench", "--workload", "shared", "--tasks", "3"], "--requests");
    check_bad_input(&["bench", "--tasks", "0"], "--tasks");
    check_bad_input(&["sim", "cache-curve", "--blocks", "1"], "--trace");
    check_bad_input(&["sim", "cache-curve", "--trace", "/no/such.jsonl", "--blocks", "1"], "/no/such.jsonl: ");
    check_bad_input(&["sim", "cache-curve", "--trace", "x", "--blocks", "1,many"], "or inf");
    check_bad_input(&["model", "pull", "--model", "nope"], "smollm2-135m-instruct");
}

#[test]
fn a_trace_s_cache_curve_is_printed_for_people_and_for_programs() {
    let path = std::env::temp_dir().join(format!("baton-trace-{}.jsonl", std::process::id()));
    let name = path.to_str().unwrap();
    let curve = |arguments: &[&str]| {
        let output = run(&[&["sim", "cache-curve", "--trace", name, "--blocks", "1,inf"], arguments].concat());
        (output.status.code(), String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let line = |at: u32, names: &str| format!("{{\"timestamp\":{at},\"input_length\":600,\"output_length\":1,\"hash_ids\":[{names}]}}\n");
    let trace = [line(0, "0,1"), line(5, "0,2")].concat();
    std::fs::write(&path, &trace).unwrap();
    let (code, text, stderr) = curve(&[]);
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    assert!(text.contains("2 requests, 3 distinct blocks of 512 tokens") && text.contains("42.7 %"), "{text}");
    let told: serde_json::Value = serde_json::from_str(&curve(&["--json"]).1).unwrap();
    assert_eq!(told, serde_json::json!([{ "blocks": 1, "hit_rate": 0.0 }, { "blocks": "inf", "hit_rate": 512.0 / 1200.0 }]));
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    packed.write_all(trace.as_bytes()).unwrap();
    std::fs::write(&path, packed.finish().unwrap()).unwrap();
    assert_eq!(curve(&[]).1, text);
    std::fs::write(&path, [&trace, "{}\n"].concat()).unwrap();
    let (code, _, stderr) = curve(&[]);
    assert!(code == Some(2) && stderr.contains("line 3: missing field"), "{stderr}");
    std::fs::write(&path, "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1,1\n").unwrap();
    let (code, _, stderr) = curve(&[]);
    assert!(code == Some(2) && stderr.contains("take one that names blocks"), "{stderr}");
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn every_mistake_of_a_configuration_is_named() {
    let path = std::env::temp_dir().join(format!("baton-check-{}.toml", std::process::id()));
    let check = |text: &str| {
        std::fs::write(&path, text).unwrap();
        let output = run(&["check-config", path.to_str().unwrap()]);
        (output.status.code(), String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let name = path.display().to_string();
    let (code, stdout, stderr) = check("[gateway]\nattemps = 3\n\n[polcy]\nseed = 1\n");
    let told: Vec<&str> = stdout.lines().collect();
    assert_eq!((code, stderr), (Some(2), format!("baton: {name}: mistakes to mend: 3\n")));
    assert_eq!(told[0], format!("{name}: line 2: gateway.attemps = unknown; did you mean attempts?"));
    assert_eq!(told[1], format!("{name}: line 4: polcy = unknown; did you mean policy?"));
    assert!(told.len() == 3 && told[2].contains("no [[engines]]"), "{stdout}");
    let found = check("[[discovery]]\ntype = \"dns\"\nname = \"engines.invalid\"\nport = 8000\nengine.kind = \"vllm\"\n");
    assert_eq!(found, (Some(0), format!("{name}: 0 engines, 1 sources of engines, policy price\n"), String::new()));
    let skeleton = String::from_utf8(run(&["serve", "--print-config"]).stdout).unwrap();
    assert_eq!(check(&skeleton), (Some(0), format!("{name}: 1 engines, policy price\n"), String::new()));
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_port_in_use_is_told_before_anything_is_loaded() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    check_bad_input(&["up", "--port", &port], "is in use");
    check_bad_input(&["replica", "--port", &port], "is in use");
}

#[test]
fn a_log_that_nobody_watches_has_no_colours() {
    let path = std::env::temp_dir().join(format!("baton-colours-{}.toml", std::process::id()));
    std::fs::write(&path, "[gateway]\nbind = \"127.0.0.1:0\"\n[[engines]]\nurl = \"http://127.0.0.1:9\"\nkind = \"vllm\"\n").unwrap();
    let mut command = baton();
    command.args(["serve", "--config", path.to_str().unwrap()]).env("BATON_LOG", "info").env_remove("NO_COLOR");
    let (server, log) = Server::start_command(command);
    assert_eq!(http(&server.url, "PUT", "/baton/v1/policy", r#"{"name":"random"}"#).0, 200);
    let log = log();
    std::fs::remove_file(path).unwrap();
    assert!(log.contains("policy changed") && !log.contains('\u{1b}'), "{log}");
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    for args in [["price", "lecture"].as_slice(), &["price", "--json"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = baton().args(args).stdout(writer).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{args:?}: {output:?}");
    }
}

#[test]
fn an_address_where_nobody_listens_is_no_mistake_of_the_command_line() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let output = run(&["bench", "--url", &format!("http://{free}")]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stderr).unwrap().contains("does not answer"));
}

#[test]
fn serve_runs_with_a_configuration_like_the_published_one() {
    let printed = String::from_utf8(run(&["serve", "--print-config"]).stdout).unwrap();
    let config = printed.replace("127.0.0.1:8080", "127.0.0.1:0");
    let path = std::env::temp_dir().join(format!("baton-serve-{}.toml", std::process::id()));
    std::fs::write(&path, config).unwrap();
    let server = Server::start(&["serve", "--config", path.to_str().unwrap()]);
    assert_eq!(server.get("/live").0, 200);
    assert_eq!(server.replicas().len(), 1);
    std::fs::remove_file(path).unwrap();
}
