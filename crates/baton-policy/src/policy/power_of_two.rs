use super::{Candidate, Policy, RequestView, least};

/// Mitzenmacher's two choices, by requests in flight.
#[derive(Debug)]
pub(crate) struct PowerOfTwo;

impl Policy for PowerOfTwo {
    fn choose(&mut self, _: &RequestView, candidates: &[Candidate], rng: &mut fastrand::Rng) -> usize {
        if candidates.len() < 2 {
            return 0;
        }
        let first = rng.usize(..candidates.len());
        let other = rng.usize(..candidates.len() - 1);
        let second = other + usize::from(other >= first);
        let pair = [candidates[first], candidates[second]];
        [first, second][least(&pair, rng, |candidate| f64::from(candidate.in_flight))]
    }
}
