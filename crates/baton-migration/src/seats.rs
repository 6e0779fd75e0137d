use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    time::Duration,
};

use baton_units::{Blocks, Time};

use crate::{
    Entry, LostClass, Phase, Place, PrefixOutput, Seat, SeatOutput, Tag, Timing, ToGateway, ToPeer, ToSeat, Work, prefixes::Prefixes,
    timing::Repeat,
};

/// One life of one gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GatewayName {
    pub id: u64,
    pub incarnation: u64,
}

/// A request, named by the gateway that admitted it; a client's own id may collide, and is only an attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestName {
    pub gateway: GatewayName,
    pub sequence: u64,
}

impl fmt::Display for RequestName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}.{:x}.{}", self.gateway.id, self.gateway.incarnation, self.sequence)
    }
}

/// Something that happened to a replica.
#[derive(Debug, Clone)]
pub enum SeatsInput<E> {
    /// A gateway's connection is there; the older one of the same gateway is gone, and so are older lives of that gateway.
    Attached {
        gateway: GatewayName,
    },
    /// A heartbeat was answered.
    Leased {
        gateway: GatewayName,
        sequence: u64,
    },
    FromGateway {
        request: RequestName,
        message: ToSeat<E>,
    },
    FromPeer {
        request: RequestName,
        from: Place,
        message: ToPeer<E>,
    },
    /// The engine computed the request's next entry.
    Computed {
        request: RequestName,
        entry: E,
    },
    /// The engine froze the request at the end of a step, as [`Work::Copy`] wants.
    Frozen {
        request: RequestName,
    },
    /// The engine does not run it.
    CannotRun {
        request: RequestName,
        class: LostClass,
    },
    /// Blocks of the copy that is under way went out, or came. Once a second is enough.
    CopyAdvanced {
        request: RequestName,
    },
    /// The copy cannot go on: the link is lost, the target refuses, or the request was preempted.
    CopyFailed {
        request: RequestName,
    },
    /// The gateway wants what is cached of a prefix copied to `target`.
    CopyPrefix {
        request: RequestName,
        attempt: Tag,
        target: Place,
    },
    /// A holder that was announced brings a prefix; [`Seats::holds_prefix`] tells then whether it may.
    TakePrefix {
        request: RequestName,
        attempt: Tag,
    },
    /// This side's part of the copy of a prefix is over: with so many leading blocks in the cache, or with nothing.
    PrefixEnded {
        request: RequestName,
        attempt: Tag,
        blocks: Option<Blocks>,
    },
    /// The moment of [`Seats::poll_timeout`] has passed.
    Timeout,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SeatsOutput<E> {
    Heartbeat {
        gateway: GatewayName,
        sequence: u64,
    },
    /// After a gateway attached or answers again: what is held for it. The gateway says for each whether to keep or stop it.
    Holds {
        request: RequestName,
        phase: Phase,
        tag: Tag,
        entries: u32,
    },
    /// All that is held was told.
    AllHeld {
        gateway: GatewayName,
    },
    ToGateway {
        request: RequestName,
        message: ToGateway<E>,
    },
    ToPeer {
        request: RequestName,
        to: Place,
        message: ToPeer<E>,
    },
    Work {
        request: RequestName,
        work: Work,
    },
    /// Of the copy of a prefix.
    Prefix {
        request: RequestName,
        attempt: Tag,
        output: PrefixOutput,
    },
}

/// All that one life of a replica holds of requests, with its gateways' leases and its timers.
#[derive(Debug)]
pub struct Seats<E> {
    place: Place,
    timing: Timing,
    gateways: BTreeMap<GatewayName, Lease>,
    requests: BTreeMap<RequestName, Held<E>>,
    prefixes: Prefixes,
    outputs: VecDeque<SeatsOutput<E>>,
}

/// What a gateway's requests may do. It counts from when the answered heartbeat was sent, so that no delay makes it longer.
#[derive(Debug)]
struct Lease {
    answered: Time,
    /// Heartbeats without an answer, oldest first.
    sent: VecDeque<(u64, Time)>,
    sequence: u64,
    next: Time,
    standing: Standing,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    Valid,
    Stopped,
    Freed,
}

#[derive(Debug)]
struct Held<E> {
    seat: Seat<E>,
    repeat: Repeat,
    /// When the phase began, its copy advanced last, or the seat became empty.
    since: Time,
    phase: Option<Phase>,
}

impl<E: Entry> Seats<E> {
    pub fn new(place: Place, timing: Timing) -> Self {
        Self {
            place,
            timing,
            gateways: BTreeMap::new(),
            requests: BTreeMap::new(),
            prefixes: Prefixes::default(),
            outputs: VecDeque::new(),
        }
    }

