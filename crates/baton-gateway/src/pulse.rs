//! How regularly an engine gives output, over all its requests: what it has shown says when its silence means that it hangs.
//!
//! A server's word that it is well comes from another thread than its tokens do. And no fixed time tells a hang from a long step: a
//! GPU's longest step takes some 0.1 s, a CPU's many seconds.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use baton_units::Time;

use crate::engine::Engine;

/// A silence is a hang when it is so many times as long as the longest one before.
const TIMES_LONGEST: u32 = 4;
/// Shorter silences are none: a garbage collection, a stopped virtual machine.
const LEAST: Duration = Duration::from_secs(2);
/// First tokens after which it is known how long they take.
const KNOWN: u32 = 8;

/// Of one life of an engine.
#[derive(Debug, Default)]
pub(crate) struct Pulse {
    /// When output last came from it, for any request.
    spoke_at: AtomicU64,
    /// Requests that have some output and wait for more; those that wait for their clients do not count.
    listeners: AtomicU32,
    /// When the first of them began to.
    listened_at: AtomicU64,
    longest_silence_ns: AtomicU64,
    first_tokens: AtomicU32,
    longest_first_token_ns: AtomicU64,
}

/// A request that has some output and waits for more.
#[derive(Debug)]
pub(crate) struct Listener(Arc<Engine>);

impl Listener {
    pub(crate) fn of(engine: &Arc<Engine>, now: Time) -> Self {
        if engine.pulse.listeners.fetch_add(1, Ordering::Relaxed) == 0 {
            engine.pulse.listened_at.store(now.0, Ordering::Relaxed);
        }
        Self(engine.clone())
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.0.pulse.listeners.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Pulse {
    /// Output came.
    pub(crate) fn spoke(&self, now: Time) {
        if let Some(silence) = self.silence(now) {
            self.longest_silence_ns.fetch_max(nanos(silence), Ordering::Relaxed);
        }
        self.spoke_at.store(now.0, Ordering::Relaxed);
    }

    pub(crate) fn spoke_at(&self) -> Time {
        Time(self.spoke_at.load(Ordering::Relaxed))
    }

    /// How long a request waited for its first token.
    pub(crate) fn first_token(&self, took: Duration) {
        self.first_tokens.fetch_add(1, Ordering::Relaxed);
        self.longest_first_token_ns.fetch_max(nanos(took), Ordering::Relaxed);
    }

    /// Since when nobody has got anything, where somebody waits for more.
    pub(crate) fn silence(&self, now: Time) -> Option<Duration> {
        let since = self.spoke_at().max(Time(self.listened_at.load(Ordering::Relaxed)));
        (self.listeners.load(Ordering::Relaxed) > 0).then(|| now.since(since))
    }

    /// A silence longer than this is a hang, of an engine whose full step takes `full_step`; `most` at the longest.
    pub(crate) fn patience(&self, full_step: Duration, most: Duration) -> Duration {
        let longest = Duration::from_nanos(self.longest_silence_ns.load(Ordering::Relaxed)).max(full_step);
        longest.saturating_mul(TIMES_LONGEST).max(LEAST).min(most)
    }

    /// Who waits for a first token longer than this waits for a hung engine, as far as the engine has shown how long they take; `None`
    /// while it has not.
    pub(crate) fn first_token_patience(&self) -> Option<Duration> {
        let longest = Duration::from_nanos(self.longest_first_token_ns.load(Ordering::Relaxed));
        (self.first_tokens.load(Ordering::Relaxed) >= KNOWN).then(|| longest.saturating_mul(TIMES_LONGEST).max(LEAST))
    }

    /// Another life begins.
    pub(crate) fn forget(&self) {
        self.longest_silence_ns.store(0, Ordering::Relaxed);
        self.first_tokens.store(0, Ordering::Relaxed);
        self.longest_first_token_ns.store(0, Ordering::Relaxed);
    }
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use baton_units::{Incarnation, ReplicaId};

    use super::*;
    use crate::config::{EngineConfig, EngineKind};

    const HOUR: Duration = Duration::from_hours(1);

    fn at(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    #[test]
    fn a_silence_counts_while_somebody_listens_and_from_when_they_began_to() {
        let config = EngineConfig::new("http://h:1".parse().unwrap(), EngineKind::Vllm);
        let engine = Arc::new(Engine::new(ReplicaId(0), Incarnation(0), config.into(), 1));
        let pulse = &engine.pulse;
        pulse.spoke(at(0));
        assert_eq!(pulse.silence(at(50_000)), None);
        let first = Listener::of(&engine, at(60_000));
        let second = Listener::of(&engine, at(60_500));
        assert_eq!(pulse.silence(at(61_000)), Some(Duration::from_secs(1)));
        pulse.spoke(at(61_000));
        assert_eq!(pulse.silence(at(61_100)), Some(Duration::from_millis(100)));
        drop((first, second));
        assert_eq!(pulse.silence(at(70_000)), None);
        assert_eq!(pulse.patience(Duration::ZERO, HOUR), Duration::from_secs(4), "the longest was a second");
        pulse.forget();
        assert_eq!(pulse.patience(Duration::ZERO, HOUR), LEAST);
    }

    #[test]
    fn slow_engines_are_waited_for() {
        let pulse = Pulse::default();
        assert_eq!(pulse.patience(Duration::from_secs(5), HOUR), Duration::from_secs(20));
        assert_eq!(pulse.patience(Duration::from_secs(5), Duration::from_secs(7)), Duration::from_secs(7));
        for _ in 1..KNOWN {
            pulse.first_token(Duration::from_millis(10));
        }
        assert_eq!(pulse.first_token_patience(), None);
        pulse.first_token(Duration::from_secs(3));
        assert_eq!(pulse.first_token_patience(), Some(Duration::from_secs(12)));
    }
}
