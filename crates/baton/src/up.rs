//! `baton up`: a fleet on this machine. Replicas are child processes of this executable; the gateway runs in this process.

use std::{io::Write as _, path::Path, sync::Arc};

use anyhow::{Context, Result};
use baton_gateway::{BaseUrl, EngineConfig, EngineKind as GatewayKind, Gateway, GatewayConfig};
use baton_policy::PolicyName;
use baton_text::Tokenizer;
use baton_units::ReplicaId;
use clap::Args;
use futures_util::future::{join_all, try_join_all};
use tokio::{net::TcpListener, sync::watch};

use self::supervisor::{Recipe, Supervised};
use crate::{
    cli::{BadInput, Size, positive},
    host::{self, StopSignals},
    model_pull::{self, DEFAULT_MODEL, Weights},
    replica::{self, EngineKind},
};

mod supervisor;

/// KV of one replica takes no more than this; a small model's prefixes fit many times.
const KV_MEMORY_MAX: Size = Size(1 << 30);
/// Share of the free memory that all replicas' KV may take; weights, other processes and the page cache need the rest.
const KV_MEMORY_SHARE: f64 = 0.4;
const REPLICAS_MAX: i64 = 256;

#[derive(Debug, Args)]
pub(crate) struct UpArgs {
    /// Port of the gateway on 127.0.0.1; 0 picks a free one
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// Replicas to start
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=REPLICAS_MAX))]
    replicas: u32,
    /// Weights: a GGUF file, a folder with safetensors, or a known name; with --engine timed a model shape
    #[arg(long, value_name = "PATH|NAME")]
    model: Option<String>,
    /// Default: cpu when the weights can be had, else timed
    #[arg(long, value_enum)]
    engine: Option<EngineKind>,
    /// timed only: device whose speed and memory are taken
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// timed only: real seconds per model second
    #[arg(long, value_parser = positive, value_name = "X")]
    time_scale: Option<f64>,
    /// Rule by which a replica is chosen
    #[arg(long, default_value_t = PolicyName::Price, value_name = "NAME")]
    policy: PolicyName,
    /// cpu only: threads of each replica
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
}

/// What the replicas run.
struct Fleet {
    recipe: Recipe,
    tokenizer: Tokenizer,
    /// What the person is told of it.
    summary: String,
}

pub(crate) fn run(args: &UpArgs) -> Result<()> {
    args.check()?;
    let advice = "stop what listens there, or pass another --port (0 picks a free one)";
    // First of all, so that nobody waits for a download to learn that the port is taken.
    let listener = host::listen(([127, 0, 0, 1], args.port).into(), advice)?;
    let fleet = plan(args)?;
    start(args, listener, fleet)
}

/// All but connections runs on the main thread: the system ends a replica with the thread that started it.
#[tokio::main]
async fn start(args: &UpArgs, listener: std::net::TcpListener, fleet: Fleet) -> Result<()> {
    let listener = TcpListener::from_std(listener)?;
    let mut signals = StopSignals::new()?;
    let starts = try_join_all((0..args.replicas).map(|index| Supervised::start(&fleet.recipe, index)));
    let replicas = tokio::select! {
        replicas = starts => replicas?,
        // Before the fleet serves there is nothing to drain; replicas end as they are dropped.
        () = signals.next() => return Ok(()),
    };
    let mut config = GatewayConfig::default();
    config.policy.name = args.policy;
    config.gateway.bind = listener.local_addr()?;
    config.engines = replicas.iter().map(|replica| engine(replica.name(), replica.url().clone())).collect();
    let gateway = Gateway::new(config, Some(Arc::new(fleet.tokenizer)))?;
    serve(&gateway, listener, replicas, signals, &fleet.summary).await
}

fn engine(name: &str, url: BaseUrl) -> EngineConfig {
    // All run with the same settings on this machine.
    EngineConfig { name: Some(name.to_owned()), group: Some("up".to_owned()), ..EngineConfig::new(url, GatewayKind::Baton) }
}

/// Serves until a signal, drains, then ends the replicas. A second signal ends everything at once.
async fn serve(gateway: &Gateway, listener: TcpListener, replicas: Vec<Supervised>, signals: StopSignals, summary: &str) -> Result<()> {
    let url = format!("http://{}", listener.local_addr()?);
    let count = replicas.len();
    let (stop, stopped) = watch::channel(false);
    let supervision = replicas.into_iter().enumerate().map(|(index, replica)| {
        let id = ReplicaId(index as u32);
        replica.keep_up(move |url| gateway.replica_up(id, url), move || gateway.replica_down(id), stopped.clone())
    });
    let front = async {
        let served = gateway.serve(listener, end_on_signal(signals)).await;
        // Replicas that end on purpose are no news for the gateway's watchers.
        gateway.set_engines(Vec::new());
        // The supervisors live until they have ended their replicas, and so does the receiver.
        stop.send_replace(true);
        served
    };
    let greeting = async {
        gateway.until_ready(count).await;
        greet(&url, summary)
    };
    let (served, greeted, _) = tokio::join!(front, until(greeting, stopped.clone()), join_all(supervision));
    greeted.transpose()?;
    Ok(served?)
}

