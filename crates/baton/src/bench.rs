//! `baton bench`: an open-loop load generator for any OpenAI address.

pub(crate) mod client;
mod compare;
mod drive;
mod report;
mod sizing;
mod text;
mod workload;

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum as _};
use fastrand::Rng;

use self::{
    client::Client,
    drive::{Target, drive},
    report::{Report, Setting, Slo},
    sizing::Wishes,
    text::Writer,
    workload::{Arrivals, Generator, Plan, Workload},
};
use crate::cli::{BadInput, not_negative, positive, span};

/// Time that runs whose size is chosen here should take together; measurement and surprises fill it up to 5 minutes.
const BUDGET: Duration = Duration::from_secs(200);

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// OpenAI address to load
    #[arg(long, default_value = "http://127.0.0.1:8080", value_name = "URL")]
    url: String,
    /// Model to ask for; default: the first that the address lists
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// API key, sent as a bearer token
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// What is sent
    #[arg(long, value_enum, default_value_t = Workload::Agent)]
    workload: Workload,
    /// Fixes content and arrival times
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Tasks or conversations (agent, chat); default: what fits a few minutes
    #[arg(long, value_name = "N")]
    tasks: Option<usize>,
    /// Requests (shared, mixed); default: what fits a few minutes
    #[arg(long, value_name = "N")]
    requests: Option<usize>,
    /// Time during which tasks or requests begin, for example 60s
    #[arg(long, value_parser = span)]
    duration: Option<Duration>,
    /// Tasks or requests per second; default: 60 % of measured capacity
    #[arg(long, value_parser = positive)]
    rate: Option<f64>,
    #[arg(long, value_enum, default_value_t = Arrivals::Poisson)]
    arrivals: Arrivals,
    /// Multiplies all lengths; 1 is the described shape, auto fits it to the target's context and speed
    #[arg(long, default_value = "auto", value_name = "auto|X")]
    scale_shape: ScaleShape,
    /// Multiplies pauses between the steps of a task; 0 leaves them out
    #[arg(long, default_value_t = 1.0, value_parser = not_negative, value_name = "X")]
    think_scale: f64,
    /// Real seconds per model second of an emulated fleet; pauses and gaps stretch with it, and times are reported in model time
    #[arg(long, default_value_t = 1.0, value_parser = positive, value_name = "X")]
    time_scale: f64,
    /// A request is good when its first token comes within this time
    #[arg(long, default_value = "2s", value_parser = span)]
    slo_ttft: Duration,
    /// and its further tokens come at least this fast on average
    #[arg(long, default_value = "200ms", value_parser = span)]
    slo_tpot: Duration,
    /// Policies of a Baton gateway to run in turn on the same load, caches cleared between
    #[arg(long, value_delimiter = ',', value_name = "A,B")]
    compare: Vec<String>,
    /// Do not name sessions in x-session-id
    #[arg(long)]
    no_session: bool,
    /// Longest time for one request
    #[arg(long, default_value = "10m", value_parser = span)]
    timeout: Duration,
    /// Print one JSON object in place of tables
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy)]
enum ScaleShape {
    Auto,
    By(f64),
}

impl std::str::FromStr for ScaleShape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" { Ok(Self::Auto) } else { positive(text).map(Self::By).map_err(|error| format!("{error}, or auto")) }
    }
}

#[tokio::main]
pub(crate) async fn run(args: &BenchArgs) -> Result<()> {
    let wishes = args.wishes()?;
    let client = Client::new(&args.url, args.key.clone(), args.timeout)?;
    let (target, context) = meet(client, args).await?;
    let runs = args.compare.len().max(1) as u32;
    let capacity = if wishes.need_capacity() { Some(sizing::probe(&target, args.seed).await?) } else { None };
    let generator =
        Generator { workload: args.workload, scale: 1.0, arrivals: args.arrivals, rate: 1.0, think: args.think_scale, seed: args.seed };
    let (generator, plan) = sizing::fit(generator, &wishes, capacity, context, (BUDGET / runs).div_f64(args.time_scale));
    eprintln!("{}", announcement(args, &generator, &plan, &target, context));
    let bench = Bench { target: Arc::new(target), generator, plan, slo: Slo { ttft: args.slo_ttft, tpot: args.slo_tpot } };
    if args.compare.is_empty() {
        let report = bench.run(None).await;
        print(&if args.json { serde_json::to_string(&report)? } else { report.table() });
    } else {
        let reports = compare::run(&bench, &args.compare).await?;
        print(&if args.json { serde_json::to_string(&compare::json(&reports))? } else { report::comparison(&reports) });
    }
    Ok(())
}

