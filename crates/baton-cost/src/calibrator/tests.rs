use proptest::prelude::*;

use super::*;
use crate::{Device, ModelShape};

#[test]
fn without_samples_the_fit_is_the_prior() {
    let calibrator = Calibrator::new(h100());
    assert_eq!(calibrator.fit(), h100());
    assert_eq!((calibrator.error(), calibrator.samples()), (0.0, 0));
}

#[test]
fn a_few_samples_barely_move_the_prior() {
    let mut calibrator = Calibrator::new(h100());
    for load in work(1).take(2) {
        calibrator.observe(&load, 1.5 * h100().step_s(&load));
    }
    for (fit, prior) in to_row(&calibrator.fit()).iter().zip(to_row(&h100())) {
        assert!((0.95..1.25).contains(&(fit / prior)), "{fit} from {prior}");
    }
}

#[test]
fn what_is_no_measurement_is_ignored() {
    let mut calibrator = Calibrator::new(h100());
    let load = StepLoad::decode(4.0, 400.0);
    for seconds in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        calibrator.observe(&load, seconds);
    }
    calibrator.observe(&StepLoad { new_tokens: f64::NAN, ..load }, 1.0);
    calibrator.observe_prefill(Tokens(0), Tokens(100), Tokens(0), 1.0);
    assert_eq!(calibrator, Calibrator::new(h100()));
}

#[test]
fn a_replica_that_halves_its_speed_is_followed_within_300_steps() {
    for seed in 0..20 {
        let mut rng = Lcg(seed);
        let mut calibrator = Calibrator::new(h100());
        for load in work(seed).take(1000) {
            calibrator.observe(&load, h100().step_s(&load) * rng.noise(0.03));
        }
        let slow = h100().scaled(2.0);
        for load in work(seed + 1000).take(300) {
            calibrator.observe(&load, slow.step_s(&load) * rng.noise(0.03));
        }
        let (worst, error) = (worst_prediction(&calibrator.fit(), &slow), calibrator.error());
        assert!(worst < 0.15 && error < 0.06, "seed {seed}: worst {worst}, running {error}");
    }
}

#[test]
fn a_pause_of_the_machine_moves_no_prediction_by_2_percent() {
    let mut calibrator = Calibrator::new(h100());
    let mut rng = Lcg(7);
    for load in work(7).take(500) {
        calibrator.observe(&load, h100().step_s(&load) * rng.noise(0.03));
    }
    let before = calibrator.fit();
    calibrator.observe(&StepLoad::decode(32.0, 32_000.0), 30.0);
    let moved = worst_prediction(&calibrator.fit(), &before);
    assert!(moved < 0.02, "{moved}");
}

#[test]
fn prefills_alone_leave_what_they_do_not_show_at_the_pace_of_the_whole() {
    let truth = h100().scaled(3.0);
    let mut calibrator = Calibrator::new(h100());
    for load in work(3).filter(|load| load.decode_rows == 0.0).take(500) {
        calibrator.observe(&load, truth.step_s(&load));
    }
    let beyond = calibrator.fit().per_kv_token_s / h100().per_kv_token_s;
    assert!((beyond / (3.0 / PRIOR_FACTOR) - 1.0).abs() < 1e-6, "{beyond}");
    let (fit, want) = (calibrator.fit().prefill_ms(Tokens(4096), Tokens(0)), truth.prefill_ms(Tokens(4096), Tokens(0)));
    assert!((fit / want - 1.0).abs() < 0.05, "{fit} ms, true {want} ms");
}

#[test]
fn a_first_prefill_after_thousands_of_decode_steps_is_learnt_as_fast_as_at_the_start() {
    let truth = StepCoefficients { per_token_s: 3.0 * h100().per_token_s, ..h100() };
    let mut calibrator = Calibrator::new(h100());
    for load in work(4).filter(|load| load.decode_rows == load.new_tokens).take(3000) {
        calibrator.observe(&load, truth.step_s(&load));
    }
    for load in work(5).filter(|load| load.decode_rows == 0.0 && load.new_tokens > 1000.0).take(100) {
        calibrator.observe(&load, truth.step_s(&load));
    }
    let (fit, want) = (calibrator.fit().prefill_ms(Tokens(4096), Tokens(0)), truth.prefill_ms(Tokens(4096), Tokens(0)));
    assert!((fit / want - 1.0).abs() < 0.05, "{fit} ms, true {want} ms");
}

#[test]
fn a_prior_ten_times_off_on_one_side_is_overcome() {
    for factor in [0.1, 0.2, 5.0, 10.0] {
        let truth = StepCoefficients { per_token_s: factor * h100().per_token_s, per_attended_s: factor * h100().per_attended_s, ..h100() };
        let mut calibrator = Calibrator::new(h100());
        for load in work(6).take(2000) {
            calibrator.observe(&load, truth.step_s(&load));
        }
        assert!(calibrator.error() < 0.02, "factor {factor}: {}, {:?}", calibrator.error(), calibrator.fit());
    }
}

