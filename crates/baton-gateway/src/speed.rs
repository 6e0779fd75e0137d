//! How fast each engine is, as far as all of its like have shown.
//!
//! A measurement is corrected only by use, and an engine that looks slow gets none: with nothing but its own, one unlucky first
//! request would keep it idle for good. So an engine counts as fast as its like, and its own measurements move it from there by what
//! they weigh (empirical Bayes; Efron and Morris, Data analysis using Stein's estimator, 1975). What it measured long ago weighs little.

use std::{collections::BTreeMap, time::Duration};

use baton_cost::{StepCoefficients, StepLoad};
use baton_policy::{Discipline, ReplicaSpec};
use baton_units::{DurationMs, ReplicaId, Time, Tokens};

use crate::{config::EngineConfig, engine::Facts};

/// Measurements that an engine's estimate rests on, at most; they count for less the longer ago they were made.
const WEIGHT_MAX: f64 = 128.0;
const WEIGHT_TAU: Duration = Duration::from_secs(30);
/// What was measured at all weighs more than a prior, however long ago.
const WEIGHT_MIN: f64 = 1e-9;
/// Relative standard deviation of one measurement.
const NOISE: f64 = 0.15;
/// The same of the true speeds of engines that are alike, at least.
const SPREAD_MIN: f64 = 0.05;
/// From this weight on an estimate says something of how much engines differ.
const WEIGHT_TOLD: f64 = (NOISE / SPREAD_MIN) * (NOISE / SPREAD_MIN);
/// A pool is made again after this long.
const POOL_AGE: Duration = Duration::from_millis(250);
/// Coefficients that differ by less than this are the same: a change makes the router price anew what it had priced.
const SAME: f64 = 0.01;
/// The load by which speeds are compared.
const TYPICAL_PREFILL: Tokens = Tokens(1024);

/// What was measured of one engine, and how much it weighs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Speed {
    step: StepCoefficients,
    /// Steps that the engine had taken, where it counts them.
    steps: u64,
    /// In measurements, as of `at`; zero while only a prior is known.
    weight: f64,
    at: Time,
}

impl Speed {
    pub(crate) fn prior(step: StepCoefficients) -> Self {
        Self { step, steps: 0, weight: 0.0, at: Time::ZERO }
    }

    pub(crate) fn step(&self) -> StepCoefficients {
        self.step
    }

    /// A report of the engine itself. The first one of a life is a prior unless it has taken steps.
    pub(crate) fn reported(&mut self, step: StepCoefficients, steps: u64, life_began: bool, now: Time) {
        if life_began {
            *self = Self::prior(self.step);
        }
        self.take_in(step, steps.saturating_sub(self.steps) as f64, now);
        self.steps = steps;
    }

    /// One request showed it, with those before.
    pub(crate) fn observed(&mut self, step: StepCoefficients, now: Time) {
        self.take_in(step, 1.0, now);
    }

    fn take_in(&mut self, step: StepCoefficients, measurements: f64, now: Time) {
        let weight = self.weight_at(now) + measurements;
        (self.step, self.weight, self.at) = (step, weight.min(WEIGHT_MAX), now);
    }

    fn weight_at(&self, now: Time) -> f64 {
        if self.weight == 0.0 {
            return 0.0;
        }
        (self.weight * (-now.since(self.at).as_ms() / WEIGHT_TAU.as_ms()).exp()).max(WEIGHT_MIN)
    }
}

/// Engines that are taken to be alike: those that the operator says are, else those that show the same.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Likeness {
    Group(String),
    Shape { kind: &'static str, models: Vec<String>, numbers: [u32; 5] },
}

impl Likeness {
    pub(crate) fn of(config: &EngineConfig, facts: &Facts, spec: &ReplicaSpec) -> Self {
        if let Some(group) = &config.group {
            return Self::Group(group.clone());
        }
        let budget = match spec.discipline {
            Discipline::Serial => 0,
            Discipline::Chunked { budget } | Discipline::Interleaved { budget, .. } => budget.0,
        };
        let mut models: Vec<String> = facts.models.iter().map(|card| card.id.clone()).collect();
        models.sort_unstable();
        let numbers = [spec.block_size.get(), spec.kv_blocks.0, spec.max_model_len.0, spec.max_running, budget];
        Self::Shape { kind: config.kind.as_str(), models, numbers }
    }
}

/// The speeds of all engines.
#[derive(Debug, Default)]
pub(crate) struct Speeds {
    engines: BTreeMap<ReplicaId, (Likeness, Speed)>,
    pools: BTreeMap<Likeness, Pool>,
}

