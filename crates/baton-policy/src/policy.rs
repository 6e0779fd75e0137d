use std::{fmt, str::FromStr};

use baton_units::{Blocks, ReplicaId, Tokens};
use serde::{Deserialize, Serialize};

use crate::{Terms, peers::Fetch};

mod cheap_signals;
mod least_kv;
mod least_outstanding;
mod least_response_time;
mod longest_prefix;
mod power_of_two;
pub(crate) mod price;
mod random;
mod round_robin;
mod session_hash;

/// A rule of choice.
pub(crate) trait Policy: Send + fmt::Debug {
    /// Whether it reads the prices for others, which cost most of a decision's time.
    fn prices_others(&self) -> bool {
        false
    }

    /// Place in `candidates`, which is never empty and in order of ids.
    fn choose(&mut self, request: &RequestView, candidates: &[Candidate], rng: &mut fastrand::Rng) -> usize;
}

/// What a policy may know of a request: nothing of its output.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RequestView {
    pub(crate) session: Option<u64>,
    /// It begins a session that is expected to go on.
    pub(crate) starts: bool,
    /// Where the session's last request went, if it is known.
    pub(crate) home: Option<ReplicaId>,
}

/// What a policy may know of a replica for one request; plain data.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Candidate {
    pub(crate) replica: ReplicaId,
    pub(crate) in_flight: u32,
    /// Requests without a first token.
    pub(crate) queued: u32,
    /// What it fetches included.
    pub(crate) hit: Tokens,
    pub(crate) fetch: Option<Fetch>,
    /// Blocks not pinned by requests in flight.
    pub(crate) blocks_free: Blocks,
    pub(crate) blocks_total: Blocks,
    /// Blocks that this prompt needs.
    pub(crate) blocks_needed: Blocks,
    /// Mean time from dispatch to end, of the last requests there; zero before any.
    pub(crate) response_ms: f64,
    /// Sessions that were there lately.
    pub(crate) sessions: u32,
    pub(crate) terms: Terms,
}

/// Place of the lowest `cost`; ties go to the one with fewer requests in flight, then to a seeded draw. A tie broken by list order
/// sends whole bursts to one replica.
pub(crate) fn least(candidates: &[Candidate], rng: &mut fastrand::Rng, cost: impl Fn(&Candidate) -> f64) -> usize {
    let (mut best, mut best_key, mut ties) = (0, (f64::INFINITY, u32::MAX), 0);
    for (place, candidate) in candidates.iter().enumerate() {
        let key = (cost(candidate), candidate.in_flight);
        if ties == 0 || key < best_key {
            (best, best_key, ties) = (place, key, 1);
        } else if key == best_key {
            ties += 1;
            if rng.u32(..ties) == 0 {
                best = place;
            }
        }
    }
    best
}

macro_rules! policies {
    ($($variant:ident = $name:literal => $policy:expr, $doc:literal;)*) => {
        /// The policies by name.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "kebab-case")]
        pub enum PolicyName {
            $(#[doc = $doc] $variant,)*
        }

        impl PolicyName {
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            pub(crate) fn build(self) -> Box<dyn Policy> {
                match self { $(Self::$variant => Box::new($policy),)* }
            }
        }
    };
}

policies! {
    Price = "price" => price::Price, "Lowest price in ms, own delay and that of others.";
    RoundRobin = "round-robin" => round_robin::RoundRobin::default(), "Each replica in turn.";
    Random = "random" => random::Random, "A seeded draw.";
    LeastOutstanding = "least-outstanding" => least_outstanding::LeastOutstanding, "Fewest requests in flight.";
    LeastResponseTime = "least-response-time" => least_response_time::LeastResponseTime, "Lowest mean response time times requests in flight.";
    LeastKv = "least-kv" => least_kv::LeastKv, "Largest free share of KV blocks.";
    SessionHash = "session-hash" => session_hash::SessionHash, "Rendezvous hash of the session; without one, fewest in flight.";
    PowerOfTwo = "power-of-two" => power_of_two::PowerOfTwo, "The less loaded of two drawn at random.";
    LongestPrefix = "longest-prefix" => longest_prefix::LongestPrefix, "Longest prefix hit.";
    CheapSignals = "cheap-signals" => cheap_signals::CheapSignals, "Queue depth plus a penalty for blocks that do not fit.";
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A name that no policy has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no policy is called `{0}`; the policies are {list}", list = PolicyName::ALL.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(", "))]
pub struct UnknownPolicy(pub String);

impl FromStr for PolicyName {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        Self::ALL.iter().copied().find(|policy| policy.as_str() == name).ok_or_else(|| UnknownPolicy(name.to_owned()))
    }
}
