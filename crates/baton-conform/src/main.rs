//! `baton-conform`: does this replica speak the migration protocol?
#![allow(clippy::print_stdout, reason = "a program that prints what it found")]

use std::{path::PathBuf, process::ExitCode, sync::Arc};

use baton_conform::{Options, Suite, Unmet};
use clap::Parser;

/// Something could not be tried at all.
const NOT_TRIED: u8 = 2;

/// Checks a replica against docs/migration-protocol.md. Ends with 0 where no case failed, 1 where one did, 2 where nothing could be tried.
#[derive(Debug, Parser)]
#[command(name = "baton-conform")]
struct Args {
    /// Control address of the replica under test
    #[arg(long, value_name = "HOST:PORT")]
    replica: String,
    /// Control address of a second one that computes the same bits; without it nothing moves between two
    #[arg(long, value_name = "HOST:PORT")]
    peer: Option<String>,
    /// Model that both serve, as the fleet names it
    #[arg(long, value_name = "NAME")]
    model: String,
    /// File with the key that the fleet shares
    #[arg(long, value_name = "PATH")]
    fleet_key_file: Option<PathBuf>,
    /// Prompts are of token ids below this
    #[arg(long, default_value_t = 200, value_name = "N", value_parser = clap::value_parser!(u32).range(16..))]
    vocabulary: u32,
    /// Tokens of a prompt
    #[arg(long, default_value_t = 60, value_name = "N", value_parser = clap::value_parser!(u32).range(16..))]
    prompt: u32,
    /// Tokens of a long output: more takes longer, and less than 320 leaves out what stands still unacknowledged
    #[arg(long, default_value_t = 500, value_name = "N", value_parser = clap::value_parser!(u32).range(64..))]
    output: u32,
    /// Where a replica reports by HTTP (GET /baton/v1/replica), once for each: its pool must be in the end as it was
    #[arg(long, value_name = "HOST:PORT")]
    http: Vec<String>,
    /// By how much log-probabilities may differ between runs: for engines in which they depend on what shares a step
    #[arg(long, default_value_t = 0.0, value_name = "NATS")]
    tolerance: f32,
    /// Only cases whose name contains this
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Also what waits for leases to end, about half a minute
    #[arg(long)]
    long: bool,
}

#[tokio::main]
async fn main() -> ExitCode {
    match check(Args::parse()).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(NOT_TRIED)
        }
    }
}

/// Whether no case failed.
async fn check(args: Args) -> anyhow::Result<bool> {
    let fleet_key = args.fleet_key_file.as_deref().map(baton_link::read_fleet_key).transpose()?;
    let options = Options {
        peer: args.peer,
        fleet_key: fleet_key.map(Arc::new),
        vocabulary: args.vocabulary,
        prompt: args.prompt,
        output: args.output,
        http: args.http,
        long: args.long,
        tolerance: args.tolerance,
        ..Options::new(&args.replica, &args.model)
    };
    let reached = tokio::net::TcpStream::connect(&args.replica).await;
    reached.map_err(|error| anyhow::anyhow!("{} cannot be reached: {error}", args.replica))?;
    let suite = match Suite::new(options).await {
        Ok(suite) => suite,
        Err(Unmet::Failed(why) | Unmet::Skipped(why)) => anyhow::bail!(why),
    };
    let summary = baton_conform::run(&suite, &args.only, |case, checked| {
        let verdict = match checked {
            Ok(()) => "ok".to_owned(),
            Err(Unmet::Failed(why)) => format!("FAILED {why}"),
            Err(Unmet::Skipped(why)) => format!("skipped {why}"),
        };
        println!("{:3} {}: {verdict}", case.number, case.name);
    })
    .await;
    anyhow::ensure!(summary.met + summary.failed > 0, "no case could be tried");
    println!("{} ok, {} failed, {} skipped", summary.met, summary.failed, summary.skipped);
    Ok(summary.failed == 0)
}
