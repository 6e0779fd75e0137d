//! The real clock, and how an engine that computes nothing keeps to it.

use std::{
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use baton_units::Time;

/// Below this much to wait a thread spins: sleeping would overshoot by about as much.
const SPIN: Duration = Duration::from_micros(100);

/// Model time: real time since the start, divided by the time scale.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    origin: Instant,
    origin_unix_s: f64,
    scale: f64,
}

impl Clock {
    /// `scale`: real seconds per model second, above zero.
    pub(crate) fn start(scale: f64) -> Self {
        let origin_unix_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        Self { origin: Instant::now(), origin_unix_s, scale }
    }

    pub(crate) fn now(&self) -> Time {
        Time::ZERO + self.origin.elapsed().div_f64(self.scale)
    }

    /// A span of model time in real time.
    pub(crate) fn real(&self, span: Duration) -> Duration {
        span.mul_f64(self.scale)
    }

    /// Seconds since 1970 at a moment; the same for all scales at the start.
    pub(crate) fn unix_s(&self, at: Time) -> f64 {
        self.origin_unix_s + at.0 as f64 / 1e9
    }

    /// Real time, in whole seconds since 1970.
    pub(crate) fn unix_now_s(&self) -> u64 {
        (self.origin_unix_s + self.origin.elapsed().as_secs_f64()) as u64
    }

    pub(crate) fn start_unix_s(&self) -> f64 {
        self.origin_unix_s
    }

    /// Waits for a moment of model time; returns how late it woke, in model time.
    pub(crate) fn sleep_until(&self, at: Time) -> Duration {
        let deadline = self.origin + Duration::from_nanos(at.0).mul_f64(self.scale);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return self.now().since(at);
            }
            match left.checked_sub(SPIN) {
                Some(most) if !most.is_zero() => thread::sleep(most),
                _ => thread::yield_now(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_time_runs_slower_by_the_scale() {
        let clock = Clock::start(1000.0);
        // However long the machine takes, model time lies between the real times read before and after, over the scale.
        let model = |real: Duration| Time::ZERO + real.div_f64(1000.0);
        let earliest = model(clock.origin.elapsed());
        let now = clock.now();
        assert!(earliest <= now && now <= model(clock.origin.elapsed()));
        let fast = Clock::start(0.001);
        fast.sleep_until(Time::from_ms(1000.0));
        assert!(fast.now() >= Time::from_ms(1000.0));
        assert!(fast.origin.elapsed() >= Duration::from_millis(1));
    }

    #[test]
    fn a_moment_in_the_past_is_not_waited_for_and_says_how_late_it_is() {
        let clock = Clock::start(0.001);
        clock.sleep_until(Time::from_ms(500.0));
        assert!(clock.sleep_until(Time::ZERO) >= Duration::from_millis(500));
    }
}
