//! Closed forms of moving KV between replicas, and of what it replaces; [`crate::MovePrice`] prices one move of one sequence.

use baton_units::Tokens;
use serde::Serialize;

use crate::{Device, Link, ModelShape, StepCoefficients};

/// A sequence's KV on its way to another replica, beside recomputing it there (lecture 17.4).
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Migration {
    pub bytes: f64,
    /// Seconds on the link, alone on it.
    pub move_s: f64,
    /// Seconds of prefill that the move replaces.
    pub recompute_s: f64,
}

impl Migration {
    /// Moves the KV of `tokens` that follow `held` tokens whose KV the target has.
    #[must_use]
    pub fn price(shape: &ModelShape, step: &StepCoefficients, link: &Link, tokens: Tokens, held: Tokens) -> Self {
        let bytes = shape.kv_bytes(tokens);
        Self { bytes, move_s: link.seconds(bytes), recompute_s: step.prefill_ms(tokens, held) / 1e3 }
    }

    /// How many times longer recomputing takes.
    pub fn advantage(&self) -> f64 {
        self.recompute_s / self.move_s
    }

    /// Bandwidth below which recomputing is faster, in bytes per second: `b S / T_prefill(S)`. It falls as the context
    /// grows, since recomputing is superlinear.
    pub fn break_even_bytes_per_s(&self) -> f64 {
        self.bytes / self.recompute_s
    }
}

/// Size of a copy round of a live migration over that of the round before: `b / (BW TPOT)` (Llumnix, OSDI 2024,
/// section 4.2). The copy converges below one.
pub fn copy_round_ratio(kv_bytes_per_token: f64, link: &Link, step_s: f64) -> f64 {
    kv_bytes_per_token / link.bytes_per_s / step_s
}

/// Seconds until `bytes` of a peer are there, over a link that `flows` others share equally: `l0 + bytes (flows + 1) / BW`.
pub fn fetch_s(bytes: f64, latency_s: f64, bytes_per_s: f64, flows: u32) -> f64 {
    latency_s + bytes * (f64::from(flows) + 1.0) / bytes_per_s
}

/// Bytes of a device that KV may take: its usable memory less the weights; zero when the weights do not fit.
pub fn kv_budget_bytes(shape: &ModelShape, device: &Device) -> f64 {
    (device.usable_bytes() - shape.weight_bytes()).max(0.0)
}

/// One copy of `tokens` as a share of the KV budget (lecture 17.5).
pub fn copy_share(shape: &ModelShape, device: &Device, tokens: Tokens) -> f64 {
    shape.kv_bytes(tokens) / kv_budget_bytes(shape, device)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn priced(link: &Link, tokens: u32, held: u32) -> Migration {
        let (shape, device) = (ModelShape::preset("llama-2-7b-gqa8").unwrap(), Device::preset("h100").unwrap());
        let step = StepCoefficients::from_profile(&shape, &device);
        Migration::price(&shape, &step, link, Tokens(tokens), Tokens(held))
    }

    #[test]
    fn a_copy_on_ethernet_converges_in_one_round() {
        let ratio = copy_round_ratio(131_072.0, &Link::preset("ethernet").unwrap(), 22.6e-3);
        assert!((ratio - 2.3e-4).abs() < 0.05e-4, "{ratio}");
    }

    #[test]
    fn weights_that_do_not_fit_leave_no_budget() {
        assert_eq!(kv_budget_bytes(&ModelShape::preset("llama-3-70b").unwrap(), &Device::preset("a10").unwrap()), 0.0);
    }

    proptest! {
        #[test]
        fn moving_and_recomputing_take_equally_long_at_the_break_even_bandwidth(tokens in 1u32..100_000, held in 0u32..100_000) {
            let bandwidth = priced(&Link::custom(1.0), tokens, held).break_even_bytes_per_s();
            let at = priced(&Link::custom(bandwidth / 1e9), tokens, held);
            prop_assert!((at.advantage() - 1.0).abs() < 1e-9);
        }

        #[test]
        fn the_longer_the_context_the_more_a_move_saves(tokens in 1u32..50_000, more in 1u32..50_000) {
            let link = Link::custom(64.0);
            prop_assert!(priced(&link, tokens + more, 0).advantage() > priced(&link, tokens, 0).advantage());
        }
    }
}
