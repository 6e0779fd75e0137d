//! `baton price move`: one sequence, every way to let it go on elsewhere.

use std::{io::Write, time::Duration};

use baton_cost::{Device, Link, MoveCase, MovePrice, MoveWay, StepCoefficients, StepLoad};
use baton_units::{BlockSize, Tokens};
use clap::Args;
use serde_json::{Value, json};

use super::{TOKENS_MAX, bad_input, find_device, find_model, table};
use crate::cli::{self, BadInput};

#[derive(Debug, Args)]
pub(crate) struct MoveArgs {
    /// Model: a name, or the path of a config.json or .gguf file
    #[arg(long, default_value = "llama-2-7b-gqa8", value_name = "NAME|PATH")]
    model: String,
    /// Device: a100, h100, h200, b200, l40s, a10, or cpu, which is measured
    #[arg(long, default_value = "h100", value_name = "NAME")]
    device: String,
    /// Link between the replicas: nvlink, pcie, ethernet; all of them by default
    #[arg(long, value_name = "NAME", conflicts_with = "bandwidth")]
    link: Option<String>,
    /// Measured bandwidth of a link, in GB/s
    #[arg(long, value_name = "GB/S", value_parser = cli::positive)]
    bandwidth: Option<f64>,
    /// Measured latency of the link, one way
    #[arg(long, default_value = "0s", value_name = "SPAN", value_parser = cli::span)]
    latency: Duration,
    /// Tokens of prompt and output whose KV the sequence has
    #[arg(long, default_value_t = 4096, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(TOKENS_MAX)))]
    tokens: u32,
    /// Of these, leading tokens whose KV the target has
    #[arg(long, default_value_t = 0, value_name = "N")]
    held: u32,
    /// The sequence waits, or was preempted: it can be fetched or computed, not copied while it goes on
    #[arg(long)]
    waiting: bool,
    /// Sequences that decode together at the source
    #[arg(long, default_value_t = 164, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Context of each of them, in tokens
    #[arg(long, default_value_t = 2500, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(TOKENS_MAX)))]
    context: u32,
    /// Work that is queued at the target
    #[arg(long, default_value = "0s", value_name = "SPAN", value_parser = cli::span)]
    queue: Duration,
    /// Share of the device's peak arithmetic that a prefill reaches
    #[arg(long, default_value_t = Device::MFU, value_name = "SHARE", value_parser = cli::positive)]
    mfu: f64,
    /// Bytes of one number in KV: 2 by default, 4 on the CPU
    #[arg(long, value_name = "BYTES", value_parser = cli::positive)]
    kv_bytes: Option<f64>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &MoveArgs, out: &mut impl Write) -> anyhow::Result<()> {
    if args.held > args.tokens {
        let (held, tokens) = (args.held, args.tokens);
        return Err(BadInput(format!("--held is {held}, more than the {tokens} tokens of the sequence; give at most that")).into());
    }
    if args.mfu > 1.0 {
        return Err(BadInput(format!("--mfu is {}; give a share of the peak, at most 1", args.mfu)).into());
    }
    let mut device = find_device(&args.device).map_err(|error| bad_input(&error))?;
    device.mfu = args.mfu;
    let shape = find_model(&args.model)?;
    let kv_bytes = args.kv_bytes.unwrap_or(if device.name == "cpu" { 4.0 } else { shape.kv_dtype_bytes });
    let shape = shape.with_kv_dtype_bytes(kv_bytes);
    let step = StepCoefficients::from_profile(&shape, &device);
    let batch = f64::from(args.batch);
    let step_s = step.step_s(&StepLoad::decode(batch, batch * f64::from(args.context)));
    let priced: Vec<(Link, MovePrice)> = links(args)?
        .into_iter()
        .map(|link| {
            let case = MoveCase {
                kv_bytes_per_token: shape.kv_bytes(Tokens(1)),
                block_size: BlockSize::DEFAULT,
                link: &link,
                step: &step,
                step_s,
                tokens: Tokens(args.tokens),
                held: Tokens(args.held),
                decodes: !args.waiting,
                queue_s: args.queue.as_secs_f64(),
            };
            let price = MovePrice::of(&case);
            (link, price)
        })
        .collect();
    if args.json {
        let links: Vec<Value> = priced.iter().map(|(link, price)| as_json(link, price)).collect();
        let object = json!({
            "model": shape.name, "device": device.name, "tokens": args.tokens, "held_tokens": args.held, "step_ms": step_s * 1e3,
            "links": links,
        });
        serde_json::to_writer_pretty(&mut *out, &object)?;
        writeln!(out)?;
        return Ok(());
    }
    let state = if args.waiting { "waits" } else { "decodes" };
    writeln!(out, "{} on {}: {} that {state}, {} of it at the target", shape.name, device.name, Tokens(args.tokens), args.held)?;
    for (link, price) in &priced {
        writeln!(out)?;
        table::print_move(link, price, out)?;
    }
    Ok(())
}

fn links(args: &MoveArgs) -> anyhow::Result<Vec<Link>> {
    let names = match (&args.link, args.bandwidth) {
        (_, Some(gb_per_s)) => return Ok(vec![Link::custom(gb_per_s).with_latency(args.latency.as_secs_f64())]),
        (Some(name), None) => vec![name.as_str()],
        (None, None) => Link::names(),
    };
    let link = |name| Link::preset(name).map(|link| link.with_latency(args.latency.as_secs_f64()));
    Ok(names.into_iter().map(link).collect::<Result<_, _>>().map_err(|error| bad_input(&error))?)
}

fn as_json(link: &Link, price: &MovePrice) -> Value {
    let way = |way| {
        price.way(way).map(|price| {
            let (cost, total, gap, compute) = (price.cost_s(), price.total_s, price.gap_s, price.compute_s);
            json!({"cost_ms": cost * 1e3, "total_ms": total * 1e3, "gap_ms": gap * 1e3, "compute_ms": compute * 1e3})
        })
    };
    json!({
        "link": link.name,
        "bytes_per_s": link.bytes_per_s,
        "latency_ms": link.latency_s * 1e3,
        "kv_bytes": price.bytes,
        "copy_rounds": price.rounds,
        "copy_ms": price.copy_s * 1e3,
        "kv": way(MoveWay::Kv),
        "fetch": way(MoveWay::Fetch),
        "recompute": way(MoveWay::Recompute),
        "cheapest": price.cheapest,
        "break_even_bytes_per_s": price.break_even_bytes_per_s.is_finite().then_some(price.break_even_bytes_per_s),
    })
}
