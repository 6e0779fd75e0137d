//! One request on its way: the shell around [`Session`]. It carries facts from engine, client and clock into the machine and does
//! what the machine says; it decides nothing by itself.

mod copy;
mod outlet;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use axum::{body::Body, response::IntoResponse};
use baton_policy::{Arrival, Outcome, Placed, Verdict};
use baton_session::{Action, Answer, End, Epoch, Fault, Input, Limits, Offer, Owner, Session, SessionConfig};
use baton_units::{DurationMs, ReplicaId, Time, Tokens};
use baton_wire::{
    openai::Usage,
    sse::{self, Event},
};
use bytes::Bytes;
use http::{HeaderValue, Method, Response, StatusCode, header};
use http_body_util::Full;
use tokio::sync::{oneshot, watch};

use self::outlet::{Outlet, Stirring};
use crate::{
    assemble::Assembler,
    chunk::{Chunk, ClientView, Reading},
    engine::Engine,
    fleet::{Fleet, Placing, Stage},
    intake::{Intake, Mode},
    live::{Live, LiveState},
    prompt::KeyChain,
    refusal::{NO_REPLICA_RETRY, Refusal},
    reserved,
    upstream::{self, Arrived, Attempt, Expect},
};

/// A busy replica gets its time for a first token this often again; a request that it has lost ends then.
const EXTENSIONS_MAX: u32 = 9;

/// A request that is understood, tokenized and known to name a model of the fleet.
pub(crate) struct Admitted {
    pub(crate) intake: Intake,
    pub(crate) live: Arc<Live>,
    pub(crate) chain: KeyChain,
    /// The chain's tokens are the engine's, so that output tokens continue it.
    pub(crate) exact: bool,
    /// Replicas that do not serve the model.
    pub(crate) excluded: Vec<ReplicaId>,
}

/// Starts a request and gives the client's response as soon as its status is known.
pub(crate) async fn run(fleet: Arc<Fleet>, admitted: Admitted) -> Response<Body> {
    let (tell, told) = oneshot::channel();
    let client_id = admitted.live.client_id.clone();
    // A task of its own, so that a request is booked to its end even when its client leaves.
    tokio::spawn(Exchange::new(fleet, admitted, tell).run());
    let mut response = told.await.unwrap_or_else(|_| Refusal::Ended(End::Refused).into_response());
    if let Ok(id) = HeaderValue::from_str(&client_id) {
        response.headers_mut().insert("x-request-id", id);
    }
    response
}

struct Exchange {
    fleet: Arc<Fleet>,
    admitted: Admitted,
    session: Session,
    outlet: Outlet,
    verdict: Option<oneshot::Receiver<Verdict>>,
    refusal: Option<Refusal>,
    attempt: Option<Running>,
    view: ClientView,
    /// The engine's whole answer or error, for the end.
    answer: Option<Response<Body>>,
    usage: Option<Usage>,
    first_token_at: Option<Time>,
    last_token_at: Option<Time>,
    held_since: Option<Time>,
    end: Option<End>,
    /// Nothing else ran on the replica when the attempt began, so its TTFT is a measurement.
    alone: bool,
    sent_at: Time,
    /// Times that the current attempt got more time for its first token because its replica was busy.
    extensions: u32,
    last_replica: Option<ReplicaId>,
}

/// The attempt under way.
struct Running {
    attempt: Attempt,
    engine: Arc<Engine>,
    epoch: Epoch,
    assembler: Option<Assembler>,
    /// Next output index of each choice, as this engine counts.
    next: BTreeMap<u32, u32>,
    /// Tells that the engine was found dead, as after a host went away without a word. `None` where the answer comes whole: an engine
    /// that shows no progress may only be slow to answer probes.
    deaths: Option<watch::Receiver<u32>>,
}

/// What woke the loop.
enum Wake {
    Client(Stirring),
    Closing,
    Timeout,
    Verdict(Option<Verdict>),
    Arrived(Arrived),
    /// The replica was found dead before its first token.
    Died,
}

