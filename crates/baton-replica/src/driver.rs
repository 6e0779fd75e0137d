//! The engine's own thread: commands in, tokens out.

use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
        mpsc::{Receiver, Sender},
    },
    thread,
    time::Duration,
};

use baton_engine::{Engine, Executor, NewRequest, Output, SequenceRecord, Status, SubmitError};
use baton_units::{DurationMs, RequestId, Time, Tokens};
use tokio::sync::{Notify, mpsc, oneshot};

use crate::{clock::Clock, kv_publisher::StepEvents, metrics::Metrics};

mod moves;

use moves::{Bench, Moves};
pub(crate) use moves::{Exported, HeldPrefix, MoveCommand, MoveEvent, Progress, Rest, Room, Slice, Storage, WINDOW, Written};

/// One way into the engine thread.
///
/// The channel has no bound of its own: submissions are bounded by the open connections, everything else by the submissions.
#[derive(Clone)]
pub(crate) struct EngineHandle {
    commands: Sender<Stamped>,
    shared: Arc<Shared>,
    clock: Clock,
}

/// What both sides see.
struct Shared {
    status: Mutex<Status>,
    /// Submitted and not yet seen by the engine, so that a report made during a long step does not miss them.
    pending_requests: AtomicU32,
    pending_tokens: AtomicU64,
    failed: AtomicBool,
    failure: Notify,
    next_request: AtomicU64,
    /// Client requests being answered.
    generations: AtomicU32,
    /// Of the running step, in real microseconds; 0 while none runs.
    step_predicted_us: AtomicU64,
}

struct Stamped {
    at: Time,
    command: Command,
}

enum Command {
    Submit(Box<Submission>),
    /// The client left.
    Abort(Vec<RequestId>),
    /// The text of a choice is complete.
    Stop(RequestId, u32),
    /// Requests by the ids that clients see, or all.
    AbortNamed(Option<Vec<String>>, oneshot::Sender<usize>),
    ResetPrefixCache(oneshot::Sender<()>),
    Move(MoveCommand),
    Shutdown,
}

/// A request on its way in.
pub(crate) struct Submission {
    pub(crate) request: NewRequest,
    /// The id that `/abort_requests` knows.
    pub(crate) name: String,
    /// Which of its client's prompts it is; comes back with every update.
    pub(crate) slot: usize,
    /// Must hold two updates and one per output token, so that the engine never waits for a slow client.
    pub(crate) updates: mpsc::Sender<(usize, Update)>,
}

/// News of one request. A closed channel means that the engine is gone.
#[derive(Debug)]
pub(crate) enum Update {
    Accepted,
    Refused(SubmitError),
    Output(Output),
    /// Somebody else ended it.
    Aborted,
    Failed,
}

/// The engine thread has ended and takes nothing more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EngineGone;

impl EngineHandle {
    pub(crate) fn next_id(&self) -> RequestId {
        RequestId(self.shared.next_request.fetch_add(1, Ordering::Relaxed))
    }

    /// Client requests being answered, streams included.
    pub(crate) fn generations(&self) -> u32 {
        self.shared.generations.load(Ordering::Relaxed)
    }

