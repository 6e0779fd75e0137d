//! A replica on the network: an engine behind the HTTP routes, metrics and KV events of a vLLM server, so that any router written
//! for one can sit in front of it.
//!
//! The engine runs on a thread of its own; requests reach it over a channel and each has its own way back, so that a slow client
//! holds up nobody. Gateways may also attach by the migration protocol: they run requests as token ids and move them, with their KV
//! and while they run, to other replicas. With [`Pace::Modelled`] nothing is computed and steps last as long as the cost model says:
//! an emulated engine for load tests of this or any router. This crate decides nothing about scheduling and routes nothing; it does
//! no TLS, and asks nobody who they are but those who come by the migration protocol where there is a fleet key.

mod clock;
mod config;
mod driver;
mod generation;
mod http;
mod kv_publisher;
mod metrics;
mod migration;
mod serve;

pub use config::{KvEventsConfig, MigrationConfig, Pace, ReplicaConfig};
pub use migration::MigrationError;
pub use serve::{ReplicaError, serve};
