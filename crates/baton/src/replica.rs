//! `baton replica`: one engine on the network.

use std::{
    fs::File,
    io::Write as _,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result};
use baton_cost::{Device, ModelShape, StepCoefficients};
use baton_engine::{EngineConfig, Executor, Order, Timed, TokenBudget, TokenSource};
use baton_gguf::Header;
use baton_link::read_fleet_key;
use baton_model::{CpuConfig, CpuExecutor};
use baton_replica::{MigrationConfig, Pace, ReplicaConfig};
use baton_text::{Clock, Tokenizer};
use baton_units::{BlockSize, Blocks, Tokens};
use clap::{Args, ValueEnum};
use tokio::{net::TcpListener, sync::oneshot};

use crate::{
    cli::{BadInput, Size, positive, some_span},
    host, model_pull, price,
};

mod prior;

/// Of `timed`, where nothing else is asked for.
pub(crate) const TIMED_MODEL: &str = "llama-3-8b";
const TIMED_DEVICE: &str = "h100";
/// Context that an emulated engine serves when its model's is unknown.
const TIMED_CONTEXT: u32 = 8192;
/// KV of a real engine is f32.
const CPU_KV_BYTES: f64 = 4.0;
/// KV memory of a replica that is not told how much, unless half of what is free is less.
const KV_MEMORY: Size = Size(1 << 30);
/// Bounds of a step's tokens when they follow from its measured time: more than the most gains nothing on a CPU.
const CPU_BUDGET: (Tokens, Tokens) = (Tokens(16), Tokens(1024));
const TIMED_BUDGET: (Tokens, Tokens) = (Tokens(64), Tokens(8192));

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum EngineKind {
    /// Computes on this machine's CPU
    Cpu,
    /// Computes nothing and takes the time that the cost model says
    Timed,
}

