//! This machine's CPU as a [`Device`]: what an arithmetic loop and a sweep through memory reach on all cores at once.
//!
//! The loops rely on the compiler's vectoriser: an unoptimised build measures itself, tens of times too slow.

use std::{
    hint::black_box,
    num::NonZero,
    thread,
    time::{Duration, Instant},
};

use baton_cost::Device;

/// Long enough that start-up and a scheduler's slice do not show.
const SPAN: Duration = Duration::from_millis(200);
/// Beyond the caches of any CPU, all threads together.
const SWEPT_BYTES: usize = 512 << 20;
/// Of one thread, at most.
const SWEPT_BYTES_PER_THREAD: usize = 256 << 20;
/// Multiply-adds of a lane between two looks at the clock.
const ROUNDS: u32 = 100_000;

/// Measures for about half a second.
pub(super) fn cpu() -> Device {
    Device::measured("cpu", on_all_cores(flops_per_s), on_all_cores(swept_bytes_per_s), memory_bytes())
}

/// Sum of what each core reaches while all are at it.
fn on_all_cores(measure: impl Fn(usize) -> f64 + Sync) -> f64 {
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    thread::scope(|scope| {
        let runs: Vec<_> = (0..threads).map(|_| scope.spawn(|| measure(threads))).collect();
        runs.into_iter().map(|run| run.join().expect("measuring does not panic")).sum()
    })
}

fn flops_per_s(_threads: usize) -> f64 {
    let (lanes, multiply_add) = widest_loop();
    let (start, mut flops) = (Instant::now(), 0.0);
    while start.elapsed() < SPAN {
        black_box(multiply_add(black_box(0.999_9)));
        flops += 2.0 * lanes as f64 * f64::from(ROUNDS);
    }
    flops / start.elapsed().as_secs_f64()
}

fn swept_bytes_per_s(threads: usize) -> f64 {
    let bytes = (SWEPT_BYTES / threads).clamp(1 << 20, SWEPT_BYTES_PER_THREAD);
    // Written once, so that the pages exist.
    let words = vec![1_u64; bytes / 8];
    let (start, mut swept) = (Instant::now(), 0.0);
    while start.elapsed() < SPAN {
        black_box(sum(black_box(&words)));
        swept += bytes as f64;
    }
    swept / start.elapsed().as_secs_f64()
}

fn sum(words: &[u64]) -> u64 {
    let mut sums = [0_u64; 32];
    for chunk in words.chunks_exact(sums.len()) {
        for (sum, word) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.iter().fold(0, |total, sum| total.wrapping_add(*sum))
}

type Loop = fn(f32) -> f32;

/// The widest multiply-add that this CPU has, with its lanes: twelve registers, enough to hide the latency.
fn widest_loop() -> (usize, Loop) {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the CPU has the feature.
            return (12 * 16, |factor| unsafe { avx512(factor) });
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: the CPU has both features.
            return (12 * 8, |factor| unsafe { avx2(factor) });
        }
        (12 * 4, |factor| repeat::<48>(factor, |sum, factor| sum * factor + 1e-4))
    }
    #[cfg(not(target_arch = "x86_64"))]
    (12 * 4, |factor| repeat::<48>(factor, |sum, factor| sum.mul_add(factor, 1e-4)))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn avx512(factor: f32) -> f32 {
    repeat::<192>(factor, |sum, factor| sum.mul_add(factor, 1e-4))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2(factor: f32) -> f32 {
    repeat::<96>(factor, |sum, factor| sum.mul_add(factor, 1e-4))
}

// Must become part of the function that enables the wide instructions.
#[allow(clippy::inline_always)]
#[inline(always)]
fn repeat<const LANES: usize>(factor: f32, step: impl Fn(f32, f32) -> f32) -> f32 {
    let mut sums = [1.0_f32; LANES];
    for _ in 0..ROUNDS {
        for sum in &mut sums {
            *sum = step(*sum, factor);
        }
    }
    sums.iter().sum()
}

fn memory_bytes() -> f64 {
    // SAFETY: `sysconf` takes a number and returns one.
    let (pages, page_bytes) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    // -1 where the system does not say.
    (pages.max(0) as f64) * (page_bytes.max(0) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_computes_and_reads_and_has_memory() {
        let device = cpu();
        for value in [device.flops, device.bytes_per_s, device.memory_bytes] {
            assert!(value.is_finite() && value > 0.0, "{device:?}");
        }
    }

    #[test]
    fn the_loops_compute_the_same_series() {
        let (lanes, widest) = widest_loop();
        let per_lane = f64::from(widest(0.5)) / lanes as f64;
        let portable = f64::from(repeat::<48>(0.5, |sum, factor| sum * factor + 1e-4)) / 48.0;
        // s -> s / 2 + 1e-4 has its fixed point at 2e-4.
        assert!((per_lane - 2e-4).abs() < 1e-9 && (portable - 2e-4).abs() < 1e-9, "{per_lane} {portable}");
    }

    #[test]
    fn a_sweep_reads_every_word() {
        let words: Vec<u64> = (0..64).collect();
        assert_eq!(sum(&words), 63 * 64 / 2);
    }
}
