//! The workloads of `baton-sim` against an address in real time: the same arrivals, lengths and shared prefixes, as chat requests of
//! text that a tokenizer of four bytes a token counts as the simulator does.

mod client;
mod conversation;

use std::{collections::BTreeMap, io::Write as _, time::Duration};

use anyhow::{Context as _, Result, bail};
use baton_sim::{ClientRequest, RequestKind, Shape, Workload, WorkloadName, percentile};
use baton_units::{DurationMs, Time};
use clap::Args;
use serde::Serialize;
use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until},
};

use self::{
    client::{Client, Seen},
    conversation::Conversation,
};

/// Kinds of failure that a report names.
const FAILURES_NAMED: usize = 8;

#[derive(Debug, Args)]
pub(crate) struct PlayArgs {
    /// Address to load; several take turns
    #[arg(long, required = true, value_name = "URL")]
    url: Vec<String>,
    /// Asked for by name, since not every router tells what its engines serve
    #[arg(long, default_value = "lab-model", value_name = "NAME")]
    model: String,
    #[arg(long, default_value = "mix", value_name = "NAME")]
    workload: WorkloadName,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Replicas behind the address: the load is for so many
    #[arg(long, default_value_t = 8, value_name = "N")]
    replicas: usize,
    /// Requests of the open workloads; default: the lab's
    #[arg(long, value_name = "N")]
    requests: Option<usize>,
    /// Tasks of agents in all; default: the lab's
    #[arg(long, value_name = "N")]
    tasks: Option<usize>,
    /// Arrivals a second of the open workloads; default: the lab's
    #[arg(long, value_name = "X")]
    rate: Option<f64>,
    /// Name a session in x-session-id: agents one a task, others one a request
    #[arg(long)]
    sessions: bool,
    /// Real seconds per model second; results are in model time
    #[arg(long, default_value_t = 1.0, value_name = "X")]
    time_scale: f64,
    /// Longest time for one request, in real time
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    timeout: u64,
}

/// What a run came to, in model time.
#[derive(Debug, Serialize)]
struct Report {
    workload: String,
    seed: u64,
    requests: usize,
    failed: usize,
    failures: BTreeMap<String, usize>,
    ttft_ms: Summary,
    ttft_ms_by_kind: BTreeMap<RequestKind, Summary>,
    tpot_ms: Summary,
    /// Share of prompt tokens that engines say they had cached; `None` where they say nothing.
    hit_rate: Option<f64>,
    /// How late this program sent its requests: large figures mean that it, or the machine, was too slow.
    late_ms: Summary,
    wall_s: f64,
}

#[derive(Debug, Serialize)]
struct Summary {
    count: usize,
    mean: f64,
    p50: f64,
    p90: f64,
    p99: f64,
    max: f64,
}

impl Summary {
    fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let [p50, p90, p99, max] = [0.5, 0.9, 0.99, 1.0].map(|share| percentile(&values, share));
        Self { count: values.len(), mean: values.iter().sum::<f64>() / values.len().max(1) as f64, p50, p90, p99, max }
    }
}

/// A request that ended, with what its client needs to go on.
struct Ended {
    request: ClientRequest,
    conversation: Conversation,
    late: Duration,
    /// From when it was due.
    seen: Result<Seen>,
}

struct Sample {
    kind: RequestKind,
    ttft_ms: f64,
    tpot_ms: Option<f64>,
    prompt: u32,
    cached: Option<u32>,
}

pub(crate) async fn run(args: &PlayArgs) -> Result<()> {
    let report = Player::new(args)?.play().await?;
    writeln!(std::io::stdout(), "{}", serde_json::to_string(&report)?).context("stdout is closed")
}

struct Player<'a> {
    args: &'a PlayArgs,
    clients: Vec<Client>,
    workload: Workload,
    began: Instant,
    sent: usize,
    /// Bounded by the workload's requests in flight.
    sender: mpsc::UnboundedSender<Ended>,
    ended: mpsc::UnboundedReceiver<Ended>,
}

impl<'a> Player<'a> {
    fn new(args: &'a PlayArgs) -> Result<Self> {
        if !(args.time_scale > 0.0 && args.time_scale.is_finite()) {
            bail!("--time-scale is a number above 0");
        }
        let lab = Shape::lab(args.workload, args.replicas);
        let shape = Shape {
            requests: args.requests.unwrap_or(lab.requests),
            tasks: args.tasks.unwrap_or(lab.tasks),
            rate_per_s: args.rate.unwrap_or(lab.rate_per_s),
            ..lab
        };
        let (sender, ended) = mpsc::unbounded_channel();
        let timeout = Duration::from_secs(args.timeout);
        let clients = args.url.iter().map(|url| Client::new(url, &args.model, timeout)).collect::<Result<_>>()?;
        let workload = Workload::new(args.workload, shape, args.seed);
        Ok(Self { args, clients, workload, began: Instant::now(), sent: 0, sender, ended })
    }

