use super::{Candidate, Policy, RequestView, least};

/// Quotes this close are one: below it, the model's own error decides.
const TIE_MS: f64 = 1.0;
/// A session leaves its replica only for a gain over both.
const STAY_MS: f64 = 5.0;
const STAY_SHARE: f64 = 0.1;

/// Lowest total; within a tie the fewest in flight. A session stays where it is, and starts where fewest sessions live, unless
/// that costs noticeably more.
#[derive(Debug)]
pub(crate) struct Price;

impl Policy for Price {
    fn prices_others(&self) -> bool {
        true
    }

    fn choose(&mut self, request: &RequestView, candidates: &[Candidate], rng: &mut fastrand::Rng) -> usize {
        let lowest = candidates.iter().map(|candidate| candidate.terms.total()).fold(f64::INFINITY, f64::min);
        let stay = lowest + STAY_MS.max(STAY_SHARE * lowest);
        if let Some(home) = request.home
            && let Some(place) = candidates.iter().position(|candidate| candidate.replica == home && candidate.terms.total() <= stay)
        {
            return place;
        }
        least(candidates, rng, |candidate| {
            let total = candidate.terms.total();
            let excess_ms = (total - lowest - TIE_MS).max(0.0);
            match (request.starts, total <= stay) {
                // The count decides, the rest of the price between equal counts.
                (true, true) => f64::from(candidate.sessions) + 0.5 * excess_ms / (stay - lowest),
                (true, false) => f64::INFINITY,
                (false, _) => excess_ms,
            }
        })
    }
}
