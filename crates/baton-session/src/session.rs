use std::{collections::VecDeque, time::Duration};

use baton_units::{ReplicaId, Time};

use crate::{
    fault::Fault,
    register::{Epoch, Offer, Owner, Register},
};

/// Attempts in a row that may go on with an output without adding anything to it.
const LOSSES_MAX: u32 = 5;

/// Bounds on one request.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Attempts until one gives output, the first one included; at least 1.
    pub attempts: u32,
    /// Longest silence of a replica after its first token.
    pub stall: Duration,
    /// Longest life of the request, waiting included.
    pub total: Duration,
}

/// What a session must know of its request.
#[derive(Debug, Clone, Copy)]
pub struct SessionConfig {
    pub limits: Limits,
    /// Choices that must finish; `None` where the engine's wire does not promise a finish for each.
    pub choices: Option<u32>,
    /// The client is shown nothing before the end (an assembled answer), so an attempt can start afresh however far it got.
    pub restartable: bool,
}

/// A fact from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// The router chose a replica. `first_token_within` bounds the wait for the first token.
    Placed {
        replica: ReplicaId,
        first_token_within: Duration,
    },
    /// The router has no place for it.
    Refused,
    /// A choice told its finish reason.
    ChoiceFinished {
        epoch: Epoch,
        choice: u32,
    },
    /// The attempt's stream reached its proper end.
    Completed {
        epoch: Epoch,
    },
    /// The engine answered that the request itself is at fault (a 4xx); another replica would say the same.
    Rejected {
        epoch: Epoch,
    },
    Failed {
        epoch: Epoch,
        fault: Fault,
    },
    /// The replica is known to work, though not on this: it is busy rather than hung, and gets its time again.
    ReplicaAlive,
    /// The attempt goes on at another replica, with all that it has given.
    Moved {
        epoch: Epoch,
        replica: ReplicaId,
    },
    /// The attempt is given up while it runs well, to go on elsewhere; only where [`Session::set_resumable`] says that it can.
    Leave {
        epoch: Epoch,
    },
    ClientGone,
    /// The gateway must stop and will wait no longer.
    DrainDeadline,
    /// The moment given by [`Session::poll_timeout`] has passed.
    Timeout,
}

/// What the shell must do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Ask the router for a place, not on these replicas, for what is left of the request: its output so far is [`Session::delivered`].
    /// Answered by [`Input::Placed`] or [`Input::Refused`].
    Place { excluded: Vec<ReplicaId> },
    /// Open the request at the replica.
    Start(Owner),
    /// Close the request at the replica, so that it stops computing.
    Stop(Owner),
    /// Keep new requests away from the replica until a probe succeeds.
    Suspect { replica: ReplicaId, fault: Fault },
    /// Tell the client how it ends. Comes once, unless the client has gone.
    Answer(Answer),
    /// The last action: release what the request holds and book its outcome.
    End(End),
}

/// The last thing that a client is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The proper end of a complete answer. No other answer may look like it.
    Complete,
    /// The refusal that the router gave.
    Refusal,
    /// The engine's own error.
    Rejection,
    Error(End),
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum End {
    #[error("finished")]
    Finished,
    #[error("cancelled by the client")]
    Cancelled,
    #[error("refused by the router")]
    Refused,
    #[error("rejected by the engine")]
    Rejected,
    #[error("{0}")]
    Failed(Fault),
    /// All replicas that could be tried have failed; the last one like this.
    #[error("no other replica is left: {0}")]
    Exhausted(Fault),
    #[error("the gateway is shutting down")]
    Drained,
    #[error("the request ran longer than its limit of {0:?}")]
    TimedOut(Duration),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Placing,
    /// No token yet; the first is due at `due`, `within` after the start.
    Starting {
        due: Time,
        within: Duration,
    },
    Streaming {
        silent_since: Time,
    },
    Ended,
}

