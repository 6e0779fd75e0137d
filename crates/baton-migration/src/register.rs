use std::collections::{BTreeMap, BTreeSet};

use crate::{
    Place, Tag,
    message::{Entry, LostClass, Phase, ToGateway, ToSeat},
};

/// The gateway's record of one request: who owns it, and which entries of whom its client may get.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Register<E> {
    /// `None` once the request has ended.
    live: Option<Live<E>>,
    counter: Tag,
    /// The highest tag that each place must stop, until it says so.
    pub(crate) stops: BTreeMap<Place, Tag>,
    /// Places that may hold something of the request.
    pub(crate) places: BTreeSet<Place>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Live<E> {
    owner: Place,
    epoch: Tag,
    /// The source's question that made this epoch.
    resumed: Option<(Tag, Tag)>,
    /// The owner has shown that it runs.
    started: bool,
    attempt: Option<Attempt>,
    /// The latest attempt of which the owner, under this epoch, was told that it is over and has not said that it knows.
    given_up: Option<Tag>,
    closed: Vec<Closed>,
    delivered: Vec<E>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Attempt {
    tag: Tag,
    target: Place,
}

/// A superseded epoch, which still supplies the entries below `until`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Closed {
    epoch: Tag,
    until: u32,
}

/// What a request's gateway must do.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum RegisterOutput<E> {
    ToSeat {
        to: Place,
        message: ToSeat<E>,
    },
    /// The client's next entry.
    Deliver(E),
    /// The owner has shown that it runs under this epoch.
    Started {
        owner: Place,
        epoch: Tag,
    },
    /// The attempt made its target, `to`, the owner; which has not started yet.
    Committed {
        attempt: Tag,
        from: Place,
        to: Place,
    },
    /// The attempt ended and the source goes on.
    AttemptEnded {
        attempt: Tag,
    },
    /// Nobody runs it: choose a place and call [`Register::force`], or end it.
    Lost(LostClass),
}

impl<E: Entry> Register<E> {
    /// A new request, sent to `owner`.
    pub fn new(owner: Place, out: &mut Vec<RegisterOutput<E>>) -> Self {
        let mut register = Self { live: None, counter: Tag(1), stops: BTreeMap::new(), places: BTreeSet::from([owner]) };
        let live = Live {
            owner,
            epoch: Tag(1),
            resumed: None,
            started: false,
            attempt: None,
            given_up: None,
            closed: Vec::new(),
            delivered: Vec::new(),
        };
        out.push(live.start());
        register.live = Some(live);
        register
    }

    pub fn has_ended(&self) -> bool {
        self.live.is_none()
    }

    /// Nothing is left to do: it has ended, and every place that may hold something has let go of it.
    pub fn is_quiescent(&self) -> bool {
        self.live.is_none() && self.stops.is_empty()
    }

    pub fn owner(&self) -> Option<(Place, Tag)> {
        self.live.as_ref().map(|live| (live.owner, live.epoch))
    }

    pub fn has_started(&self) -> bool {
        self.live.as_ref().is_some_and(|live| live.started)
    }

    /// The open attempt and its target.
    pub fn attempt(&self) -> Option<(Tag, Place)> {
        self.live.as_ref()?.attempt.map(|attempt| (attempt.tag, attempt.target))
    }

    /// The latest attempt that was given up and of which the owner has not said that it knows.
    pub fn given_up(&self) -> Option<Tag> {
        self.live.as_ref()?.given_up
    }

    /// What the client has; nothing once the request has ended.
    pub fn delivered(&self) -> &[E] {
        self.live.as_ref().map_or(&[], |live| &live.delivered)
    }

