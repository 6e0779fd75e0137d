use std::collections::{BTreeSet, HashMap, HashSet};

use super::{
    controls::Control,
    model::{Moves, Sent, State, Step, place_of},
};
use crate::{RegisterOutput, SeatOutput, ToGateway, ToSeat};

/// Messages that one step may lead to before a run is cut off; far more than there are.
const CASCADE_MAX: usize = 64;

/// A state from which, with all messages lost and no more faults, the run cannot end with empty replicas; if there is one.
///
/// Asked twice: a suspected replica can be reached again, and it is cut off for ever.
pub(super) fn find(moves: &Moves) -> Option<State> {
    let known: Vec<State> = moves.known.lock().expect("no holder panics").iter().cloned().collect();
    [false, true].into_iter().find_map(|cut_off| find_where(moves, &known, cut_off))
}

fn find_where(moves: &Moves, known: &[State], cut_off: bool) -> Option<State> {
    let mut numbers: HashMap<State, usize> = HashMap::new();
    let mut states: Vec<State> = Vec::new();
    for state in known {
        numbers.insert(state.clone(), states.len());
        states.push(state.clone());
    }
    let mut leads_here: Vec<Vec<u32>> = vec![Vec::new(); states.len()];
    let mut ends = Vec::new();
    let mut place = 0;
    while place < states.len() {
        let state = states[place].clone();
        if has_ended(&state) {
            ends.push(place);
        } else {
            for next in successors(moves, &state, cut_off) {
                let number = *numbers.entry(next.clone()).or_insert_with(|| {
                    states.push(next);
                    leads_here.push(Vec::new());
                    states.len() - 1
                });
                if number != place {
                    leads_here[number].push(place as u32);
                }
            }
        }
        place += 1;
    }
    let mut can_end: HashSet<usize> = ends.iter().copied().collect();
    while let Some(end) = ends.pop() {
        for &before in &leads_here[end] {
            if can_end.insert(before as usize) {
                ends.push(before as usize);
            }
        }
    }
    (0..known.len()).find(|place| !can_end.contains(place)).map(|place| states[place].clone())
}

fn has_ended(state: &State) -> bool {
    (state.dead || state.register.has_ended()) && state.seats.iter().all(|seat| seat.holding().is_none())
}

/// Where steps without a fault lead, each with all messages that follow from it, or with none of them.
fn successors(moves: &Moves, state: &State, cut_off: bool) -> Vec<State> {
    let mut steps = Vec::new();
    moves.own_steps(state, true, &mut steps);
    let once = |sent: &Sent| moves.is(Control::StopOnce) && matches!(sent, Sent::Down { message: ToSeat::Stop { .. }, .. });
    steps.extend(repeated(state).into_iter().filter(|sent| !once(sent) && reaches(state, sent, cut_off)).map(Step::Deliver));
    let mut found = Vec::new();
    for step in steps {
        let Some(next) = moves.take(state, &step) else { continue };
        found.push(State { sent: BTreeSet::new(), ..next.clone() });
        found.push(cascade(moves, next, cut_off));
    }
    found
}

/// Delivers what is under way, and what follows from that, until nothing is.
fn cascade(moves: &Moves, mut state: State, cut_off: bool) -> State {
    let mut done: HashSet<Sent> = HashSet::new();
    for _ in 0..CASCADE_MAX {
        let Some(sent) = state.sent.iter().find(|sent| !done.contains(*sent)).cloned() else { break };
        done.insert(sent.clone());
        if !reaches(&state, &sent, cut_off) {
            continue;
        }
        if let Some(next) = moves.take(&state, &Step::Deliver(sent)) {
            state = next;
        }
    }
    State { sent: BTreeSet::new(), ..state }
}

/// What the parties send again by themselves.
fn repeated(state: &State) -> Vec<Sent> {
    let mut all = Vec::new();
    for (at, seat) in state.seats.iter().enumerate() {
        let from = place_of(state, at);
        for output in seat.unanswered() {
            match output {
                SeatOutput::ToGateway(message) => {
                    let prefix = match (&message, seat.holding()) {
                        (ToGateway::Output { index, .. }, Some(holding)) => holding.entries[..*index as usize].to_vec(),
                        _ => Vec::new(),
                    };
                    all.push(Sent::Up { from, message, prefix });
                }
                SeatOutput::ToPeer { to, message } => all.push(Sent::Across { from, to, message }),
                SeatOutput::Work(_) => {}
            }
        }
    }
    if !state.dead {
        for output in state.register.unanswered() {
            if let RegisterOutput::ToSeat { to, message } = output {
                all.push(Sent::Down { to, message });
            }
        }
    }
    all
}

fn reaches(state: &State, sent: &Sent, cut_off: bool) -> bool {
    let suspected = |replica: usize| state.suspected[replica];
    let off = match sent {
        Sent::Down { to, .. } => suspected(to.replica.index()),
        Sent::Up { from, .. } => suspected(from.replica.index()),
        Sent::Across { from, to, .. } => suspected(to.replica.index()) || suspected(from.replica.index()),
    };
    !(cut_off && off)
}
