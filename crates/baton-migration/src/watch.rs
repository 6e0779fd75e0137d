use std::time::Duration;

use baton_units::Time;

use crate::Timing;

/// Heartbeats that may be missing before a replica is suspected.
const MISSING_MAX: u32 = 3;
/// A step that takes so many times its prediction hangs.
const STEP_FACTOR: u32 = 4;
/// And never one shorter than this.
const STEP_MIN: Duration = Duration::from_secs(2);

/// What a replica tells with a heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Beat {
    pub sequence: u64,
    /// Steps that its engine has finished.
    pub steps: u64,
    /// Of the step that runs, how long the engine thinks that it takes; zero when none runs.
    pub step_predicted: Duration,
    /// Requests that wait or run.
    pub requests: u32,
}

/// Why a replica is thought to be dead, or to hang.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Suspicion {
    #[error("no heartbeat for {0:?}")]
    Silent(Duration),
    /// Heartbeats come, and work is there, but no step ends.
    #[error("no step has ended for {0:?} although {1} requests are there")]
    Stands(Duration, u32),
    #[error("its connection broke and could not be made again")]
    Disconnected,
}

/// A gateway's opinion of one life of one replica: by heartbeats and steps, never by a token's time alone, since a long prefill is no hang.
#[derive(Debug)]
pub struct Watch {
    period: Duration,
    heard: Time,
    last: Option<Beat>,
    /// When the number of steps last changed, or work came to an idle engine.
    moved: Time,
    suspicion: Option<Suspicion>,
}

impl Watch {
    pub fn new(timing: &Timing, now: Time) -> Self {
        Self { period: timing.heartbeat, heard: now, last: None, moved: now, suspicion: None }
    }

    pub fn suspicion(&self) -> Option<Suspicion> {
        self.suspicion
    }

    /// A heartbeat came. True when the replica was suspected until now for its silence, and is trusted again.
    pub fn beat(&mut self, beat: Beat, now: Time) -> bool {
        self.heard = now;
        let moved = self.last.is_none_or(|last| last.steps != beat.steps || last.requests == 0) || beat.requests == 0;
        if moved {
            self.moved = now;
        }
        self.last = Some(beat);
        let stands = matches!(self.suspicion, Some(Suspicion::Stands(..)));
        let trusted = self.suspicion.is_some() && (moved || !stands);
        if trusted {
            self.suspicion = None;
        }
        trusted
    }

    /// The control connection is there again. True when the replica was suspected for its silence until now; one that stands is trusted when
    /// it steps.
    pub fn connected(&mut self, now: Time) -> bool {
        self.heard = now;
        if matches!(self.suspicion, Some(Suspicion::Stands(..))) {
            return false;
        }
        self.moved = now;
        self.suspicion.take().is_some()
    }

    /// The control connection is gone, and could not be made again at once. True when the replica was trusted until now.
    pub fn disconnected(&mut self) -> bool {
        let trusted = self.suspicion.is_none();
        self.suspicion.get_or_insert(Suspicion::Disconnected);
        trusted
    }

    /// When a heartbeat, or the connection, came last.
    pub fn heard(&self) -> Time {
        self.heard
    }

    /// Suspects the replica if it is time; true when it was trusted until now. Call at [`Self::poll_timeout`].
    pub fn look(&mut self, now: Time) -> bool {
        if self.suspicion.is_some() {
            return false;
        }
        let silent = now.since(self.heard);
        if silent > self.silence_max() {
            self.suspicion = Some(Suspicion::Silent(silent));
        } else if let Some(last) = self.last.filter(|last| last.requests > 0)
            && now.since(self.moved) > self.step_max()
        {
            self.suspicion = Some(Suspicion::Stands(now.since(self.moved), last.requests));
        }
        self.suspicion.is_some()
    }

    pub fn poll_timeout(&self) -> Time {
        if self.suspicion.is_some() {
            return Time::NEVER;
        }
        let just_past = Duration::from_nanos(1);
        let silent = self.heard + self.silence_max() + just_past;
        match self.last {
            Some(last) if last.requests > 0 => silent.min(self.moved + self.step_max() + just_past),
            _ => silent,
        }
    }

    fn silence_max(&self) -> Duration {
        self.period * MISSING_MAX
    }

    fn step_max(&self) -> Duration {
        self.last.map_or(STEP_MIN, |last| STEP_MIN.max(last.step_predicted * STEP_FACTOR))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    fn beat(sequence: u64, steps: u64, requests: u32, step_predicted_ms: u64) -> Beat {
        Beat { sequence, steps, requests, step_predicted: Duration::from_millis(step_predicted_ms) }
    }

    #[test]
    fn silence_of_three_periods_is_suspected_until_the_next_heartbeat() {
        let mut watch = Watch::new(&Timing::default(), at(0));
        watch.beat(beat(1, 1, 0, 0), at(500));
        assert!(!watch.look(at(2_000)));
        assert!(watch.poll_timeout() > at(2_000) && watch.poll_timeout() <= at(2_001));
        assert!(watch.look(watch.poll_timeout()));
        assert!(!watch.look(at(2_100)), "said once");
        assert!(watch.beat(beat(2, 1, 0, 0), at(2_200)));
        assert_eq!(watch.suspicion(), None);
    }

    #[test]
    fn a_long_step_is_no_hang_before_it_is_longer_than_predicted() {
        let hangs_at = |predicted_ms| {
            let mut watch = Watch::new(&Timing::default(), at(0));
            (0..100).map(|number| number * 400).find(|ms| {
                watch.beat(beat(*ms, 7, 1, predicted_ms), at(*ms));
                watch.look(at(*ms))
            })
        };
        assert_eq!(hangs_at(20), Some(2_400), "two seconds at least");
        assert_eq!(hangs_at(2_000), Some(8_400), "four times what was predicted");
    }

    #[test]
    fn an_idle_engine_need_not_step_and_one_that_hangs_is_trusted_when_it_steps() {
        let mut watch = Watch::new(&Timing::default(), at(0));
        for ms in (0..20_000).step_by(500) {
            watch.beat(beat(ms, 7, 0, 0), at(ms));
            assert!(!watch.look(at(ms)));
        }
        for ms in (20_000..24_000).step_by(500) {
            watch.beat(beat(ms, 7, 3, 20), at(ms));
            watch.look(at(ms));
        }
        assert!(matches!(watch.suspicion(), Some(Suspicion::Stands(_, 3))));
        assert!(!watch.beat(beat(25, 7, 3, 20), at(24_000)), "a heartbeat alone is no step");
        assert!(watch.beat(beat(26, 8, 3, 20), at(24_100)));
    }
}
