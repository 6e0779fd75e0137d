use super::{Candidate, Policy, RequestView, least};

#[derive(Debug)]
pub(crate) struct LeastKv;

impl Policy for LeastKv {
    fn choose(&mut self, _: &RequestView, candidates: &[Candidate], rng: &mut fastrand::Rng) -> usize {
        least(candidates, rng, |candidate| -candidate.blocks_free.as_f64() / candidate.blocks_total.as_f64().max(1.0))
    }
}
