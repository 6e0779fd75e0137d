use baton_cost::{StepCoefficients, StepLoad};
use baton_units::Tokens;

use crate::TokenBudget;

/// What has been planned for one step, and how much more may be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepBudget {
    policy: TokenBudget,
    fit: StepCoefficients,
    pub(crate) planned: u32,
    pub(crate) load: StepLoad,
}

/// What one row adds to a step. A row of one token reads its context once for that token, as decoding does, whatever the token is.
pub(crate) fn row_load(new: u32, context: u32) -> StepLoad {
    let end = f64::from(context) + f64::from(new);
    if new == 1 { StepLoad::decode(1.0, end) } else { StepLoad::prefill(Tokens(new), Tokens(context)) }
}

impl StepBudget {
    pub(crate) fn new(policy: TokenBudget, fit: StepCoefficients) -> Self {
        Self { policy, fit, planned: 0, load: StepLoad::default() }
    }

    /// Tokens that rows which decode already may still take.
    pub(crate) fn room_for_decode(&self) -> u32 {
        match self.policy {
            TokenBudget::Fixed(most) | TokenBudget::Latency { most, .. } => most.0.saturating_sub(self.planned),
        }
    }

    /// How many of the `want` tokens of a prefill row may be computed, after `context` tokens whose KV exists.
    pub(crate) fn room_for_prefill(&self, want: u32, context: u32) -> u32 {
        let want = want.min(self.room_for_decode());
        match self.policy {
            TokenBudget::Fixed(_) => want,
            TokenBudget::Latency { target, least, .. } => {
                let fits = self.tokens_within(target.as_secs_f64(), want, context);
                fits.max(want.min(least.0.saturating_sub(self.planned)))
            }
        }
    }

    pub(crate) fn add(&mut self, new: u32, context: u32) {
        self.planned += new;
        self.load = self.load.and(row_load(new, context));
    }

    /// Undoes an `add`.
    pub(crate) fn give_back(&mut self, new: u32, context: u32) {
        let row = row_load(new, context);
        self.planned -= new;
        self.load = StepLoad {
            new_tokens: self.load.new_tokens - row.new_tokens,
            attended: self.load.attended - row.attended,
            kv_tokens_read: self.load.kv_tokens_read - row.kv_tokens_read,
            decode_rows: self.load.decode_rows - row.decode_rows,
        };
    }

    /// The largest `n <= want` for which a step with `n` more prompt tokens after `context` takes at most `target_s`.
    fn tokens_within(&self, target_s: f64, want: u32, context: u32) -> u32 {
        let spare = target_s - self.fit.fixed_s;
        if self.fit.memory_s(&self.load) > spare {
            return 0;
        }
        let fits = self.tokens_computed_within(spare - self.fit.compute_s(&self.load), f64::from(context));
        let fits = fits.min(f64::from(want)) as u32;
        // A row of one token reads its context like a decode, which the root does not know of.
        if fits == 1 && self.fit.step_s(&self.load.and(row_load(1, context))) > target_s { 0 } else { fits }
    }

    /// The root of `a n^2 + (t + a c) n = spare`, with `t` seconds a token and `a` seconds a pair of tokens.
    fn tokens_computed_within(&self, spare: f64, context: f64) -> f64 {
        let linear = self.fit.per_token_s + self.fit.per_attended_s * context;
        if spare <= 0.0 {
            return 0.0;
        }
        // The form of the quadratic's root that also holds for a = 0; a free token has no limit.
        2.0 * spare / (linear + (linear * linear + 4.0 * self.fit.per_attended_s * spare).sqrt())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn fit() -> impl Strategy<Value = StepCoefficients> {
        (0.0f64..0.01, 0.0f64..1e-4, 0.0f64..1e-8, 0.0f64..1e-6, 0.0f64..0.02).prop_map(
            |(fixed_s, per_token_s, per_attended_s, per_kv_token_s, weights_s)| StepCoefficients {
                fixed_s,
                per_token_s,
                per_attended_s,
                per_kv_token_s,
                weights_s,
            },
        )
    }

    proptest! {
        #[test]
        fn the_budget_is_the_largest_whose_step_meets_the_target(
            fit in fit(),
            decodes in prop::collection::vec(1u32..5_000, 0..50),
            context in 0u32..50_000,
            want in 1u32..20_000,
            target_ms in 1.0f64..100.0,
            least in 1u32..100,
            most in 100u32..10_000,
        ) {
            let target = Duration::from_secs_f64(target_ms / 1e3);
            let policy = TokenBudget::Latency { target, least: Tokens(least), most: Tokens(most) };
            let mut budget = StepBudget::new(policy, fit);
            for decode in &decodes {
                budget.add(1, *decode);
            }
            let step_s = |tokens: u32| fit.step_s(&if tokens == 0 { budget.load } else { budget.load.and(row_load(tokens, context)) });
            let room = budget.room_for_prefill(want, context);
            prop_assert!(room <= want);
            let total = room + decodes.len() as u32;
            prop_assert!(total <= most.max(decodes.len() as u32));
            let tolerance = 1.0 + 1e-9;
            prop_assert!(room == 0 || total <= least || step_s(room) <= target.as_secs_f64() * tolerance, "{room} tokens are too many");
            prop_assert!(room == want || total >= most || step_s(room + 1) > target.as_secs_f64() / tolerance, "{room} tokens are too few");
        }

        #[test]
        fn what_is_given_back_was_never_there(rows in prop::collection::vec((1u32..100, 0u32..1000), 1..10)) {
            let free = StepCoefficients { fixed_s: 0.0, per_token_s: 0.0, per_attended_s: 0.0, per_kv_token_s: 0.0, weights_s: 0.0 };
            let mut budget = StepBudget::new(TokenBudget::Fixed(Tokens(5_000)), free);
            for &(new, context) in &rows {
                budget.add(new, context);
            }
            for &(new, context) in &rows {
                budget.give_back(new, context);
            }
            prop_assert_eq!((budget.planned, budget.load), (0, StepLoad::default()));
            prop_assert_eq!(budget.room_for_prefill(9_999, 3), 5_000);
        }
    }
}
