use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

use baton_units::{Incarnation, Time};

use crate::{
    Beat, Entry, LostClass, Ownership, OwnershipInput, Phase, Place, RegisterOutput, Suspicion, Tag, Timing, ToGateway, ToSeat, Watch,
};

/// A replica is told of every so many entries that the client has taken: well below the 256 without which it pauses the request.
const ACK_EVERY: u32 = 64;

/// Something that happened to a gateway.
///
/// What comes of a place that is not connected, as late messages of an older life, is not heard. A message that cannot be delivered may be
/// dropped: what matters is repeated.
#[derive(Debug, Clone)]
pub enum OwnersInput<E> {
    /// A new request, under a number that was never used in this life of the gateway.
    Start {
        sequence: u64,
        owner: Place,
    },
    FromSeat {
        sequence: u64,
        from: Place,
        message: ToGateway<E>,
    },
    /// A replica that connected, or that answers again, told what it holds.
    Holds {
        sequence: u64,
        from: Place,
        phase: Phase,
        tag: Tag,
    },
    /// It has told all that it holds.
    AllHeld {
        place: Place,
    },
    /// The control connection is there, for the first time or again. Older lives of the same replica are gone.
    Connected {
        place: Place,
    },
    /// The control connection broke and could not be made again at once.
    Disconnected {
        place: Place,
    },
    Beat {
        place: Place,
        beat: Beat,
    },
    /// A life of a replica has ended, with all that it held.
    Gone {
        place: Place,
    },
    /// Move the request; nothing happens where [`Ownership::can_move`] is false or the target is suspected.
    Move {
        sequence: u64,
        target: Place,
    },
    /// Give the open attempt up.
    Stay {
        sequence: u64,
    },
    /// Run on at `owner`: the answer to [`OwnersOutput::Lost`].
    Force {
        sequence: u64,
        owner: Place,
    },
    /// The client has taken the entries below `next`.
    Taken {
        sequence: u64,
        next: u32,
    },
    /// The client has gone, or has all it wants.
    End {
        sequence: u64,
    },
    /// The moment of [`Owners::poll_timeout`] has passed.
    Timeout,
}

/// What a gateway must do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OwnersOutput<E> {
    ToSeat {
        sequence: u64,
        to: Place,
        message: ToSeat<E>,
    },
    /// Answer the heartbeat.
    Lease {
        to: Place,
        sequence: u64,
    },
    /// The client's next entry.
    Deliver {
        sequence: u64,
        entry: E,
    },
    /// The owner has shown that it runs the request.
    Started {
        sequence: u64,
        owner: Place,
        epoch: Tag,
    },
    /// An attempt made its target the owner.
    Committed {
        sequence: u64,
        attempt: Tag,
        from: Place,
        to: Place,
    },
    /// An attempt ended, and its source goes on.
    AttemptEnded {
        sequence: u64,
        attempt: Tag,
    },
    /// Nobody is known to run it, or `owner` is suspected: choose a trusted replica and say [`OwnersInput::Force`], or end it, as where it is
    /// [refused](LostClass::Refused). It may be said
    /// again. Until it is answered, an owner that comes back goes on.
    Lost {
        sequence: u64,
        owner: Place,
        class: LostClass,
    },
    /// A replica is thought to be dead, or to hang: nothing new should be placed there.
    Suspected {
        place: Place,
        suspicion: Suspicion,
    },
    Trusted {
        place: Place,
    },
    /// The request has ended and all replicas have let go of it; nothing of it is kept.
    Forgotten {
        sequence: u64,
    },
}

/// All requests of one life of a gateway, and its opinion of the replicas that it is connected to.
///
/// It keeps each request from its start until it is [forgotten](OwnersOutput::Forgotten): how many start is for the shell to bound. An ended
/// one waits for replicas that are heard of, and for others [`Timing::lingers`] at most. Of each replica it keeps one life.
#[derive(Debug)]
pub struct Owners<E> {
    timing: Timing,
    requests: BTreeMap<u64, Request<E>>,
    replicas: BTreeMap<Place, Replica>,
    /// Requests of which a place may hold something, or that it owns.
    at: BTreeSet<(Place, u64)>,
    due: BTreeSet<(Time, Due)>,
    outputs: VecDeque<OwnersOutput<E>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    Replica(Place),
    Request(u64),
}

#[derive(Debug)]
struct Request<E> {
    ownership: Ownership<E>,
    /// As it is in the ordered set.
    due: Time,
    /// Where [`Owners::at`] has it.
    places: BTreeSet<Place>,
    /// Entries that the client has taken.
    taken: u32,
    /// Entries that the owner was told of.
    acked: u32,
    /// Entries that come again are acknowledged again no sooner.
    ack_again: Time,
}