#[test]
fn a_formula_four_times_too_fast_is_overcome_under_noise_of_30_percent() {
    let truth = h100().scaled(4.0);
    for seed in 0..10 {
        let mut rng = Lcg(seed);
        let mut calibrator = Calibrator::new(h100());
        for load in work(seed).take(2000) {
            calibrator.observe(&load, truth.step_s(&load) * rng.noise(0.3).max(0.1));
        }
        let worst = worst_prediction(&calibrator.fit(), &truth);
        assert!(worst < 0.3, "seed {seed}: {worst}");
    }
}

#[test]
fn an_engine_whose_parts_add_up_is_predicted_within_10_percent_on_average() {
    let prior = StepCoefficients::from_profile(
        &ModelShape::preset("smollm2-135m").unwrap().with_kv_dtype_bytes(4.0),
        &Device::measured("cpu", 60e9, 12e9, 8e9),
    );
    let mut rng = Lcg(9);
    let mut calibrator = Calibrator::new(prior);
    for load in work(9).take(3000) {
        let load = StepLoad { kv_tokens_read: load.kv_tokens_read / 4.0, attended: load.attended / 4.0, ..load };
        let added = prior.fixed_s + 1.3 * prior.compute_s(&load) + 0.8 * prior.memory_s(&load);
        calibrator.observe(&load, added * rng.noise(0.05));
    }
    assert!(calibrator.error() < 0.1, "{}", calibrator.error());
}

#[test]
fn ttft_alone_teaches_the_price_of_a_prefill() {
    let truth = StepCoefficients { fixed_s: 0.012, ..h100().scaled(1.7) };
    let mut rng = Lcg(11);
    let mut calibrator = Calibrator::new(h100());
    for _ in 0..400 {
        let (new, cached) = (Tokens(64 + rng.below(6000)), Tokens(rng.below(8000)));
        let ttft_s = truth.prefill_chunked_ms(new, cached, Tokens(2048)) / 1e3;
        calibrator.observe_prefill(new, cached, Tokens(2048), ttft_s * rng.noise(0.05));
    }
    for (new, cached) in [(256, 0), (512, 4000), (4096, 0), (6000, 2000)] {
        let (new, cached) = (Tokens(new), Tokens(cached));
        let fit = calibrator.fit().prefill_chunked_ms(new, cached, Tokens(2048));
        let want = truth.prefill_chunked_ms(new, cached, Tokens(2048));
        assert!((fit / want - 1.0).abs() < 0.08, "{new} over {cached}: {fit} ms, true {want} ms");
    }
}

/// The first tokens of short prompts on a CPU, with the formulas of a GPU as prior.
#[test]
fn first_tokens_of_an_engine_sixty_times_slower_soon_price_a_hit() {
    for (fixed_s, per_token_s, noise) in [(0.03, 1.6e-3, 0.1), (0.2, 1.6e-3, 0.3), (0.01, 2e-4, 0.3), (0.5, 5e-3, 0.1)] {
        for seed in 0..10 {
            let mut rng = Lcg(seed);
            let mut calibrator = Calibrator::new(h100().weights_as_fixed());
            let mut off = |samples| {
                for _ in 0..samples {
                    let (new, cached) = (Tokens(16 + rng.below(200)), Tokens(rng.below(500)));
                    let ttft_s = (fixed_s + per_token_s * new.as_f64()) * rng.noise(noise).max(0.1);
                    calibrator.observe_prefill(new, cached, Tokens(2048), ttft_s);
                }
                let fit = calibrator.fit();
                let price_ms = |cached| fit.prefill_chunked_ms(Tokens(300 - cached), Tokens(cached), Tokens(2048));
                (price_ms(0) - price_ms(200)) / (200e3 * per_token_s)
            };
            let (soon, later) = (off(5), off(95));
            assert!((0.1..3.0).contains(&soon), "{fixed_s} {per_token_s} seed {seed}: {soon} of the hit's worth after 5");
            assert!((0.7..1.4).contains(&later), "{fixed_s} {per_token_s} seed {seed}: {later} of the hit's worth after 100");
        }
    }
}

