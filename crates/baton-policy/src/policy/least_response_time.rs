use super::{Candidate, Policy, RequestView, least};

/// NGINX Plus's `least_time`: mean response time times the requests that would then be in flight.
#[derive(Debug)]
pub(crate) struct LeastResponseTime;

impl Policy for LeastResponseTime {
    fn choose(&mut self, _: &RequestView, candidates: &[Candidate], rng: &mut fastrand::Rng) -> usize {
        least(candidates, rng, |candidate| candidate.response_ms * f64::from(candidate.in_flight + 1))
    }
}