    /// A message of a replica.
    pub fn handle(&mut self, from: Place, message: ToGateway<E>, out: &mut Vec<RegisterOutput<E>>) {
        if let ToGateway::Stopped { upto } = message {
            if self.stops.get(&from).is_some_and(|level| *level <= upto) {
                self.stops.remove(&from);
            }
            return;
        }
        let Some(live) = &mut self.live else {
            self.stop(from, Tag::ALL, out);
            return;
        };
        match message {
            ToGateway::Output { epoch, index, entry } => self.output(from, epoch, index, entry, out),
            ToGateway::CommitTarget { epoch, attempt, frozen } => self.commit_target(from, epoch, attempt, frozen, out),
            ToGateway::CommitSource { epoch, attempt, frozen } => self.commit_source(from, epoch, attempt, frozen, out),
            ToGateway::Aborted { epoch, attempt } => {
                if live.owner == from && live.epoch == epoch {
                    live.given_up = live.given_up.filter(|given_up| *given_up > attempt);
                    if live.attempt.is_some_and(|open| open.tag == attempt) {
                        self.close_attempt(out);
                    }
                }
            }
            ToGateway::Withdraw { attempt } => {
                if live.owner == from {
                    // It is the owner: never stopped, and told to start until it has.
                    if !live.started {
                        out.push(live.start());
                    }
                } else {
                    if live.attempt.is_some_and(|open| open.tag == attempt) {
                        self.give_up(out);
                    }
                    self.stop(from, attempt, out);
                }
            }
            ToGateway::Lost { epoch, class } => {
                if live.owner == from && live.epoch == epoch {
                    out.push(RegisterOutput::Lost(class));
                }
            }
            ToGateway::Stopped { .. } => {}
        }
    }

    /// Opens an attempt to move the request to `target`; `None` while another is open, or the owner has not started or is the target.
    pub fn open(&mut self, target: Place, out: &mut Vec<RegisterOutput<E>>) -> Option<Tag> {
        let live = self.live.as_mut()?;
        if live.attempt.is_some() || !live.started || live.owner.replica == target.replica {
            return None;
        }
        self.counter = self.counter.next();
        live.attempt = Some(Attempt { tag: self.counter, target });
        out.push(live.move_message().expect("an attempt is open"));
        self.places.insert(target);
        Some(self.counter)
    }

    /// Gives the open attempt up. Its target lets go of what it has prepared; its source goes on at once, and need not find out by itself that
    /// a target is silent. It is told until it has answered.
    pub fn give_up(&mut self, out: &mut Vec<RegisterOutput<E>>) {
        if let Some(live) = &mut self.live
            && let Some(Attempt { tag, .. }) = live.attempt
        {
            live.given_up = Some(tag);
            out.extend(live.no());
        }
        self.close_attempt(out);
    }

    /// The attempt is over, as its source knows.
    fn close_attempt(&mut self, out: &mut Vec<RegisterOutput<E>>) {
        if let Some(Attempt { tag, target }) = self.live.as_mut().and_then(|live| live.attempt.take()) {
            out.push(RegisterOutput::AttemptEnded { attempt: tag });
            self.stop(target, tag, out);
        }
    }

    /// Makes `owner` the owner, whatever the former one does: it is dead, suspected, or has lost the request. What the client has not got
    /// is computed again; nothing of earlier epochs is taken any more.
    pub fn force(&mut self, owner: Place, out: &mut Vec<RegisterOutput<E>>) {
        let Some(live) = &mut self.live else { return };
        self.counter = self.counter.next();
        live.owner = owner;
        live.epoch = self.counter;
        live.resumed = None;
        live.started = false;
        live.given_up = None;
        live.closed.clear();
        let ended = live.attempt.take();
        out.extend(ended.map(|attempt| RegisterOutput::AttemptEnded { attempt: attempt.tag }));
        out.push(live.start());
        let epoch = live.epoch;
        self.places.insert(owner);
        self.stop_others(owner, epoch.before(), out);
    }

    /// The client has gone, or wants no more.
    pub fn end(&mut self, out: &mut Vec<RegisterOutput<E>>) {
        if let Some(live) = self.live.take() {
            out.extend(live.attempt.map(|attempt| RegisterOutput::AttemptEnded { attempt: attempt.tag }));
            for place in self.places.clone() {
                self.stop(place, Tag::ALL, out);
            }
        }
    }

    /// An incarnation is gone, with all that it held. True when it was the owner's: choose another place and call [`Self::force`].
    pub fn gone(&mut self, place: Place, out: &mut Vec<RegisterOutput<E>>) -> bool {
        if self.attempt().is_some_and(|(_, target)| target == place) {
            self.give_up(out);
        }
        self.stops.remove(&place);
        self.places.remove(&place);
        self.live.as_ref().is_some_and(|live| live.owner == place)
    }