    async fn play(mut self) -> Result<Report> {
        self.began = Instant::now();
        for request in self.workload.first() {
            self.send(request, Conversation::default());
        }
        let (mut samples, mut late, mut failures) = (Vec::new(), Vec::new(), BTreeMap::<String, usize>::new());
        let mut received = 0;
        while received < self.sent {
            let Ended { request, conversation, late: by, seen } = self.ended.recv().await.expect("this holds a sender");
            received += 1;
            late.push(self.model_ms(by));
            let output = match seen {
                Ok(seen) => {
                    let output = conversation::tokens(&seen.text);
                    samples.push(self.sample(&request, &seen));
                    Some((output, conversation.answered(seen.text)))
                }
                Err(error) => {
                    *failures.entry(format!("{error:#}")).or_default() += 1;
                    None
                }
            };
            let now = self.model_now();
            let next = self.workload.after(&request, output.as_ref().map(|(tokens, _)| tokens.as_slice()), now);
            if let Some(next) = next {
                // Another task begins anew.
                let goes_on = next.prompt.len() > request.prompt.len() && next.session == request.session;
                self.send(next, output.filter(|_| goes_on).map(|(_, conversation)| conversation).unwrap_or_default());
            }
        }
        Ok(self.report(&samples, &late, failures))
    }

    fn send(&mut self, request: ClientRequest, conversation: Conversation) {
        let due = self.began + self.real(request.at.since(Time::ZERO));
        let client = self.clients[self.sent % self.clients.len()].clone();
        let session = match request.session {
            _ if !self.args.sessions => None,
            Some(session) => Some(format!("task-{session}")),
            None => Some(format!("request-{}-{}", self.args.seed, self.sent)),
        };
        let sender = self.sender.clone();
        self.sent += 1;
        tokio::spawn(async move {
            let conversation = conversation.asked(&request);
            sleep_until(due).await;
            let late = due.elapsed();
            let seen = client.chat(conversation.messages(), request.output, session.as_deref(), due).await;
            // The receiver counts what was sent and outlives it.
            let _ = sender.send(Ended { request, conversation, late, seen });
        });
    }

    fn sample(&self, request: &ClientRequest, seen: &Seen) -> Sample {
        let gaps = request.output.saturating_sub(1);
        Sample {
            kind: request.kind,
            ttft_ms: self.model_ms(seen.first),
            tpot_ms: (gaps > 0).then(|| self.model_ms(seen.last.saturating_sub(seen.first)) / f64::from(gaps)),
            prompt: seen.prompt_tokens,
            cached: seen.cached_tokens,
        }
    }

    fn report(&self, samples: &[Sample], late_ms: &[f64], failures: BTreeMap<String, usize>) -> Report {
        let kinds = [RequestKind::Step, RequestKind::Short, RequestKind::Long].into_iter().filter_map(|kind| {
            let of_kind = Summary::of(samples.iter().filter(|sample| sample.kind == kind).map(|sample| sample.ttft_ms));
            (of_kind.count > 0).then_some((kind, of_kind))
        });
        let told = samples.iter().filter_map(|sample| Some((f64::from(sample.cached?), f64::from(sample.prompt))));
        let (cached, prompt) = told.fold((0.0, 0.0), |(cached, prompt), (c, p)| (cached + c, prompt + p));
        Report {
            workload: self.args.workload.to_string(),
            seed: self.args.seed,
            requests: self.sent,
            failed: failures.values().sum(),
            failures: failures.into_iter().take(FAILURES_NAMED).collect(),
            ttft_ms: Summary::of(samples.iter().map(|sample| sample.ttft_ms)),
            ttft_ms_by_kind: kinds.collect(),
            tpot_ms: Summary::of(samples.iter().filter_map(|sample| sample.tpot_ms)),
            hit_rate: (prompt > 0.0).then_some(cached / prompt),
            late_ms: Summary::of(late_ms.iter().copied()),
            wall_s: self.began.elapsed().as_secs_f64(),
        }
    }

    fn real(&self, model: Duration) -> Duration {
        model.mul_f64(self.args.time_scale)
    }

    fn model_ms(&self, real: Duration) -> f64 {
        real.as_ms() / self.args.time_scale
    }

    fn model_now(&self) -> Time {
        Time::from_ms(self.model_ms(self.began.elapsed()))
    }
}
