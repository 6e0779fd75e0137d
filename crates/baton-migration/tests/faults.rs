//! Whole requests under seeded faults in virtual time: messages lost, repeated and reordered, replicas that crash, stop for a while or
//! are cut off, a gateway that dies, clients that leave, copies that fail, and moves at any moment.
//!
//! Each schedule checks that its clients got each entry once, in order, computed from the ones before it; that at most one replica computes
//! under the current epoch; that every stream whose gateway lives ends; and that in the end no replica holds anything. Schedules of their
//! own check that no source stays in an attempt that its gateway gave up, however often it is told in vain.
//!
//! `BATON_SCHEDULES=1000000` runs more of them; `BATON_SEED=7` one, with all that happens in it.

#![allow(clippy::print_stdout, reason = "a failing seed is printed with what happened")]

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, hash_map::DefaultHasher},
    hash::{Hash, Hasher},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use baton_migration::{
    Beat, Entry, GatewayName, Owners, OwnersInput, OwnersOutput, Phase, Place, RequestName, Seats, SeatsInput, SeatsOutput, Tag, Timing,
    ToGateway, ToPeer, ToSeat, Work,
};
use baton_units::{Incarnation, ReplicaId, Time};

const SCHEDULES: u64 = 100_000;
/// Of those in which sources are told in vain that their attempts are over.
const DEAF_SCHEDULES: u64 = 2_000;
/// As often in vain, at most.
const IN_VAIN_MAX: u32 = 3;
/// A source knows by then, whatever was lost: three repetitions, a delay, and two looks.
const KNOWS_WITHIN: Duration = Duration::from_millis(20 + 40 + 80 + 4 + 2 * 20);
const REPLICAS: usize = 3;
const STEP: Duration = Duration::from_millis(20);
/// A copy shows at both ends that it goes on.
const COPY_ADVANCES: Duration = Duration::from_millis(300);
/// Faults begin before this.
const FAULTS_UNTIL: Duration = Duration::from_millis(1_500);
/// By when everything must be over.
const OVER_AT: Duration = Duration::from_mins(1);

/// As the defaults, ten times as fast.
fn timing() -> Timing {
    let ms = Duration::from_millis;
    Timing {
        repeat: ms(20),
        repeat_max: ms(500),
        heartbeat: ms(50),
        stop_after: ms(500),
        free_after: ms(1_500),
        stand_still: ms(500),
        reclaim_after: ms(100),
        withdraw_after: ms(1_000),
        stall_after: ms(2_000),
        attempt: ms(90_000),
    }
}

/// Names what it was computed from, and who computed it: two computations of one index differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Value {
    from: u64,
    own: u64,
    finish: bool,
}

impl Entry for Value {
    fn is_finish(&self) -> bool {
        self.finish
    }
}

fn lineage(entries: &[Value]) -> u64 {
    entries.last().map_or(0, |last| last.own)
}

fn mixed(parts: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    parts.hash(&mut hasher);
    hasher.finish()
}

#[derive(Debug, Clone)]
enum Message {
    Heartbeat { beat: Beat },
    Lease { sequence: u64 },
    Holds { request: RequestName, phase: Phase, tag: Tag },
    AllHeld,
    Up { request: RequestName, message: ToGateway<Value> },
    Down { request: RequestName, message: ToSeat<Value> },
    Across { request: RequestName, from: Place, message: ToPeer<Value> },
}

#[derive(Debug, Clone)]
enum Event {
    /// Names the life of the replica that it is for.
    AtReplica(Place, Message),
    AtGateway(Place, Message),
    ReplicaTimer(usize),
    GatewayTimer,
    EngineStep(usize),
    /// Blocks went out at one end of a slow copy, and came at the other; it ends after so long.
    CopyAdvances {
        at: Place,
        target: Place,
        request: RequestName,
        left: Duration,
    },
    /// The copy is far enough, or has failed.
    CopyEnds {
        at: Place,
        request: RequestName,
        fails: bool,
    },
    /// The gateway's connection to a replica is there again.
    Attach(usize),
    Move,
    /// The gateway gives up what is under way.
    Stay,
    Crash(usize),
    /// SIGSTOP, and SIGCONT after a while.
    Halt(usize, Duration),
    Cut(usize, usize, Duration),
    Cancel,
    GatewayDies,
    Heal,
}

