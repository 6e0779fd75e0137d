//! What connections cost a gateway in memory, and what a client that does not read makes it keep.

use std::time::Duration;

use anyhow::Result;
use clap::Args;

use crate::{
    prompts::{Class, Conversations},
    proxy::resident_mb,
    wire::Connection,
};

/// For a gateway to take in what it will.
const SETTLE: Duration = Duration::from_secs(2);

#[derive(Debug, Args)]
pub(crate) struct ConnectionsArgs {
    #[arg(long, default_value = "127.0.0.1:8080")]
    target: String,
    /// Of the process that listens there
    #[arg(long)]
    pid: u32,
    /// Connections that had one answer and ask no more
    #[arg(long, default_value_t = 1000)]
    idle: usize,
    /// Connections whose clients read the first bytes of a stream and no more
    #[arg(long, default_value_t = 256)]
    streams: usize,
    /// Length of such a stream
    #[arg(long, default_value_t = 6_000)]
    tokens: u32,
}

pub(crate) async fn run(args: &ConnectionsArgs) -> Result<()> {
    let small = Class::named("small").map_err(anyhow::Error::msg)?;
    let mut conversations = Conversations::new(small, 7);
    let mut last = report("at start", args.pid, 0.0, 0)?;
    let mut idle = Vec::with_capacity(args.idle);
    for _ in 0..args.idle {
        let mut connection = Connection::open(&args.target).await?;
        connection.exchange(&conversations.next_request()).await?;
        idle.push(connection);
    }
    last = report("idle connections", args.pid, last, args.idle)?;
    let stream = Class::named("stream").map_err(anyhow::Error::msg)?.with_tokens(args.tokens);
    let mut conversations = Conversations::new(stream, 8);
    let mut unread = Vec::with_capacity(args.streams);
    for _ in 0..args.streams {
        let mut connection = Connection::open(&args.target).await?;
        connection.begin(&conversations.next_request()).await?;
        unread.push(connection);
    }
    tokio::time::sleep(SETTLE).await;
    report("unread streams", args.pid, last, args.streams)?;
    Ok(())
}

fn report(name: &str, pid: u32, before_mb: f64, count: usize) -> Result<f64> {
    let now_mb = resident_mb(pid)?;
    if count == 0 {
        println!("{name}: {now_mb:.1} MB");
    } else {
        println!("{count} {name}: {now_mb:.1} MB, {:.1} KB each", (now_mb - before_mb) * 1024.0 / count as f64);
    }
    Ok(now_mb)
}
