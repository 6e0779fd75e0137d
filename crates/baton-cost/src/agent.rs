//! An agent task: steps that share a growing prefix (lecture, exercise 5).

use baton_units::Tokens;
use serde::{Deserialize, Serialize};

use crate::StepCoefficients;

/// A task of `steps` requests; the first prompt has `first` tokens, each further one `growth` more, all of it shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentTask {
    pub steps: u32,
    pub first: u32,
    pub growth: u32,
}

impl AgentTask {
    /// The lecture's task: 97,000 prompt tokens in 20 steps, of which 7,700 are distinct.
    pub const LECTURE: Self = Self { steps: 20, first: 2000, growth: 300 };

    /// Tokens of the prompt of step `step`, counted from 0.
    pub fn prompt(&self, step: u32) -> Tokens {
        Tokens(self.first + self.growth * step)
    }

    /// Prompt tokens of all steps.
    pub fn prompt_tokens(&self) -> f64 {
        (0..self.steps).map(|step| self.prompt(step).as_f64()).sum()
    }

    /// Tokens that must be computed at least once: the last prompt.
    pub fn distinct_tokens(&self) -> f64 {
        if self.steps == 0 { 0.0 } else { self.prompt(self.steps - 1).as_f64() }
    }

    /// Prompt and new tokens of a step on average, rounded: the lecture's 4,850 and 385.
    pub fn mean_step(&self) -> (Tokens, Tokens) {
        let mean = |tokens: f64| Tokens((tokens / f64::from(self.steps.max(1))).round() as u32);
        (mean(self.prompt_tokens()), mean(self.distinct_tokens()))
    }

    /// Seconds of the average step's prefill without any reuse.
    pub fn step_cold_s(&self, step: &StepCoefficients) -> f64 {
        step.prefill_ms(self.mean_step().0, Tokens(0)) / 1e3
    }

    /// Seconds of the average step's prefill where the step before ran.
    pub fn step_warm_s(&self, step: &StepCoefficients) -> f64 {
        let (prompt, new) = self.mean_step();
        step.prefill_ms(new, prompt - new) / 1e3
    }

    /// Seconds that a task loses when every step finds a cold replica.
    pub fn scatter_loss_s(&self, step: &StepCoefficients) -> f64 {
        f64::from(self.steps) * (self.step_cold_s(step) - self.step_warm_s(step))
    }

    /// Device-seconds of prefill without any reuse, the term in `2 P` alone as in the lecture.
    pub fn cold_s(&self, step: &StepCoefficients) -> f64 {
        step.per_token_s * self.prompt_tokens()
    }

    /// Device-seconds of prefill with perfect reuse, counted alike.
    pub fn affinity_s(&self, step: &StepCoefficients) -> f64 {
        step.per_token_s * self.distinct_tokens()
    }

    /// Device-seconds of prefill under random routing, counted alike: `cold - hit (cold - affinity)`.
    pub fn random_s(&self, step: &StepCoefficients, replicas: u32) -> f64 {
        let (cold, affinity) = (self.cold_s(step), self.affinity_s(step));
        cold - self.hit_rate_random(replicas) * (cold - affinity)
    }

    /// Hit rate under perfect session affinity.
    pub fn hit_rate_affinity(&self) -> f64 {
        1.0 - self.distinct_tokens() / self.prompt_tokens()
    }

    /// Hit rate under random routing by the lecture's model: a step is warm only on the replica of the step before.
    pub fn hit_rate_random(&self, replicas: u32) -> f64 {
        self.hit_rate_affinity() / f64::from(replicas)
    }

    /// Hit rate under random routing over replicas whose prefix caches keep every older step, as real ones do: a step finds
    /// the latest of the task's steps that its replica served.
    pub fn hit_rate_random_kept(&self, replicas: u32) -> f64 {
        let here = 1.0 / f64::from(replicas);
        let found = |step: u32| -> f64 {
            (1..=step).map(|ago| here * (1.0 - here).powf(f64::from(ago - 1)) * self.prompt(step - ago).as_f64()).sum()
        };
        (0..self.steps).map(found).sum::<f64>() / self.prompt_tokens()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_lecture_task_adds_up() {
        let task = AgentTask::LECTURE;
        assert_eq!((task.prompt_tokens(), task.distinct_tokens()), (97_000.0, 7_700.0));
        assert_eq!(task.mean_step(), (Tokens(4850), Tokens(385)));
    }

    #[test]
    fn a_cache_that_keeps_older_steps_finds_half_under_random_routing() {
        let hit = AgentTask::LECTURE.hit_rate_random_kept(8);
        assert!((hit - 0.53).abs() < 0.01, "{hit}");
    }

    proptest! {
        #[test]
        fn rates_lie_in_order(steps in 1u32..50, first in 1u32..5000, growth in 0u32..1000, replicas in 1u32..64) {
            let task = AgentTask { steps, first, growth };
            let (lecture, kept, affinity) = (task.hit_rate_random(replicas), task.hit_rate_random_kept(replicas), task.hit_rate_affinity());
            prop_assert!(kept <= affinity + 1e-9 && lecture <= affinity + 1e-9);
            prop_assert!(replicas > 1 || (kept - affinity).abs() < 1e-9);
        }
    }
}