struct Replica {
    seats: Seats<Value>,
    halted_until: Time,
    steps: u64,
}

struct Request {
    delivered: Vec<Value>,
    length: usize,
    gone: bool,
    /// Nobody could be told to run it yet.
    waits_for_place: bool,
    forgotten: bool,
}

struct World {
    rng: fastrand::Rng,
    now: Time,
    queue: BinaryHeap<Reverse<(Time, u64)>>,
    events: BTreeMap<u64, Event>,
    count: u64,
    replicas: Vec<Replica>,
    /// Pairs that cannot reach each other; the gateway is `REPLICAS`.
    cut: Vec<(usize, usize, Time)>,
    loss: f64,
    gateway: GatewayName,
    gateway_dead: bool,
    owners: Owners<Value>,
    /// When the gateway looks at its timers next.
    gateway_timer: Time,
    requests: BTreeMap<u64, Request>,
    faultless: bool,
    commits: u64,
    forced: u64,
    tells: bool,
    /// So many of the messages that tell a source of the end of an attempt are lost.
    in_vain: u32,
    /// How many were, by request and attempt.
    lost_noes: BTreeMap<(u64, Tag), u32>,
    /// Sources in attempts that are over, what they and the gateway have come to, and since when.
    abandoned: BTreeMap<(usize, RequestName), (Tag, Option<Tag>, Time)>,
    told_in_vain: u64,
}

impl World {
    /// No fault but that no replica reaches another, that the gateway gives attempts up, and that it says so in vain at first.
    fn deaf(seed: u64) -> Self {
        let mut world = Self { in_vain: 1 + (seed % u64::from(IN_VAIN_MAX)) as u32, ..Self::with(seed, false, true) };
        for one in 0..REPLICAS {
            world.cut.extend((0..one).map(|other| (one, other, Time::NEVER)));
        }
        for _ in 0..20 {
            let (moves, stays) = (world.within(FAULTS_UNTIL), world.within(FAULTS_UNTIL));
            world.at(moves, Event::Move);
            world.at(stays, Event::Stay);
        }
        world
    }

    fn new(seed: u64, tells: bool) -> Self {
        // Some schedules have no fault at all but moves: in those more must hold.
        Self::with(seed, tells, fastrand::Rng::with_seed(!seed).u8(..8) == 0)
    }

