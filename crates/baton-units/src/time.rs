use std::{
    fmt,
    ops::{Add, AddAssign, Sub},
    time::Duration,
};

use serde::{Deserialize, Serialize};

/// A moment: nanoseconds since the run began. Real and simulated time alike, so code that takes a `Time` runs under both.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Time(pub u64);

impl Time {
    pub const ZERO: Self = Self(0);
    /// Later than every moment of a run.
    pub const NEVER: Self = Self(u64::MAX);

    pub fn from_ms(ms: f64) -> Self {
        Self((ms * 1e6) as u64)
    }

    pub fn as_ms(self) -> f64 {
        self.0 as f64 / 1e6
    }

    /// The span since `earlier`; zero when `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Time {
    type Output = Self;
    fn add(self, span: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl AddAssign<Duration> for Time {
    fn add_assign(&mut self, span: Duration) {
        *self = *self + span;
    }
}

impl Sub for Time {
    type Output = Duration;
    fn sub(self, earlier: Self) -> Duration {
        self.since(earlier)
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.3} ms", self.as_ms())
    }
}

/// Milliseconds to and from [`Duration`], for the border where a price is a plain `f64`.
pub trait DurationMs {
    fn as_ms(&self) -> f64;
    /// A negative or non-finite number gives zero; one past the range gives the longest span.
    fn from_ms(ms: f64) -> Self;
}

impl DurationMs for Duration {
    fn as_ms(&self) -> f64 {
        self.as_secs_f64() * 1e3
    }

    fn from_ms(ms: f64) -> Self {
        if ms > 0.0 { Self::try_from_secs_f64(ms / 1e3).unwrap_or(Self::MAX) } else { Self::ZERO }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_and_spans_add_up() {
        let start = Time::from_ms(1.5);
        assert_eq!(start + Duration::from_micros(500), Time(2_000_000));
        assert_eq!(Time(2_000_000) - start, Duration::from_micros(500));
        assert_eq!(start - Time(2_000_000), Duration::ZERO);
        assert_eq!(Time::NEVER + Duration::from_secs(1), Time::NEVER);
    }

    #[test]
    fn prices_that_are_no_span_become_the_nearest_one() {
        assert_eq!(Duration::from_ms(-1.0), Duration::ZERO);
        assert_eq!(Duration::from_ms(f64::NAN), Duration::ZERO);
        assert_eq!(Duration::from_ms(f64::INFINITY), Duration::MAX);
        assert_eq!(Duration::from_ms(2.5), Duration::from_micros(2500));
    }
}
