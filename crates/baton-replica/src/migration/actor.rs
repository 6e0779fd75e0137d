//! Owns what this replica holds of requests, and is the only one that changes it.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    convert::Infallible,
    sync::Arc,
    time::Duration,
};

use baton_engine::{MoveRefusal, Output, SequenceState, SubmitError};
use baton_link::Identity;
use baton_migration::{
    Entry, GatewayName, Holding, Kv, LostClass, Phase, Place, RequestName, Seats, SeatsInput, SeatsOutput, Tag, Timing, ToGateway, ToPeer,
    ToSeat, Work,
};
use baton_units::{RequestId, Time, Tokens};
use baton_wire::migration::{ControlFrame, Copied, Heartbeat, MoveTo, OutputEntry, PrefixCopied, Refusal, RunRequest};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::AbortHandle,
};

use super::{
    Models,
    control::ConnectionId,
    fault::{self, Point},
    kv_source::{Frozen, KvSource},
    kv_target::{Opening, TargetOrder},
    lease_clock::LeaseClock,
    travel,
};
use crate::driver::{EngineHandle, MoveCommand, MoveEvent, Rest, Room};

mod prefixes;

use prefixes::Prefixes;

/// Entries that a gateway need not have acknowledged before a request is paused; it goes on when half of them are.
const CREDIT: u32 = 256;
/// Announced attempts; beyond these a gateway's oldest request is not expected any more, and its source is refused.
const EXPECTED_MAX: usize = 4096;
/// Bytes of a reason that is told to a gateway, at most.
const WHY_MAX: usize = 256;

/// What a connection or a copy tells the actor.
pub(super) enum Input {
    /// A gateway is there, and takes frames here until its end is dropped.
    Attached {
        gateway: GatewayName,
        connection: ConnectionId,
        frames: mpsc::Sender<ControlFrame>,
    },
    Detached {
        gateway: GatewayName,
        connection: ConnectionId,
    },
    Frame {
        gateway: GatewayName,
        connection: ConnectionId,
        frame: Box<ControlFrame>,
    },
    Source {
        request: RequestName,
        attempt: Tag,
        news: FromSource,
    },
    /// A source wants to bring a request.
    Opened {
        opening: Opening,
        answer: oneshot::Sender<Result<(), Refusal>>,
    },
    Target {
        request: RequestName,
        attempt: Tag,
        news: FromTarget,
    },
    /// A holder wants to bring a prefix; what is answered ends when it is to stop.
    PrefixOpened {
        opening: Opening,
        answer: oneshot::Sender<Result<oneshot::Receiver<Infallible>, Refusal>>,
    },
    /// This side of the copy of a prefix has ended.
    Prefix {
        request: RequestName,
        attempt: Tag,
        news: PrefixEnd,
    },
}

/// With what the copy of a prefix came to, or why to nothing.
pub(super) struct PrefixEnd(pub(super) Result<PrefixCopied, String>);

/// Of the copy of a request that leaves.
pub(super) enum FromSource {
    /// Blocks went out. Told once a second at most.
    Advanced,
    /// Little is left from block `next` on, and the request should stand still for it; that is answered with what is left.
    Ready {
        next: u32,
        rest: oneshot::Sender<Option<Rest>>,
    },
    Prepared {
        entries: u32,
        sent: Sent,
    },
    Failed {
        why: String,
    },
}

/// What the copy took.
#[derive(Clone, Copy)]
pub(super) struct Sent {
    pub(super) bytes: u64,
    pub(super) held: u32,
    pub(super) rounds: u32,
}

/// Of a request that comes.
pub(super) enum FromTarget {
    /// Room was made. The answer is whether the seat takes it.
    Arrived { source: Place, room: Room, orders: mpsc::UnboundedSender<TargetOrder>, answer: oneshot::Sender<bool> },
    /// Blocks came. Told once a second at most.
    Advanced,
    /// All KV is here.
    State { entries: Vec<OutputEntry>, run: Box<RunRequest> },
    /// The connection is gone, or was let go of.
    Lost,
    /// Another one may come.
    Ended,
}

