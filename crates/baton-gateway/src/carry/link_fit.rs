use baton_cost::Link;

/// What a link is taken for until moves have shown it: 10 Gbit/s.
const PRIOR_BYTES_PER_S: f64 = 1.25e9;
/// The prior counts like one move of so much.
const PRIOR_BYTES: f64 = 64e6;
/// An older move counts for so much of the next.
const FORGET: f64 = 0.9;
/// Steps whose ends a move waits for: what it wants of an engine, four times at its source and twice at its target, comes half a step late, and
/// its copy goes on between steps.
const WAITS: f64 = 4.0;
/// A price counts the link's latency so often until the source asks, beside once for each round before the freeze: for the way to the target
/// and its answer, the last blocks, and the source's word to the gateway (see `baton_cost::MovePrice`).
pub(super) const LATENCIES: f64 = 4.0;

/// A line through bytes and seconds of moves out of a replica, both for each latency in a move's price, by least squares, the latest counting
/// most: the latency, with the waits for ends of steps in it, and what a byte costs.
#[derive(Debug, Clone, Copy)]
pub(super) struct LinkFit {
    weight: f64,
    bytes: f64,
    seconds: f64,
    bytes_squared: f64,
    bytes_seconds: f64,
}

impl LinkFit {
    /// What is thought of a link before a move: two points on the line of a replica whose steps take `step_s`.
    pub(super) fn prior(step_s: f64) -> Self {
        let latency_s = WAITS * step_s / LATENCIES;
        let bytes = PRIOR_BYTES / LATENCIES;
        let seconds = latency_s + bytes / PRIOR_BYTES_PER_S;
        Self { weight: 2.0, bytes, seconds: latency_s + seconds, bytes_squared: bytes * bytes, bytes_seconds: bytes * seconds }
    }

    /// What was sent until the source asked, in so many rounds before the freeze.
    pub(super) fn observe(&mut self, bytes: f64, rounds: u32, seconds: f64) {
        let latencies = LATENCIES + f64::from(rounds);
        let (bytes, seconds) = (bytes / latencies, seconds / latencies);
        for sum in [&mut self.weight, &mut self.bytes, &mut self.seconds, &mut self.bytes_squared, &mut self.bytes_seconds] {
            *sum *= FORGET;
        }
        self.weight += 1.0;
        self.bytes += bytes;
        self.seconds += seconds;
        self.bytes_squared += bytes * bytes;
        self.bytes_seconds += bytes * seconds;
    }

    /// Neither faster than the prior nor without end: moves that are all of one size show no slope.
    pub(super) fn link(&self) -> Link {
        let (mean_bytes, mean_s) = (self.bytes / self.weight, self.seconds / self.weight);
        let spread = self.bytes_squared / self.weight - mean_bytes * mean_bytes;
        let together = self.bytes_seconds / self.weight - mean_bytes * mean_s;
        let least = 1.0 / PRIOR_BYTES_PER_S;
        let per_byte_s = if spread > 0.0 { (together / spread).clamp(least, 1e3 * least) } else { least };
        Link::custom(1.0 / per_byte_s / 1e9).with_latency((mean_s - per_byte_s * mean_bytes).max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use baton_cost::{MoveCase, MovePrice, StepCoefficients};
    use baton_units::{BlockSize, Tokens};
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_link_that_nobody_used_is_the_prior() {
        let link = LinkFit::prior(0.0).link();
        assert!((link.bytes_per_s / PRIOR_BYTES_PER_S - 1.0).abs() < 1e-9 && link.latency_s.abs() < 1e-12, "{link:?}");
    }

    /// What is learnt comes back out: the price of a move as they were is the time that they took, and what follows their end.
    #[test]
    fn a_price_counts_what_moves_showed_once() {
        let (bytes_per_token, tokens, step_s) = (8.0, 1_200, 8e-3);
        for (rounds, tokens) in [(0, 100), (1, tokens)] {
            let mut fit = LinkFit::prior(step_s);
            for _ in 0..60 {
                fit.observe(bytes_per_token * f64::from(tokens), rounds, 0.065);
            }
            let link = fit.link();
            let step = StepCoefficients { fixed_s: step_s, per_token_s: 0.0, per_attended_s: 0.0, per_kv_token_s: 0.0, weights_s: 0.0 };
            let price = MovePrice::of(&MoveCase {
                kv_bytes_per_token: bytes_per_token,
                block_size: BlockSize::DEFAULT,
                link: &link,
                step: &step,
                step_s,
                tokens: Tokens(tokens),
                held: Tokens::ZERO,
                decodes: true,
                queue_s: 0.0,
            });
            assert_eq!(price.rounds, rounds + 1);
            let after_s = link.latency_s + step_s / 2.0;
            let total_s = price.kv.unwrap().total_s;
            assert!((total_s / (0.065 + after_s) - 1.0).abs() < 0.05, "{price:?}");
        }
    }

    proptest! {
        #[test]
        fn moves_on_a_line_show_it(
            anyway_s in 0.0..0.5f64,
            bytes_per_s in 2e7..1e9f64,
            rounds in 0..3u32,
            sizes in prop::collection::vec(1e6..1e9f64, 60..80),
        ) {
            let spread = sizes.iter().copied().fold(f64::INFINITY, f64::min) / sizes.iter().copied().fold(0.0, f64::max);
            prop_assume!(spread < 0.5);
            let mut fit = LinkFit::prior(0.01);
            for bytes in &sizes {
                fit.observe(*bytes, rounds, anyway_s + bytes / bytes_per_s);
            }
            let link = fit.link();
            let expected = |bytes: f64| anyway_s + bytes / bytes_per_s;
            let told = |bytes: f64| (LATENCIES + f64::from(rounds)) * link.latency_s + bytes / link.bytes_per_s;
            for bytes in [1e6, 1e8, 1e9] {
                prop_assert!((told(bytes) / expected(bytes) - 1.0).abs() < 0.1 || (told(bytes) - expected(bytes)).abs() < 0.01, "{link:?}");
            }
        }

        #[test]
        fn whatever_moves_show_the_link_is_one(moves in prop::collection::vec((0.0..1e10f64, 0..3u32, 0.0..100.0f64), 0..50)) {
            let mut fit = LinkFit::prior(0.01);
            for (bytes, rounds, seconds) in moves {
                fit.observe(bytes, rounds, seconds);
            }
            let link = fit.link();
            prop_assert!(link.latency_s >= 0.0 && link.latency_s.is_finite());
            prop_assert!(link.bytes_per_s > 1e5 && link.bytes_per_s <= PRIOR_BYTES_PER_S * (1.0 + 1e-9));
        }
    }
}
