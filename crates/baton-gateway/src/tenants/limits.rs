//! What a tenant may use of the fleet: two rates with bursts, and requests at once. Pure: `now` is an argument.

use std::time::Duration;

use baton_units::Time;

/// A bucket counts in parts of a token, of which a rate of one a minute brings one each nanosecond: so nothing is ever rounded.
const PARTS: i128 = 60_000_000_000;

/// Of the rate at which a tenant's requests end.
const ENDS_TAU_S: f64 = 60.0;
/// Bounds of what a client is told to wait for a place: clients count in seconds, and an end long ago says little of the next one.
const PLACE_MIN: Duration = Duration::from_secs(1);
const PLACE_MAX: Duration = Duration::from_mins(10);

/// A token bucket: it holds a minute's worth, begins full, and fills evenly.
///
/// In any time `t` no more is taken out of it than `burst + rate * t`, as long as nobody [charges](Self::charge) it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bucket {
    per_minute: u64,
    /// In parts; below zero it owes.
    level: i128,
    at: Time,
}

impl Bucket {
    pub(crate) fn new(per_minute: u64, now: Time) -> Self {
        let mut bucket = Self { per_minute, level: 0, at: now };
        bucket.level = bucket.burst();
        bucket
    }

    /// Goes on at another rate with what is in it.
    pub(crate) fn set_rate(&mut self, per_minute: u64, now: Time) {
        self.fill(now);
        self.per_minute = per_minute;
        self.level = self.level.min(self.burst());
    }

    /// In what time `amount` can be taken if nobody else takes any: zero where there is room for it. More than the bucket holds is
    /// waited for until it is full, since it will never hold more.
    pub(crate) fn wait(&mut self, amount: u64, now: Time) -> Duration {
        self.fill(now);
        let missing = (parts(amount).min(self.burst()) - self.level).max(0);
        // At a rate of zero nothing comes; the configuration has none.
        let wait_ns = (missing + i128::from(self.per_minute) - 1) / i128::from(self.per_minute.max(1));
        Duration::from_nanos(u64::try_from(wait_ns).unwrap_or(u64::MAX))
    }

    /// Takes `amount`, room or not: what there is no room for is owed, and nothing else is let out before it is paid.
    pub(crate) fn charge(&mut self, amount: u64, now: Time) {
        self.fill(now);
        self.level -= parts(amount);
    }

    /// Takes back what was taken and not used.
    pub(crate) fn give_back(&mut self, amount: u64, now: Time) {
        self.fill(now);
        self.level = (self.level + parts(amount)).min(self.burst());
    }

    fn fill(&mut self, now: Time) {
        let elapsed_ns = now.since(self.at).as_nanos().cast_signed();
        self.at = self.at.max(now);
        self.level = (self.level + elapsed_ns * i128::from(self.per_minute)).min(self.burst());
    }

    fn burst(&self) -> i128 {
        parts(self.per_minute)
    }
}

fn parts(amount: u64) -> i128 {
    i128::from(amount) * PARTS
}

/// What a tenant's requests can run into.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Limit {
    Requests,
    Tokens,
    Concurrency,
}

impl Limit {
    pub(crate) const ALL: [Self; 3] = [Self::Requests, Self::Tokens, Self::Concurrency];

    /// The option that sets it.
    pub(crate) fn option(self) -> &'static str {
        match self {
            Self::Requests => "requests_per_minute",
            Self::Tokens => "tokens_per_minute",
            Self::Concurrency => "concurrency",
        }
    }
}

/// There is no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Exceeded {
    pub(crate) limit: Limit,
    /// When there is room if nobody else takes it. Of a place among the requests at once: when the next one is expected to end.
    pub(crate) retry_after: Duration,
}

/// Bounds; none where there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Bounds {
    pub(crate) requests_per_minute: Option<u64>,
    pub(crate) tokens_per_minute: Option<u64>,
    pub(crate) concurrency: Option<u32>,
}

/// One tenant's use of its bounds.
#[derive(Debug)]
pub(crate) struct Limits {
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
    concurrency: Option<u32>,
    running: u32,
    ends: Ends,
}

impl Limits {
    pub(crate) fn new(bounds: Bounds, now: Time) -> Self {
        let mut limits = Self { requests: None, tokens: None, concurrency: None, running: 0, ends: Ends { at: now, ..Ends::default() } };
        limits.set(bounds, now);
        limits
    }

    /// Other bounds from here on; what was used counts on.
    pub(crate) fn set(&mut self, bounds: Bounds, now: Time) {
        set_rate(&mut self.requests, bounds.requests_per_minute, now);
        set_rate(&mut self.tokens, bounds.tokens_per_minute, now);
        self.concurrency = bounds.concurrency;
    }

    /// A request begins, and counts as one, whatever becomes of it; one without a place does not.
    pub(crate) fn enter(&mut self, now: Time) -> Result<(), Exceeded> {
        if self.concurrency.is_some_and(|most| self.running >= most) {
            return Err(Exceeded { limit: Limit::Concurrency, retry_after: self.ends.next_in(now) });
        }
        if let Some(requests) = &mut self.requests {
            let wait = requests.wait(1, now);
            if !wait.is_zero() {
                return Err(Exceeded { limit: Limit::Requests, retry_after: wait });
            }
            requests.charge(1, now);
        }
        self.running += 1;
        Ok(())
    }

