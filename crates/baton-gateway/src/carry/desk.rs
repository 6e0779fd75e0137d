//! Who runs which sequence, and what is on its way between replicas.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use baton_cost::MoveWay;
use baton_migration::{
    Beat, GatewayName, LostClass, Owners, OwnersInput, OwnersOutput, Ownership, Place, RequestName, Suspicion, Timing, ToGateway, ToSeat,
};
use baton_policy::mover::Move;
use baton_units::{DurationMs, ReplicaId, RequestId, Time, Tokens};
use baton_wire::migration::{ControlFrame, MoveTo, OutputEntry, handshake::KvLayout};
use tokio::sync::{mpsc, oneshot};

use super::{MoveOutcome, MoveRecord, RunEvent, copies::Copying, moves::MoveLog};

/// Moves kept for `/baton/v1/moves`.
const MOVES_KEPT: usize = 1024;

/// A connected life of a replica.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) replica: ReplicaId,
    pub(crate) numerics_id: String,
    pub(crate) kv_layout: Option<KvLayout>,
    pub(crate) kv_address: Option<String>,
    /// As its report says.
    pub(crate) copies_prefixes: bool,
    pub(crate) frames: mpsc::Sender<ControlFrame>,
}

/// A sequence to run.
#[derive(Debug)]
pub(crate) struct NewSequence {
    pub(crate) request: RequestId,
    pub(crate) choice: u32,
    /// As it travels.
    pub(crate) run: Arc<[u8]>,
    pub(crate) prompt: Tokens,
    pub(crate) events: mpsc::UnboundedSender<(u32, RunEvent)>,
}

/// Why a sequence is with nobody.
#[derive(Debug, Clone)]
pub(crate) struct Loss {
    pub(crate) replica: Option<ReplicaId>,
    pub(crate) why: String,
    /// What its replica said of running it elsewhere.
    pub(crate) class: LostClass,
}

/// Why a request cannot be moved now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotMovable {
    #[error("it runs over plain HTTP: its engine, its prompt or what it asks for allows no move")]
    NotCarried,
    #[error("it is there already")]
    AlreadyThere,
    #[error("it moves already; try again when it has arrived")]
    Moving,
    #[error("its replica has not begun it yet; try again after its first token")]
    NotStarted,
    #[error("{0} cannot be reached over a control connection; `baton fleet` shows which replicas can take requests")]
    NoConnection(ReplicaId),
    #[error("the target computes other bits ({theirs}) than the source ({ours}): the answer would not go on exactly")]
    OtherNumerics { ours: String, theirs: String },
}

/// What the rest of the gateway must hear of, once the desk is free again.
#[derive(Debug)]
pub(crate) enum Effect {
    Suspected {
        replica: ReplicaId,
        suspicion: Suspicion,
    },
    Trusted {
        replica: ReplicaId,
    },
    /// All of a request's sequences are at `to` from here on.
    Arrived {
        request: RequestId,
        to: ReplicaId,
    },
    Ended(MoveRecord),
    /// The request rests, wherever it is.
    Settled {
        request: RequestId,
    },
}

#[derive(Debug)]
struct Sequence {
    request: RequestId,
    choice: u32,
    run: Arc<[u8]>,
    prompt: Tokens,
    events: mpsc::UnboundedSender<(u32, RunEvent)>,
    last_entry_at: Option<Time>,
    moving: Option<Moving>,
    /// Who had it when nobody ran it any more, until somebody does.
    lost_by: Option<Place>,
    /// The client has all it wants; replicas may still have to let go.
    ended: bool,
}

/// A move that is under way, until the first entry after it.
#[derive(Debug)]
struct Moving {
    record: MoveRecord,
    nonce: [u8; 16],
    since: Time,
    /// Of the last entry that the source gave.
    last_before: Option<Time>,
    committed: bool,
}

/// A request whose sequences move one after another.
#[derive(Debug)]
struct Journey {
    decided: Move,
    told: Option<oneshot::Sender<Vec<MoveRecord>>>,
    left: Vec<u64>,
    done: Vec<MoveRecord>,
}

