use std::fmt;

use baton_units::{Incarnation, ReplicaId};

/// An epoch or an attempt of one request, from its gateway's counter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(pub u32);

impl Tag {
    /// Above all tags: `Stop` up to it ends the request at a replica.
    pub const ALL: Self = Self(u32::MAX);

    pub(crate) fn next(self) -> Self {
        assert!(self.0 < Self::ALL.0 - 1, "a request moves a bounded number of times");
        Self(self.0 + 1)
    }

    pub(crate) fn before(self) -> Self {
        Self(self.0.saturating_sub(1))
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "t{}", self.0)
    }
}

/// One life of one replica. A message names the life that it is for; another one ignores it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    pub replica: ReplicaId,
    pub incarnation: Incarnation,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{:x}", self.replica, self.incarnation.0)
    }
}

/// What stands at one output index: a token, or the finish, which is the last entry of a request.
///
/// Two entries are equal when the client would see the same: what is carried beside a token, as its log-probability, does not count.
pub trait Entry: Clone + PartialEq {
    fn is_finish(&self) -> bool;
}

/// What a replica has of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Owner, as far as it knows: computes, unless it has finished or is paused.
    Running,
    /// As `Running`, and its KV is copied to a target for the attempt.
    Copying,
    /// Computes no more; the target was told all. It may still go on by itself.
    Frozen,
    /// The gateway was asked to make the target the owner. It goes on only if the gateway says so.
    Asking,
    /// The gateway was asked to leave it the owner.
    Reclaiming,
    /// Room and references are taken for a request that may come.
    Preparing,
    /// All of the request is here; it runs when the gateway says so.
    Prepared,
    /// The gateway was asked whether the request still comes.
    Withdrawing,
}

impl Phase {
    /// On the target's side: the tag is an attempt.
    pub fn is_arriving(self) -> bool {
        matches!(self, Self::Preparing | Self::Prepared | Self::Withdrawing)
    }
}

/// From the gateway to what a replica has of a request.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ToSeat<E> {
    /// Run under `epoch` from these entries, which the client has; the entry after them is the first one wanted.
    Start { epoch: Tag, delivered: Vec<E> },
    /// Go on; the gateway knows you as the owner under `epoch` and has the entries below `next`.
    Keep { epoch: Tag, next: u32 },
    /// Move to `target`.
    Move { epoch: Tag, attempt: Tag, target: Place },
    /// The attempt, and each one before it, is over: it was not committed, and will not be. Said until it is answered.
    No { epoch: Tag, attempt: Tag },
    /// Go on where you froze for `attempt`, as the owner under `resumed`.
    Resume { epoch: Tag, attempt: Tag, resumed: Tag, next: u32 },
    /// Drop all that is tagged up to this. As a release, the end of an attempt, a cancellation and a finish.
    Stop { upto: Tag },
    /// The client has the entries below `next`.
    Ack { epoch: Tag, next: u32 },
}

/// From a replica to the request's gateway.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ToGateway<E> {
    Output {
        epoch: Tag,
        index: u32,
        entry: E,
    },
    /// Source: frozen with `frozen` entries, which the target has. Make it the owner.
    CommitTarget {
        epoch: Tag,
        attempt: Tag,
        frozen: u32,
    },
    /// Source: frozen with `frozen` entries. Leave me the owner, unless the target is.
    CommitSource {
        epoch: Tag,
        attempt: Tag,
        frozen: u32,
    },
    /// Source: the attempt, and each one before it, is over here, and was not committed.
    Aborted {
        epoch: Tag,
        attempt: Tag,
    },
    /// Target: does the request of this attempt still come?
    Withdraw {
        attempt: Tag,
    },
    Stopped {
        upto: Tag,
    },
    /// What should run under `epoch` is not here.
    Lost {
        epoch: Tag,
        class: LostClass,
    },
}

/// What a replica that does not run a request says of running it elsewhere.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LostClass {
    /// Nothing: it is not there, or not any more.
    #[default]
    Lost,
    /// What it asks for nobody will run.
    Refused,
    /// This replica does not, at the moment or as it is; another one may.
    Busy,
}

/// Between the source and the target of an attempt.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ToPeer<E> {
    /// Source: take room and references for the attempt.
    Prepare { attempt: Tag },
    /// Source, frozen: all entries; the KV of all but the last is there.
    State { attempt: Tag, entries: Vec<E> },
    /// Target: all is here and checked.
    Prepared { attempt: Tag, entries: u32 },
    /// Either: the attempt is over between us.
    Abort { attempt: Tag },
}
