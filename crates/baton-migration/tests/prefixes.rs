//! Copies of cached prefixes under seeded faults in virtual time: orders lost and repeated, connections that break, replicas that crash,
//! a gateway that stops answering, and stops at any moment.
//!
//! Each schedule checks that a replica begins a copy at most once; that it holds references while, and only while, the copy is under way
//! there; that what it answered it answers again; and that in the end, without anybody's help, nothing is held.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use baton_migration::{
    Entry, GatewayName, PREFIX_COPIES_MAX, Place, PrefixOutput, RequestName, Seats, SeatsInput, SeatsOutput, Tag, Timing, ToSeat,
};
use baton_units::{Blocks, Incarnation, ReplicaId, Time};

const GATEWAY: GatewayName = GatewayName { id: 1, incarnation: 1 };
const SCHEDULES: u64 = 3_000;

#[derive(Debug, Clone, PartialEq)]
struct Token;

impl Entry for Token {
    fn is_finish(&self) -> bool {
        false
    }
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn place(replica: u32, incarnation: u64) -> Place {
    Place { replica: ReplicaId(replica), incarnation: Incarnation(incarnation) }
}

fn name(sequence: u64) -> RequestName {
    RequestName { gateway: GATEWAY, sequence }
}

type Answer = Result<Blocks, ()>;

/// One life of a replica with what its engine holds.
struct Replica {
    seats: Seats<Token>,
    incarnation: u64,
    /// References that its engine has, by copy and attempt.
    held: BTreeSet<(RequestName, Tag)>,
    began: BTreeSet<(RequestName, Tag)>,
    answered: BTreeMap<(RequestName, Tag), Answer>,
}

impl Replica {
    fn new(id: u32, incarnation: u64, now: Time) -> Self {
        let mut seats = Seats::new(place(id, incarnation), Timing::default());
        seats.handle(SeatsInput::Attached { gateway: GATEWAY }, now);
        Self { seats, incarnation, held: BTreeSet::new(), began: BTreeSet::new(), answered: BTreeMap::new() }
    }

    fn begin(&mut self, request: RequestName, attempt: Tag) {
        assert!(self.began.insert((request, attempt)), "{request} is begun once");
        self.held.insert((request, attempt));
    }

    /// Carries out what the seats want; gives the copies that are to be sent, and leases where the gateway answers.
    fn settle(&mut self, gateway_answers: bool, now: Time) -> Vec<(RequestName, Tag, Place)> {
        let mut sends = Vec::new();
        while let Some(output) = self.seats.poll() {
            match output {
                SeatsOutput::Heartbeat { gateway, sequence } if gateway_answers => {
                    self.seats.handle(SeatsInput::Leased { gateway, sequence }, now);
                }
                SeatsOutput::Prefix { request, attempt, output } => match output {
                    PrefixOutput::Send { target } => {
                        self.begin(request, attempt);
                        sends.push((request, attempt, target));
                    }
                    PrefixOutput::Drop => assert!(self.held.remove(&(request, attempt)), "only what is held is let go of, once"),
                    PrefixOutput::Copied { blocks } => self.answer(request, attempt, Ok(blocks)),
                    PrefixOutput::Aborted => self.answer(request, attempt, Err(())),
                },
                SeatsOutput::Heartbeat { .. }
                | SeatsOutput::Holds { .. }
                | SeatsOutput::AllHeld { .. }
                | SeatsOutput::ToGateway { .. }
                | SeatsOutput::ToPeer { .. }
                | SeatsOutput::Work { .. } => {}
            }
        }
        for (request, attempt) in &self.held {
            assert!(self.seats.holds_prefix(*request, *attempt), "{request} holds references and is not under way");
        }
        assert_eq!(self.seats.prefixes().count(), self.held.len());
        sends
    }

