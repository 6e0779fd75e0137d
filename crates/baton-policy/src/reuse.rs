use std::time::Duration;

use baton_kv::Use;

/// Idle ages from 1 ms to about three days, in octaves.
const OCTAVES: usize = 28;
/// Observations after which the past counts half.
const HALVE_AT: f64 = 1_048_576.0;
/// Before this many reuses were seen, a session counts as alive for `YOUNG_LIVE_AGE`.
const REUSES_MIN: f64 = 100.0;
const YOUNG_LIVE_AGE: Duration = Duration::from_secs(30);
/// Share of reuses within the age up to which an idle session counts as alive.
const LIVE_SHARE: f64 = 0.95;

/// How likely an idle block is wanted again: the Kaplan-Meier estimate over idle ages, apart for blocks that were reused before and
/// for those that never were.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reuse {
    kinds: [Ages; 2],
    table: [[f64; OCTAVES]; 2],
    fresh: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct Ages {
    reused: [f64; OCTAVES],
    evicted: [f64; OCTAVES],
    count: f64,
}

impl Reuse {
    /// Idle times ended: by reuse, or by eviction, which says only that they would have been longer.
    pub(crate) fn see(&mut self, seen: Use) {
        let ages = &mut self.kinds[usize::from(seen.reused_before)];
        let bins = if seen.reused { &mut ages.reused } else { &mut ages.evicted };
        bins[octave(seen.idle)] += f64::from(seen.blocks);
        ages.count += f64::from(seen.blocks);
        if ages.count > HALVE_AT {
            ages.reused.iter_mut().chain(&mut ages.evicted).for_each(|bin| *bin /= 2.0);
            ages.count /= 2.0;
        }
        self.fresh = false;
    }

    /// Brings the table up to date; call before a series of [`Self::probability`].
    pub(crate) fn refresh(&mut self) {
        if self.fresh {
            return;
        }
        for (ages, table) in self.kinds.iter().zip(&mut self.table) {
            let (mut at_risk, mut survival) = (0.0, 1.0);
            for octave in (0..OCTAVES).rev() {
                at_risk += ages.reused[octave] + ages.evicted[octave];
                if at_risk > 0.0 {
                    survival *= 1.0 - ages.reused[octave] / at_risk;
                }
                table[octave] = 1.0 - survival;
            }
        }
        self.fresh = true;
    }

    /// Chance that a block idle for `age` is wanted again.
    pub(crate) fn probability(&self, reused_before: bool, age: Duration) -> f64 {
        self.table[usize::from(reused_before)][octave(age)]
    }

    /// Idle age within which nearly all reuses happen.
    pub(crate) fn live_age(&self) -> Duration {
        let reuses = |octave: usize| self.kinds.iter().map(|ages| ages.reused[octave]).sum::<f64>();
        let all: f64 = (0..OCTAVES).map(reuses).sum();
        if all < REUSES_MIN {
            return YOUNG_LIVE_AGE;
        }
        let (mut sum, mut octave) = (0.0, 0);
        while octave + 1 < OCTAVES && sum + reuses(octave) < LIVE_SHARE * all {
            sum += reuses(octave);
            octave += 1;
        }
        Duration::from_millis(1 << (octave + 1))
    }
}

fn octave(age: Duration) -> usize {
    ((age.as_millis() as u64).max(1).ilog2() as usize).min(OCTAVES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn survival_counts_evictions_as_ages_that_were_cut_short() {
        let mut reuse = Reuse::default();
        let mut see = |reused_before, idle, reused| reuse.see(Use { reused_before, idle, reused, blocks: 1 });
        // Three idle times of 1 s: two ended in reuse, one by eviction; one of 100 s ended by eviction.
        see(true, SECOND, true);
        see(true, SECOND, true);
        see(true, SECOND, false);
        see(true, 100 * SECOND, false);
        reuse.refresh();
        assert!((reuse.probability(true, SECOND) - 0.5).abs() < 1e-12, "two of four at risk");
        assert!(reuse.probability(true, 10 * SECOND).abs() < 1e-12, "none came back so late");
        assert!(reuse.probability(false, SECOND).abs() < 1e-12, "the other kind is apart");
    }

    #[test]
    fn sessions_live_as_long_as_nearly_all_reuses_take() {
        let mut reuse = Reuse::default();
        assert_eq!(reuse.live_age(), YOUNG_LIVE_AGE);
        for (idle, blocks) in [(SECOND, 1000), (1000 * SECOND, 10)] {
            reuse.see(Use { reused_before: true, idle, reused: true, blocks });
        }
        assert!(reuse.live_age() >= SECOND && reuse.live_age() < 5 * SECOND, "{:?}", reuse.live_age());
    }
}