    pub fn place(&self) -> Place {
        self.place
    }

    pub fn seat(&self, request: RequestName) -> Option<&Seat<E>> {
        self.requests.get(&request).map(|held| &held.seat)
    }

    /// Requests of which something is held.
    pub fn holdings(&self) -> impl Iterator<Item = RequestName> {
        self.requests.iter().filter(|(_, held)| held.seat.holding().is_some()).map(|(name, _)| *name)
    }

    /// Whether the copy of a prefix is under way here.
    pub fn holds_prefix(&self, request: RequestName, attempt: Tag) -> bool {
        self.prefixes.holds(request, attempt)
    }

    /// Copies of prefixes that are under way here.
    pub fn prefixes(&self) -> impl Iterator<Item = RequestName> {
        self.prefixes.under_way()
    }

    /// Drain [`Self::poll`] after each call.
    pub fn handle(&mut self, input: SeatsInput<E>, now: Time) {
        // First what the time says: after a suspension nothing computes on a lease that has run out.
        self.look_at_leases(now);
        match input {
            SeatsInput::Attached { gateway } => self.attach(gateway, now),
            SeatsInput::Leased { gateway, sequence } => self.lease(gateway, sequence, now),
            SeatsInput::FromGateway { request, message } => {
                if let ToSeat::Stop { upto } = message {
                    self.with_prefixes(|prefixes, out| prefixes.stop(request, upto, now, out));
                }
                self.with_seat(request, now, |seat, out| seat.handle(message, out));
                self.cover(request, now);
            }
            SeatsInput::FromPeer { request, from, message } => {
                self.with_seat(request, now, |seat, out| seat.handle_peer(from, message, out));
                self.cover(request, now);
            }
            SeatsInput::Computed { request, entry } => self.with_seat(request, now, |seat, out| seat.output(entry, out)),
            SeatsInput::Frozen { request } => self.with_seat(request, now, Seat::frozen),
            SeatsInput::CannotRun { request, class } => self.with_seat(request, now, |seat, out| seat.cannot_run(class, out)),
            SeatsInput::CopyAdvanced { request } => self.copy_advanced(request, now),
            SeatsInput::CopyFailed { request } => self.with_seat(request, now, Seat::abort),
            SeatsInput::CopyPrefix { request, attempt, target } => {
                let over = self.is_over(request, attempt);
                self.with_prefixes(|prefixes, out| prefixes.copy(request, attempt, target, over, now, out));
            }
            SeatsInput::TakePrefix { request, attempt } => {
                if !self.is_over(request, attempt) {
                    self.with_prefixes(|prefixes, out| prefixes.take(request, attempt, now, out));
                }
            }
            SeatsInput::PrefixEnded { request, attempt, blocks } => {
                self.with_prefixes(|prefixes, out| prefixes.ended(request, attempt, blocks, now, out));
            }
            SeatsInput::Timeout => {
                self.look_at_requests(now);
                let timing = self.timing;
                self.with_prefixes(|prefixes, out| prefixes.timeout(&timing, now, out));
            }
        }
    }

    pub fn poll(&mut self) -> Option<SeatsOutput<E>> {
        self.outputs.pop_front()
    }

    pub fn poll_timeout(&self) -> Time {
        let leases = self.gateways.values().map(|lease| lease.next.min(lease.ends(&self.timing)));
        let requests = self.requests.values().map(|held| held.due(&self.timing));
        leases.chain(requests).min().unwrap_or(Time::NEVER).min(self.prefixes.poll_timeout(&self.timing))
    }

