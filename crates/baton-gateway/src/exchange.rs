//! One request on its way: the shell around [`Session`]. It carries facts from engine, client and clock into the machine and does
//! what the machine says; it decides nothing by itself.

mod books;
mod by_tokens;
mod carried;
mod copy;
mod lag;
mod leaving;
mod outlet;
mod placing;
mod record;
mod wire;

use std::{
    convert::Infallible,
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::body::Body;
use baton_kv::BlockKey;
use baton_policy::Verdict;
use baton_session::{Action, Answer, End, Epoch, Fault, Input, Limits, Owner, Session, SessionConfig};
use baton_units::{ReplicaId, Time, Tokens};
use baton_wire::{openai::Usage, sse};
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
    wire::Wire,
};
use crate::{
    carry::RunEvent,
    chunk::ClientView,
    engine::Engine,
    fleet::{Booked, Fleet, REPLICA_HEADER, Stage},
    intake::Intake,
    live::{Live, LiveState},
    prompt::KeyChain,
    pulse::Listener,
    refusal::Refusal,
    tenants::{Grant, Padding},
    upstream::Arrived,
};

pub(crate) use self::{leaving::LeaveOrder, placing::refusal_of};

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
        if !self.carry(&engine, owner) && !self.begin_by_tokens(&engine, owner) {
            self.ask(engine, owner);
        }
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

fn json_response(status: StatusCode, body: Bytes) -> Response<Body> {
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