    /// Sets tokens aside for a request that has begun.
    pub(crate) fn reserve(&mut self, amount: u64, now: Time) -> Result<(), Exceeded> {
        let Some(tokens) = &mut self.tokens else { return Ok(()) };
        let wait = tokens.wait(amount, now);
        if wait.is_zero() {
            tokens.charge(amount, now);
            return Ok(());
        }
        // It has to begin again, which the other rate must allow as well.
        let again = self.requests.as_mut().map_or(Duration::ZERO, |requests| requests.wait(1, now));
        Err(Exceeded { limit: Limit::Tokens, retry_after: wait.max(again) })
    }

    /// More was used than was set aside.
    pub(crate) fn charge(&mut self, amount: u64, now: Time) {
        if let Some(tokens) = &mut self.tokens {
            tokens.charge(amount, now);
        }
    }

    /// Less was used.
    pub(crate) fn give_back(&mut self, amount: u64, now: Time) {
        if let Some(tokens) = &mut self.tokens {
            tokens.give_back(amount, now);
        }
    }

    /// A request that began is over.
    pub(crate) fn leave(&mut self, ran: bool, now: Time) {
        self.running = self.running.saturating_sub(1);
        if ran {
            self.ends.note(now);
        }
    }

    pub(crate) fn running(&self) -> u32 {
        self.running
    }
}

fn set_rate(bucket: &mut Option<Bucket>, per_minute: Option<u64>, now: Time) {
    if let (Some(bucket), Some(per_minute)) = (bucket.as_mut(), per_minute) {
        return bucket.set_rate(per_minute, now);
    }
    *bucket = per_minute.map(|per_minute| Bucket::new(per_minute, now));
}

/// How often requests end: decayed sums of ends, and of the time in which they were seen.
#[derive(Debug, Default)]
struct Ends {
    count: f64,
    seen_s: f64,
    at: Time,
}

impl Ends {
    fn note(&mut self, now: Time) {
        self.advance(now);
        self.count += 1.0;
    }

    /// When the next one is expected; at the least time where none was seen for long.
    fn next_in(&mut self, now: Time) -> Duration {
        self.advance(now);
        let gap_s = self.seen_s / self.count;
        if gap_s.is_finite() { Duration::from_secs_f64(gap_s.min(PLACE_MAX.as_secs_f64())).max(PLACE_MIN) } else { PLACE_MIN }
    }