    /// Whether the attempt was stopped here, or no lease covers what it would begin.
    fn is_over(&self, request: RequestName, attempt: Tag) -> bool {
        let covered = self.gateways.get(&request.gateway).is_some_and(|lease| lease.standing == Standing::Valid);
        !covered || self.seat(request).is_some_and(|seat| seat.seen() >= attempt)
    }

    fn with_prefixes(&mut self, change: impl FnOnce(&mut Prefixes, &mut Vec<(RequestName, Tag, PrefixOutput)>)) {
        let mut out = Vec::new();
        change(&mut self.prefixes, &mut out);
        self.outputs.extend(out.into_iter().map(|(request, attempt, output)| SeatsOutput::Prefix { request, attempt, output }));
    }

    /// A message that was long under way, or that comes for a gateway which is not attached, begins nothing that no lease would end.
    fn cover(&mut self, request: RequestName, now: Time) {
        match self.gateways.get(&request.gateway).map(|lease| lease.standing) {
            Some(Standing::Valid) => {}
            Some(Standing::Stopped) => self.with_seat(request, now, Seat::pause),
            Some(Standing::Freed) | None => self.with_seat(request, now, Seat::lapse),
        }
    }

    fn attach(&mut self, gateway: GatewayName, now: Time) {
        // What an older life of the same gateway left can be asked for by nobody.
        let older: Vec<RequestName> = self
            .requests
            .keys()
            .filter(|name| name.gateway.id == gateway.id && name.gateway.incarnation != gateway.incarnation)
            .copied()
            .collect();
        for request in older {
            self.with_seat(request, now, Seat::lapse);
        }
        let replaced: Vec<GatewayName> =
            self.gateways.keys().filter(|name| name.id == gateway.id && name.incarnation != gateway.incarnation).copied().collect();
        for older in replaced {
            self.with_prefixes(|prefixes, out| prefixes.lapse(older, now, out));
            self.gateways.remove(&older);
        }
        // Its handshake answers this life of the replica, as a heartbeat's answer would.
        let sequence = self.gateways.get(&gateway).map_or(0, |lease| lease.sequence);
        self.gateways.insert(gateway, Lease { sequence, ..Lease::new(now) });
        self.tell_holdings(gateway);
        self.look_at_leases(now);
    }

    fn lease(&mut self, gateway: GatewayName, sequence: u64, now: Time) {
        let Some(lease) = self.gateways.get_mut(&gateway) else { return };
        while let Some(&(number, sent)) = lease.sent.front().filter(|(number, _)| *number <= sequence) {
            lease.sent.pop_front();
            if number == sequence {
                lease.answered = lease.answered.max(sent);
            }
        }
        // The answer to an old heartbeat says nothing of now.
        if lease.standing != Standing::Valid && now.since(lease.answered) <= self.timing.stop_after {
            lease.standing = Standing::Valid;
            self.tell_holdings(gateway);
        }
    }

    fn tell_holdings(&mut self, gateway: GatewayName) {
        let held = self.requests.iter().filter(|(name, _)| name.gateway == gateway);
        self.outputs.extend(held.filter_map(|(request, held)| {
            let holding = held.seat.holding()?;
            let (phase, tag, entries) = (holding.phase, holding.tag, holding.entries.len() as u32);
            Some(SeatsOutput::Holds { request: *request, phase, tag, entries })
        }));
        self.outputs.push_back(SeatsOutput::AllHeld { gateway });
    }

