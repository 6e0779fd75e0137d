//! One request on its way: the shell around [`Session`]. It carries facts from engine, client and clock into the machine and does
//! what the machine says; it decides nothing by itself.

mod by_tokens;
mod carried;
mod copy;
mod lag;
mod leaving;
mod outlet;
mod record;

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::body::Body;
use baton_kv::BlockKey;
use baton_policy::{Arrival, Outcome, Placed, Slo, Verdict};
use baton_session::{Action, Answer, End, Epoch, Fault, Input, Limits, Offer, Owner, Session, SessionConfig};
use baton_units::{DurationMs, ReplicaId, Time, Tokens};
use baton_wire::{
    openai::Usage,
    sse::{self, Event},
};
use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body::Frame;
use tokio::{
    sync::{oneshot, watch},
    time::Sleep,
};

use self::{
    by_tokens::{ByTokens, Rest},
    carried::Carrying,
    lag::Lag,
    leaving::{Carried, Leaving},
    outlet::{Outlet, stream_response},
    record::Record,
};
use crate::{
    assemble::Assembler,
    carry::RunEvent,
    chunk::{Chunk, ClientView, Reading, with_cached_at_most},
    engine::Engine,
    fleet::{Booked, Fleet, Placing, REPLICA_HEADER, Stage},
    intake::{Intake, Mode},
    line::Head,
    live::{Live, LiveState},
    plain::{Plain, Shape},
    prompt::KeyChain,
    pulse::Listener,
    refusal::Refusal,
    reserved,
    tenants::{Grant, Padding},
    upstream::{Arrived, Attempt, Expect},
};

pub(crate) use self::leaving::LeaveOrder;

/// A busy replica gets its time for a first token this often again; a request that it has lost ends then.
const EXTENSIONS_MAX: u32 = 9;

/// A request that is understood, tokenized and known to name a model of the fleet.
pub(crate) struct Admitted {
    pub(crate) intake: Intake,
    pub(crate) live: Arc<Live>,
    /// Of the first prompt.
    pub(crate) chain: KeyChain,
    /// Tokens of the prompts after it.
    pub(crate) further: Vec<Vec<u32>>,
    /// The chain's tokens are the engine's, so that output tokens continue it.
    pub(crate) exact: bool,
    /// Replicas that do not serve the model.
    pub(crate) excluded: Vec<ReplicaId>,
    /// Of the client's tenant, where there are tenants.
    pub(crate) grant: Option<Grant>,
    /// How the first token is held back, where it is.
    pub(crate) padding: Option<Padding>,
}

/// Carries a request until its status is known; a stream goes on as the response's body. The client's connection drives it all, so an
/// event meets no other task between its engine and its client.
pub(crate) async fn run(fleet: Arc<Fleet>, admitted: Admitted) -> Response<Body> {
    let client_id = HeaderValue::from_str(&admitted.live.client_id);
    let mut exchange = Box::new(Exchange::new(fleet, admitted));
    poll_fn(|context| exchange.poll_due(context)).await;
    let whole = exchange.lag.take_whole();
    let replica = exchange.last_replica.and_then(|id| exchange.fleet.engine(id)).and_then(|engine| exchange.fleet.shown_name(&engine));
    let mut response = whole.unwrap_or_else(|| stream_response(Body::new(Stream(exchange))));
    if let Ok(id) = client_id {
        response.headers_mut().insert("x-request-id", id);
    }
    if let Some(replica) = replica {
        response.headers_mut().insert(REPLICA_HEADER, replica);
    }
    response
}

/// The rest of an exchange as a body. Nothing is read from the engine while the connection takes no more.
struct Stream(Box<Exchange>);

impl http_body::Body for Stream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        ready!(self.0.poll_due(context));
        Poll::Ready(self.0.lag.take_events().map(|events| Ok(Frame::data(events))))
    }
}

struct Exchange {
    fleet: Arc<Fleet>,
    admitted: Admitted,
    session: Session,
    outlet: Outlet,
    /// What has left the outlet and not been taken yet.
    lag: Lag,
    /// Keys of prompt and output, for when the client has seen it all.
    grown: Option<Arc<[BlockKey]>>,
    verdict: Option<oneshot::Receiver<Verdict>>,
    /// Placed, and its prefix is on the way.
    fetching: Option<copy::Fetching>,
    refusal: Option<Refusal>,
    attempt: Option<Running>,
    listener: Option<Listener>,
    view: ClientView,
    /// The engine's whole answer or error, for the end.
    answer: Option<Response<Body>>,
    /// The stream's end mark was written with the answer.
    answered: bool,
    /// Of a stream that lost its engine, until another one goes on with it.
    rest: Option<Box<Rest>>,
    /// Of one that runs and can be asked to leave.
    leave: Option<oneshot::Receiver<LeaveOrder>>,
    /// It was, and its first token since is not there.
    leaving: Option<Leaving>,
    usage: Option<Usage>,
    /// Prompt tokens that the engine had, once it told.
    cached: Option<Tokens>,
    /// The router knows of output of the place that the request has now.
    first_told: bool,
    first_token_at: Option<Time>,
    last_token_at: Option<Time>,
    /// Output that the router has not heard of; it is told once for all events that come together.
    untold: u32,
    held_since: Option<Time>,
    end: Option<End>,
    /// Nothing else ran on the replica when the attempt began, so its TTFT is a measurement.
    alone: bool,
    sent_at: Time,
    /// Times that the current attempt got more time for its first token because its replica was busy.
    extensions: u32,
    last_replica: Option<ReplicaId>,
    timer: Timer,
    /// Rings when more of the answer may be seen.
    release: Timer,
    /// On the fleet's list; `None` once it is booked to its end.
    booked: Option<Booked>,
}