/// All that runs over control connections.
#[derive(Debug)]
pub(crate) struct Desk {
    pub(super) name: GatewayName,
    owners: Owners<OutputEntry>,
    links: BTreeMap<Place, Link>,
    /// The connected life of each replica.
    places: BTreeMap<ReplicaId, Place>,
    sequences: HashMap<u64, Sequence>,
    requests: HashMap<RequestId, Vec<u64>>,
    journeys: HashMap<RequestId, Journey>,
    pub(super) copies: BTreeMap<u64, Copying>,
    /// Number of the next sequence or copy.
    pub(super) next: u64,
    pub(super) log: MoveLog,
    pub(super) effects: Vec<Effect>,
    /// Said with the message that is being taken in.
    why: Option<String>,
}

impl Desk {
    pub(crate) fn new(name: GatewayName) -> Self {
        Self {
            name,
            owners: Owners::new(Timing::default()),
            links: BTreeMap::new(),
            places: BTreeMap::new(),
            sequences: HashMap::new(),
            requests: HashMap::new(),
            journeys: HashMap::new(),
            copies: BTreeMap::new(),
            next: 1,
            log: MoveLog::new(MOVES_KEPT),
            effects: Vec::new(),
            why: None,
        }
    }

    /// What happened since it was asked last.
    pub(crate) fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    pub(crate) fn poll_timeout(&self) -> Time {
        self.owners.poll_timeout()
    }

    pub(crate) fn timeout(&mut self, now: Time) {
        self.tell(OwnersInput::Timeout, now);
    }

    // Replicas.

    pub(crate) fn connected(&mut self, place: Place, link: Link, now: Time) {
        if let Some(former) = self.places.insert(link.replica, place).filter(|former| *former != place) {
            self.links.remove(&former);
            self.lose(former, now);
        }
        self.links.insert(place, link);
        self.tell(OwnersInput::Connected { place }, now);
    }

    pub(crate) fn disconnected(&mut self, place: Place, now: Time) {
        self.tell(OwnersInput::Disconnected { place }, now);
    }

    /// The replica's process has ended.
    pub(crate) fn gone(&mut self, replica: ReplicaId, now: Time) {
        if let Some(place) = self.places.remove(&replica) {
            self.lose(place, now);
            self.links.remove(&place);
        }
    }

    /// Whether its heartbeat says that the replica hangs, whatever its HTTP server says. A connection that is only broken says nothing of it.
    pub(crate) fn hangs(&self, replica: ReplicaId) -> bool {
        let suspicion = self.places.get(&replica).and_then(|place| self.owners.suspicion(*place));
        matches!(suspicion, Some(Suspicion::Silent(_) | Suspicion::Stands(..)))
    }

    /// Names what decides the bits of the replica's answers, where it is reached.
    pub(crate) fn numerics_of(&self, replica: ReplicaId) -> Option<&str> {
        self.link(replica).map(|(_, link)| link.numerics_id.as_str())
    }

    /// Layout of the replica's KV, where it hands it out.
    pub(crate) fn kv_layout_of(&self, replica: ReplicaId) -> Option<&KvLayout> {
        self.link(replica).and_then(|(_, link)| link.kv_layout.as_ref())
    }

    pub(super) fn link(&self, replica: ReplicaId) -> Option<(Place, &Link)> {
        let place = *self.places.get(&replica)?;
        let link = self.links.get(&place)?;
        (!link.frames.is_closed() && !self.owners.is_suspected(place)).then_some((place, link))
    }

