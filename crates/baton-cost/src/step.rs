use baton_units::Tokens;
use serde::{Deserialize, Serialize};

use crate::{Device, ModelShape};

/// Seconds of one engine step as a function of what is in it; the common currency of engine, policy and simulator.
///
/// A roofline (Williams, Waterman and Patterson, 2009) with a constant in front: the arithmetic of all rows and the reading
/// of weights and KV overlap, so the longer of the two counts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepCoefficients {
    /// Per step, whatever is in it: launch, scheduling, sampling.
    pub fixed_s: f64,
    /// Per token computed: `2 P / F`.
    pub per_token_s: f64,
    /// Per pair of new token and context token: `4 L d / F`.
    pub per_attended_s: f64,
    /// Per context token read by a decode row: `b / HBM`.
    pub per_kv_token_s: f64,
    /// Reading the weights once: `W / HBM`.
    pub weights_s: f64,
}

/// What one step computes and reads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct StepLoad {
    /// Tokens computed, of all rows.
    pub new_tokens: f64,
    /// Sum over rows of new tokens times the context at the end of the row.
    pub attended: f64,
    /// Context tokens whose KV decode rows read.
    pub kv_tokens_read: f64,
    /// Rows that decode; each also counts as one new token.
    pub decode_rows: f64,
}

impl StepLoad {
    /// `new` prompt tokens computed over `cached` tokens whose KV exists.
    #[must_use]
    pub fn prefill(new: Tokens, cached: Tokens) -> Self {
        let new = new.as_f64();
        Self { new_tokens: new, attended: new * (cached.as_f64() + new), ..Self::default() }
    }

    /// The same prefill in chunks of at most `chunk` tokens, each over what precedes it; zero means no chunking.
    pub fn prefill_chunks(new: Tokens, cached: Tokens, chunk: Tokens) -> impl Iterator<Item = Self> {
        let chunk = if chunk.0 == 0 { new } else { chunk };
        (0..new.0).step_by(chunk.0.max(1) as usize).map(move |done| {
            let done = Tokens(done);
            Self::prefill(chunk.min(new - done), cached + done)
        })
    }

    /// `rows` sequences that decode one token each, with `context` tokens altogether.
    #[must_use]
    pub fn decode(rows: f64, context: f64) -> Self {
        Self { new_tokens: rows, attended: context, kv_tokens_read: context, decode_rows: rows }
    }

    /// Both loads in one step.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            new_tokens: self.new_tokens + other.new_tokens,
            attended: self.attended + other.attended,
            kv_tokens_read: self.kv_tokens_read + other.kv_tokens_read,
            decode_rows: self.decode_rows + other.decode_rows,
        }
    }
}

impl StepCoefficients {
    /// What the formulas give for a model on a device: the prior of every fit.
    ///
    /// A mixture of experts computes with its active parameters and is taken to read all experts, as any batch past
    /// [`crate::moe::saturation_batch`] does.
    #[must_use]
    pub fn from_profile(shape: &ModelShape, device: &Device) -> Self {
        let flops = device.effective_flops();
        Self {
            fixed_s: device.step_overhead_s,
            per_token_s: shape.flops_per_token() / flops,
            per_attended_s: shape.flops_per_attended() / flops,
            per_kv_token_s: shape.kv_bytes_per_token(shape.kv_dtype_bytes) / device.bytes_per_s,
            weights_s: shape.weight_bytes() / device.bytes_per_s,
        }
    }

    /// Seconds of one step: `fixed + max(compute, memory)`.
    pub fn step_s(&self, load: &StepLoad) -> f64 {
        self.fixed_s + self.compute_s(load).max(self.memory_s(load))
    }

    /// Seconds of arithmetic in one step.
    pub fn compute_s(&self, load: &StepLoad) -> f64 {
        self.per_token_s * load.new_tokens + self.per_attended_s * load.attended
    }

    /// Seconds of reading weights and KV in one step.
    pub fn memory_s(&self, load: &StepLoad) -> f64 {
        self.weights_s + self.per_kv_token_s * load.kv_tokens_read
    }

    /// Milliseconds of a prefill in one go, arithmetic alone: `(2 P n + 4 L d n (c + n)) / F`.
    pub fn prefill_ms(&self, new: Tokens, cached: Tokens) -> f64 {
        self.compute_s(&StepLoad::prefill(new, cached)) * 1e3
    }

    /// Milliseconds of a prefill as an engine runs it: one whole step, with its fixed part and weights, per `chunk` tokens.
    ///
    /// Zero for `chunk` means no chunking.
    pub fn prefill_chunked_ms(&self, new: Tokens, cached: Tokens, chunk: Tokens) -> f64 {
        StepLoad::prefill_chunks(new, cached, chunk).map(|load| self.step_s(&load)).sum::<f64>() * 1e3
    }

    /// The same with the reading of weights in the fixed part, as whole prefills show it: nobody can tell the two apart by them.
    #[must_use]
    pub fn weights_as_fixed(self) -> Self {
        Self { fixed_s: self.fixed_s + self.weights_s, weights_s: 0.0, ..self }
    }