pub(super) struct Actor {
    seats: Seats<OutputEntry>,
    clock: LeaseClock,
    models: Models,
    identity: Arc<Identity>,
    engine: EngineHandle,
    /// For copies to tell it by.
    inputs: mpsc::Sender<Input>,
    /// By the gateway's id: one connection each.
    gateways: BTreeMap<u64, Gateway>,
    requests: BTreeMap<RequestName, Here>,
    runs: BTreeMap<RequestId, RequestName>,
    expected: BTreeMap<RequestName, Expected>,
    prefixes: Prefixes,
    /// The one request that is taken in now.
    arriving: Option<(RequestName, Tag)>,
    /// Whose engine's part may differ from what the seat wants.
    unsettled: BTreeSet<RequestName>,
    holdings: watch::Sender<usize>,
}

struct Gateway {
    name: GatewayName,
    connection: ConnectionId,
    frames: mpsc::Sender<ControlFrame>,
}

struct Expected {
    attempt: Tag,
    source: Place,
    nonce: [u8; 16],
}

/// What the replica has of a request beside its seat.
#[derive(Default)]
struct Here {
    /// What to run.
    spec: Option<RunRequest>,
    run: Option<Run>,
    /// KV that came for it.
    arrival: Option<Arrival>,
    /// Where it was last told to move.
    move_to: Option<(Tag, MoveTo)>,
    copy: Option<Copy>,
    /// Why the attempt that ends now does, or the request cannot be run.
    why: Option<String>,
}

/// The engine's part of a request.
struct Run {
    id: RequestId,
    /// When it was to start, of one whose prompt is computed here, until its gateway was told when it did. Model time.
    heard: Option<Time>,
    /// As the engine was told last.
    held: bool,
    /// Too much is not acknowledged.
    throttled: bool,
    /// Went to another replica, as far as is known.
    left: bool,
    /// Computed, and not taken by the seat: it came after the request was paused.
    computed: VecDeque<(u32, OutputEntry)>,
}

struct Arrival {
    attempt: Tag,
    source: Place,
    room: Room,
    orders: mpsc::UnboundedSender<TargetOrder>,
    /// When all is here, and since when. Model time.
    state: Option<(SequenceState, Time)>,
}

struct Copy {
    attempt: Tag,
    target: Place,
    task: AbortHandle,
    /// Told when the request stands still.
    frozen: Option<oneshot::Sender<Frozen>>,
    /// Since when it does. Model time.
    frozen_at: Option<Time>,
    /// The request was taken out of the batch for it.
    freezing: bool,
}

impl Drop for Copy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Actor {
    pub(super) fn new(
        place: Place,
        timing: Timing,
        models: Models,
        identity: Arc<Identity>,
        engine: EngineHandle,
        inputs: mpsc::Sender<Input>,
        holdings: watch::Sender<usize>,
    ) -> Self {
        Self {
            seats: Seats::new(place, timing),
            clock: LeaseClock::start(),
            models,
            identity,
            engine,
            inputs,
            gateways: BTreeMap::new(),
            requests: BTreeMap::new(),
            runs: BTreeMap::new(),
            expected: BTreeMap::new(),
            prefixes: Prefixes::default(),
            arriving: None,
            unsettled: BTreeSet::new(),
            holdings,
        }
    }

    /// Until the replica ends.
    pub(super) async fn run(mut self, mut inputs: mpsc::Receiver<Input>, mut events: mpsc::UnboundedReceiver<MoveEvent>) {
        loop {
            let due = self.clock.until(self.seats.poll_timeout()).min(Duration::from_hours(1));
            tokio::select! {
                event = events.recv() => match event {
                    Some(event) => self.engine_told(event),
                    // The engine is gone, and the replica with it.
                    None => return,
                },
                Some(input) = inputs.recv() => self.heard(input),
                () = tokio::time::sleep(due) => self.feed(SeatsInput::Timeout),
            }
        }
    }

