//! Every interleaving of one request of three entries, its gateway and two replicas, over a network that loses, delays, repeats and
//! reorders, with budgets of crashes, false suspicions, lapsed leases, a cancellation, the gateway's death, and up to two moves.
//!
//! What must hold: each entry is delivered once, in order, computed from exactly the delivered ones before it; at most one replica
//! computes under the current epoch, and at most one at all where nothing failed; where nothing failed no moved KV is lost; and from
//! every state, all messages lost and no further fault, the run can still end with both replicas empty.
//!
//! `BATON_CHECK=long` runs the larger configurations, minutes each.

mod controls;
mod model;
mod stuck;

use stateright::{Checker, HasDiscoveries, Model};

use self::{
    controls::Control,
    model::{Budget, Law, Moves},
};

/// A configuration with all that was found.
struct Found {
    states: usize,
    laws: Vec<(Law, String)>,
}

fn explore(budget: Budget, control: Option<Control>, law: Option<Law>) -> Found {
    let moves = Moves::new(budget, control);
    let checker = moves.checker().threads(2);
    let checker = match law {
        // A control is caught as soon as its law is broken; whether a run can end is asked of all states.
        Some(law) if law != Law::CanEnd => checker.finish_when(HasDiscoveries::AnyOf([law.name()].into())),
        _ => checker.finish_when(HasDiscoveries::AllOf(Law::SAFETY.iter().map(|law| law.name()).collect())),
    };
    let checked = checker.spawn_bfs().join();
    let mut laws: Vec<(Law, String)> = checked
        .discoveries()
        .into_iter()
        .map(|(name, path)| {
            let law = *Law::SAFETY.iter().find(|law| law.name() == name).expect("a law of ours");
            (law, path.into_actions().iter().map(|action| format!("{action:?}")).collect::<Vec<_>>().join("\n  "))
        })
        .collect();
    if law.is_none_or(|law| law == Law::CanEnd)
        && let Some(state) = stuck::find(checked.model())
    {
        laws.push((Law::CanEnd, format!("{state:#?}")));
    }
    Found { states: checked.unique_state_count(), laws }
}

fn holds(label: &str, budget: Budget) -> usize {
    let found = explore(budget, None, None);
    println!("{label}: {} states", found.states);
    for (law, how) in &found.laws {
        println!("{} is broken:\n  {how}", law.name());
    }
    assert!(found.laws.is_empty(), "{label}");
    found.states
}

#[test]
fn a_request_moves_as_its_client_expects_whatever_is_lost() {
    let configurations: &[(&str, Budget)] = if std::env::var("BATON_CHECK").is_ok_and(|size| size == "long") {
        &[
            ("cancel, 2 attempts", Budget { cancels: 1, attempts: 2, ..Budget::NONE }),
            ("gateway's death, cancel, 2 attempts", Budget { deaths: 1, cancels: 1, attempts: 2, ..Budget::NONE }),
            ("1 crash, cancel, 2 attempts", Budget { crashes: 1, cancels: 1, attempts: 2, ..Budget::NONE }),
            ("1 suspicion or lapse, cancel, 2 attempts", Budget { suspicions: 1, cancels: 1, attempts: 2, ..Budget::NONE }),
            ("2 crashes, cancel, 1 attempt", Budget { crashes: 2, cancels: 1, ..Budget::NONE }),
            ("2 suspicions or lapses, 1 attempt", Budget { suspicions: 2, ..Budget::NONE }),
            ("1 crash, 1 suspicion or lapse, cancel, 1 attempt", Budget { crashes: 1, suspicions: 1, cancels: 1, ..Budget::NONE }),
            ("1 crash, 1 suspicion or lapse, 2 attempts", Budget { crashes: 1, suspicions: 1, attempts: 2, ..Budget::NONE }),
        ]
    } else {
        &[
            ("cancel, 1 attempt", Budget { cancels: 1, ..Budget::NONE }),
            ("2 attempts", Budget { attempts: 2, ..Budget::NONE }),
            ("gateway's death, cancel, 1 attempt", Budget { deaths: 1, cancels: 1, ..Budget::NONE }),
            ("1 crash, cancel, 1 attempt", Budget { crashes: 1, cancels: 1, ..Budget::NONE }),
            ("1 suspicion or lapse, cancel, 1 attempt", Budget { suspicions: 1, cancels: 1, ..Budget::NONE }),
        ]
    };
    let states: usize = configurations.iter().map(|(label, budget)| holds(label, *budget)).sum();
    println!("{states} states in {} configurations", configurations.len());
}

#[test]
fn messages_are_forgotten_only_when_they_can_do_nothing() {
    // With all kept the states are too many where something fails: there so many steps are compared.
    let faults = Budget { crashes: 1, suspicions: 1, ..Budget::NONE };
    for (budget, steps) in [(Budget { cancels: 1, ..Budget::NONE }, usize::MAX), (faults, 11)] {
        let reached = |keeps_all| {
            let checker = Moves { keeps_all, ..Moves::new(budget, None) }.checker().threads(2).target_max_depth(steps).spawn_bfs().join();
            println!("{budget:?}, all kept {keeps_all}: {} states", checker.unique_state_count());
            std::mem::take(&mut *checker.model().known.lock().unwrap())
        };
        let (few, all) = (reached(false), reached(true));
        if let Some(state) = all.symmetric_difference(&few).next() {
            panic!("only {}: {state:#?}", if few.contains(state) { "where they are forgotten" } else { "where all are kept" });
        }
    }
}

#[test]
fn every_safeguard_is_needed() {
    for control in Control::ALL {
        let (law, budget) = control.breaks();
        let found = explore(budget, Some(*control), Some(law));
        let caught = found.laws.iter().any(|(broken, _)| *broken == law);
        println!("{control:?}: {} states", found.states);
        assert!(caught, "without it, {control:?} should break `{}`", law.name());
    }
}