    pub(crate) fn begin_generation(&self) {
        self.shared.generations.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn end_generation(&self) {
        self.shared.generations.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn submit(&self, submission: Submission) -> Result<(), EngineGone> {
        if self.has_failed() {
            return Err(EngineGone);
        }
        self.shared.pending_requests.fetch_add(1, Ordering::Relaxed);
        self.shared.pending_tokens.fetch_add(submission.request.prompt.len() as u64, Ordering::Relaxed);
        self.send(Command::Submit(Box::new(submission)))
    }

    pub(crate) fn abort(&self, requests: Vec<RequestId>) {
        // When the thread is gone so is the request.
        let _ = self.send(Command::Abort(requests));
    }

    pub(crate) fn stop(&self, request: RequestId, choice: u32) {
        let _ = self.send(Command::Stop(request, choice));
    }

    /// Returns how many were asked to end, as vLLM counts: unknown ids too.
    pub(crate) async fn abort_named(&self, names: Option<Vec<String>>) -> Result<usize, EngineGone> {
        let (sender, receiver) = oneshot::channel();
        self.send(Command::AbortNamed(names, sender))?;
        receiver.await.map_err(|_| EngineGone)
    }

    pub(crate) async fn reset_prefix_cache(&self) -> Result<(), EngineGone> {
        let (sender, receiver) = oneshot::channel();
        self.send(Command::ResetPrefixCache(sender))?;
        receiver.await.map_err(|_| EngineGone)
    }

    pub(crate) fn move_sequence(&self, command: MoveCommand) -> Result<(), EngineGone> {
        self.send(Command::Move(command))
    }

    /// Model time.
    pub(crate) fn now(&self) -> Time {
        self.clock.now()
    }

    /// A span of model time in real time.
    pub(crate) fn real(&self, span: Duration) -> Duration {
        self.clock.real(span)
    }

    /// How long the engine thinks that the running step takes, in real time; zero while none runs.
    pub(crate) fn step_predicted(&self) -> Duration {
        Duration::from_micros(self.shared.step_predicted_us.load(Ordering::Relaxed))
    }

    pub(crate) fn shut_down(&self) {
        let _ = self.send(Command::Shutdown);
    }

    /// As of the last step, with what has been submitted since.
    pub(crate) fn status(&self) -> Status {
        let mut status = *self.shared.status.lock().expect("no holder panics");
        status.waiting += self.shared.pending_requests.load(Ordering::Relaxed);
        let pending = self.shared.pending_tokens.load(Ordering::Relaxed);
        status.prefill_backlog = Tokens(status.prefill_backlog.0.saturating_add(u32::try_from(pending).unwrap_or(u32::MAX)));
        status
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.shared.failed.load(Ordering::Acquire)
    }

    /// Resolves when the engine has failed.
    pub(crate) async fn failed(&self) {
        let notified = self.shared.failure.notified();
        if !self.has_failed() {
            notified.await;
        }
    }

    fn send(&self, command: Command) -> Result<(), EngineGone> {
        self.commands.send(Stamped { at: self.clock.now(), command }).map_err(|_| EngineGone)
    }
}

/// What the thread works with.
pub(crate) struct Parts {
    pub(crate) engine: Engine,
    pub(crate) executor: Box<dyn Executor + Send>,
    pub(crate) clock: Clock,
    /// Steps are waited for instead of measured.
    pub(crate) modelled: bool,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) kv_events: Option<mpsc::Sender<StepEvents>>,
    /// Where requests of the migration protocol are told of; `None` runs none.
    pub(crate) move_events: Option<mpsc::UnboundedSender<MoveEvent>>,
}

/// Starts the thread. It ends after [`EngineHandle::shut_down`], or when the engine fails.
pub(crate) fn start(mut parts: Parts) -> std::io::Result<(EngineHandle, thread::JoinHandle<()>)> {
    let (sender, commands) = std::sync::mpsc::channel();
    let shared = Arc::new(Shared {
        status: Mutex::new(parts.engine.status()),
        pending_requests: AtomicU32::new(0),
        pending_tokens: AtomicU64::new(0),
        failed: AtomicBool::new(false),
        failure: Notify::new(),
        next_request: AtomicU64::new(0),
        generations: AtomicU32::new(0),
        step_predicted_us: AtomicU64::new(0),
    });
    let handle = EngineHandle { commands: sender, shared: Arc::clone(&shared), clock: parts.clock };
    let moves = Moves::new(parts.move_events.take());
    let mut driver = Driver { parts, shared, commands, held: None, live: BTreeMap::new(), moves, now: Time::ZERO };
    let thread = thread::Builder::new().name("engine".into()).spawn(move || driver.run_to_the_end())?;
    Ok((handle, thread))
}

struct Driver {
    parts: Parts,
    shared: Arc<Shared>,
    commands: Receiver<Stamped>,
    /// Came after the step that is to be planned.
    held: Option<Stamped>,
    live: BTreeMap<RequestId, Live>,
    moves: Moves,
    /// Model time up to which the engine has worked.
    now: Time,
}

/// A request that the engine has.
struct Live {
    name: String,
    slot: usize,
    updates: mpsc::Sender<(usize, Update)>,
    arrival: Time,
    prompt_tokens: Tokens,
    choices: Vec<ChoiceTimes>,
}

#[derive(Clone, Copy, Default)]
struct ChoiceTimes {
    first_token: Option<Time>,
    last_token: Time,
    tokens: u32,
    cached: Tokens,
    ended: bool,
}

impl Driver {
    fn run_to_the_end(&mut self) {
        // Whatever panics below, no client may be left waiting.
        if catch_unwind(AssertUnwindSafe(|| self.run())).is_err() {
            tracing::error!("the engine failed; its requests end with an error and the replica stops");
            self.fail();
        }
    }

