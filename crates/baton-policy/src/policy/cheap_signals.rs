use super::{Candidate, Policy, RequestView, least};

/// Per block that does not fit: large enough to make such a replica the last choice.
const ALPHA: f64 = 1e3;
/// Weight of free blocks in a tie of whole requests.
const TIE: f64 = 1e-9;

/// Queue depth, free KV and prompt length only: `q + alpha * max(0, need - free)`, ties to more free blocks.
#[derive(Debug)]
pub(crate) struct CheapSignals;

impl Policy for CheapSignals {
    fn choose(&mut self, _: &RequestView, candidates: &[Candidate], rng: &mut fastrand::Rng) -> usize {
        least(candidates, rng, |candidate| {
            let missing = candidate.blocks_needed.saturating_sub(candidate.blocks_free).as_f64();
            f64::from(candidate.queued) + ALPHA * missing - TIE * candidate.blocks_free.as_f64()
        })
    }
}
