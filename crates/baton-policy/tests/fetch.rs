//! A peer's cache as the source of a prefix, through the router's public API.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;

use baton_cost::{StepCoefficients, fetch_s};
use baton_kv::{BlockKey, KeyDomain, chain_keys};
use baton_policy::{
    Arrival, Discipline, FetchQuote, LoadReport, Outcome, PeerTerms, Placed, PolicyName, PrefixFetch, Quote, ReplicaSpec, ReplicaState,
    Router, RouterConfig, Slo, Verdict,
};
use baton_units::{BlockSize, Blocks, Incarnation, Priority, ReplicaId, RequestId, Time, Tokens};
use proptest::prelude::*;

const SIZE: BlockSize = BlockSize::DEFAULT;
/// Of the reference machine's KV.
const BYTES: f64 = 131_072.0;
const HOLDER: ReplicaId = ReplicaId(0);
const IDLE: ReplicaId = ReplicaId(1);

/// The reference machine: 129.4 ms for 4,096 tokens.
fn step() -> StepCoefficients {
    let (flops, bytes_per_s) = (494.5e12, 3.35e12);
    StepCoefficients {
        fixed_s: 0.0025,
        per_token_s: 2.0 * 6.74e9 / flops,
        per_attended_s: 4.0 * 32.0 * 4096.0 / flops,
        per_kv_token_s: BYTES / bytes_per_s,
        weights_s: 13.48e9 / bytes_per_s,
    }
}

fn arrival(request: u64, prefix: u32, tokens: u32) -> Arrival {
    let own = (prefix..tokens).map(|place| 1_000_000 * (1 + request as u32 % 1000) + place);
    let tokens: Vec<u32> = (0..prefix).chain(own).collect();
    let keys: Arc<[BlockKey]> = chain_keys(KeyDomain { model: "", adapter: None, salt: None }.root(), &tokens, SIZE).into();
    Arrival {
        request: RequestId(request),
        keys,
        prompt: Tokens(tokens.len() as u32),
        max_output: None,
        session: None,
        program: None,
        share: None,
        priority: Priority(0),
        slo: Slo::default(),
        excluded: Vec::new(),
    }
}

/// A fleet whose first replica has computed `prefix` tokens, the second `held` of them, and the first is busy.
fn fleet(replicas: u32, prefix: u32, held: u32) -> Router {
    let config = RouterConfig { bind_within: None, ..RouterConfig::default() };
    let mut router = Router::new(config, 7);
    for id in 0..replicas {
        let spec = ReplicaSpec {
            id: ReplicaId(id),
            incarnation: Incarnation(1),
            block_size: SIZE,
            kv_blocks: Blocks(4000),
            max_model_len: Tokens(40_000),
            max_running: 64,
            discipline: Discipline::Serial,
            step: step(),
        };
        router.upsert_replica(spec, Time::ZERO);
    }
    for (request, to, tokens) in [(1, HOLDER, prefix), (2, IDLE, held)] {
        if tokens > 0 && to.0 < replicas {
            let excluded = (0..replicas).map(ReplicaId).filter(|id| *id != to).collect();
            assert!(matches!(router.place(Arrival { excluded, ..arrival(request, tokens, tokens + 1) }, Time::ZERO), Verdict::Run(_)));
            let id = RequestId(request);
            router.first_token(id, None, Time::from_ms(500.0));
            router.finished(id, Outcome::Finished, None, Time::from_ms(501.0));
        }
    }
    router
}

fn now() -> Time {
    Time::from_ms(1_000.0)
}

fn make_busy(router: &mut Router) {
    let report = LoadReport { taken_at: now(), waiting: 9, running: 1, kv_blocks_free: Blocks(2000), prefill_backlog: Tokens(100_000) };
    router.report(HOLDER, report, now());
}

fn know_peers(router: &mut Router, replicas: u32, bytes_per_s: f64, latency_s: f64) {
    for id in 0..replicas {
        router.set_peer_terms(ReplicaId(id), Some(PeerTerms { group: 7, kv_bytes_per_token: BYTES, latency_s, bytes_per_s }));
    }
}

fn place(router: &mut Router, arrival: Arrival) -> Placed {
    match router.place(arrival, now()) {
        Verdict::Run(placed) => placed,
        other @ (Verdict::Hold | Verdict::Refuse(_)) => panic!("not placed: {other:?}"),
    }
}

fn quotes(router: &Router, request: u64) -> Vec<Quote> {
    router.decision(RequestId(request)).unwrap().quotes.clone()
}

fn fetch_at_idle(router: &Router, request: u64) -> Option<FetchQuote> {
    quotes(router, request).iter().find(|quote| quote.replica == IDLE).unwrap().fetch
}