    fn answer(&mut self, request: RequestName, attempt: Tag, answer: Answer) {
        let first = *self.answered.entry((request, attempt)).or_insert(answer);
        assert_eq!(first, answer, "{request} is answered the same");
    }
}

/// A connection of a holder and a target; either end's death is the other one's.
struct Connection {
    request: RequestName,
    attempt: Tag,
    from: (usize, u64),
    to: (usize, u64),
}

struct World {
    rng: fastrand::Rng,
    now: Time,
    replicas: Vec<Replica>,
    connections: Vec<Connection>,
    gateway_answers: bool,
}

impl World {
    fn new(seed: u64) -> Self {
        let replicas = (0..2).map(|id| Replica::new(id, 1, Time::ZERO)).collect();
        Self { rng: fastrand::Rng::with_seed(seed), now: Time::ZERO, replicas, connections: Vec::new(), gateway_answers: true }
    }

    fn tell(&mut self, at: usize, input: SeatsInput<Token>) {
        self.replicas[at].seats.handle(input, self.now);
        self.settle(at);
    }

    fn settle(&mut self, at: usize) {
        let incarnation = self.replicas[at].incarnation;
        for (request, attempt, target) in self.replicas[at].settle(self.gateway_answers, self.now) {
            self.connect(request, attempt, (at, incarnation), target);
        }
        self.break_connections();
    }

    /// The holder dials the target; its life may be over, or it may not want it.
    fn connect(&mut self, request: RequestName, attempt: Tag, from: (usize, u64), target: Place) {
        let to = target.replica.0 as usize;
        let there = &mut self.replicas[to];
        let mut taken = false;
        if there.incarnation == target.incarnation.0 && !there.began.contains(&(request, attempt)) && !self.rng.bool_chance(0.1) {
            there.seats.handle(SeatsInput::TakePrefix { request, attempt }, self.now);
            taken = there.seats.holds_prefix(request, attempt);
            if taken {
                there.begin(request, attempt);
            }
        }
        if taken {
            let to = (to, self.replicas[to].incarnation);
            self.connections.push(Connection { request, attempt, from, to });
        } else {
            self.end(from, request, attempt, None);
        }
    }

    fn end(&mut self, (at, incarnation): (usize, u64), request: RequestName, attempt: Tag, blocks: Option<Blocks>) {
        if self.replicas[at].incarnation == incarnation {
            self.tell(at, SeatsInput::PrefixEnded { request, attempt, blocks });
        }
    }

    fn is_held(&self, (at, incarnation): (usize, u64), request: RequestName, attempt: Tag) -> bool {
        self.replicas[at].incarnation == incarnation && self.replicas[at].held.contains(&(request, attempt))
    }

    /// Whoever let go has closed its end, which the other one sees.
    fn break_connections(&mut self) {
        while let Some(broken) = self.connections.iter().position(|connection| {
            let Connection { request, attempt, from, to } = *connection;
            !self.is_held(from, request, attempt) || !self.is_held(to, request, attempt)
        }) {
            let Connection { request, attempt, from, to } = self.connections.swap_remove(broken);
            for end in [from, to] {
                if self.is_held(end, request, attempt) {
                    self.end(end, request, attempt, None);
                }
            }
        }
    }

    fn any_connection(&mut self) -> Option<Connection> {
        let count = self.connections.len();
        (count > 0).then(|| self.connections.swap_remove(self.rng.usize(..count)))
    }

