//! What it costs to let a running or waiting sequence go on at another replica.

use std::fmt;

use baton_units::{BlockSize, Tokens};
use serde::Serialize;

use crate::{Link, StepCoefficients};

/// A source freezes a sequence when at most this many blocks are left to copy (the migration protocol's number, after Llumnix).
const LAST_BLOCKS: f64 = 16.0;
/// Copy rounds at most, the one after the freeze included.
const ROUNDS_MAX: u32 = 3;

/// One sequence, and the ways from where it is to where it might go.
#[derive(Debug, Clone, Copy)]
pub struct MoveCase<'a> {
    pub kv_bytes_per_token: f64,
    pub block_size: BlockSize,
    pub link: &'a Link,
    /// Of the target.
    pub step: &'a StepCoefficients,
    /// Seconds between two tokens, at the source while the sequence is copied and at the target when it comes.
    pub step_s: f64,
    /// Leading tokens of prompt and output whose KV exists at the source.
    pub tokens: Tokens,
    /// Of these, leading tokens whose KV the target has too.
    pub held: Tokens,
    /// It decodes, so that its KV can be copied while it goes on.
    pub decodes: bool,
    /// Seconds of work before a sequence that is queued at the target.
    pub queue_s: f64,
}

/// How a sequence comes to its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MoveWay {
    /// Its KV is copied while it decodes; it is frozen for the last round and joins the target's batch.
    Kv,
    /// It stops, is queued at the target, and its KV is fetched meanwhile.
    Fetch,
    /// It stops, is queued at the target, and what the target lacks is computed anew.
    Recompute,
}

/// One way's price.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct WayPrice {
    /// From the decision until the target computes its next token; until then both hold its blocks.
    pub total_s: f64,
    /// Of this, the time in which nobody computes a token of it.
    pub gap_s: f64,
    /// Time of the target's arithmetic that goes to it, which others there wait for.
    pub compute_s: f64,
}

/// What one move costs, way by way.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MovePrice {
    /// Bytes that travel in a live copy, with what is decoded meanwhile.
    pub bytes: f64,
    /// Copy rounds, the one after the freeze included.
    pub rounds: u32,
    /// Seconds on the link, of all rounds.
    pub copy_s: f64,
    /// `None` of a sequence that does not decode: its KV does not grow, so that there is nothing to copy behind its back.
    pub kv: Option<WayPrice>,
    pub fetch: WayPrice,
    pub recompute: WayPrice,
    /// The way with the least [`WayPrice::cost_s`]; the one with less arithmetic where two cost the same.
    pub cheapest: MoveWay,
    /// Bandwidth below which recomputing takes less time than the link: `bytes missing / (T_prefill - latency)`; infinite where the
    /// link's latency alone is longer.
    pub break_even_bytes_per_s: f64,
}

impl WayPrice {
    /// The sequence's own loss and that of others, a second counting the same to all.
    pub fn cost_s(&self) -> f64 {
        self.gap_s + self.compute_s
    }
}

/// Rounds of a live copy.
struct Rounds {
    count: u32,
    tokens: f64,
    copy_s: f64,
    last_s: f64,
}

impl MovePrice {
    /// Prices a move. The rounds are those of the migration protocol: a round copies the blocks that are full and not there, the next one
    /// those that became full meanwhile (Llumnix, OSDI 2024, section 4.2), so its size shrinks by [`crate::copy_round_ratio`].
    #[must_use]
    pub fn of(case: &MoveCase<'_>) -> Self {
        let missing = case.tokens.saturating_sub(case.held);
        let (latency_s, missing_bytes) = (case.link.latency_s, case.kv_bytes_per_token * missing.as_f64());
        let rounds = rounds(case, missing);
        let recompute_s = case.step.prefill_ms(missing, case.held) / 1e3;
        // Whoever comes waits for the end of the step that runs there.
        let boundary_s = case.step_s / 2.0;
        // The last round, the source's word to the gateway and the gateway's to the target.
        let gap_s = rounds.last_s + 2.0 * latency_s + boundary_s;
        // Before the first round the target answers what it holds.
        let kv = WayPrice { total_s: 2.0 * latency_s + rounds.copy_s - rounds.last_s + gap_s, gap_s, compute_s: 0.0 };
        let queued = |ready_s: f64, compute_s: f64| {
            let gap_s = latency_s + ready_s.max(case.queue_s) + boundary_s + compute_s;
            WayPrice { total_s: gap_s, gap_s, compute_s }
        };
        let fetch = queued(latency_s + case.link.seconds(missing_bytes), 0.0);
        let recompute = queued(0.0, recompute_s);
        let ways = [case.decodes.then_some((MoveWay::Kv, kv)), Some((MoveWay::Fetch, fetch)), Some((MoveWay::Recompute, recompute))];
        let cheapest = ways.into_iter().flatten().min_by(|a, b| a.1.cost_s().total_cmp(&b.1.cost_s()));
        Self {
            bytes: case.kv_bytes_per_token * rounds.tokens,
            rounds: rounds.count,
            copy_s: rounds.copy_s,
            kv: case.decodes.then_some(kv),
            fetch,
            recompute,
            cheapest: cheapest.map_or(MoveWay::Recompute, |(way, _)| way),
            break_even_bytes_per_s: if recompute_s > latency_s { missing_bytes / (recompute_s - latency_s) } else { f64::INFINITY },
        }
    }

