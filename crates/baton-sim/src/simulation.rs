mod fetching;
mod moving;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use baton_kv::{BlockKey, KeyDomain, KvEventBatch, chain_keys};
use baton_policy::{Arrival, DecisionRecord, Discipline, Outcome as End, Placed, Refusal, ReplicaSpec, ReplicaState, Router, Slo, Verdict};
use baton_units::{Blocks, Incarnation, Priority, ReplicaId, RequestId, Time, Tokens};

use crate::{
    ClientRequest, DrainRecord, EngineModel, EngineOutput, EngineRequest, EngineShape, EventQueue, Outcome, RequestOutcome, Scenario,
    ScheduledEngine, SerialEngine, TimedEngine, Workload,
};
use fetching::Fetching;
use moving::{Moment, Moving};

/// Plays a scenario to its end: until all clients have their answers and all messages have arrived.
pub fn run(scenario: &Scenario) -> Outcome {
    let mut simulation = Simulation::new(scenario);
    simulation.start();
    while let Some((now, event)) = simulation.queue.pop() {
        simulation.handle(event, now);
    }
    simulation.into_outcome()
}

#[derive(Debug)]
enum Event {
    Arrive(Box<Coming>),
    /// A request reaches a replica.
    Submit {
        replica: usize,
        incarnation: u64,
        request: EngineRequest,
    },
    /// A replica's own next moment.
    Wake {
        replica: usize,
        incarnation: u64,
    },
    Output {
        replica: usize,
        incarnation: u64,
        output: EngineOutput,
    },
    CacheEvents {
        replica: usize,
        incarnation: u64,
        batch: KvEventBatch,
    },
    ReportDue {
        replica: usize,
        incarnation: u64,
    },
    Report {
        replica: usize,
        incarnation: u64,
        report: baton_policy::LoadReport,
    },
    Die(usize),
    Return(usize),
    RouterTimeout,
    Drain(usize),
    LookForMoves,
    Move(Moment),
    Fetch(Fetching),
}

/// A request on its way to the router.
#[derive(Debug)]
struct Coming {
    client: ClientRequest,
    priority: Priority,
    attempt: u32,
}

struct Simulation<'a> {
    scenario: &'a Scenario,
    queue: EventQueue<Event>,
    router: Router,
    workload: Workload,
    replicas: Vec<Replica>,
    /// For losses on links, apart from the workload's and the router's generators.
    rng: fastrand::Rng,
    /// For what clients draw.
    clients_rng: fastrand::Rng,
    root: BlockKey,
    live: BTreeMap<RequestId, Live>,
    outcomes: Vec<RequestOutcome>,
    router_wakes_at: Option<Time>,
    /// Arrivals in the queue.
    arrivals_due: usize,
    moving: Option<Moving>,
    tally: Tally,
}

struct Replica {
    engine: Box<dyn TimedEngine>,
    incarnation: u64,
    alive: bool,
    wakes_at: Option<Time>,
    /// Batches of cache events sent, all kept for replay.
    published: Vec<KvEventBatch>,
    /// The latest batch was lost: only the next one would show it.
    tail_lost: bool,
    busy_before_ms: f64,
    preemptions_before: u64,
    /// Moments of moves that wait for the end of a step.
    at_boundary: Vec<Moment>,
    /// Parts of fetches that do.
    fetching: Vec<Fetching>,
}

/// A request between its arrival and its end.
struct Live {
    client: Option<Box<Coming>>,
    place: usize,
    keys: Arc<[BlockKey]>,
    prompt: Arc<[u32]>,
    output: u32,
    tokens: Vec<u32>,
    sent_to: Option<(usize, u64)>,
    failed_on: Vec<ReplicaId>,
}

#[derive(Default)]
struct Tally {
    sent: Vec<u32>,
    copies: u32,
    fetches: u32,
    retries: u32,
    held: u32,
    violations: Vec<String>,
    drains: Vec<DrainRecord>,
}

