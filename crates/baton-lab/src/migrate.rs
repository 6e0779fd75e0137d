//! What a move costs: its client by the gap in the stream, its link by the bytes of a second, its neighbours by the time of their steps.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use baton_conform::{Fleet, Options, Suite};
use baton_migration::{OwnersInput, Place};
use baton_wire::migration::{RunRequest, RunSampling};
use clap::Args;

use process::Replica;

mod link;
mod process;

/// Nothing here takes longer, a long prompt on a busy machine included.
const PATIENCE: Duration = Duration::from_mins(3);
/// Entries between two moves: what the median gap is taken of.
const BETWEEN: usize = 8;
/// Tokens of an output: more than all moves of a request take.
const OUTPUT: u32 = 4096;
/// A request that nobody acknowledges stands after so many, which leaves its engine idle.
const STANDS: usize = 257;

/// A block of less is no model's KV.
const KV_BLOCK_MIN: u64 = 4096;

#[derive(Debug, Args)]
pub(crate) struct MigrateArgs {
    /// The program whose replicas are measured
    #[arg(long, value_name = "PATH")]
    baton: PathBuf,
    /// Engines to measure
    #[arg(long, value_delimiter = ',', default_value = "timed,cpu", value_name = "NAME,..")]
    engines: Vec<String>,
    /// Tokens of context; those that an engine has no room for are left out
    #[arg(long, value_delimiter = ',', default_value = "256,512,1024,2048,4096,8192", value_name = "N,..")]
    contexts: Vec<u32>,
    /// Moves at each context
    #[arg(long, default_value_t = 20, value_name = "N")]
    moves: usize,
    /// Longest time for the moves at one context
    #[arg(long, default_value_t = 15, value_name = "SECONDS")]
    seconds: u64,
    /// Three small contexts, 8 moves and 6 s each
    #[arg(long)]
    quick: bool,
}

/// How much is measured.
struct Extent {
    contexts: Vec<u32>,
    moves: usize,
    limit: Duration,
}

pub(crate) async fn run(args: &MigrateArgs) -> Result<()> {
    let extent = if args.quick {
        Extent { contexts: vec![256, 512, 1024], moves: 8, limit: Duration::from_secs(6) }
    } else {
        Extent { contexts: args.contexts.clone(), moves: args.moves, limit: Duration::from_secs(args.seconds) }
    };
    println!("load average of the machine: {}", std::fs::read_to_string("/proc/loadavg")?.trim());
    for engine in &args.engines {
        measure(args, engine, &extent).await?;
    }
    Ok(())
}

/// Two replicas, and a gateway's part.
struct Pair {
    fleet: Fleet,
    replicas: [Replica; 2],
    model: String,
    next: u64,
}

async fn measure(args: &MigrateArgs, engine: &str, extent: &Extent) -> Result<()> {
    let mut pair = Pair::start(args, engine).await?;
    let room = pair.replicas[0].report.max_model_len;
    // The output of all moves must fit too.
    let contexts: Vec<u32> = extent.contexts.iter().copied().filter(|context| context + OUTPUT / 4 <= room).collect();
    println!("\n{engine}: {}, {} bytes of KV a block of {} tokens", pair.model, pair.block_bytes()?, pair.replicas[0].report.block_size);
    pair.gaps(&contexts, extent).await?;
    let largest = contexts.last().copied().context("the engine has room for no context")?;
    if pair.block_bytes()? >= KV_BLOCK_MIN {
        pair.throughput(largest).await?;
    } else {
        println!("copy between idle replicas: what travels of an emulated engine's KV says nothing of throughput");
    }
    pair.neighbours(largest.min(1024), extent).await
}

impl Pair {
    async fn start(args: &MigrateArgs, engine: &str) -> Result<Self> {
        let replicas = [Replica::start(&args.baton, engine, "a").await?, Replica::start(&args.baton, engine, "b").await?];
        let model = replicas[0].report.model.clone();
        let control = |replica: &Replica| replica.report.migration.as_ref().map(|source| source.control_address.clone());
        let address = control(&replicas[0]).context("the replica takes part in no migration")?;
        let options = Options { peer: control(&replicas[1]), patience: PATIENCE, ..Options::new(&address, &model) };
        let suite = Suite::new(options).await?;
        Ok(Self { fleet: Fleet::attached(&suite).await?, replicas, model, next: 0 })
    }

