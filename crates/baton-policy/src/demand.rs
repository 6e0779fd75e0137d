use std::{collections::VecDeque, sync::Arc};

use baton_kv::{BlockKey, MatchEnds};
use baton_units::{DurationMs, ReplicaId, Time, Tokens};

use crate::fleet::{LastPrefill, Replicas};

/// Arrivals that stand for the next ones. 128 in place of 32 gave p99 -2 %, p90 +50 % on mixed work.
const RECENT: usize = 32;
const RATE_TAU_MS: f64 = 5_000.0;
/// At 5 s the utilisation of a few replicas with 5 % long prompts is noise.
const UTILISATION_TAU_MS: f64 = 20_000.0;
/// A young average is divided by the share of its window that has passed, at least this much.
const YOUNG_MS: f64 = 100.0;

/// What the fleet is asked to do: arrival rate, utilisation, and a window of recent requests.
#[derive(Debug, Default)]
pub(crate) struct Demand {
    began: Option<Time>,
    last: Time,
    rate: f64,
    work: f64,
    /// When the work sent so far will be done.
    busy_until: Time,
    pub(crate) recent: VecDeque<Recent>,
}

/// A request of the window, with what it would cost on each candidate; refreshed where an index changed.
#[derive(Debug, Default)]
pub(crate) struct Recent {
    pub(crate) keys: Arc<[BlockKey]>,
    pub(crate) prompt: Tokens,
    /// Blocks that some replica had when it came. The next one like it is as new as it was, whatever is held since.
    pub(crate) known: u32,
    /// When its first token is late; never without an objective.
    pub(crate) slo_ttft_ms: f64,
    pub(crate) depths: Vec<u32>,
    /// Of these depths.
    pub(crate) ends: MatchEnds,
    /// Replicas that have some of it.
    pub(crate) holders: Vec<ReplicaId>,
    /// By the replica's index; NaN where it was not asked for yet.
    pub(crate) costs: Vec<f64>,
    /// Of the fleet's coefficients that the costs were computed with.
    pub(crate) version: u64,
}

impl Recent {
    /// Blocks that the next one like it would find on the replica.
    pub(crate) fn depth(&self, id: ReplicaId) -> u32 {
        self.depths.get(id.index()).copied().unwrap_or(0).min(self.known)
    }

    /// Brings `holders` up to date with the depths.
    pub(crate) fn find_holders(&mut self) {
        self.holders.clear();
        if self.known > 0 {
            let held = self.depths.iter().enumerate().filter(|(_, depth)| **depth > 0);
            self.holders.extend(held.map(|(place, _)| ReplicaId(place as u32)));
        }
    }

    pub(crate) fn cost_ms(&mut self, id: ReplicaId, replicas: &Replicas, last: &mut LastPrefill) -> f64 {
        let known = self.costs[id.index()];
        if !known.is_nan() {
            return known;
        }
        let replica = &replicas[id];
        let cost = last.ms(replica, self.prompt, replica.hit_tokens(self.depth(id), self.prompt));
        self.costs[id.index()] = cost;
        cost
    }

    /// Forgets the costs where the depth is another than in `before`.
    pub(crate) fn forget_costs(&mut self, before: &[u32]) {
        let depth = |depths: &[u32], place: usize| depths.get(place).copied().unwrap_or(0).min(self.known);
        for (place, cost) in self.costs.iter_mut().enumerate() {
            if depth(before, place) != depth(&self.depths, place) {
                *cost = f64::NAN;
            }
        }
    }
}

impl Demand {
    pub(crate) fn arrive(&mut self, now: Time) {
        self.began.get_or_insert(now);
        self.decay(now);
        self.rate += 1.0 / RATE_TAU_MS;
    }

    pub(crate) fn remember(&mut self, keys: Arc<[BlockKey]>, prompt: Tokens, known: u32, slo_ttft_ms: f64) {
        // The oldest one's memory serves the latest.
        let oldest = if self.recent.len() == RECENT { self.recent.pop_front() } else { None };
        let Recent { depths, ends, holders, costs, .. } = oldest.unwrap_or_default();
        self.recent.push_back(Recent { keys, prompt, known, slo_ttft_ms, depths, ends, holders, costs, version: 0 });
    }

    /// `work_ms` of prefill were sent to a fleet of `replicas`, to a place where they will be done by `done_at`.
    pub(crate) fn dispatch(&mut self, work_ms: f64, done_at: Time, replicas: usize, now: Time) {
        self.decay(now);
        self.busy_until = self.busy_until.max(done_at);
        self.work += work_ms / (UTILISATION_TAU_MS * replicas.max(1) as f64);
    }

    /// Arrivals per ms.
    pub(crate) fn rate(&self) -> f64 {
        self.rate / self.maturity(RATE_TAU_MS, self.last)
    }

    /// Share of the fleet's time taken by dispatched prefill work, at most one. What was sent takes its time until it is done: seen
    /// against the time up to now alone, the first long prompts after a start would look like a fleet without a free moment.
    pub(crate) fn utilisation(&self) -> f64 {
        (self.work / self.maturity(UTILISATION_TAU_MS, self.busy_until.max(self.last))).min(1.0)
    }

    /// Followers of a busy period that one wasted ms delays as well.
    pub(crate) fn shadow_price(&self) -> f64 {
        let utilisation = self.utilisation();
        utilisation / (1.0 - utilisation).max(0.05)
    }

    fn maturity(&self, tau_ms: f64, until: Time) -> f64 {
        let age = self.began.map_or(0.0, |began| until.since(began).as_ms());
        1.0 - (-age.max(YOUNG_MS) / tau_ms).exp()
    }

    fn decay(&mut self, now: Time) {
        let elapsed = now.since(self.last).as_ms();
        self.last = now.max(self.last);
        self.rate *= (-elapsed / RATE_TAU_MS).exp();
        self.work *= (-elapsed / UTILISATION_TAU_MS).exp();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_long_prompts_of_an_idle_fleet_do_not_look_like_a_full_one() {
        let mut demand = Demand::default();
        for place in 0..6 {
            let now = Time::from_ms(f64::from(place) * 8.0);
            demand.arrive(now);
            demand.dispatch(142.0, Time::from_ms(now.as_ms() + 142.0), 8, now);
        }
        // Six of eight replicas are busy until 182 ms, each for 142 ms of them.
        let share = demand.utilisation();
        assert!((share - 6.0 * 142.0 / (8.0 * 182.0)).abs() < 0.02, "{share}");
    }

    #[test]
    fn a_steady_load_is_seen_as_what_it_is_at_any_age() {
        let mut demand = Demand::default();
        for place in 0..4000 {
            let now = Time::from_ms(f64::from(place) * 10.0);
            demand.arrive(now);
            demand.dispatch(40.0, Time::from_ms(now.as_ms() + 40.0), 8, now);
            if place > 100 {
                assert!((demand.utilisation() - 0.5).abs() < 0.03, "{} after {place}", demand.utilisation());
                assert!((demand.rate() - 0.1).abs() < 0.002, "{}", demand.rate());
            }
        }
    }
}