impl<'a> Simulation<'a> {
    fn new(scenario: &'a Scenario) -> Self {
        let replica = |_| Replica {
            engine: new_engine(scenario),
            incarnation: 1,
            alive: true,
            wakes_at: None,
            published: Vec::new(),
            tail_lost: false,
            busy_before_ms: 0.0,
            preemptions_before: 0,
            at_boundary: Vec::new(),
            fetching: Vec::new(),
        };
        let domain = KeyDomain { model: &scenario.router.model, adapter: None, salt: None };
        Self {
            scenario,
            queue: EventQueue::default(),
            router: Router::new(scenario.router.clone(), scenario.seed),
            workload: Workload::new(scenario.workload, scenario.shape, scenario.seed),
            replicas: (0..scenario.replicas).map(replica).collect(),
            rng: fastrand::Rng::with_seed(scenario.seed ^ 0x5eed),
            clients_rng: fastrand::Rng::with_seed(scenario.seed ^ 0xc11e),
            root: domain.root(),
            live: BTreeMap::new(),
            outcomes: Vec::new(),
            router_wakes_at: None,
            arrivals_due: 0,
            moving: scenario.moves.as_ref().map(Moving::new),
            tally: Tally { sent: vec![0; scenario.replicas], ..Tally::default() },
        }
    }

    fn start(&mut self) {
        for replica in 0..self.replicas.len() {
            self.router.upsert_replica(self.spec(replica), Time::ZERO);
            self.tell_peer(replica);
            self.schedule_report(replica, Time::ZERO);
        }
        for request in self.workload.first().into_iter().chain(self.scenario.also.iter().cloned()) {
            self.expect_arrival(request);
        }
        for fault in &self.scenario.faults {
            self.queue.schedule(fault.dies_at, Event::Die(fault.replica));
            self.queue.schedule(fault.returns_at, Event::Return(fault.replica));
        }
        for drain in &self.scenario.drains {
            self.queue.schedule(drain.at, Event::Drain(drain.replica));
        }
        if let Some(moves) = &self.scenario.moves {
            self.queue.schedule(Time::ZERO + moves.period, Event::LookForMoves);
        }
    }

    fn spec(&self, replica: usize) -> ReplicaSpec {
        let scenario = self.scenario;
        ReplicaSpec {
            id: ReplicaId(replica as u32),
            incarnation: Incarnation(self.replicas[replica].incarnation),
            block_size: scenario.block_size,
            kv_blocks: scenario.blocks,
            max_model_len: scenario.max_model_len,
            max_running: 256,
            discipline: match scenario.engine {
                EngineModel::Serial => Discipline::Serial,
                EngineModel::Scheduler { budget } => Discipline::Chunked { budget },
            },
            step: scenario.step,
        }
    }

    fn handle(&mut self, event: Event, now: Time) {
        match event {
            Event::Arrive(coming) => self.arrive(coming, now),
            Event::Submit { replica, incarnation, request } => {
                // A request to a replica that died under way is lost with it; its death told the router.
                if self.lives(replica, incarnation) {
                    self.replicas[replica].engine.submit(request, now);
                    self.after_engine(replica, now);
                }
            }
            Event::Wake { replica, incarnation } => {
                if self.lives(replica, incarnation) && self.replicas[replica].wakes_at == Some(now) {
                    self.replicas[replica].wakes_at = None;
                    self.wake(replica, now);
                }
            }
            Event::Output { replica, incarnation, output } => self.take_output(replica, incarnation, &output, now),
            Event::CacheEvents { replica, incarnation, batch } => self.take_cache_events(replica, incarnation, &batch, now),
            Event::ReportDue { replica, incarnation } => self.send_report(replica, incarnation, now),
            Event::Report { replica, incarnation, report } => {
                if self.replicas[replica].incarnation == incarnation {
                    let id = ReplicaId(replica as u32);
                    self.router.report(id, report, now);
                    // Where its events are not believed any more.
                    self.router.take_in(id, usize::MAX, now);
                }
            }
            Event::Die(replica) => self.die(replica, now),
            Event::Return(replica) => self.come_back(replica, now),
            Event::RouterTimeout => self.router_wakes_at = None,
            Event::Drain(replica) => self.begin_drain(replica, now),
            Event::LookForMoves => self.look_for_moves(now),
            Event::Move(moment) => self.take_moment(moment, now),
            Event::Fetch(fetching) => self.take_fetching(fetching, now),
        }
        self.take_up_released(now);
    }