    fn heard(&mut self, input: Input) {
        match input {
            Input::Attached { gateway, connection, frames } => {
                tracing::info!(gateway = gateway.id, "a gateway attached");
                self.expected.retain(|name, _| name.gateway.id != gateway.id || name.gateway == gateway);
                self.gateways.insert(gateway.id, Gateway { name: gateway, connection, frames });
                self.feed(SeatsInput::Attached { gateway });
            }
            Input::Detached { gateway, connection } => {
                if self.attached(gateway, connection).is_some() {
                    self.gateways.remove(&gateway.id);
                }
            }
            Input::Frame { gateway, connection, frame } => {
                if self.attached(gateway, connection).is_some() {
                    self.frame(gateway, *frame);
                }
            }
            Input::Source { request, attempt, news } => self.source_told(request, attempt, news),
            Input::Opened { opening, answer } => {
                let accepted = self.accept(&opening);
                let _ = answer.send(accepted);
            }
            Input::Target { request, attempt, news } => self.target_told(request, attempt, news),
            Input::PrefixOpened { opening, answer } => {
                let accepted = self.accept_prefix(&opening);
                let _ = answer.send(accepted);
            }
            Input::Prefix { request, attempt, news } => self.prefix_ended(request, attempt, news),
        }
    }

    fn attached(&mut self, gateway: GatewayName, connection: ConnectionId) -> Option<&mut Gateway> {
        self.gateways.get_mut(&gateway.id).filter(|attached| attached.name == gateway && attached.connection == connection)
    }

    fn frame(&mut self, gateway: GatewayName, frame: ControlFrame) {
        match frame {
            ControlFrame::Lease { sequence } => self.feed(SeatsInput::Leased { gateway, sequence }),
            ControlFrame::Expect { request, attempt, source, nonce } if request.gateway == gateway => {
                if self.expected.len() >= EXPECTED_MAX {
                    self.expected.pop_first();
                }
                self.expected.insert(request, Expected { attempt, source, nonce });
            }
            ControlFrame::ToSeat { request, message, with } if request.gateway == gateway => self.gateway_told(request, message, &with),
            ControlFrame::CopyPrefix { request, attempt, target, to, prefix } if request.gateway == gateway => {
                self.copy_prefix(request, attempt, target, &to, &prefix);
            }
            ControlFrame::Expect { .. } | ControlFrame::ToSeat { .. } | ControlFrame::CopyPrefix { .. } => {
                tracing::warn!(gateway = gateway.id, "a gateway spoke of another one's request; it is not heard");
            }
            ControlFrame::Heartbeat(_)
            | ControlFrame::Holds { .. }
            | ControlFrame::AllHeld
            | ControlFrame::ToGateway { .. }
            | ControlFrame::Scheduled { .. }
            | ControlFrame::Moved { .. }
            | ControlFrame::PrefixCopied { .. } => {
                tracing::warn!(gateway = gateway.id, "a gateway sent a frame that only replicas send; it is not heard");
            }
        }
    }

    fn gateway_told(&mut self, request: RequestName, message: ToSeat<OutputEntry>, with: &[u8]) {
        match &message {
            ToSeat::Start { .. } => match RunRequest::from_bytes(with) {
                Ok(mut spec) => {
                    if self.models.served.contains(&spec.model) {
                        spec.model.clone_from(&self.models.engine);
                    }
                    self.requests.entry(request).or_default().spec = Some(spec);
                }
                Err(why) => tracing::warn!(%request, why, "a request was to be started that cannot be read"),
            },
            ToSeat::Move { attempt, .. } => match MoveTo::from_bytes(with) {
                Ok(to) => self.requests.entry(request).or_default().move_to = Some((*attempt, to)),
                Err(error) => tracing::warn!(%request, %error, "a request was to be moved to where cannot be read"),
            },
            ToSeat::Stop { upto } => {
                if self.expected.get(&request).is_some_and(|expected| expected.attempt <= *upto) {
                    self.expected.remove(&request);
                }
            }
            ToSeat::Keep { .. } | ToSeat::No { .. } | ToSeat::Resume { .. } | ToSeat::Ack { .. } => {}
        }
        self.unsettled.insert(request);
        self.feed(SeatsInput::FromGateway { request, message });
    }

