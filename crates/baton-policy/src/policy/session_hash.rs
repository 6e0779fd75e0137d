use super::{Candidate, Policy, RequestView, least};

/// Highest random weight (Thaler and Ravishankar): a replica that leaves moves only its own sessions.
#[derive(Debug)]
pub(crate) struct SessionHash;

impl Policy for SessionHash {
    fn choose(&mut self, request: &RequestView, candidates: &[Candidate], rng: &mut fastrand::Rng) -> usize {
        // Requests without a session must not all hash alike.
        let Some(session) = request.session else {
            return least(candidates, rng, |candidate| f64::from(candidate.in_flight));
        };
        let weight = |candidate: &Candidate| mix(session ^ mix(u64::from(candidate.replica.0) + 1));
        (0..candidates.len()).max_by_key(|&place| weight(&candidates[place])).unwrap_or(0)
    }
}

/// The finaliser of `SplitMix64` (Steele, Lea and Flood).
fn mix(value: u64) -> u64 {
    let value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}
