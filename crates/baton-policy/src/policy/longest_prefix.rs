use super::{Candidate, Policy, RequestView, least};

/// Without a look at load: it shows what affinity alone does, all on one replica when all share a prefix.
#[derive(Debug)]
pub(crate) struct LongestPrefix;

impl Policy for LongestPrefix {
    fn choose(&mut self, _: &RequestView, candidates: &[Candidate], rng: &mut fastrand::Rng) -> usize {
        least(candidates, rng, |candidate| -candidate.hit.as_f64())
    }
}