/// The attempt under way.
struct Running {
    engine: Arc<Engine>,
    epoch: Epoch,
    way: Way,
}

/// How an engine is spoken to.
enum Way {
    /// As an OpenAI server.
    Wire(Box<Wire>),
    /// Over its control connection: the answer is made here from tokens.
    Carried(Box<Carrying>),
    /// As a server that computes from token ids: the answer is made here from those that come.
    ByTokens(Box<ByTokens>),
}

/// Tells that an engine was found dead, as after a host went away without a word.
type Death = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A request at an OpenAI server.
struct Wire {
    attempt: Attempt,
    assembler: Option<Assembler>,
    /// Next output index of each choice, as this engine counts.
    next: BTreeMap<u32, u32>,
    /// Choices that have their end.
    finished: BTreeSet<u32>,
    /// Of the last plain event.
    shape: Option<Shape>,
    /// `None` where it may not have to be gone on with.
    record: Option<Record>,
    /// `None` where the answer comes whole: an engine that shows no progress may only be slow to answer probes.
    death: Option<Death>,
}

/// What happened.
enum Wake {
    Closing,
    Timeout,
    Verdict(Option<Verdict>),
    /// The prefix that the request waits for is at its replica, or is given up.
    Fetched(ReplicaId, bool),
    Arrived(Arrived),
    /// The KV of a stream that has left its engine is where that goes on, or stays where it was.
    SlotCarried(Option<Carried>),
    /// The stream is to go on elsewhere.
    Leave(LeaveOrder),
    /// Of a choice that is carried.
    Carried(u32, RunEvent),
    /// The replica was found dead, or hung.
    Died,
}

/// Wakes the exchange when its session wants it. It is moved to earlier times only: one that rings too early is wound again, since
/// each event puts the session's time off.
#[derive(Default)]
struct Timer {
    sleep: Option<Pin<Box<Sleep>>>,
    rings_at: Time,
}

impl Timer {
    fn poll(&mut self, due: Time, fleet: &Fleet, context: &mut Context<'_>) -> Poll<()> {
        let sleep = self.sleep.get_or_insert_with(|| {
            self.rings_at = due;
            Box::pin(tokio::time::sleep_until(fleet.clock.instant(due)))
        });
        loop {
            if due < self.rings_at {
                self.rings_at = due;
                sleep.as_mut().reset(fleet.clock.instant(due));
            }
            ready!(sleep.as_mut().poll(context));
            if fleet.clock.now() >= due {
                return Poll::Ready(());
            }
            self.rings_at = Time::NEVER;
        }
    }
}

impl Exchange {
    fn new(fleet: Arc<Fleet>, admitted: Admitted) -> Self {
        let front = fleet.front();
        let limits = Limits { attempts: front.attempts, stall: front.stall_timeout, total: front.request_timeout };
        let intake = &admitted.intake;
        // Whether every choice must finish depends on the engine's kind, which is not known yet: see `done`.
        let config = SessionConfig { limits, choices: None, restartable: !intake.wishes.stream };
        let id = format!("{}{}", intake.api.id_prefix(), admitted.live.client_id);
        Self {
            session: Session::new(config, admitted.live.arrived),
            outlet: Outlet::new(),
            lag: Lag::new(admitted.padding.is_none().then_some(Duration::ZERO)),
            grown: None,
            verdict: None,
            fetching: None,
            refusal: None,
            attempt: None,
            listener: None,
            view: ClientView::new(intake.wishes, id),
            answer: None,
            answered: false,
            rest: None,
            leave: None,
            leaving: None,
            usage: None,
            cached: None,
            first_told: false,
            first_token_at: None,
            last_token_at: None,
            untold: 0,
            held_since: None,
            end: None,
            alone: false,
            sent_at: Time::ZERO,
            extensions: 0,
            last_replica: None,
            timer: Timer::default(),
            release: Timer::default(),
            booked: Some(fleet.admit(admitted.live.clone())),
            fleet,
            admitted,
        }
    }

