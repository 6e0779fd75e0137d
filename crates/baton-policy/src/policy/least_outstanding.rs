use super::{Candidate, Policy, RequestView, least};

#[derive(Debug)]
pub(crate) struct LeastOutstanding;

impl Policy for LeastOutstanding {
    fn choose(&mut self, _: &RequestView, candidates: &[Candidate], rng: &mut fastrand::Rng) -> usize {
        least(candidates, rng, |candidate| f64::from(candidate.in_flight))
    }
}