    pub(crate) fn heard(&mut self, from: Place, frame: ControlFrame, now: Time) {
        match frame {
            ControlFrame::Heartbeat(beat) => {
                let step_predicted = std::time::Duration::from_micros(beat.step_predicted_us);
                let requests = beat.waiting + beat.running;
                let beat = Beat { sequence: beat.sequence, steps: beat.steps, step_predicted, requests };
                self.tell(OwnersInput::Beat { place: from, beat }, now);
            }
            ControlFrame::Holds { request, phase, tag, .. } if request.gateway == self.name => {
                self.tell(OwnersInput::Holds { sequence: request.sequence, from, phase, tag }, now);
            }
            ControlFrame::AllHeld => self.tell(OwnersInput::AllHeld { place: from }, now),
            ControlFrame::ToGateway { request, message: ToGateway::Aborted { .. }, why }
                if request.gateway == self.name && self.is_copy(request.sequence) =>
            {
                self.copy_failed(request.sequence, &why, now);
            }
            ControlFrame::PrefixCopied { request, copied, .. } if request.gateway == self.name => {
                self.copy_done(request.sequence, from, copied, now);
            }
            ControlFrame::ToGateway { request, message, why } if request.gateway == self.name => {
                self.why = Some(why).filter(|why| !why.is_empty());
                self.tell(OwnersInput::FromSeat { sequence: request.sequence, from, message }, now);
                self.why = None;
            }
            ControlFrame::Scheduled { request, cached, .. } if request.gateway == self.name => {
                if let Some(sequence) = self.sequences.get(&request.sequence) {
                    sequence.say(RunEvent::Cached(cached));
                }
            }
            ControlFrame::Moved { request, copied, .. } if request.gateway == self.name => {
                if let Some(moving) = self.sequences.get_mut(&request.sequence).and_then(|sequence| sequence.moving.as_mut()) {
                    let record = &mut moving.record;
                    (record.bytes_sent, record.blocks_already_held, record.rounds) = (copied.bytes, copied.held, copied.rounds);
                    record.compute_gap_ms = Some(copied.gap_us as f64 / 1e3);
                }
            }
            // Of an older life of this gateway, which the replica frees by itself; or for a replica, and no replica says it.
            ControlFrame::Holds { .. }
            | ControlFrame::ToGateway { .. }
            | ControlFrame::Scheduled { .. }
            | ControlFrame::Moved { .. }
            | ControlFrame::Lease { .. }
            | ControlFrame::Expect { .. }
            | ControlFrame::ToSeat { .. }
            | ControlFrame::CopyPrefix { .. }
            | ControlFrame::PrefixCopied { .. } => tracing::debug!(?from, "a frame that is not for this gateway"),
        }
    }

    // Requests.

    /// Starts a sequence at the replica and gives its number; gives it back where the replica is not reached.
    pub(crate) fn start(&mut self, replica: ReplicaId, new: NewSequence, now: Time) -> Result<u64, NewSequence> {
        let Some((owner, _)) = self.link(replica) else { return Err(new) };
        let number = self.next;
        self.next += 1;
        let NewSequence { request, choice, run, prompt, events } = new;
        self.requests.entry(request).or_default().push(number);
        let sequence = Sequence { request, choice, run, prompt, events, last_entry_at: None, moving: None, lost_by: None, ended: false };
        self.sequences.insert(number, sequence);
        self.tell(OwnersInput::Start { sequence: number, owner }, now);
        Ok(number)
    }

    /// Runs a lost sequence on at the replica; false where it is not reached.
    pub(crate) fn force(&mut self, number: u64, replica: ReplicaId, now: Time) -> bool {
        let Some((owner, _)) = self.link(replica) else { return false };
        let Some(sequence) = self.sequences.get_mut(&number) else { return false };
        sequence.lost_by = None;
        if let Some(moving) = &mut sequence.moving {
            moving.record.to = replica;
        }
        self.tell(OwnersInput::Force { sequence: number, owner }, now);
        true
    }

    pub(crate) fn taken(&mut self, number: u64, next: u32, now: Time) {
        self.tell(OwnersInput::Taken { sequence: number, next }, now);
    }

    /// The client has gone, or has all that it wants of the sequence.
    pub(crate) fn end(&mut self, number: u64, now: Time) {
        let Some(sequence) = self.sequences.get_mut(&number).filter(|sequence| !sequence.ended) else { return };
        sequence.ended = true;
        self.leave(number, now);
        self.tell(OwnersInput::End { sequence: number }, now);
    }

    /// There is nothing left of a sequence that could move: it no longer counts as its request's, which may have others that run on.
    fn leave(&mut self, number: u64, now: Time) {
        let Some(sequence) = self.sequences.get_mut(&number) else { return };
        let (request, moving) = (sequence.request, sequence.moving.take());
        if let Some(numbers) = self.requests.get_mut(&request) {
            numbers.retain(|other| *other != number);
            if numbers.is_empty() {
                self.requests.remove(&request);
            }
        }
        if let Some(moving) = moving {
            self.close(request, moving, MoveOutcome::Ended, None, now);
        } else if let Some(journey) = self.journeys.get_mut(&request) {
            journey.left.retain(|other| *other != number);
        }
        self.go_on_with(request, now);
    }

    /// Whether the request is carried, runs, and is at rest.
    pub(crate) fn is_movable(&self, request: RequestId) -> bool {
        let can_move = |number: &u64| self.owners.ownership(*number).is_some_and(Ownership::can_move);
        self.at_rest(request).is_some_and(|numbers| numbers.iter().all(can_move))
    }

