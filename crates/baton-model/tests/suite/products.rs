//! Products, exponentials and the pool, piece by piece.

use baton_gguf::TensorKind;
use baton_model::testing;
use proptest::prelude::*;

use crate::support::kernel_paths;
use crate::tiny::random_blocks;

macro_rules! fixture {
    ($($kind:ident)*) => {
        [$((
            TensorKind::$kind,
            include_bytes!(concat!("../fixtures/quants/", stringify!($kind), ".bin")).as_slice(),
            include_bytes!(concat!("../fixtures/quants/", stringify!($kind), ".f32")).as_slice(),
        )),*]
    };
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

#[test]
fn every_tensor_type_dequantises_as_the_gguf_package_does() {
    let fixtures = fixture!(F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q8_0 Q4_K Q6_K);
    assert_eq!(fixtures.len(), TensorKind::ALL.len());
    for (kind, bytes, expected) in fixtures {
        let (found, expected) = (testing::dequantise(kind, bytes), floats(expected));
        assert_eq!(found.len(), expected.len(), "{kind}");
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            // The package rounds product and sum apart.
            let rounding = 2.0 * f32::EPSILON * (expected.abs() + 8.0 * 0.25);
            assert!((found - expected).abs() <= rounding, "{kind} value {index}: {found} against {expected}");
        }
    }
}

#[test]
fn packed_weights_mean_what_the_file_means() {
    for (kind, bytes, expected) in fixture!(F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q8_0 Q4_K Q6_K) {
        let (columns, expected) = (256, floats(expected));
        for path in kernel_paths() {
            for k in [0, 1, 7, 8, 31, 32, 100, 255] {
                let mut input = vec![0.0; columns];
                input[k] = 1.0;
                let found = testing::multiply(path, kind, bytes, columns, &input);
                for (row, found) in found.iter().enumerate() {
                    let expected = expected[row * columns + k];
                    // A centred quant times its scale may be eight scales away from the value.
                    assert!(
                        (found - expected).abs() <= 4e-7 * (expected.abs() + 1.0),
                        "{kind} {path} row {row} k {k}: {found} against {expected}"
                    );
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// The sum of each element against f64, and its bits for every path and number of rows.
    #[test]
    fn products_are_right_and_the_same_for_every_path_and_tile(
        kind in prop::sample::select(TensorKind::ALL.to_vec()),
        features in 1usize..70,
        blocks in 1usize..3,
        rows in 1usize..30,
        seed in any::<u64>(),
    ) {
        let mut rng = fastrand::Rng::with_seed(seed);
        let columns = blocks * 256;
        let weights = random_blocks(kind, features * columns, &mut rng);
        let input: Vec<f32> = (0..rows * columns).map(|_| rng.f32() * 2.0 - 1.0).collect();
        let paths = kernel_paths();
        let all: Vec<Vec<f32>> = paths.iter().map(|&path| testing::multiply(path, kind, &weights, columns, &input)).collect();
        let values = testing::dequantise(kind, &weights);
        for row in 0..rows {
            let a = &input[row * columns..][..columns];
            let alone = testing::multiply(paths[paths.len() - 1], kind, &weights, columns, a);
            for feature in 0..features {
                let w = &values[feature * columns..][..columns];
                let exact: f64 = a.iter().zip(w).map(|(&a, &w)| f64::from(a) * f64::from(w)).sum();
                let size: f64 = a.iter().zip(w).map(|(&a, &w)| f64::from(a * w).abs()).sum();
                let found = all[0][row * features + feature];
                prop_assert!((f64::from(found) - exact).abs() <= 2e-5 * (size + 1.0), "{} {}: {} against {}", kind, feature, found, exact);
                for (path, other) in paths.iter().zip(&all) {
                    prop_assert_eq!(other[row * features + feature].to_bits(), found.to_bits(), "{} {}", kind, path);
                }
                prop_assert_eq!(alone[feature].to_bits(), found.to_bits(), "{} one row alone", kind);
            }
        }
    }

    #[test]
    fn exponentials_are_right_and_the_same_for_every_path(x in prop::array::uniform16(-100f32..95.0)) {
        for path in kernel_paths() {
            for (x, found) in x.into_iter().zip(testing::exponentials(path, x)) {
                let exact = if x < -87.0 { 0.0 } else { f64::from(x).min(88.0).exp() };
                prop_assert!((f64::from(found) - exact).abs() <= 2.5e-7 * exact, "e^{} is {}, not {}", x, found, exact);
            }
            let bits = |path| testing::exponentials(path, x).map(f32::to_bits);
            prop_assert_eq!(bits(path), bits(kernel_paths()[0]));
        }
    }

    #[test]
    fn a_pool_runs_each_part_once(threads in 1usize..5, works in prop::collection::vec(0usize..40, 1..60)) {
        for (counts, parts) in testing::pool_counts(threads, &works).into_iter().zip(works) {
            prop_assert_eq!(counts, vec![1; parts]);
        }
    }
}