    pub fn way(&self, way: MoveWay) -> Option<WayPrice> {
        match way {
            MoveWay::Kv => self.kv,
            MoveWay::Fetch => Some(self.fetch),
            MoveWay::Recompute => Some(self.recompute),
        }
    }

    /// The price of the cheapest way.
    pub fn best(&self) -> WayPrice {
        self.way(self.cheapest).unwrap_or(self.recompute)
    }
}

fn rounds(case: &MoveCase<'_>, missing: Tokens) -> Rounds {
    let size = f64::from(case.block_size.get());
    let (mut left, mut sum) = (missing.as_f64(), Rounds { count: 1, tokens: 0.0, copy_s: 0.0, last_s: 0.0 });
    while left > LAST_BLOCKS * size && sum.count < ROUNDS_MAX {
        // The block that is being written stays for later.
        let full = (left / size).floor() * size;
        let round_s = case.link.seconds(case.kv_bytes_per_token * full);
        left = left - full + round_s / case.step_s;
        (sum.tokens, sum.copy_s, sum.count) = (sum.tokens + full, sum.copy_s + round_s, sum.count + 1);
    }
    let last = (left / size).ceil() * size;
    sum.last_s = case.link.seconds(case.kv_bytes_per_token * last);
    (sum.tokens, sum.copy_s) = (sum.tokens + last, sum.copy_s + sum.last_s);
    sum
}

impl fmt::Display for MoveWay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Kv => "KV",
            Self::Fetch => "fetch",
            Self::Recompute => "recompute",
        })
    }
}