    fn run(&mut self) {
        while self.take_commands() {
            let computed = self.step();
            self.moves.stepped(computed);
            if computed {
                continue;
            }
            if self.moves.has_deferred() {
                continue;
            }
            self.publish_events();
            self.publish_status();
            if !self.let_time_pass(|commands| commands.recv().ok()) {
                return;
            }
        }
    }

    /// Nothing is being computed, so it becomes the time of what comes next; false when nothing does.
    fn let_time_pass(&mut self, next: impl FnOnce(&Receiver<Stamped>) -> Option<Stamped>) -> bool {
        self.held = self.held.take().or_else(|| next(&self.commands));
        let at = self.held.as_ref().map(|stamped| stamped.at);
        self.now = self.now.max(at.unwrap_or_default());
        at.is_some()
    }

    /// Obeys the commands that came before the next step; false when it is to end.
    fn take_commands(&mut self) -> bool {
        if !self.parts.modelled {
            self.now = self.parts.clock.now();
        }
        let mut bench = Bench { engine: &mut self.parts.engine, executor: self.parts.executor.as_mut(), now: self.now };
        self.moves.next_boundary(&mut bench);
        let mut submitted = (0, 0);
        while let Some(stamped) = self.held.take().or_else(|| self.commands.try_recv().ok()) {
            if stamped.at > self.now {
                // An emulated engine that is behind the clock must not see the future.
                self.held = Some(stamped);
                break;
            }
            match stamped.command {
                Command::Submit(submission) => {
                    submitted.0 += 1;
                    submitted.1 += submission.request.prompt.len() as u64;
                    self.submit(*submission, stamped.at);
                }
                Command::Abort(requests) => requests.into_iter().for_each(|request| self.abort(request)),
                Command::Stop(request, choice) => self.stop(request, choice),
                Command::AbortNamed(names, done) => {
                    let _ = done.send(self.abort_named(names));
                }
                Command::ResetPrefixCache(done) => {
                    self.parts.engine.reset_prefix_cache();
                    let _ = done.send(());
                }
                Command::Move(command) => {
                    let mut bench = Bench { engine: &mut self.parts.engine, executor: self.parts.executor.as_mut(), now: self.now };
                    self.moves.obey(command, &mut bench);
                }
                Command::Shutdown => return false,
            }
        }
        if submitted.0 > 0 {
            self.publish_status();
            self.shared.pending_requests.fetch_sub(submitted.0, Ordering::Relaxed);
            self.shared.pending_tokens.fetch_sub(submitted.1, Ordering::Relaxed);
        }
        true
    }

    /// Plans, carries out and books one step; false when there is nothing to compute.
    fn step(&mut self) -> bool {
        let start = self.now;
        let Some(plan) = self.parts.engine.plan(start) else { return false };
        let tokens: usize = plan.batch.rows.iter().map(|row| row.tokens.len()).sum();
        let fit = self.shared.status.lock().expect("no holder panics").step_fit;
        let predicted = self.parts.clock.real(Duration::from_ms(fit.step_s(&plan.batch.load()) * 1e3));
        self.shared.step_predicted_us.store(predicted.as_micros() as u64, Ordering::Relaxed);
        let result = plan.run(self.parts.executor.as_mut());
        let (end, lag) = if self.parts.modelled {
            // Never from the moment of waking: being late once must not make every later step late.
            let end = start + result.elapsed;
            (end, self.parts.clock.sleep_until(end))
        } else {
            (self.parts.clock.now(), Duration::ZERO)
        };
        let outputs = self.parts.engine.complete(result, end);
        self.now = end;
        self.shared.step_predicted_us.store(0, Ordering::Relaxed);
        self.parts.metrics.step(tokens as u32, lag);
        // Before the tokens: whoever routes by the index sees the blocks no later than the answer.
        self.publish_events();
        self.publish_status();
        for output in outputs {
            self.deliver(output);
        }
        true
    }