    fn engine_told(&mut self, event: MoveEvent) {
        match event {
            MoveEvent::Output(output) => self.computed(output),
            MoveEvent::Complete { run, tokens, reason } => {
                if let Some(run) = self.run_of(run) {
                    run.computed.push_back((tokens, travel::finish_entry(reason)));
                }
            }
            MoveEvent::Refused { run, why } => {
                if let Some(&request) = self.runs.get(&run) {
                    tracing::warn!(%request, %why, "the engine does not run a request");
                    self.give_up(request, class_of(&why), &why.to_string());
                }
            }
            MoveEvent::Frozen { run, at } => self.stands_still(run, at),
        }
        self.settle_all();
    }

    fn computed(&mut self, output: Output) {
        let id = output.request;
        let Some(run) = self.run_of(id) else { return };
        let (index, reason) = (output.index, output.finish.as_ref().map(|finish| finish.reason));
        let scheduled = run.heard.take().zip(output.first_scheduled).map(|(heard, first)| (first.since(heard), output.cached_tokens));
        run.computed.push_back((index, travel::token_entry(output)));
        run.computed.extend(reason.map(|reason| (index + 1, travel::finish_entry(reason))));
        if let Some((waited, cached)) = scheduled {
            self.tell_scheduled(self.runs[&id], cached, waited);
        }
    }

    /// `waited` is model time.
    fn tell_scheduled(&mut self, request: RequestName, cached: Tokens, waited: Duration) {
        let Some(holding) = self.seats.seat(request).and_then(|seat| seat.holding()) else { return };
        let waited_us = travel::micros(self.engine.real(waited));
        self.send(request.gateway, ControlFrame::Scheduled { request, epoch: holding.tag, cached: cached.0, waited_us });
    }

    /// The engine's part of a request, which changes: `None` when it is of an older run.
    fn run_of(&mut self, run: RequestId) -> Option<&mut Run> {
        let request = *self.runs.get(&run)?;
        self.unsettled.insert(request);
        self.requests.get_mut(&request)?.run.as_mut().filter(|current| current.id == run)
    }

    fn stands_still(&mut self, run: RequestId, at: Time) {
        let Some(&request) = self.runs.get(&run) else { return };
        self.unsettled.insert(request);
        // What was computed before has been told before; the seat may not have taken it.
        self.settle(request);
        let Some(here) = self.requests.get_mut(&request) else { return };
        let Some(copy) = here.copy.as_mut().filter(|copy| copy.freezing) else { return };
        copy.frozen_at = Some(at);
        fault::reached(Point::SourceFrozen);
        let whole = here.run.as_ref().is_some_and(|run| run.computed.is_empty());
        self.feed(if whole { SeatsInput::Frozen { request } } else { SeatsInput::CopyFailed { request } });
    }

    fn source_told(&mut self, request: RequestName, attempt: Tag, news: FromSource) {
        let Some(here) = self.requests.get_mut(&request) else { return };
        let Some(copy) = here.copy.as_mut().filter(|copy| copy.attempt == attempt) else { return };
        match news {
            FromSource::Advanced => self.feed(SeatsInput::CopyAdvanced { request }),
            FromSource::Ready { next, rest } => {
                copy.freezing = true;
                if let Some(run) = &mut here.run {
                    run.held = true;
                    let freeze = MoveCommand::Freeze(run.id, next, rest);
                    self.order(freeze);
                }
            }
            FromSource::Prepared { entries, sent } => {
                let (from, frozen_at) = (copy.target, copy.frozen_at);
                if let Some(run) = &mut here.run {
                    run.left = true;
                }
                self.feed(SeatsInput::FromPeer { request, from, message: ToPeer::Prepared { attempt, entries } });
                self.tell_moved(request, attempt, sent, frozen_at);
            }
            FromSource::Failed { why } => {
                copy.frozen = None;
                here.why = Some(why);
                self.feed(SeatsInput::CopyFailed { request });
                if let Some(here) = self.requests.get_mut(&request) {
                    here.why = None;
                }
            }
        }
    }

