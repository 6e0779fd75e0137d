use std::{
    collections::{BTreeSet, HashSet},
    sync::Mutex,
};

use baton_units::{Incarnation, ReplicaId};
use stateright::{Model, Property};

use super::controls::Control;
use crate::{Entry, Kv, LostClass, Phase, Place, Register, RegisterOutput, Seat, SeatOutput, Tag, ToGateway, ToPeer, ToSeat, Work};

/// Entries of the request, the finish included.
pub(super) const ENTRIES: usize = 3;
const REPLICAS: usize = 2;

/// An entry is worth the epoch that computed it, so that two computations of one index differ: equal bits are not assumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Value {
    pub(super) epoch: Tag,
    finish: bool,
}

impl Entry for Value {
    fn is_finish(&self) -> bool {
        self.finish
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Budget {
    pub(super) crashes: u8,
    /// Of a replica that lives, and leases that lapse while the gateway suspects nothing.
    pub(super) suspicions: u8,
    /// Of the gateway.
    pub(super) deaths: u8,
    pub(super) cancels: u8,
    pub(super) attempts: u8,
}

impl Budget {
    /// One move and no fault.
    pub(super) const NONE: Self = Self { crashes: 0, suspicions: 0, deaths: 0, cancels: 0, attempts: 1 };
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Law {
    Lineage,
    Runners,
    MovedKv,
    CanEnd,
}

impl Law {
    pub(super) const SAFETY: [Self; 3] = [Self::Lineage, Self::Runners, Self::MovedKv];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Lineage => "each entry is delivered once, in order, computed from those before it",
            Self::Runners => "one replica computes",
            Self::MovedKv => "moved KV arrives",
            Self::CanEnd => "the run can end with empty replicas",
        }
    }
}

/// A message that was sent; it may arrive at any later time, any number of times, or never.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Sent {
    Down {
        to: Place,
        message: ToSeat<Value>,
    },
    /// `prefix`: from what an output was computed, which no real message carries.
    Up {
        from: Place,
        message: ToGateway<Value>,
        prefix: Vec<Value>,
    },
    Across {
        from: Place,
        to: Place,
        message: ToPeer<Value>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct State {
    pub(super) seats: [Seat<Value>; REPLICAS],
    pub(super) register: Register<Value>,
    /// Of the gateway.
    pub(super) dead: bool,
    pub(super) suspected: [bool; REPLICAS],
    pub(super) left: Budget,
    pub(super) sent: BTreeSet<Sent>,
    pub(super) broken: BTreeSet<Law>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Step {
    Deliver(Sent),
    Compute(usize),
    Freeze(usize),
    Abort(usize),
    Reclaim(usize),
    Withdraw(usize),
    Pause(usize),
    Lapse(usize),
    Open,
    CloseAttempt,
    /// The owner is asked to go on, or told again to start.
    Keep,
    /// The owner came back empty: the request goes on at this replica, which is trusted.
    Replace(usize),
    /// A new incarnation was seen, which is not the owner's.
    Notice(usize),
    AnswersAgain,
    Cancel,
    Suspect(usize),
    Crash(usize),
    GatewayDies,
}

pub(super) struct Moves {
    pub(super) budget: Budget,
    pub(super) control: Option<Control>,
    /// Also keeps messages that can have no effect any more.
    pub(super) keeps_all: bool,
    /// States without what is under way, for [`super::stuck`].
    pub(super) known: Mutex<HashSet<State>>,
}

impl Moves {
    pub(super) fn new(budget: Budget, control: Option<Control>) -> Self {
        Self { budget, control, keeps_all: false, known: Mutex::default() }
    }

    pub(super) fn is(&self, control: Control) -> bool {
        self.control == Some(control)
    }

    /// Nothing failed so far, and nobody was thought to have.
    fn is_faultless(&self, state: &State) -> bool {
        let (budget, left) = (&self.budget, &state.left);
        (left.crashes, left.suspicions, left.deaths) == (budget.crashes, budget.suspicions, budget.deaths)
    }

    /// Steps without a fault that need no message; `closing` leaves out what only makes runs longer.
    pub(super) fn own_steps(&self, state: &State, closing: bool, steps: &mut Vec<Step>) {
        for (place, seat) in state.seats.iter().enumerate() {
            let Some(holding) = seat.holding() else { continue };
            if seat.is_computing() {
                steps.push(Step::Compute(place));
            }
            match holding.phase {
                Phase::Copying => steps.extend([Step::Freeze(place), Step::Abort(place)]),
                Phase::Frozen => steps.push(Step::Abort(place)),
                Phase::Asking => steps.push(Step::Reclaim(place)),
                Phase::Preparing | Phase::Prepared => steps.push(Step::Withdraw(place)),
                Phase::Running | Phase::Reclaiming | Phase::Withdrawing => {}
            }
            let no_lease = state.dead || state.suspected[place];
            if !self.is(Control::NoLease) && !self.is(Control::NoStopNoLease) && (no_lease || (state.left.suspicions > 0 && !closing)) {
                steps.push(Step::Lapse(place));
                if seat.is_computing() {
                    steps.push(Step::Pause(place));
                }
            }
        }
        if state.dead {
            return;
        }
        for (place, seat) in state.seats.iter().enumerate() {
            let held = |known: Place| known.replica == ReplicaId(place as u32) && known.incarnation != seat.incarnation();
            if state.register.places.iter().chain(state.register.stops.keys()).any(|known| held(*known)) {
                steps.push(Step::Notice(place));
            }
        }
        let Some((owner, _)) = state.register.owner() else { return };
        if state.register.attempt().is_some() {
            steps.push(Step::CloseAttempt);
        }
        let at_owner = &state.seats[owner.replica.index()];
        if at_owner.incarnation() != owner.incarnation {
            steps.extend((0..REPLICAS).filter(|target| !state.suspected[*target]).map(Step::Replace));
        }
        let asked = if state.register.has_started() { at_owner.holding().is_none_or(|holding| holding.paused) } else { !closing };
        if asked {
            steps.push(Step::Keep);
        }
    }

    pub(super) fn take(&self, state: &State, step: &Step) -> Option<State> {
        let mut next = state.clone();
        let (mut of_seat, mut of_gateway) = (Vec::new(), Vec::new());
        // The replica whose seat says something.
        let mut at = 0;
        match step {
            Step::Deliver(Sent::Down { to, message }) => {
                at = to.replica.index();
                if next.seats[at].incarnation() != to.incarnation && !self.is(Control::NoIncarnation) {
                    return None;
                }
                self.deliver_to_seat(&mut next.seats[at], message.clone(), &mut of_seat);
            }
            Step::Deliver(Sent::Across { from, to, message }) => {
                at = to.replica.index();
                if next.seats[at].incarnation() != to.incarnation {
                    return None;
                }
                let mut message = message.clone();
                if let (ToPeer::Prepared { attempt, entries }, Some(holding)) = (&mut message, next.seats[at].holding()) {
                    if self.is(Control::PreparedWithoutAttempt) {
                        (*attempt, *entries) = (holding.attempt, holding.entries.len() as u32);
                    }
                    if self.is(Control::FreezesTwice) {
                        *entries = holding.entries.len() as u32;
                    }
                }
                next.seats[at].handle_peer(*from, message, &mut of_seat);
            }
            Step::Deliver(Sent::Up { from, message, prefix }) => {
                if state.dead {
                    return None;
                }
                let delivered = next.register.delivered().to_vec();
                if self.is(Control::NoBump)
                    && let ToGateway::CommitSource { epoch, attempt, .. } = *message
                    && next.register.owner() == Some((*from, epoch))
                {
                    let resume = ToSeat::Resume { epoch, attempt, resumed: epoch, next: delivered.len() as u32 };
                    of_gateway.push(RegisterOutput::ToSeat { to: *from, message: resume });
                } else {
                    next.register.handle(*from, message.clone(), &mut of_gateway);
                }
                let facts = |state: &State| (state.register.owner(), state.register.has_started(), state.register.attempt());
                if self.is(Control::StopOnce) && facts(&next) == facts(state) {
                    of_gateway.retain(|output| !matches!(output, RegisterOutput::ToSeat { message: ToSeat::Stop { .. }, .. }));
                }
                let entries = of_gateway.iter().filter(|output| matches!(output, RegisterOutput::Deliver(_))).count();
                if entries > 0 && *prefix != delivered {
                    next.broken.insert(Law::Lineage);
                }
                if of_gateway.contains(&RegisterOutput::Lost(LostClass::Lost)) {
                    // Nothing is placed with who is suspected: then it begins anew where it was lost.
                    let (here, other) = (from.replica.index(), 1 - from.replica.index());
                    let trusted = place_of(&next, if next.suspected[other] { here } else { other });
                    next.register.force(trusted, &mut of_gateway);
                }
            }
            Step::Compute(place) => {
                at = *place;
                let holding = next.seats[at].holding().expect("it computes");
                let value = Value { epoch: holding.tag, finish: holding.entries.len() + 1 == ENTRIES };
                next.seats[at].output(value, &mut of_seat);
            }
            Step::Freeze(place) => {
                at = *place;
                next.seats[at].frozen(&mut of_seat);
            }
            Step::Abort(place) => {
                at = *place;
                next.seats[at].abort(&mut of_seat);
            }
            Step::Reclaim(place) => {
                at = *place;
                next.seats[at].reclaim(&mut of_seat);
                if self.is(Control::ReinsertUnasked) {
                    of_seat.clear();
                    let holding = next.seats[at].holding().expect("it asked");
                    let (epoch, attempt) = (holding.tag, holding.attempt);
                    next.seats[at].handle(ToSeat::Resume { epoch, attempt, resumed: epoch, next: 0 }, &mut of_seat);
                }
            }
            Step::Withdraw(place) => {
                at = *place;
                if self.is(Control::NoWithdraw) {
                    next.seats[at].holding = None;
                } else {
                    next.seats[at].withdraw(&mut of_seat);
                }
            }
            Step::Pause(place) | Step::Lapse(place) => {
                at = *place;
                if !(state.dead || state.suspected[at]) {
                    next.left.suspicions -= 1;
                }
                if matches!(step, Step::Pause(_)) {
                    next.seats[at].pause(&mut of_seat);
                } else {
                    next.seats[at].lapse(&mut of_seat);
                }
            }
            Step::Open => {
                let (owner, _) = next.register.owner()?;
                let target = place_of(&next, 1 - owner.replica.index());
                next.register.open(target, &mut of_gateway)?;
                next.left.attempts -= 1;
            }
            Step::CloseAttempt => next.register.give_up(&mut of_gateway),
            Step::Replace(target) => {
                let (owner, _) = next.register.owner()?;
                next.register.gone(owner, &mut of_gateway);
                let target = place_of(&next, *target);
                self.force(&mut next, target, &mut of_gateway);
            }
            Step::Notice(place) => {
                let now = next.seats[*place].incarnation();
                let known: BTreeSet<Place> = next.register.places.iter().chain(next.register.stops.keys()).copied().collect();
                let (owner, _) = next.register.owner().unzip();
                for gone in
                    known.into_iter().filter(|known| known.replica.index() == *place && known.incarnation != now && Some(*known) != owner)
                {
                    next.register.gone(gone, &mut of_gateway);
                }
            }
            Step::Keep => of_gateway.extend(next.register.keep()),
            Step::AnswersAgain => next.suspected = [false; REPLICAS],
            Step::Cancel => {
                next.left.cancels -= 1;
                next.register.end(&mut of_gateway);
            }
            Step::Suspect(place) => {
                next.left.suspicions -= 1;
                next.suspected[*place] = true;
                let (owner, _) = next.register.owner()?;
                if owner.replica.index() == *place {
                    let target = place_of(&next, 1 - place);
                    next.suspected[1 - place] = false;
                    self.force(&mut next, target, &mut of_gateway);
                } else {
                    next.register.give_up(&mut of_gateway);
                }
            }
            Step::Crash(place) => {
                next.left.crashes -= 1;
                next.seats[*place] = Seat::new(Incarnation(next.seats[*place].incarnation().0 + 1));
            }
            Step::GatewayDies => {
                next.left.deaths -= 1;
                next.dead = true;
            }
        }
        self.send(&mut next, at, of_seat, of_gateway);
        if self.is(Control::NoTombstone) {
            for seat in next.seats.iter_mut().filter(|seat| seat.holding.is_none()) {
                seat.seen = Tag::default();
            }
        }
        if self.is(Control::FreezesTwice) {
            for holding in next.seats.iter_mut().filter_map(|seat| seat.holding.as_mut()).filter(|holding| holding.phase == Phase::Running)
            {
                holding.attempt = Tag::default();
            }
        }
        self.look_at_runners(&mut next);
        if !self.keeps_all {
            self.forget_spent(&mut next);
        }
        Some(next)
    }

    fn force(&self, state: &mut State, target: Place, out: &mut Vec<RegisterOutput<Value>>) {
        let closed = state.register.closed_and_current();
        state.register.force(target, out);
        if self.is(Control::RangesLeftOpen) {
            state.register.leave_open(closed, ENTRIES as u32);
        }
    }

    fn deliver_to_seat(&self, seat: &mut Seat<Value>, message: ToSeat<Value>, out: &mut Vec<SeatOutput<Value>>) {
        let brings_all = matches!(message, ToSeat::Start { epoch, .. } if epoch != Tag(1)) && seat.holding().is_none();
        if self.is(Control::StartWithoutEntries) && brings_all {
            return;
        }
        seat.handle(message, out);
        if self.is(Control::NeverLost) {
            out.retain(|output| !matches!(output, SeatOutput::ToGateway(ToGateway::Lost { .. })));
        }
    }

    fn send(&self, state: &mut State, at: usize, of_seat: Vec<SeatOutput<Value>>, of_gateway: Vec<RegisterOutput<Value>>) {
        let from = place_of(state, at);
        for output in of_seat {
            match output {
                SeatOutput::ToGateway(message) => {
                    let prefix = match (&message, state.seats[at].holding()) {
                        (ToGateway::Output { index, .. }, Some(holding)) => holding.entries[..*index as usize].to_vec(),
                        _ => Vec::new(),
                    };
                    state.sent.insert(Sent::Up { from, message, prefix });
                }
                SeatOutput::ToPeer { to, message } => {
                    state.sent.insert(Sent::Across { from, to, message });
                }
                SeatOutput::Work(Work::Run { kv: Kv::None }) => {
                    let epoch = state.seats[at].holding().expect("it runs").tag;
                    if epoch != Tag(1) && self.is_faultless(state) {
                        state.broken.insert(Law::MovedKv);
                    }
                }
                SeatOutput::Work(_) => {}
            }
        }
        for output in of_gateway {
            if let RegisterOutput::ToSeat { to, message } = output {
                let stop = matches!(message, ToSeat::Stop { .. });
                if !(stop && self.is(Control::NoStopNoLease)) {
                    state.sent.insert(Sent::Down { to, message });
                }
            }
        }
    }

    fn look_at_runners(&self, state: &mut State) {
        let computing: Vec<Tag> =
            state.seats.iter().filter(|seat| seat.is_computing()).map(|seat| seat.holding().expect("it computes").tag).collect();
        let current = state.register.owner().map(|(_, epoch)| epoch).filter(|_| !state.dead);
        if computing.len() == REPLICAS && (self.is_faultless(state) || computing.iter().all(|tag| Some(*tag) == current)) {
            state.broken.insert(Law::Runners);
        }
    }

    /// Forgets messages that can have no effect any more.
    fn forget_spent(&self, state: &mut State) {
        let sent = std::mem::take(&mut state.sent);
        state.sent = sent.into_iter().filter(|sent| self.may_matter(state, sent)).collect();
    }

    fn may_matter(&self, state: &State, sent: &Sent) -> bool {
        let owner = state.register.owner().filter(|_| !state.dead);
        match sent {
            Sent::Down { to, message } => {
                let seat = &state.seats[to.replica.index()];
                if seat.incarnation() != to.incarnation && !self.is(Control::NoIncarnation) {
                    return false;
                }
                let holding = seat.holding();
                let (tag, attempt) = holding.map_or((Tag::default(), Tag::default()), |holding| (holding.tag, holding.attempt));
                match message {
                    ToSeat::Stop { upto } => {
                        seat.seen() < *upto
                            || holding.is_some() && tag <= *upto
                            || state.register.stops.get(to).is_some_and(|level| level <= upto)
                    }
                    ToSeat::Move { epoch, attempt: wanted, .. } => {
                        owner == Some((*to, *epoch))
                            || holding.is_some() && tag == *epoch && attempt < *wanted
                            || self.is(Control::FreezesTwice)
                    }
                    ToSeat::No { epoch, attempt: wanted } => {
                        let asked = owner == Some((*to, *epoch)) && state.register.given_up().is_some_and(|given_up| given_up <= *wanted);
                        let left =
                            holding.is_some_and(|holding| attempt < *wanted || attempt == *wanted && holding.phase != Phase::Running);
                        holding.is_some() && tag == *epoch && (asked || left)
                    }
                    ToSeat::Resume { epoch, attempt: wanted, .. } => holding.is_some() && tag == *epoch && attempt <= *wanted,
                    ToSeat::Start { epoch, .. } => {
                        self.is(Control::NoTombstone)
                            || owner == Some((*to, *epoch))
                            || holding.is_some_and(|holding| holding.phase.is_arriving() && holding.tag == *epoch)
                            || !(*epoch <= seat.seen() || holding.is_some() && tag >= *epoch)
                    }
                    ToSeat::Keep { epoch, .. } => owner == Some((*to, *epoch)),
                    ToSeat::Ack { .. } => false,
                }
            }
            Sent::Up { from, message, .. } => {
                if state.dead {
                    return false;
                }
                if let ToGateway::Stopped { upto } = message {
                    return state.register.stops.get(from).is_some_and(|level| level <= upto);
                }
                // After the end all of it is answered by a stop, which is repeated anyway.
                let Some((owner, current)) = owner else { return false };
                let seat = &state.seats[from.replica.index()];
                let held = seat.holding().filter(|_| seat.incarnation() == from.incarnation).map(|holding| holding.tag);
                match message {
                    ToGateway::Output { epoch, index, .. } => {
                        let wanted = *index as usize >= state.register.delivered().len();
                        *epoch == current && (wanted || !state.register.has_started()) || wanted && state.register.supplies(*epoch, *index)
                    }
                    ToGateway::CommitTarget { epoch, attempt, .. } => {
                        held == Some(*epoch) || (owner, current) == (*from, *epoch) || current == *attempt && !state.register.has_started()
                    }
                    ToGateway::CommitSource { epoch, .. } => held == Some(*epoch) || (owner, current) == (*from, *epoch),
                    ToGateway::Aborted { epoch, attempt } => {
                        (owner, current) == (*from, *epoch)
                            && (state.register.attempt().is_some_and(|(tag, _)| tag == *attempt)
                                || state.register.given_up().is_some_and(|given_up| given_up <= *attempt))
                    }
                    ToGateway::Withdraw { attempt } => {
                        state.register.attempt().is_some_and(|(tag, _)| tag == *attempt) || current == *attempt || held == Some(*attempt)
                    }
                    ToGateway::Lost { epoch, .. } => *epoch > current || (owner, current) == (*from, *epoch),
                    ToGateway::Stopped { .. } => false,
                }
            }
            Sent::Across { to, message, .. } => {
                let seat = &state.seats[to.replica.index()];
                if seat.incarnation() != to.incarnation {
                    return false;
                }
                let Some(holding) = seat.holding() else {
                    return matches!(message, ToPeer::Prepare { attempt } | ToPeer::State { attempt, .. } if *attempt > seat.seen());
                };
                let arriving = holding.phase.is_arriving();
                match message {
                    ToPeer::Prepare { attempt } => *attempt > seat.seen() && holding.tag < *attempt,
                    ToPeer::State { attempt, .. } => {
                        *attempt > seat.seen()
                            && (holding.tag < *attempt || arriving && holding.tag == *attempt && holding.phase == Phase::Preparing)
                    }
                    ToPeer::Prepared { .. } if self.is(Control::PreparedWithoutAttempt) => true,
                    ToPeer::Prepared { attempt, .. } | ToPeer::Abort { attempt } => {
                        holding.attempt < *attempt
                            || holding.attempt == *attempt && holding.phase != Phase::Running
                            || self.is(Control::FreezesTwice)
                    }
                }
            }
        }
    }
}

pub(super) fn place_of(state: &State, replica: usize) -> Place {
    Place { replica: ReplicaId(replica as u32), incarnation: state.seats[replica].incarnation() }
}

impl Model for Moves {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let mut out = Vec::new();
        let owner = Place { replica: ReplicaId(0), incarnation: Incarnation(0) };
        let register = Register::new(owner, &mut out);
        let mut state = State {
            seats: std::array::from_fn(|_| Seat::new(Incarnation(0))),
            register,
            dead: false,
            suspected: [false; REPLICAS],
            left: self.budget,
            sent: BTreeSet::new(),
            broken: BTreeSet::new(),
        };
        self.send(&mut state, 0, Vec::new(), out);
        vec![state]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        self.own_steps(state, false, steps);
        steps.extend(state.sent.iter().cloned().map(Step::Deliver));
        let live = !state.dead && !state.register.has_ended();
        if live {
            let unsuspected = |owner: Place| !state.suspected[1 - owner.replica.index()];
            let can_open = state.register.attempt().is_none() && state.register.has_started();
            if state.left.attempts > 0 && can_open && state.register.owner().is_some_and(|(owner, _)| unsuspected(owner)) {
                steps.push(Step::Open);
            }
            if state.suspected.contains(&true) {
                steps.push(Step::AnswersAgain);
            }
            if state.left.cancels > 0 {
                steps.push(Step::Cancel);
            }
            if state.left.suspicions > 0 {
                steps.extend((0..REPLICAS).map(Step::Suspect));
            }
            if state.left.deaths > 0 {
                steps.push(Step::GatewayDies);
            }
        }
        if state.left.crashes > 0 {
            steps.extend((0..REPLICAS).filter(|place| state.seats[*place].holding().is_some()).map(Step::Crash));
        }
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        self.take(state, &step).filter(|next| next != state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(Law::Lineage.name(), |moves: &Moves, state: &State| {
                // Every unique state passes here once.
                let mut known = moves.known.lock().expect("no holder panics");
                known.insert(State { sent: BTreeSet::new(), ..state.clone() });
                !state.broken.contains(&Law::Lineage)
            }),
            Property::always(Law::Runners.name(), |_, state: &State| !state.broken.contains(&Law::Runners)),
            Property::always(Law::MovedKv.name(), |_, state: &State| !state.broken.contains(&Law::MovedKv)),
        ]
    }
}