    fn advance(&mut self, now: Time) {
        let decay = (-now.since(self.at).as_secs_f64() / ENDS_TAU_S).exp();
        self.at = self.at.max(now);
        self.count *= decay;
        self.seen_s = self.seen_s * decay + ENDS_TAU_S * (1.0 - decay);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;

    fn take(bucket: &mut Bucket, amount: u64, now: Time) -> Result<(), Duration> {
        let wait = bucket.wait(amount, now);
        if !wait.is_zero() {
            return Err(wait);
        }
        bucket.charge(amount, now);
        Ok(())
    }

    /// Steps in time with an amount each.
    fn asks() -> impl Strategy<Value = Vec<(u64, u64)>> {
        prop::collection::vec((0..20 * SECOND_NS, 1u64..100), 1..60)
    }

    proptest! {
        /// Between any two moments no more comes out than a burst and what the rate brings.
        #[test]
        fn no_more_than_burst_and_rate_comes_out(per_minute in 100u64..1000, asks in asks()) {
            let (mut now, mut bucket) = (Time::ZERO, Bucket::new(per_minute, Time::ZERO));
            let mut taken: Vec<(Time, u64)> = Vec::new();
            for (step, amount) in asks {
                now += Duration::from_nanos(step);
                if take(&mut bucket, amount, now).is_ok() {
                    taken.push((now, amount));
                }
            }
            for first in 0..taken.len() {
                let mut sum = 0;
                for (at, amount) in &taken[first..] {
                    sum += amount;
                    let elapsed_ns = at.since(taken[first].0).as_nanos().cast_signed();
                    prop_assert!(parts(sum) <= parts(per_minute) + elapsed_ns * i128::from(per_minute));
                }
            }
        }

        /// What a refused client is told is true to the nanosecond.
        #[test]
        fn there_is_room_when_it_was_said_and_not_before(per_minute in 100u64..1000, asks in asks()) {
            let (mut now, mut bucket) = (Time::ZERO, Bucket::new(per_minute, Time::ZERO));
            for (step, amount) in asks {
                now += Duration::from_nanos(step / 100);
                if let Err(wait) = take(&mut bucket, amount, now) {
                    let mut early = bucket;
                    prop_assert!(take(&mut early, amount, now + wait.saturating_sub(Duration::from_nanos(1))).is_err());
                    prop_assert!(take(&mut bucket, amount, now + wait).is_ok());
                    now += wait;
                }
            }
        }

        /// Whoever gives back what it did not use has taken what it used.
        #[test]
        fn what_was_not_used_comes_back(per_minute in 100u64..1000, before in 0u64..500, reserved in 0u64..500, unused in 0.0f64..=1.0) {
            let unused = (reserved as f64 * unused) as u64;
            let mut bucket = Bucket::new(per_minute, Time::ZERO);
            bucket.charge(before, Time::ZERO);
            let mut model = bucket;
            bucket.charge(reserved, Time::ZERO);
            bucket.give_back(unused, Time::ZERO);
            model.charge(reserved - unused, Time::ZERO);
            prop_assert_eq!(bucket, model);
            bucket.give_back(10_000, Time::ZERO);
            prop_assert_eq!(bucket, Bucket::new(per_minute, Time::ZERO), "never more than it holds");
        }

        /// Who used more than was set aside gets nothing before it is paid: whenever something is let out, all that was used up to then,
        /// debts included, is within a burst and the rate.
        #[test]
        fn debts_are_paid_before_anything_else(per_minute in 100u64..1000, asks in asks(), beyond in 0u64..3000) {
            let (mut now, mut bucket, mut used) = (Time::ZERO, Bucket::new(per_minute, Time::ZERO), 0);
            for (place, (step, amount)) in asks.into_iter().enumerate() {
                now += Duration::from_nanos(step);
                if take(&mut bucket, amount, now).is_ok() {
                    used += amount;
                    let come = parts(per_minute) + i128::from(now.0) * i128::from(per_minute);
                    prop_assert!(parts(used) <= come, "{} used at {:?}", used, now);
                }
                if place % 5 == 0 {
                    bucket.charge(beyond, now);
                    used += beyond;
                }
            }
        }

        /// The places are as many as the bound says, and each that is left is there for the next one.
        #[test]
        fn requests_at_once_keep_their_bound(most in 1u32..8, enters in prop::collection::vec(any::<bool>(), 1..100)) {
            let mut limits = Limits::new(Bounds { concurrency: Some(most), ..Bounds::default() }, Time::ZERO);
            let mut running = 0;
            for (second, enters) in enters.into_iter().enumerate() {
                let now = Time(second as u64 * SECOND_NS);
                if enters {
                    let entered = limits.enter(now);
                    prop_assert_eq!(entered.is_ok(), running < most);
                    running += u32::from(entered.is_ok());
                } else if running > 0 {
                    limits.leave(true, now);
                    running -= 1;
                }
                prop_assert_eq!(limits.running(), running);
            }
        }
    }

    #[test]
    fn what_is_larger_than_the_bucket_goes_when_it_is_full_and_is_paid_for() {
        let mut bucket = Bucket::new(60, Time::ZERO);
        bucket.charge(1, Time::ZERO);
        assert_eq!(bucket.wait(600, Time::ZERO), Duration::from_secs(1));
        bucket.charge(600, Time(SECOND_NS));
        assert_eq!(bucket.wait(1, Time(SECOND_NS)), Duration::from_secs(541));
    }

    #[test]
    fn a_place_is_expected_at_the_rate_at_which_requests_end() {
        let mut limits = Limits::new(Bounds { concurrency: Some(1), ..Bounds::default() }, Time::ZERO);
        limits.enter(Time::ZERO).unwrap();
        assert_eq!(limits.enter(Time::ZERO).unwrap_err().retry_after, PLACE_MIN, "nothing is known");
        for second in 1..=600 {
            if second % 20 == 0 {
                limits.leave(true, Time(second * SECOND_NS));
                limits.enter(Time(second * SECOND_NS)).unwrap();
            }
        }
        let told = limits.enter(Time(600 * SECOND_NS)).unwrap_err();
        assert_eq!(told.limit, Limit::Concurrency);
        assert!((15.0..25.0).contains(&told.retry_after.as_secs_f64()), "{told:?}");
    }

    #[test]
    fn a_request_without_tokens_is_told_when_it_may_begin_again() {
        let bounds = Bounds { requests_per_minute: Some(1), tokens_per_minute: Some(600), concurrency: None };
        let mut limits = Limits::new(bounds, Time::ZERO);
        limits.charge(600, Time::ZERO);
        limits.enter(Time::ZERO).unwrap();
        let told = limits.reserve(10, Time::ZERO).unwrap_err();
        assert_eq!(told, Exceeded { limit: Limit::Tokens, retry_after: Duration::from_mins(1) });
    }

    #[test]
    fn another_rate_goes_on_with_what_was_used() {
        let mut limits = Limits::new(Bounds { tokens_per_minute: Some(600), ..Bounds::default() }, Time::ZERO);
        limits.charge(600, Time::ZERO);
        limits.set(Bounds { tokens_per_minute: Some(60), ..Bounds::default() }, Time::ZERO);
        assert_eq!(limits.reserve(2, Time::ZERO).unwrap_err().retry_after, Duration::from_secs(2));
        limits.set(Bounds::default(), Time::ZERO);
        assert!(limits.reserve(1 << 40, Time::ZERO).is_ok());
    }
}