    fn expect_arrival(&mut self, client: ClientRequest) {
        let priority = self.draw_priority();
        self.expect(Box::new(Coming { client, priority, attempt: 1 }));
    }

    fn expect(&mut self, coming: Box<Coming>) {
        self.arrivals_due += 1;
        self.queue.schedule(coming.client.at, Event::Arrive(coming));
    }

    fn draw_priority(&mut self) -> Priority {
        let priorities = &self.scenario.priorities;
        let Some((last, _)) = priorities.last() else { return Priority(0) };
        let mut left = self.clients_rng.f64() * priorities.iter().map(|(_, share)| share).sum::<f64>();
        let drawn = priorities.iter().find(|(_, share)| {
            left -= share;
            left < 0.0
        });
        drawn.map_or(*last, |(priority, _)| *priority)
    }

    fn arrive(&mut self, coming: Box<Coming>, now: Time) {
        self.arrivals_due -= 1;
        let client = &coming.client;
        let id = RequestId(self.outcomes.len() as u64);
        let keys: Arc<[BlockKey]> = chain_keys(self.root, &client.prompt, self.scenario.block_size).into();
        self.outcomes.push(RequestOutcome {
            arrived: now,
            kind: client.kind,
            priority: coming.priority,
            attempt: coming.attempt,
            prompt: Tokens(client.prompt.len() as u32),
            output: 0,
            replica: None,
            cached: None,
            first_token: None,
            finished: None,
            refused: None,
            retry_after: None,
            failed: false,
            moves: 0,
            output_digest: 0,
        });
        let (prompt, output) = (client.prompt.clone(), client.output);
        let place = self.outcomes.len() - 1;
        self.live.insert(
            id,
            Live { client: Some(coming), place, keys, prompt, output, tokens: Vec::new(), sent_to: None, failed_on: Vec::new() },
        );
        self.ask_router(id, now);
    }

    fn ask_router(&mut self, id: RequestId, now: Time) {
        let live = &self.live[&id];
        let prompt = Tokens(live.prompt.len() as u32);
        let mut excluded = live.failed_on.clone();
        if let Some(parted) = self.scenario.parted {
            excluded.extend(parted.barred(prompt, self.replicas.len()).map(|place| ReplicaId(place as u32)));
        }
        let arrival = Arrival {
            request: id,
            keys: live.keys.clone(),
            prompt,
            // Nothing of the output's length reaches the router, not even as the client's bound.
            max_output: None,
            session: live.client.as_ref().and_then(|coming| coming.client.session),
            program: None,
            share: None,
            priority: self.outcomes[live.place].priority,
            slo: Slo::default(),
            excluded,
        };
        let verdict = self.router.place(arrival, now);
        self.carry_out(id, verdict, now);
    }

    fn carry_out(&mut self, id: RequestId, verdict: Verdict, now: Time) {
        match verdict {
            Verdict::Run(Placed { replica, copy, fetch }) => {
                match fetch {
                    Some(fetch) => self.fetch(id, replica, fetch, now),
                    None => self.send(id, replica, now),
                }
                if let Some(copy) = copy {
                    self.tally.copies += 1;
                    let source = &self.live[&id];
                    let tokens = Blocks(copy.blocks as u32).to_tokens(self.scenario.block_size).0 as usize + 1;
                    let mut prompt = source.prompt[..tokens.min(source.prompt.len())].to_vec();
                    prompt.resize(tokens, 0);
                    let copied = Live {
                        client: None,
                        place: source.place,
                        keys: source.keys[..copy.blocks].into(),
                        prompt: prompt.into(),
                        output: 1,
                        tokens: Vec::new(),
                        sent_to: None,
                        failed_on: Vec::new(),
                    };
                    self.live.insert(copy.request, copied);
                    self.send(copy.request, copy.to, now);
                }
            }
            Verdict::Hold => self.tally.held += 1,
            Verdict::Refuse(refusal) => self.turn_away(id, &refusal, now),
        }
    }