    /// Sends heartbeats, and ends what leases do not cover any more.
    fn look_at_leases(&mut self, now: Time) {
        let mut ended = Vec::new();
        for (gateway, lease) in &mut self.gateways {
            let age = now.since(lease.answered);
            if age > self.timing.free_after && lease.standing != Standing::Freed {
                lease.standing = Standing::Freed;
                ended.push((*gateway, true));
            } else if age > self.timing.stop_after && lease.standing == Standing::Valid {
                lease.standing = Standing::Stopped;
                ended.push((*gateway, false));
            }
            if lease.next <= now {
                lease.sequence += 1;
                lease.sent.push_back((lease.sequence, now));
                if lease.sent.len() > Lease::SENT_MAX {
                    lease.sent.pop_front();
                }
                lease.next = now + self.timing.heartbeat;
                self.outputs.push_back(SeatsOutput::Heartbeat { gateway: *gateway, sequence: lease.sequence });
            }
        }
        let long_gone = 2 * self.timing.free_after;
        self.gateways.retain(|_, lease| now.since(lease.answered) <= long_gone);
        for (gateway, frees) in ended {
            // Nobody waits for a copy whose gateway is not heard of.
            self.with_prefixes(|prefixes, out| prefixes.lapse(gateway, now, out));
            let names: Vec<RequestName> = self.requests.keys().filter(|name| name.gateway == gateway).copied().collect();
            for request in names {
                self.with_seat(request, now, if frees { Seat::lapse } else { Seat::pause });
            }
        }
    }

    fn look_at_requests(&mut self, now: Time) {
        let due: Vec<RequestName> = self.requests.iter().filter(|(_, held)| held.due(&self.timing) <= now).map(|(name, _)| *name).collect();
        for request in due {
            let held = &self.requests[&request];
            if held.is_forgotten(&self.timing, now) {
                self.requests.remove(&request);
                continue;
            }
            let waited = now.since(held.since);
            match held.phase {
                Some(Phase::Copying) if waited >= self.timing.stall_after => self.with_seat(request, now, Seat::abort),
                Some(Phase::Frozen) if waited >= self.timing.stand_still => self.with_seat(request, now, Seat::abort),
                Some(Phase::Asking) if waited >= self.timing.reclaim_after => self.with_seat(request, now, Seat::reclaim),
                Some(Phase::Preparing | Phase::Prepared) if waited >= self.timing.withdraw_after => {
                    self.with_seat(request, now, Seat::withdraw);
                }
                _ => {}
            }
            let held = self.requests.get_mut(&request).expect("it was there");
            if held.repeat.is_due(&self.timing, now) {
                let again = held.seat.unanswered();
                self.outputs.extend(again.into_iter().map(|output| named(request, output)));
            }
        }
    }

    /// What is prepared to the end does not wait longer for it.
    fn copy_advanced(&mut self, request: RequestName, now: Time) {
        let Some(held) = self.requests.get_mut(&request) else { return };
        if matches!(held.phase, Some(Phase::Copying | Phase::Frozen | Phase::Preparing)) {
            held.since = now;
        }
    }

    fn with_seat(&mut self, request: RequestName, now: Time, change: impl FnOnce(&mut Seat<E>, &mut Vec<SeatOutput<E>>)) {
        let incarnation = self.place.incarnation;
        let held = self.requests.entry(request).or_insert_with(|| Held {
            seat: Seat::new(incarnation),
            repeat: Repeat::IDLE,
            since: now,
            phase: None,
        });
        let mut out = Vec::new();
        change(&mut held.seat, &mut out);
        let phase = held.seat.holding().map(|holding| holding.phase);
        if phase != held.phase {
            (held.phase, held.since) = (phase, now);
            held.repeat = Repeat::IDLE;
        }
        let waits = held.seat.is_waiting();
        if !waits || held.repeat.at() == Time::NEVER {
            held.repeat.reset(waits, &self.timing, now);
        }
        self.outputs.extend(out.into_iter().map(|output| named(request, output)));
    }
}

fn named<E>(request: RequestName, output: SeatOutput<E>) -> SeatsOutput<E> {
    match output {
        SeatOutput::ToGateway(message) => SeatsOutput::ToGateway { request, message },
        SeatOutput::ToPeer { to, message } => SeatsOutput::ToPeer { request, to, message },
        SeatOutput::Work(work) => SeatsOutput::Work { request, work },
    }
}

impl Lease {
    /// More than are sent before a gateway is gone.
    const SENT_MAX: usize = 256;

