//! What a prefix that is already there is worth (lecture 17.5).

use baton_units::Tokens;

use crate::StepCoefficients;

/// Milliseconds of prefill that `hit` cached tokens save a prompt: the extra queueing that going to them is worth.
///
/// A prefix by itself (`prompt == hit`) is worth its own prefill, the lecture's table.
pub fn affinity_budget_ms(step: &StepCoefficients, prompt: Tokens, hit: Tokens) -> f64 {
    let hit = hit.min(prompt);
    step.prefill_ms(prompt, Tokens(0)) - step.prefill_ms(prompt - hit, hit)
}

/// Milliseconds gained by the warm replica over the cold one: `budget - (q_warm - q_cold)`; negative when the cold one wins.
pub fn affinity_gain_ms(budget_ms: f64, queue_warm_ms: f64, queue_cold_ms: f64) -> f64 {
    budget_ms - (queue_warm_ms - queue_cold_ms)
}

/// Sessions past a holder's balanced share from which a copy elsewhere is cheaper than their queue: `T_prefill / t_step`, each
/// session adding one decode step (lecture, exercise 2). An order of magnitude.
pub fn replication_threshold_sessions(prefill_s: f64, decode_step_s: f64) -> f64 {
    prefill_s / decode_step_s
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Device, ModelShape};

    fn step() -> StepCoefficients {
        StepCoefficients::from_profile(&ModelShape::preset("llama-2-7b-gqa8").unwrap(), &Device::preset("h100").unwrap())
    }

    #[test]
    fn a_prefix_by_itself_is_worth_its_prefill() {
        assert_eq!(affinity_budget_ms(&step(), Tokens(4096), Tokens(4096)), step().prefill_ms(Tokens(4096), Tokens(0)));
    }

    #[test]
    fn the_warm_replica_wins_just_below_its_budget() {
        let budget = affinity_budget_ms(&step(), Tokens(512), Tokens(512));
        assert!(affinity_gain_ms(budget, 94.0, 80.0) > 0.0);
        assert!(affinity_gain_ms(budget, 95.0, 80.0) < 0.0);
    }

    proptest! {
        #[test]
        fn a_longer_hit_is_worth_more(prompt in 0u32..50_000, hit in 0u32..50_000, more in 0u32..1000) {
            let worth = |hit| affinity_budget_ms(&step(), Tokens(prompt), Tokens(hit));
            prop_assert!(worth(hit + more) >= worth(hit) - 1e-9);
            prop_assert!(worth(0) == 0.0);
        }
    }
}
