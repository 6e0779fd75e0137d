use std::{fmt, str::FromStr, sync::Arc};

use baton_cost::StepCoefficients;
use baton_units::{Time, Tokens};
use serde::Serialize;

const BYTES_PER_TOKEN: usize = 4;
/// Bytes of the system prompt's text, of its frame, and of each further message's frame, as the lab's client writes them.
const SYSTEM_BYTES: usize = 2000;
const SYSTEM_FRAME: usize = 17;
const SHARED_TAIL: usize = 8;
const SYSTEM_TOKENS: usize = (SYSTEM_BYTES + SYSTEM_FRAME + SHARED_TAIL) / BYTES_PER_TOKEN;
const MESSAGE_FRAME: usize = 7;
const PROMPT_FRAME: usize = 13;
/// A user's own text a step (321 tokens) and the generated one (64 tokens).
const STEP_BYTES: usize = 1284;
const STEP_OUTPUT: u32 = 64;
const STEPS: u32 = 20;
const THINK_MS: f64 = 1500.0;
/// Agents' first steps are spread over this time.
const START_MS: f64 = 3000.0;
/// Frame of a single-turn prompt after its text.
const SINGLE_FRAME: usize = 20;
const LONG_FRAME: usize = 8;

/// What clients do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WorkloadName {
    /// Tasks of 20 steps that share a system prompt and grow; closed loop.
    Agent,
    /// Six system prompts of 4,096 tokens under Zipf(1), with 300 own tokens; open loop.
    Shared,
    /// As `Shared`, with 5 % unique prompts of 32 K tokens.
    Mix,
    /// `Agent` beside half of `Mix` on one fleet.
    AgentMix,
    /// Unique prompts with outputs of very different lengths, in bursts; open loop.
    Tails,
}

impl WorkloadName {
    /// Those of the peers' comparison.
    pub const ALL: [Self; 4] = [Self::Agent, Self::Shared, Self::Mix, Self::AgentMix];
}

impl fmt::Display for WorkloadName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Agent => "agent",
            Self::Shared => "shared",
            Self::Mix => "mix",
            Self::AgentMix => "agent-mix",
            Self::Tails => "tails",
        })
    }
}

impl FromStr for WorkloadName {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .chain([Self::Tails])
            .find(|workload| workload.to_string() == name)
            .ok_or_else(|| format!("no workload is called `{name}`"))
    }
}

/// How much of a workload, and how fast.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    /// Agent tasks in all, and at a time.
    pub tasks: usize,
    pub concurrent: usize,
    /// Requests of the open workloads, and arrivals a second.
    pub requests: usize,
    pub rate_per_s: f64,
    /// A time with another rate. `None`: the rate is the same throughout.
    pub burst: Option<Burst>,
    pub long_share: f64,
    pub long_tokens: usize,
    pub prefixes: usize,
    pub zipf: f64,
    pub prefix_tokens: usize,
    pub own_tokens: usize,
    pub output: u32,
    /// Of `Tails`: outputs are drawn, with a median of `output`. `None`: all have `output` tokens.
    pub output_tail: Option<OutputTail>,
    /// Squared coefficient of variation of the times between arrivals of `Tails`, at least 1: a Poisson process.
    pub arrivals_scv: f64,
    /// Whether agents name their session.
    pub session_ids: bool,
}

/// Output lengths by a log-normal law, as chats have them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OutputTail {
    /// Standard deviation of the logarithm.
    pub sigma: f64,
    pub longest: u32,
}

/// From the start of the run until `until` arrivals come at `factor` times the shape's rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Burst {
    pub until: Time,
    pub factor: f64,
}

impl Shape {
    /// The lab's figures for a fleet of 8, in proportion for other sizes.
    pub fn lab(workload: WorkloadName, replicas: usize) -> Self {
        let (requests, rate, long_share) = match workload {
            WorkloadName::Agent => (0, 0.0, 0.0),
            WorkloadName::Shared => (4000, 25.0, 0.0),
            WorkloadName::Mix => (2400, 6.25, 0.05),
            // As long as the agents take.
            WorkloadName::AgentMix => (2800, 3.125, 0.05),
            WorkloadName::Tails => (3000, 5.0, 0.0),
        };
        let tails = workload == WorkloadName::Tails;
        Self {
            tasks: 10 * replicas,
            concurrent: 5 * replicas,
            requests,
            rate_per_s: rate * replicas as f64,
            burst: None,
            long_share,
            long_tokens: 32_768,
            prefixes: 6,
            zipf: 1.0,
            prefix_tokens: 4096,
            own_tokens: if tails { 1024 } else { 300 },
            output: if tails { 800 } else { 32 },
            output_tail: tails.then_some(OutputTail { sigma: 1.0, longest: 8000 }),
            arrivals_scv: if tails { 16.0 } else { 1.0 },
            session_ids: true,
        }
    }

    /// Prefill work in ms of an open request, on average, where shared prefixes are always cached: the least that a fleet must do.
    pub fn least_work_ms(&self, step: &StepCoefficients) -> f64 {
        let tokens = |count: usize| Tokens(count as u32);
        let long = step.prefill_ms(tokens(self.long_tokens), Tokens::ZERO);
        let short = step.prefill_ms(tokens(self.own_tokens), tokens(self.prefix_tokens));
        self.long_share * long + (1.0 - self.long_share) * short
    }