    fn block_bytes(&self) -> Result<u64> {
        let layout = self.fleet.hello(self.fleet.replica).kv_layout.as_ref();
        Ok(layout.context("the replica has no KV to move")?.block_bytes)
    }

    /// No two prompts share a prefix.
    fn spec(&mut self, context: u32) -> RunRequest {
        self.next += 1;
        let first = self.next as u32;
        let sampling = RunSampling { temperature: 0.0, ignore_eos: true, max_tokens: Some(OUTPUT), ..RunSampling::default() };
        let prompt = (0..context).map(|index| (index * 7 + first * 131) % 20_000 + 100).collect();
        let room = self.replicas[0].report.max_model_len;
        let sampling = RunSampling { max_tokens: Some(OUTPUT.min(room - context)), ..sampling };
        RunRequest { model: self.model.clone(), prompt, sampling, seed: 1, ..RunRequest::default() }
    }

    async fn begin(&mut self, context: u32) -> Result<u64> {
        let spec = self.spec(context);
        let sequence = self.next;
        self.fleet.start(sequence, &spec).await?;
        self.fleet.delivered(sequence, BETWEEN).await?;
        Ok(sequence)
    }

    async fn end(&mut self, sequence: u64) -> Result<()> {
        self.fleet.tell(OwnersInput::End { sequence }).await?;
        Ok(self.fleet.until("both let go", |fleet| fleet.request(sequence).forgotten).await?)
    }

    fn other(&self, place: Place) -> Place {
        if place == self.fleet.replica { self.fleet.peer } else { self.fleet.replica }
    }

    /// Of where the next request goes, so that all of its KV must travel.
    async fn forget_prefixes(&self, at: Place) -> Result<()> {
        self.replicas[usize::from(at == self.fleet.peer)].reset_prefix_cache().await
    }

    /// Moves the request; the index of its first entry from the target.
    async fn moved(&mut self, sequence: u64, target: Place) -> Result<usize> {
        let (before, ended) = (self.fleet.request(sequence).committed, self.fleet.request(sequence).attempts_ended);
        self.fleet.tell(OwnersInput::Move { sequence, target }).await?;
        self.fleet
            .until("the move is committed", |fleet| {
                let request = fleet.request(sequence);
                request.committed > before || request.attempts_ended > ended || request.has_finished()
            })
            .await?;
        let request = self.fleet.request(sequence);
        ensure!(request.committed > before, "a move ended: {:?}", request.reasons);
        Ok(request.delivered.len())
    }

    async fn gaps(&mut self, contexts: &[u32], extent: &Extent) -> Result<()> {
        println!("gap in the stream at the cutover, in ms; beside it the same request killed and computed again from its tokens");
        println!("context  moves    gap p50    gap p99   less median   step   p99/aim   MB moved   recompute   recompute/gap");
        let round_trip = self.round_trip().await?;
        let mut medians = Vec::new();
        for &context in contexts {
            let sequence = self.begin(context).await?;
            let (mut at, mut gaps, mut steps, began) = (self.fleet.replica, Vec::new(), Vec::new(), Instant::now());
            while gaps.len() < extent.moves && (gaps.len() < 2 || began.elapsed() < extent.limit) {
                let target = self.other(at);
                self.forget_prefixes(target).await?;
                let from = self.fleet.request(sequence).delivered.len();
                let cut = self.moved(sequence, target).await?;
                self.fleet.delivered(sequence, cut + BETWEEN).await?;
                let times = &self.fleet.request(sequence).times;
                gaps.push(ms(times[cut] - times[cut - 1]));
                // Those before the copy and after it, of which none is the cutover.
                let undisturbed = (from.saturating_sub(BETWEEN).max(1)..from).chain(cut + 2..times.len());
                steps.extend(undisturbed.map(|index| ms(times[index] - times[index - 1])));
                at = target;
                if self.fleet.request(sequence).has_finished() {
                    break;
                }
            }
            let moved = &self.fleet.request(sequence).moved;
            let megabytes = moved.iter().map(|copied| copied.bytes as f64).sum::<f64>() / moved.len().max(1) as f64 / 1e6;
            let recompute = self.recomputed(sequence, at).await?;
            self.end(sequence).await?;
            let (gap, worst, step) = (quantile(&mut gaps, 0.5), quantile(&mut gaps, 0.99), quantile(&mut steps, 0.5));
            println!(
                "{context:7} {:6} {gap:10.2} {worst:10.2} {:13.2} {step:6.2} {:9.2} {megabytes:10.2} {recompute:11.2} {:15.1}",
                gaps.len(),
                gap - step,
                worst / (2.0 * step + 2.0 * round_trip),
                recompute / gap
            );
            medians.push((f64::from(context), gap - step));
        }
        println!("aim of p99: 2 steps and 2 round trips of {round_trip:.3} ms, so p99/aim at most 1");
        if medians.len() > 1 {
            println!("slope of the gap less the median: {:.4} ms for 1,000 tokens (aim: 0)", 1e3 * slope(&medians));
        }
        Ok(())
    }