    /// Whether the request is carried and at rest, so that another replica can begin it from its tokens.
    pub(crate) fn can_begin_anew(&self, request: RequestId) -> bool {
        self.at_rest(request).is_some()
    }

    fn at_rest(&self, request: RequestId) -> Option<&[u64]> {
        let numbers = self.requests.get(&request).filter(|_| !self.journeys.contains_key(&request))?;
        let rests =
            |number: &u64| self.sequences.get(number).is_some_and(|sequence| sequence.moving.is_none() && sequence.lost_by.is_none());
        numbers.iter().all(rests).then_some(numbers)
    }

    fn tokens_of(&self, number: u64) -> Option<Tokens> {
        let delivered = self.owners.ownership(number)?.register().delivered().len() as u32;
        self.sequences.get(&number).map(|sequence| sequence.prompt + Tokens(delivered))
    }

    // Moves.

    /// Whether the request could leave for that replica.
    pub(crate) fn check_departure(&self, request: RequestId, to: ReplicaId) -> Result<(), NotMovable> {
        let numbers = self.requests.get(&request).ok_or(NotMovable::NotCarried)?;
        if self.at_rest(request).is_none() {
            return Err(NotMovable::Moving);
        }
        if !self.is_movable(request) {
            return Err(NotMovable::NotStarted);
        }
        let (to, link) = self.link(to).ok_or(NotMovable::NoConnection(to))?;
        let ours = numbers.iter().filter_map(|number| self.owner(*number)).find(|owner| *owner != to).ok_or(NotMovable::AlreadyThere)?;
        let ours = self.links.get(&ours).map_or("", |link| link.numerics_id.as_str());
        if ours == link.numerics_id {
            Ok(())
        } else {
            Err(NotMovable::OtherNumerics { ours: ours.to_owned(), theirs: link.numerics_id.clone() })
        }
    }

    /// Begins what was decided. `told` hears how each sequence of it ended.
    pub(crate) fn depart(&mut self, decided: Move, told: Option<oneshot::Sender<Vec<MoveRecord>>>, now: Time) -> Result<(), NotMovable> {
        let request = decided.request;
        if decided.way == MoveWay::Kv {
            self.check_departure(request, decided.to)?;
        } else if self.at_rest(request).is_none() {
            return Err(NotMovable::Moving);
        }
        let (to, _) = self.link(decided.to).ok_or(NotMovable::NoConnection(decided.to))?;
        let numbers = self.requests.get(&request).ok_or(NotMovable::NotCarried)?;
        let left = numbers.iter().rev().copied().filter(|number| self.owner(*number) != Some(to)).collect();
        self.journeys.insert(request, Journey { decided, told, left, done: Vec::new() });
        self.go_on_with(request, now);
        Ok(())
    }

    fn owner(&self, number: u64) -> Option<Place> {
        self.owners.ownership(number).and_then(|ownership| ownership.register().owner()).map(|(owner, _)| owner)
    }

    /// Moves the next sequence of a journey; at its end tells.
    fn go_on_with(&mut self, request: RequestId, now: Time) {
        loop {
            let Some(journey) = self.journeys.get_mut(&request) else { return };
            let is_under_way = self.requests.get(&request).into_iter().flatten().any(|number| self.sequences[number].moving.is_some());
            if is_under_way {
                return;
            }
            let failed = journey.done.last().is_some_and(|record| !record.outcome.is_there());
            let Some(number) = journey.left.pop().filter(|_| !failed) else {
                let journey = self.journeys.remove(&request).expect("it was found");
                if journey.done.iter().any(|record| record.outcome.is_there()) && !failed {
                    self.effects.push(Effect::Arrived { request, to: journey.decided.to });
                }
                self.effects.push(Effect::Settled { request });
                if let Some(told) = journey.told {
                    // Who asked may have gone.
                    _ = told.send(journey.done);
                }
                return;
            };
            let decided = journey.decided.clone();
            self.begin(number, &decided, now);
        }
    }

