//! CPU and delay that a proxy adds: Baton beside nginx and no proxy at all, on two cores.
//!
//! The proxy has core 0; the engines and this load have core 1. CPU of a request is utime and stime of the proxy's process over the
//! requests done. Each client waits for its answer before it asks again, on one kept-alive connection.

mod load;
mod process;

pub(crate) use self::process::resident_mb;

use std::{path::PathBuf, time::Duration};

use anyhow::{Result, ensure};
use clap::Args;

use self::{
    load::{Seen, first_event_delays, gaps, run_for},
    process::Process,
};
use crate::prompts::Class;

const ENGINES: u16 = 4;
const ENGINE_PORT: u16 = 19_001;
const NGINX: &str = "127.0.0.1:19080";
const BATON: &str = "127.0.0.1:19081";
const DIRECT: &str = "127.0.0.1:19001";
/// Pairs of streams, one direct and one through the proxy, of which the median difference is taken.
const PAIRS: usize = 400;
/// Steady streams at once, and how many one after the other before the next way is taken.
const STEADY: usize = 8;
const STEADY_ROUNDS: usize = 2;

#[derive(Debug, Args)]
pub(crate) struct ProxyArgs {
    /// The gateway to measure
    #[arg(long, default_value = "target/release/baton")]
    baton: PathBuf,
    /// Connections at once
    #[arg(long, value_delimiter = ',', default_values_t = [1, 32])]
    connections: Vec<usize>,
    /// Of each load, beside the warm-up
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Each load is run so many times, in turn with the others; medians are shown
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    #[arg(long, value_delimiter = ',', value_parser = Class::named, default_value = "small,big,stream,slow,cold,steady")]
    classes: Vec<Class>,
}

#[derive(Debug, Args)]
pub(crate) struct LoadArgs {
    #[arg(long, default_value = "127.0.0.1:8080")]
    target: String,
    #[arg(long, default_value_t = 1)]
    connections: usize,
    /// Requests in all
    #[arg(long, default_value_t = 1000)]
    requests: usize,
    #[arg(long, value_parser = Class::named, default_value = "small")]
    class: Class,
}

pub(crate) async fn run_load(args: &LoadArgs) -> Result<()> {
    load::warm(&args.target, args.class).await?;
    let seen = load::run_count(&args.target, args.class, args.connections, args.requests).await?;
    println!("{} requests, p50 {:.3} ms, p99 {:.3} ms", seen.requests, seen.percentile_ms(0.5), seen.percentile_ms(0.99));
    Ok(())
}

pub(crate) async fn run(args: &ProxyArgs) -> Result<()> {
    let _engines = Process::engines(ENGINE_PORT, ENGINES)?;
    let nginx = Process::nginx(NGINX, ENGINE_PORT, ENGINES)?;
    let baton = Process::baton(&args.baton, BATON, ENGINE_PORT, ENGINES)?;
    for address in [DIRECT, NGINX, BATON] {
        load::until_it_answers(address).await?;
    }
    println!("| class | N | direct req/s | nginx CPU us | req/s | p50 ms | baton CPU us | x nginx | req/s | p50 ms | p99 ms |");
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    for &class in args.classes.iter().filter(|class| !class.is_steady()) {
        for &connections in &args.connections {
            let row = measure(args, class, connections, &nginx, &baton).await?;
            println!("{row}");
        }
    }
    if let Some(&class) = args.classes.iter().find(|class| class.is_steady()) {
        print_steadiness(args, class).await?;
    }
    if args.classes.iter().any(|class| class.stream && !class.is_steady()) {
        let class = Class::named("stream").map_err(anyhow::Error::msg)?;
        for (name, proxy) in [("nginx", NGINX), ("baton", BATON)] {
            let delays = first_event_delays(class, DIRECT, proxy, PAIRS).await?;
            println!("first event, {name} over direct, median of {PAIRS} paired differences: {delays:.3} ms");
        }
    }
    println!("baton's resident memory at the end: {:.1} MB", baton.resident_mb()?);
    Ok(())
}

/// How long clients wait between the reads of streams whose engine writes at an even pace.
async fn print_steadiness(args: &ProxyArgs, class: Class) -> Result<()> {
    let mut ways = [("direct", DIRECT, Vec::new()), ("nginx", NGINX, Vec::new()), ("baton", BATON, Vec::new())];
    for _ in 0..args.repeats.max(1) * 3 {
        for (_, target, found) in &mut ways {
            found.extend(gaps(target, class, STEADY, STEADY_ROUNDS).await?);
        }
    }
    println!("\n{STEADY} streams at a time, one event each 20 ms: ms between reads\n");
    println!("| way | gaps | p50 | p90 | p99 | longest | p50 over direct | p99 over direct |");
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
    let mut direct = None;
    for (name, _, gaps) in &mut ways {
        gaps.sort_unstable();
        let at = |part: f64| gaps[((gaps.len() as f64 * part) as usize).min(gaps.len() - 1)].as_secs_f64() * 1e3;
        let [p50, p90, p99, longest] = [0.5, 0.9, 0.99, 1.0].map(at);
        let (of_direct, of_direct_p99) = *direct.get_or_insert((p50, p99));
        let count = gaps.len();
        println!(
            "| {name} | {count} | {p50:.2} | {p90:.2} | {p99:.2} | {longest:.2} | {:+.2} | {:+.2} |",
            p50 - of_direct,
            p99 - of_direct_p99
        );
    }
    println!();
    Ok(())
}

/// One row of the table: the medians of the repeats.
async fn measure(args: &ProxyArgs, class: Class, connections: usize, nginx: &Process, baton: &Process) -> Result<String> {
    let span = Duration::from_secs_f64(args.seconds);
    let (mut direct, mut through_nginx, mut through_baton) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..args.repeats {
        direct.push((run_for(DIRECT, class, connections, span, || Ok(0.0)).await?, 0.0));
        through_nginx.push(with_cpu(NGINX, class, connections, span, nginx).await?);
        through_baton.push(with_cpu(BATON, class, connections, span, baton).await?);
    }
    let rate = |runs: &[(Seen, f64)]| median(runs.iter().map(|(seen, _)| seen.requests as f64 / seen.span.as_secs_f64()));
    let cpu = |runs: &[(Seen, f64)]| median(runs.iter().map(|(_, cpu_us)| *cpu_us));
    let delay = |runs: &[(Seen, f64)], part| median(runs.iter().map(|(seen, _)| seen.percentile_ms(part)));
    Ok(format!(
        "| {} | {connections} | {:.0} | {:.1} | {:.0} | {:.3} | {:.1} | {:.2} | {:.0} | {:.3} | {:.3} |",
        class.name,
        rate(&direct),
        cpu(&through_nginx),
        rate(&through_nginx),
        delay(&through_nginx, 0.5),
        cpu(&through_baton),
        cpu(&through_baton) / cpu(&through_nginx),
        rate(&through_baton),
        delay(&through_baton, 0.5),
        delay(&through_baton, 0.99),
    ))
}

/// A load with the CPU that a request took of the process, in microseconds.
async fn with_cpu(target: &str, class: Class, connections: usize, span: Duration, process: &Process) -> Result<(Seen, f64)> {
    let seen = run_for(target, class, connections, span, || process.cpu_s()).await?;
    ensure!(seen.requests > 0, "no request was answered");
    let cpu_us = seen.cpu_s * 1e6 / seen.requests as f64;
    Ok((seen, cpu_us))
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