    /// The rate at which open requests ask for `load` of the time of `replicas`, by [`Self::least_work_ms`].
    pub fn rate_for_load(&self, load: f64, replicas: usize, step: &StepCoefficients) -> f64 {
        1e3 * load * replicas as f64 / self.least_work_ms(step)
    }
}

/// What a request is to its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RequestKind {
    /// A step of an agent's task.
    Step,
    /// A shared prompt with a question.
    Short,
    /// A unique prompt, long where the workload has long ones.
    Long,
}

/// One request as its client sends it.
#[derive(Debug, Clone)]
pub struct ClientRequest {
    pub at: Time,
    pub kind: RequestKind,
    pub prompt: Arc<[u32]>,
    /// Tokens at its front that requests of others begin with too.
    pub shared: usize,
    /// Tokens it will generate: known to the engine and the client's bound, never to the router.
    pub output: u32,
    pub session: Option<u64>,
    /// Place of its task, for agents.
    task: Option<usize>,
}

impl ClientRequest {
    /// One that stands alone: `tokens` that no other request begins with, unless it has the same `text` below 2^32.
    #[must_use]
    pub fn alone(at: Time, text: u64, tokens: usize, output: u32) -> Self {
        let prompt: Vec<u32> = stream((1 << 33) + text, 0..tokens).collect();
        Self { at, kind: RequestKind::Short, prompt: prompt.into(), shared: 0, output, session: None, task: None }
    }
}

/// A seeded stream of requests; agents' next steps depend on when the last one ended.
#[derive(Debug)]
pub struct Workload {
    name: WorkloadName,
    shape: Shape,
    seed: u64,
    tasks: Vec<Task>,
}

#[derive(Debug)]
struct Task {
    rng: LabRng,
    step: u32,
    bytes: usize,
    tokens: Vec<u32>,
}

impl Workload {
    pub fn new(name: WorkloadName, shape: Shape, seed: u64) -> Self {
        Self { name, shape, seed, tasks: Vec::new() }
    }

    /// Requests whose time does not depend on any answer.
    pub fn first(&mut self) -> Vec<ClientRequest> {
        match self.name {
            WorkloadName::Agent => self.first_tasks(),
            WorkloadName::Shared | WorkloadName::Mix => self.open_loop(),
            WorkloadName::AgentMix => {
                let mut all = self.first_tasks();
                all.extend(self.open_loop());
                all
            }
            WorkloadName::Tails => self.tails(),
        }
    }

    /// Arrivals by a hyperexponential law with balanced means (Whitt, 1982): mostly close together, now and then far apart.
    fn tails(&self) -> Vec<ClientRequest> {
        let shape = &self.shape;
        let mut rng = LabRng::new(self.seed * 29 + 11);
        let scv = shape.arrivals_scv.max(1.0);
        let close = f64::midpoint(1.0, ((scv - 1.0) / (scv + 1.0)).sqrt());
        let mut at_ms = 0.0;
        (0..shape.requests)
            .map(|place| {
                let share = if rng.unit() < close { close } else { 1.0 - close };
                at_ms += rng.exponential(1e3 / (2.0 * share * shape.rate_per_s));
                let own = (1 << 32) + place as u64;
                // From half the mean to half as much again.
                let tokens = (shape.own_tokens as f64 * (0.5 + rng.unit())).ceil() as usize;
                let output = shape.output_tail.map_or(shape.output, |tail| tail.draw(shape.output, &mut rng));
                let prompt: Vec<u32> = stream(own, 0..tokens).collect();
                let at = Time::from_ms(at_ms);
                ClientRequest { at, kind: RequestKind::Short, prompt: prompt.into(), shared: 0, output, session: None, task: None }
            })
            .collect()
    }

    fn first_tasks(&mut self) -> Vec<ClientRequest> {
        let start = |place: usize| LabRng::new(self.seed * 7919 + place as u64).unit() * START_MS;
        let mut starts: Vec<f64> = (0..self.shape.concurrent).map(start).collect();
        starts.sort_by(f64::total_cmp);
        starts.into_iter().filter_map(|at| self.next_task(Time::from_ms(at))).collect()
    }

    /// What its client sends next, after a request ended with `output`; `None` for it failed or for single turns.
    pub fn after(&mut self, request: &ClientRequest, output: Option<&[u32]>, now: Time) -> Option<ClientRequest> {
        let place = request.task?;
        let task = &mut self.tasks[place];
        task.rng.skip_text(STEP_BYTES);
        task.step += 1;
        let Some(output) = output.filter(|_| task.step < STEPS) else { return self.next_task(now) };
        task.tokens.extend_from_slice(output);
        task.bytes += STEP_OUTPUT as usize * BYTES_PER_TOKEN + MESSAGE_FRAME + SHARED_TAIL + STEP_BYTES + MESSAGE_FRAME + PROMPT_FRAME;
        let think = THINK_MS * (0.5 + task.rng.unit());
        Some(self.step(place, now + std::time::Duration::from_nanos((think * 1e6) as u64)))
    }