    /// Where the gateway was asked to commit.
    fn tell_moved(&mut self, request: RequestName, attempt: Tag, sent: Sent, frozen_at: Option<Time>) {
        let holding = self.seats.seat(request).and_then(|seat| seat.holding());
        if !holding.is_some_and(|holding| holding.phase == Phase::Asking && holding.attempt == attempt) {
            return;
        }
        let gap = frozen_at.map_or(Duration::ZERO, |at| self.engine.real(self.engine.now().since(at)));
        let Sent { bytes, held, rounds } = sent;
        let copied = Copied { bytes, held, rounds, gap_us: travel::micros(gap) };
        self.send(request.gateway, ControlFrame::Moved { request, attempt, copied });
    }

    /// Only what its gateway announced, one at a time.
    fn accept(&mut self, opening: &Opening) -> Result<(), Refusal> {
        let Opening { request, attempt, .. } = *opening;
        self.check_announced(opening)?;
        let is_over = |seat: &baton_migration::Seat<OutputEntry>| {
            seat.seen() >= attempt || seat.holding().is_some_and(|holding| holding.tag >= attempt)
        };
        if self.seats.seat(request).is_some_and(is_over) {
            return Err(Refusal::Other("the attempt is over".to_owned()));
        }
        if let Some((other, _)) = self.arriving {
            return Err(Refusal::Other(format!("{other} is taken in, and one at a time is")));
        }
        self.arriving = Some((request, attempt));
        Ok(())
    }

    fn check_announced(&self, opening: &Opening) -> Result<(), Refusal> {
        let Opening { request, attempt, source, target, nonce } = *opening;
        let announced = |expected: &Expected| expected.attempt == attempt && expected.source == source && expected.nonce == nonce;
        let is_announced = target == self.seats.place() && self.expected.get(&request).is_some_and(announced);
        if is_announced { Ok(()) } else { Err(Refusal::NotExpected) }
    }

    fn target_told(&mut self, request: RequestName, attempt: Tag, news: FromTarget) {
        match news {
            FromTarget::Arrived { source, room, orders, answer } => {
                self.feed(SeatsInput::FromPeer { request, from: source, message: ToPeer::Prepare { attempt } });
                let prepares = self.seats.seat(request).and_then(|seat| seat.holding());
                let taken = prepares.is_some_and(|holding| holding.phase == Phase::Preparing && holding.tag == attempt);
                if taken {
                    let here = self.requests.entry(request).or_default();
                    here.arrival = Some(Arrival { attempt, source, room, orders, state: None });
                    fault::reached(Point::TargetPreparing);
                }
                let _ = answer.send(taken);
            }
            FromTarget::Advanced => {
                if self.arrival_of(request, attempt).is_some() {
                    self.feed(SeatsInput::CopyAdvanced { request });
                }
            }
            FromTarget::State { entries, run } => {
                let (id, now) = (self.engine.next_id(), self.engine.now());
                let Some(arrival) = self.arrival_of(request, attempt) else { return };
                let from = arrival.source;
                let message = match travel::from_wire(&run, id, travel::token_ids(&entries)) {
                    Ok(state) => {
                        arrival.state = Some((state, now));
                        ToPeer::State { attempt, entries }
                    }
                    Err(why) => {
                        tracing::warn!(%request, %why, "a request that came cannot run here");
                        ToPeer::Abort { attempt }
                    }
                };
                self.feed(SeatsInput::FromPeer { request, from, message });
            }
            FromTarget::Lost => {
                if let Some(arrival) = self.arrival_of(request, attempt) {
                    let from = arrival.source;
                    self.feed(SeatsInput::FromPeer { request, from, message: ToPeer::Abort { attempt } });
                }
            }
            FromTarget::Ended => {
                if self.arriving == Some((request, attempt)) {
                    self.arriving = None;
                }
            }
        }
    }