    fn send(&mut self, id: RequestId, replica: ReplicaId, now: Time) {
        let replica = replica.index();
        let incarnation = self.replicas[replica].incarnation;
        let live = self.live.get_mut(&id).expect("a placed request is alive");
        live.sent_to = Some((replica, incarnation));
        self.tally.sent[replica] += 1;
        if live.client.is_some() {
            self.outcomes[live.place].replica = Some(replica as u32);
        }
        let request = EngineRequest { id, prompt: live.prompt.clone(), keys: live.keys.clone(), output: live.output };
        self.queue.schedule(now + self.scenario.requests.delay, Event::Submit { replica, incarnation, request });
    }

    fn lives(&self, replica: usize, incarnation: u64) -> bool {
        self.replicas[replica].alive && self.replicas[replica].incarnation == incarnation
    }

    fn wake(&mut self, replica: usize, now: Time) {
        let incarnation = self.replicas[replica].incarnation;
        let crossing = !self.replicas[replica].at_boundary.is_empty() || !self.replicas[replica].fetching.is_empty();
        let engine = &mut self.replicas[replica].engine;
        let outputs = match engine.movable().filter(|_| crossing) {
            Some(engine) => engine.complete(now),
            None => engine.advance(now),
        };
        for output in outputs {
            self.queue.schedule(now + self.scenario.requests.delay, Event::Output { replica, incarnation, output });
        }
        if crossing {
            self.cross_boundary(replica, now);
            for fetching in std::mem::take(&mut self.replicas[replica].fetching) {
                self.perform_fetching(fetching, now);
            }
            self.go_on_at(replica, now);
        } else {
            self.after_engine(replica, now);
        }
    }

    /// Publishes what the engine's cache did and schedules its next moment.
    fn after_engine(&mut self, replica: usize, now: Time) {
        let incarnation = self.replicas[replica].incarnation;
        let events = self.replicas[replica].engine.take_events();
        if let Some(link) = self.scenario.events
            && !events.is_empty()
        {
            let sequence = self.replicas[replica].published.len() as u64;
            let batch = KvEventBatch { sequence, timestamp_s: now.as_ms() / 1e3, events, dp_rank: None };
            self.replicas[replica].published.push(batch.clone());
            let arrives = link.deliver(now, &mut self.rng);
            self.replicas[replica].tail_lost = arrives.is_none();
            if let Some(at) = arrives {
                self.queue.schedule(at, Event::CacheEvents { replica, incarnation, batch });
            }
        }
        if let Err(law) = self.replicas[replica].engine.check_blocks() {
            self.tally.violations.push(format!("replica {replica} at {now}: {law}"));
        }
        if let Some(at) = self.replicas[replica].engine.next_at()
            && self.replicas[replica].wakes_at.is_none_or(|wakes_at| at < wakes_at)
        {
            self.replicas[replica].wakes_at = Some(at.max(now));
            self.queue.schedule(at, Event::Wake { replica, incarnation });
        }
    }

    fn take_output(&mut self, replica: usize, incarnation: u64, output: &EngineOutput, now: Time) {
        let id = output.request;
        // A stream that broke under way: its request was told of the death.
        let Some(live) = self.live.get_mut(&id).filter(|live| live.sent_to == Some((replica, incarnation))) else { return };
        live.tokens.extend_from_slice(&output.tokens);
        let outcome = &mut self.outcomes[live.place];
        if let Some(cached) = output.cached {
            if live.client.is_some() {
                outcome.first_token = Some(now);
                outcome.cached = Some(cached);
            }
            self.router.first_token(id, Some(cached), now);
        }
        self.router.output_tokens(id, output.tokens.len() as u32, now);
        self.settle_move(id, replica, now);
        let Some(live) = self.live.get(&id) else { return };
        if output.finished {
            let all: Vec<u32> = live.prompt.iter().chain(&live.tokens).copied().collect();
            let keys: Arc<[BlockKey]> = chain_keys(self.root, &all, self.scenario.block_size).into();
            self.router.finished(id, End::Finished, Some(keys), now);
            self.end(id, now);
        }
    }