/// Milliseconds of the cheapest way, as for an event log.
impl fmt::Display for MovePrice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let best = self.best();
        write!(f, "{:.1} ms by {}", best.cost_s() * 1e3, self.cheapest)?;
        if self.cheapest != MoveWay::Recompute {
            write!(f, " of {:.1} MB", self.bytes / 1e6)?;
        }
        write!(f, ", {:.1} ms in all", best.total_s * 1e3)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Device, ModelShape};

    fn step() -> StepCoefficients {
        StepCoefficients::from_profile(&ModelShape::preset("llama-2-7b-gqa8").unwrap(), &Device::preset("h100").unwrap())
    }

    fn case<'a>(link: &'a Link, step: &'a StepCoefficients, tokens: u32, held: u32) -> MoveCase<'a> {
        MoveCase {
            kv_bytes_per_token: 131_072.0,
            block_size: BlockSize::DEFAULT,
            link,
            step,
            step_s: 22.6e-3,
            tokens: Tokens(tokens),
            held: Tokens(held),
            decodes: true,
            queue_s: 0.0,
        }
    }

    #[test]
    fn the_lecture_s_move_takes_what_it_says() {
        let step = step();
        for (name, ms) in [("nvlink", 1.342), ("pcie", 8.389), ("ethernet", 21.47)] {
            let link = Link::preset(name).unwrap();
            let price = MovePrice::of(&case(&link, &step, 4096, 0));
            assert!((price.copy_s * 1e3 / ms - 1.0).abs() < 0.02, "{name}: {price:?}");
            assert!((price.recompute.compute_s * 1e3 / 129.4 - 1.0).abs() < 0.02, "{price:?}");
            assert!((price.break_even_bytes_per_s / 4.1475e9 - 1.0).abs() < 0.005, "{price:?}");
            assert_eq!((price.cheapest, price.rounds), (MoveWay::Kv, 2));
        }
    }

    /// The reason to copy while it decodes: 64 times the tokens, the same gap.
    #[test]
    fn the_gap_of_a_live_copy_does_not_grow_with_the_sequence() {
        let (step, link) = (step(), Link::preset("ethernet").unwrap());
        let gap = |tokens| MovePrice::of(&case(&link, &step, tokens, 0)).kv.unwrap().gap_s;
        assert!((gap(16_384) / gap(272) - 1.0).abs() < 0.05, "{} and {}", gap(16_384), gap(272));
        let recompute = |tokens| MovePrice::of(&case(&link, &step, tokens, 0)).recompute.compute_s;
        assert!(recompute(16_384) > 60.0 * recompute(272), "quadratic");
    }

    #[test]
    fn what_does_not_decode_is_fetched_or_computed_by_the_bandwidth() {
        let step = step();
        let cheapest = |gb_per_s, latency_s, tokens, held| {
            let link = Link::custom(gb_per_s).with_latency(latency_s);
            MovePrice::of(&MoveCase { decodes: false, ..case(&link, &step, tokens, held) }).cheapest
        };
        assert_eq!(cheapest(25.0, 0.0, 4096, 0), MoveWay::Fetch);
        // A second of the target's arithmetic counts twice: the sequence waits for it, and so do those who decode there.
        assert_eq!(cheapest(1.0, 0.0, 4096, 0), MoveWay::Recompute);
        assert_eq!(cheapest(25.0, 0.5, 4096, 0), MoveWay::Recompute);
        assert_eq!(cheapest(1.0, 0.0, 4096, 4096), MoveWay::Fetch, "nothing is left to do but to be queued");
    }

    #[test]
    fn a_price_says_its_numbers() {
        let (step, link) = (step(), Link::preset("nvlink").unwrap());
        assert_eq!(MovePrice::of(&case(&link, &step, 4096, 0)).to_string(), "11.3 ms by KV of 539.0 MB, 12.6 ms in all");
        let slow = Link::custom(0.1);
        let waiting = MoveCase { decodes: false, ..case(&slow, &step, 4096, 0) };
        assert_eq!(MovePrice::of(&waiting).to_string(), "270.1 ms by recompute, 140.7 ms in all");
    }

    proptest! {
        #[test]
        fn what_the_target_holds_never_makes_a_move_dearer(tokens in 1u32..50_000, held in 0.0f64..1.0, more in 0.0f64..1.0, gb_per_s in 0.5f64..400.0) {
            let (step, link) = (step(), Link::custom(gb_per_s));
            let held = (f64::from(tokens) * held) as u32 / 16 * 16;
            let more = (held + (f64::from(tokens - held) * more) as u32 / 16 * 16).max(held);
            let price = |held| MovePrice::of(&case(&link, &step, tokens, held));
            let (less, more) = (price(held), price(more));
            prop_assert!(more.fetch.cost_s() <= less.fetch.cost_s() + 1e-12);
            prop_assert!(more.recompute.cost_s() <= less.recompute.cost_s() + 1e-12);
            prop_assert!(more.copy_s <= less.copy_s + 1e-12);
        }

        #[test]
        fn the_cheapest_way_is_the_cheapest(tokens in 1u32..50_000, gb_per_s in 0.01f64..400.0, latency_ms in 0.0f64..50.0, decodes: bool, queue_ms in 0.0f64..500.0) {
            let (step, link) = (step(), Link::custom(gb_per_s).with_latency(latency_ms / 1e3));
            let price = MovePrice::of(&MoveCase { decodes, queue_s: queue_ms / 1e3, ..case(&link, &step, tokens, 0) });
            for way in [MoveWay::Kv, MoveWay::Fetch, MoveWay::Recompute] {
                let Some(other) = price.way(way) else { prop_assert!(!decodes); continue };
                prop_assert!(price.best().cost_s() <= other.cost_s());
                prop_assert!(other.gap_s <= other.total_s + 1e-12 && other.gap_s >= 0.0);
            }
            prop_assert!(price.bytes >= 131_072.0 * f64::from(tokens) && (1..=ROUNDS_MAX).contains(&price.rounds));
        }
    }
}
