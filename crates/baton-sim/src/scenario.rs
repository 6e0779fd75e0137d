use std::time::Duration;

use baton_cost::{Device, ModelShape, StepCoefficients};
use baton_policy::{RouterConfig, mover::MoverConfig};
use baton_units::{BlockSize, Blocks, Priority, Time, Tokens};

use crate::{ClientRequest, Link, Shape, WorkloadName};

/// Everything that a run depends on.
#[derive(Debug, Clone)]
pub struct Scenario {
    pub workload: WorkloadName,
    pub shape: Shape,
    /// Requests beside those of the workload, none of which has a next one.
    pub also: Vec<ClientRequest>,
    pub engine: EngineModel,
    pub replicas: usize,
    pub router: RouterConfig,
    pub seed: u64,
    pub block_size: BlockSize,
    pub blocks: Blocks,
    pub max_model_len: Tokens,
    pub step: StepCoefficients,
    /// Between router and replicas, for requests and streams; its loss is not used.
    pub requests: Link,
    /// From replicas to the router, for cache events. `None`: engines publish none.
    pub events: Option<Link>,
    /// From replicas to the router, for load reports, and how often. `None`: there are no reports.
    pub reports: Option<(Link, Duration)>,
    pub faults: Vec<Fault>,
    /// Replicas that are to be emptied: they get nothing new, and what they have moves away where `moves` are on.
    pub drains: Vec<Drain>,
    /// Tries of a request that fails before its first token.
    pub tries: u32,
    /// Parts the fleet by prompt length, whatever the policy. A reference, not a rule that a router could go by: how to part it
    /// follows from the workload.
    pub parted: Option<Parted>,
    /// How important requests are, with each one's share of them. Empty: all have priority 0.
    pub priorities: Vec<(Priority, f64)>,
    /// What clients do that are turned away for the load. `None`: they give up.
    pub returns: Option<Returns>,
    /// The loop that moves running requests, on the scheduler's engines. `None`: requests stay where they are sent.
    pub moves: Option<Moves>,
    /// Links over which replicas bring each other cached prefixes, on the scheduler's engines. `None`: each computes what it lacks.
    pub peers: Option<Peers>,
}

/// Links between any two replicas, for cached prefixes.
#[derive(Debug, Clone, PartialEq)]
pub struct Peers {
    pub link: baton_cost::Link,
    /// What a token's KV counts as on it.
    pub kv_bytes_per_token: f64,
}

impl Peers {
    /// The reference machine's KV over such a link.
    pub fn over(link: baton_cost::Link) -> Self {
        Self { link, kv_bytes_per_token: reference_shape().kv_bytes(Tokens(1)) }
    }
}

/// How running requests move.
#[derive(Debug, Clone, PartialEq)]
pub struct Moves {
    /// Between two looks at the fleet.
    pub period: Duration,
    pub mover: MoverConfig,
    /// Between any two replicas, for KV.
    pub link: baton_cost::Link,
    /// What a token's KV counts as on it.
    pub kv_bytes_per_token: f64,
}

impl Moves {
    /// The reference machine's KV every 50 ms over one of the lecture's links.
    pub fn over(link: &str) -> Self {
        Self {
            period: Duration::from_millis(50),
            mover: MoverConfig::default(),
            link: baton_cost::Link::preset(link).expect("a link of the lecture"),
            kv_bytes_per_token: reference_shape().kv_bytes(Tokens(1)),
        }
    }
}

/// A client that is told to retry later does so: after the seconds that the gateway would send (`Retry-After`, RFC 9110 section 10.2.3,
/// whole ones and rounded up) and up to `jitter` more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Returns {
    /// Tries in all; after the last one it gives up.
    pub attempts: u32,
    pub jitter: Duration,
}

/// Size interval task assignment (Harchol-Balter, Crovella and Murta): the first `replicas` take prompts of up to `longest` and no
/// others, the rest of the fleet all longer ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parted {
    pub replicas: usize,
    pub longest: Tokens,
}

impl Parted {
    /// Places that may not take a prompt.
    pub(crate) fn barred(&self, prompt: Tokens, fleet: usize) -> std::ops::Range<usize> {
        if prompt <= self.longest { self.replicas..fleet } else { 0..self.replicas }
    }
}

/// How the engines of a fleet work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineModel {
    /// [`crate::SerialEngine`].
    Serial,
    /// The production scheduler with prefill in chunks of at most `budget` tokens a step.
    Scheduler { budget: Tokens },
}

/// A replica dies and comes back empty, as a new incarnation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    pub replica: usize,
    pub dies_at: Time,
    pub returns_at: Time,
}

/// A replica is to be empty, from a moment on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drain {
    pub replica: usize,
    pub at: Time,
}

impl Scenario {
    /// The peers' comparison: 8 replicas of the reference machine with 6,912 blocks of 16 tokens.
    pub fn lab(workload: WorkloadName, engine: EngineModel, router: RouterConfig, seed: u64) -> Self {
        let replicas = 8;
        Self {
            workload,
            shape: Shape::lab(workload, replicas),
            also: Vec::new(),
            engine,
            replicas,
            router,
            seed,
            block_size: BlockSize::DEFAULT,
            blocks: Blocks(6912),
            max_model_len: Tokens(65_536),
            step: reference_step(),
            requests: Link::INSTANT,
            events: None,
            reports: None,
            faults: Vec::new(),
            drains: Vec::new(),
            tries: 3,
            parted: None,
            priorities: Vec::new(),
            returns: None,
            moves: None,
            peers: None,
        }
    }
}

/// Llama-2-7B with GQA-8 on an H100: the machine of every published figure here.
pub fn reference_step() -> StepCoefficients {
    StepCoefficients::from_profile(&reference_shape(), &reference_device())
}

/// KV blocks of 16 tokens that fit beside the weights on the reference machine.
pub fn reference_blocks() -> Blocks {
    let shape = reference_shape();
    let tokens = baton_cost::kv_budget_bytes(&shape, &reference_device()) / shape.kv_bytes(Tokens(1));
    Tokens(tokens as u32).full_blocks(BlockSize::DEFAULT)
}

fn reference_shape() -> ModelShape {
    ModelShape::preset("llama-2-7b-gqa8").expect("the preset exists")
}

fn reference_device() -> Device {
    Device::preset("h100").expect("the preset exists")
}
