//! The replica's side of live migration (`docs/migration-protocol.md`): gateways attach, start requests and move them to other replicas.
//!
//! One task, the [`actor`], owns what is held of requests; the connections tell it what came and carry what it answers. The KV of a
//! request that leaves is taken to its target by [`kv_source`], and one that comes is taken in by [`kv_target`]; a cached prefix without
//! a request by [`prefix_source`] and [`prefix_target`].

mod actor;
mod control;
mod fault;
mod kv_source;
mod kv_target;
mod lease_clock;
mod prefix_source;
mod prefix_target;
mod travel;

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use baton_engine::Numerics;
use baton_link::{Identity, Listener};
use baton_migration::Place;
use baton_units::{Incarnation, ReplicaId};
use baton_wire::{
    migration::handshake::{Freeze, Hello, Role, VERSION},
    replica::MigrationSource,
};
use tokio::{
    net::TcpListener,
    sync::{mpsc, watch},
    task::JoinSet,
};
use xxhash_rust::xxh3::xxh3_64;

use crate::{
    MigrationConfig,
    driver::{EngineHandle, MoveEvent},
};
use actor::Actor;

/// Inputs on their way to the actor; who brings more waits.
const QUEUED_INPUTS: usize = 1024;

/// Why a replica cannot take part in live migration.
#[derive(Debug, thiserror::Error)]
pub enum MigrationError {
    #[error(
        "{0} can be reached from elsewhere, and without a fleet key anybody there could take requests; give a key or bind a loopback address"
    )]
    NoKey(IpAddr),
    #[error("{0} is not an address that others can connect to; bind the one that they reach this replica by")]
    Unspecified(IpAddr),
    #[error("the migration address {address} cannot be had: {error}")]
    Bind { address: SocketAddr, error: std::io::Error },
    #[error("BATON_FAULT = {0} is no fault; it is for tests only, unset it")]
    Fault(String),
}

/// Bound and not served yet.
pub(crate) struct Listeners {
    control: TcpListener,
    control_address: SocketAddr,
    kv: Listener,
    kv_address: SocketAddr,
}

/// What the replica's model is called.
#[derive(Debug)]
pub(crate) struct Models {
    /// In the engine, and between replicas.
    pub(crate) engine: String,
    /// By clients and gateways.
    pub(crate) served: Vec<String>,
}

/// The running tasks, which end when it is dropped, and where they are found.
pub(crate) struct Migration {
    pub(crate) source: MigrationSource,
    holdings: watch::Receiver<usize>,
    _tasks: JoinSet<()>,
}

impl MigrationConfig {
    /// Whether a replica may listen so.
    pub fn check(&self) -> Result<(), MigrationError> {
        if self.host.is_unspecified() {
            return Err(MigrationError::Unspecified(self.host));
        }
        if !self.host.is_loopback() && self.fleet_key.is_none() {
            return Err(MigrationError::NoKey(self.host));
        }
        Ok(())
    }
}

impl Listeners {
    pub(crate) async fn bind(config: &MigrationConfig) -> Result<Self, MigrationError> {
        config.check()?;
        fault::arm()?;
        let (control, control_address) = bind(config.host, config.control_port).await?;
        let (kv, kv_address) = bind(config.host, config.kv_port).await?;
        let kv = Listener::with_local(kv).map_err(|error| MigrationError::Bind { address: kv_address, error })?;
        Ok(Self { control, control_address, kv, kv_address })
    }
}

async fn bind(host: IpAddr, port: u16) -> Result<(TcpListener, SocketAddr), MigrationError> {
    let address = SocketAddr::new(host, port);
    let failed = |error| MigrationError::Bind { address, error };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok((listener, address))
}

impl Migration {
    /// `id` is the replica's name in the fleet; `events` are the engine's.
    pub(crate) fn start(
        config: &MigrationConfig,
        listeners: Listeners,
        (id, incarnation): (&str, u64),
        models: Models,
        numerics: &Numerics,
        engine: EngineHandle,
        events: mpsc::UnboundedReceiver<MoveEvent>,
    ) -> Self {
        let place = Place { replica: number(id), incarnation: Incarnation(incarnation) };
        let kv_layout = numerics.kv.as_ref().map(travel::layout_to_wire);
        let kv_address = listeners.kv_address.to_string();
        let hello = Hello {
            version: VERSION,
            role: Role::Replica,
            id: u64::from(place.replica.0),
            incarnation,
            numerics_id: numerics.id.clone(),
            kv_layout: kv_layout.clone(),
            freeze: Some(Freeze::Resumable),
            kv_address: Some(kv_address.clone()),
            nonce: [0; 32],
        };
        let identity = Arc::new(Identity { hello, fleet_key: config.fleet_key.clone().map(Arc::new) });
        let (inputs, receiver) = mpsc::channel(QUEUED_INPUTS);
        let (holdings_sender, holdings) = watch::channel(0);
        let mut tasks = JoinSet::new();
        tasks.spawn(control::listen(listeners.control, Arc::clone(&identity), inputs.clone()));
        tasks.spawn(kv_target::listen(listeners.kv, Arc::clone(&identity), engine.clone(), inputs.clone()));
        let actor = Actor::new(place, config.timing, models, identity, engine, inputs, holdings_sender);
        tasks.spawn(actor.run(receiver, events));
        let source = MigrationSource {
            replica: place.replica.0,
            control_address: listeners.control_address.to_string(),
            kv_address,
            fleet_key: config.fleet_key.is_some(),
            copies_prefixes: kv_layout.is_some(),
            kv_layout,
        };
        Self { source, holdings, _tasks: tasks }
    }

    /// Waits until nothing of any request is held, for so long at most.
    pub(crate) async fn drained(&mut self, patience: Duration) {
        let empty = self.holdings.wait_for(|&holdings| holdings == 0);
        if tokio::time::timeout(patience, empty).await.is_err() {
            tracing::warn!("requests that gateways run here are left at the end of the shutdown");
        }
    }
}

/// A replica's number in places: the first half of a hash of its name, the same over restarts.
fn number(id: &str) -> ReplicaId {
    ReplicaId((xxh3_64(id.as_bytes()) >> 32) as u32)
}
