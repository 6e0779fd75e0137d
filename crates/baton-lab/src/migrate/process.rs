use std::{
    path::Path,
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use baton_wire::replica::Report;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
};

use crate::wire::Connection;

/// Room for the longest context and its output, twice: of a model with 45 KB of KV a token.
const KV_MEMORY: &str = "1GiB";

/// An emulated engine is not bound to its model's context: the longest one here, and an output.
const EMULATED_CONTEXT: &str = "12288";
/// The same room for an emulated model with 128 KB of KV a token, of which 8 bytes are taken.
const EMULATED_KV_MEMORY: &str = "4GiB";

/// `baton replica` on ports that it picks, ended when dropped.
pub(super) struct Replica {
    pub(super) report: Report,
    address: String,
    _child: Child,
}

impl Replica {
    pub(super) async fn start(program: &Path, engine: &str, id: &str) -> Result<Self> {
        let mut command = Command::new(program);
        command.args(["replica", "--engine", engine, "--id", id, "--port", "0", "--migration-port", "0"]);
        if engine == "timed" {
            command.args(["--max-model-len", EMULATED_CONTEXT, "--kv-memory", EMULATED_KV_MEMORY]);
        } else {
            command.args(["--kv-memory", KV_MEMORY]);
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().with_context(|| format!("{} does not start", program.display()))?;
        let mut lines = BufReader::new(child.stdout.take().context("its output is piped")?).lines();
        let line = lines.next_line().await?.context("the replica ended before it listened")?;
        let address =
            line.split_once("http://").map(|(_, address)| address.to_owned()).context("the replica did not say where it listens")?;
        let answer = exchange(&address, "GET", "/baton/v1/replica").await?;
        let report = serde_json::from_slice(&answer).context("its report cannot be read")?;
        Ok(Self { report, address, _child: child })
    }

    pub(super) async fn reset_prefix_cache(&self) -> Result<()> {
        exchange(&self.address, "POST", "/reset_prefix_cache").await.map(drop)
    }

    /// Of a request that costs nothing, on a connection that is there.
    pub(super) async fn round_trip(&self) -> Result<Duration> {
        let mut connection = Connection::open(&self.address).await?;
        let request = head(&self.address, "GET", "/health");
        connection.exchange(request.as_bytes()).await?;
        let began = Instant::now();
        connection.exchange(request.as_bytes()).await?;
        Ok(began.elapsed())
    }
}

async fn exchange(address: &str, method: &str, path: &str) -> Result<Vec<u8>> {
    let mut connection = Connection::open(address).await?;
    let response = connection.exchange(head(address, method, path).as_bytes()).await?;
    ensure!(response.status < 300, "{method} {path} was answered {}", response.status);
    Ok(response.body)
}

fn head(address: &str, method: &str, path: &str) -> String {
    format!("{method} {path} HTTP/1.1\r\nHost: {address}\r\nContent-Length: 0\r\n\r\n")
}
