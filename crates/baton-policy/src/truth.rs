//! Whether a replica's cache holds what its events say, judged by what its engine reports of hits.
//!
//! Events can be of another engine than the one that answers (a wrong port, a proxy), stop without a sign, or leave out what was evicted.
//! An index that goes on believing them sends requests to where their prefixes are not.

use std::time::Duration;

use baton_units::Time;
use serde::Serialize;

/// Reports that a verdict rests on.
const REPORTS_MIN: u32 = 8;
/// A report weighs half after so many more.
const HALF_LIFE: f64 = 16.0;
/// Who lacks more than this share of what its events told is not believed. What is evicted between a request's placement and its first
/// step is far less.
const FALSE_FROM: f64 = 0.5;
/// Who lacks at most this share is believed, whatever else is held against it.
const TRUE_TO: f64 = 0.1;
/// Who is not believed is tried again after this, doubling each time in a row.
const QUARANTINE: Duration = Duration::from_secs(10);
const QUARANTINE_MAX: Duration = Duration::from_mins(5);

/// How far a replica's events are believed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Trust {
    #[default]
    Trusted,
    /// What they tell counts for nothing; the replica is served all the same.
    Quarantined,
    /// What they tell, from the engine's replay on, counts half until reports bear it out.
    Probation,
}

/// What reports have shown of one life of a replica.
#[derive(Debug, Clone, Default)]
pub(crate) struct Truth {
    /// Blocks that events told and that requests could have found, and those that were not there; recent ones weigh most.
    told: f64,
    missing: f64,
    reports: u32,
    /// Events were missing when these reports came.
    doubtful: bool,
    suspended: Option<Suspended>,
}

#[derive(Debug, Clone, Copy)]
struct Suspended {
    until: Time,
    span: Duration,
}

impl Truth {
    /// An engine found `found` leading blocks of a prompt of which its events had told `told` when it was placed. `doubtful`: events are
    /// known to be missing. True when it is not believed from here on, so that what is known of its cache is to be dropped.
    pub(crate) fn report(&mut self, told: u32, found: u32, doubtful: bool, now: Time) -> bool {
        if told == 0 || self.trust(now) == Trust::Quarantined {
            return false;
        }
        if doubtful != self.doubtful {
            self.begin(doubtful);
        }
        let kept = 0.5_f64.powf(1.0 / HALF_LIFE);
        self.told = kept * self.told + f64::from(told);
        self.missing = kept * self.missing + f64::from(told.saturating_sub(found));
        self.reports = self.reports.saturating_add(1);
        if self.reports < REPORTS_MIN {
            return false;
        }
        let share = self.missing / self.told;
        if share > FALSE_FROM {
            let span = self.suspended.map_or(QUARANTINE, |last| (last.span * 2).min(QUARANTINE_MAX));
            self.suspended = Some(Suspended { until: now + span, span });
            self.begin(doubtful);
            return true;
        }
        if share <= TRUE_TO {
            self.suspended = None;
        }
        false
    }

    pub(crate) fn trust(&self, now: Time) -> Trust {
        match self.suspended {
            None => Trust::Trusted,
            Some(Suspended { until, .. }) if now < until => Trust::Quarantined,
            Some(_) => Trust::Probation,
        }
    }

    /// Whether reports bear out what the index has, though events are missing, or none are.
    pub(crate) fn is_proven(&self, doubtful: bool) -> bool {
        self.doubtful == doubtful && self.reports >= REPORTS_MIN && self.missing <= TRUE_TO * self.told
    }

    fn begin(&mut self, doubtful: bool) {
        (self.told, self.missing, self.reports, self.doubtful) = (0.0, 0.0, 0, doubtful);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(seconds: u64) -> Time {
        Time::ZERO + Duration::from_secs(seconds)
    }

    /// So many reports in a row; how many of them ended in a verdict.
    fn reports(truth: &mut Truth, count: u32, told: u32, found: u32, now: Time) -> usize {
        (0..count).filter(|_| truth.report(told, found, false, now)).count()
    }

    #[test]
    fn who_lacks_what_it_told_is_not_believed_for_longer_each_time_and_can_come_back() {
        let mut truth = Truth::default();
        assert_eq!(reports(&mut truth, REPORTS_MIN - 1, 10, 0, at(0)), 0);
        assert_eq!(truth.trust(at(0)), Trust::Trusted, "too few to tell");
        assert_eq!(reports(&mut truth, 1, 10, 0, at(0)), 1);
        assert_eq!((truth.trust(at(9)), truth.trust(at(10))), (Trust::Quarantined, Trust::Probation));
        assert_eq!(reports(&mut truth, 50, 10, 0, at(9)), 0, "what was placed before says nothing new");
        assert_eq!(reports(&mut truth, REPORTS_MIN, 10, 0, at(10)), 1);
        assert_eq!((truth.trust(at(29)), truth.trust(at(30))), (Trust::Quarantined, Trust::Probation));
        assert_eq!(reports(&mut truth, REPORTS_MIN, 10, 10, at(30)), 0);
        assert_eq!(truth.trust(at(30)), Trust::Trusted);
        assert_eq!(reports(&mut truth, 2 * REPORTS_MIN, 10, 0, at(31)), 1);
        assert_eq!(truth.trust(at(41)), Trust::Probation, "a new offence begins the count anew");
    }

    #[test]
    fn what_is_known_in_spite_of_missing_events_is_proven_by_reports_since_they_are() {
        let mut truth = Truth::default();
        reports(&mut truth, REPORTS_MIN, 10, 10, at(0));
        assert!(truth.is_proven(false) && !truth.is_proven(true));
        (0..REPORTS_MIN).for_each(|_| _ = truth.report(10, 10, true, at(1)));
        assert!(truth.is_proven(true) && !truth.is_proven(false));
    }

    proptest! {
        #[test]
        fn an_honest_engine_is_believed_whatever_it_evicts_at_times(
            prompts in prop::collection::vec((1u32..5_000, 0.0f64..0.4), 1..200),
        ) {
            let mut truth = Truth::default();
            for (told, lost) in prompts {
                let found = told - (f64::from(told) * lost) as u32;
                prop_assert!(!truth.report(told, found, false, at(0)));
            }
            prop_assert_eq!(truth.trust(at(0)), Trust::Trusted);
        }

        #[test]
        fn a_liar_is_found_out_within_a_few_times_the_reports_of_its_honest_days(honest in 0u32..500, told in 1u32..1_000) {
            let mut truth = Truth::default();
            prop_assert_eq!(reports(&mut truth, honest, told, told, at(0)), 0);
            prop_assert_eq!(reports(&mut truth, 2 * HALF_LIFE as u32, told, 0, at(1)), 1);
        }
    }
}