    fn begin(&mut self, number: u64, decided: &Move, now: Time) {
        let Some(&target) = self.places.get(&decided.to) else { return };
        let tokens = self.tokens_of(number).unwrap_or(decided.tokens);
        let Some(sequence) = self.sequences.get_mut(&number) else { return };
        let mut nonce = [0; 16];
        getrandom::fill(&mut nonce).expect("the system has random numbers");
        let record = MoveRecord {
            outcome: if decided.way == MoveWay::Kv { MoveOutcome::Stayed } else { MoveOutcome::Continued },
            expected_ms: decided.price.kv.as_ref().map(|way| way.total_s * 1e3),
            ..MoveRecord::begun(
                sequence.request,
                sequence.choice,
                (decided.from, decided.to),
                decided.reason.name(),
                decided.to_string(),
                tokens,
            )
        };
        let anew = decided.way != MoveWay::Kv;
        let last_before = sequence.last_entry_at.filter(|_| anew);
        sequence.moving = Some(Moving { record, nonce, since: now, last_before, committed: anew });
        if anew {
            // From its tokens, with what its client has; its source lets go when it has begun there.
            sequence.say(RunEvent::Anew(decided.to));
            return self.tell(OwnersInput::Force { sequence: number, owner: target }, now);
        }
        self.tell(OwnersInput::Move { sequence: number, target }, now);
        let opened = self.owners.ownership(number).is_some_and(|ownership| ownership.register().attempt().is_some());
        if !opened && let Some(moving) = self.sequences.get_mut(&number).and_then(|sequence| sequence.moving.take()) {
            self.close(decided.request, moving, MoveOutcome::Stayed, Some("it could not begin".into()), now);
        }
    }

    /// Keeps a move on record that came about without its doing.
    pub(crate) fn note(&mut self, record: MoveRecord) {
        self.log.push(record.clone());
        self.effects.push(Effect::Ended(record));
    }

    /// The latest moves, newest first.
    pub(crate) fn moves(&self, limit: usize) -> Vec<MoveRecord> {
        self.log.latest(limit)
    }

    fn close(&mut self, request: RequestId, moving: Moving, outcome: MoveOutcome, why: Option<String>, now: Time) {
        let record = MoveRecord { outcome, why: why.or(moving.record.why), took_ms: now.since(moving.since).as_ms(), ..moving.record };
        self.log.push(record.clone());
        self.effects.push(Effect::Ended(record.clone()));
        if let Some(journey) = self.journeys.get_mut(&request) {
            journey.done.push(record);
        }
    }

    // What the owners say.

    pub(super) fn tell(&mut self, input: OwnersInput<OutputEntry>, now: Time) {
        self.owners.handle(input, now);
        while let Some(output) = self.owners.poll() {
            self.carry_out(output, now);
        }
    }

    fn carry_out(&mut self, output: OwnersOutput<OutputEntry>, now: Time) {
        match output {
            OwnersOutput::ToSeat { sequence, to, message } => self.send(sequence, to, message),
            OwnersOutput::Lease { to, sequence } => self.send_frame(to, ControlFrame::Lease { sequence }),
            OwnersOutput::Deliver { sequence, entry } => self.deliver(sequence, entry, now),
            OwnersOutput::Started { .. } => {}
            OwnersOutput::Committed { sequence: number, to, .. } => {
                let replica = self.links.get(&to).map(|link| link.replica);
                let Some(sequence) = self.sequences.get_mut(&number) else { return };
                if let Some(moving) = &mut sequence.moving {
                    moving.committed = true;
                    moving.last_before = sequence.last_entry_at;
                    moving.record.copied_ms = Some(now.since(moving.since).as_ms());
                }
                if let Some(replica) = replica {
                    sequence.say(RunEvent::Moved(replica));
                }
            }
            OwnersOutput::AttemptEnded { sequence: number, .. } => {
                let why = self.why.clone();
                let Some(sequence) = self.sequences.get_mut(&number) else { return };
                let request = sequence.request;
                if let Some(moving) = sequence.moving.take_if(|moving| !moving.committed) {
                    self.close(request, moving, MoveOutcome::Stayed, why, now);
                    self.go_on_with(request, now);
                }
            }
            OwnersOutput::Lost { sequence, owner, class } => self.lost(sequence, owner, class, now),
            OwnersOutput::Suspected { place, suspicion } => {
                if let Some(link) = self.links.get(&place) {
                    self.effects.push(Effect::Suspected { replica: link.replica, suspicion });
                }
            }
            OwnersOutput::Trusted { place } => {
                if let Some(link) = self.links.get(&place) {
                    self.effects.push(Effect::Trusted { replica: link.replica });
                }
            }
            OwnersOutput::Forgotten { sequence } => {
                self.leave(sequence, now);
                self.sequences.remove(&sequence);
            }
        }
    }

