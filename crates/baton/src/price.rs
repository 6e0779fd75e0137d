//! `baton price`: what prefill, decode, KV, migration, adapters and experts cost, as a table or as JSON.

use std::{fs::File, io::Write, path::Path};

use anyhow::Context;
use baton_cost::{Device, Link, ModelShape, UnknownName, agent::AgentTask, lecture};
use baton_gguf::{GgufError, Header};
use baton_units::Tokens;
use clap::{Args, Subcommand};

use crate::cli::BadInput;

mod measure;
mod migration;
mod quote;
mod table;

use quote::{Lora, Question, Quote};

/// Ten times the longest context of any model; bounds the work of chunking.
const TOKENS_MAX: u32 = 10_000_000;

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct PriceArgs {
    #[command(subcommand)]
    command: Option<PriceCommand>,
    /// Model: a name, or the path of a config.json or .gguf file
    #[arg(long, default_value = "llama-2-7b-gqa8", value_name = "NAME|PATH")]
    model: String,
    /// Device: a100, h100, h200, b200, l40s, a10, or cpu, which is measured
    #[arg(long, default_value = "h100", value_name = "NAME")]
    device: String,
    /// Link between replicas: nvlink, pcie, ethernet
    #[arg(long, default_value = "nvlink", value_name = "NAME", conflicts_with = "bandwidth")]
    link: String,
    /// Bandwidth of any other link, in GB/s
    #[arg(long, value_name = "GB/S")]
    bandwidth: Option<f64>,
    /// Prompt length in tokens
    #[arg(long, default_value_t = 4096, value_name = "N")]
    tokens: u32,
    /// Tokens of the prompt whose KV the replica has
    #[arg(long, default_value_t = 0, value_name = "N")]
    cached: u32,
    /// Token budget of a step; without it a prefill is one step
    #[arg(long, value_name = "N")]
    chunk: Option<u32>,
    /// Sequences that decode together
    #[arg(long, default_value_t = 1, value_name = "N")]
    batch: u32,
    /// Context of each of them, in tokens; the prompt length by default
    #[arg(long, value_name = "N")]
    context: Option<u32>,
    /// Share of the device's peak arithmetic that a prefill reaches
    #[arg(long, default_value_t = Device::MFU, value_name = "SHARE")]
    mfu: f64,
    /// Bytes of one number in KV: 2 by default, 4 on the CPU, 1 for FP8, 0.375 for 2 bits in groups of 32
    #[arg(long, value_name = "BYTES")]
    kv_bytes: Option<f64>,
    /// Bytes of one weight, such as 1 for FP8; what the model's description says by default
    #[arg(long, value_name = "BYTES")]
    weight_bytes: Option<f64>,
    /// Also price low-rank adapters of this rank
    #[arg(long, value_name = "RANK")]
    lora_rank: Option<u32>,
    /// Adapters in use
    #[arg(long, default_value_t = 500, value_name = "N", requires = "lora_rank")]
    lora_adapters: u32,
    /// Adapters that stay in device memory
    #[arg(long, default_value_t = 50, value_name = "N", requires = "lora_rank")]
    lora_resident: u32,
    /// Exponent of Zipf's law for the popularity of adapters and experts; 0 is uniform
    #[arg(long, default_value_t = 1.0, value_name = "S")]
    zipf: f64,
    /// Also price an agent task: steps, tokens of the first prompt, tokens that each step adds, such as 20,2000,300
    #[arg(long, value_name = "STEPS,FIRST,GROWTH", value_parser = parse_task)]
    agent: Option<AgentTask>,
    /// Replicas that the agent task's steps may be scattered over
    #[arg(long, default_value_t = 8, value_name = "N", requires = "agent")]
    replicas: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum PriceCommand {
    /// Print what it costs to let one sequence go on at another replica, by each way and link
    Move(migration::MoveArgs),
    /// Print every number of the lecture that Baton implements
    Lecture {
        /// Print a JSON array of {id, value, unit}
        #[arg(long)]
        json: bool,
    },
}

/// Prints what was asked for. A name or number that makes no sense is a [`BadInput`].
pub(crate) fn run(args: &PriceArgs, out: &mut impl Write) -> anyhow::Result<()> {
    match &args.command {
        Some(PriceCommand::Move(args)) => return migration::run(args, out),
        Some(PriceCommand::Lecture { json }) => return print_lecture(*json, out),
        None => {}
    }
    let quote = Quote::new(&question(args)?);
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &quote)?;
        writeln!(out)?;
    } else {
        table::print_quote(&quote, out)?;
    }
    Ok(())
}

/// The device named, or this machine's CPU by measurement, which takes about half a second.
pub(crate) fn find_device(name: &str) -> Result<Device, UnknownName> {
    if name.eq_ignore_ascii_case("cpu") {
        return Ok(measure::cpu());
    }
    Device::preset(name).map_err(|mut error| {
        error.valid.push("cpu");
        error
    })
}

/// A preset, or the shape in a `config.json` or `.gguf` file, or in a folder with a `config.json`.
pub(crate) fn find_model(name: &str) -> anyhow::Result<ModelShape> {
    let unknown = match ModelShape::preset(name) {
        Ok(shape) => return Ok(shape),
        Err(unknown) => unknown,
    };
    let path = Path::new(name);
    if path.is_dir() {
        return read_config(&path.join("config.json"));
    }
    if path.is_file() {
        return if starts_like_gguf(path)? { read_gguf(path) } else { read_config(path) };
    }
    Err(BadInput(format!("{unknown}, or the path of a config.json or .gguf file")).into())
}