    fn happen(&mut self) {
        let at = self.rng.usize(..2);
        // What is forgotten at last was ordered long ago.
        let copy = name(self.rng.u64(1..12) + 100 * (self.now.0 / 10_000_000_000));
        // A copy has one direction and one attempt.
        let holder = copy.sequence as usize % 2;
        match self.rng.u32(..20) {
            0..8 => {
                let to = 1 - holder;
                // The gateway may know an older life of the target.
                let target = place(to as u32, self.replicas[to].incarnation - u64::from(self.rng.bool_chance(0.1)));
                self.tell(holder, SeatsInput::CopyPrefix { request: copy, attempt: Tag(1), target });
            }
            8..11 => {
                if let Some(Connection { request, attempt, from, to }) = self.any_connection() {
                    // The target first; the word of it may be lost with the connection.
                    self.end(to, request, attempt, Some(Blocks(7)));
                    let told = !self.rng.bool_chance(0.2);
                    self.end(from, request, attempt, told.then_some(Blocks(7)));
                }
            }
            11..13 => {
                if let Some(Connection { request, attempt, from, to }) = self.any_connection() {
                    self.end(from, request, attempt, None);
                    self.end(to, request, attempt, None);
                }
            }
            13..15 => self.tell(at, SeatsInput::FromGateway { request: copy, message: ToSeat::Stop { upto: Tag::ALL } }),
            15 => {
                let incarnation = self.replicas[at].incarnation + 1;
                self.replicas[at] = Replica::new(at as u32, incarnation, self.now);
                self.settle(at);
            }
            16 => self.gateway_answers = self.rng.bool_chance(0.5),
            _ => {
                self.now += ms(self.rng.u64(..4_000));
                for at in 0..2 {
                    self.tell(at, SeatsInput::Timeout);
                }
            }
        }
        for replica in &self.replicas {
            assert!(replica.held.len() <= 2 * PREFIX_COPIES_MAX, "bounded");
        }
    }
}

trait Chance {
    fn bool_chance(&mut self, chance: f64) -> bool;
}

impl Chance for fastrand::Rng {
    fn bool_chance(&mut self, chance: f64) -> bool {
        self.f64() < chance
    }
}

#[test]
fn copies_end_by_themselves_whatever_fails() {
    let (mut begun, mut copied) = (0, 0);
    for seed in 0..SCHEDULES {
        let mut world = World::new(seed);
        for _ in 0..80 {
            world.happen();
        }
        begun += world.replicas.iter().map(|replica| replica.began.len()).sum::<usize>();
        copied += world.replicas.iter().flat_map(|replica| replica.answered.values()).filter(|answer| answer.is_ok()).count();
        // Nobody says anything any more: neither a gateway nor the other side of a connection.
        world.gateway_answers = false;
        world.connections.clear();
        let until = world.now + Duration::from_mins(3);
        while world.now < until {
            world.now += ms(500);
            for replica in &mut world.replicas {
                replica.seats.handle(SeatsInput::Timeout, world.now);
                replica.settle(false, world.now);
            }
        }
        for replica in &world.replicas {
            assert!(replica.held.is_empty(), "seed {seed}: {:?} is left", replica.held);
            assert_eq!(replica.seats.poll_timeout(), Time::NEVER, "seed {seed}: nothing is remembered for ever");
        }
    }
    assert!(begun > 10 * SCHEDULES as usize && copied > SCHEDULES as usize, "{begun} begun, {copied} copied: the schedules do something");
}

/// Orders for copies that were stopped, or that no lease covers, begin nothing.
#[test]
fn what_is_over_is_not_begun() {
    let target = place(1, 1);
    let order = |sequence| SeatsInput::CopyPrefix { request: name(sequence), attempt: Tag(1), target };
    let mut replica = Replica::new(0, 1, Time::ZERO);
    let stop = SeatsInput::FromGateway { request: name(1), message: ToSeat::Stop { upto: Tag::ALL } };
    replica.seats.handle(stop, Time::ZERO);
    replica.seats.handle(order(1), Time::ZERO);
    assert!(replica.settle(true, Time::ZERO).is_empty());
    assert_eq!(replica.answered[&(name(1), Tag(1))], Err(()));
    replica.seats.handle(order(2), Time::ZERO);
    assert_eq!(replica.settle(true, Time::ZERO), [(name(2), Tag(1), target)]);
    // The gateway is not heard of for longer than a lease lasts.
    let late = Time::ZERO + Duration::from_secs(6);
    replica.seats.handle(SeatsInput::Timeout, late);
    assert!(replica.settle(false, late).is_empty() && replica.held.is_empty(), "it was let go of");
    replica.seats.handle(order(3), late);
    assert!(replica.settle(false, late).is_empty() && replica.held.is_empty());
}
