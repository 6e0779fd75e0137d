use std::{
    cell::Cell,
    rc::Rc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use tokio::task::LocalSet;

use crate::{
    prompts::{Class, Conversations},
    wire::{Connection, Response},
};

/// Before the part that counts.
const WARM_UP: Duration = Duration::from_millis(300);
const PATIENCE: Duration = Duration::from_secs(20);

/// What clients saw.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) requests: usize,
    pub(super) span: Duration,
    /// CPU seconds of the watched process.
    pub(super) cpu_s: f64,
    /// Of each request, sorted.
    latencies: Vec<Duration>,
}

impl Seen {
    pub(super) fn percentile_ms(&self, part: f64) -> f64 {
        let place = ((self.latencies.len() as f64 * part) as usize).min(self.latencies.len().saturating_sub(1));
        self.latencies.get(place).map_or(f64::NAN, Duration::as_secs_f64) * 1e3
    }

    fn of(latencies: &[Vec<Duration>], span: Duration, cpu_s: f64) -> Self {
        let mut latencies = latencies.concat();
        latencies.sort_unstable();
        Self { requests: latencies.len(), span, cpu_s, latencies }
    }
}

pub(super) async fn until_it_answers(target: &str) -> Result<()> {
    let class = Class::named("small").map_err(anyhow::Error::msg)?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let answered = async {
            let mut connection = Connection::open(target).await?;
            exchange(&mut connection, class, &Conversations::new(class, 0).next_request()).await
        };
        match answered.await {
            Ok(()) => return Ok(()),
            Err(error) if Instant::now() > deadline => return Err(error.context(format!("{target} does not answer"))),
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

/// Sends every history once, so that what is measured afterwards is warm.
pub(super) async fn warm(target: &str, class: Class) -> Result<()> {
    let mut connection = Connection::open(target).await?;
    for request in Conversations::histories(class) {
        exchange(&mut connection, class, &request).await?;
    }
    Ok(())
}

/// A closed loop for a time; `cpu_s` is read where the part that counts begins and ends.
pub(super) async fn run_for(
    target: &str,
    class: Class,
    connections: usize,
    span: Duration,
    cpu_s: impl Fn() -> Result<f64>,
) -> Result<Seen> {
    warm(target, class).await?;
    let counts = Rc::new(Cell::new(false));
    let stop = Rc::new(Cell::new(false));
    let clients = LocalSet::new();
    let tasks: Vec<_> = (0..connections)
        .map(|number| {
            let (target, counts, stop) = (target.to_owned(), counts.clone(), stop.clone());
            clients.spawn_local(async move {
                let mut client = Client::open(&target, class, number).await?;
                let mut latencies = Vec::new();
                while !stop.get() {
                    let latency = client.ask().await?;
                    if counts.get() {
                        latencies.push(latency);
                    }
                }
                Ok::<_, anyhow::Error>(latencies)
            })
        })
        .collect();
    clients
        .run_until(async {
            tokio::time::sleep(WARM_UP).await;
            counts.set(true);
            let (began, cpu_before) = (Instant::now(), cpu_s()?);
            tokio::time::sleep(span).await;
            let (took, cpu) = (began.elapsed(), cpu_s()? - cpu_before);
            counts.set(false);
            stop.set(true);
            let mut latencies = Vec::new();
            for task in tasks {
                latencies.push(task.await??);
            }
            Ok(Seen::of(&latencies, took, cpu))
        })
        .await
}

/// A closed loop over a number of requests.
pub(super) async fn run_count(target: &str, class: Class, connections: usize, requests: usize) -> Result<Seen> {
    let began = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..connections {
        let target = target.to_owned();
        tasks.spawn(async move {
            let mut client = Client::open(&target, class, number).await?;
            let mut latencies = Vec::new();
            for _ in 0..requests / connections {
                latencies.push(client.ask().await?);
            }
            Ok::<_, anyhow::Error>(latencies)
        });
    }
    let latencies = tasks.join_all().await.into_iter().collect::<Result<Vec<_>>>()?;
    Ok(Seen::of(&latencies, began.elapsed(), 0.0))
}

/// The median difference of a stream's first event, through the proxy and direct, in ms; the same prompts in turn.
pub(super) async fn first_event_delays(class: Class, direct: &str, proxy: &str, pairs: usize) -> Result<f64> {
    let mut clients = [Client::open(direct, class, 0).await?, Client::open(proxy, class, 0).await?];
    let mut differences = Vec::with_capacity(pairs);
    for pair in 0..pairs {
        let mut first = [Duration::ZERO; 2];
        // Which goes first alternates.
        for side in [pair % 2, 1 - pair % 2] {
            clients[side].ask().await?;
            first[side] = clients[side].first_event;
        }
        differences.push(first[1].as_secs_f64() - first[0].as_secs_f64());
    }
    differences.sort_by(f64::total_cmp);
    Ok(differences[pairs / 2] * 1e3)
}

/// Between reads of `streams` at a time, one after the other for `rounds`, sorted.
pub(super) async fn gaps(target: &str, class: Class, streams: usize, rounds: usize) -> Result<Vec<Duration>> {
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..streams {
        let target = target.to_owned();
        tasks.spawn(async move {
            let mut client = Client::open(&target, class, number).await?;
            let mut gaps = Vec::new();
            for _ in 0..rounds {
                client.ask().await?;
                gaps.append(&mut client.gaps);
            }
            Ok::<_, anyhow::Error>(gaps)
        });
    }
    let mut gaps = tasks.join_all().await.into_iter().collect::<Result<Vec<_>>>()?.concat();
    gaps.sort_unstable();
    Ok(gaps)
}

struct Client {
    connection: Connection,
    conversations: Conversations,
    class: Class,
    /// From the last request to the first byte of its answer's body.
    first_event: Duration,
    /// Between reads of the last answer's body.
    gaps: Vec<Duration>,
}

impl Client {
    async fn open(target: &str, class: Class, number: usize) -> Result<Self> {
        let conversations = Conversations::new(class, 1 + number as u64);
        Ok(Self { connection: Connection::open(target).await?, conversations, class, first_event: Duration::ZERO, gaps: Vec::new() })
    }

    async fn ask(&mut self) -> Result<Duration> {
        let request = self.conversations.next_request();
        let began = Instant::now();
        let response = self.connection.exchange(&request).await?;
        let took = began.elapsed();
        check(self.class, &response)?;
        self.first_event = response.read_at.first().context("an answer without a body")?.duration_since(began);
        self.gaps = response.read_at.windows(2).map(|pair| pair[1] - pair[0]).collect();
        Ok(took)
    }
}

async fn exchange(connection: &mut Connection, class: Class, request: &[u8]) -> Result<()> {
    check(class, &connection.exchange(request).await?)
}

/// Cut or refused answers do not count as fast ones.
fn check(class: Class, response: &Response) -> Result<()> {
    let text = std::str::from_utf8(&response.body).context("an answer that is no text")?;
    ensure!(response.status == 200, "status {}: {text}", response.status);
    let tokens = text.matches(" token").count();
    ensure!(tokens == class.tokens as usize, "an answer of {tokens} tokens, not {}: {text}", class.tokens);
    ensure!(!class.stream || text.contains("data: [DONE]\n\n"), "a stream without its end");
    Ok(())
}
