//! Low-rank adapters: bytes, loading, residency (lecture 17.6 and exercise 3).

use serde::Serialize;

use crate::{Link, ModelShape};

/// A low-rank adapter (Hu et al., 2021) on the attention projections of every layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Adapter {
    pub rank: u32,
    pub params: u64,
}

impl Adapter {
    /// Rank `rank` on every attention projection: `r (d_in + d_out)` each.
    #[must_use]
    pub fn on_attention(shape: &ModelShape, rank: u32) -> Self {
        let per_layer: u64 = shape.attention_projections().iter().map(|(inputs, outputs)| u64::from(rank) * (inputs + outputs)).sum();
        Self { rank, params: u64::from(shape.layers) * per_layer }
    }

    /// Bytes in numbers of `dtype_bytes` each.
    pub fn bytes(&self, dtype_bytes: f64) -> f64 {
        self.params as f64 * dtype_bytes
    }

    /// Parameters over those of the base model.
    pub fn share(&self, shape: &ModelShape) -> f64 {
        self.params as f64 / shape.params() as f64
    }

    /// Seconds to load it over a link.
    pub fn load_s(&self, dtype_bytes: f64, link: &Link) -> f64 {
        link.seconds(self.bytes(dtype_bytes))
    }
}

/// Share of requests whose adapter is resident when the `resident` most popular of `total` are, popularity following Zipf's law:
/// `H_resident / H_total`.
pub fn zipf_hit_rate(resident: u32, total: u32, exponent: f64) -> f64 {
    let harmonic = |count: u32| (1..=count).map(|rank| f64::from(rank).powf(-exponent)).sum::<f64>();
    if total == 0 { 0.0 } else { harmonic(resident.min(total)) / harmonic(total) }
}

/// Mean seconds that loading adds to a request.
pub fn mean_added_s(hit_rate: f64, load_s: f64) -> f64 {
    (1.0 - hit_rate) * load_s
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn fewer_kv_heads_make_smaller_adapters() {
        let adapter = |name| Adapter::on_attention(&ModelShape::preset(name).unwrap(), 16).params;
        assert_eq!(adapter("llama-2-7b"), 16_777_216);
        // K and V project to 1,024 rather than 4,096.
        assert_eq!(adapter("llama-2-7b-gqa8"), 16_777_216 - 32 * 2 * 16 * 3072);
    }

    proptest! {
        #[test]
        fn residency_never_hurts_and_full_residency_never_misses(total in 1u32..2000, resident in 0u32..2000, exponent in 0.0f64..3.0) {
            let hit = |resident| zipf_hit_rate(resident, total, exponent);
            prop_assert!((0.0..=1.0).contains(&hit(resident)));
            prop_assert!(hit(resident + 1) >= hit(resident));
            prop_assert!((hit(total) - 1.0).abs() < 1e-12);
        }
    }
}