    fn deliver(&mut self, number: u64, entry: OutputEntry, now: Time) {
        let Some(sequence) = self.sequences.get_mut(&number) else { return };
        let request = sequence.request;
        sequence.lost_by = None;
        let arrived = sequence.moving.take_if(|moving| moving.committed);
        sequence.last_entry_at = Some(now);
        let finished = matches!(entry, OutputEntry::Finish(_));
        sequence.say(RunEvent::Entry(entry));
        if let Some(mut moving) = arrived {
            moving.record.gap_ms = moving.last_before.map(|before| now.since(before).as_ms());
            let outcome = moving.record.outcome;
            let outcome = if outcome == MoveOutcome::Continued { outcome } else { MoveOutcome::Moved };
            self.close(request, moving, outcome, None, now);
            self.go_on_with(request, now);
        }
        if finished {
            self.leave(number, now);
        }
    }

    fn lost(&mut self, number: u64, owner: Place, class: LostClass, now: Time) {
        let why = self.why.clone();
        let replica = self.links.get(&owner).map(|link| link.replica);
        let tokens = self.tokens_of(number).unwrap_or_default();
        let Some(sequence) = self.sequences.get_mut(&number).filter(|sequence| !sequence.ended && sequence.lost_by != Some(owner)) else {
            return;
        };
        sequence.lost_by = Some(owner);
        let request = sequence.request;
        let why = why.unwrap_or_else(|| "its replica is lost".to_owned());
        let from = replica.unwrap_or(ReplicaId(u32::MAX));
        let record = MoveRecord::begun(request, sequence.choice, (from, from), "forced", format!("forced: {why}"), tokens);
        let last_before = sequence.last_entry_at;
        let forced = Moving { record, nonce: [0; 16], since: now, last_before, committed: true };
        let former = sequence.moving.replace(forced);
        sequence.say(RunEvent::Lost(Loss { replica, why, class }));
        match former {
            // It was lost again before it went on: one loss in the end.
            Some(former) if former.record.outcome == MoveOutcome::Continued => {
                if let Some(moving) = self.sequences.get_mut(&number).and_then(|sequence| sequence.moving.as_mut()) {
                    (moving.since, moving.last_before, moving.record.from) = (former.since, former.last_before, former.record.from);
                }
            }
            Some(former) => self.close(request, former, MoveOutcome::Stayed, Some("its replica was lost".into()), now),
            None => {}
        }
    }

    fn send(&mut self, number: u64, to: Place, message: ToSeat<OutputEntry>) {
        let request = RequestName { gateway: self.name, sequence: number };
        let sequence = self.sequences.get(&number);
        let with = match (&message, sequence) {
            (ToSeat::Start { .. }, Some(sequence)) => sequence.run.to_vec(),
            (ToSeat::Move { attempt, target, .. }, Some(sequence)) => {
                let (Some(moving), Some(link)) = (&sequence.moving, self.links.get(target)) else { return };
                let Some(kv_address) = link.kv_address.clone() else { return };
                let expect = ControlFrame::Expect { request, attempt: *attempt, source: to, nonce: moving.nonce };
                let with = MoveTo { kv_address, nonce: moving.nonce }.to_bytes();
                let target = *target;
                self.send_frame(target, expect);
                with
            }
            (ToSeat::Start { .. } | ToSeat::Move { .. }, None) => return,
            _ => Vec::new(),
        };
        self.send_frame(to, ControlFrame::ToSeat { request, message, with });
    }

    pub(super) fn send_frame(&self, to: Place, frame: ControlFrame) {
        // What finds no connection, or one that takes no more, is repeated where it matters.
        if let Some(link) = self.links.get(&to)
            && let Err(error) = link.frames.try_send(frame)
        {
            tracing::debug!(replica = %link.replica, %error, "a frame found no way to its replica");
        }
    }
}

impl Sequence {
    fn say(&self, event: RunEvent) {
        if !self.ended {
            // The exchange may be ending.
            _ = self.events.send((self.choice, event));
        }
    }
}

#[cfg(test)]
mod tests;