    fn arrival_of(&mut self, request: RequestName, attempt: Tag) -> Option<&mut Arrival> {
        self.requests.get_mut(&request)?.arrival.as_mut().filter(|arrival| arrival.attempt == attempt)
    }

    fn feed(&mut self, input: SeatsInput<OutputEntry>) {
        self.seats.handle(input, self.clock.now());
        self.settle_all();
    }

    /// Carries out what the seats want, until they want nothing more.
    fn settle_all(&mut self) {
        loop {
            while let Some(output) = self.seats.poll() {
                self.perform(output);
            }
            let Some(request) = self.unsettled.pop_first() else { break };
            self.settle(request);
        }
        let held = self.requests.len() + self.seats.prefixes().count();
        self.holdings.send_if_modified(|holdings| std::mem::replace(holdings, held) != held);
    }

    fn perform(&mut self, output: SeatsOutput<OutputEntry>) {
        match output {
            SeatsOutput::Heartbeat { gateway, sequence } => {
                let status = self.engine.status();
                let beat = Heartbeat {
                    sequence,
                    steps: status.counters.steps,
                    step_predicted_us: self.engine.step_predicted().as_micros() as u64,
                    waiting: status.waiting,
                    running: status.running,
                };
                self.send(gateway, ControlFrame::Heartbeat(beat));
            }
            SeatsOutput::Holds { request, phase, tag, entries } => {
                self.send(request.gateway, ControlFrame::Holds { request, phase, tag, entries });
            }
            SeatsOutput::AllHeld { gateway } => self.send(gateway, ControlFrame::AllHeld),
            SeatsOutput::ToGateway { request, message } => {
                self.unsettled.insert(request);
                let why = self.reason(request, &message);
                self.send(request.gateway, ControlFrame::ToGateway { request, message, why });
            }
            SeatsOutput::ToPeer { request, to: _, message } => {
                self.unsettled.insert(request);
                self.tell_peer(request, message);
            }
            SeatsOutput::Work { request, work } => {
                self.unsettled.insert(request);
                self.work(request, &work);
            }
            SeatsOutput::Prefix { request, attempt, output } => self.perform_prefix(request, attempt, &output),
        }
    }

    /// Short, and empty where nothing is to say.
    fn reason(&mut self, request: RequestName, message: &ToGateway<OutputEntry>) -> String {
        if !matches!(message, ToGateway::Aborted { .. } | ToGateway::Lost { .. }) {
            return String::new();
        }
        let told = self.requests.get_mut(&request).and_then(|here| here.why.take());
        let finished = self.seats.seat(request).and_then(|seat| seat.holding()).is_some_and(Holding::has_finished);
        short(told.unwrap_or_else(|| if finished { "it finished first".to_owned() } else { String::new() }))
    }

    fn tell_peer(&mut self, request: RequestName, message: ToPeer<OutputEntry>) {
        let Some(here) = self.requests.get_mut(&request) else { return };
        match message {
            // The connection loses nothing, so that what is repeated was heard. It ends with the copy or the arrival.
            ToPeer::Prepare { .. } | ToPeer::Abort { .. } => {}
            ToPeer::State { attempt, entries } => {
                let copy = here.copy.as_mut().filter(|copy| copy.attempt == attempt);
                if let Some(frozen) = copy.and_then(|copy| copy.frozen.take()) {
                    let _ = frozen.send(Frozen(entries));
                }
            }
            ToPeer::Prepared { attempt, entries } => {
                if let Some(arrival) = here.arrival.as_ref().filter(|arrival| arrival.attempt == attempt) {
                    let _ = arrival.orders.send(TargetOrder::Prepared { entries });
                }
            }
        }
    }

    fn work(&mut self, request: RequestName, work: &Work) {
        match *work {
            Work::Run { kv } => self.start(request, kv),
            Work::Copy { attempt, target } => self.copy(request, attempt, target),
            Work::EndCopy { attempt } => {
                let here = self.requests.entry(request).or_default();
                if here.copy.as_ref().is_some_and(|copy| copy.attempt == attempt) {
                    here.copy = None;
                }
            }
            // What the engine should do follows from the seat.
            Work::Thaw | Work::Pause => {}
            Work::Free => {
                self.free_run(request);
                self.free_arrival(request);
            }
        }
    }