    /// A place was silent for so long that its leases have freed all that it held: it need not be stopped.
    pub fn freed(&mut self, place: Place) {
        self.stops.remove(&place);
    }

    /// Places that must stop something and have not said that they did.
    pub fn stopping(&self) -> impl Iterator<Item = Place> {
        self.stops.keys().copied()
    }

    /// Places that may hold something: the owner, targets, and all that ever were.
    pub fn places(&self) -> &BTreeSet<Place> {
        &self.places
    }

    /// The owner is asked to go on, as when its connection is back.
    pub fn keep(&self) -> Option<RegisterOutput<E>> {
        let live = self.live.as_ref()?;
        let next = live.delivered.len() as u32;
        Some(if live.started {
            RegisterOutput::ToSeat { to: live.owner, message: ToSeat::Keep { epoch: live.epoch, next } }
        } else {
            live.start()
        })
    }

    /// A replica that attached, or that answers again, holds this.
    pub fn holds(&mut self, from: Place, phase: Phase, tag: Tag, out: &mut Vec<RegisterOutput<E>>) {
        let Some(live) = &self.live else {
            self.stop(from, Tag::ALL, out);
            return;
        };
        let comes = live.attempt.is_some_and(|open| open.target == from && open.tag == tag);
        if live.owner == from {
            // Another tag than the owner's goes when the owner starts.
            out.extend(self.keep().filter(|_| tag == live.epoch || !phase.is_arriving()));
        } else if !comes && (live.started || phase.is_arriving()) {
            self.stop(from, tag, out);
        }
    }

    /// Whether [`Self::unanswered`] has something.
    pub fn is_waiting(&self) -> bool {
        !self.stops.is_empty() || self.live.as_ref().is_some_and(Live::is_waiting)
    }

    /// What the other side may have missed: the same again does no harm.
    pub fn unanswered(&self) -> Vec<RegisterOutput<E>> {
        let stops = self.stops.iter().map(|(to, upto)| RegisterOutput::ToSeat { to: *to, message: ToSeat::Stop { upto: *upto } });
        let live = self.live.as_ref();
        let start = live.filter(|live| !live.started).map(Live::start);
        let moves = live.and_then(Live::move_message);
        let no = live.and_then(Live::no);
        stops.chain(start).chain(no).chain(moves).collect()
    }

    fn output(&mut self, from: Place, epoch: Tag, index: u32, entry: E, out: &mut Vec<RegisterOutput<E>>) {
        let live = self.live.as_mut().expect("its caller looked");
        let current = epoch == live.epoch;
        if current && !live.started {
            live.started = true;
            let owner = live.owner;
            out.push(RegisterOutput::Started { owner, epoch });
            self.stop_others(owner, epoch.before(), out);
        }
        let live = self.live.as_mut().expect("its caller looked");
        let next = live.delivered.len() as u32;
        if !live.supplies(epoch, index) || index != next {
            if epoch < live.epoch && live.started && from != live.owner {
                self.stop(from, epoch, out);
            }
            return;
        }
        let finish = entry.is_finish();
        out.push(RegisterOutput::Deliver(entry.clone()));
        live.delivered.push(entry);
        live.closed.retain(|closed| closed.until > index + 1);
        if finish {
            self.end(out);
        }
    }

    fn commit_target(&mut self, from: Place, epoch: Tag, attempt: Tag, frozen: u32, out: &mut Vec<RegisterOutput<E>>) {
        let live = self.live.as_mut().expect("its caller looked");
        match live.attempt {
            Some(open) if open.tag == attempt && live.owner == from && live.epoch == epoch => {
                live.close_epoch(frozen);
                live.attempt = None;
                live.owner = open.target;
                live.epoch = attempt;
                live.resumed = None;
                live.started = false;
                live.given_up = None;
                out.push(RegisterOutput::Committed { attempt, from, to: open.target });
                out.push(live.start());
            }
            _ if live.epoch == attempt => out.extend((!live.started).then(|| live.start())),
            _ => out.push(RegisterOutput::ToSeat { to: from, message: ToSeat::No { epoch, attempt } }),
        }
    }