#[test]
fn a_prior_that_knows_nothing_of_a_coefficient_can_learn_it() {
    let truth = h100();
    let mut calibrator = Calibrator::new(StepCoefficients { fixed_s: 0.0, per_kv_token_s: 0.0, ..truth });
    for load in work(12).take(3000) {
        calibrator.observe(&load, truth.step_s(&load));
    }
    let error = worst_prediction(&calibrator.fit(), &truth);
    assert!(error < 0.05, "{error}, {:?}", calibrator.fit());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Two in a hundred samples are a paused machine, up to 100 times too long.
    #[test]
    fn true_coefficients_are_recovered_from_noisy_steps_with_outliers(seed in any::<u64>(), factors in prop::array::uniform5(0.5f64..2.0)) {
        let prior = h100();
        let truth = from_row(&std::array::from_fn(|j| to_row(&prior)[j] * factors[j]));
        let mut rng = Lcg(seed);
        let mut calibrator = Calibrator::new(prior);
        for load in work(seed).take(3000) {
            let pause = if rng.below(100) < 2 { 2.0 + f64::from(rng.below(98)) } else { 1.0 };
            calibrator.observe(&load, truth.step_s(&load) * rng.noise(0.03) * pause);
        }
        let (fit, want) = (to_row(&calibrator.fit()), to_row(&truth));
        // Every step has a fixed part and reads weights, so decode steps show only their sum; prefills tell them apart a little.
        let sums = [(fit[FIXED] + fit[WEIGHTS], want[FIXED] + want[WEIGHTS]), (fit[TOKEN], want[TOKEN]), (fit[ATTENDED], want[ATTENDED]), (fit[KV], want[KV])];
        for (fit, want) in sums {
            prop_assert!((fit / want - 1.0).abs() < 0.2, "{fit} is not {want}: factors {factors:?}, {:?}", calibrator.fit());
        }
        prop_assert!(worst_prediction(&calibrator.fit(), &truth) < 0.05);
    }

    #[test]
    fn no_coefficient_is_ever_negative_or_lost(
        steps in prop::collection::vec((0.0f64..1e5, 0.0f64..1e9, 0.0f64..1e7, -9.0f64..4.0), 1..300),
        prior in prop::array::uniform5(prop_oneof![Just(0.0), 1e-12f64..1e-2]),
    ) {
        let mut calibrator = Calibrator::new(from_row(&prior));
        for (new_tokens, attended, kv_tokens_read, exponent) in steps {
            calibrator.observe(&StepLoad { new_tokens, attended, kv_tokens_read, decode_rows: 0.0 }, 10f64.powf(exponent));
            for value in to_row(&calibrator.fit()) {
                prop_assert!(value >= 0.0 && value.is_finite(), "{:?}", calibrator.fit());
            }
        }
    }

    #[test]
    fn a_clock_in_other_units_gives_the_same_fit_in_those_units(seed in any::<u64>(), factor in 1e-4f64..1e4) {
        let truth = h100().scaled(1.4);
        let (mut plain, mut scaled) = (Calibrator::new(h100()), Calibrator::new(h100().scaled(factor)));
        let mut rng = Lcg(seed);
        for load in work(seed).take(300) {
            let seconds = truth.step_s(&load) * rng.noise(0.05);
            plain.observe(&load, seconds);
            scaled.observe(&load, seconds * factor);
        }
        for (plain, scaled) in to_row(&plain.fit()).iter().zip(to_row(&scaled.fit())) {
            prop_assert!((plain * factor - scaled).abs() <= 1e-6 * scaled, "{plain} x {factor} is not {scaled}");
        }
    }
}

fn h100() -> StepCoefficients {
    StepCoefficients::from_profile(&ModelShape::preset("llama-2-7b-gqa8").unwrap(), &Device::preset("h100").unwrap())
}

/// Steps as an engine with chunked prefill forms them: decode batches, whole prefills, both.
fn work(seed: u64) -> impl Iterator<Item = StepLoad> {
    let mut rng = Lcg(seed ^ 0x9e37_79b9_7f4a_7c15);
    std::iter::repeat_with(move || {
        let rows = f64::from(rng.below(160));
        let decode = StepLoad::decode(1.0 + rows, (1.0 + rows) * f64::from(100 + rng.below(3000)));
        let prefill = StepLoad::prefill(Tokens(16 + rng.below(4000)), Tokens(rng.below(12_000)));
        match rng.below(4) {
            0 => prefill,
            1 => prefill.and(decode),
            _ => decode,
        }
    })
}

/// Largest relative error of a predicted step over steps of many kinds.
fn worst_prediction(fit: &StepCoefficients, truth: &StepCoefficients) -> f64 {
    work(99).take(500).map(|load| (fit.step_s(&load) / truth.step_s(&load) - 1.0).abs()).fold(0.0, f64::max)
}

/// Knuth's 64-bit generator; the tests need repeatable noise, not good noise.
struct Lcg(u64);

impl Lcg {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % u64::from(limit)) as u32
    }

    /// One plus about-normal noise of the given relative size: the sum of twelve uniforms.
    fn noise(&mut self, size: f64) -> f64 {
        let sum: f64 = (0..12).map(|_| f64::from(self.below(1 << 20)) / f64::from(1 << 20)).sum();
        1.0 + size * (sum - 6.0)
    }
}
