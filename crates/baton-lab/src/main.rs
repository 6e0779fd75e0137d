//! `lab`: engines without arithmetic and the loads of the benches under `bench/`. A tool of development only: nothing that ships
//! depends on it.
#![allow(clippy::print_stdout, reason = "a program that prints tables")]

mod connections;
mod engine;
mod migrate;
mod play;
mod prompts;
mod proxy;
mod wire;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(about, version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Engines that answer at once, in the words of a vLLM server
    Engine(engine::EngineArgs),
    /// What a proxy costs, beside nginx and no proxy at all; `bench/proxy` runs it
    Proxy(proxy::ProxyArgs),
    /// One closed-loop load on any address
    Load(proxy::LoadArgs),
    /// Memory of a process while connections idle and while clients do not read their streams
    Connections(connections::ConnectionsArgs),
    /// What a move costs its client, its link and its neighbours; `bench/migrate` runs it
    Migrate(migrate::MigrateArgs),
    /// A workload of the simulator against any address in real time; `bench/peers` runs it
    Play(play::PlayArgs),
}

fn main() -> Result<()> {
    // One thread, so that engines and load together need one core and the proxy has the other.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match Cli::parse().command {
        Command::Engine(args) => runtime.block_on(engine::run(&args)),
        Command::Proxy(args) => runtime.block_on(proxy::run(&args)),
        Command::Load(args) => runtime.block_on(proxy::run_load(&args)),
        Command::Connections(args) => runtime.block_on(connections::run(&args)),
        Command::Migrate(args) => runtime.block_on(migrate::run(&args)),
        Command::Play(args) => runtime.block_on(play::run(&args)),
    }
}
