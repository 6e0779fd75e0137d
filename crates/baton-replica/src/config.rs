use std::{
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};

use baton_engine::EngineConfig;
use baton_migration::Timing;
use baton_wire::migration::handshake::FleetKey;

/// One replica: an engine and how it is served.
#[derive(Debug, Clone)]
pub struct ReplicaConfig {
    /// Name of the replica in the fleet; the same over restarts.
    pub id: String,
    /// Names under which requests may ask for the model; the first one is what `/v1/models` and metrics say.
    pub models: Vec<String>,
    /// Where the weights came from, for `/v1/models`.
    pub model_root: Option<String>,
    /// `eos` left empty and `vocabulary` left at its largest are taken from the tokenizer.
    pub engine: EngineConfig,
    pub pace: Pace,
    /// KV events on loopback ports that the system picks by default; `None` publishes none.
    pub kv_events: Option<KvEventsConfig>,
    /// Live migration; `None`, the default, takes no part in it.
    pub migration: Option<MigrationConfig>,
    /// How long a shutdown waits for running requests. Default 10 s.
    pub drain: Duration,
}

/// What decides how long a step takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pace {
    /// The executor computes; a step takes what it takes.
    Measured,
    /// The executor only says how long a step would take, and the replica waits that long times `time_scale`, which is above zero.
    /// Everything that reports time reports it unscaled.
    Modelled { time_scale: f64 },
}

impl Pace {
    pub(crate) fn time_scale(self) -> f64 {
        match self {
            Self::Measured => 1.0,
            Self::Modelled { time_scale } => time_scale,
        }
    }

    /// The engine's name in reports.
    pub(crate) fn engine(self) -> &'static str {
        match self {
            Self::Measured => "cpu",
            Self::Modelled { .. } => "timed",
        }
    }
}

/// Where KV events are published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvEventsConfig {
    pub host: IpAddr,
    /// Port of the PUB socket; 0 lets the system pick.
    pub port: u16,
    /// Port of the ROUTER socket that replays; 0 lets the system pick.
    pub replay_port: u16,
    /// First frame of every message; none by default, as at vLLM: routers read their own meaning into others.
    pub topic: String,
}

/// Where gateways attach to run and to move requests, and other replicas bring KV.
#[derive(Debug, Clone)]
pub struct MigrationConfig {
    /// The address that gateways and other replicas reach this one by. One that is not of this machine alone needs a fleet key.
    pub host: IpAddr,
    /// Port for gateways; 0 lets the system pick.
    pub control_port: u16,
    /// Port for KV of other replicas; 0 lets the system pick.
    pub kv_port: u16,
    /// Shared by all gateways and replicas of the fleet, which prove that they know it.
    pub fleet_key: Option<FleetKey>,
    /// Heartbeats, leases and repeats; those of all parties should be the same.
    pub timing: Timing,
}

impl Default for MigrationConfig {
    /// On loopback ports that the system picks, without a key.
    fn default() -> Self {
        Self { host: Ipv4Addr::LOCALHOST.into(), control_port: 0, kv_port: 0, fleet_key: None, timing: Timing::default() }
    }
}

impl ReplicaConfig {
    /// The defaults around an engine.
    pub fn new(id: &str, model: &str, engine: EngineConfig, pace: Pace) -> Self {
        let kv_events = KvEventsConfig { host: Ipv4Addr::LOCALHOST.into(), port: 0, replay_port: 0, topic: String::new() };
        Self {
            id: id.to_owned(),
            models: vec![model.to_owned()],
            model_root: None,
            engine,
            pace,
            kv_events: Some(kv_events),
            migration: None,
            drain: Duration::from_secs(10),
        }
    }
}
