use std::time::Duration;

use baton_units::Time;

/// A way for messages: each arrives after the delay, unless it is lost. Messages do not overtake each other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    pub delay: Duration,
    /// Share of messages that never arrive; for those whose loss is part of the protocol (reports, events), not for requests.
    pub loss: f64,
}

impl Link {
    pub const INSTANT: Self = Self { delay: Duration::ZERO, loss: 0.0 };

    pub fn with_delay(delay: Duration) -> Self {
        Self { delay, loss: 0.0 }
    }

    /// When a message sent at `now` arrives; `None` when it is lost.
    pub fn deliver(&self, now: Time, rng: &mut fastrand::Rng) -> Option<Time> {
        // The draw is made also when nothing can be lost, so that equal seeds stay comparable across loss rates.
        let kept = rng.f64() >= self.loss;
        kept.then(|| now + self.delay)
    }
}
