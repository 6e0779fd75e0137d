//! `GET /baton/v1/replica`: what a Baton replica says of itself.

use baton_cost::StepCoefficients;
use serde::{Deserialize, Serialize};

use crate::migration::handshake::KvLayout;

/// A replica's own report. Live when it is read; every time in it is in the replica's model time (real time divided by its
/// `time_scale`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Name given by whoever started the replica; stays the same over restarts.
    pub id: String,
    /// Differs in each life of the process.
    pub incarnation: u64,
    /// `cpu` or `timed`.
    pub engine: String,
    pub model: String,
    /// Names all that decides the bits of an answer; answers of equal ids continue each other exactly.
    pub numerics_id: String,
    /// Tokens per KV block.
    pub block_size: u32,
    pub kv_blocks_total: u32,
    /// Free blocks and those that only the prefix cache holds, which can be reclaimed at once.
    pub kv_blocks_free: u32,
    pub waiting: u32,
    pub running: u32,
    /// Prompt tokens admitted but not computed yet.
    pub prefill_backlog_tokens: u64,
    pub max_model_len: u32,
    pub max_running: u32,
    /// Tokens that one step may compute, as derived from the measured step time.
    pub token_budget: u32,
    /// Real seconds per model second; 1 for an engine that computes.
    pub time_scale: f64,
    /// Fitted online from this replica's own steps.
    pub step: StepCoefficients,
    /// What the formula says before any observation.
    pub step_prior: StepCoefficients,
    /// Relative error of predicted against measured step times, moving average.
    pub step_error: f64,
    pub steps: u64,
    /// Where KV events are published; absent when they are off.
    pub kv_events: Option<KvEventSource>,
    /// Where it takes part in live migration; absent when it does not.
    pub migration: Option<MigrationSource>,
}

/// Where a gateway attaches to move requests between replicas (`docs/migration-protocol.md`). With the report's incarnation and numerics
/// id it is what the replica's hello says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationSource {
    /// The replica's number in places.
    pub replica: u32,
    /// `host:port` to which gateways connect.
    pub control_address: String,
    /// `host:port` to which sources take KV.
    pub kv_address: String,
    /// Whether a connection must prove that it knows the fleet key.
    pub fleet_key: bool,
    /// Absent for an engine that hands out no KV.
    pub kv_layout: Option<KvLayout>,
    /// Whether it copies cached prefixes to others and takes theirs; absent in reports of replicas that do not know of it.
    #[serde(default)]
    pub copies_prefixes: bool,
}

/// Where a subscriber finds a replica's KV events.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvEventSource {
    /// ZMQ PUB socket, for example `tcp://127.0.0.1:5557`.
    pub endpoint: String,
    /// ZMQ ROUTER socket that answers replay requests.
    pub replay_endpoint: Option<String>,
    /// First frame of every message; may be empty.
    pub topic: String,
}
