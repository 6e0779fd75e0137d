//! A gateway in front of replicas whose processes the test holds.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::{Value, json};

use crate::{
    client::{Ask, Reading},
    common::{Server, baton, until},
};

/// Output by which a request is known to run.
pub(crate) const SOME: usize = 20;

/// What each replica of a fleet is.
#[derive(Clone)]
pub(crate) struct Make {
    engine: Vec<String>,
    tokenizer: String,
    /// More of the gateway's configuration: of its front, and tables.
    front: String,
    config: String,
}

pub(crate) struct Fleet {
    pub(crate) gateway: Server,
    /// By their names `r0`, `r1` and so on.
    pub(crate) replicas: Vec<Server>,
    folder: PathBuf,
}

/// What an order to move came to.
#[derive(Debug)]
pub(crate) enum Ordered {
    Moved,
    /// It stays, or has ended.
    Stays,
}

impl Make {
    /// A small real model on the CPU.
    pub(crate) fn cpu() -> Self {
        let weights = baton_testkit::smollm2().to_str().unwrap().to_owned();
        let engine = ["--engine", "cpu", "--model", &weights, "--blocks", "192"].map(str::to_owned).to_vec();
        Self { engine, tokenizer: weights, front: String::new(), config: String::new() }
    }

    /// Emulated ones, whose every token depends on all KV before it and whose answers have no end of their own.
    pub(crate) fn timed() -> Self {
        Self {
            engine: ["--engine", "timed"].map(str::to_owned).to_vec(),
            tokenizer: "bytes4".to_owned(),
            front: String::new(),
            config: String::new(),
        }
    }

    /// Adds to the gateway's configuration.
    pub(crate) fn configured(mut self, config: &str) -> Self {
        self.config += config;
        self
    }

    pub(crate) fn with(mut self, args: &[&str]) -> Self {
        self.engine.extend(args.iter().map(|&arg| arg.to_owned()));
        self
    }

    /// With a fleet key.
    pub(crate) fn keyed(mut self, file: &Path) -> Self {
        self.front = format!("fleet_key_file = \"{}\"\n", file.display());
        self
    }

    pub(crate) fn replica(&self, name: &str, environment: &[(&str, &str)]) -> Server {
        let mut command = baton();
        command.envs(environment.iter().copied());
        self.spawn(command, name, &[])
    }

    /// By a command that ends in the executable.
    pub(crate) fn spawn(&self, mut command: Command, name: &str, args: &[&str]) -> Server {
        command.args(["replica", "--id", name, "--port", "0", "--migration-port", "0"]).args(&self.engine).args(args);
        Server::spawn(quiet(&mut command))
    }

    pub(crate) fn fleet(&self, replicas: usize) -> Fleet {
        Fleet::of(self, (0..replicas).map(|index| self.replica(&format!("r{index}"), &[])).collect())
    }
}

/// Suspicions and forced moves are what is tested, and no news.
fn quiet(command: &mut Command) -> &mut Command {
    command.env("BATON_LOG", std::env::var("BATON_LOG").unwrap_or_else(|_| "error".to_owned()))
}