/// Mooncake's comparison: beyond `b (H - h) / T_rec` bytes per second it pays to fetch.
#[test]
fn a_prefix_is_fetched_above_the_break_even_bandwidth_only() {
    for (prefix, held, prompt) in [(4096, 0, 4097), (4096, 1024, 4500), (16_384, 0, 17_000)] {
        let computed = |hit: u32| step().prefill_ms(Tokens(prompt - hit), Tokens(hit)) / 1e3;
        let saved_s = computed(held) - computed(prefix);
        let break_even = BYTES * f64::from(prefix - held) / saved_s;
        for (above, fetches) in [(1.001, true), (0.999, false)] {
            let mut router = fleet(2, prefix, held);
            know_peers(&mut router, 2, above * break_even, 0.0);
            make_busy(&mut router);
            place(&mut router, arrival(9, prefix, prompt));
            let quoted = fetch_at_idle(&router, 9);
            assert_eq!(quoted.is_some(), fetches, "{quoted:?} at {above} of {break_even}");
            if let Some(quoted) = quoted {
                assert_eq!((quoted.from, quoted.tokens), (HOLDER, Tokens(prefix - held)));
            }
        }
    }
}

#[test]
fn a_fetch_is_placed_with_what_is_to_be_brought_and_shares_its_link() {
    let mut router = fleet(2, 4096, 0);
    know_peers(&mut router, 2, 25e9, 1e-3);
    make_busy(&mut router);
    let alone_s = fetch_s(BYTES * 4096.0, 1e-3, 25e9, 0);
    assert!((alone_s - 22.47e-3).abs() < 1e-5);
    let placed = place(&mut router, arrival(9, 4096, 4200));
    let PrefixFetch { from, blocks, takes, saves } = placed.fetch.unwrap();
    assert_eq!((placed.replica, placed.copy, from, blocks), (IDLE, None, HOLDER, Blocks(256)));
    assert!((takes.as_secs_f64() - alone_s).abs() < 1e-6);
    let chosen = quotes(&router, 9).into_iter().find(|quote| quote.replica == IDLE).unwrap();
    assert_eq!(chosen.hit_tokens, Tokens(4096));
    assert!(chosen.terms.wait >= takes.as_secs_f64() * 1e3 - 1e-9, "it waits for what it fetches");
    let prefill_ms = step().prefill_ms(Tokens(104), Tokens(4096));
    let saves_ms = step().prefill_ms(Tokens(4200), Tokens(0)) - prefill_ms;
    assert!((saves.as_secs_f64() * 1e3 - saves_ms).abs() < 1e-6, "{saves:?}");
    assert!((chosen.terms.prefill - prefill_ms).abs() < 1e-9);
    // What is on its way is neither a source nor fetched twice by those who follow it there.
    place(&mut router, arrival(10, 4096, 4200));
    assert_eq!(fetch_at_idle(&router, 10), None);
    // Another prefix of the holder's shares the link with it.
    let mut third = fleet(3, 4096, 0);
    know_peers(&mut third, 3, 25e9, 1e-3);
    make_busy(&mut third);
    let first = place(&mut third, arrival(9, 4096, 4200));
    let other = quotes(&third, 9).into_iter().find(|quote| ![HOLDER, first.replica].contains(&quote.replica)).unwrap();
    assert!((other.fetch.unwrap().ms - alone_s * 1e3).abs() < 1e-6);
    let excluded = vec![first.replica];
    let second = place(&mut third, Arrival { excluded: excluded.clone(), ..arrival(10, 4096, 4200) });
    assert_eq!(second.fetch.unwrap().from, HOLDER);
    assert!((second.fetch.unwrap().takes.as_secs_f64() - fetch_s(BYTES * 4096.0, 1e-3, 25e9, 1)).abs() < 1e-6, "half of it each");
}

#[test]
fn what_does_not_come_is_computed_and_the_books_say_so() {
    let mut router = fleet(2, 4096, 0);
    know_peers(&mut router, 2, 25e9, 1e-3);
    make_busy(&mut router);
    let request = RequestId(9);
    assert!(place(&mut router, arrival(9, 4096, 4200)).fetch.is_some());
    let queue_ms = |router: &Router| router.fleet(now())[1].queue_ms;
    let fetched = queue_ms(&router);
    router.fetched(request, false, now());
    let computed = step().prefill_ms(Tokens(4200), Tokens::ZERO);
    assert!((queue_ms(&router) - computed).abs() < 1e-6 && fetched < computed / 5.0, "{fetched} and {}", queue_ms(&router));
    // Told again, or too late, it changes nothing.
    router.fetched(request, true, now());
    router.first_token(request, Some(Tokens::ZERO), now());
    router.fetched(request, false, now());
    router.finished(request, Outcome::Finished, None, now());
    assert_eq!((queue_ms(&router), router.fleet(now())[1].in_flight), (0.0, 0));
    // A request that ends while its prefix travels leaves no flow behind.
    let mut ended = fleet(2, 4096, 0);
    know_peers(&mut ended, 2, 25e9, 1e-3);
    make_busy(&mut ended);
    let takes: Vec<_> = (0..3)
        .map(|round| {
            let placed = place(&mut ended, arrival(20 + round, 4096, 4200));
            ended.finished(RequestId(20 + round), Outcome::Cancelled, None, now());
            placed.fetch.unwrap().takes
        })
        .collect();
    assert!(takes.iter().all(|took| *took == takes[0]), "{takes:?}");
    assert_eq!(ended.fleet(now())[1].in_flight, 0);
}