    /// Lets the engine go on with the entries that the seat has.
    fn start(&mut self, request: RequestName, kv: Kv) {
        let Some(holding) = self.seats.seat(request).and_then(|seat| seat.holding()) else { return };
        let output = travel::token_ids(&holding.entries);
        let whole = kv == Kv::Kept { entries: holding.entries.len() as u32 };
        let here = self.requests.entry(request).or_default();
        if whole && here.run.is_some() {
            return;
        }
        self.free_run(request);
        let here = self.requests.entry(request).or_default();
        let id = self.engine.next_id();
        let came = here.arrival.as_mut().and_then(|arrival| arrival.state.take()).filter(|(state, _)| whole && state.output == output);
        if let Some((mut state, since)) = came {
            fault::reached(Point::TargetOwning);
            state.history = state.history.aged(self.engine.now().since(since));
            let arrival = here.arrival.take().expect("the state came with it");
            let id = state.request.id;
            self.begin(request, id, MoveCommand::Join(arrival.room.id, Box::new(state)));
            return;
        }
        self.free_arrival(request);
        let spec = self.requests.get(&request).and_then(|here| here.spec.as_ref());
        match spec
            .ok_or_else(|| "nothing was said of what to run".to_owned())
            .and_then(without_adapter)
            .and_then(|spec| travel::from_wire(spec, id, output).map_err(|error| error.to_string()))
        {
            Ok(state) => self.begin(request, id, MoveCommand::Run(Box::new(state))),
            Err(why) => {
                tracing::warn!(%request, why, "a request cannot be run");
                self.give_up(request, LostClass::Refused, &why);
            }
        }
    }

    fn begin(&mut self, request: RequestName, id: RequestId, command: MoveCommand) {
        self.runs.insert(id, request);
        let heard = matches!(command, MoveCommand::Run(_)).then(|| self.engine.now());
        let run = Run { id, heard, held: false, throttled: false, left: false, computed: VecDeque::new() };
        self.requests.entry(request).or_default().run = Some(run);
        self.order(command);
    }

    fn copy(&mut self, request: RequestName, attempt: Tag, target: Place) {
        let busy = self.requests.values().any(|here| here.copy.is_some());
        let here = self.requests.entry(request).or_default();
        let to = here.move_to.take().filter(|(told, _)| *told == attempt).map(|(_, to)| to);
        let (Some(to), Some(run), false) = (to, &here.run, busy) else {
            tracing::info!(%request, %attempt, busy, "a request is not moved; one at a time is");
            here.why = Some(if busy { "another request leaves, and one at a time does" } else { "it was not said where to" }.to_owned());
            self.seats.handle(SeatsInput::CopyFailed { request }, self.clock.now());
            return;
        };
        let source = KvSource {
            identity: Arc::clone(&self.identity),
            engine: self.engine.clone(),
            inputs: self.inputs.clone(),
            request,
            attempt,
            here: self.seats.place(),
            target,
            to,
            run: run.id,
        };
        fault::reached(Point::SourceCopying);
        let (frozen, stands_still) = oneshot::channel();
        let task = tokio::spawn(source.run(stands_still)).abort_handle();
        here.copy = Some(Copy { attempt, target, task, frozen: Some(frozen), frozen_at: None, freezing: false });
    }

    fn free_run(&mut self, request: RequestName) {
        let Some(run) = self.requests.get_mut(&request).and_then(|here| here.run.take()) else { return };
        self.runs.remove(&run.id);
        self.order(if run.left { MoveCommand::Release(run.id) } else { MoveCommand::End(run.id) });
    }

    fn free_arrival(&mut self, request: RequestName) {
        let Some(arrival) = self.requests.get_mut(&request).and_then(|here| here.arrival.take()) else { return };
        self.order(MoveCommand::Abandon(arrival.room.id));
    }

