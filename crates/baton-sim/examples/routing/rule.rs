//! What chooses: the policies, `price` without some of its terms, and references.

use std::{fmt, str::FromStr, time::Duration};

use baton_policy::{PolicyName, PriceWeights, RouterConfig};
use baton_sim::{Parted, Scenario};
use baton_units::Tokens;

/// Prompts above this go to the other part of a parted fleet.
const LONGEST_SHORT: Tokens = Tokens(16_384);

/// A row of the tables.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rule {
    Policy(PolicyName),
    /// `price` without some of what it does: `price-no-delay+copies`.
    PriceWithout(Vec<Part>),
    /// The request's own wait and prefill, and nothing else: `own-cost`.
    OwnCost,
    /// `price` with an objective, after so many ms a first token is late: `price-slo-2500`.
    PriceSlo(u64),
    /// `own-cost` on a fleet parted by prompt length, the first `k` replicas for short prompts: `sita-k`. A reference.
    Sita(usize),
}

/// What `price` can do without.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part {
    Delay,
    Eviction,
    Memory,
    Waste,
    Decode,
    Copies,
    /// Holding requests in the router until a replica frees.
    Hold,
}

impl Part {
    const ALL: [(Self, &'static str); 7] = [
        (Self::Delay, "delay"),
        (Self::Eviction, "eviction"),
        (Self::Memory, "memory"),
        (Self::Waste, "waste"),
        (Self::Decode, "decode"),
        (Self::Copies, "copies"),
        (Self::Hold, "hold"),
    ];

    fn take_from(self, router: &mut RouterConfig) {
        match self {
            Self::Delay => router.weights.delay = 0.0,
            Self::Eviction => router.weights.eviction = 0.0,
            Self::Memory => router.weights.memory = 0.0,
            Self::Waste => router.weights.waste = 0.0,
            Self::Decode => router.weights.decode = 0.0,
            Self::Copies => router.copies = false,
            Self::Hold => router.bind_within = None,
        }
    }
}

impl Rule {
    pub(crate) const PRICE: Self = Self::Policy(PolicyName::Price);

    /// Whether a router could go by it: others are shown and never counted as the best.
    pub(crate) fn is_reference(&self) -> bool {
        matches!(self, Self::Sita(_))
    }

    pub(crate) fn router(&self) -> RouterConfig {
        let mut router = RouterConfig { decisions_kept: 0, ..RouterConfig::default() };
        match self {
            Self::Policy(policy) => router.policy = *policy,
            Self::PriceSlo(ms) => router.classes[0].slo_ttft = Some(Duration::from_millis(*ms)),
            Self::PriceWithout(parts) => parts.iter().for_each(|part| part.take_from(&mut router)),
            Self::OwnCost | Self::Sita(_) => {
                router.weights = PriceWeights { delay: 0.0, eviction: 0.0, memory: 0.0, waste: 0.0, decode: 0.0 };
                router.copies = false;
                router.bind_within = None;
            }
        }
        router
    }

    pub(crate) fn apply(&self, scenario: &mut Scenario) {
        if let Self::Sita(replicas) = self {
            scenario.parted = Some(Parted { replicas: *replicas, longest: LONGEST_SHORT });
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |part: &Part| Part::ALL.iter().find(|(known, _)| known == part).map_or("", |(_, name)| name);
        f.pad(&match self {
            Self::Policy(policy) => policy.to_string(),
            Self::PriceSlo(ms) => format!("price-slo-{ms}"),
            Self::PriceWithout(parts) => format!("price-no-{}", parts.iter().map(name).collect::<Vec<_>>().join("+")),
            Self::OwnCost => "own-cost".to_owned(),
            Self::Sita(replicas) => format!("sita-{replicas}"),
        })
    }
}

impl FromStr for Rule {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let unknown = || format!("no rule is called `{name}`");
        if let Some(parts) = name.strip_prefix("price-no-") {
            let part = |name: &str| Part::ALL.iter().find(|(_, known)| *known == name).map(|(part, _)| *part).ok_or_else(unknown);
            return parts.split('+').map(part).collect::<Result<_, _>>().map(Self::PriceWithout);
        }
        if let Some(ms) = name.strip_prefix("price-slo-") {
            return ms.parse().map(Self::PriceSlo).map_err(|_| unknown());
        }
        if let Some(replicas) = name.strip_prefix("sita-") {
            return replicas.parse().map(Self::Sita).map_err(|_| unknown());
        }
        match name {
            "own-cost" => Ok(Self::OwnCost),
            _ => name.parse().map(Self::Policy).map_err(|_| unknown()),
        }
    }
}