impl Exchange {
    fn new(fleet: Arc<Fleet>, admitted: Admitted, tell: oneshot::Sender<Response<Body>>) -> Self {
        let front = &fleet.front;
        let limits = Limits { attempts: front.attempts, stall: front.stall_timeout, total: front.request_timeout };
        let intake = &admitted.intake;
        // Whether every choice must finish depends on the engine's kind, which is not known yet: see `done`.
        let config = SessionConfig { limits, choices: None, restartable: !intake.wishes.stream };
        let id = format!("{}{}", intake.api.id_prefix(), admitted.live.client_id);
        Self {
            session: Session::new(config, admitted.live.arrived),
            outlet: Outlet::new(tell),
            verdict: None,
            refusal: None,
            attempt: None,
            view: ClientView::new(intake.wishes, id),
            answer: None,
            usage: None,
            first_token_at: None,
            last_token_at: None,
            held_since: None,
            end: None,
            alone: false,
            sent_at: Time::ZERO,
            extensions: 0,
            last_replica: None,
            fleet,
            admitted,
        }
    }

    async fn run(mut self) {
        let _booked = self.fleet.admit(self.admitted.live.clone());
        loop {
            while let Some(action) = self.session.poll() {
                self.perform(action);
            }
            if self.session.is_ended() {
                break;
            }
            let wake = self.wait().await;
            self.take(wake);
        }
        self.attempt = None;
        if let Some(told) = self.verdict.take() {
            self.fleet.decline(told);
        }
        self.book_end();
        self.outlet.flush(self.fleet.front.stall_timeout).await;
    }

    async fn wait(&mut self) -> Wake {
        let due = self.fleet.clock.instant(self.session.poll_timeout().unwrap_or(Time::NEVER));
        let blocked = self.outlet.is_blocked();
        let deaths = self.attempt.as_ref().filter(|_| self.session.awaits_first_token()).and_then(|running| running.deaths.clone());
        tokio::select! {
            biased;
            stirring = self.outlet.stirring() => Wake::Client(stirring),
            () = self.fleet.reached(Stage::Closing) => Wake::Closing,
            verdict = told(&mut self.verdict) => Wake::Verdict(verdict),
            arrived = next(&mut self.attempt), if !blocked => Wake::Arrived(arrived),
            () = found_dead(deaths) => Wake::Died,
            () = tokio::time::sleep_until(due) => Wake::Timeout,
        }
    }

    fn take(&mut self, wake: Wake) {
        let now = self.fleet.clock.now();
        match wake {
            Wake::Client(Stirring::Left) => self.session.handle(Input::ClientGone, now),
            Wake::Client(Stirring::Took) => {
                if !self.outlet.is_blocked() {
                    self.session.handle(Input::ClientReady, now);
                }
            }
            Wake::Closing => self.session.handle(Input::DrainDeadline, now),
            Wake::Timeout => {
                if self.is_only_busy() {
                    self.extensions += 1;
                    self.session.handle(Input::ReplicaAlive, now);
                }
                self.session.handle(Input::Timeout, now);
            }
            Wake::Verdict(verdict) => {
                self.verdict = None;
                if let Some(since) = self.held_since.take() {
                    self.fleet.metrics.held(now.since(since));
                }
                self.decided(verdict.unwrap_or(Verdict::Refuse(baton_policy::Refusal::NoReplica)));
            }
            Wake::Arrived(arrived) => self.arrived(arrived),
            Wake::Died => self.died(),
        }
    }

    /// Gives up a dead replica where another one can take the request; where none can, it may still come back to life.
    fn died(&mut self) {
        let Some(running) = &mut self.attempt else { return };
        running.deaths = None;
        let epoch = running.epoch;
        if self.fleet.any_ready() {
            self.attempt_failed(epoch, Fault::Unreachable);
        }
    }

    /// The replica gave others output since this attempt began, or since it was last asked: a queue, not a hang.
    fn is_only_busy(&self) -> bool {
        let since = self.sent_at + self.first_token_within(self.last_replica) * self.extensions;
        self.session.awaits_first_token()
            && self.extensions < EXTENSIONS_MAX
            && self.attempt.as_ref().is_some_and(|running| running.engine.spoke_at() > since)
    }

    // What the machine says.