    /// What should run here does not: its gateway runs it elsewhere, or tells its client.
    fn give_up(&mut self, request: RequestName, class: LostClass, why: &str) {
        self.requests.entry(request).or_default().why = Some(format!("cannot be run here: {why}"));
        self.seats.handle(SeatsInput::CannotRun { request, class }, self.clock.now());
    }

    /// Gives the seat what was computed, and holds or lets go of the engine's part as the seat wants.
    fn settle(&mut self, request: RequestName) {
        let Some(here) = self.requests.get_mut(&request) else { return };
        while let Some(run) = &mut here.run
            && let Some(seat) = self.seats.seat(request).filter(|seat| seat.is_computing())
            && let Some((index, entry)) = run.computed.pop_front()
        {
            let next = seat.holding().map_or(0, |holding| holding.entries.len() as u32);
            if index == next {
                let over = entry.is_finish();
                self.seats.handle(SeatsInput::Computed { request, entry }, self.clock.now());
                self.unsettled.insert(request);
                if over {
                    self.runs.remove(&run.id);
                    here.run = None;
                }
            }
        }
        let Some(seat) = self.seats.seat(request).filter(|seat| seat.holding().is_some()) else {
            if here.run.is_none() && here.arrival.is_none() && here.copy.is_none() {
                self.requests.remove(&request);
            }
            return;
        };
        let holding = seat.holding().expect("it was just seen");
        let Some(run) = &mut here.run else { return };
        let unacknowledged = (holding.entries.len() as u32).saturating_sub(holding.acked);
        run.throttled = unacknowledged > if run.throttled { CREDIT / 2 } else { CREDIT };
        let freezing = here.copy.as_ref().is_some_and(|copy| copy.freezing);
        let held = !seat.is_computing() || run.throttled || freezing;
        if std::mem::replace(&mut run.held, held) != held {
            let command = if held { MoveCommand::Hold(run.id) } else { MoveCommand::Go(run.id) };
            run.left &= held;
            self.order(command);
        }
    }

    fn order(&self, command: MoveCommand) {
        // When the engine is gone, so is the replica.
        let _ = self.engine.move_sequence(command);
    }

    fn send(&mut self, gateway: GatewayName, frame: ControlFrame) {
        let Some(attached) = self.gateways.get(&gateway.id).filter(|attached| attached.name == gateway) else { return };
        // A gateway that takes nothing is disconnected; what it missed is told again when it comes back.
        if attached.frames.try_send(frame).is_err() {
            self.gateways.remove(&gateway.id);
        }
    }
}

/// The engine has none, and would answer as the base model.
fn without_adapter(spec: &RunRequest) -> Result<&RunRequest, String> {
    match &spec.adapter {
        None => Ok(spec),
        Some(adapter) => Err(format!("it asks for the adapter \"{adapter}\", and this engine has none; ask for the base model")),
    }
}

/// Whether another replica may run what this engine does not.
fn class_of(why: &MoveRefusal) -> LostClass {
    use SubmitError as Submit;
    match why {
        // One that serves the model, has more memory or a longer context, or that is less busy.
        MoveRefusal::Model { .. }
        | MoveRefusal::Eos { .. }
        | MoveRefusal::TooLong { .. }
        | MoveRefusal::NoPlace { .. }
        | MoveRefusal::NoRoom(_)
        | MoveRefusal::Request(Submit::NeverFits { .. } | Submit::QueueFull { .. } | Submit::Duplicate(_)) => LostClass::Busy,
        MoveRefusal::Contradiction(_)
        | MoveRefusal::Request(Submit::EmptyPrompt | Submit::NoChoices | Submit::OutOfVocabulary { .. } | Submit::Sampling(_)) => {
            LostClass::Refused
        }
        // Of what came with KV, or has ended.
        MoveRefusal::Complete(_) | MoveRefusal::NotPrepared(_) | MoveRefusal::OtherTokens { .. } | MoveRefusal::Incomplete { .. } => {
            LostClass::Lost
        }
    }
}

/// A reason as it is told to a gateway.
fn short(mut why: String) -> String {
    why.truncate(why.floor_char_boundary(WHY_MAX));
    why
}