    fn new(now: Time) -> Self {
        Self { answered: now, sent: VecDeque::new(), sequence: 0, next: now, standing: Standing::Valid }
    }

    /// When it covers less than now, or is forgotten.
    fn ends(&self, timing: &Timing) -> Time {
        let just_past = Duration::from_nanos(1);
        match self.standing {
            Standing::Valid => self.answered + timing.stop_after + just_past,
            Standing::Stopped => self.answered + timing.free_after + just_past,
            Standing::Freed => self.answered + 2 * timing.free_after + just_past,
        }
    }
}

impl<E: Entry> Held<E> {
    fn due(&self, timing: &Timing) -> Time {
        let phase = match self.phase {
            None => self.since + 2 * timing.free_after,
            Some(Phase::Copying) => self.since + timing.stall_after,
            Some(Phase::Frozen) => self.since + timing.stand_still,
            Some(Phase::Asking) => self.since + timing.reclaim_after,
            Some(Phase::Preparing | Phase::Prepared) => self.since + timing.withdraw_after,
            Some(Phase::Running | Phase::Reclaiming | Phase::Withdrawing) => Time::NEVER,
        };
        phase.min(self.repeat.at())
    }

    /// Nothing is held, and nothing old can come any more.
    fn is_forgotten(&self, timing: &Timing, now: Time) -> bool {
        self.phase.is_none() && now.since(self.since) >= 2 * timing.free_after
    }
}

#[cfg(test)]
mod tests {
    use baton_units::{Incarnation, ReplicaId};

    use super::*;

    #[derive(Debug, Clone, PartialEq, Eq)]
    struct Token;

    impl Entry for Token {
        fn is_finish(&self) -> bool {
            false
        }
    }

    const GATEWAY: GatewayName = GatewayName { id: 1, incarnation: 1 };
    const REQUEST: RequestName = RequestName { gateway: GATEWAY, sequence: 1 };

    fn seconds(seconds: u64) -> Time {
        Time::ZERO + Duration::from_secs(seconds)
    }

    /// Of a gateway that attached at the beginning and answers no heartbeat.
    fn seats() -> Seats<Token> {
        let place = Place { replica: ReplicaId(0), incarnation: Incarnation(1) };
        let mut seats = Seats::new(place, Timing::default());
        seats.handle(SeatsInput::Attached { gateway: GATEWAY }, Time::ZERO);
        seats
    }

    fn start_at(seats: &mut Seats<Token>, now: Time) {
        let message = ToSeat::Start { epoch: Tag(1), delivered: Vec::new() };
        seats.handle(SeatsInput::FromGateway { request: REQUEST, message }, now);
    }

    fn outputs(seats: &mut Seats<Token>) -> Vec<SeatsOutput<Token>> {
        std::iter::from_fn(|| seats.poll()).collect()
    }

    #[test]
    fn a_gateway_that_is_gone_is_sent_nothing_any_more() {
        let mut seats = seats();
        // Its first heartbeat, and that all was told.
        let mut heartbeats = outputs(&mut seats).len() - 1;
        while seats.poll_timeout() < Time::NEVER {
            let now = seats.poll_timeout();
            assert!(now < seconds(31), "it is remembered for two leases");
            seats.handle(SeatsInput::Timeout, now);
            heartbeats += outputs(&mut seats).len();
        }
        assert_eq!(heartbeats, 61, "two a second");
    }

    #[test]
    fn what_starts_on_a_lease_that_has_run_out_waits_or_goes() {
        let mut waits = seats();
        start_at(&mut waits, seconds(6));
        let is_computing = |seats: &Seats<Token>| seats.seat(REQUEST).is_some_and(Seat::is_computing);
        assert_eq!((waits.holdings().count(), is_computing(&waits)), (1, false));
        let sent = outputs(&mut waits).into_iter().filter(|output| matches!(output, SeatsOutput::Heartbeat { .. })).count() as u64;
        waits.handle(SeatsInput::Leased { gateway: GATEWAY, sequence: sent - 1 }, seconds(6));
        assert_eq!(outputs(&mut waits), [], "an old heartbeat's answer");
        waits.handle(SeatsInput::Leased { gateway: GATEWAY, sequence: sent }, seconds(6));
        assert!(outputs(&mut waits).iter().any(|output| matches!(output, SeatsOutput::Holds { .. })));
        let keep = ToSeat::Keep { epoch: Tag(1), next: 0 };
        waits.handle(SeatsInput::FromGateway { request: REQUEST, message: keep }, seconds(6));
        assert!(is_computing(&waits));
        let mut goes = seats();
        start_at(&mut goes, seconds(16));
        assert_eq!(goes.holdings().count(), 0);
    }