/// What engines that are alike have shown together.
#[derive(Debug, Clone, Copy)]
struct Pool {
    step: StepCoefficients,
    /// Measurements of its own by which an engine is half itself and half like the others.
    half: f64,
    made_at: Time,
}

impl Speeds {
    /// Takes in what the engine has shown by `now` and tells how fast it counts.
    pub(crate) fn blend(&mut self, id: ReplicaId, like: Likeness, own: Speed, now: Time) -> StepCoefficients {
        let first = self.engines.insert(id, (like.clone(), own)).is_none_or(|(former, _)| former != like);
        let pool = match self.pools.get(&like) {
            Some(pool) if !first && now.since(pool.made_at) < POOL_AGE => *pool,
            Some(_) | None => {
                let alike = self.engines.values().filter(|(other, _)| *other == like).map(|(_, speed)| speed);
                let pool = Pool::of(alike, now).unwrap_or(Pool { step: own.step, half: 0.0, made_at: now });
                self.pools.insert(like, pool);
                pool
            }
        };
        let weight = own.weight_at(now);
        let share = if weight > 0.0 { weight / (weight + pool.half) } else { 0.0 };
        mix(&pool.step, 1.0 - share, &own.step, share)
    }

    /// Only engines with places before `count` are left.
    pub(crate) fn forget(&mut self, gone: &[ReplicaId]) {
        self.engines.retain(|id, _| !gone.contains(id));
        self.pools.retain(|like, _| self.engines.values().any(|(other, _)| other == like));
    }
}

impl Pool {
    /// `None` while none has more than a prior.
    fn of<'a>(alike: impl Iterator<Item = &'a Speed> + Clone, now: Time) -> Option<Self> {
        let total: f64 = alike.clone().map(|speed| speed.weight_at(now)).sum();
        if total == 0.0 {
            return None;
        }
        let zero = StepCoefficients { fixed_s: 0.0, per_token_s: 0.0, per_attended_s: 0.0, per_kv_token_s: 0.0, weights_s: 0.0 };
        let step = alike.clone().fold(zero, |sum, speed| mix(&sum, 1.0, &speed.step, speed.weight_at(now) / total));
        let typical = StepLoad::prefill(TYPICAL_PREFILL, Tokens::ZERO);
        // What is seen of the differences is theirs and the noise's.
        let (mut told, mut variance) = (0.0, 0.0);
        for (speed, weight) in alike.map(|speed| (speed, speed.weight_at(now))).filter(|(_, weight)| *weight >= WEIGHT_TOLD) {
            let differs = (speed.step.step_s(&typical) / step.step_s(&typical)).ln();
            told += weight;
            variance += weight * differs.powi(2) - NOISE.powi(2);
        }
        let spread = if told > 0.0 { (variance / told).max(SPREAD_MIN.powi(2)) } else { SPREAD_MIN.powi(2) };
        Some(Self { step, half: NOISE.powi(2) / spread, made_at: now })
    }
}

/// Whether the difference is not worth telling.
pub(crate) fn hardly_differ(a: &StepCoefficients, b: &StepCoefficients) -> bool {
    let near = |of: fn(&StepCoefficients) -> f64| (of(a) - of(b)).abs() <= SAME * of(a).max(of(b));
    near(|step| step.fixed_s)
        && near(|step| step.per_token_s)
        && near(|step| step.per_attended_s)
        && near(|step| step.per_kv_token_s)
        && near(|step| step.weights_s)
}

fn mix(a: &StepCoefficients, of_a: f64, b: &StepCoefficients, of_b: f64) -> StepCoefficients {
    StepCoefficients {
        fixed_s: of_a * a.fixed_s + of_b * b.fixed_s,
        per_token_s: of_a * a.per_token_s + of_b * b.per_token_s,
        per_attended_s: of_a * a.per_attended_s + of_b * b.per_attended_s,
        per_kv_token_s: of_a * a.per_kv_token_s + of_b * b.per_kv_token_s,
        weights_s: of_a * a.weights_s + of_b * b.weights_s,
    }
}

#[cfg(test)]
#[allow(clippy::float_cmp, reason = "sums and products that are exact")]
mod tests {
    use baton_units::{BlockSize, Blocks, Incarnation};

    use super::*;
    use crate::{config::EngineKind, engine::Engine};

    fn step(per_token_s: f64) -> StepCoefficients {
        StepCoefficients { fixed_s: 0.0, per_token_s, per_attended_s: 0.0, per_kv_token_s: 0.0, weights_s: 0.0 }
    }

