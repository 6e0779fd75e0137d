//! What the loop reads of the fleet: plain data of one moment.

use std::collections::BTreeMap;

use baton_cost::{Link, StepCoefficients, StepLoad};
use baton_units::{BlockSize, Blocks, Priority, ReplicaId, RequestId, Time, Tokens};

use crate::ReplicaState;

/// A step may be this many times as long as that of one sequence alone where a request asks for quiet.
pub(crate) const QUIET_STEP: f64 = 1.1;

/// The fleet at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FleetFacts {
    /// By ascending id.
    pub replicas: Vec<ReplicaFacts>,
    /// The first request that waits at the router for blocks of any replica.
    pub held: Option<WaitingFacts>,
    /// Service attained by each program, in one unit for all; empty where nobody keeps count.
    pub programs: BTreeMap<u64, f64>,
}

/// One replica; a gateway fills it from its own books and the replica's hello.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplicaFacts {
    pub id: ReplicaId,
    /// `Ready` ones give and take, `Draining` ones give all they have; what runs on a `Suspect` or `Dead` one goes on elsewhere.
    pub state: ReplicaState,
    /// Replicas of equal numbers compute equal bits and read each other's KV.
    pub numerics: u64,
    pub block_size: BlockSize,
    pub blocks_total: Blocks,
    /// Blocks of requests in flight, a shared one counted once, without those of requests on their way here.
    pub blocks_used: Blocks,
    /// Blocks that the engine keeps free when it admits.
    pub watermark: Blocks,
    pub max_running: u32,
    pub step: StepCoefficients,
    pub kv_bytes_per_token: f64,
    /// Between it and the fleet; a move goes at the pace of the slower of its two ends.
    pub link: Link,
    /// Seconds of prefill booked here.
    pub queue_s: f64,
    /// In any order.
    pub running: Vec<RunningFacts>,
    /// In the order in which the engine will admit them.
    pub waiting: Vec<WaitingFacts>,
}

/// A request that has blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunningFacts {
    pub request: RequestId,
    /// Prompt and output so far.
    pub tokens: Tokens,
    /// Blocks that free when it goes: its own, and its part of those that it shares.
    pub blocks: Blocks,
    pub priority: Priority,
    pub program: Option<u64>,
    pub started_at: Time,
    /// Output that its client's bound still allows.
    pub left_at_most: Option<Tokens>,
    /// Its prompt is not computed yet.
    pub prefilling: bool,
    /// Its replica and its kind of request can be moved.
    pub movable: bool,
}

/// A request without blocks: not admitted yet, or preempted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitingFacts {
    pub request: RequestId,
    /// Tokens to compute, after what is cached.
    pub tokens: Tokens,
    /// Blocks that it takes when it is admitted, the one for its next token included.
    pub demand: Blocks,
    pub priority: Priority,
    pub program: Option<u64>,
    pub arrived: Time,
    /// Output that its client's bound still allows.
    pub left_at_most: Option<Tokens>,
    /// Nothing of its output was computed, so that any replica may go on with it.
    pub fresh: bool,
    pub movable: bool,
}

impl ReplicaFacts {
    /// Blocks that requests may take.
    pub(super) fn capacity(&self) -> Blocks {
        self.blocks_total.saturating_sub(self.watermark)
    }

    /// Seconds of a step that decodes what runs here.
    pub(super) fn step_s(&self) -> f64 {
        let decoding = self.running.iter().filter(|request| !request.prefilling);
        let (rows, context) = decoding.fold((0.0, 0.0), |(rows, context), request| (rows + 1.0, context + request.tokens.as_f64()));
        self.step.step_s(&StepLoad::decode(rows, context))
    }

    /// As [`quiet_blocks`].
    pub(super) fn quiet_blocks(&self) -> Blocks {
        quiet_blocks(&self.step, self.block_size, self.blocks_total)
    }
}

/// Context that can be read in a step without making it a tenth longer than one with a single short sequence: the load at which
/// decode speed is near ideal (Llumnix, OSDI 2024, section 4.4.2, by the cost model in place of a profile).
pub(crate) fn quiet_blocks(step: &StepCoefficients, size: BlockSize, total: Blocks) -> Blocks {
    let alone_s = step.step_s(&StepLoad::decode(1.0, 0.0));
    let room_s = QUIET_STEP * alone_s - step.fixed_s - step.weights_s;
    if step.per_kv_token_s <= 0.0 {
        return total;
    }
    Tokens((room_s.max(0.0) / step.per_kv_token_s).min(f64::from(u32::MAX)) as u32).full_blocks(size)
}

impl RunningFacts {
    /// Blocks that it takes at a target, with the one for its next token.
    pub(super) fn demand(&self, size: BlockSize) -> Blocks {
        (self.tokens + Tokens(1)).to_blocks(size)
    }
}