/// One request from its arrival to its end; see the crate's documentation.
#[derive(Debug)]
pub struct Session {
    config: SessionConfig,
    register: Register,
    phase: Phase,
    deadline: Time,
    /// Replicas that failed this request, in order, at most `limits.attempts`; once it has output, the one that failed it last.
    excluded: Vec<ReplicaId>,
    last_fault: Option<Fault>,
    /// An attempt that fails now may be followed by one that goes on where it ended.
    resumable: bool,
    /// Since the last output.
    losses: u32,
    actions: VecDeque<Action>,
}

impl Session {
    pub fn new(config: SessionConfig, now: Time) -> Self {
        Self {
            config,
            register: Register::default(),
            phase: Phase::Placing,
            deadline: now + config.limits.total,
            excluded: Vec::new(),
            last_fault: None,
            resumable: false,
            losses: 0,
            actions: VecDeque::from([Action::Place { excluded: Vec::new() }]),
        }
    }

    /// The next thing to do; drain it after each input.
    pub fn poll(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// When [`Input::Timeout`] is due; `None` once the request has ended.
    pub fn poll_timeout(&self) -> Option<Time> {
        let own = match self.phase {
            Phase::Ended => return None,
            Phase::Placing => Time::NEVER,
            Phase::Starting { due, .. } => due,
            Phase::Streaming { silent_since } => silent_since + self.config.limits.stall,
        };
        Some(own.min(self.deadline))
    }

    /// Whether an attempt runs that has given no token yet.
    pub fn awaits_first_token(&self) -> bool {
        matches!(self.phase, Phase::Starting { .. })
    }

    /// Who computes the request; `None` while it is placed and once it has ended.
    pub fn owner(&self) -> Option<Owner> {
        self.register.owner()
    }

    /// Attempts begun so far.
    pub fn attempts(&self) -> u32 {
        self.register.attempts()
    }

    pub fn is_ended(&self) -> bool {
        self.phase == Phase::Ended
    }

    /// Tokens of `choice` that the client has: the index of the next one.
    pub fn delivered(&self, choice: u32) -> u32 {
        self.register.delivered_of(choice)
    }

    /// Tokens `index..index + count` of a choice arrived under `epoch`: may they pass? A skipped index ends the attempt.
    pub fn offer(&mut self, epoch: Epoch, choice: u32, index: u32, count: u32, now: Time) -> Offer {
        let Ok(offer) = self.register.offer(epoch, choice, index, count) else {
            self.fail(Fault::Garbled);
            return Offer::Drop;
        };
        if self.register.is_current(epoch) && count > 0 {
            self.phase = Phase::Streaming { silent_since: now };
            self.losses = 0;
        }
        offer
    }

    /// Whether what the client has can be gone on with at another replica, if the attempt fails. Asked only of an attempt that has given
    /// output: the next one then begins at [`Self::delivered`], of which the same is to be told anew.
    pub fn set_resumable(&mut self, resumable: bool) {
        self.resumable = resumable;
    }

    /// The attempt that runs is the last one, if it fails before it has given output.
    pub fn forbid_retry(&mut self) {
        self.config.limits.attempts = self.register.attempts();
    }

    pub fn handle(&mut self, input: Input, now: Time) {
        if self.is_ended() {
            return;
        }
        match input {
            Input::Placed { replica, first_token_within } => self.start(replica, first_token_within, now),
            Input::Refused => self.refused(),
            Input::ChoiceFinished { epoch, choice } => {
                if self.register.is_current(epoch) {
                    self.register.finish(choice);
                }
            }
            Input::Completed { epoch } => self.completed(epoch),
            Input::Rejected { epoch } => {
                if self.register.is_current(epoch) {
                    self.register.release();
                    self.end(End::Rejected);
                }
            }
            Input::Failed { epoch, fault } => {
                if self.register.is_current(epoch) {
                    // The attempt is over by itself: there is nothing to stop.
                    self.lost(fault);
                }
            }
            Input::ReplicaAlive => match self.phase {
                Phase::Starting { within, .. } => self.phase = Phase::Starting { due: now + within, within },
                Phase::Streaming { .. } => self.phase = Phase::Streaming { silent_since: now },
                Phase::Placing | Phase::Ended => {}
            },
            Input::Leave { epoch } => self.leave(epoch),
            Input::Moved { epoch, replica } => self.register.move_to(epoch, replica),
            Input::ClientGone => self.end(End::Cancelled),
            Input::DrainDeadline => self.end(End::Drained),
            Input::Timeout => self.timeout(now),
        }
    }

    fn start(&mut self, replica: ReplicaId, within: Duration, now: Time) {
        if self.phase != Phase::Placing {
            return;
        }
        let owner = self.register.take(replica);
        self.resumable = false;
        self.phase = Phase::Starting { due: now + within, within };
        self.actions.push_back(Action::Start(owner));
    }

    fn refused(&mut self) {
        if self.phase != Phase::Placing {
            return;
        }
        // Whoever has waited through a failure is told of the failure, not of the emptiness that it left.
        self.end(self.last_fault.map_or(End::Refused, End::Exhausted));
    }

    fn completed(&mut self, epoch: Epoch) {
        if !self.register.is_current(epoch) {
            return;
        }
        if self.register.is_complete(self.config.choices) {
            self.register.release();
            self.end(End::Finished);
        } else {
            self.lost(Fault::Truncated);
        }
    }

    fn timeout(&mut self, now: Time) {
        if now >= self.deadline {
            return self.end(End::TimedOut(self.config.limits.total));
        }
        let stall = self.config.limits.stall;
        match self.phase {
            Phase::Starting { due, within } if now >= due => self.fail(Fault::NoFirstToken(within)),
            Phase::Streaming { silent_since } if now >= silent_since + stall => self.fail(Fault::Stalled(stall)),
            Phase::Placing | Phase::Starting { .. } | Phase::Streaming { .. } | Phase::Ended => {}
        }
    }

    fn leave(&mut self, epoch: Epoch) {
        let can = self.resumable && !self.config.restartable && self.register.delivered() > 0;
        if !can || !self.register.is_current(epoch) {
            return;
        }
        let owner = self.register.release().expect("the current attempt has an owner");
        self.actions.push_back(Action::Stop(owner));
        self.excluded = vec![owner.replica];
        self.phase = Phase::Placing;
        self.actions.push_back(Action::Place { excluded: self.excluded.clone() });
    }

    /// Gives up an attempt that still runs.
    fn fail(&mut self, fault: Fault) {
        if let Some(owner) = self.register.owner() {
            self.actions.push_back(Action::Stop(owner));
            self.lost(fault);
        }
    }

    /// The current attempt is over without an answer.
    fn lost(&mut self, fault: Fault) {
        let owner = self.register.release().expect("only the owner can be lost");
        if fault.casts_doubt() {
            self.actions.push_back(Action::Suspect { replica: owner.replica, fault });
        }
        if self.config.restartable || self.register.delivered() == 0 {
            if self.register.attempts() >= self.config.limits.attempts {
                return self.end(End::Exhausted(fault));
            }
            self.register.forget_output();
            self.excluded.push(owner.replica);
        } else {
            self.losses += 1;
            if !self.resumable || self.losses > LOSSES_MAX {
                return self.end(End::Failed(fault));
            }
            self.excluded = vec![owner.replica];
        }
        self.last_fault = Some(fault);
        self.phase = Phase::Placing;
        self.actions.push_back(Action::Place { excluded: self.excluded.clone() });
    }

    fn end(&mut self, end: End) {
        self.phase = Phase::Ended;
        if let Some(owner) = self.register.release() {
            self.actions.push_back(Action::Stop(owner));
        }
        let answer = match end {
            End::Finished => Some(Answer::Complete),
            End::Cancelled => None,
            End::Refused => Some(Answer::Refusal),
            End::Rejected => Some(Answer::Rejection),
            End::Failed(_) | End::Exhausted(_) | End::Drained | End::TimedOut(_) => Some(Answer::Error(end)),
        };
        self.actions.extend(answer.map(Action::Answer));
        self.actions.push_back(Action::End(end));
    }
}

#[cfg(test)]
mod tests;
