//! The clock of leases.

use std::{
    cell::Cell,
    time::{Duration, Instant, SystemTime},
};

use baton_units::Time;

/// Runs while the machine is suspended, when the monotonic clock stands: it advances by that clock or the wall's, whichever went
/// further since it was read last. A wall clock that is set forward makes leases shorter; one that is set back does nothing.
pub(super) struct LeaseClock {
    last: Cell<(Time, Instant, SystemTime)>,
}

impl LeaseClock {
    pub(super) fn start() -> Self {
        Self { last: Cell::new((Time::ZERO, Instant::now(), SystemTime::now())) }
    }

    pub(super) fn now(&self) -> Time {
        self.advance(Instant::now(), SystemTime::now())
    }

    /// From now.
    pub(super) fn until(&self, at: Time) -> Duration {
        at.since(self.now())
    }

    fn advance(&self, monotonic: Instant, wall: SystemTime) -> Time {
        let (now, last_monotonic, last_wall) = self.last.get();
        let by_wall = wall.duration_since(last_wall).unwrap_or_default();
        let now = now + monotonic.duration_since(last_monotonic).max(by_wall);
        self.last.set((now, monotonic, wall));
        now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_goes_on_while_the_machine_is_suspended_and_never_back() {
        let clock = LeaseClock::start();
        let (_, monotonic, wall) = clock.last.get();
        let second = Duration::from_secs(1);
        assert_eq!(clock.advance(monotonic + second, wall + second), Time::ZERO + second);
        assert_eq!(clock.advance(monotonic + second, wall + 60 * second), Time::ZERO + 60 * second);
        assert_eq!(clock.advance(monotonic + 2 * second, wall), Time::ZERO + 61 * second);
        assert_eq!(clock.advance(monotonic + 3 * second, wall + second), Time::ZERO + 62 * second);
    }
}
