//! Mixtures of experts: which weights a decode step reads (lecture 17.7 and exercise 4).
//!
//! Tokens choose independently here. Tokens of one request or topic do not quite; fit an effective batch to a trace where it
//! matters.

use crate::{Device, ModelShape};

/// Chance that an expert is used by none of `batch` tokens that each choose `chosen` of `experts` uniformly: `(1 - k/E)^B`.
pub fn unused_probability(chosen: u32, experts: u32, batch: f64) -> f64 {
    (1.0 - f64::from(chosen) / f64::from(experts)).powf(batch)
}

/// Experts that `batch` tokens use under uniform choice, the most for any popularity: `E (1 - (1 - k/E)^B)`.
pub fn distinct_experts_uniform(chosen: u32, experts: u32, batch: f64) -> f64 {
    f64::from(experts) * (1.0 - unused_probability(chosen, experts, batch))
}

/// Experts that `batch` tokens use when a token uses expert `e` with chance `popularity[e]` (these sum to the experts per
/// token): `sum_e 1 - (1 - p_e)^B`. Exact whatever the correlation within a token.
pub fn distinct_experts(popularity: &[f64], batch: f64) -> f64 {
    popularity.iter().map(|used| 1.0 - (1.0 - used).powf(batch)).sum()
}

/// Popularity by Zipf's law with `chosen` experts per token: `p_e = min(1, a e^-s)`, `a` such that the sum is `chosen`.
pub fn zipf_popularity(chosen: u32, experts: u32, exponent: f64) -> Vec<f64> {
    let weights: Vec<f64> = (1..=experts).map(|rank| f64::from(rank).powf(-exponent)).collect();
    // Experts are capped from the most popular on; each cap leaves less to share out among the rest.
    let mut capped = 0;
    let scale = loop {
        let rest: f64 = weights[capped..].iter().sum();
        let scale = (f64::from(chosen) - capped as f64) / rest;
        if capped + 1 >= weights.len() || scale * weights[capped] <= 1.0 {
            break scale;
        }
        capped += 1;
    };
    weights.iter().enumerate().map(|(e, weight)| if e < capped { 1.0 } else { (scale * weight).min(1.0) }).collect()
}

/// Batch from which the share `read` of the experts is read under uniform choice: `ln(1 - read) / ln(1 - k/E)`.
pub fn saturation_batch(chosen: u32, experts: u32, read: f64) -> f64 {
    (1.0 - read).ln() / (1.0 - f64::from(chosen) / f64::from(experts)).ln()
}

/// Bytes of weights that a decode step of `batch` rows reads; all of a dense model's.
pub fn decode_weight_bytes(shape: &ModelShape, batch: f64) -> f64 {
    let unread = shape.experts.map_or(0.0, |experts| {
        let unused = f64::from(experts.count) * unused_probability(experts.per_token, experts.count, batch);
        f64::from(shape.sparse_layers()) * unused * shape.expert_params() as f64 * shape.bytes_per_weight
    });
    shape.weight_bytes() - unread
}

/// Seconds of a decode step of `batch` rows with `context` tokens altogether, reading only the experts that it uses.
pub fn decode_step_s(shape: &ModelShape, device: &Device, batch: f64, context: f64) -> f64 {
    let bytes = decode_weight_bytes(shape, batch) + context * shape.kv_bytes_per_token(shape.kv_dtype_bytes);
    let flops = shape.flops_per_token() * batch + shape.flops_per_attended() * context;
    device.step_overhead_s + (bytes / device.bytes_per_s).max(flops / device.effective_flops())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{StepCoefficients, StepLoad};

    #[test]
    fn skewed_choice_reads_fewer_experts() {
        for (batch, uniform, zipf) in
            [(1.0, 0.125, 0.125), (4.0, 0.414, 0.314), (10.0, 0.737, 0.529), (30.0, 0.982, 0.824), (64.0, 1.0, 0.957)]
        {
            let got = distinct_experts_uniform(8, 64, batch) / 64.0;
            assert!((got - uniform).abs() < 6e-4, "uniform, batch {batch}: {got}");
            let got = distinct_experts(&zipf_popularity(8, 64, 1.0), batch) / 64.0;
            assert!((got - zipf).abs() < 6e-4, "zipf, batch {batch}: {got}");
        }
    }

    #[test]
    fn one_row_reads_the_active_weights_and_a_large_batch_all() {
        let shape = ModelShape::preset("mixtral-8x7b").unwrap();
        let one = decode_weight_bytes(&shape, 1.0);
        assert!((one / (2.0 * shape.active_params() as f64) - 1.0).abs() < 1e-9);
        assert!((decode_weight_bytes(&shape, 200.0) / shape.weight_bytes() - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_dense_model_and_a_saturated_mixture_cost_what_their_coefficients_say() {
        let device = Device::preset("h200").unwrap();
        for name in ["llama-3-8b", "mixtral-8x7b"] {
            let shape = ModelShape::preset(name).unwrap();
            let coefficients = StepCoefficients::from_profile(&shape, &device);
            let (direct, linear) = (decode_step_s(&shape, &device, 164.0, 164e3), coefficients.step_s(&StepLoad::decode(164.0, 164e3)));
            assert!((direct / linear - 1.0).abs() < 1e-9, "{name}: {direct} {linear}");
        }
    }

    proptest! {
        #[test]
        fn popularity_is_a_chance_and_sums_to_the_experts_per_token(experts in 1u32..300, share in 0.0f64..1.0, exponent in 0.0f64..3.0) {
            let chosen = ((f64::from(experts) * share) as u32).max(1);
            let popularity = zipf_popularity(chosen, experts, exponent);
            prop_assert!(popularity.iter().all(|p| (0.0..=1.0).contains(p)));
            prop_assert!((popularity.iter().sum::<f64>() - f64::from(chosen)).abs() < 1e-6);
        }

        #[test]
        fn uniform_choice_reads_the_most(experts in 2u32..200, exponent in 0.0f64..2.0, batch in 1.0f64..300.0) {
            let skewed = distinct_experts(&zipf_popularity(2, experts, exponent), batch);
            prop_assert!(skewed <= distinct_experts_uniform(2, experts, batch) + 1e-9);
        }

        #[test]
        fn at_the_saturation_batch_just_that_share_is_read(chosen in 1u32..8, more in 1u32..250, read in 0.01f64..0.99) {
            let experts = chosen + more;
            let got = distinct_experts_uniform(chosen, experts, saturation_batch(chosen, experts, read)) / f64::from(experts);
            prop_assert!((got - read).abs() < 1e-9);
        }
    }
}