    fn submit(&mut self, submission: Submission, arrival: Time) {
        let Submission { request, name, slot, updates } = submission;
        let id = request.id;
        let choices = vec![ChoiceTimes::default(); request.choices as usize];
        let prompt_tokens = Tokens(request.prompt.len() as u32);
        let accepted = self.parts.engine.submit(request, arrival);
        let update = accepted.map_or_else(Update::Refused, |()| Update::Accepted);
        let is_accepted = matches!(update, Update::Accepted);
        let _ = updates.try_send((slot, update));
        if is_accepted {
            self.live.insert(id, Live { name, slot, updates, arrival, prompt_tokens, choices });
        }
    }

    fn abort(&mut self, request: RequestId) {
        self.parts.engine.abort(request);
        if let Some(live) = self.live.remove(&request) {
            for times in live.choices.iter().filter(|times| !times.ended) {
                self.parts.metrics.finished(&live.record(times, self.now));
            }
        }
    }

    fn stop(&mut self, request: RequestId, choice: u32) {
        self.parts.engine.stop(request, choice);
        self.end_choice(request, choice, None);
    }

    fn abort_named(&mut self, names: Option<Vec<String>>) -> usize {
        let wanted = |live: &Live| names.as_ref().is_none_or(|names| names.contains(&live.name));
        let found: Vec<RequestId> = self.live.iter().filter(|(_, live)| wanted(live)).map(|(&id, _)| id).collect();
        for &request in &found {
            if let Some(live) = self.live.get(&request) {
                let _ = live.updates.try_send((live.slot, Update::Aborted));
            }
            self.abort(request);
        }
        names.map_or(found.len(), |names| names.len())
    }

    fn deliver(&mut self, output: Output) {
        let Some(live) = self.live.get_mut(&output.request) else {
            self.moves.deliver(output, self.now, &self.parts.metrics);
            return;
        };
        let times = &mut live.choices[output.choice as usize];
        match times.first_token {
            None => {
                times.first_token = Some(self.now);
                self.parts.metrics.first_token(self.now.since(live.arrival));
            }
            Some(_) => self.parts.metrics.next_token(self.now.since(times.last_token)),
        }
        times.last_token = self.now;
        times.tokens = output.index + 1;
        times.cached = output.cached_tokens;
        let (request, choice) = (output.request, output.choice);
        let record = output.finish.as_ref().map(|finish| finish.record);
        // The channel holds all that a request can give; a closed one means that its abort is on the way.
        let _ = live.updates.try_send((live.slot, Update::Output(output)));
        if record.is_some() {
            self.end_choice(request, choice, record);
        }
    }

    /// Books the end of a choice; the engine's record where it has one.
    fn end_choice(&mut self, request: RequestId, choice: u32, record: Option<SequenceRecord>) {
        let Some(live) = self.live.get_mut(&request) else { return };
        let times = &mut live.choices[choice as usize];
        if std::mem::replace(&mut times.ended, true) {
            return;
        }
        let times = *times;
        self.parts.metrics.finished(&record.unwrap_or_else(|| live.record(&times, self.now)));
        if live.choices.iter().all(|times| times.ended) {
            self.live.remove(&request);
        }
    }

    fn publish_events(&mut self) {
        let Some(kv_events) = &self.parts.kv_events else { return };
        let events = self.parts.engine.take_events();
        if !events.is_empty() {
            let _ = kv_events.blocking_send(StepEvents { timestamp_s: self.parts.clock.unix_s(self.now), events });
        }
    }

    fn publish_status(&self) {
        *self.shared.status.lock().expect("no holder panics") = self.parts.engine.status();
    }

    /// Tells everybody that nothing more will come.
    fn fail(&mut self) {
        self.shared.failed.store(true, Ordering::Release);
        let mut failed = 0;
        for live in std::mem::take(&mut self.live).into_values() {
            failed += live.choices.iter().filter(|times| !times.ended).count();
            let _ = live.updates.try_send((live.slot, Update::Failed));
        }
        self.parts.metrics.failed(failed as u64);
        self.shared.failure.notify_waiters();
    }
}

impl Live {
    fn record(&self, times: &ChoiceTimes, now: Time) -> SequenceRecord {
        SequenceRecord {
            arrival: self.arrival,
            first_scheduled: None,
            first_token: times.first_token,
            finished: now,
            prompt_tokens: self.prompt_tokens,
            output_tokens: Tokens(times.tokens),
            cached_tokens: times.cached,
            preemptions: 0,
        }
    }
}

#[cfg(test)]
mod tests;
