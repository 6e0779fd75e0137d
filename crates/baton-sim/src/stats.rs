use serde::Serialize;

/// Nearest-rank percentile of sorted values; zero of none.
pub fn percentile(sorted: &[f64], share: f64) -> f64 {
    if sorted.is_empty() {
        return 0.0;
    }
    sorted[((sorted.len() - 1) as f64 * share).round() as usize]
}

/// A mean over seeds with the half width of its 95 % confidence interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Interval {
    pub mean: f64,
    pub half_width: f64,
}

/// Two-sided 95 % quantiles of Student's t, by degrees of freedom from 1.
const T_95: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093,
    2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];

impl Interval {
    /// One value gives no width: infinite. Past 31 values the normal quantile serves.
    pub fn of(values: &[f64]) -> Self {
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count.max(1.0);
        if values.len() < 2 {
            return Self { mean, half_width: f64::INFINITY };
        }
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0);
        let t = T_95.get(values.len() - 2).copied().unwrap_or(1.96);
        Self { mean, half_width: t * (variance / count).sqrt() }
    }
}

/// How many times larger one thing is than another, over paired seeds: the geometric mean of their ratios with its 95 % confidence
/// interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Ratio {
    pub mean: f64,
    pub low: f64,
    pub high: f64,
}

impl Ratio {
    /// Of `values` over `base`, pair by pair; all are above zero.
    pub fn of(values: &[f64], base: &[f64]) -> Self {
        let logs: Vec<f64> = values.iter().zip(base).map(|(value, base)| (value / base).ln()).collect();
        let Interval { mean, half_width } = Interval::of(&logs);
        Self { mean: mean.exp(), low: (mean - half_width).exp(), high: (mean + half_width).exp() }
    }

    /// Whether it is above one by more than the noise.
    pub fn is_more(&self) -> bool {
        self.low > 1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_is_of_pairs_and_no_larger_for_the_seeds_own_spread() {
        let base = [1.0, 10.0, 100.0, 1000.0];
        let ratio = Ratio::of(&base.map(|value| 2.0 * value), &base);
        assert!((ratio.mean - 2.0).abs() < 1e-12 && (ratio.high - ratio.low).abs() < 1e-9, "{ratio:?}");
        let noisy = Ratio::of(&[2.0, 8.0], &[4.0, 4.0]);
        assert!((noisy.mean - 1.0).abs() < 1e-12 && !noisy.is_more() && noisy.low < 0.5, "{noisy:?}");
    }

    #[test]
    fn the_interval_of_ten_values_uses_nine_degrees_of_freedom() {
        let values: Vec<f64> = (1..=10).map(f64::from).collect();
        let interval = Interval::of(&values);
        assert!((interval.mean - 5.5).abs() < 1e-12);
        // Standard deviation of 1..10 is 3.0277; times 2.262 over the root of 10.
        assert!((interval.half_width - 2.1658).abs() < 1e-3, "{interval:?}");
    }

    #[test]
    fn percentiles_take_the_nearest_rank() {
        let sorted: Vec<f64> = (0..=100).map(f64::from).collect();
        assert_eq!(
            [percentile(&sorted, 0.5), percentile(&sorted, 0.99), percentile(&[], 0.5)].map(f64::to_bits),
            [50.0, 99.0, 0.0].map(f64::to_bits)
        );
    }
}
