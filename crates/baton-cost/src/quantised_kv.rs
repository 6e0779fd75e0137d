use baton_units::Tokens;
use serde::{Deserialize, Serialize};

use crate::ModelShape;

/// KV kept in few bits with a tail in full precision, as in KIVI (Liu et al., 2024): keys per channel, values per token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuantisedKv {
    pub bits: u32,
    /// Numbers that share a scale and a zero point of 16 bits each.
    pub group: u32,
    /// Latest tokens that stay in full precision.
    pub residual: u32,
}

impl QuantisedKv {
    /// The paper's defaults.
    pub const KIVI_2: Self = Self { bits: 2, group: 32, residual: 32 };

    /// Bytes of one quantised number with its part of scale and zero point.
    pub fn bytes_per_element(&self) -> f64 {
        (f64::from(self.bits) + 32.0 / f64::from(self.group)) / 8.0
    }

    /// Bytes of the KV of one sequence of `tokens`; the tail takes the model's own KV numbers.
    pub fn bytes(&self, shape: &ModelShape, tokens: Tokens) -> f64 {
        let tail = tokens.min(Tokens(self.residual));
        shape.kv_bytes(tail) + shape.kv_bytes_per_token(self.bytes_per_element()) * (tokens - tail).as_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, StepCoefficients};

    #[test]
    fn two_bits_in_groups_of_32_take_three() {
        assert_eq!(QuantisedKv::KIVI_2.bytes_per_element(), 3.0 / 8.0);
    }

    #[test]
    fn a_short_sequence_is_all_tail() {
        let shape = ModelShape::preset("llama-2-7b-gqa8").unwrap();
        assert_eq!(QuantisedKv::KIVI_2.bytes(&shape, Tokens(20)), shape.kv_bytes(Tokens(20)));
    }

    #[test]
    fn quantised_kv_is_worth_moving_over_links_five_times_slower() {
        let shape = ModelShape::preset("llama-2-7b-gqa8").unwrap();
        let step = StepCoefficients::from_profile(&shape, &Device::preset("h100").unwrap());
        let recompute_s = step.prefill_ms(Tokens(4096), Tokens(0)) / 1e3;
        let without_tail = QuantisedKv { residual: 0, ..QuantisedKv::KIVI_2 };
        let break_even = without_tail.bytes(&shape, Tokens(4096)) / recompute_s;
        assert!((break_even / 0.78e9 - 1.0).abs() < 0.01, "{break_even}");
    }
}