/// The future's result, or `None` once the fleet stops.
async fn until<T>(future: impl Future<Output = T>, mut stopped: watch::Receiver<bool>) -> Option<T> {
    tokio::select! {
        result = future => Some(result),
        _ = stopped.wait_for(|stopped| *stopped) => None,
    }
}

async fn end_on_signal(mut signals: StopSignals) {
    signals.next().await;
    eprintln!("stopping: running requests may finish; once more to stop at once");
    tokio::spawn(async move {
        signals.next().await;
        // Replicas end with this process.
        std::process::exit(130);
    });
}

fn greet(url: &str, summary: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "listening on {url}")?;
    writeln!(out, "\n  {summary}\n")?;
    writeln!(out, "  address   {url}/v1")?;
    writeln!(
        out,
        "  try       curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '{{\"stream\": true, \"temperature\": 0, \"messages\": \
         [{{\"role\": \"user\", \"content\": \"What is the capital of France?\"}}]}}'"
    )?;
    writeln!(out, "  measure   baton bench --url {url} --compare price,round-robin")?;
    writeln!(out, "  stop      Ctrl-C\n")?;
    Ok(out.flush()?)
}

impl UpArgs {
    fn check(&self) -> Result<(), BadInput> {
        let cpu_only = self.threads.is_some().then_some("--threads means something for --engine cpu only; leave it out");
        let timed_only = [("--device", self.device.is_some()), ("--time-scale", self.time_scale.is_some())];
        match (self.engine, cpu_only) {
            (Some(EngineKind::Timed), Some(problem)) => Err(BadInput(problem.into())),
            (Some(EngineKind::Timed), None) => Ok(()),
            (Some(EngineKind::Cpu) | None, _) => match timed_only.iter().find(|(_, given)| *given) {
                Some((flag, _)) => Err(BadInput(format!("{flag} means something with --engine timed only; add that or leave it out"))),
                None => Ok(()),
            },
        }
    }
}

/// Finds weights and sizes the replicas.
fn plan(args: &UpArgs) -> Result<Fleet> {
    let model = args.model.as_deref().unwrap_or(DEFAULT_MODEL);
    match args.engine {
        Some(EngineKind::Timed) => timed(args, args.model.as_deref()),
        Some(EngineKind::Cpu) => cpu(args, &model_pull::pull(model)?),
        None => match model_pull::pull(model) {
            Ok(weights) => cpu(args, &weights),
            Err(error) if error.is::<BadInput>() => Err(error),
            Err(error) => {
                eprintln!("no weights: {error:#}\nstarting timed replicas: they answer at the speed of a GPU, with invented words");
                timed(args, None)
            }
        },
    }
}

fn cpu(args: &UpArgs, weights: &Weights) -> Result<Fleet> {
    let threads = args.threads.unwrap_or(1);
    let memory = kv_memory(host::memory_available(), args.replicas);
    let tokens = replica::cpu_kv_tokens(&weights.path, memory)?;
    let path = utf8(&weights.path)?;
    let flags =
        ["--model", &path, "--served-model-name", &weights.name, "--threads", &threads.to_string(), "--kv-memory", &memory.0.to_string()];
    Ok(Fleet {
        recipe: Recipe::new(EngineKind::Cpu, &flags)?,
        tokenizer: replica::model_tokenizer(&weights.path)?,
        summary: format!(
            "{} on {} CPU replicas ({threads} thread and {memory} for KV each, {tokens} tokens), policy {}",
            weights.name, args.replicas, args.policy
        ),
    })
}

fn timed(args: &UpArgs, model: Option<&str>) -> Result<Fleet> {
    replica::check_timed(model, args.device.as_deref())?;
    let mut flags = Vec::new();
    for (flag, value) in [
        ("--model", model.map(str::to_owned)),
        ("--device", args.device.clone()),
        ("--time-scale", args.time_scale.map(|scale| scale.to_string())),
    ] {
        flags.extend(value.into_iter().flat_map(|value| [flag.to_owned(), value]));
    }
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    Ok(Fleet {
        recipe: Recipe::new(EngineKind::Timed, &flags)?,
        tokenizer: Tokenizer::bytes4(),
        summary: format!("{} on {} timed replicas, policy {}", model.unwrap_or(replica::TIMED_MODEL), args.replicas, args.policy),
    })
}

/// KV memory of each replica: its share of the free memory, within bounds.
fn kv_memory(available: u64, replicas: u32) -> Size {
    let share = available as f64 * KV_MEMORY_SHARE / f64::from(replicas);
    Size((share as u64).clamp(64 << 20, KV_MEMORY_MAX.0))
}

fn utf8(path: &Path) -> Result<String> {
    let path = path.canonicalize().with_context(|| format!("cannot find {}", path.display()))?;
    path.into_os_string().into_string().map_err(|path| BadInput(format!("the path {} is not UTF-8; rename it", path.display())).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kv_memory_is_shared_and_bounded() {
        assert_eq!(kv_memory(64 << 30, 3), Size(1 << 30));
        assert_eq!(kv_memory(3 << 30, 3), Size((0.4 * f64::from(1 << 30)) as u64));
        assert_eq!(kv_memory(1 << 20, 3), Size(64 << 20));
    }
}
