use std::time::Duration;

use baton_units::Time;
use tokio::time::Instant;

/// The gateway's time: nanoseconds since it started.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    start: Instant,
}

impl Clock {
    pub(crate) fn new() -> Self {
        Self { start: Instant::now() }
    }

    pub(crate) fn now(&self) -> Time {
        Time(u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// Seconds since the Unix epoch.
    pub(crate) fn unix_now_s() -> u64 {
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_secs())
    }

    /// The moment for tokio's timers; far away for [`Time::NEVER`].
    pub(crate) fn instant(&self, time: Time) -> Instant {
        const FAR: Duration = Duration::from_hours(24 * 365);
        self.start + Duration::from_nanos(time.0).min(FAR)
    }
}