    fn commit_source(&mut self, from: Place, epoch: Tag, attempt: Tag, frozen: u32, out: &mut Vec<RegisterOutput<E>>) {
        let live = self.live.as_mut().expect("its caller looked");
        if live.owner == from && live.epoch == epoch {
            live.close_epoch(frozen);
            self.counter = self.counter.next();
            live.epoch = self.counter;
            live.resumed = Some((epoch, attempt));
            live.given_up = None;
            out.push(live.resume_message().expect("it was resumed"));
            self.close_attempt(out);
        } else if live.owner == from && live.resumed == Some((epoch, attempt)) {
            out.extend(live.resume_message());
        } else if live.started && live.owner != from {
            self.stop(from, epoch, out);
        }
        // Owned by the target, which has not started: the source stays as it is, the spare.
    }

    fn stop_others(&mut self, owner: Place, upto: Tag, out: &mut Vec<RegisterOutput<E>>) {
        for place in self.places.clone() {
            if place != owner {
                self.stop(place, upto, out);
            }
        }
    }

    /// A life that is gone holds nothing, and would never answer.
    fn stop(&mut self, place: Place, upto: Tag, out: &mut Vec<RegisterOutput<E>>) {
        if !self.places.contains(&place) {
            return;
        }
        let level = self.stops.entry(place).or_default();
        *level = upto.max(*level);
        out.push(RegisterOutput::ToSeat { to: place, message: ToSeat::Stop { upto: *level } });
    }
}

impl<E: Entry> Live<E> {
    fn start(&self) -> RegisterOutput<E> {
        RegisterOutput::ToSeat { to: self.owner, message: ToSeat::Start { epoch: self.epoch, delivered: self.delivered.clone() } }
    }

    fn move_message(&self) -> Option<RegisterOutput<E>> {
        let Attempt { tag: attempt, target } = self.attempt?;
        Some(RegisterOutput::ToSeat { to: self.owner, message: ToSeat::Move { epoch: self.epoch, attempt, target } })
    }

    fn no(&self) -> Option<RegisterOutput<E>> {
        self.given_up.map(|attempt| RegisterOutput::ToSeat { to: self.owner, message: ToSeat::No { epoch: self.epoch, attempt } })
    }

    fn is_waiting(&self) -> bool {
        !self.started || self.attempt.is_some() || self.given_up.is_some()
    }

    fn resume_message(&self) -> Option<RegisterOutput<E>> {
        let (epoch, attempt) = self.resumed?;
        let next = self.delivered.len() as u32;
        Some(RegisterOutput::ToSeat { to: self.owner, message: ToSeat::Resume { epoch, attempt, resumed: self.epoch, next } })
    }

    fn supplies(&self, epoch: Tag, index: u32) -> bool {
        epoch == self.epoch || self.closed.iter().any(|closed| closed.epoch == epoch && index < closed.until)
    }

    /// The current epoch supplies the entries below `until` and no more.
    fn close_epoch(&mut self, until: u32) {
        self.closed.push(Closed { epoch: self.epoch, until });
        let next = self.delivered.len() as u32;
        self.closed.retain(|closed| closed.until > next);
    }
}

#[cfg(test)]
impl<E: Entry> Register<E> {
    pub(crate) fn supplies(&self, epoch: Tag, index: u32) -> bool {
        self.live.as_ref().is_some_and(|live| live.supplies(epoch, index))
    }

    /// All epochs that supply something.
    pub(crate) fn closed_and_current(&self) -> Vec<Tag> {
        let live = self.live.iter();
        live.flat_map(|live| live.closed.iter().map(|closed| closed.epoch).chain([live.epoch])).collect()
    }

    /// As if a forced epoch did not end what older ones supply.
    pub(crate) fn leave_open(&mut self, epochs: Vec<Tag>, until: u32) {
        if let Some(live) = &mut self.live {
            live.closed = epochs.into_iter().map(|epoch| Closed { epoch, until }).collect();
        }
    }
}