#[allow(clippy::print_stdout, reason = "the numbers are this command's result")]
fn print(text: &str) {
    println!("{}", text.trim_end());
}

impl BenchArgs {
    fn wishes(&self) -> Result<Wishes> {
        let sessions = match (self.workload, self.tasks, self.requests) {
            (Workload::Agent | Workload::Chat, tasks, None) => tasks,
            (Workload::Shared | Workload::Mixed, None, requests) => requests,
            (Workload::Agent | Workload::Chat, ..) => {
                return Err(BadInput("this workload is counted in tasks: use --tasks N".into()).into());
            }
            (Workload::Shared | Workload::Mixed, ..) => {
                return Err(BadInput("this workload is counted in requests: use --requests N".into()).into());
            }
        };
        if sessions == Some(0) {
            return Err(BadInput("nothing to send: --tasks and --requests begin at 1".into()).into());
        }
        let scale = match self.scale_shape {
            ScaleShape::Auto => None,
            ScaleShape::By(scale) => Some(scale),
        };
        Ok(Wishes { sessions, scale, rate: self.rate, duration: self.duration })
    }
}

/// Asks the target for its model, context and tokenizer. The context is known only where the server is of vLLM's family, and those
/// know `ignore_eos` as well.
async fn meet(client: Client, args: &BenchArgs) -> Result<(Target, Option<u32>)> {
    let models = client.models().await?;
    let card = match &args.model {
        Some(name) => {
            models.into_iter().find(|card| card.id == *name).ok_or_else(|| BadInput(format!("{} has no model {name}", args.url)))?
        }
        None => models.into_iter().next().with_context(|| format!("{} lists no model", args.url))?,
    };
    let sample_words = 400;
    let writer = Writer::by_bytes();
    let sample = writer.words(&mut Rng::with_seed(args.seed), sample_words);
    let tokens = client.count_tokens(&card.id, &sample).await.unwrap_or(0);
    let writer = writer.calibrated(sample_words, tokens);
    let ignore_eos = card.max_model_len.is_some();
    Ok((
        Target { client, model: card.id, ignore_eos, send_session: !args.no_session, writer, time_scale: args.time_scale },
        card.max_model_len,
    ))
}

/// What will be sent, and how to send the same again.
fn announcement(args: &BenchArgs, generator: &Generator, plan: &Plan, target: &Target, context: Option<u32>) -> String {
    let volume = plan.volume();
    let (unit, flag) = match args.workload {
        Workload::Agent | Workload::Chat => ("tasks", "--tasks"),
        Workload::Shared | Workload::Mixed => ("requests", "--requests"),
    };
    let name = args.workload.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
    let sessions = plan.sessions.len();
    let each = if plan.requests() > sessions { format!(" with {} requests", plan.requests()) } else { String::new() };
    let mut text = format!(
        "{name} on {} ({:.2} tokens a word): {sessions} {unit}{each}, prompts of up to {} tokens, {} in all\n\
         the same load again: --workload {name} {flag} {sessions} --scale-shape {} --rate {} --think-scale {} --seed {}",
        target.model,
        target.writer.tokens_per_word(),
        volume.context_max,
        volume.prompt,
        generator.scale,
        generator.rate,
        generator.think,
        args.seed
    );
    if context.is_some_and(|context| volume.context_max > u64::from(context)) {
        text.push_str("\nsome prompts are longer than the target's context and will be refused; lower --scale-shape");
    }
    text
}

/// One load, ready to be sent several times.
struct Bench {
    target: Arc<Target>,
    generator: Generator,
    plan: Plan,
    slo: Slo,
}

impl Bench {
    async fn run(&self, policy: Option<&str>) -> Report {
        let run = drive(&self.target, self.plan.clone(), policy.unwrap_or("load")).await;
        let setting = Setting {
            workload: self.generator.workload,
            policy: policy.map(str::to_owned),
            seed: self.generator.seed,
            scale_shape: self.generator.scale,
            rate: self.generator.rate,
            sessions: self.plan.sessions.len(),
            slo: self.slo,
        };
        Report::new(setting, &run)
    }
}