impl Fleet {
    /// A gateway in front of these, once it has reached all of them.
    pub(crate) fn of(make: &Make, replicas: Vec<Server>) -> Self {
        let name = format!("baton-moves-{}-{}", std::process::id(), replicas[0].pid());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).unwrap();
        let gateway = Self::gateway(make, &replicas, &folder);
        let fleet = Self { gateway, replicas, folder };
        fleet.until_connected();
        fleet
    }

    fn gateway(make: &Make, replicas: &[Server], folder: &Path) -> Server {
        let engine = |replica: &Server| format!("[[engines]]\nurl = \"{}\"\nkind = \"baton\"\n", replica.url);
        let config = ["[gateway]\nbind = \"127.0.0.1:0\"\n", &make.front, &replicas.iter().map(engine).collect::<String>(), &make.config];
        let path = folder.join("baton.toml");
        fs::write(&path, config.concat()).unwrap();
        let mut command = baton();
        command.args(["serve", "--config", path.to_str().unwrap(), "--tokenizer", &make.tokenizer]);
        Server::spawn(quiet(&mut command))
    }

    pub(crate) fn restart_gateway(&mut self, make: &Make) {
        self.gateway = Self::gateway(make, &self.replicas, &self.folder);
        self.until_connected();
    }

    pub(crate) fn until_connected(&self) {
        until("fleet that is ready and reached", || {
            let reached = |replica: &Value| replica["state"] == "ready" && replica["migration"]["connected"] == true;
            self.gateway.replicas().iter().all(reached).then_some(())
        });
    }

    /// Forgets those that have ended.
    pub(crate) fn keep(&mut self, mut lives: impl FnMut(usize) -> bool) {
        let mut index = 0..;
        self.replicas.retain(|_| lives(index.next().unwrap()));
    }

    pub(crate) fn url(&self) -> &str {
        &self.gateway.url
    }

    /// Sends the request, and has it run at this replica with [`SOME`] output.
    pub(crate) fn begin_at(&self, replica: usize, ask: &Ask, request_id: &str) -> Reading {
        let mut reading = ask.send(self.url(), request_id);
        reading.read_until(SOME);
        if self.request(request_id).unwrap()["replica"] != format!("r{replica}") {
            assert!(matches!(self.migrate(request_id, replica), Ordered::Moved));
        }
        reading
    }

    /// Orders the request to move.
    pub(crate) fn migrate(&self, request_id: &str, to: usize) -> Ordered {
        let (status, body) = self.gateway.post(&format!("/baton/v1/requests/{request_id}/migrate"), &json!({"to": format!("r{to}")}));
        match status {
            200 => Ordered::Moved,
            404 | 409 => Ordered::Stays,
            _ => panic!("{status} {body}"),
        }
    }

    /// The gateway's row of a running request.
    pub(crate) fn request(&self, request_id: &str) -> Option<Value> {
        let (_, body) = self.gateway.get("/baton/v1/requests");
        let requests: Value = serde_json::from_str(&body).unwrap();
        requests["requests"].as_array().unwrap().iter().find(|request| request["x_request_id"] == request_id).cloned()
    }

    /// What became of the latest moves, newest first.
    pub(crate) fn moves(&self) -> Vec<Value> {
        let (_, body) = self.gateway.get("/baton/v1/moves?limit=1024");
        serde_json::from_str::<Value>(&body).unwrap()["moves"].as_array().unwrap().clone()
    }

    /// The laws *blocks* and *ledger to zero*: once nothing runs, every replica has all of its blocks, with and without what it caches, and the
    /// gateway's books are empty.
    pub(crate) fn until_at_rest(&self) {
        for replica in &self.replicas {
            until_empty(replica);
        }
        until("empty ledger", || self.gateway.replicas().iter().all(|replica| replica["in_flight"] == 0).then_some(()));
        assert_eq!(self.gateway.get("/baton/v1/requests").1, r#"{"requests":[]}"#);
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        // What is left in the temporary folder harms nobody.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Waits until the replica runs and holds nothing.
pub(crate) fn until_empty(replica: &Server) {
    until("replica at rest", || {
        let report = report(replica);
        (report["running"] == 0 && report["waiting"] == 0 && report["kv_blocks_free"] == report["kv_blocks_total"]).then_some(())
    });
    assert_eq!(replica.post("/reset_prefix_cache", &json!({})).0, 200);
    let report = report(replica);
    assert_eq!(report["kv_blocks_free"], report["kv_blocks_total"]);
}

/// What the replica says of itself.
pub(crate) fn report(replica: &Server) -> Value {
    let (status, body) = replica.get("/baton/v1/replica");
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).unwrap()
}

/// The sum of a counter's series on the replica's metrics page.
pub(crate) fn counter(replica: &Server, name: &str) -> u64 {
    let (_, page) = replica.get("/metrics");
    let values = page.lines().filter(|line| line.starts_with(&format!("{name}{{"))).map(|line| line.rsplit(' ').next().unwrap());
    values.map(|value| value.parse::<f64>().unwrap() as u64).sum()
}