    #[test]
    fn a_source_that_is_told_no_goes_on_whether_it_copies_or_is_frozen() {
        let target = Place { replica: ReplicaId(1), incarnation: Incarnation(1) };
        let (epoch, attempt) = (Tag(1), Tag(2));
        let told = |message| SeatsInput::FromGateway { request: REQUEST, message };
        for frozen in [false, true] {
            let mut seats = seats();
            start_at(&mut seats, seconds(1));
            seats.handle(told(ToSeat::Move { epoch, attempt, target }), seconds(1));
            if frozen {
                seats.handle(SeatsInput::Frozen { request: REQUEST }, seconds(1));
            }
            assert_eq!(seats.seat(REQUEST).unwrap().is_computing(), !frozen);
            outputs(&mut seats);
            let aborted = |attempt| SeatsOutput::ToGateway { request: REQUEST, message: ToGateway::Aborted { epoch, attempt } };
            seats.handle(told(ToSeat::No { epoch, attempt: Tag(1) }), seconds(1));
            assert_ne!(seats.seat(REQUEST).unwrap().holding().unwrap().phase, Phase::Running, "an older attempt");
            assert_eq!(outputs(&mut seats), [aborted(Tag(1))], "it is over, as is said");
            seats.handle(told(ToSeat::No { epoch, attempt }), seconds(1));
            assert!(seats.seat(REQUEST).unwrap().is_computing());
            assert!(outputs(&mut seats).contains(&aborted(attempt)));
            seats.handle(told(ToSeat::No { epoch, attempt }), seconds(1));
            assert_eq!(outputs(&mut seats), [aborted(attempt)], "its answer may have been lost");
        }
    }

    /// Seats at both ends of a copy, whose gateway answers every heartbeat; seconds from `from` on until one of them ends it, if one does
    /// before `until`. `advances`: whether the copy does, each second.
    fn copy_ends(from: u64, until: u64, advances: impl Fn(u64) -> [bool; 2]) -> [Option<u64>; 2] {
        let place = |replica| Place { replica: ReplicaId(replica), incarnation: Incarnation(1) };
        let (epoch, attempt) = (Tag(1), Tag(2));
        let mut both = [0, 1].map(|replica| Seats::<Token>::new(place(replica), Timing::default()));
        for seats in &mut both {
            seats.handle(SeatsInput::Attached { gateway: GATEWAY }, seconds(from));
        }
        start_at(&mut both[0], seconds(from));
        let message = ToSeat::Move { epoch, attempt, target: place(1) };
        both[0].handle(SeatsInput::FromGateway { request: REQUEST, message }, seconds(from));
        let prepare = ToPeer::Prepare { attempt };
        both[1].handle(SeatsInput::FromPeer { request: REQUEST, from: place(0), message: prepare }, seconds(from));
        let mut ends = [None, None];
        for second in from + 1..until {
            for (index, seats) in both.iter_mut().enumerate() {
                if advances(second)[index] {
                    seats.handle(SeatsInput::CopyAdvanced { request: REQUEST }, seconds(second));
                }
                seats.handle(SeatsInput::Timeout, seconds(second));
                for output in outputs(seats) {
                    match output {
                        SeatsOutput::Heartbeat { gateway, sequence } => {
                            seats.handle(SeatsInput::Leased { gateway, sequence }, seconds(second));
                        }
                        SeatsOutput::ToGateway { message: ToGateway::Aborted { .. } | ToGateway::Withdraw { .. }, .. } => {
                            ends[index] = ends[index].or(Some(second - from));
                        }
                        SeatsOutput::Holds { .. }
                        | SeatsOutput::AllHeld { .. }
                        | SeatsOutput::ToGateway { .. }
                        | SeatsOutput::ToPeer { .. }
                        | SeatsOutput::Prefix { .. }
                        | SeatsOutput::Work { .. } => {}
                    }
                }
            }
        }
        ends
    }