    /// From the last entry to the first one of another replica, that computes the KV again.
    async fn recomputed(&mut self, sequence: u64, at: Place) -> Result<f64> {
        let owner = self.other(at);
        self.forget_prefixes(owner).await?;
        self.fleet.tell(OwnersInput::Force { sequence, owner }).await?;
        let next = self.fleet.request(sequence).delivered.len();
        self.fleet.delivered(sequence, next + 1).await?;
        let times = &self.fleet.request(sequence).times;
        Ok(ms(times[next] - times[next - 1]))
    }

    /// A word to a replica that is idle, and its answer.
    async fn round_trip(&mut self) -> Result<f64> {
        let mut times = Vec::new();
        for _ in 0..20 {
            times.push(ms(self.replicas[0].round_trip().await?));
        }
        Ok(quantile(&mut times, 0.5))
    }

    /// Of a request that stands, so that both engines are idle.
    async fn throughput(&mut self, context: u32) -> Result<()> {
        let mut rates = Vec::new();
        let mut raw = Vec::new();
        let block = self.block_bytes()?;
        for _ in 0..3 {
            let spec = self.spec(context);
            let sequence = self.next;
            self.fleet.start(sequence, &spec).await?;
            self.fleet.acknowledges(sequence, false).await?;
            self.fleet.delivered(sequence, STANDS).await?;
            let target = self.fleet.peer;
            self.forget_prefixes(target).await?;
            let began = Instant::now();
            self.moved(sequence, target).await?;
            let took = began.elapsed();
            self.fleet.until("it says what was sent", |fleet| !fleet.request(sequence).moved.is_empty()).await?;
            let bytes = self.fleet.request(sequence).moved[0].bytes;
            self.fleet.acknowledges(sequence, true).await?;
            self.end(sequence).await?;
            rates.push(bytes as f64 / took.as_secs_f64());
            raw.push(bytes as f64 / link::copy(bytes, block).await?.as_secs_f64());
        }
        let (rate, wire) = (quantile(&mut rates, 0.5), quantile(&mut raw, 0.5));
        println!(
            "copy between idle replicas, from MOVE to commit: {:.0} MB/s; plain sockets, same blocks, {:.0} MB/s: {:.0} % (aim: 70 %)",
            rate / 1e6,
            wire / 1e6,
            100.0 * rate / wire
        );
        Ok(())
    }