    /// The same machine slowed by `factor` (below one: sped up).
    #[must_use]
    pub fn scaled(self, factor: f64) -> Self {
        Self {
            fixed_s: self.fixed_s * factor,
            per_token_s: self.per_token_s * factor,
            per_attended_s: self.per_attended_s * factor,
            per_kv_token_s: self.per_kv_token_s * factor,
            weights_s: self.weights_s * factor,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn reference() -> StepCoefficients {
        StepCoefficients::from_profile(&ModelShape::preset("llama-2-7b-gqa8").unwrap(), &Device::preset("h100").unwrap())
    }

    #[test]
    fn prefill_costs_what_the_reference_machine_gives() {
        for (new, cached, ms) in [(512, 0, 14.2), (4096, 0, 129.4), (16384, 0, 731.2), (4850, 0, 157.1), (385, 4465, 12.5)] {
            let got = reference().prefill_ms(Tokens(new), Tokens(cached));
            assert!((got - ms).abs() / ms < 0.005, "prefill({new}, {cached}) = {got} ms, not {ms}");
        }
    }

    #[test]
    fn a_decode_step_is_bound_by_reading_weights_and_kv() {
        let load = StepLoad::decode(164.0, 164.0 * 2500.0);
        let memory_ms = reference().memory_s(&load) * 1e3;
        assert!((memory_ms - 20.1).abs() < 0.1, "{memory_ms}");
        let step_ms = reference().step_s(&load) * 1e3;
        assert!((step_ms - 22.6).abs() < 0.1, "{step_ms}");
    }

    #[test]
    fn an_empty_prefill_is_free_in_one_go_and_in_chunks() {
        assert_eq!(reference().prefill_ms(Tokens(0), Tokens(4096)), 0.0);
        assert_eq!(reference().prefill_chunked_ms(Tokens(0), Tokens(4096), Tokens(512)), 0.0);
    }

    #[test]
    fn each_chunk_pays_the_fixed_part_and_attends_only_to_what_precedes_it() {
        let coefficients = reference();
        let chunked = coefficients.prefill_chunked_ms(Tokens(4096), Tokens(0), Tokens(2048));
        let whole = coefficients.prefill_chunked_ms(Tokens(4096), Tokens(0), Tokens(0));
        let unattended = coefficients.per_attended_s * 2048.0 * 2048.0 * 1e3;
        assert!((chunked - (whole + coefficients.fixed_s * 1e3 - unattended)).abs() < 1e-9);
    }

    proptest! {
        #[test]
        fn prefill_never_gets_cheaper_by_computing_more(new in 0u32..20_000, more in 0u32..1000, cached in 0u32..20_000, chunk in 1u32..5000) {
            let coefficients = reference();
            prop_assert!(coefficients.prefill_ms(Tokens(new + more), Tokens(cached)) >= coefficients.prefill_ms(Tokens(new), Tokens(cached)));
            prop_assert!(
                coefficients.prefill_chunked_ms(Tokens(new + more), Tokens(cached), Tokens(chunk)) + 1e-9
                    >= coefficients.prefill_chunked_ms(Tokens(new), Tokens(cached), Tokens(chunk))
            );
        }

        #[test]
        fn a_cached_prefix_saves_exactly_its_own_prefill(total in 1u32..20_000, share in 0.0f64..1.0) {
            let hit = (f64::from(total) * share) as u32;
            let coefficients = reference();
            let saved = coefficients.prefill_ms(Tokens(total), Tokens(0)) - coefficients.prefill_ms(Tokens(total - hit), Tokens(hit));
            // 2 P h + 4 L d h T: the hit's tokens, each attending to the whole context in this price.
            let direct = (coefficients.per_token_s * f64::from(hit) + coefficients.per_attended_s * f64::from(hit) * f64::from(total)) * 1e3;
            prop_assert!((saved - direct).abs() <= 1e-9 * (1.0 + direct));
        }

        #[test]
        fn a_mixed_step_costs_no_more_than_its_parts_apart(new in 1u32..4096, rows in 1.0f64..200.0, context in 1.0f64..4000.0) {
            let coefficients = reference();
            let (prefill, decode) = (StepLoad::prefill(Tokens(new), Tokens(0)), StepLoad::decode(rows, rows * context));
            let together = coefficients.step_s(&prefill.and(decode));
            prop_assert!(together <= coefficients.step_s(&prefill) + coefficients.step_s(&decode));
            prop_assert!(together >= coefficients.step_s(&prefill).max(coefficients.step_s(&decode)));
        }

        #[test]
        fn scaling_scales_every_price(factor in 0.1f64..10.0, new in 1u32..4096, cached in 0u32..4096) {
            let scaled = reference().scaled(factor).prefill_chunked_ms(Tokens(new), Tokens(cached), Tokens(512));
            let plain = reference().prefill_chunked_ms(Tokens(new), Tokens(cached), Tokens(512));
            prop_assert!((scaled - plain * factor).abs() < 1e-9 * scaled);
        }
    }
}