    #[test]
    fn a_copy_that_advances_is_not_given_up_however_long_it_takes_and_one_that_does_not_is() {
        assert_eq!(copy_ends(0, 500, |_| [false, false]), [Some(20), Some(10)], "nothing goes and nothing comes");
        assert_eq!(copy_ends(0, 500, |second| [second % 19 == 0, second % 9 == 0]), [None, None]);
        assert_eq!(copy_ends(0, 500, |second| [second < 100, second < 100]), [Some(119), Some(109)], "it counts from the last sign");
    }

    #[test]
    fn a_target_that_has_all_asks_however_lively_its_source_was() {
        let mut seats = seats();
        let from = Place { replica: ReplicaId(1), incarnation: Incarnation(1) };
        let told = |message| SeatsInput::FromPeer { request: REQUEST, from, message };
        seats.handle(told(ToPeer::Prepare { attempt: Tag(2) }), seconds(1));
        seats.handle(told(ToPeer::State { attempt: Tag(2), entries: vec![Token] }), seconds(1));
        seats.handle(SeatsInput::CopyAdvanced { request: REQUEST }, seconds(4));
        outputs(&mut seats);
        seats.handle(SeatsInput::Timeout, seconds(11));
        let asks = SeatsOutput::ToGateway { request: REQUEST, message: ToGateway::Withdraw { attempt: Tag(2) } };
        assert!(outputs(&mut seats).contains(&asks));
    }

    #[test]
    fn a_source_that_is_told_again_of_an_attempt_that_ended_says_so_again() {
        let target = Place { replica: ReplicaId(1), incarnation: Incarnation(1) };
        let (epoch, attempt) = (Tag(1), Tag(2));
        let mut seats = seats();
        start_at(&mut seats, seconds(1));
        let told = || SeatsInput::FromGateway { request: REQUEST, message: ToSeat::Move { epoch, attempt, target } };
        let aborted = SeatsOutput::ToGateway { request: REQUEST, message: ToGateway::Aborted { epoch, attempt } };
        seats.handle(told(), seconds(1));
        seats.handle(told(), seconds(1));
        assert!(!outputs(&mut seats).contains(&aborted), "it is under way");
        seats.handle(SeatsInput::CopyFailed { request: REQUEST }, seconds(1));
        assert!(outputs(&mut seats).contains(&aborted));
        seats.handle(told(), seconds(1));
        assert_eq!(outputs(&mut seats), [aborted]);
    }

    #[test]
    fn a_source_that_stands_still_for_a_target_that_says_nothing_goes_on() {
        let target = Place { replica: ReplicaId(1), incarnation: Incarnation(1) };
        let mut seats = seats();
        start_at(&mut seats, seconds(1));
        let message = ToSeat::Move { epoch: Tag(1), attempt: Tag(2), target };
        seats.handle(SeatsInput::FromGateway { request: REQUEST, message }, seconds(1));
        seats.handle(SeatsInput::Frozen { request: REQUEST }, seconds(2));
        let phase = |seats: &Seats<Token>| seats.seat(REQUEST).unwrap().holding().unwrap().phase;
        let due = seconds(2) + Timing::default().stand_still;
        // Its gateway lives.
        let leased = |seats: &mut Seats<Token>, now| {
            seats.handle(SeatsInput::Timeout, now);
            for output in outputs(seats) {
                if let SeatsOutput::Heartbeat { sequence, .. } = output {
                    seats.handle(SeatsInput::Leased { gateway: GATEWAY, sequence }, now);
                }
            }
        };
        for second in 2..7 {
            leased(&mut seats, seconds(second));
            assert_eq!(phase(&seats), Phase::Frozen);
        }
        leased(&mut seats, due);
        assert_eq!(phase(&seats), Phase::Running);
        assert!(seats.seat(REQUEST).unwrap().is_computing());
    }