fn print_lecture(json: bool, out: &mut impl Write) -> anyhow::Result<()> {
    let rows = lecture::rows();
    if json {
        serde_json::to_writer_pretty(&mut *out, &rows)?;
        writeln!(out)?;
    } else {
        table::print_lecture(&rows, out)?;
    }
    Ok(())
}

fn question(args: &PriceArgs) -> anyhow::Result<Question> {
    check(args)?;
    let mut device = find_device(&args.device).map_err(|error| bad_input(&error))?;
    device.mfu = args.mfu;
    let link = match args.bandwidth {
        Some(gb_per_s) => Link::custom(gb_per_s),
        None => Link::preset(&args.link).map_err(|error| bad_input(&error))?,
    };
    let shape = find_model(&args.model)?;
    // Our CPU engine keeps KV in f32.
    let kv_bytes = args.kv_bytes.unwrap_or(if device.name == "cpu" { 4.0 } else { shape.kv_dtype_bytes });
    let weight_bytes = args.weight_bytes.unwrap_or(shape.bytes_per_weight);
    Ok(Question {
        shape: shape.with_kv_dtype_bytes(kv_bytes).with_bytes_per_weight(weight_bytes),
        device,
        link,
        tokens: Tokens(args.tokens),
        cached: Tokens(args.cached),
        chunk: Tokens(args.chunk.unwrap_or(0)),
        batch: args.batch,
        context: Tokens(args.context.unwrap_or(args.tokens)),
        zipf: args.zipf,
        lora: args.lora_rank.map(|rank| Lora { rank, adapters: args.lora_adapters, resident: args.lora_resident }),
        agent: args.agent.map(|task| (task, args.replicas)),
    })
}

fn check(args: &PriceArgs) -> Result<(), BadInput> {
    let positive =
        [("--bandwidth", args.bandwidth), ("--mfu", Some(args.mfu)), ("--kv-bytes", args.kv_bytes), ("--weight-bytes", args.weight_bytes)];
    for (option, value) in positive {
        if let Some(value) = value.filter(|value| !(value.is_finite() && *value > 0.0)) {
            return Err(BadInput(format!("{option} is {value}; give a number above 0")));
        }
    }
    let at_least_one = [
        ("--tokens", args.tokens),
        ("--batch", args.batch),
        ("--context", args.context.unwrap_or(1)),
        ("--chunk", args.chunk.unwrap_or(1)),
        ("--lora-rank", args.lora_rank.unwrap_or(1)),
        ("--lora-adapters", args.lora_adapters),
        ("--replicas", args.replicas),
    ];
    if let Some((option, _)) = at_least_one.iter().find(|(_, value)| *value == 0) {
        return Err(BadInput(format!("{option} is 0; give at least 1")));
    }
    for (option, value) in [("--tokens", args.tokens), ("--context", args.context.unwrap_or(1))] {
        if value > TOKENS_MAX {
            return Err(BadInput(format!("{option} is {value}; give at most {TOKENS_MAX}")));
        }
    }
    if args.cached > args.tokens {
        let (cached, tokens) = (args.cached, args.tokens);
        return Err(BadInput(format!("--cached is {cached}, more than the {tokens} tokens of the prompt; give at most that")));
    }
    if !(0.0..=10.0).contains(&args.zipf) {
        return Err(BadInput(format!("--zipf is {}; give 0 to 10", args.zipf)));
    }
    if args.mfu > 1.0 {
        return Err(BadInput(format!("--mfu is {}; give a share of the peak, at most 1", args.mfu)));
    }
    Ok(())
}

fn parse_task(text: &str) -> Result<AgentTask, String> {
    let parts: Vec<u32> = text.split(',').map_while(|part| part.trim().parse().ok()).collect();
    // Bounds keep the longest prompt within 32 bits.
    match parts[..] {
        [steps @ 1..=10_000, first @ 1..=10_000_000, growth @ 0..=100_000] => Ok(AgentTask { steps, first, growth }),
        _ => Err("give steps, tokens of the first prompt and tokens added per step, such as 20,2000,300".to_owned()),
    }
}

fn bad_input(error: &UnknownName) -> BadInput {
    BadInput(error.to_string())
}

fn read_config(path: &Path) -> anyhow::Result<ModelShape> {
    let text = std::fs::read_to_string(path).map_err(|error| BadInput(format!("cannot read {}: {error}", path.display())))?;
    let shape = ModelShape::from_hf_config(&text).map_err(|error| BadInput(format!("{}: {error}", path.display())))?;
    Ok(shape)
}

fn starts_like_gguf(path: &Path) -> anyhow::Result<bool> {
    Ok(read_start(path, 4)? == b"GGUF")
}

/// Reads no more of the file than its header, which is a few MB at most where the whole may be hundreds of GB.
fn read_gguf(path: &Path) -> anyhow::Result<ModelShape> {
    let whole = std::fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?.len();
    let mut length = 16 << 20;
    let header = loop {
        match Header::parse(&read_start(path, length)?) {
            Err(GgufError::Truncated { .. }) if length < whole => length *= 4,
            parsed => break parsed,
        }
    };
    let shape = header.map_err(Into::into).and_then(|header| ModelShape::from_gguf(&header));
    Ok(shape.map_err(|error| BadInput(format!("{}: {error}", path.display())))?)
}

fn read_start(path: &Path, length: u64) -> anyhow::Result<Vec<u8>> {
    use std::io::Read;
    let mut bytes = Vec::new();
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    file.take(length).read_to_end(&mut bytes).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests;