#[derive(Debug)]
struct Replica {
    watch: Watch,
    /// As it is in the ordered set.
    due: Time,
    /// Silent for so long that its leases have freed all that it held.
    freed: bool,
}

impl<E: Entry> Owners<E> {
    pub fn new(timing: Timing) -> Self {
        Self {
            timing,
            requests: BTreeMap::new(),
            replicas: BTreeMap::new(),
            at: BTreeSet::new(),
            due: BTreeSet::new(),
            outputs: VecDeque::new(),
        }
    }

    /// Drain [`Self::poll`] after each call.
    pub fn handle(&mut self, input: OwnersInput<E>, now: Time) {
        match input {
            OwnersInput::Start { sequence, owner } => self.start(sequence, owner, now),
            OwnersInput::FromSeat { sequence, from, message } => self.heard(sequence, from, message, now),
            OwnersInput::Holds { sequence, from, phase, tag } => {
                if !self.replicas.contains_key(&from) {
                    return;
                }
                if self.requests.contains_key(&sequence) {
                    self.tell(sequence, OwnershipInput::Holds { from, phase, tag }, now);
                } else {
                    self.stop_unknown(sequence, from);
                }
            }
            OwnersInput::AllHeld { place } => self.all_held(place, now),
            OwnersInput::Connected { place } => self.connected(place, now),
            OwnersInput::Disconnected { place } => {
                if self.replicas.get_mut(&place).is_some_and(|replica| replica.watch.disconnected()) {
                    self.suspect(place, now);
                }
            }
            OwnersInput::Beat { place, beat } => {
                let Some(replica) = self.replicas.get_mut(&place) else { return };
                replica.freed = false;
                let trusted = replica.watch.beat(beat, now);
                self.outputs.push_back(OwnersOutput::Lease { to: place, sequence: beat.sequence });
                self.outputs.extend(trusted.then_some(OwnersOutput::Trusted { place }));
                self.schedule_replica(place);
            }
            OwnersInput::Gone { place } => self.gone(place, now),
            OwnersInput::Move { sequence, target } => {
                if !self.is_suspected(target) {
                    self.tell(sequence, OwnershipInput::Move { target }, now);
                }
            }
            OwnersInput::Stay { sequence } => self.tell(sequence, OwnershipInput::Stay, now),
            OwnersInput::Force { sequence, owner } => {
                self.tell(sequence, OwnershipInput::Force { owner }, now);
                self.suspect_owner(sequence, owner, now);
            }
            OwnersInput::Taken { sequence, next } => self.taken(sequence, next),
            OwnersInput::End { sequence } => self.tell(sequence, OwnershipInput::End, now),
            OwnersInput::Timeout => self.look(now),
        }
    }

    pub fn poll(&mut self) -> Option<OwnersOutput<E>> {
        self.outputs.pop_front()
    }

    pub fn poll_timeout(&self) -> Time {
        self.due.first().map_or(Time::NEVER, |&(at, _)| at)
    }

    /// Of a request that is not forgotten.
    pub fn ownership(&self, sequence: u64) -> Option<&Ownership<E>> {
        self.requests.get(&sequence).map(|request| &request.ownership)
    }

    /// Also true of a place that never was connected, or is gone.
    pub fn is_suspected(&self, place: Place) -> bool {
        self.replicas.get(&place).is_none_or(|replica| replica.watch.suspicion().is_some())
    }

    /// Why a connected place is suspected; none where it is trusted, or not known.
    pub fn suspicion(&self, place: Place) -> Option<Suspicion> {
        self.replicas.get(&place).and_then(|replica| replica.watch.suspicion())
    }

    /// Requests that live and are owned by `place`, ascending.
    pub fn requests_on(&self, place: Place) -> impl Iterator<Item = u64> {
        let owns = move |sequence: &u64| self.requests[sequence].ownership.register().owner().is_some_and(|(owner, _)| owner == place);
        self.at.range((place, 0)..=(place, u64::MAX)).map(|&(_, sequence)| sequence).filter(owns)
    }

    /// All requests are forgotten.
    pub fn is_quiescent(&self) -> bool {
        self.requests.is_empty()
    }

    fn start(&mut self, sequence: u64, owner: Place, now: Time) {
        let request = Request {
            ownership: Ownership::new(owner, self.timing, now),
            due: Time::NEVER,
            places: BTreeSet::new(),
            taken: 0,
            acked: 0,
            ack_again: Time::ZERO,
        };
        let former = self.requests.insert(sequence, request);
        assert!(former.is_none(), "request {sequence} was started before");
        self.after(sequence, now);
        self.suspect_owner(sequence, owner, now);
    }