    fn perform(&mut self, action: Action) {
        match action {
            Action::Place { excluded } => self.place(excluded),
            Action::Start(owner) => self.start(owner),
            Action::Stop(_) => self.attempt = None,
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

    fn place(&mut self, mut excluded: Vec<ReplicaId>) {
        self.admitted.chain.forget_output();
        let Admitted { intake, live, chain, excluded: lacking, .. } = &self.admitted;
        live.set(LiveState::Held, None);
        excluded.extend_from_slice(lacking);
        let arrival = Arrival {
            request: live.id,
            keys: chain.keys(),
            prompt: live.prompt,
            max_output: intake.max_output,
            session: intake.identity.session,
            program: intake.identity.program,
            priority: intake.identity.priority,
            excluded,
        };
        match self.fleet.place(arrival) {
            Placing::Now(verdict) => self.decided(verdict),
            Placing::Later(told) => {
                self.held_since = Some(self.fleet.clock.now());
                self.verdict = Some(told);
            }
        }
    }

    fn decided(&mut self, verdict: Verdict) {
        let now = self.fleet.clock.now();
        match verdict {
            Verdict::Run(Placed { replica, copy }) => {
                if let Some(copy) = copy {
                    copy::send(&self.fleet, &self.admitted, copy);
                }
                let first_token_within = self.first_token_within(Some(replica));
                self.session.handle(Input::Placed { replica, first_token_within }, now);
            }
            Verdict::Hold => {}
            Verdict::Refuse(refusal) => {
                self.refusal = Some(refusal_of(&refusal));
                self.session.handle(Input::Refused, now);
            }
        }
    }

    /// How long the replica may take for its first token before it is taken for hung.
    fn first_token_within(&self, replica: Option<ReplicaId>) -> Duration {
        let front = &self.fleet.front;
        let engine = replica.and_then(|id| self.fleet.engine(id));
        if engine.is_none_or(|engine| self.admitted.intake.mode(engine.config.kind, front.assemble) == Mode::Whole) {
            // The first token comes with the last: no silence is too long.
            return front.request_timeout;
        }
        let decision = self.fleet.peek_router(|router, _| router.decision(self.admitted.live.id));
        let predicted =
            decision.map_or(Duration::ZERO, |decision| Duration::from_ms(decision.predicted_ttft_ms * front.first_token_factor));
        predicted.max(front.first_token_timeout)
    }

    fn start(&mut self, owner: Owner) {
        let now = self.fleet.clock.now();
        let Some(engine) = self.fleet.engine(owner.replica) else {
            return self.session.handle(Input::Failed { epoch: owner.epoch, fault: Fault::Unreachable }, now);
        };
        let Admitted { intake, live, .. } = &self.admitted;
        let kind = engine.config.kind;
        let mode = intake.mode(kind, self.fleet.front.assemble);
        let takes_priority = reserved::takes_priority(kind, engine.config.priorities);
        let body = intake.upstream_body(kind, takes_priority, &live.model, mode);
        let request = upstream::request(Method::POST, engine.url().join(intake.api.path()), engine.config.key.as_deref())
            .header(header::CONTENT_TYPE, "application/json")
            .header("x-request-id", self.fleet.upstream_id(live.id, owner.epoch.0))
            .body(Full::new(Bytes::from(body)))
            .expect("an engine's address and a minted id make a request");
        let expect = if mode == Mode::Whole { Expect::Whole } else { Expect::Events };
        let assembler = (mode == Mode::Assemble)
            .then(|| Assembler::new(intake.api, intake.wishes, format!("{}{}", intake.api.id_prefix(), live.client_id)));
        live.set(LiveState::Prefill, Some(owner.replica));
        live.reset_output();
        (self.usage, self.first_token_at, self.last_token_at) = (None, None, None);
        self.fleet.metrics.attempt(owner.replica);
        self.alone = self.fleet.peek_router(|router, now| {
            router.fleet(now).iter().find(|status| status.id == owner.replica).is_some_and(|status| status.in_flight == 1)
        });
        self.sent_at = now;
        self.extensions = 0;
        self.last_replica = Some(owner.replica);
        let deaths = (mode != Mode::Whole).then(|| engine.deaths());
        self.attempt = Some(Running {
            attempt: self.fleet.upstream.start(request, expect),
            engine,
            epoch: owner.epoch,
            assembler,
            next: BTreeMap::new(),
            deaths,
        });
    }

    fn answer(&mut self, answer: Answer) {
        let response = match answer {
            Answer::Complete => {
                let Some(whole) = self.answer.take() else { return self.send(Bytes::from_static(sse::DONE)) };
                whole
            }
            Answer::Rejection => match self.answer.take() {
                Some(rejection) if self.outlet.is_open() => rejection,
                _ => return self.outlet.fail(&Refusal::Ended(End::Rejected)),
            },
            Answer::Refusal => {
                let refusal = self.refusal.take().unwrap_or(Refusal::NoReplica { retry_after: NO_REPLICA_RETRY });
                return self.outlet.fail(&refusal);
            }
            Answer::Error(end) => return self.outlet.fail(&Refusal::Ended(end)),
        };
        self.outlet.respond(response);
    }

    // What the engine says.

    fn arrived(&mut self, arrived: Arrived) {
        let Some(running) = &self.attempt else { return };
        let epoch = running.epoch;
        let outcome = match arrived {
            Arrived::Event(event) => self.event(&event),
            Arrived::Answer { status, headers, body } => self.whole(status, &headers, &body),
            Arrived::End => Err(Fault::Truncated),
            Arrived::Failed(fault) => Err(fault),
        };
        if let Err(fault) = outcome {
            self.attempt_failed(epoch, fault);
        }
    }

    fn attempt_failed(&mut self, epoch: Epoch, fault: Fault) {
        self.fleet.metrics.fault(fault);
        self.attempt = None;
        self.session.handle(Input::Failed { epoch, fault }, self.fleet.clock.now());
    }

    fn event(&mut self, event: &Event) -> Result<(), Fault> {
        if event.is_done() {
            return self.done();
        }
        let Some(data) = &event.data else { return Ok(()) };
        match Reading::of(self.admitted.intake.api, data)? {
            Reading::Chunk(chunk) => self.chunk(*chunk),
            Reading::Error(error) => {
                let code = error.map_or(0, |error| error.code);
                tracing::debug!(code, "the engine reported an error in its stream");
                Err(Fault::InBand)
            }
        }
    }

    fn chunk(&mut self, chunk: Chunk) -> Result<(), Fault> {
        if chunk.pieces.iter().any(super::chunk::Piece::is_abort) {
            return Err(Fault::Aborted);
        }
        // The books keep a place for each choice up to the highest.
        if chunk.pieces.iter().any(|piece| piece.choice >= self.admitted.intake.choices) {
            return Err(Fault::Garbled);
        }
        let now = self.fleet.clock.now();
        let Some(running) = &mut self.attempt else { return Ok(()) };
        let epoch = running.epoch;
        let mut passes = true;
        let mut tokens = 0;
        for piece in &chunk.pieces {
            let index = running.next.entry(piece.choice).or_default();
            let offer = self.session.offer(epoch, piece.choice, *index, piece.count, now);
            passes &= matches!(offer, Offer::Deliver { .. });
            *index += piece.count;
            tokens += piece.count;
            if piece.finish.is_some() {
                self.session.handle(Input::ChoiceFinished { epoch, choice: piece.choice }, now);
            }
            if piece.choice == 0 && self.admitted.exact {
                self.admitted.chain.extend(&piece.token_ids);
            }
        }
        if !passes {
            return Ok(());
        }
        running.engine.spoke(now);
        if self.first_token_at.is_none() && tokens > 0 {
            running.engine.succeeded();
        }
        if let Some(usage) = &chunk.usage {
            self.usage = Some(usage.clone());
        }
        if let Some(assembler) = &mut running.assembler {
            assembler.push(&chunk)?;
        }
        let begins = tokens > 0 || chunk.pieces.iter().any(|piece| piece.finish.is_some());
        if begins {
            self.output(tokens, now);
        }
        if self.admitted.intake.wishes.stream
            && let Some(event) = self.view.event(chunk)
        {
            self.send(event);
        }
        Ok(())
    }

    /// Sends an event. While the client is behind, the engine's silence is no fault of the engine.
    fn send(&mut self, event: Bytes) {
        if self.outlet.send(event) {
            self.session.handle(Input::ClientBlocked, self.fleet.clock.now());
        }
    }

    /// Books output and tells the router of it.
    fn output(&mut self, tokens: u32, now: Time) {
        let live = &self.admitted.live;
        live.add_output(tokens);
        let cached = self.usage.as_ref().and_then(Usage::cached_tokens).map(Tokens);
        if self.first_token_at.is_none() {
            self.first_token_at = Some(now);
            live.set(LiveState::Decode, self.session.owner().map(|owner| owner.replica));
            self.fleet.metrics.first_token(now.since(live.arrived));
            self.fleet.with_router(|router, now| {
                router.first_token(live.id, cached, now);
                router.output_tokens(live.id, tokens, now);
            });
        } else {
            if let Some(last) = self.last_token_at {
                self.fleet.metrics.token_gap(now.since(last));
            }
            self.fleet.peek_router(|router, now| router.output_tokens(live.id, tokens, now));
        }
        self.last_token_at = Some(now);
    }

    /// `[DONE]`: the engine says that this is all.
    fn done(&mut self) -> Result<(), Fault> {
        let now = self.fleet.clock.now();
        let Some(mut running) = self.attempt.take() else { return Ok(()) };
        let epoch = running.epoch;
        let finished = running.next.len() as u32;
        if running.engine.config.kind.finishes_every_choice() && finished < self.admitted.intake.choices {
            self.attempt = Some(running);
            return Err(Fault::Truncated);
        }
        if let Some(assembler) = running.assembler.take() {
            self.answer = Some(json_response(StatusCode::OK, assembler.finish().into()));
        }
        self.observe(&running.engine);
        self.session.handle(Input::Completed { epoch }, now);
        Ok(())
    }

    /// An answer in one piece.
    fn whole(&mut self, status: StatusCode, headers: &http::HeaderMap, body: &Bytes) -> Result<(), Fault> {
        let now = self.fleet.clock.now();
        let Some(running) = &self.attempt else { return Ok(()) };
        let epoch = running.epoch;
        if !status.is_success() && !is_clients_fault(status) {
            return Err(Fault::Status(status.as_u16()));
        }
        let mut response = json_response(status, body.clone());
        if let Some(kind) = headers.get(header::CONTENT_TYPE) {
            response.headers_mut().insert(header::CONTENT_TYPE, kind.clone());
        }
        self.answer = Some(response);
        if !status.is_success() {
            self.attempt = None;
            self.session.handle(Input::Rejected { epoch }, now);
            return Ok(());
        }
        let engine = running.engine.clone();
        engine.spoke(now);
        engine.succeeded();
        self.attempt = None;
        self.usage = serde_json::from_slice::<crate::json::RawObject>(body).ok().and_then(|answer| answer.read("usage").ok().flatten());
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
        if let Some(step) = engine.observe_prefill(new, cached, first_token_at.since(self.sent_at), first_token_at) {
            self.fleet.peek_router(|router, _| router.update_step(engine.id, step));
        }
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
        self.fleet.finished(live.id, outcome, keys);
        self.fleet.retire(live.id);
        let took = self.fleet.clock.now().since(live.arrived);
        let route = self.admitted.intake.api.path();
        self.fleet.metrics.request_ended(route, name, took);
        let level_is_warn = matches!(end, End::Failed(_) | End::Exhausted(_) | End::TimedOut(_));
        let replica = self.last_replica.map(|id| id.to_string()).unwrap_or_default();
        if level_is_warn {
            tracing::warn!(request = %live.id, x_request_id = live.client_id, replica, attempts = self.session.attempts(), %end, "request failed");
        } else {
            tracing::debug!(request = %live.id, x_request_id = live.client_id, replica, took_ms = took.as_ms(), outcome = name, "request ended");
        }
    }
}

/// The router's later verdict; `None` when it forgot the request.
async fn told(verdict: &mut Option<oneshot::Receiver<Verdict>>) -> Option<Verdict> {
    match verdict {
        Some(verdict) => verdict.await.ok(),
        None => std::future::pending().await,
    }
}

async fn found_dead(deaths: Option<watch::Receiver<u32>>) {
    match deaths {
        // The sender is the engine's, which the attempt holds.
        Some(mut deaths) => _ = deaths.changed().await,
        None => std::future::pending().await,
    }
}

async fn next(attempt: &mut Option<Running>) -> Arrived {
    match attempt {
        Some(running) => running.attempt.next().await,
        None => std::future::pending().await,
    }
}

/// Whether another replica would say the same. A refused key is the gateway's own trouble with this one engine.
fn is_clients_fault(status: StatusCode) -> bool {
    let own = [StatusCode::UNAUTHORIZED, StatusCode::FORBIDDEN, StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_MANY_REQUESTS];
    status.is_client_error() && !own.contains(&status)
}

fn refusal_of(refusal: &baton_policy::Refusal) -> Refusal {
    match *refusal {
        baton_policy::Refusal::TooLong { prompt, limit } => Refusal::PromptTooLong { prompt, limit },
        baton_policy::Refusal::NeverFits { needed, limit, fits } => Refusal::NeverFits { needed, limit, fits },
        baton_policy::Refusal::NoReplica => Refusal::NoReplica { retry_after: NO_REPLICA_RETRY },
        baton_policy::Refusal::Overloaded { retry_after } => Refusal::Overloaded { retry_after },
    }
}

fn json_response(status: StatusCode, body: Bytes) -> Response<Body> {
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