    fn next_task(&mut self, at: Time) -> Option<ClientRequest> {
        let place = self.tasks.len();
        if place == self.shape.tasks {
            return None;
        }
        let mut rng = LabRng::new(self.seed * 1_000_003 + place as u64);
        rng.skip_text(STEP_BYTES);
        let bytes = SYSTEM_BYTES + SYSTEM_FRAME + SHARED_TAIL + STEP_BYTES + MESSAGE_FRAME + PROMPT_FRAME;
        let tokens = stream(0, 0..SYSTEM_TOKENS).collect();
        self.tasks.push(Task { rng, step: 0, bytes, tokens });
        Some(self.step(place, at))
    }

    fn step(&mut self, place: usize, at: Time) -> ClientRequest {
        let task = &mut self.tasks[place];
        let tokens = task.bytes.div_ceil(BYTES_PER_TOKEN);
        task.tokens.extend(stream(1 + place as u64, task.tokens.len()..tokens));
        let session = self.shape.session_ids.then_some(self.seed << 20 | place as u64);
        ClientRequest {
            at,
            kind: RequestKind::Step,
            prompt: task.tokens.as_slice().into(),
            shared: SYSTEM_TOKENS,
            output: STEP_OUTPUT,
            session,
            task: Some(place),
        }
    }

    fn open_loop(&self) -> Vec<ClientRequest> {
        let shape = &self.shape;
        let mut rng = LabRng::new(self.seed * 17 + 3);
        let weights: Vec<f64> = (1..=shape.prefixes).map(|rank| (rank as f64).powf(-shape.zipf)).collect();
        let all: f64 = weights.iter().sum();
        let mut at_ms = 0.0;
        (0..shape.requests)
            .map(|place| {
                let burst = shape.burst.filter(|burst| Time::from_ms(at_ms) < burst.until);
                at_ms += rng.exponential(1e3 / (shape.rate_per_s * burst.map_or(1.0, |burst| burst.factor)));
                let draw = rng.unit() * all;
                let prefix = zipf_rank(&weights, draw);
                let own = (1 << 32) + place as u64;
                let kind = if rng.unit() < shape.long_share { RequestKind::Long } else { RequestKind::Short };
                let (shared, prompt) = if kind == RequestKind::Long {
                    let tokens = (LONG_FRAME + shape.long_tokens * BYTES_PER_TOKEN + SINGLE_FRAME).div_ceil(BYTES_PER_TOKEN);
                    (0, stream(own, 0..tokens).collect())
                } else {
                    let shared = SYSTEM_FRAME + shape.prefix_tokens * BYTES_PER_TOKEN + SHARED_TAIL;
                    let tokens = (shared + shape.own_tokens * BYTES_PER_TOKEN + SINGLE_FRAME).div_ceil(BYTES_PER_TOKEN);
                    let shared = shared / BYTES_PER_TOKEN;
                    (shared, stream(1 + prefix as u64, 0..shared).chain(stream(own, shared..tokens)).collect())
                };
                ClientRequest { at: Time::from_ms(at_ms), kind, prompt, shared, output: shape.output, session: None, task: None }
            })
            .collect()
    }
}

impl OutputTail {
    fn draw(self, median: u32, rng: &mut LabRng) -> u32 {
        // Box and Muller.
        let normal = (-2.0 * rng.unit().ln()).sqrt() * (std::f64::consts::TAU * rng.unit()).cos();
        (f64::from(median) * (self.sigma * normal).exp()).ceil().clamp(1.0, f64::from(self.longest)) as u32
    }
}

fn zipf_rank(weights: &[f64], draw: f64) -> usize {
    let mut sum = 0.0;
    weights
        .iter()
        .position(|weight| {
            sum += weight;
            draw <= sum
        })
        .unwrap_or(0)
}

/// Tokens of one text at some positions; texts of different streams share none but by chance.
fn stream(text: u64, positions: std::ops::Range<usize>) -> impl Iterator<Item = u32> {
    positions.map(move |position| (text << 24 | position as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29) as u32 >> 1)
}

/// The generator of the lab that measured the peers: equal seeds give its arrivals. Xorshift64* (Vigna).
#[derive(Debug)]
pub struct LabRng(u64);

impl LabRng {
    pub fn new(seed: u64) -> Self {
        let mut rng = Self((seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03).max(1));
        for _ in 0..4 {
            rng.next_u64();
        }
        rng
    }

    /// Uniform in (0, 1).
    pub fn unit(&mut self) -> f64 {
        ((self.next_u64() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    pub fn exponential(&mut self, mean: f64) -> f64 {
        -mean * self.unit().ln()
    }

    /// Draws what the lab's client draws to write a text of so many bytes.
    pub fn skip_text(&mut self, bytes: usize) {
        for _ in 0..bytes.div_ceil(16) {
            self.next_u64();
        }
    }

    fn next_u64(&mut self) -> u64 {
        let state = self.0 ^ self.0 >> 12;
        let state = state ^ state << 25;
        self.0 = state ^ state >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }
}
