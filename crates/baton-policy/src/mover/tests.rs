#![allow(clippy::float_cmp, reason = "equal inputs give equal numbers")]

use baton_cost::{Device, Link, ModelShape, StepCoefficients};
use baton_units::BlockSize;
use proptest::prelude::*;

use super::*;

const SIZE: BlockSize = BlockSize::DEFAULT;

fn replica(id: u32, total: u32) -> ReplicaFacts {
    let shape = ModelShape::preset("llama-2-7b-gqa8").unwrap();
    ReplicaFacts {
        id: ReplicaId(id),
        state: ReplicaState::Ready,
        numerics: 1,
        block_size: SIZE,
        blocks_total: Blocks(total),
        blocks_used: Blocks(0),
        watermark: Blocks(total / 100),
        max_running: 256,
        step: StepCoefficients::from_profile(&shape, &Device::preset("h100").unwrap()),
        kv_bytes_per_token: 131_072.0,
        link: Link::preset("ethernet").unwrap(),
        queue_s: 0.0,
        running: Vec::new(),
        waiting: Vec::new(),
    }
}

fn running(request: u64, tokens: u32) -> RunningFacts {
    RunningFacts {
        request: RequestId(request),
        tokens: Tokens(tokens),
        blocks: Tokens(tokens).to_blocks(SIZE),
        priority: Priority(0),
        program: None,
        started_at: Time::ZERO,
        left_at_most: None,
        prefilling: false,
        movable: true,
    }
}

fn waiting(request: u64, tokens: u32, arrived_ms: f64) -> WaitingFacts {
    WaitingFacts {
        request: RequestId(request),
        tokens: Tokens(tokens),
        demand: Blocks(Tokens(tokens).to_blocks(SIZE).0 + 1),
        priority: Priority(0),
        program: None,
        arrived: Time::from_ms(arrived_ms),
        left_at_most: None,
        fresh: true,
        movable: true,
    }
}

impl ReplicaFacts {
    fn run(mut self, requests: impl IntoIterator<Item = RunningFacts>) -> Self {
        for request in requests {
            self.blocks_used += request.blocks;
            self.running.push(request);
        }
        self
    }

    fn wait(mut self, requests: impl IntoIterator<Item = WaitingFacts>) -> Self {
        self.waiting.extend(requests);
        self
    }
}

fn fleet(replicas: impl IntoIterator<Item = ReplicaFacts>) -> FleetFacts {
    FleetFacts { replicas: replicas.into_iter().collect(), ..FleetFacts::default() }
}

fn config() -> MoverConfig {
    MoverConfig::default()
}

/// The facts once the moves have been carried out, at once.
fn carry_out(facts: &mut FleetFacts, moves: &[Move]) {
    for one in moves {
        let from = facts.replicas.iter_mut().find(|replica| replica.id == one.from).unwrap();
        let ran = from.running.iter().position(|own| own.request == one.request).map(|place| from.running.remove(place));
        let waited = from.waiting.iter().position(|own| own.request == one.request).map(|place| from.waiting.remove(place));
        from.blocks_used = from.blocks_used.saturating_sub(ran.map_or(Blocks(0), |ran| ran.blocks));
        assert!(ran.is_some() != waited.is_some(), "{one}: it is where it goes from, once");
        let to = facts.replicas.iter_mut().find(|replica| replica.id == one.to).unwrap();
        if let (Some(ran), MoveWay::Kv) = (ran, one.way) {
            to.blocks_used += ran.blocks;
            to.running.push(ran);
        } else {
            let fresh = waited.is_some_and(|waited| waited.fresh);
            to.waiting.push(WaitingFacts { fresh, ..waiting(one.request.0, one.tokens.0, 0.0) });
        }
    }
}

/// What engines do with what waits and fits.
fn admit(facts: &mut FleetFacts) {
    for replica in &mut facts.replicas {
        while let Some(head) = replica.waiting.first().copied()
            && replica.blocks_used + head.demand <= replica.capacity()
        {
            replica.waiting.remove(0);
            let admitted = RunningFacts { blocks: head.demand, ..running(head.request.0, head.tokens.0) };
            replica.blocks_used += head.demand;
            replica.running.push(admitted);
        }
    }
}

fn requests(facts: &FleetFacts) -> Vec<RequestId> {
    let mut all: Vec<RequestId> = facts.replicas.iter().flat_map(ReplicaFacts::requests).collect();
    all.sort_unstable();
    all
}

/// Caches that hold nothing of what may move.
fn cold(_: RequestId, _: ReplicaId) -> Tokens {
    Tokens::ZERO
}

fn at(ms: f64) -> Time {
    Time::from_ms(ms)
}

mod examples;
mod laws;