    fn at(seconds: u64) -> Time {
        Time::ZERO + Duration::from_secs(seconds)
    }

    fn group(name: &str) -> Likeness {
        Likeness::Group(name.into())
    }

    fn measured(per_token_s: f64, measurements: u64, now: Time) -> Speed {
        let mut speed = Speed::prior(step(per_token_s));
        (0..measurements).for_each(|_| speed.observed(step(per_token_s), now));
        speed
    }

    /// What the first of the engines counts as.
    fn first(speeds: &[Speed], now: Time) -> f64 {
        let mut all = Speeds::default();
        for (place, speed) in speeds.iter().enumerate().rev() {
            all.blend(ReplicaId(place as u32), group("a"), *speed, at(0));
        }
        all.blend(ReplicaId(0), group("a"), speeds[0], now).per_token_s
    }

    #[test]
    fn an_engine_alone_is_as_fast_as_it_shows() {
        assert_eq!(first(&[Speed::prior(step(3.0))], at(1)), 3.0);
        assert!((first(&[measured(2.0, 1, at(0))], at(1)) - 2.0).abs() < 1e-12);
    }

    #[test]
    fn one_unlucky_measurement_does_not_tell_an_engine_from_its_like() {
        let alike = [measured(3.0, 1, at(0)), measured(1.0, 100, at(0)), measured(1.0, 100, at(0))];
        let counts = first(&alike, at(0));
        assert!((1.0..1.25).contains(&counts), "{counts}");
    }

    #[test]
    fn engines_that_nobody_asked_count_as_their_like_and_not_as_the_prior() {
        assert!((first(&[Speed::prior(step(9.0)), measured(1.0, 5, at(0))], at(0)) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn a_slow_engine_that_is_used_is_known_to_be_slow() {
        let counts = first(&[measured(2.0, 100, at(0)), measured(1.0, 100, at(0)), measured(1.0, 100, at(0))], at(0));
        assert!(counts > 1.95, "{counts}");
    }

    #[test]
    fn what_was_measured_long_ago_is_tried_again() {
        let used = measured(1.0, 100, at(600));
        let counts = first(&[measured(2.0, 100, at(0)), used, used], at(600));
        assert!(counts < 1.05, "{counts}");
    }

    #[test]
    fn engines_of_other_groups_tell_nothing() {
        let mut speeds = Speeds::default();
        speeds.blend(ReplicaId(1), group("b"), measured(1.0, 100, at(0)), at(0));
        assert_eq!(speeds.blend(ReplicaId(0), group("a"), measured(2.0, 1, at(0)), at(1)).per_token_s, 2.0);
        speeds.forget(&[ReplicaId(1)]);
        assert_eq!((speeds.engines.len(), speeds.pools.len()), (1, 1));
    }

    #[test]
    fn without_a_group_those_are_alike_that_show_the_same() {
        let like = |blocks: u32, model: &str, group: Option<&str>| {
            let config = EngineConfig {
                group: group.map(Into::into),
                models: vec![model.into()],
                ..EngineConfig::new("http://h:1".parse().unwrap(), EngineKind::Vllm)
            };
            let engine = Engine::new(ReplicaId(0), Incarnation(0), config.into(), 1);
            let facts = engine.facts();
            let spec = ReplicaSpec {
                id: engine.id,
                incarnation: Incarnation(1),
                block_size: BlockSize::DEFAULT,
                kv_blocks: Blocks(blocks),
                max_model_len: Tokens(1000),
                max_running: 8,
                discipline: Discipline::Chunked { budget: Tokens(64) },
                step: step(1.0),
            };
            Likeness::of(&engine.config, &facts, &spec)
        };
        assert_eq!(like(100, "a", None), like(100, "a", None));
        assert_ne!(like(100, "a", None), like(200, "a", None), "another device, by its memory");
        assert_ne!(like(100, "a", None), like(100, "b", None));
        assert_eq!(like(100, "a", Some("g")), like(200, "a", Some("g")), "the operator says so");
    }

    #[test]
    fn a_report_without_new_steps_measures_nothing() {
        let mut speed = Speed::prior(step(1.0));
        speed.reported(step(2.0), 0, true, at(0));
        assert_eq!(speed.weight_at(at(0)), 0.0, "a prior");
        speed.reported(step(2.0), 5, false, at(0));
        speed.reported(step(2.0), 5, false, at(0));
        assert_eq!(speed.weight_at(at(0)), 5.0);
        speed.reported(step(2.0), 7, true, at(0));
        assert_eq!(speed.weight_at(at(0)), 7.0, "another life, whose first steps count");
    }
}