    /// Ready when the client may see something, or nothing is to come. As long as something is held back, the request goes on beside it, so that
    /// all that comes keeps its distance.
    fn poll_due(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            let (due, ended) = (self.lag.due(), self.session.is_ended());
            if due.is_none() && ended || due.is_some_and(|due| due <= self.fleet.clock.now()) {
                self.note_seen();
                return Poll::Ready(());
            }
            if !ended && self.lag.has_room() && self.poll_output(context).is_ready() {
                self.hand_over();
                continue;
            }
            match due {
                Some(due) if due < Time::NEVER => ready!(self.release.poll(due, &self.fleet, context)),
                Some(_) | None => return Poll::Pending,
            }
        }
    }

    fn note_seen(&mut self) {
        let Some(padding) = self.admitted.padding.as_mut().filter(|_| self.first_token_at.is_some()) else { return };
        let now = self.fleet.clock.now();
        padding.seen(now);
        if self.lag.is_last()
            && let Some(keys) = self.grown.take()
        {
            padding.seen_whole(&keys, now);
        }
    }

    fn hand_over(&mut self) {
        let now = self.fleet.clock.now();
        if let Some(whole) = self.outlet.take_whole() {
            self.lag.push_whole(whole, now);
        }
        if let Some(events) = self.outlet.take_events() {
            self.lag.push_events(events, now);
        }
        if self.session.is_ended() {
            self.lag.settle();
        }
    }

    /// Goes on until something waits for the client, and then as far as it can without waiting itself.
    fn poll_output(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let output = self.poll_actions(context);
        self.tell_output();
        output
    }

    fn poll_actions(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            while let Some(action) = self.session.poll() {
                self.perform(action);
            }
            if self.session.is_ended() {
                self.close();
                return Poll::Ready(());
            }
            if self.outlet.is_full() {
                self.listener = None;
                return Poll::Ready(());
            }
            match self.poll_wake(context) {
                Poll::Ready(wake) => self.take(wake),
                Poll::Pending if self.outlet.has_output() => {
                    self.listener = None;
                    return Poll::Ready(());
                }
                Poll::Pending => {
                    self.listen();
                    return Poll::Pending;
                }
            }
        }
    }

    /// From here on the request waits for more of its engine's output, if it has some; not while it waits for its client.
    fn listen(&mut self) {
        match &self.attempt {
            Some(Running { engine, way: Way::Wire(_) | Way::ByTokens(_), .. }) if self.first_told => {
                self.listener.get_or_insert_with(|| Listener::of(engine, self.fleet.clock.now()));
            }
            Some(_) | None => self.listener = None,
        }
    }

    fn poll_wake(&mut self, context: &mut Context<'_>) -> Poll<Wake> {
        // Whoever serves the client's connection is woken by the closing and asks again.
        if self.fleet.stage() == Stage::Closing {
            return Poll::Ready(Wake::Closing);
        }
        if let Some(verdict) = &mut self.verdict {
            // An error: the router forgot the request.
            if let Poll::Ready(verdict) = Pin::new(verdict).poll(context) {
                return Poll::Ready(Wake::Verdict(verdict.ok()));
            }
        }
        if let Some(fetching) = &mut self.fetching
            && let Poll::Ready(arrived) = fetching.arrives.as_mut().poll(context)
        {
            return Poll::Ready(Wake::Fetched(fetching.replica, arrived));
        }
        if let Some(leaving) = &mut self.leaving
            && let Poll::Ready(carried) = leaving.poll_carried(context)
        {
            return Poll::Ready(Wake::SlotCarried(carried));
        }
        if let Some(orders) = &mut self.leave
            && let Poll::Ready(order) = Pin::new(orders).poll(context)
        {
            self.leave = None;
            // The sender is gone when others ask for orders in its place.
            if let Ok(order) = order {
                return Poll::Ready(Wake::Leave(order));
            }
        }
        let (attempt, death) = match self.attempt.as_mut().map(|running| &mut running.way) {
            Some(Way::Wire(wire)) => (&mut wire.attempt, &mut wire.death),
            Some(Way::ByTokens(by_tokens)) => (&mut by_tokens.attempt, &mut by_tokens.death),
            Some(Way::Carried(carrying)) => {
                if let Poll::Ready((choice, event)) = carrying.run.poll_next(context) {
                    return Poll::Ready(Wake::Carried(choice, event));
                }
                return self.poll_timer(context);
            }
            None => return self.poll_timer(context),
        };
        if let Poll::Ready(arrived) = attempt.poll_next(context) {
            return Poll::Ready(Wake::Arrived(arrived));
        }
        if let Some(death) = death
            && death.as_mut().poll(context).is_ready()
        {
            return Poll::Ready(Wake::Died);
        }
        self.poll_timer(context)
    }

    fn poll_timer(&mut self, context: &mut Context<'_>) -> Poll<Wake> {
        let due = self.session.poll_timeout().unwrap_or(Time::NEVER);
        self.timer.poll(due, &self.fleet, context).map(|()| Wake::Timeout)
    }

    fn take(&mut self, wake: Wake) {
        let now = self.fleet.clock.now();
        match wake {
            Wake::Closing => self.session.handle(Input::DrainDeadline, now),
            Wake::Timeout => {
                if self.is_carried() {
                    // Its connection knows better than any silence whether the replica is well.
                    self.session.handle(Input::ReplicaAlive, now);
                } else if self.is_only_busy() {
                    self.extensions += 1;
                    self.session.handle(Input::ReplicaAlive, now);
                } else if self.ends_as_told() || self.ends_before_it_fails() {
                    return;
                }
                self.session.handle(Input::Timeout, now);
            }
            Wake::Verdict(verdict) => {
                self.verdict = None;
                if let Some(since) = self.held_since.take() {
                    self.fleet.metrics.held(now.since(since));
                }
                let verdict = verdict.unwrap_or(Verdict::Refuse(baton_policy::Refusal::NoReplica));
                if self.is_carried() { self.goes_on(verdict) } else { self.decided(verdict) }
            }
            Wake::Fetched(replica, arrived) => self.fetched(replica, arrived),
            Wake::Arrived(arrived) => self.arrived(arrived),
            Wake::SlotCarried(carried) => self.slot_carried(carried),
            Wake::Leave(order) => self.leave(order),
            Wake::Carried(choice, event) => self.carried(choice, event),
            Wake::Died => self.died(),
        }
    }

    /// Gives up a dead replica where another one can take the request; where none can, it may still come back to life.
    fn died(&mut self) {
        let Some(Running { epoch, way, .. }) = &mut self.attempt else { return };
        match way {
            Way::Wire(wire) => wire.death = None,
            Way::ByTokens(by_tokens) => by_tokens.death = None,
            Way::Carried(_) => {}
        }
        let epoch = *epoch;
        if self.ends_as_told() || !self.fleet.any_ready() {
            return;
        }
        // What has output and cannot go on elsewhere has nothing to lose by waiting.
        let begins_anew = self.session.awaits_first_token() || !self.admitted.intake.wishes.stream;
        if begins_anew || !self.ends_before_it_fails() && self.rest.is_some() {
            self.attempt_failed(epoch, Fault::Unreachable);
        }
    }

    /// The replica gave others output since this attempt began, or since it was last asked: a queue, not a hang.
    fn is_only_busy(&self) -> bool {
        let since = self.sent_at + self.first_token_within(self.last_replica) * self.extensions;
        self.session.awaits_first_token()
            && self.extensions < EXTENSIONS_MAX
            && self.attempt.as_ref().is_some_and(|running| running.engine.pulse.spoke_at() > since)
    }

    // What the machine says.

    fn perform(&mut self, action: Action) {
        match action {
            Action::Place { excluded } => self.place(excluded),
            Action::Start(owner) => {
                self.start(owner);
                self.fleet.keep_books();
            }
            Action::Stop(_) => (self.attempt, self.leave) = (None, None),
            Action::Suspect { replica, fault } => {
                if matches!(fault, Fault::NoFirstToken(_) | Fault::Stalled(_)) {
                    self.fleet.metrics.fault(fault);
                }
                self.fleet.suspect(replica, fault);
            }
            Action::Answer(answer) => self.answer(answer),
            Action::End(end) => self.end = Some(end),
        }
    }

    fn place(&mut self, excluded: Vec<ReplicaId>) {
        let arrival = if let Some(rest) = &self.rest {
            let cannot = self.cannot_resume(rest);
            self.tell_output();
            let prompt = Tokens(self.admitted.live.prompt.0 + self.session.delivered(0));
            // One that leaves has said where it goes.
            let to = self.leaving.as_ref().map(Leaving::to);
            let all = to.map(|_| self.fleet.engines()).unwrap_or_default();
            let others = all.into_iter().map(|engine| engine.id).filter(|id| Some(*id) != to);
            self.arrival(prompt, excluded.into_iter().chain(cannot).chain(others).collect())
        } else {
            self.admitted.chain.forget_output();
            self.untold = 0;
            self.arrival(self.admitted.live.prompt, excluded)
        };
        match self.fleet.place(arrival) {
            Placing::Now(verdict) => self.decided(verdict),
            Placing::Later(told) => {
                self.held_since = Some(self.fleet.clock.now());
                self.verdict = Some(told);
            }
        }
    }

    /// The request as the router sees it, with `prompt` tokens to begin with; not for replicas that are `excluded` or lack its model.
    fn arrival(&self, prompt: Tokens, mut excluded: Vec<ReplicaId>) -> Arrival {
        let Admitted { intake, live, chain, excluded: lacking, .. } = &self.admitted;
        live.set(LiveState::Held, None);
        excluded.extend_from_slice(lacking);
        Arrival {
            request: live.id,
            keys: chain.keys(),
            prompt,
            max_output: intake.max_output,
            session: intake.identity.session,
            program: intake.identity.program,
            share: intake.share,
            priority: intake.identity.priority,
            // Of one that goes on, the first token was long ago.
            slo: Slo { ttft: intake.slo.ttft.filter(|_| self.rest.is_none() && !self.is_carried()), ..intake.slo },
            excluded,
        }
    }

    fn decided(&mut self, verdict: Verdict) {
        let now = self.fleet.clock.now();
        match verdict {
            Verdict::Run(Placed { replica, copy, fetch }) => {
                if let Some(copy) = copy {
                    copy::send(&self.fleet, &self.admitted, replica, copy);
                }
                if self.carry_slot(replica) {
                    return;
                }
                match fetch.map(|fetch| copy::fetch(&self.fleet, &self.admitted, replica, fetch)) {
                    None => self.placed(replica),
                    Some(Some(fetching)) => self.fetching = Some(fetching),
                    Some(None) => self.fetched(replica, false),
                }
            }
            Verdict::Hold => {}
            Verdict::Refuse(_) if self.stays_after_all() => self.place(Vec::new()),
            Verdict::Refuse(refusal) => {
                self.refusal = Some(refusal_of(&refusal, self.fleet.retry_after()));
                self.session.handle(Input::Refused, now);
            }
        }
    }

    /// What was to be brought to the replica is there, or is not waited for.
    fn fetched(&mut self, replica: ReplicaId, arrived: bool) {
        self.fetching = None;
        let request = self.admitted.live.id;
        self.fleet.with_router(|router, now| router.fetched(request, arrived, now));
        self.placed(replica);
    }

    fn placed(&mut self, replica: ReplicaId) {
        let first_token_within = self.first_token_within(Some(replica));
        self.session.handle(Input::Placed { replica, first_token_within }, self.fleet.clock.now());
    }

    /// How long the replica may take for its first token before it is taken for hung.
    fn first_token_within(&self, replica: Option<ReplicaId>) -> Duration {
        let front = self.fleet.front();
        let engine = replica.and_then(|id| self.fleet.engine(id));
        let Some(engine) = engine.filter(|engine| self.admitted.intake.mode(engine.config.kind, front.assemble) != Mode::Whole) else {
            // The first token comes with the last: no silence is too long.
            return front.request_timeout;
        };
        // Without another replica there is nothing to be had by giving this one up.
        let known = engine.pulse.first_token_patience().filter(|_| self.fleet.ready_replicas() > 1);
        let least = known.map_or(front.first_token_timeout, |known| known.min(front.first_token_timeout));
        let decision = self.fleet.peek_router(|router, _| router.decision(self.admitted.live.id));
        let predicted =
            decision.map_or(Duration::ZERO, |decision| Duration::from_ms(decision.predicted_ttft_ms * front.first_token_factor));
        predicted.max(least)
    }

    fn start(&mut self, owner: Owner) {
        let now = self.fleet.clock.now();
        let Some(engine) = self.fleet.engine(owner.replica) else {
            return self.session.handle(Input::Failed { epoch: owner.epoch, fault: Fault::Unreachable }, now);
        };
        let live = &self.admitted.live;
        live.set(LiveState::Prefill, Some(owner.replica));
        if self.rest.is_none() {
            live.reset_output();
            (self.first_token_at, self.last_token_at) = (None, None);
        }
        (self.usage, self.cached, self.first_told, self.listener, self.answer) = (None, None, false, None, None);
        self.fleet.metrics.attempt(owner.replica);
        self.sent_at = now;
        self.extensions = 0;
        self.last_replica = Some(owner.replica);
        if let Some(rest) = self.rest.take() {
            return self.resume(engine, owner, *rest);
        }
        if self.carry(&engine, owner) || self.begin_by_tokens(&engine, owner) {
            return;
        }
        let Admitted { intake, live, .. } = &self.admitted;
        let kind = engine.config.kind;
        let mode = intake.mode(kind, self.fleet.front().assemble);
        let takes_priority = reserved::takes_priority(kind, engine.config.priorities);
        let mut request = intake.upstream_body(kind, takes_priority, &live.model, mode);
        let length = request.iter().map(Bytes::len).sum();
        let request_id = self.fleet.upstream_id(live.id, owner.epoch.0);
        request.push_front(engine.lines.address().head(intake.api.path(), &request_id, live.trace.as_ref(), length));
        let expect = if mode == Mode::Whole { Expect::Whole } else { Expect::Events };
        let assembler = (mode == Mode::Assemble)
            .then(|| Assembler::new(intake.api, intake.wishes, format!("{}{}", intake.api.id_prefix(), live.client_id)));
        let death = (mode != Mode::Whole).then(|| found_dead(engine.deaths()));
        let attempt = self.fleet.upstream.start(&engine, request, expect);
        self.alone = engine.lines.busy() == 1;
        let record = self.records(&engine).then(Record::default);
        if record.is_some() {
            self.hear_orders();
        }
        let wire = Wire { attempt, assembler, next: BTreeMap::new(), finished: BTreeSet::new(), shape: None, record, death };
        self.attempt = Some(Running { engine, epoch: owner.epoch, way: Way::Wire(Box::new(wire)) });
    }

    fn answer(&mut self, answer: Answer) {
        let response = match answer {
            Answer::Complete => match self.answer.take() {
                Some(whole) => whole,
                // Whoever writes the answer here has ended it.
                None if self.answered => return,
                None => return self.outlet.events().extend_from_slice(sse::DONE),
            },
            Answer::Rejection => match self.answer.take() {
                Some(rejection) if self.outlet.is_open() => rejection,
                _ => return self.outlet.fail(&Refusal::Ended(End::Rejected)),
            },
            Answer::Refusal => {
                let refusal = self.refusal.take().unwrap_or_else(|| Refusal::NoReplica { retry_after: self.fleet.retry_after() });
                return self.outlet.fail(&refusal);
            }
            Answer::Error(end) => {
                // Nobody has what the last one lacks, or has time for more, which its own words say best.
                let is_told = matches!(end, End::Exhausted(Fault::Status(404 | 429)));
                let told = self.answer.take().filter(|_| is_told && self.outlet.is_open());
                let Some(answer) = told else { return self.outlet.fail(&Refusal::Ended(end)) };
                answer
            }
        };
        self.outlet.respond(response);
    }

    // What the engine says.

    fn wire(&mut self) -> Option<&mut Wire> {
        match &mut self.attempt.as_mut()?.way {
            Way::Wire(wire) => Some(wire),
            Way::Carried(_) | Way::ByTokens(_) => None,
        }
    }

    fn arrived(&mut self, arrived: Arrived) {
        let Some(running) = &self.attempt else { return };
        let epoch = running.epoch;
        let outcome = match arrived {
            Arrived::Event(event) => self.event(&event),
            Arrived::Answer { head, body } => self.whole(&head, &body),
            Arrived::End => self.stream_lost(Fault::Truncated),
            Arrived::Failed(fault) => self.stream_lost(fault),
        };
        if let Err(fault) = outcome {
            self.attempt_failed(epoch, fault);
        }
    }

    /// The engine's stream ends without its end.
    fn stream_lost(&mut self, fault: Fault) -> Result<(), Fault> {
        if self.ends_as_told() { Ok(()) } else { Err(fault) }
    }

    /// Ends an answer of which all is told, so that nothing but the stream's end mark can be missing: the client gets one from here. Each
    /// choice has its end, and usage was told where it is wanted.
    fn ends_as_told(&mut self) -> bool {
        let Some(Running { way: Way::Wire(wire), .. }) = &self.attempt else { return false };
        let intake = &self.admitted.intake;
        let wants_usage = intake.wishes.usage || wire.assembler.is_some();
        let is_told = wire.finished.len() as u32 == intake.choices && (self.usage.is_some() || !wants_usage);
        is_told && self.done().is_ok()
    }

    fn attempt_failed(&mut self, epoch: Epoch, fault: Fault) {
        self.fleet.metrics.fault(fault);
        if !self.ends_before_it_fails() {
            self.attempt = None;
            self.session.handle(Input::Failed { epoch, fault }, self.fleet.clock.now());
        }
    }

    /// An attempt is about to fail, unless only the end of its output is missing, which is known here.
    fn ends_before_it_fails(&mut self) -> bool {
        let epoch = self.attempt.as_ref().map(|running| running.epoch);
        let ends = self.keep_rest();
        if let Some(epoch) = epoch.filter(|_| ends) {
            self.attempt = None;
            self.session.handle(Input::Completed { epoch }, self.fleet.clock.now());
        }
        ends
    }

    fn event(&mut self, event: &Event) -> Result<(), Fault> {
        let by_tokens = matches!(&self.attempt, Some(Running { way: Way::ByTokens(_), .. }));
        if event.is_done() {
            return if by_tokens { Err(Fault::Truncated) } else { self.done() };
        }
        let Some(data) = &event.data else { return Ok(()) };
        if by_tokens {
            return self.tokens_event(data);
        }
        if let Some(plain) = self.read_plain(data)
            && self.is_plain(&plain)
        {
            return self.plain(&plain);
        }
        match Reading::of(self.admitted.intake.api, data)? {
            Reading::Chunk(chunk) => self.chunk(*chunk),
            Reading::Error(error) => {
                let code = error.map_or(0, |error| error.code);
                tracing::debug!(code, "the engine reported an error in its stream");
                Err(Fault::InBand)
            }
        }
    }

    fn read_plain<'a>(&mut self, data: &'a [u8]) -> Option<Plain<'a>> {
        let api = self.admitted.intake.api;
        let shape = &mut self.wire()?.shape;
        shape.as_ref().and_then(|shape| shape.read(data)).or_else(|| {
            let plain = Plain::read(api, data)?;
            *shape = Shape::of(&plain);
            Some(plain)
        })
    }

    /// Whether what came before lets the event be passed on as it is.
    fn is_plain(&mut self, plain: &Plain<'_>) -> bool {
        let (knows, choices) = (self.view.knows(plain), self.admitted.intake.choices);
        let assembler = self.wire().and_then(|wire| wire.assembler.as_ref());
        plain.choice < choices && assembler.map_or(knows, Assembler::has_begun)
    }

    fn plain(&mut self, plain: &Plain<'_>) -> Result<(), Fault> {
        let now = self.fleet.clock.now();
        if !self.offer(plain.choice, plain.count, plain.token_ids(), now) {
            return Ok(());
        }
        if let Some(wire) = self.wire() {
            if let Some(assembler) = &mut wire.assembler {
                assembler.push_plain(plain)?;
            }
            if let Some(record) = &mut wire.record {
                record.plain(plain);
            }
        }
        self.output(plain.count, now);
        if self.admitted.intake.wishes.stream {
            self.view.write(plain, self.outlet.events());
        }
        Ok(())
    }

    fn chunk(&mut self, mut chunk: Chunk<'_>) -> Result<(), Fault> {
        if chunk.pieces.iter().any(super::chunk::Piece::is_abort) {
            return Err(Fault::Aborted);
        }
        // The books keep a place for each choice up to the highest.
        if chunk.pieces.iter().any(|piece| piece.choice >= self.admitted.intake.choices) {
            return Err(Fault::Garbled);
        }
        let now = self.fleet.clock.now();
        let mut passes = true;
        for piece in &chunk.pieces {
            passes &= self.offer(piece.choice, piece.count, piece.token_ids.iter().copied(), now);
            if piece.finish.is_some()
                && let Some(running) = &mut self.attempt
            {
                self.session.handle(Input::ChoiceFinished { epoch: running.epoch, choice: piece.choice }, now);
                if let Way::Wire(wire) = &mut running.way {
                    wire.finished.insert(piece.choice);
                }
            }
        }
        if !passes || self.attempt.is_none() {
            return Ok(());
        }
        if let Some(usage) = &chunk.usage {
            self.cached = usage.cached_tokens().map(Tokens);
            self.usage = Some(usage.clone());
            if let Some(padding) = &self.admitted.padding {
                chunk.show_cached(padding.own);
            }
        }
        let api = self.admitted.intake.api;
        if let Some(wire) = self.wire() {
            if let Some(assembler) = &mut wire.assembler {
                assembler.push(&chunk)?;
            }
            if let Some(record) = &mut wire.record {
                record.chunk(api, &chunk);
            }
        }
        let tokens = chunk.pieces.iter().map(|piece| piece.count).sum();
        if tokens > 0 || chunk.pieces.iter().any(|piece| piece.finish.is_some()) {
            self.output(tokens, now);
        } else if let Some(running) = &self.attempt {
            running.engine.pulse.spoke(now);
        }
        if self.admitted.intake.wishes.stream
            && let Some(event) = self.view.event(chunk)
        {
            self.outlet.events().extend_from_slice(&event);
        }
        Ok(())
    }

    /// Counts output of a choice under the attempt's epoch; says whether it may pass.
    fn offer(&mut self, choice: u32, count: u32, token_ids: impl Iterator<Item = u32>, now: Time) -> bool {
        let Some(running) = &mut self.attempt else { return false };
        let next = match &mut running.way {
            Way::Wire(wire) => &mut wire.next,
            Way::Carried(carrying) => &mut carrying.next,
            Way::ByTokens(by_tokens) => &mut by_tokens.next,
        };
        let index = next.entry(choice).or_default();
        let offer = self.session.offer(running.epoch, choice, *index, count, now);
        *index += count;
        if choice == 0 && self.admitted.exact {
            self.admitted.chain.extend(token_ids);
        }
        matches!(offer, Offer::Deliver { .. })
    }

    /// Books output and tells the router of it.
    fn output(&mut self, tokens: u32, now: Time) {
        let live = &self.admitted.live;
        live.add_output(tokens);
        if let Some(Running { engine, way, .. }) = &self.attempt {
            engine.pulse.spoke(now);
            if !self.first_told && tokens > 0 {
                // One that is carried may have come from elsewhere since it was sent.
                if !matches!(way, Way::Carried(_)) {
                    engine.pulse.first_token(now.since(self.sent_at));
                }
                engine.succeeded();
            }
        }
        match self.last_token_at {
            Some(last) => self.fleet.metrics.token_gap(now.since(last)),
            None => self.fleet.metrics.first_token(now.since(live.arrived)),
        }
        if std::mem::replace(&mut self.first_told, true) {
            self.untold += tokens;
        } else {
            if self.first_token_at.is_none() {
                self.hold_back(now);
            }
            self.has_left(now);
            let live = &self.admitted.live;
            self.first_token_at.get_or_insert(now);
            live.set(LiveState::Decode, self.session.owner().map(|owner| owner.replica));
            let cached = self.cached;
            self.fleet.with_router(|router, now| {
                router.first_token(live.id, cached, now);
                router.output_tokens(live.id, tokens, now);
            });
        }
        self.last_token_at = Some(now);
    }

    /// The first token is there: all of the answer is to come later by what others' prefixes may have saved of it.
    fn hold_back(&mut self, now: Time) {
        let Some(padding) = &self.admitted.padding else { return };
        let took = now.since(self.admitted.live.arrived);
        let spec = self.attempt.as_ref().and_then(|running| running.engine.facts().spec);
        let saved = spec.map_or(Duration::ZERO, |spec| {
            let price = |hit: Tokens| Duration::from_ms(spec.prefill_ms(self.admitted.live.prompt, hit));
            let cold = price(padding.own);
            if let Some(cached) = self.cached {
                return cold.saturating_sub(price(cached));
            }
            // Who tells only at the end what was cached: as much as is believed, and no less than all where the request did not wait.
            let decision = self.fleet.peek_router(|router, _| router.decision(self.admitted.live.id));
            let quote = decision.and_then(|decision| decision.quotes.iter().find(|quote| quote.replica == spec.id).cloned());
            let (hit, wait_ms) = quote.map_or((Tokens::ZERO, 0.0), |quote| (quote.hit_tokens, quote.terms.wait));
            cold.saturating_sub(price(hit)).max((Duration::from_ms(wait_ms) + cold).saturating_sub(took))
        });
        self.lag.set(padding.delay(took, saved));
    }

    fn tell_output(&mut self) {
        let tokens = std::mem::take(&mut self.untold);
        if tokens > 0 {
            self.fleet.peek_router(|router, now| router.output_tokens(self.admitted.live.id, tokens, now));
            let (prompt, output) = (self.prompt_tokens(), self.output_tokens());
            if let Some(grant) = &mut self.admitted.grant {
                grant.used(prompt + output);
            }
        }
    }

    /// Of the prompt: as the engine counts them, once it has told.
    fn prompt_tokens(&self) -> u64 {
        self.usage.as_ref().map_or(self.admitted.live.prompt.0, |usage| usage.prompt_tokens).into()
    }

    fn output_tokens(&self) -> u64 {
        self.admitted.live.output().0.into()
    }

    /// `[DONE]`: the engine says that this is all.
    fn done(&mut self) -> Result<(), Fault> {
        let now = self.fleet.clock.now();
        let choices = self.admitted.intake.choices;
        let Some(Running { engine, epoch, way: Way::Wire(wire) }) = self.attempt.take() else { return Ok(()) };
        if engine.config.kind.finishes_every_choice() && (wire.next.len() as u32) < choices {
            self.attempt = Some(Running { engine, epoch, way: Way::Wire(wire) });
            return Err(Fault::Truncated);
        }
        let Wire { attempt, assembler, .. } = *wire;
        if let Some(assembler) = assembler {
            self.answer = Some(json_response(StatusCode::OK, assembler.finish().into()));
        }
        self.observe(&engine);
        attempt.release();
        self.session.handle(Input::Completed { epoch }, now);
        Ok(())
    }

    /// An answer in one piece.
    fn whole(&mut self, head: &Head, body: &Bytes) -> Result<(), Fault> {
        let status = head.status;
        let now = self.fleet.clock.now();
        let Some(running) = &self.attempt else { return Ok(()) };
        let epoch = running.epoch;
        let shown = self.admitted.padding.as_ref().and_then(|padding| with_cached_at_most(body, padding.own));
        let mut response = json_response(status, shown.unwrap_or_else(|| body.clone()));
        if let Some(kind) = &head.content_type {
            response.headers_mut().insert(header::CONTENT_TYPE, kind.clone());
        }
        if let Some(span) = head.retry_after {
            self.fleet.rest(&running.engine, span);
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(span.as_secs()));
        }
        if status == StatusCode::NOT_FOUND {
            // It had the model when it was asked last: an adapter, say, that was unloaded since. Others may have it.
            running.engine.expect_models();
            self.answer = Some(response);
            return Err(Fault::Status(status.as_u16()));
        }
        if !status.is_success() && !is_clients_fault(status) {
            if status == StatusCode::TOO_MANY_REQUESTS {
                self.answer = Some(response);
            }
            if !self.fleet.may_retry() {
                self.session.forbid_retry();
            }
            return Err(Fault::Status(status.as_u16()));
        }
        self.answer = Some(response);
        if !status.is_success() {
            self.attempt = None;
            self.session.handle(Input::Rejected { epoch }, now);
            return Ok(());
        }
        let engine = running.engine.clone();
        engine.pulse.spoke(now);
        engine.succeeded();
        self.attempt = None;
        self.usage = serde_json::from_slice::<crate::json::RawObject<'_>>(body).ok().and_then(|answer| answer.read("usage").ok().flatten());
        self.cached = self.usage.as_ref().and_then(Usage::cached_tokens).map(Tokens);
        let tokens = self.usage.as_ref().map_or(1, |usage| usage.completion_tokens.max(1));
        self.session.offer(epoch, 0, 0, tokens, now);
        self.output(tokens, now);
        self.alone = false;
        self.observe(&engine);
        self.session.handle(Input::ChoiceFinished { epoch, choice: 0 }, now);
        self.session.handle(Input::Completed { epoch }, now);
        Ok(())
    }

    /// What the finished attempt teaches: the engine's speed, where it does not tell it itself.
    fn observe(&mut self, engine: &Engine) {
        let Some(usage) = &self.usage else { return };
        let cached = Tokens(usage.cached_tokens().unwrap_or(0));
        let prompt = Tokens(usage.prompt_tokens);
        self.fleet.metrics.tokens(engine.id, prompt, cached, Tokens(usage.completion_tokens));
        if usage.cached_tokens().is_some() {
            let decision = self.fleet.peek_router(|router, _| {
                router.cached_tokens(self.admitted.live.id, cached);
                router.decision(self.admitted.live.id)
            });
            let quote = decision.as_ref().and_then(|decision| decision.quotes.iter().find(|quote| quote.replica == engine.id));
            if let Some(quote) = quote {
                self.fleet.metrics.hit_predicted(engine.id, quote.hit_tokens, cached);
            }
        }
        let Some(first_token_at) = self.first_token_at.filter(|_| self.alone && !engine.config.kind.reports_steps()) else { return };
        let new = prompt.saturating_sub(cached);
        if new == Tokens::ZERO {
            return;
        }
        engine.observe_prefill(new, cached, first_token_at.since(self.sent_at), first_token_at);
    }

    /// Books the request to its end, once.
    fn close(&mut self) {
        let Some(booked) = self.booked.take() else { return };
        (self.attempt, self.listener, self.leave) = (None, None, None);
        self.left_for_good();
        self.tell_output();
        if let Some(told) = self.verdict.take() {
            self.fleet.decline(told);
        }
        self.book_end();
        drop(booked);
    }

    fn book_end(&mut self) {
        let end = self.end.expect("a session ends with an end");
        let live = &self.admitted.live;
        let (outcome, name) = match end {
            End::Finished => (Outcome::Finished, "finished"),
            End::Cancelled => (Outcome::Cancelled, "cancelled"),
            End::Refused => (Outcome::Cancelled, "refused"),
            End::Rejected => (Outcome::Failed, "rejected"),
            End::Failed(_) => (Outcome::Failed, "failed"),
            End::Exhausted(_) => (Outcome::Failed, "exhausted"),
            End::Drained => (Outcome::Cancelled, "drained"),
            End::TimedOut(_) => (Outcome::Failed, "timed-out"),
        };
        let grown = self.admitted.exact && self.admitted.intake.choices == 1;
        let keys = (outcome == Outcome::Finished && grown).then(|| self.admitted.chain.keys());
        if self.admitted.padding.is_some() {
            self.grown.clone_from(&keys);
        }
        self.fleet.finished(live.id, outcome, keys);
        self.fleet.retire(live.id);
        if let Some(grant) = self.admitted.grant.take() {
            // Nothing was computed of a request that no replica had, or that none would do.
            let is_free = self.last_replica.is_none() || matches!(end, End::Refused | End::Rejected | End::Exhausted(_));
            grant.end(if is_free { 0 } else { self.prompt_tokens() }, self.output_tokens());
        }
        let live = &self.admitted.live;
        let took = self.fleet.clock.now().since(live.arrived);
        let route = self.admitted.intake.api.path();
        self.fleet.metrics.request_ended(route, name, took);
        let level_is_warn = matches!(end, End::Failed(_) | End::Exhausted(_) | End::TimedOut(_));
        let replica = self.last_replica.map(|id| id.to_string()).unwrap_or_default();
        if level_is_warn {
            tracing::warn!(request = %live.id, x_request_id = live.client_id, trace_id = live.trace_id(), replica, attempts = self.session.attempts(), %end, "request failed");
        } else {
            tracing::debug!(request = %live.id, x_request_id = live.client_id, trace_id = live.trace_id(), replica, took_ms = took.as_ms(), outcome = name, "request ended");
        }
    }
}

