//! Replicas are emptied under load, and no client notices.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use serde_json::Value;

use crate::{
    client::Ask,
    common::{run, until},
    fleet::{Fleet, Make, until_empty},
};

const REPLICAS: usize = 3;

/// Runs a command of an operator on the fleet's gateway; its JSON.
fn operate(fleet: &Fleet, args: &[&str]) -> Value {
    let output = run(&[args, &["--url", fleet.url(), "--json"]].concat());
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Drains one replica after the other while clients ask without a pause, one request each at a time.
fn drains_under_load(make: &Make, rounds: usize, clients: usize, ask: impl Fn(usize) -> Ask + Sync) {
    let fleet = make.fleet(REPLICAS);
    let (asked, over) = (AtomicUsize::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        // However the rounds end, the clients do.
        let _stop = StopOnDrop(&over);
        for _ in 0..clients {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let number = asked.fetch_add(1, Ordering::Relaxed);
                    let ask = ask(number);
                    let answer = ask.answer(fleet.url(), &format!("load-{number}"));
                    assert!(answer.is_whole(), "{number}: {answer:?}");
                    assert_eq!(answer.tokens() as u64, ask.body["max_tokens"].as_u64().unwrap());
                }
            });
        }
        for round in 0..rounds {
            let (index, name) = (round % REPLICAS, format!("r{}", round % REPLICAS));
            let row = || fleet.gateway.replicas()[index].clone();
            until("load on the replica", || (row()["in_flight"].as_u64() > Some(0)).then_some(()));
            let drained = operate(&fleet, &["drain", &name, "--wait"]);
            assert!(drained["drain"]["emptied_ms"].is_number(), "{drained}");
            assert_eq!(row()["in_flight"], 0);
            until_empty(&fleet.replicas[index]);
            operate(&fleet, &["undrain", &name]);
        }
    });
    let moves = fleet.moves();
    assert!(moves.iter().any(|one| one["kind"] == "drain" && one["outcome"] == "moved"), "{moves:?}");
    fleet.until_at_rest();
}

struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn twenty_drains_under_load_fail_no_request() {
    let make = Make::timed().with(&["--blocks", "2048", "--max-model-len", "8192"]);
    drains_under_load(&make, 20, 12, |number| Ask::chat(&format!("{number} {}", "a long story ".repeat(100)), 300).sampled(number as u64));
}

#[test]
fn drains_of_real_engines_under_load_fail_no_request() {
    drains_under_load(&Make::cpu(), 3, 3, |number| Ask::chat(&format!("Story {number}, told at length."), 40).sampled(number as u64));
}
