use super::{Candidate, Policy, RequestView, least};
use crate::Reason;

/// Quotes this close are one: below it, the model's own error decides.
const TIE_MS: f64 = 1.0;
/// A session leaves its replica only for a gain over both.
const STAY_MS: f64 = 5.0;
const STAY_SHARE: f64 = 0.1;

/// Lowest total; within a tie the fewest in flight. A session stays where it is, and starts where fewest sessions live, unless
/// that costs noticeably more.
#[derive(Debug)]
pub(crate) struct Price;

impl Price {
    /// Why it chose so.
    pub(crate) fn reason(request: &RequestView, candidates: &[Candidate], chosen: usize) -> Reason {
        let lowest = candidates.iter().map(|candidate| candidate.terms.total()).fold(f64::INFINITY, f64::min);
        let excess_ms = candidates[chosen].terms.total() - lowest;
        match request {
            _ if excess_ms <= 0.0 => Reason::Lowest,
            _ if request.home == Some(candidates[chosen].replica) => Reason::Stays,
            _ if excess_ms <= TIE_MS => Reason::Tie,
            _ => Reason::Starts,
        }
    }
}

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

#[cfg(test)]
mod tests {
    use baton_units::{Blocks, ReplicaId, Tokens};

    use super::*;
    use crate::Terms;

    fn candidates(totals: &[f64], sessions: &[u32]) -> Vec<Candidate> {
        let candidate = |(place, (&wait, &sessions)): (usize, (&f64, &u32))| Candidate {
            replica: ReplicaId(place as u32),
            in_flight: place as u32,
            queued: 0,
            hit: Tokens(0),
            fetch: None,
            blocks_free: Blocks(10),
            blocks_total: Blocks(10),
            blocks_needed: Blocks(1),
            response_ms: 0.0,
            sessions,
            terms: Terms { wait, ..Terms::default() },
        };
        totals.iter().zip(sessions).enumerate().map(candidate).collect()
    }

    #[test]
    fn a_choice_that_is_not_the_lowest_has_its_reason() {
        let chosen = |home: Option<u32>, starts: bool, totals: &[f64], sessions: &[u32]| {
            let request = RequestView { session: home.map(u64::from), starts, home: home.map(ReplicaId) };
            let candidates = candidates(totals, sessions);
            let place = Price.choose(&request, &candidates, &mut fastrand::Rng::with_seed(1));
            (place, Price::reason(&request, &candidates, place))
        };
        assert_eq!(chosen(None, false, &[100.0, 90.0], &[0, 0]), (1, Reason::Lowest));
        assert_eq!(chosen(None, false, &[100.0, 99.5], &[0, 0]), (0, Reason::Tie));
        assert_eq!(chosen(Some(0), false, &[106.0, 100.0], &[0, 0]), (0, Reason::Stays), "6 % more are within the hysteresis");
        assert_eq!(chosen(Some(0), false, &[112.0, 100.0], &[0, 0]), (1, Reason::Lowest));
        assert_eq!(chosen(None, true, &[106.0, 100.0], &[1, 2]), (0, Reason::Starts));
    }
}