impl Drop for Exchange {
    /// A client that has left ends its request. What a panic leaves is put in order by [`Booked`].
    fn drop(&mut self) {
        if self.booked.is_none() || std::thread::panicking() {
            return;
        }
        self.session.handle(Input::ClientGone, self.fleet.clock.now());
        while let Some(action) = self.session.poll() {
            self.perform(action);
        }
        self.close();
    }
}

fn found_dead(mut deaths: watch::Receiver<u32>) -> Death {
    // The sender is the engine's, which the attempt holds.
    Box::pin(async move { _ = deaths.changed().await })
}

/// Whether another replica would say the same. A refused key is the gateway's own trouble with this one engine.
fn is_clients_fault(status: StatusCode) -> bool {
    let own = [StatusCode::UNAUTHORIZED, StatusCode::FORBIDDEN, StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_MANY_REQUESTS];
    status.is_client_error() && !own.contains(&status)
}

/// `back_in`: when a replica may be there again, where there is none.
pub(crate) fn refusal_of(refusal: &baton_policy::Refusal, back_in: Duration) -> Refusal {
    match *refusal {
        baton_policy::Refusal::TooLong { prompt, limit } => Refusal::PromptTooLong { prompt, limit },
        baton_policy::Refusal::NeverFits { needed, limit, fits } => Refusal::NeverFits { needed, limit, fits },
        baton_policy::Refusal::NoReplica => Refusal::NoReplica { retry_after: back_in },
        baton_policy::Refusal::Overloaded { retry_after } => Refusal::Overloaded { retry_after },
    }
}

fn json_response(status: StatusCode, body: Bytes) -> Response<Body> {
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