    /// One request decodes at each replica while another moves to and fro, and while it does not.
    async fn neighbours(&mut self, context: u32, extent: &Extent) -> Result<()> {
        let (replica, peer) = (self.fleet.replica, self.fleet.peer);
        let mut neighbours = Vec::new();
        for owner in [replica, peer] {
            let spec = self.spec(256);
            self.fleet.start_at(self.next, &spec, owner).await?;
            self.fleet.delivered(self.next, BETWEEN).await?;
            neighbours.push((self.next, owner));
        }
        let sequence = self.begin(context).await?;
        let (mut at, mut rounds, began) = (replica, 0, Instant::now());
        let (mut source, mut target) = (Windows::default(), Windows::default());
        while rounds < extent.moves && (rounds < 2 || began.elapsed() < extent.limit) {
            let next = self.other(at);
            self.forget_prefixes(next).await?;
            let wanted: Vec<usize> = neighbours.iter().map(|(number, _)| self.fleet.request(*number).delivered.len() + BETWEEN).collect();
            let still = Instant::now();
            for ((number, _), count) in neighbours.iter().zip(wanted) {
                self.fleet.delivered(*number, count).await?;
            }
            let told = Instant::now();
            self.moved(sequence, next).await?;
            let committed = Instant::now();
            for &(number, owner) in &neighbours {
                let times = &self.fleet.request(number).times;
                let windows = if owner == at { &mut source } else { &mut target };
                windows.still.extend(gaps_within(times, still, told));
                windows.moving.extend(gaps_within(times, told, committed));
            }
            let done = self.fleet.request(sequence).delivered.len() + BETWEEN;
            self.fleet.delivered(sequence, done).await?;
            (at, rounds) = (next, rounds + 1);
            if neighbours.iter().any(|(number, _)| self.fleet.request(*number).has_finished()) {
                break;
            }
        }
        for number in neighbours.into_iter().map(|(number, _)| number).chain([sequence]) {
            self.end(number).await?;
        }
        println!(
            "a neighbour's step while a request of {context} tokens is copied ({rounds} moves), against the steps just before (aim: 1.05):"
        );
        println!("  at the source {}\n  at the target {}", source.compared(), target.compared());
        println!(
            "  pacing: between two steps goes and comes what keeps a core busy for 4 % of a step, a block in any case; nothing is copied there"
        );
        Ok(())
    }
}

/// Gaps in a neighbour's stream, in ms.
#[derive(Default)]
struct Windows {
    still: Vec<f64>,
    moving: Vec<f64>,
}

impl Windows {
    fn compared(&mut self) -> String {
        if self.still.is_empty() || self.moving.is_empty() {
            return format!("no step fell into a copy ({} before, {} in them)", self.still.len(), self.moving.len());
        }
        let mean = |gaps: &[f64]| gaps.iter().sum::<f64>() / gaps.len() as f64;
        let (still, moving) = (mean(&self.still), mean(&self.moving));
        let (median_still, median_moving) = (quantile(&mut self.still, 0.5), quantile(&mut self.moving, 0.5));
        format!(
            "{:.3} (mean {moving:.2} against {still:.2} ms), {:.3} by medians; {} and {} steps",
            moving / still,
            median_moving / median_still,
            self.moving.len(),
            self.still.len()
        )
    }
}

/// Between two entries that both came in the window.
fn gaps_within(times: &[Instant], from: Instant, to: Instant) -> impl Iterator<Item = f64> {
    times.windows(2).filter(move |pair| pair[0] >= from && pair[1] <= to).map(|pair| ms(pair[1] - pair[0]))
}

fn ms(span: Duration) -> f64 {
    span.as_secs_f64() * 1e3
}

/// By the nearest rank.
fn quantile(values: &mut [f64], at: f64) -> f64 {
    if values.is_empty() {
        return f64::NAN;
    }
    values.sort_by(f64::total_cmp);
    values[((at * values.len() as f64).ceil() as usize).clamp(1, values.len()) - 1]
}

/// By least squares.
fn slope(points: &[(f64, f64)]) -> f64 {
    let count = points.len() as f64;
    let (x, y) = points.iter().fold((0.0, 0.0), |(x, y), point| (x + point.0 / count, y + point.1 / count));
    let (over, under) = points.iter().fold((0.0, 0.0), |(over, under), point| {
        let dx = point.0 - x;
        (over + dx * (point.1 - y), under + dx * dx)
    });
    over / under
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_that_were_measured_and_a_line_has_its_slope() {
        let mut values = vec![3.0, 1.0, 2.0];
        assert_eq!([0.0, 0.5, 0.99].map(|at| quantile(&mut values, at) as u32), [1, 2, 3]);
        assert!((slope(&[(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)]) - 2.0).abs() < 1e-12);
    }
}