impl EngineKind {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Timed => "timed",
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct ReplicaArgs {
    #[arg(long, value_enum, default_value_t = EngineKind::Cpu)]
    engine: EngineKind,
    /// cpu: a GGUF file, a folder with safetensors, or a known name (default smollm2-135m-instruct). timed: a model shape by name
    /// or file (default llama-3-8b)
    #[arg(long, value_name = "PATH|NAME")]
    model: Option<String>,
    /// Name under which the model is served, once for each name; default: the model's own
    #[arg(long, value_name = "NAME")]
    served_model_name: Vec<String>,
    /// timed only: device whose speed and memory are taken; default h100
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// timed only: real seconds per model second
    #[arg(long, value_parser = positive, value_name = "X")]
    time_scale: Option<f64>,
    /// timed only: bytes4 counts 4 bytes as a token; or a GGUF or tokenizer.json file or its folder
    #[arg(long, value_name = "bytes4|PATH")]
    tokenizer: Option<String>,
    /// KV blocks; default: what --kv-memory holds
    #[arg(long, value_name = "N", conflicts_with = "kv_memory", value_parser = clap::value_parser!(u32).range(1..))]
    blocks: Option<u32>,
    /// Memory for KV; default: for cpu 1GiB or half of what is free, for timed what the weights leave on the device
    #[arg(long, value_name = "SIZE")]
    kv_memory: Option<Size>,
    /// Tokens per KV block
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    block_size: u32,
    /// Prompt and output of a request, in tokens; default: the model's context
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    max_model_len: Option<u32>,
    /// Requests in one step, at most
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_running: u32,
    /// Longest step, from which the tokens of a step follow; default 200ms for cpu, 50ms for timed
    #[arg(long, value_parser = some_span, value_name = "SPAN", conflicts_with = "token_budget")]
    tbt_target: Option<Duration>,
    /// Tokens of one step, fixed
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    token_budget: Option<u32>,
    /// cpu only: threads that compute
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS")]
    host: IpAddr,
    /// 0 picks a free one
    #[arg(long, default_value_t = 8100)]
    port: u16,
    /// Name of the replica in its fleet
    #[arg(long, default_value = "r0", value_name = "NAME")]
    id: String,
    /// Take part in live migration: port for gateways, 0 picks a free one
    #[arg(long, value_name = "PORT")]
    migration_port: Option<u16>,
    /// Port to which other replicas bring KV; 0 picks a free one
    #[arg(long, value_name = "PORT", default_value_t = 0, requires = "migration_port")]
    migration_kv_port: u16,
    /// Address that gateways and replicas reach this one by; outside of loopback it needs --fleet-key-file
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", requires = "migration_port")]
    migration_host: IpAddr,
    /// File with the key that all gateways and replicas of the fleet share
    #[arg(long, value_name = "PATH", requires = "migration_port")]
    fleet_key_file: Option<PathBuf>,
    /// End when stdin ends: for a parent that holds its other end
    #[arg(long)]
    with_parent: bool,
}

/// All that a replica needs to serve.
struct Parts {
    config: ReplicaConfig,
    executor: Box<dyn Executor + Send>,
    tokenizer: Tokenizer,
}

pub(crate) fn run(args: &ReplicaArgs) -> Result<()> {
    let migration = migration(args)?;
    let listener = host::listen((args.host, args.port).into(), "pass another --port, or 0 for a free one")?;
    let parent_gone = if args.with_parent { Some(host::parent_gone()?) } else { None };
    let mut parts = match args.engine {
        EngineKind::Cpu => cpu(args)?,
        EngineKind::Timed => timed(args)?,
    };
    parts.config.migration = migration;
    serve(parts, listener, parent_gone)
}

#[tokio::main]
async fn serve(parts: Parts, listener: std::net::TcpListener, parent_gone: Option<oneshot::Receiver<()>>) -> Result<()> {
    let listener = TcpListener::from_std(listener)?;
    let mut signals = host::StopSignals::new()?;
    let stop = async move {
        let parent_gone = async {
            match parent_gone {
                Some(gone) => drop(gone.await),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = signals.next() => {}
            () = parent_gone => {}
        }
    };
    // Whoever started this reads the address from here; nobody else may be there to read.
    writeln!(std::io::stdout(), "listening on http://{}", listener.local_addr()?).context("stdout is closed")?;
    Ok(baton_replica::serve(parts.config, parts.executor, Arc::new(parts.tokenizer), listener, stop).await?)
}

fn migration(args: &ReplicaArgs) -> Result<Option<MigrationConfig>> {
    let Some(control_port) = args.migration_port else { return Ok(None) };
    let fleet_key = args.fleet_key_file.as_deref().map(read_fleet_key).transpose().map_err(|error| BadInput(error.to_string()))?;
    let (host, kv_port) = (args.migration_host, args.migration_kv_port);
    let migration = MigrationConfig { host, control_port, kv_port, fleet_key, ..MigrationConfig::default() };
    migration.check().map_err(|error| BadInput(error.to_string()))?;
    Ok(Some(migration))
}

fn cpu(args: &ReplicaArgs) -> Result<Parts> {
    for (flag, given) in
        [("--device", args.device.is_some()), ("--time-scale", args.time_scale.is_some()), ("--tokenizer", args.tokenizer.is_some())]
    {
        refuse(given, flag, "timed")?;
    }
    let weights = model_pull::pull(args.model.as_deref().unwrap_or(model_pull::DEFAULT_MODEL))?;
    let tokenizer = model_tokenizer(&weights.path)?;
    let blocks = cpu_blocks(args, &weights.path)?;
    let config = CpuConfig {
        threads: args.threads.unwrap_or(1) as usize,
        block_size: args.block_size as usize,
        blocks: blocks.0 as usize,
        kernel: None,
        max_model_len: args.max_model_len.map(|tokens| tokens as usize),
    };
    let mut executor = CpuExecutor::load(&weights.path, &config).map_err(|error| {
        let (path, error) = (weights.path.display().to_string(), error.to_string());
        BadInput(if error.starts_with(&path) { error } else { format!("{path}: {error}") })
    })?;
    let prior = prior::measure(&mut executor, blocks, block_size(args)?);
    let length = Tokens(executor.max_model_len());
    let mut engine = engine_config(args, &weights.name, blocks, length, prior)?;
    engine.budget = budget(args, Duration::from_millis(200), CPU_BUDGET);
    let mut config = ReplicaConfig::new(&args.id, &weights.name, engine, Pace::Measured);
    config.model_root = Some(weights.path.display().to_string());
    rename(&mut config, args);
    Ok(Parts { config, executor: Box::new(executor), tokenizer })
}

fn timed(args: &ReplicaArgs) -> Result<Parts> {
    refuse(args.threads.is_some(), "--threads", "cpu")?;
    let shape = price::find_model(args.model.as_deref().unwrap_or(TIMED_MODEL))?;
    let device = price::find_device(args.device.as_deref().unwrap_or(TIMED_DEVICE)).map_err(|error| BadInput(error.to_string()))?;
    let tokenizer = read_tokenizer(args.tokenizer.as_deref().unwrap_or("bytes4"))?;
    let blocks = timed_blocks(args, &shape, &device)?;
    let context = if shape.max_context > 0 { shape.max_context } else { TIMED_CONTEXT };
    let step = StepCoefficients::from_profile(&shape, &device);
    let length = Tokens(args.max_model_len.unwrap_or(context));
    let mut engine = engine_config(args, &shape.name, blocks, length, step)?;
    engine.budget = budget(args, Duration::from_millis(50), TIMED_BUDGET);
    let tokens = match args.tokenizer.as_deref() {
        None | Some("bytes4") => TokenSource::Text,
        Some(_) => TokenSource::Vocabulary(u32::try_from(tokenizer.vocab_size()).context("the vocabulary is larger than 32 bits")?),
    };
    let executor = Timed::new(step, blocks, engine.block_size, tokens, tokenizer.eos_ids().to_vec());
    let pace = Pace::Modelled { time_scale: args.time_scale.unwrap_or(1.0) };
    let mut config = ReplicaConfig::new(&args.id, &shape.name, engine, pace);
    rename(&mut config, args);
    Ok(Parts { config, executor: Box::new(executor), tokenizer })
}

/// Whether an emulated replica of `model` on `device` could start, told at once and once for a whole fleet.
pub(crate) fn check_timed(model: Option<&str>, device: Option<&str>) -> Result<()> {
    let shape = price::find_model(model.unwrap_or(TIMED_MODEL))?;
    let name = device.unwrap_or(TIMED_DEVICE);
    // This machine's CPU would have to be measured; it has room for any model that is emulated.
    if !name.eq_ignore_ascii_case("cpu") {
        let device = price::find_device(name).map_err(|error| BadInput(error.to_string()))?;
        blocks_left(&shape, &device, None, 1)?;
    }
    Ok(())
}

fn refuse(given: bool, flag: &str, engine: &str) -> Result<(), BadInput> {
    if given { Err(BadInput(format!("{flag} means something for --engine {engine} only; leave it out"))) } else { Ok(()) }
}

fn engine_config(args: &ReplicaArgs, model: &str, blocks: Blocks, length: Tokens, prior: StepCoefficients) -> Result<EngineConfig> {
    Ok(EngineConfig {
        block_size: block_size(args)?,
        max_running: args.max_running,
        order: Order::Priority,
        ..EngineConfig::new(model, blocks, length, prior)
    })
}

fn block_size(args: &ReplicaArgs) -> Result<BlockSize> {
    BlockSize::new(args.block_size).context("--block-size is at least 1")
}

fn budget(args: &ReplicaArgs, target: Duration, (least, most): (Tokens, Tokens)) -> TokenBudget {
    match args.token_budget {
        Some(tokens) => TokenBudget::Fixed(Tokens(tokens)),
        None => TokenBudget::Latency { target: args.tbt_target.unwrap_or(target), least, most },
    }
}

fn rename(config: &mut ReplicaConfig, args: &ReplicaArgs) {
    if !args.served_model_name.is_empty() {
        config.models.clone_from(&args.served_model_name);
    }
}

fn cpu_blocks(args: &ReplicaArgs, path: &Path) -> Result<Blocks> {
    if let Some(blocks) = args.blocks {
        return Ok(Blocks(blocks));
    }
    let memory = args.kv_memory.unwrap_or(Size(KV_MEMORY.0.min(host::memory_available() / 2)));
    let shape = price::find_model(&path.to_string_lossy())?;
    blocks_in(memory.0 as f64, &shape, CPU_KV_BYTES, args.block_size)
        .ok_or_else(|| BadInput(format!("{memory} hold no KV block of {}; give more --kv-memory", shape.name)).into())
}

fn timed_blocks(args: &ReplicaArgs, shape: &ModelShape, device: &Device) -> Result<Blocks> {
    if let Some(blocks) = args.blocks {
        return Ok(Blocks(blocks));
    }
    blocks_left(shape, device, args.kv_memory, args.block_size)
}

fn blocks_left(shape: &ModelShape, device: &Device, given: Option<Size>, block_size: u32) -> Result<Blocks> {
    let left = device.usable_bytes() - shape.weight_bytes();
    let memory = given.map_or(left, |size| size.0 as f64);
    blocks_in(memory, shape, shape.kv_dtype_bytes, block_size).ok_or_else(|| {
        let (weights, usable) = (Size(shape.weight_bytes() as u64), Size(device.usable_bytes() as u64));
        let message =
            format!("{} has {weights} of weights, {} has {usable}: no room for KV; give --kv-memory or --blocks", shape.name, device.name);
        BadInput(message).into()
    })
}

fn blocks_in(bytes: f64, shape: &ModelShape, dtype_bytes: f64, block_size: u32) -> Option<Blocks> {
    let blocks = bytes / (shape.kv_bytes_per_token(dtype_bytes) * f64::from(block_size));
    (blocks >= 1.0).then_some(Blocks(blocks.min(f64::from(u32::MAX)) as u32))
}

/// Tokens of KV that a replica of this model on the CPU holds in so much memory.
pub(crate) fn cpu_kv_tokens(path: &Path, memory: Size) -> Result<u64> {
    let shape = price::find_model(&path.to_string_lossy())?;
    Ok((memory.0 as f64 / shape.kv_bytes_per_token(CPU_KV_BYTES)) as u64)
}

/// `bytes4`, a GGUF file, a `tokenizer.json`, or a folder with one.
pub(crate) fn read_tokenizer(name: &str) -> Result<Tokenizer> {
    if name == "bytes4" {
        return Ok(Tokenizer::bytes4());
    }
    model_tokenizer(Path::new(name))
}

/// The tokenizer that belongs to weights.
pub(crate) fn model_tokenizer(path: &Path) -> Result<Tokenizer> {
    let bad = |error: &dyn std::fmt::Display| BadInput(format!("no tokenizer in {}: {error}", path.display()));
    let path = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
    if path.extension().is_some_and(|extension| extension == "json") {
        return Ok(Tokenizer::from_hf(&path).map_err(|error| bad(&error))?.with_clock(&clock()));
    }
    let header = read_header(&path)?;
    Ok(Tokenizer::from_gguf(&header).map_err(|error| bad(&error))?.with_clock(&clock()))
}

/// For templates that write the date into their prompts.
fn clock() -> Clock {
    Arc::new(|| SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs())
}

fn read_header(path: &Path) -> Result<Header> {
    let file = File::open(path).map_err(|error| BadInput(format!("cannot open {}: {error}", path.display())))?;
    // SAFETY: the mapping is dropped before this function returns; a file that shrinks meanwhile ends the process, as for any
    // reader of weights.
    let bytes = unsafe { memmap2::Mmap::map(&file) }.with_context(|| format!("cannot read {}", path.display()))?;
    Header::parse(&bytes).map_err(|error| BadInput(format!("{}: {error}", path.display())).into())
}