    /// Its client comes back if it is told when and has not tried too often.
    fn turn_away(&mut self, id: RequestId, refusal: &Refusal, now: Time) {
        let mut coming = self.live.remove(&id).and_then(|live| live.client).expect("a client asked");
        let outcome = &mut self.outcomes[id.0 as usize];
        outcome.refused = Some(now);
        if let Refusal::Overloaded { retry_after } = refusal {
            outcome.retry_after = Some(*retry_after);
            if let Some(returns) = self.scenario.returns
                && coming.attempt < returns.attempts
            {
                let told = Duration::from_secs(retry_after.as_nanos().div_ceil(1_000_000_000).max(1) as u64);
                coming.attempt += 1;
                coming.client.at = now + told + returns.jitter.mul_f64(self.clients_rng.f64());
                self.expect(coming);
                return;
            }
        }
        self.go_on(&coming.client, None, now);
    }

    fn go_on(&mut self, client: &ClientRequest, output: Option<&[u32]>, now: Time) {
        if let Some(next) = self.workload.after(client, output, now) {
            self.expect_arrival(next);
        }
    }

    fn end(&mut self, id: RequestId, now: Time) {
        let live = self.live.remove(&id).expect("it ends once");
        self.note_empty(now);
        let Some(coming) = live.client else { return };
        let outcome = &mut self.outcomes[live.place];
        let done = live.tokens.len() == live.output as usize;
        outcome.failed = !done;
        outcome.finished = done.then_some(now);
        outcome.output = live.tokens.len() as u32;
        outcome.output_digest = BlockKey(0).child(&live.tokens).0;
        self.go_on(&coming.client, done.then_some(live.tokens.as_slice()), now);
    }

    /// Feeds a batch to the router and repairs a gap by replay, as a gateway does.
    fn take_cache_events(&mut self, replica: usize, incarnation: u64, batch: &KvEventBatch, now: Time) {
        let id = ReplicaId(replica as u32);
        let applied = self.router.kv_events(id, Incarnation(incarnation), batch, now);
        if let baton_kv::Applied::Gap { expected, got } = applied
            && self.replicas[replica].incarnation == incarnation
        {
            let missing = self.replicas[replica].published[expected as usize..got as usize].to_vec();
            for batch in missing {
                self.router.kv_events(id, Incarnation(incarnation), &batch, now);
            }
        }
    }

    fn schedule_report(&mut self, replica: usize, now: Time) {
        if let Some((_, period)) = self.scenario.reports {
            let incarnation = self.replicas[replica].incarnation;
            self.queue.schedule(now + period, Event::ReportDue { replica, incarnation });
        }
    }

    fn send_report(&mut self, replica: usize, incarnation: u64, now: Time) {
        let Some((link, _)) = self.scenario.reports else { return };
        // Reports end with the last request, else the run never would.
        if !self.lives(replica, incarnation) || self.live.is_empty() && self.arrivals_due == 0 {
            return;
        }
        let report = self.replicas[replica].engine.load(now);
        if let Some(at) = link.deliver(now, &mut self.rng) {
            self.queue.schedule(at, Event::Report { replica, incarnation, report });
        }
        self.schedule_report(replica, now);
    }

    fn die(&mut self, replica: usize, now: Time) {
        let (id, incarnation) = (ReplicaId(replica as u32), self.replicas[replica].incarnation);
        self.replicas[replica].alive = false;
        self.replicas[replica].busy_before_ms += self.replicas[replica].engine.busy_ms();
        self.replicas[replica].preemptions_before += self.replicas[replica].engine.preemptions();
        self.replicas[replica].at_boundary.clear();
        self.end_moves_of(replica, now);
        self.router.set_state(id, ReplicaState::Dead, now);
        let lost: Vec<RequestId> =
            self.live.iter().filter(|(_, live)| live.sent_to == Some((replica, incarnation))).map(|(request, _)| *request).collect();
        for request in lost {
            self.router.finished(request, End::Failed, None, now);
            let live = self.live.get_mut(&request).expect("it is alive");
            live.sent_to = None;
            live.failed_on.push(id);
            let may_retry = live.client.is_some() && live.tokens.is_empty() && (live.failed_on.len() as u32) < self.scenario.tries;
            if may_retry {
                self.tally.retries += 1;
                self.ask_router(request, now);
            } else {
                self.end(request, now);
            }
        }
        self.end_fetches_of(replica, now);
    }

