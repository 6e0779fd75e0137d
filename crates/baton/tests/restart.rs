//! A gateway that is killed under engines that live on.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic like tests")]

mod common;

use std::{fs, os::unix::fs::MetadataExt, path::Path};

use common::{Server, signal, until};
use serde_json::{Value, json};

const PREFIXES: u32 = 12;

fn replica(id: &str, port: &str) -> Server {
    let engine = ["--engine", "timed", "--tokenizer", "bytes4", "--time-scale", "0.1", "--blocks", "4096", "--max-model-len", "8192"];
    Server::start(&[["replica", "--id", id, "--port", port].as_slice(), &engine].concat())
}

/// A gateway in front of the replicas, once it knows them all.
fn gateway(folder: &Path, policy: &str, replicas: &[&Server]) -> Server {
    let engine = |replica: &&Server| format!("[[engines]]\nurl = \"{}\"\nkind = \"baton\"\n", replica.url);
    let config = [
        "[gateway]\nbind = \"127.0.0.1:0\"\n".to_owned(),
        format!("[policy]\nname = \"{policy}\"\nindex_snapshot = \"{}\"\n", folder.join("index").display()),
        replicas.iter().map(engine).collect(),
    ];
    let path = folder.join("baton.toml");
    fs::write(&path, config.concat()).unwrap();
    let server = Server::start(&["serve", "--config", path.to_str().unwrap(), "--tokenizer", "bytes4"]);
    until("ready fleet without doubt", || {
        server.replicas().iter().all(|replica| replica["state"] == "ready" && replica["index_doubtful"] == false).then_some(())
    });
    server
}

/// Asks with this prefix and an end of its own; the decision with what came of it.
fn ask(server: &Server, prefix: u32, end: &str) -> Value {
    let text = format!("{} {end}", format!("prefix {prefix} ").repeat(200));
    let (status, body) = server.post("/v1/chat/completions", &json!({"messages": [{"role": "user", "content": text}], "max_tokens": 2}));
    assert_eq!(status, 200, "{body}");
    let answer: Value = serde_json::from_str(&body).unwrap();
    let id = answer["id"].as_str().unwrap().strip_prefix("chatcmpl-").unwrap();
    until("decision with its outcome", || {
        let (status, body) = server.get(&format!("/baton/v1/decisions/{id}"));
        assert_eq!(status, 200, "{body}");
        let decision: Value = serde_json::from_str(&body).unwrap();
        (!decision["realised"]["outcome"].is_null()).then_some(decision)
    })
}

/// Tokens that the router believed to be cached where the request went, and those that the engine had.
fn hit(decision: &Value) -> (u64, u64) {
    let quote = decision["quotes"].as_array().unwrap().iter().find(|quote| quote["replica"] == decision["chosen"]).unwrap();
    (quote["hit_tokens"].as_u64().unwrap(), decision["realised"]["cached_tokens"].as_u64().unwrap())
}

fn indexed(server: &Server) -> Vec<u64> {
    server.replicas().iter().map(|replica| replica["kv_blocks_indexed"].as_u64().unwrap()).collect()
}

/// Batches of KV events that the gateway took in.
fn batches(server: &Server) -> f64 {
    let (_, page) = server.get("/metrics");
    page.lines()
        .filter(|line| line.starts_with("baton_kv_batches_total{"))
        .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
        .sum()
}

#[test]
fn a_killed_gateway_comes_back_with_what_it_knew() {
    let folder = std::env::temp_dir().join(format!("baton-restart-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let (lasting, other, mut reborn) = (replica("r0", "0"), replica("r1", "0"), replica("r2", "0"));

    let mut server = gateway(&folder, "round-robin", &[&lasting, &other, &reborn]);
    let holders: Vec<Value> = (0..PREFIXES).map(|prefix| ask(&server, prefix, "first")["chosen"].clone()).collect();
    let inode = || fs::metadata(folder.join("index")).ok().map(|file| file.ino());
    // A write that began before the last answer may end after it; the next one knows all.
    let first = inode();
    let second = until("snapshot", || inode().filter(|_| server.get("/live").0 == 200 && inode() != first));
    until("snapshot of all", || inode().filter(|inode| server.get("/live").0 == 200 && *inode != second));
    let (known, told) = (indexed(&server), batches(&server));
    signal(server.pid(), libc::SIGKILL);
    server.wait();
    let port = reborn.url.rsplit(':').next().unwrap().to_owned();
    signal(reborn.pid(), libc::SIGKILL);
    reborn.wait();
    let reborn = replica("r2", &port);

    let server = gateway(&folder, "price", &[&lasting, &other, &reborn]);
    assert!(known.iter().all(|blocks| *blocks > 0), "{known:?}");
    assert_eq!(indexed(&server), [known[0], known[1], 0]);
    let lives: Vec<u64> = server.replicas().iter().map(|replica| replica["life"].as_u64().unwrap()).collect();
    assert_eq!(lives, [1, 1, 2]);
    assert!(batches(&server) < told / 2.0, "the engines did not have to tell all again: {} of {told}", batches(&server));
    for (prefix, holder) in (0..PREFIXES).zip(&holders).filter(|(_, holder)| **holder != json!(2)) {
        let decision = ask(&server, prefix, "second");
        assert_eq!(&decision["chosen"], holder, "{decision}");
        let (believed, cached) = hit(&decision);
        assert!(believed > 100 && believed == cached, "{decision}");
    }
    drop(server);
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_file_that_is_no_snapshot_is_named_and_replaced() {
    let folder = std::env::temp_dir().join(format!("baton-restart-foreign-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("index"), "not ours").unwrap();
    let engine = replica("r0", "0");
    let mut server = gateway(&folder, "price", &[&engine]);
    assert_eq!(hit(&ask(&server, 0, "first")), (0, 0));
    signal(server.pid(), libc::SIGTERM);
    assert_eq!(server.wait().code(), Some(0));
    assert!(fs::read(folder.join("index")).unwrap().starts_with(b"baton index snapshot 1\n"), "written at shutdown");
    let server = gateway(&folder, "price", &[&engine]);
    let (believed, cached) = hit(&ask(&server, 0, "second"));
    assert!(believed > 100 && believed == cached, "{believed} {cached}");
    drop(server);
    fs::remove_dir_all(&folder).unwrap();
}