    #[test]
    fn a_source_that_hears_no_before_it_hears_of_the_move_answers_and_does_not_move() {
        let target = Place { replica: ReplicaId(1), incarnation: Incarnation(1) };
        let (epoch, attempt) = (Tag(1), Tag(2));
        let mut seats = seats();
        start_at(&mut seats, seconds(1));
        outputs(&mut seats);
        let told = |message| SeatsInput::FromGateway { request: REQUEST, message };
        seats.handle(told(ToSeat::No { epoch, attempt }), seconds(1));
        let aborted = |attempt| SeatsOutput::ToGateway { request: REQUEST, message: ToGateway::Aborted { epoch, attempt } };
        assert_eq!(outputs(&mut seats), [aborted(attempt)]);
        seats.handle(told(ToSeat::Move { epoch, attempt, target }), seconds(1));
        assert_eq!(outputs(&mut seats), [aborted(attempt)], "it says again that it is over");
        // A later one ends earlier ones, of which it may not have heard.
        seats.handle(told(ToSeat::Move { epoch, attempt: Tag(3), target }), seconds(1));
        outputs(&mut seats);
        seats.handle(told(ToSeat::No { epoch, attempt: Tag(4) }), seconds(1));
        assert!(seats.seat(REQUEST).unwrap().is_computing());
        let told: Vec<_> = outputs(&mut seats).into_iter().filter(|output| matches!(output, SeatsOutput::ToGateway { .. })).collect();
        assert_eq!(told, [aborted(Tag(3)), aborted(Tag(4))]);
    }

    #[test]
    fn what_cannot_be_run_is_forgotten_up_to_its_epoch_and_says_of_what_class_it_is() {
        let mut seats = seats();
        start_at(&mut seats, seconds(1));
        outputs(&mut seats);
        let lost = |class| SeatsOutput::ToGateway { request: REQUEST, message: ToGateway::Lost { epoch: Tag(1), class } };
        seats.handle(SeatsInput::CannotRun { request: REQUEST, class: LostClass::Busy }, seconds(1));
        let free = SeatsOutput::Work { request: REQUEST, work: Work::Free };
        assert_eq!(outputs(&mut seats), [free, lost(LostClass::Busy)]);
        start_at(&mut seats, seconds(1));
        assert_eq!(outputs(&mut seats), [lost(LostClass::Lost)], "the same epoch is over");
        seats.handle(SeatsInput::CannotRun { request: REQUEST, class: LostClass::Busy }, seconds(1));
        assert_eq!(outputs(&mut seats), [], "nothing is there");
    }

    #[test]
    fn a_source_brings_nothing_for_a_gateway_that_is_not_attached() {
        let mut seats = seats();
        let from = Place { replica: ReplicaId(1), incarnation: Incarnation(1) };
        let stranger = RequestName { gateway: GatewayName { id: 2, incarnation: 1 }, sequence: 1 };
        let prepare = |request| SeatsInput::FromPeer { request, from, message: ToPeer::Prepare { attempt: Tag(2) } };
        seats.handle(prepare(REQUEST), seconds(1));
        seats.handle(prepare(stranger), seconds(1));
        assert_eq!(seats.holdings().collect::<Vec<_>>(), [REQUEST]);
    }

    #[test]
    fn a_gateway_that_attaches_again_has_a_lease_again() {
        let mut seats = seats();
        seats.handle(SeatsInput::Timeout, seconds(16));
        seats.handle(SeatsInput::Attached { gateway: GATEWAY }, seconds(17));
        start_at(&mut seats, seconds(17));
        assert!(seats.seat(REQUEST).is_some_and(Seat::is_computing));
        seats.handle(SeatsInput::Timeout, seconds(33));
        assert_eq!(seats.holdings().count(), 0, "and it ends again");
    }
}