#[test]
fn only_peers_that_are_well_and_read_each_other_s_kv_are_asked() {
    let peer = PeerTerms { group: 7, kv_bytes_per_token: BYTES, latency_s: 0.0, bytes_per_s: 25e9 };
    let asked = |change: fn(&mut Router, PeerTerms)| {
        let mut router = fleet(2, 4096, 0);
        know_peers(&mut router, 2, 25e9, 0.0);
        make_busy(&mut router);
        change(&mut router, peer);
        place(&mut router, arrival(9, 4096, 4200));
        fetch_at_idle(&router, 9).is_some()
    };
    assert!(asked(|_, _| {}));
    assert!(!asked(|router, _| router.set_state(HOLDER, ReplicaState::Suspect, now())), "suspected");
    assert!(!asked(|router, peer| router.set_peer_terms(IDLE, Some(PeerTerms { group: 8, ..peer }))), "other bits");
    assert!(!asked(|router, _| router.set_peer_terms(IDLE, None)), "it takes no part");
    assert!(!asked(|router, _| router.remove_replica(HOLDER)), "gone");
    assert!(!asked(|router, _| router.set_policy(PolicyName::LeastOutstanding)), "what goes by other signals prices nothing");
    // Its room is taken by others.
    let full = |router: &mut Router, _: PeerTerms| {
        let excluded = vec![HOLDER];
        let verdict = router.place(Arrival { excluded, ..arrival(5, 0, 39_000) }, now());
        assert!(matches!(verdict, Verdict::Run(_)));
        let verdict = router.place(Arrival { excluded: vec![HOLDER], ..arrival(6, 0, 24_000) }, now());
        assert!(matches!(verdict, Verdict::Run(_)));
    };
    assert!(!asked(full), "no room for it");
}

proptest! {
    /// Neither where it is dearer than computing, nor without a link, nor where there is nobody else; and it never makes a quote dearer.
    #[test]
    fn a_fetch_is_quoted_where_it_pays_and_changes_nothing_else(
        prefix_blocks in 1u32..600,
        held_share in 0.0..1.0f64,
        own in 1u32..3000,
        gb_per_s in 0.05..50.0f64,
        latency_ms in 0.0..20.0f64,
        replicas in 1u32..4,
    ) {
        let prefix = prefix_blocks * 16;
        let held = (f64::from(prefix_blocks) * held_share) as u32 * 16;
        let decide = |bytes_per_s: Option<f64>| {
            let mut router = fleet(replicas, prefix, held);
            if let Some(bytes_per_s) = bytes_per_s {
                know_peers(&mut router, replicas, bytes_per_s, latency_ms / 1e3);
            }
            make_busy(&mut router);
            let placed = place(&mut router, arrival(9, prefix, prefix + own));
            (placed, quotes(&router, 9))
        };
        let without = decide(None);
        prop_assert!(without.1.iter().all(|quote| quote.fetch.is_none()));
        prop_assert_eq!(&decide(Some(1.0)), &without, "a link of a byte a second is none");
        let with = decide(Some(gb_per_s * 1e9));
        if replicas == 1 {
            prop_assert_eq!(&with, &without);
        }
        for (quote, before) in with.1.iter().zip(&without.1) {
            if let Some(fetch) = quote.fetch {
                prop_assert!(fetch.ms + quote.terms.prefill < fetch.recompute_ms);
                prop_assert!(fetch.from != quote.replica && fetch.tokens > Tokens::ZERO);
                prop_assert!(quote.terms.wait + quote.terms.prefill <= before.terms.wait + before.terms.prefill);
                prop_assert_eq!(quote.hit_tokens, before.hit_tokens + fetch.tokens);
            } else {
                let own = |quote: &Quote| (quote.terms.wait, quote.terms.prefill, quote.hit_tokens);
                prop_assert_eq!(own(quote), own(before));
            }
        }
    }
}
