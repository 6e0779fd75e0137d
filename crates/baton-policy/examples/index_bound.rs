//! What a bound on the index's memory costs: 100,000 distinct prompts of 4,096 tokens, beside sessions that come back, over replicas
//! whose own caches lose nothing. `index_bound [prompts=100000] [mib=512] [sessions=1500]` prints how much of what the sessions' replicas
//! hold the index still finds: with the router's eviction by worth, and with the least recently used going first.
#![allow(clippy::print_stdout, reason = "a program that measures")]

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use baton_cost::StepCoefficients;
use baton_kv::{BlockKey, FleetIndex, KeyDomain, chain_keys};
use baton_policy::{Arrival, Discipline, Outcome, PolicyName, ReplicaSpec, Router, RouterConfig, Slo, Verdict};
use baton_units::{BlockSize, Blocks, Bytes, Incarnation, Priority, ReplicaId, RequestId, Time, Tokens};

const REPLICAS: u32 = 16;
/// Tokens of a prompt of some 16 KB.
const PROMPT: u32 = 4096;
/// One request in so many is a turn of a session.
const TURNS: u64 = 10;
const ROOT: KeyDomain<'static> = KeyDomain { model: "", adapter: None, salt: None };

/// What is told of each request: its prompt, and the replica that it is on or goes to.
trait Subject {
    /// Blocks of the prompt that are found on `home`; the request is then served there and ends.
    fn serve(&mut self, request: u64, home: ReplicaId, keys: &Arc<[BlockKey]>, now: Time) -> u32;
    fn index(&self) -> &FleetIndex;
}

impl Subject for Router {
    fn serve(&mut self, request: u64, home: ReplicaId, keys: &Arc<[BlockKey]>, now: Time) -> u32 {
        let found = Router::index(self).matches(keys).get(home.index()).copied().unwrap_or(0);
        let arrival = Arrival {
            request: RequestId(request),
            keys: keys.clone(),
            prompt: Tokens(PROMPT),
            max_output: None,
            session: None,
            program: None,
            share: None,
            priority: Priority(0),
            slo: Slo::default(),
            excluded: (0..REPLICAS).map(ReplicaId).filter(|id| *id != home).collect(),
        };
        assert!(matches!(self.place(arrival, now), Verdict::Run(_)), "there is room");
        self.first_token(RequestId(request), None, now);
        self.finished(RequestId(request), Outcome::Finished, None, now);
        found
    }

    fn index(&self) -> &FleetIndex {
        Router::index(self)
    }
}

/// The index by itself evicts the least recently used of the fleet.
impl Subject for FleetIndex {
    fn serve(&mut self, _: u64, home: ReplicaId, keys: &Arc<[BlockKey]>, now: Time) -> u32 {
        let found = self.matches(keys).get(home.index()).copied().unwrap_or(0);
        self.pin(home, keys, now, |_| {});
        self.unpin(home, keys, keys, true, now);
        found
    }

    fn index(&self) -> &FleetIndex {
        self
    }
}

fn main() {
    let given: BTreeMap<String, u64> = std::env::args()
        .skip(1)
        .filter_map(|argument| argument.split_once('=').map(|(key, value)| (key.to_owned(), value.parse().expect("a number"))))
        .collect();
    let number = |name: &str, default: u64| given.get(name).copied().unwrap_or(default);
    let (prompts, sessions) = (number("prompts", 100_000), number("sessions", 1500));
    let bytes = Bytes(number("mib", 512) << 20);
    let lifetime = Duration::from_hours(24);
    println!("{prompts} distinct prompts, every {TURNS}th request a turn of one of {sessions} sessions, index_bytes = {bytes}");
    let config = RouterConfig {
        policy: PolicyName::RoundRobin,
        belief_lifetime: lifetime,
        index_bytes: bytes,
        decisions_kept: 0,
        ..RouterConfig::default()
    };
    let mut router = Router::new(config, 1);
    (0..REPLICAS).for_each(|id| router.upsert_replica(spec(id), Time::ZERO));
    run("by worth", &mut router, prompts, sessions);
    run("least recently used", &mut FleetIndex::new("", lifetime, bytes), prompts, sessions);
}

fn run(name: &str, subject: &mut impl Subject, prompts: u64, sessions: u64) {
    let mut rng = fastrand::Rng::with_seed(7);
    let mut seen: BTreeMap<u64, u64> = BTreeMap::new();
    let (mut found, mut there, mut bytes_most) = (0, 0, Bytes(0));
    let requests = prompts * TURNS / (TURNS - 1);
    for request in 0..requests {
        let now = Time(request * 10_000_000);
        let session = (request % TURNS == 0).then(|| rng.u64(..sessions));
        let text = session.unwrap_or(sessions + request);
        let home = ReplicaId((text % u64::from(REPLICAS)) as u32);
        let hit = subject.serve(request, home, &prompt(text), now);
        if session.is_some() {
            let turn = seen.entry(text).or_default();
            // What the first half learns, the second half is measured by.
            if *turn > 0 && request > requests / 2 {
                found += u64::from(hit);
                there += u64::from(PROMPT / BlockSize::DEFAULT.get());
            }
            *turn += 1;
        }
        bytes_most = bytes_most.max(subject.index().bytes());
    }
    let (share, evicted) = (found as f64 / there.max(1) as f64, subject.index().evicted_for_room());
    println!("{name}: {:.1} % of the sessions' blocks found, at most {bytes_most}, {evicted} blocks evicted", 100.0 * share);
}

fn prompt(text: u64) -> Arc<[BlockKey]> {
    let mut state = text.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let tokens: Vec<u32> = (0..PROMPT)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 47) as u32
        })
        .collect();
    chain_keys(ROOT.root(), &tokens, BlockSize::DEFAULT).into()
}

/// A replica whose cache is larger than what is sent to it.
fn spec(id: u32) -> ReplicaSpec {
    ReplicaSpec {
        id: ReplicaId(id),
        incarnation: Incarnation(1),
        block_size: BlockSize::DEFAULT,
        kv_blocks: Blocks(1 << 24),
        max_model_len: Tokens(131_072),
        max_running: 256,
        discipline: Discipline::Chunked { budget: Tokens(2048) },
        step: StepCoefficients { fixed_s: 0.0025, per_token_s: 2.7e-5, per_attended_s: 1.06e-9, per_kv_token_s: 3.9e-8, weights_s: 0.004 },
    }
}
