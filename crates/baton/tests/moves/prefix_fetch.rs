//! A prefix that is cached at a busy replica is brought to an idle one for the request that wants it.

use serde_json::{Value, json};

use crate::{
    client::{Answer, Ask},
    common::{Handle, until},
    fleet::{Fleet, Make},
};

/// What a replica has to do before the request comes is waited for up to this: more than a fetch takes.
const BUSY_MS: f64 = 400.0;

/// Prompts that share all but their ends, in words that are tokens.
struct Prompts {
    shared: usize,
    /// Prompts of another text that keep the holder busy.
    others: usize,
    tokens: u32,
}

impl Prompts {
    fn ask(&self, end: &str) -> Ask {
        Ask::completion(&format!("{}{end}", "word".repeat(self.shared)), self.tokens)
    }

    fn other(&self, number: usize) -> Ask {
        Ask::completion(&format!("{number:04}{}", "else".repeat(self.shared)), 1)
    }
}

/// The decision on the latest request, with the quote of the replica that it went to.
fn latest_decision(fleet: &Fleet) -> (Value, Value) {
    let (_, body) = fleet.gateway.get("/baton/v1/decisions?limit=1");
    let body: Value = serde_json::from_str(&body).unwrap();
    let decision = body["decisions"][0].clone();
    let quotes = decision["quotes"].as_array().unwrap();
    let own = quotes.iter().find(|quote| quote["replica"] == decision["chosen"]).unwrap().clone();
    (decision, own)
}

/// Has one replica compute the shared prefix, keeps it busy, and asks for the prefix with another end. Gives that answer, and the
/// holder's place in the fleet.
fn asks_again(fleet: &Fleet, prompts: &Prompts) -> (Answer, usize) {
    assert!(prompts.ask("first").answer(fleet.url(), "first").is_whole());
    let holder = (0..2).find(|&place| fleet.gateway.replicas()[place]["kv_blocks_indexed"].as_u64() > Some(0)).unwrap();
    std::thread::scope(|scope| {
        for number in 0..prompts.others {
            let url = &fleet.replicas[holder].url;
            // It may be killed meanwhile.
            scope.spawn(move || std::panic::catch_unwind(|| prompts.other(number).answer(url, "other")));
        }
        until("busy holder", || (fleet.gateway.replicas()[holder]["queue_ms"].as_f64() > Some(BUSY_MS)).then_some(()));
        (prompts.ask("again").answer(fleet.url(), "again"), holder)
    })
}

/// Who computes all of it gives that answer.
fn unfetched(fleet: &Fleet, prompts: &Prompts) -> Answer {
    let answer = prompts.ask("again").answer(fleet.url(), "alone");
    assert_eq!(fleet.gateway.post("/baton/v1/reset", &json!({})).0, 200);
    answer
}

/// On a machine that is slow just then a request may wait too long for its prefix, and go on without: then it is all done again.
const ROUNDS: usize = 8;

fn is_fetched(make: &Make, prompts: &Prompts) {
    let fetched = (0..ROUNDS).any(|_| is_fetched_in_time(make, prompts));
    assert!(fetched, "no prefix came in time in {ROUNDS} rounds");
}

fn is_fetched_in_time(make: &Make, prompts: &Prompts) -> bool {
    let fleet = make.fleet(2);
    let alone = unfetched(&fleet, prompts);
    let (answer, holder) = asks_again(&fleet, prompts);
    assert!(answer.is_whole());
    assert_eq!(answer, alone, "the same bits");
    let fetches: Vec<Value> = fleet.moves().into_iter().filter(|one| one["kind"] == "fetch").collect();
    let [fetch] = &fetches[..] else { panic!("one fetch was to be, and {fetches:?} were") };
    assert_eq!(fetch["from"], json!(format!("r{holder}")), "{fetch}");
    let (decision, own) = latest_decision(&fleet);
    assert!(own["fetch"]["tokens"].as_u64() > Some(0), "{decision}");
    fleet.until_at_rest();
    if fetch["outcome"] == "ended" {
        assert!(fetch["took_ms"].as_f64() > fetch["expected_ms"].as_f64(), "{fetch}");
        return false;
    }
    assert_eq!(fetch["outcome"], "moved", "{fetch}");
    assert!(fetch["bytes_sent"].as_u64() > Some(0), "{fetch}");
    assert_eq!(decision["realised"]["cached_tokens"], own["hit_tokens"], "what was fetched is found: {decision}");
    true
}

#[test]
fn a_prefix_goes_from_a_busy_cpu_replica_to_an_idle_one() {
    is_fetched(&Make::cpu(), &Prompts { shared: 640, others: 3, tokens: 8 });
}

fn timed() -> (Make, Prompts) {
    let make = Make::timed().with(&["--blocks", "16384", "--max-model-len", "16384"]);
    (make, Prompts { shared: 8000, others: 8, tokens: 20 })
}

#[test]
fn a_prefix_goes_from_a_busy_emulated_replica_to_an_idle_one() {
    let (make, prompts) = timed();
    is_fetched(&make, &prompts);
}

/// A holder that dies in the middle costs the time to compute what it was to bring.
#[test]
fn a_holder_that_is_killed_in_mid_copy_costs_only_time() {
    let (make, prompts) = timed();
    let alone = unfetched(&make.fleet(2), &prompts);
    let faulty = (0..2).map(|index| make.replica(&format!("r{index}"), &[("BATON_FAULT", "prefix-copying:kill")])).collect();
    let mut fleet = Fleet::of(&make, faulty);
    let (answer, holder) = asks_again(&fleet, &prompts);
    assert!(answer.is_whole());
    assert_eq!(answer, alone);
    Handle::of(fleet.replicas[holder].pid()).wait_for_end();
    let fetches: Vec<Value> = fleet.moves().into_iter().filter(|one| one["kind"] == "fetch").collect();
    assert!(matches!(&fetches[..], [fetch] if fetch["outcome"] != "moved"), "{fetches:?}");
    fleet.keep(|place| place != holder);
    fleet.until_at_rest();
}
