use std::time::Duration;

use baton_units::Time;

/// How long each party waits. What is right never depends on any of these; they bound how long something is wrong or wasted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// What is unanswered is sent again after this, then after twice as long each time.
    pub repeat: Duration,
    /// Longest span between two of the same.
    pub repeat_max: Duration,
    /// A replica sends each gateway a heartbeat as often.
    pub heartbeat: Duration,
    /// A gateway that answered no heartbeat sent within this is waited for: its requests compute no more.
    pub stop_after: Duration,
    /// A gateway that answered no heartbeat sent within this is gone: what it had here is freed. Longer than `stop_after`.
    pub free_after: Duration,
    /// A source that stands still waits so long for its target to have all of it, and then goes on. Longer than the last blocks take on any link
    /// that is worth moving over.
    pub stand_still: Duration,
    /// A source that asked to commit waits so long before it asks to stay the owner.
    pub reclaim_after: Duration,
    /// A target of whose copy nothing came for so long asks whether the request still comes.
    pub withdraw_after: Duration,
    /// A source whose copy did not advance for so long gives the attempt up. A copy that advances ends by itself: its blocks are counted.
    pub stall_after: Duration,
    /// Longest attempt, by the gateway, which does not see a copy advance: for one so slow that its room is better used otherwise.
    pub attempt: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            repeat: Duration::from_millis(200),
            repeat_max: Duration::from_secs(5),
            heartbeat: Duration::from_millis(500),
            stop_after: Duration::from_secs(5),
            free_after: Duration::from_secs(15),
            stand_still: Duration::from_secs(5),
            reclaim_after: Duration::from_secs(1),
            withdraw_after: Duration::from_secs(10),
            stall_after: Duration::from_secs(20),
            attempt: Duration::from_mins(15),
        }
    }
}

impl Timing {
    /// A replica that was heard of last so long ago holds nothing any more of what it was told before: its leases, which count from when it
    /// sent, have ended. Longer than `free_after` by more than a connection takes to be made, since that begins a lease too.
    pub fn lingers(&self) -> Duration {
        self.free_after + self.stop_after
    }
}

/// When something unanswered is sent again.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Repeat {
    at: Time,
    after: Duration,
}

impl Repeat {
    pub(crate) const IDLE: Self = Self { at: Time::NEVER, after: Duration::ZERO };

    pub(crate) fn at(self) -> Time {
        self.at
    }

    /// Something happened: waits the shortest time again, or for nothing.
    pub(crate) fn reset(&mut self, waits: bool, timing: &Timing, now: Time) {
        *self = if waits { Self { at: now + timing.repeat, after: timing.repeat } } else { Self::IDLE };
    }

    /// Whether it is time; then the next time is later by twice the last span.
    pub(crate) fn is_due(&mut self, timing: &Timing, now: Time) -> bool {
        let due = self.at <= now;
        if due {
            self.after = (self.after * 2).min(timing.repeat_max);
            self.at = now + self.after;
        }
        due
    }
}
