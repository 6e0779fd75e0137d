//! Where a request runs: views of the replicas, the ledger of what was sent to them, quotes in milliseconds, and the policies that
//! choose by them.
//!
//! [`Router`] is a state machine without clock, sockets or threads: every call passes `now`, ties are broken by its own seeded
//! generator, and equal inputs give equal decisions. The gateway and the simulator drive the same one. It never reads how long an
//! output will be; it sends nothing, retries nothing and speaks no wire format. [`mover`] decides which running requests go on elsewhere.

mod chains;
mod config;
mod copies;
mod decision;
mod delay;
mod demand;
mod fleet;
mod held;
mod ledger;
pub mod mover;
mod peers;
mod policy;
mod quoting;
mod replica;
mod request;
mod reuse;
mod router;
mod truth;
mod turns;

pub use config::{PriceWeights, PriorityClass, RouterConfig};
pub use decision::{DecisionRecord, FetchQuote, Quote, Realised, Reason, Terms};
pub use peers::PeerTerms;
pub use policy::{PolicyName, UnknownPolicy};
pub use replica::{Discipline, LoadReport, ReplicaSpec, ReplicaState, ReplicaStatus};
pub use request::{Arrival, Outcome, Placed, PrefixCopy, PrefixFetch, Refusal, Slo, Verdict};
pub use router::{MoveTerms, Router};
pub use truth::Trust;
pub use turns::Share;
