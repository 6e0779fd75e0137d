//! A fleet in virtual time: the production router and scheduler, timed replicas, links that delay and lose, and seeded arrivals.
//!
//! [`run`] plays one workload against one fleet and returns what happened; equal scenarios give equal bytes. Nothing here decides
//! where a request goes or how a batch is formed: `baton-policy` and `baton-engine` do, as in production. No tokens are real, no
//! HTTP is spoken, and a gateway's own time is zero.

mod clock;
mod link;
mod outcome;
mod scenario;
mod scheduled;
mod serial;
mod simulation;
mod stats;
mod timed_engine;
mod workload;

pub use clock::EventQueue;
pub use link::Link;
pub use outcome::{DrainRecord, MoveRecord, Outcome, RequestOutcome};
pub use scenario::{Drain, EngineModel, Fault, Moves, Parted, Peers, Returns, Scenario, reference_blocks, reference_step};
pub use scheduled::{EngineShape, ScheduledEngine};
pub use serial::SerialEngine;
pub use simulation::run;
pub use stats::{Interval, Ratio, percentile};
pub use timed_engine::{EngineOutput, EngineRequest, TimedEngine};
pub use workload::{Burst, ClientRequest, LabRng, OutputTail, RequestKind, Shape, Workload, WorkloadName};