    fn with(seed: u64, tells: bool, faultless: bool) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let loss = if faultless || rng.bool() { 0.0 } else { rng.f64() * 0.3 };
        let gateway = GatewayName { id: 1, incarnation: 1 };
        let mut world = Self {
            rng,
            now: Time::ZERO,
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            count: 0,
            replicas: Vec::new(),
            cut: Vec::new(),
            loss,
            gateway,
            gateway_dead: false,
            owners: Owners::new(timing()),
            gateway_timer: Time::NEVER,
            requests: BTreeMap::new(),
            faultless,
            commits: 0,
            forced: 0,
            tells,
            in_vain: 0,
            lost_noes: BTreeMap::new(),
            abandoned: BTreeMap::new(),
            told_in_vain: 0,
        };
        for replica in 0..REPLICAS {
            let place = Place { replica: ReplicaId(replica as u32), incarnation: Incarnation(1) };
            world.replicas.push(Replica { seats: Seats::new(place, timing()), halted_until: Time::ZERO, steps: 0 });
            world.owners.handle(OwnersInput::Connected { place }, Time::ZERO);
            world.replicas[replica].seats.handle(SeatsInput::Attached { gateway }, Time::ZERO);
            world.after_replica(replica);
            world.at(STEP, Event::EngineStep(replica));
        }
        for number in 0..world.rng.u64(1..=2) {
            let owner = world.rng.usize(..REPLICAS);
            let owner = world.place(owner);
            let length = world.rng.usize(2..70);
            let request = Request { delivered: Vec::new(), length, gone: false, waits_for_place: false, forgotten: false };
            world.requests.insert(number, request);
            world.tell(OwnersInput::Start { sequence: number, owner }).expect("nothing was delivered yet");
        }
        for _ in 0..world.rng.u32(0..10) {
            let at = world.within(FAULTS_UNTIL);
            world.at(at, Event::Move);
        }
        for _ in 0..world.rng.u32(0..3) {
            let at = world.within(FAULTS_UNTIL);
            world.at(at, Event::Stay);
        }
        if !faultless {
            for _ in 0..world.rng.u32(1..4) {
                let at = world.within(FAULTS_UNTIL);
                let (one, other) = (world.rng.usize(..REPLICAS), world.rng.usize(..=REPLICAS));
                let span = world.within(Duration::from_secs(3));
                let fault = match world.rng.u32(..12) {
                    0..3 => Event::Crash(one),
                    3..6 => Event::Halt(one, span),
                    6..9 => Event::Cut(one, other, span),
                    9..11 => Event::Cancel,
                    _ => Event::GatewayDies,
                };
                world.at(at, fault);
            }
            world.at(FAULTS_UNTIL + Duration::from_secs(3), Event::Heal);
        }
        world
    }

    fn run(&mut self) -> Result<(), String> {
        while let Some(Reverse((at, number))) = self.queue.pop() {
            let event = self.events.remove(&number).expect("each is queued once");
            if at > Time::ZERO + OVER_AT {
                break;
            }
            self.now = at;
            self.take(event)?;
            if self.is_over() {
                return Ok(());
            }
        }
        let held: Vec<String> = self
            .replicas
            .iter()
            .flat_map(|replica| {
                let seats = &replica.seats;
                seats
                    .holdings()
                    .map(move |request| format!("{} holds {request}: {:?}", seats.place(), seats.seat(request).expect("it holds it")))
            })
            .collect();
        let open: Vec<String> =
            self.requests.keys().filter_map(|number| Some(format!("request {number}: {:?}", self.owners.ownership(*number)?))).collect();
        Err(format!("not over after {OVER_AT:?}\n{}\n{}", held.join("\n"), open.join("\n")))
    }

    fn is_over(&self) -> bool {
        let requests = self.gateway_dead || self.owners.is_quiescent();
        requests && self.replicas.iter().all(|replica| replica.seats.holdings().next().is_none())
    }

    fn within(&mut self, span: Duration) -> Duration {
        span.mul_f64(self.rng.f64())
    }

    fn at(&mut self, after: Duration, event: Event) {
        self.count += 1;
        self.queue.push(Reverse((self.now + after, self.count)));
        self.events.insert(self.count, event);
    }

    fn at_time(&mut self, time: Time, event: Event) {
        self.at(time.since(self.now), event);
    }

    fn place(&self, replica: usize) -> Place {
        self.replicas[replica].seats.place()
    }

    fn reaches(&self, one: usize, other: usize) -> bool {
        !self.cut.iter().any(|&(a, b, until)| until > self.now && ((a, b) == (one, other) || (b, a) == (one, other)))
    }

    /// Sends over a network that loses, repeats and reorders.
    fn send(&mut self, from: usize, to: usize, event: &Event) {
        let copies = 1 + u32::from(!self.faultless && self.rng.f64() < 0.1);
        for _ in 0..copies {
            if self.reaches(from, to) && self.rng.f64() >= self.loss {
                let delay = self.within(Duration::from_millis(if self.faultless { 4 } else { 30 }));
                self.at(delay, event.clone());
            }
        }
    }

    fn take(&mut self, event: Event) -> Result<(), String> {
        if self.tells && !matches!(event, Event::ReplicaTimer(_) | Event::GatewayTimer | Event::EngineStep(_)) {
            println!("{} {event:?}", self.now);
        }
        match event {
            Event::AtReplica(place, message) => {
                let replica = place.replica.index();
                if self.wait_for(replica, || Event::AtReplica(place, message.clone())) || self.place(replica) != place {
                    return Ok(());
                }
                let input = match message {
                    Message::Lease { sequence } => SeatsInput::Leased { gateway: self.gateway, sequence },
                    Message::Down { request, message } => SeatsInput::FromGateway { request, message },
                    Message::Across { request, from, message } => SeatsInput::FromPeer { request, from, message },
                    Message::Heartbeat { .. } | Message::Holds { .. } | Message::AllHeld | Message::Up { .. } => {
                        unreachable!("for the gateway")
                    }
                };
                self.replicas[replica].seats.handle(input, self.now);
                self.after_replica(replica);
            }
            Event::AtGateway(from, message) => return self.at_gateway(from, message),
            Event::ReplicaTimer(replica) => {
                if !self.wait_for(replica, || Event::ReplicaTimer(replica)) && self.replicas[replica].seats.poll_timeout() <= self.now {
                    self.replicas[replica].seats.handle(SeatsInput::Timeout, self.now);
                    self.after_replica(replica);
                }
            }
            Event::EngineStep(replica) => {
                if !self.wait_for(replica, || Event::EngineStep(replica)) {
                    self.step(replica);
                    self.at(STEP, Event::EngineStep(replica));
                }
                self.look_at_runners()?;
                return self.look_at_sources(replica);
            }
            Event::CopyAdvances { at, target, request, left } => {
                for end in [at, target] {
                    let replica = end.replica.index();
                    if self.place(replica) == end && self.replicas[replica].halted_until <= self.now {
                        self.replicas[replica].seats.handle(SeatsInput::CopyAdvanced { request }, self.now);
                        self.after_replica(replica);
                    }
                }
                self.copy(at, target, request, left);
            }
            Event::CopyEnds { at, request, fails } => {
                let replica = at.replica.index();
                if !self.wait_for(replica, || Event::CopyEnds { at, request, fails }) && self.place(replica) == at {
                    let input = if fails { SeatsInput::CopyFailed { request } } else { SeatsInput::Frozen { request } };
                    self.replicas[replica].seats.handle(input, self.now);
                    self.after_replica(replica);
                }
            }
            Event::GatewayTimer => return self.gateway_timer(),
            Event::Attach(replica) => self.attach(replica)?,
            Event::Move => {
                let numbers: Vec<u64> = self.requests.keys().copied().collect();
                let number = numbers[self.rng.usize(..numbers.len())];
                let target = self.rng.usize(..REPLICAS);
                let target = self.place(target);
                self.tell(OwnersInput::Move { sequence: number, target })?;
            }
            Event::Stay => {
                for sequence in self.requests.keys().copied().collect::<Vec<u64>>() {
                    self.tell(OwnersInput::Stay { sequence })?;
                }
            }
            Event::Crash(replica) => {
                let place = self.place(replica);
                let place = Place { incarnation: Incarnation(place.incarnation.0 + 1), ..place };
                self.replicas[replica] = Replica { seats: Seats::new(place, timing()), halted_until: Time::ZERO, steps: 0 };
                let restart = self.within(Duration::from_millis(400));
                self.at(restart, Event::Attach(replica));
            }
            Event::Halt(replica, span) => self.replicas[replica].halted_until = self.now + span,
            Event::Cut(one, other, span) => self.cut.push((one, other, self.now + span)),
            Event::Cancel => {
                let number = *self.requests.keys().next().expect("there is one");
                if !self.gateway_dead {
                    self.requests.get_mut(&number).expect("it is there").gone = true;
                    self.tell(OwnersInput::End { sequence: number })?;
                }
            }
            Event::GatewayDies => self.gateway_dead = true,
            Event::Heal => {
                self.loss = 0.0;
                self.cut.clear();
                for replica in 0..REPLICAS {
                    self.attach(replica)?;
                }
            }
        }
        Ok(())
    }

    /// What reaches a halted process waits for it.
    fn wait_for(&mut self, replica: usize, event: impl Fn() -> Event) -> bool {
        let until = self.replicas[replica].halted_until;
        let halted = until > self.now;
        if halted {
            self.at_time(until, event());
        }
        halted
    }

    fn step(&mut self, replica: usize) {
        let place = self.place(replica);
        self.replicas[replica].steps += 1;
        let requests: Vec<RequestName> = self.replicas[replica].seats.holdings().collect();
        for request in requests {
            let seat = self.replicas[replica].seats.seat(request).expect("it holds it");
            if !seat.is_computing() {
                continue;
            }
            let holding = seat.holding().expect("it computes");
            let (from, index, tag) = (lineage(&holding.entries), holding.entries.len(), holding.tag);
            let finish = index + 1 >= self.requests[&request.sequence].length;
            let entry = Value { from, own: mixed((from, place, tag, index)), finish };
            self.replicas[replica].seats.handle(SeatsInput::Computed { request, entry }, self.now);
        }
        self.after_replica(replica);
    }

    fn after_replica(&mut self, replica: usize) {
        let from = self.place(replica);
        while let Some(output) = self.replicas[replica].seats.poll() {
            let to_gateway = |message| Event::AtGateway(from, message);
            match output {
                SeatsOutput::Heartbeat { sequence, .. } => {
                    let requests = self.replicas[replica].seats.holdings().count() as u32;
                    let beat = Beat { sequence, steps: self.replicas[replica].steps, step_predicted: STEP, requests };
                    self.send(replica, REPLICAS, &to_gateway(Message::Heartbeat { beat }));
                }
                SeatsOutput::Holds { request, phase, tag, .. } => {
                    self.send(replica, REPLICAS, &to_gateway(Message::Holds { request, phase, tag }));
                }
                SeatsOutput::AllHeld { .. } => self.send(replica, REPLICAS, &to_gateway(Message::AllHeld)),
                SeatsOutput::ToGateway { request, message } => self.send(replica, REPLICAS, &to_gateway(Message::Up { request, message })),
                SeatsOutput::ToPeer { request, to, message } => {
                    self.send(replica, to.replica.index(), &Event::AtReplica(to, Message::Across { request, from, message }));
                }
                SeatsOutput::Work { request, work: Work::Copy { target, .. } } => {
                    // Some take longer than a party waits for what does not advance.
                    let longest = if self.rng.u8(..8) == 0 { 5_000 } else { 150 };
                    let takes = self.within(Duration::from_millis(longest));
                    self.copy(from, target, request, takes);
                }
                SeatsOutput::Work { .. } => {}
                SeatsOutput::Prefix { .. } => unreachable!("nobody orders a copy"),
            }
        }
        let due = self.replicas[replica].seats.poll_timeout();
        self.at_time(due, Event::ReplicaTimer(replica));
    }

    fn copy(&mut self, at: Place, target: Place, request: RequestName, left: Duration) {
        if let Some(left) = left.checked_sub(COPY_ADVANCES) {
            self.at(COPY_ADVANCES, Event::CopyAdvances { at, target, request, left });
        } else {
            let fails = !self.faultless && self.rng.u8(..6) == 0;
            self.at(left, Event::CopyEnds { at, request, fails });
        }
    }

    fn at_gateway(&mut self, from: Place, message: Message) -> Result<(), String> {
        let input = match message {
            Message::Heartbeat { beat } => OwnersInput::Beat { place: from, beat },
            Message::Holds { request, phase, tag } => OwnersInput::Holds { sequence: request.sequence, from, phase, tag },
            Message::AllHeld => OwnersInput::AllHeld { place: from },
            Message::Up { request, message } => OwnersInput::FromSeat { sequence: request.sequence, from, message },
            Message::Lease { .. } | Message::Down { .. } | Message::Across { .. } => unreachable!("for a replica"),
        };
        self.tell(input)
    }

    fn attach(&mut self, replica: usize) -> Result<(), String> {
        if self.gateway_dead {
            return Ok(());
        }
        if !self.reaches(replica, REPLICAS) || self.replicas[replica].halted_until > self.now {
            if self.rng.bool() {
                let place = self.place(replica);
                self.tell(OwnersInput::Disconnected { place })?;
            }
            self.at(Duration::from_millis(100), Event::Attach(replica));
            return Ok(());
        }
        let place = self.place(replica);
        self.replicas[replica].seats.handle(SeatsInput::Attached { gateway: self.gateway }, self.now);
        self.after_replica(replica);
        self.tell(OwnersInput::Connected { place })
    }

    fn gateway_timer(&mut self) -> Result<(), String> {
        if self.gateway_timer > self.now {
            return Ok(());
        }
        self.gateway_timer = Time::NEVER;
        if self.owners.poll_timeout() <= self.now { self.tell(OwnersInput::Timeout) } else { self.tell_nothing() }
    }

    /// What the gateway hears, and does at once: a lost request goes on at any trusted replica, and a client takes what is delivered.
    fn tell(&mut self, input: OwnersInput<Value>) -> Result<(), String> {
        if self.gateway_dead {
            return Ok(());
        }
        self.owners.handle(input, self.now);
        self.tell_nothing()
    }

    fn tell_nothing(&mut self) -> Result<(), String> {
        loop {
            while let Some(output) = self.owners.poll() {
                self.perform(output)?;
            }
            if !self.place_a_lost_one() {
                break;
            }
        }
        let due = self.owners.poll_timeout();
        if due < self.gateway_timer {
            self.gateway_timer = due;
            self.at_time(due, Event::GatewayTimer);
        }
        Ok(())
    }

    fn place_a_lost_one(&mut self) -> bool {
        let trusted: Vec<Place> =
            (0..REPLICAS).map(|replica| self.place(replica)).filter(|place| !self.owners.is_suspected(*place)).collect();
        let Some((&sequence, request)) = self.requests.iter_mut().find(|(_, request)| request.waits_for_place) else { return false };
        if trusted.is_empty() {
            return false;
        }
        request.waits_for_place = false;
        self.forced += 1;
        let owner = trusted[self.rng.usize(..trusted.len())];
        self.owners.handle(OwnersInput::Force { sequence, owner }, self.now);
        true
    }

    fn perform(&mut self, output: OwnersOutput<Value>) -> Result<(), String> {
        match output {
            OwnersOutput::ToSeat { sequence, to, message } => {
                if let ToSeat::No { attempt, .. } = message {
                    let lost = self.lost_noes.entry((sequence, attempt)).or_default();
                    if *lost < self.in_vain {
                        *lost += 1;
                        self.told_in_vain += 1;
                        return Ok(());
                    }
                }
                let request = RequestName { gateway: self.gateway, sequence };
                self.send(REPLICAS, to.replica.index(), &Event::AtReplica(to, Message::Down { request, message }));
            }
            OwnersOutput::Lease { to, sequence } => {
                self.send(REPLICAS, to.replica.index(), &Event::AtReplica(to, Message::Lease { sequence }));
            }
            OwnersOutput::Deliver { sequence, entry } => {
                let request = self.requests.get_mut(&sequence).expect("it is there");
                request.delivered.push(entry);
                let next = request.delivered.len() as u32;
                self.look_at(sequence)?;
                self.owners.handle(OwnersInput::Taken { sequence, next }, self.now);
            }
            OwnersOutput::Lost { sequence, .. } => self.requests.get_mut(&sequence).expect("it is there").waits_for_place = true,
            OwnersOutput::Committed { .. } => self.commits += 1,
            OwnersOutput::Forgotten { sequence } => {
                let request = self.requests.get_mut(&sequence).expect("it is there");
                if std::mem::replace(&mut request.forgotten, true) {
                    return Err(format!("request {sequence} was forgotten twice"));
                }
                let finished = request.delivered.last().is_some_and(Entry::is_finish);
                if !finished && !request.gone {
                    return Err(format!("request {sequence} ended without its finish"));
                }
            }
            OwnersOutput::Started { .. }
            | OwnersOutput::AttemptEnded { .. }
            | OwnersOutput::Suspected { .. }
            | OwnersOutput::Trusted { .. } => {}
        }
        Ok(())
    }

    fn look_at(&self, number: u64) -> Result<(), String> {
        let request = &self.requests[&number];
        for (index, entry) in request.delivered.iter().enumerate() {
            if entry.from != lineage(&request.delivered[..index]) {
                return Err(format!("request {number}: entry {index} was computed from something else"));
            }
        }
        let finished = request.delivered.last().is_some_and(Entry::is_finish);
        if finished && request.delivered.len() != request.length {
            return Err(format!("request {number}: {} entries of {}", request.delivered.len(), request.length));
        }
        Ok(())
    }

    /// Where messages are lost only as often as is known, a source leaves an attempt soon after its gateway has given it up.
    fn look_at_sources(&mut self, replica: usize) -> Result<(), String> {
        if self.in_vain == 0 {
            return Ok(());
        }
        for request in self.requests.keys().map(|number| RequestName { gateway: self.gateway, sequence: *number }) {
            let holding = self.replicas[replica].seats.seat(request).and_then(|seat| seat.holding());
            let source = holding.filter(|holding| matches!(holding.phase, Phase::Copying | Phase::Frozen));
            let register = self.owners.ownership(request.sequence).map(baton_migration::Ownership::register);
            let (Some(source), Some(register)) = (source, register) else {
                self.abandoned.remove(&(replica, request));
                continue;
            };
            if register.attempt().is_some_and(|(open, _)| open == source.attempt) {
                continue;
            }
            let now = (source.attempt, register.given_up(), self.now);
            let since = self.abandoned.entry((replica, request)).or_insert(now);
            if (since.0, since.1) != (now.0, now.1) {
                *since = now;
            }
            if self.now.since(since.2) > KNOWS_WITHIN {
                return Err(format!("{request} is {:?} for {} since {}, which is over", source.phase, source.attempt, since.2));
            }
        }
        Ok(())
    }

    fn look_at_runners(&self) -> Result<(), String> {
        for number in self.requests.keys() {
            let name = RequestName { gateway: self.gateway, sequence: *number };
            let computing: Vec<Tag> = self
                .replicas
                .iter()
                .filter_map(|replica| replica.seats.seat(name).filter(|seat| seat.is_computing())?.holding())
                .map(|holding| holding.tag)
                .collect();
            let owner = self.owners.ownership(*number).and_then(|ownership| ownership.register().owner());
            if owner.is_some_and(|(owner, _)| !self.owners.requests_on(owner).any(|on| on == *number)) {
                return Err(format!("request {number} is not listed at its owner"));
            }
            let current = owner.map(|(_, epoch)| epoch);
            if computing.iter().filter(|tag| Some(**tag) == current).count() > 1 || (self.faultless && computing.len() > 1) {
                return Err(format!("request {number}: computed under {computing:?} at once, current is {current:?}"));
            }
        }
        Ok(())
    }
}