    fn come_back(&mut self, replica: usize, now: Time) {
        let slot = &mut self.replicas[replica];
        slot.engine = new_engine(self.scenario);
        slot.incarnation += 1;
        slot.alive = true;
        slot.wakes_at = None;
        slot.published.clear();
        slot.tail_lost = false;
        self.router.upsert_replica(self.spec(replica), now);
        self.schedule_report(replica, now);
    }

    fn take_up_released(&mut self, now: Time) {
        for (id, verdict) in self.router.released(now) {
            self.carry_out(id, verdict, now);
        }
        if let Some(at) = self.router.next_timeout()
            && self.router_wakes_at.is_none_or(|wakes_at| at < wakes_at)
        {
            self.router_wakes_at = Some(at);
            self.queue.schedule(at.max(now + Duration::from_nanos(1)), Event::RouterTimeout);
        }
    }

    fn into_outcome(mut self) -> Outcome {
        self.check_index();
        let kept = self.scenario.router.decisions_kept;
        let mut decisions: Vec<DecisionRecord> = self.router.decisions(kept).iter().map(|record| DecisionRecord::clone(record)).collect();
        decisions.sort_by_key(|record| record.request);
        let preemptions = |replica: &Replica| replica.preemptions_before + if replica.alive { replica.engine.preemptions() } else { 0 };
        let busy = |replica: &Replica| replica.busy_before_ms + if replica.alive { replica.engine.busy_ms() } else { 0.0 };
        Outcome {
            sent: self.tally.sent,
            busy_ms: self.replicas.iter().map(busy).collect(),
            copies: self.tally.copies,
            fetches: self.tally.fetches,
            retries: self.tally.retries,
            held: self.tally.held,
            preemptions: self.replicas.iter().map(preemptions).sum(),
            drains: self.tally.drains,
            moves: self.moving.map_or_else(Vec::new, |moving| moving.records),
            ended_at: self.queue.now(),
            left_in_flight: self.router.fleet(self.queue.now()).iter().map(|replica| replica.in_flight).sum(),
            left_in_use: self.replicas.iter().filter(|replica| replica.alive).map(|replica| replica.engine.blocks_in_use()).sum(),
            violations: self.tally.violations,
            decisions,
            requests: self.outcomes,
        }
    }

    /// With all messages delivered, what the router takes for confirmed is there.
    fn check_index(&mut self) {
        for (place, replica) in self.replicas.iter().enumerate() {
            let id = ReplicaId(place as u32);
            let told = replica.published.iter().flat_map(|batch| &batch.events);
            let mut stored = told.filter_map(|event| match event {
                baton_kv::KvEvent::Stored { hashes, .. } => Some(hashes),
                baton_kv::KvEvent::Removed { .. } | baton_kv::KvEvent::Cleared => None,
            });
            let wrong = stored.any(|hashes| {
                let keys = hashes.iter().map(|hash| BlockKey(hash.0));
                keys.into_iter().any(|key| self.router.index().confirmed(id, key) && !replica.engine.holds(key))
            });
            if wrong && !replica.tail_lost && !self.router.index().doubtful(id) {
                self.tally.violations.push(format!("replica {place}: the index takes a block for confirmed that is gone"));
            }
        }
    }
}

fn new_engine(scenario: &Scenario) -> Box<dyn TimedEngine> {
    match scenario.engine {
        EngineModel::Serial => Box::new(SerialEngine::new(scenario.step, scenario.block_size, scenario.blocks)),
        EngineModel::Scheduler { budget } => Box::new(ScheduledEngine::new(&EngineShape {
            model: scenario.router.model.clone(),
            block_size: scenario.block_size,
            blocks: scenario.blocks,
            max_model_len: scenario.max_model_len,
            budget,
            step: scenario.step,
            publishes: scenario.events.is_some(),
        })),
    }
}
