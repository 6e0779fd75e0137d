use super::{Candidate, Policy, RequestView};

/// The control of every comparison.
#[derive(Debug)]
pub(crate) struct Random;

impl Policy for Random {
    fn choose(&mut self, _: &RequestView, candidates: &[Candidate], rng: &mut fastrand::Rng) -> usize {
        rng.usize(..candidates.len())
    }
}