#[test]
fn streams_are_whole_and_replicas_empty_after_any_schedule_of_faults() {
    if let Ok(seed) = std::env::var("BATON_SEED") {
        let mut world = World::new(seed.parse().expect("BATON_SEED is a number"), true);
        world.run().unwrap();
        return;
    }
    let schedules = std::env::var("BATON_SCHEDULES").map_or(SCHEDULES, |count| count.parse().expect("BATON_SCHEDULES is a number"));
    let (next, commits, forced) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= schedules {
                        return;
                    }
                    let mut world = World::new(seed, false);
                    if let Err(what) = world.run() {
                        panic!("BATON_SEED={seed} (run again with it to see all): {what}");
                    }
                    commits.fetch_add(world.commits, Ordering::Relaxed);
                    forced.fetch_add(world.forced, Ordering::Relaxed);
                }
            });
        }
    });
    let (commits, forced) = (commits.into_inner(), forced.into_inner());
    println!("{schedules} schedules: {commits} moves committed, {forced} forced");
    assert!(commits > schedules / 4 && forced > schedules / 20, "{commits} moves and {forced} forced ones are too few to say something");
}

#[test]
fn a_source_leaves_an_attempt_that_was_given_up_however_often_it_is_told_in_vain() {
    let mut told_in_vain = 0;
    for seed in 0..DEAF_SCHEDULES {
        let mut world = World::deaf(seed);
        world.run().unwrap_or_else(|what| panic!("deaf schedule {seed}: {what}"));
        told_in_vain += world.told_in_vain;
    }
    assert!(told_in_vain > DEAF_SCHEDULES, "{told_in_vain} messages lost are too few to say something");
}
