use baton_units::ReplicaId;

use super::{Candidate, Policy, RequestView};

#[derive(Debug, Default)]
pub(crate) struct RoundRobin {
    last: Option<ReplicaId>,
}

impl Policy for RoundRobin {
    fn choose(&mut self, _: &RequestView, candidates: &[Candidate], _: &mut fastrand::Rng) -> usize {
        let next = candidates.iter().position(|candidate| Some(candidate.replica) > self.last).unwrap_or(0);
        self.last = Some(candidates[next].replica);
        next
    }
}
