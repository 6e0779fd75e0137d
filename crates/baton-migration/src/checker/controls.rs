use super::model::{Budget, Law};

/// The protocol with one of its safeguards left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Control {
    /// A target frees what it prepared by its own timer.
    NoWithdraw,
    /// A source that stays the owner goes on under its old epoch.
    NoBump,
    /// Nothing is stopped and no lease ends.
    NoStopNoLease,
    /// Stops are sent, but no lease ends.
    NoLease,
    /// A source goes on although it asked to commit, without asking whether it was.
    ReinsertUnasked,
    /// A stop is sent once, and late messages are not answered by one.
    StopOnce,
    /// A replica that lacks what it should run keeps silent.
    NeverLost,
    /// A start brings no entries, so that only moved KV can be started.
    StartWithoutEntries,
    /// A start counts for any life of the replica.
    NoIncarnation,
    /// A forced epoch leaves older ones their ranges.
    RangesLeftOpen,
    /// A repeated move freezes again, and the target does not say how much it has.
    FreezesTwice,
    /// A replica forgets what it stopped.
    NoTombstone,
    /// The target says neither for which attempt it has something nor how much.
    PreparedWithoutAttempt,
}

impl Control {
    pub(super) const ALL: &[Self] = &[
        Self::NoWithdraw,
        Self::NoBump,
        Self::NoStopNoLease,
        Self::NoLease,
        Self::ReinsertUnasked,
        Self::StopOnce,
        Self::NeverLost,
        Self::StartWithoutEntries,
        Self::NoIncarnation,
        Self::RangesLeftOpen,
        Self::FreezesTwice,
        Self::NoTombstone,
        Self::PreparedWithoutAttempt,
    ];

    /// The law that it breaks, and the least that must be allowed to happen.
    pub(super) fn breaks(self) -> (Law, Budget) {
        let none = Budget::NONE;
        match self {
            Self::NoWithdraw => (Law::MovedKv, none),
            Self::NoBump | Self::ReinsertUnasked => (Law::Runners, none),
            Self::NoStopNoLease | Self::NoLease | Self::NeverLost => (Law::CanEnd, Budget { suspicions: 1, ..none }),
            Self::StopOnce => (Law::CanEnd, none),
            Self::StartWithoutEntries => (Law::CanEnd, Budget { crashes: 1, ..none }),
            Self::NoIncarnation => (Law::Lineage, Budget { crashes: 1, ..none }),
            Self::RangesLeftOpen => (Law::Lineage, Budget { suspicions: 1, ..none }),
            Self::FreezesTwice => (Law::Lineage, none),
            Self::NoTombstone => (Law::Lineage, Budget { crashes: 1, attempts: 2, ..none }),
            Self::PreparedWithoutAttempt => (Law::MovedKv, Budget { attempts: 2, ..none }),
        }
    }
}