    fn heard(&mut self, sequence: u64, from: Place, message: ToGateway<E>, now: Time) {
        if !self.replicas.contains_key(&from) {
            return;
        }
        let Some(request) = self.requests.get_mut(&sequence) else {
            if !matches!(message, ToGateway::Stopped { .. }) {
                self.stop_unknown(sequence, from);
            }
            return;
        };
        // What the client has taken comes again: its acknowledgement was lost, or not sent yet.
        if let ToGateway::Output { epoch, index, .. } = message
            && request.ownership.register().owner() == Some((from, epoch))
            && index < request.taken
            && request.ack_again <= now
        {
            request.ack_again = now + self.timing.repeat;
            self.acknowledge(sequence);
        }
        self.tell(sequence, OwnershipInput::FromSeat { from, message }, now);
    }

    fn stop_unknown(&mut self, sequence: u64, to: Place) {
        self.outputs.push_back(OwnersOutput::ToSeat { sequence, to, message: ToSeat::Stop { upto: Tag::ALL } });
    }

    fn all_held(&mut self, place: Place, now: Time) {
        if !self.replicas.contains_key(&place) {
            return;
        }
        for sequence in self.sequences_at(place) {
            self.tell(sequence, OwnershipInput::Attached { place }, now);
            let owner = self.requests.get(&sequence).and_then(|request| request.ownership.register().owner());
            if owner.is_some_and(|(owner, _)| owner == place) {
                self.acknowledge(sequence);
            }
        }
    }

    fn connected(&mut self, place: Place, now: Time) {
        let lives = |incarnation| Place { replica: place.replica, incarnation: Incarnation(incarnation) };
        let known = self.replicas.range(lives(0)..=lives(u64::MAX)).map(|(life, _)| *life);
        let held = self.at.range((lives(0), 0)..=(lives(u64::MAX), u64::MAX)).map(|&(life, _)| life);
        let older: BTreeSet<Place> = known.chain(held).filter(|life| *life != place).collect();
        for life in older {
            self.gone(life, now);
        }
        let new = || Replica { watch: Watch::new(&self.timing, now), due: Time::NEVER, freed: false };
        let replica = self.replicas.entry(place).or_insert_with(new);
        replica.freed = false;
        if replica.watch.connected(now) {
            self.outputs.push_back(OwnersOutput::Trusted { place });
        }
        self.schedule_replica(place);
    }

    fn gone(&mut self, place: Place, now: Time) {
        if let Some(replica) = self.replicas.remove(&place) {
            self.due.remove(&(replica.due, Due::Replica(place)));
        }
        for sequence in self.sequences_at(place) {
            self.tell(sequence, OwnershipInput::Gone { place }, now);
        }
    }

    fn suspect(&mut self, place: Place, now: Time) {
        let suspicion = self.replicas.get(&place).and_then(|replica| replica.watch.suspicion());
        self.outputs.extend(suspicion.map(|suspicion| OwnersOutput::Suspected { place, suspicion }));
        for sequence in self.sequences_at(place) {
            self.tell(sequence, OwnershipInput::Suspected { place }, now);
        }
        self.schedule_replica(place);
    }

    /// Of a request that was just given to `owner`: whoever is suspected already is not suspected anew.
    fn suspect_owner(&mut self, sequence: u64, owner: Place, now: Time) {
        if self.is_suspected(owner) {
            self.tell(sequence, OwnershipInput::Suspected { place: owner }, now);
        }
    }

    fn taken(&mut self, sequence: u64, next: u32) {
        let Some(request) = self.requests.get_mut(&sequence) else { return };
        let delivered = request.ownership.register().delivered().len() as u32;
        request.taken = request.taken.max(next.min(delivered));
        if request.taken >= request.acked + ACK_EVERY {
            self.acknowledge(sequence);
        }
    }

    fn acknowledge(&mut self, sequence: u64) {
        let Some(request) = self.requests.get_mut(&sequence) else { return };
        let Some((to, epoch)) = request.ownership.register().owner() else { return };
        if request.taken > 0 {
            request.acked = request.acked.max(request.taken);
            let message = ToSeat::Ack { epoch, next: request.taken };
            self.outputs.push_back(OwnersOutput::ToSeat { sequence, to, message });
        }
    }

