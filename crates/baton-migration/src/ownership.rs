use std::collections::VecDeque;

use baton_units::Time;

use crate::{Entry, LostClass, Phase, Place, Register, RegisterOutput, Tag, Timing, ToGateway, timing::Repeat};

/// Something that happened to a request at its gateway.
#[derive(Debug, Clone)]
pub enum OwnershipInput<E> {
    FromSeat {
        from: Place,
        message: ToGateway<E>,
    },
    /// A replica that attached, or that answers again, told what it holds of the request.
    Holds {
        from: Place,
        phase: Phase,
        tag: Tag,
    },
    /// A replica attached, or answers again, and has told all that it holds.
    Attached {
        place: Place,
    },
    /// Move the request to `target`; does nothing where [`Ownership::can_move`] is false.
    Move {
        target: Place,
    },
    /// Give the open attempt up.
    Stay,
    /// Run on at `owner`: the answer to [`RegisterOutput::Lost`].
    Force {
        owner: Place,
    },
    /// A replica is thought to be dead, or to hang. Nothing is moved there until it answers.
    Suspected {
        place: Place,
    },
    /// A life of a replica has ended, with all that it held.
    Gone {
        place: Place,
    },
    /// A replica was silent for [`Timing::lingers`]: its leases have freed what it held.
    Freed {
        place: Place,
    },
    /// The client has gone, or has all it wants.
    End,
    /// The moment of [`Ownership::poll_timeout`] has passed.
    Timeout,
}

/// A request's register with its timers: from the first start until every replica has let go.
#[derive(Debug)]
pub struct Ownership<E> {
    register: Register<E>,
    timing: Timing,
    repeat: Repeat,
    attempt_ends: Time,
    outputs: VecDeque<RegisterOutput<E>>,
}

impl<E: Entry> Ownership<E> {
    pub fn new(owner: Place, timing: Timing, now: Time) -> Self {
        let mut out = Vec::new();
        let register = Register::new(owner, &mut out);
        let mut new = Self { register, timing, repeat: Repeat::IDLE, attempt_ends: Time::NEVER, outputs: VecDeque::new() };
        new.after(out, now);
        new
    }

    pub fn register(&self) -> &Register<E> {
        &self.register
    }

    /// No attempt is open, and the owner runs.
    pub fn can_move(&self) -> bool {
        self.register.has_started() && self.register.attempt().is_none()
    }

    /// Drain [`Self::poll`] after each call.
    pub fn handle(&mut self, input: OwnershipInput<E>, now: Time) {
        let mut out = Vec::new();
        let given_up = self.register.given_up();
        match input {
            OwnershipInput::FromSeat { from, message } => self.register.handle(from, message, &mut out),
            OwnershipInput::Holds { from, phase, tag } => self.register.holds(from, phase, tag, &mut out),
            OwnershipInput::Attached { place } => {
                if self.is_owner(place) {
                    out.extend(self.register.keep());
                }
            }
            OwnershipInput::Move { target } => {
                if self.register.open(target, &mut out).is_some() {
                    self.attempt_ends = now + self.timing.attempt;
                }
            }
            OwnershipInput::Stay => self.register.give_up(&mut out),
            OwnershipInput::Force { owner } => self.register.force(owner, &mut out),
            OwnershipInput::Suspected { place } => {
                if self.register.attempt().is_some_and(|(_, target)| target == place) {
                    self.register.give_up(&mut out);
                }
                out.extend(self.is_owner(place).then_some(RegisterOutput::Lost(LostClass::Lost)));
            }
            OwnershipInput::Gone { place } => {
                let lost = self.register.gone(place, &mut out);
                out.extend(lost.then_some(RegisterOutput::Lost(LostClass::Lost)));
            }
            OwnershipInput::Freed { place } => self.register.freed(place),
            OwnershipInput::End => self.register.end(&mut out),
            OwnershipInput::Timeout => {
                if self.attempt_ends <= now {
                    self.register.give_up(&mut out);
                }
                if self.repeat.is_due(&self.timing, now) {
                    out.extend(self.register.unanswered());
                }
            }
        }
        if self.register.given_up() > given_up {
            // A source that copies into nothing is not left to what a long attempt has made of the span between two repetitions.
            self.repeat.reset(true, &self.timing, now);
        }
        self.after(out, now);
    }

    pub fn poll(&mut self) -> Option<RegisterOutput<E>> {
        self.outputs.pop_front()
    }

    pub fn poll_timeout(&self) -> Time {
        self.repeat.at().min(self.attempt_ends)
    }

    /// It has ended and every replica has let go, or has had the time in which it must by itself.
    pub fn is_quiescent(&self) -> bool {
        self.register.is_quiescent()
    }

    fn is_owner(&self, place: Place) -> bool {
        self.register.owner().is_some_and(|(owner, _)| owner == place)
    }

    fn after(&mut self, out: Vec<RegisterOutput<E>>, now: Time) {
        if self.register.attempt().is_none() {
            self.attempt_ends = Time::NEVER;
        }
        let waits = self.register.is_waiting();
        let sends = out.iter().any(|output| matches!(output, RegisterOutput::ToSeat { .. }));
        if !waits || (sends && self.repeat.at() == Time::NEVER) {
            self.repeat.reset(waits, &self.timing, now);
        }
        self.outputs.extend(out);
    }
}