    fn look(&mut self, now: Time) {
        let due: Vec<Due> = self.due.iter().take_while(|(at, _)| *at <= now).map(|&(_, due)| due).collect();
        for due in due {
            match due {
                Due::Replica(place) => self.look_at(place, now),
                Due::Request(sequence) => self.tell(sequence, OwnershipInput::Timeout, now),
            }
        }
    }

    fn look_at(&mut self, place: Place, now: Time) {
        let lingers = self.timing.lingers();
        let Some(replica) = self.replicas.get_mut(&place) else { return };
        if replica.watch.look(now) {
            self.suspect(place, now);
            return;
        }
        if replica.watch.suspicion().is_some() && now.since(replica.watch.heard()) > lingers {
            replica.freed = true;
            for sequence in self.sequences_at(place) {
                self.after(sequence, now);
            }
        }
        self.schedule_replica(place);
    }

    fn sequences_at(&self, place: Place) -> Vec<u64> {
        self.at.range((place, 0)..=(place, u64::MAX)).map(|&(_, sequence)| sequence).collect()
    }

    fn tell(&mut self, sequence: u64, input: OwnershipInput<E>, now: Time) {
        if let Some(request) = self.requests.get_mut(&sequence) {
            request.ownership.handle(input, now);
            self.after(sequence, now);
        }
    }

    /// Carries a request's outputs out, and keeps what is known of it in order.
    fn after(&mut self, sequence: u64, now: Time) {
        let Some(request) = self.requests.get_mut(&sequence) else { return };
        let holds_nothing = |place: &Place| self.replicas.get(place).is_none_or(|replica| replica.freed);
        let freed: Vec<Place> = request.ownership.register().stopping().filter(holds_nothing).collect();
        for place in freed {
            request.ownership.handle(OwnershipInput::Freed { place }, now);
        }
        while let Some(output) = request.ownership.poll() {
            self.outputs.push_back(match output {
                RegisterOutput::ToSeat { to, message } => {
                    if let ToSeat::Start { delivered, .. } = &message {
                        request.acked = delivered.len() as u32;
                    }
                    OwnersOutput::ToSeat { sequence, to, message }
                }
                RegisterOutput::Deliver(entry) => OwnersOutput::Deliver { sequence, entry },
                RegisterOutput::Started { owner, epoch } => OwnersOutput::Started { sequence, owner, epoch },
                RegisterOutput::Committed { attempt, from, to } => OwnersOutput::Committed { sequence, attempt, from, to },
                RegisterOutput::AttemptEnded { attempt } => OwnersOutput::AttemptEnded { sequence, attempt },
                RegisterOutput::Lost(class) => {
                    let (owner, _) = request.ownership.register().owner().expect("what has ended is not lost");
                    OwnersOutput::Lost { sequence, owner, class }
                }
            });
        }
        if request.ownership.is_quiescent() {
            self.forget(sequence);
            return;
        }
        let due = request.ownership.poll_timeout();
        reschedule(&mut self.due, &mut request.due, due, Due::Request(sequence));
        let register = request.ownership.register();
        let owner = register.owner().map(|(owner, _)| owner);
        if owner.is_some_and(|owner| !register.places().contains(&owner)) || request.places != *register.places() {
            let places: BTreeSet<Place> = register.places().iter().copied().chain(owner).collect();
            for &place in request.places.difference(&places) {
                self.at.remove(&(place, sequence));
            }
            self.at.extend(places.iter().map(|&place| (place, sequence)));
            request.places = places;
        }
    }

    fn forget(&mut self, sequence: u64) {
        let Some(request) = self.requests.remove(&sequence) else { return };
        self.due.remove(&(request.due, Due::Request(sequence)));
        for place in request.places {
            self.at.remove(&(place, sequence));
        }
        self.outputs.push_back(OwnersOutput::Forgotten { sequence });
    }

    fn schedule_replica(&mut self, place: Place) {
        let just_past = Duration::from_nanos(1);
        let Some(replica) = self.replicas.get_mut(&place) else { return };
        let due = match replica.watch.suspicion() {
            None => replica.watch.poll_timeout(),
            Some(_) if replica.freed => Time::NEVER,
            Some(_) => replica.watch.heard() + self.timing.lingers() + just_past,
        };
        reschedule(&mut self.due, &mut replica.due, due, Due::Replica(place));
    }
}

fn reschedule(all: &mut BTreeSet<(Time, Due)>, current: &mut Time, next: Time, what: Due) {
    if *current != next {
        all.remove(&(*current, what));
        if next != Time::NEVER {
            all.insert((next, what));
        }
        *current = next;
    }
}

#[cfg(test)]
mod tests;
