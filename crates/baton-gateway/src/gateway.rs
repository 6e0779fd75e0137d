//! The gateway as a value: engines come and go through its handle while it serves.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex, OnceLock, PoisonError, atomic::AtomicUsize},
};

use axum::middleware::from_fn;
use baton_text::Tokenizer;
use baton_units::ReplicaId;
use tokio::{
    net::TcpListener,
    time::{Instant, timeout_at},
};

use crate::{
    admin, api,
    config::{ConfigError, DiscoveryConfig, EngineConfig, GatewayConfig, PublicPrefixConfig, Reloaded},
    control::{self, TaskGuard},
    discovery::Discovery,
    engine::{BaseUrl, Health},
    fleet::{EngineChanges, Fleet, Stage, Wanted},
    listener,
    priced::Responses,
    prompt::Tokenization,
    refusal::Refusal,
    snapshot,
    tenants::PublicPrefixes,
    tls,
};

/// Why a gateway stopped.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("the admin API's address {address} cannot be had: {error}; stop what listens there, or change [gateway] admin_bind")]
    Admin { address: SocketAddr, error: std::io::Error },
    #[error("the gateway's listener failed: {0}; is the address still there?")]
    Listener(#[from] std::io::Error),
}

/// The front door of a fleet. Cloning gives another handle to the same gateway.
#[derive(Clone, Debug)]
pub struct Gateway {
    shared: Arc<Shared>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) tokenization: Tokenization,
    /// Whose turn it is among engines, for paths without a price.
    pub(crate) turn: AtomicUsize,
    /// Where answers live that later requests name.
    pub(crate) responses: Responses,
    /// Where it serves the admin API; known once it serves.
    admin_address: OnceLock<SocketAddr>,
    watchers: Mutex<BTreeMap<ReplicaId, TaskGuard>>,
    /// Held while the fleet is made what it says, so that no older word overtakes a newer one.
    discovery: Mutex<Discovery>,
    /// In force.
    config: Mutex<GatewayConfig>,
}

impl Shared {
    /// Only processes of this machine can reach the admin API.
    pub(crate) fn is_loopback(&self) -> bool {
        self.admin_address.get().is_some_and(|address| address.ip().is_loopback())
    }

    /// Makes the fleet what `change` made of the engines that there are to be, where it says that they are others. Gives back how many are
    /// new or changed, and how many are gone.
    pub(crate) fn rearrange(&self, change: impl FnOnce(&mut Discovery) -> bool) -> (usize, usize) {
        let mut discovery = self.discovery.lock().unwrap_or_else(PoisonError::into_inner);
        if change(&mut discovery) { self.set_engines(discovery.wanted()) } else { (0, 0) }
    }

    fn set_public_prefixes(&self, prefixes: &[PublicPrefixConfig]) {
        let systems = prefixes.iter().filter_map(|prefix| prefix.system.as_ref());
        let texts = prefixes.iter().filter_map(|prefix| prefix.text.as_ref());
        let systems = systems.map(|system| self.tokenization.system_prefix(system.as_str()));
        let all: Vec<_> = systems.chain(texts.map(|text| self.tokenization.text_prefix(text.as_str()))).collect();
        let unknown = all.iter().filter(|tokens| tokens.is_none()).count();
        if unknown > 0 {
            tracing::warn!(
                unknown,
                "public prefixes are not shared: without the model's tokenizer their tokens are not known, nor where its template takes no system prompt"
            );
        }
        self.fleet.set_public_prefixes(PublicPrefixes::new(all.into_iter().flatten().collect()));
    }

    fn set_engines(&self, wanted: Vec<Wanted>) -> (usize, usize) {
        let draining: BTreeMap<_, bool> =
            wanted.iter().filter_map(|wanted| Some((wanted.found.as_ref()?.member, wanted.found.as_ref()?.draining))).collect();
        let EngineChanges { fresh, gone } = self.fleet.set_engines(wanted);
        for engine in self.fleet.engines() {
            if let Some(draining) = engine.member.and_then(|member| draining.get(&member)) {
                self.fleet.drain_as_found(&engine, *draining);
            }
        }
        let mut watchers = self.watchers.lock().unwrap_or_else(PoisonError::into_inner);
        watchers.retain(|id, _| !gone.contains(id));
        let counts = (fresh.len(), gone.len());
        for engine in fresh {
            let id = engine.id;
            watchers.insert(id, TaskGuard::spawn(control::watch(self.fleet.clone(), engine)));
        }
        counts
    }
}

impl Gateway {
    /// A gateway that watches the configured engines from here on. `text` is the served model's tokenizer, where it is known; without
    /// it prompts are estimated. Must be called within a tokio runtime.
    pub fn new(config: GatewayConfig, text: Option<Arc<Tokenizer>>) -> Result<Self, ConfigError> {
        config.check()?;
        let fleet_key = config.gateway.fleet_key_file.as_deref().map(baton_link::read_fleet_key).transpose()?;
        let tls = config.gateway.tls.as_ref().map(tls::server).transpose()?;
        let tokenization = Tokenization::new(text.clone(), config.gateway.text_cache_bytes);
        let shared = Shared {
            fleet: Arc::new(Fleet::new(config.gateway.clone(), &config.policy).carrying(fleet_key, text)),
            tokenization,
            turn: AtomicUsize::new(0),
            responses: Responses::default(),
            admin_address: OnceLock::new(),
            watchers: Mutex::default(),
            discovery: Mutex::default(),
            config: Mutex::new(config.clone()),
        };
        shared.fleet.set_tls(tls);
        shared.fleet.set_tenants(&config);
        shared.set_public_prefixes(&config.public_prefixes);
        shared.fleet.set_moves(config.moves);
        let gateway = Self { shared: Arc::new(shared) };
        gateway.configure(config.engines, Some(&config.discovery));
        Ok(gateway)
    }

    /// Goes on under another configuration, without a stream that ends for it.
    pub fn reload(&self, config: &GatewayConfig) -> Result<Reloaded, ConfigError> {
        config.check()?;
        let tls = config.gateway.tls.as_ref().map(tls::server).transpose()?;
        let mut current = self.shared.config.lock().unwrap_or_else(PoisonError::into_inner);
        let (config, at_next_start) = current.replaced_by(config);
        let fleet = &self.shared.fleet;
        fleet.set_front(config.gateway.clone());
        fleet.with_router(|router, _| router.reconfigure(config.policy.router()));
        fleet.set_moves(config.moves.clone());
        fleet.set_tls(tls);
        fleet.set_tenants(&config);
        self.shared.set_public_prefixes(&config.public_prefixes);
        let (engines_started, engines_gone) = self.configure(config.engines.clone(), Some(&config.discovery));
        *current = config;
        Ok(Reloaded { engines_started, engines_gone, at_next_start })
    }

    /// Replaces the engines of the configuration; those that sources name beside them stay. One that is named as before (without a name: at the
    /// same address) keeps its id, and its state where nothing of its configuration changed; new ones take the ids that are free. Requests that
    /// run at an engine which is left out and cannot move end there as they would have.
    /// Gives back how many are new or changed, and how many are gone.
    pub fn set_engines(&self, engines: Vec<EngineConfig>) -> (usize, usize) {
        self.configure(engines, None)
    }

    fn configure(&self, engines: Vec<EngineConfig>, sources: Option<&[DiscoveryConfig]>) -> (usize, usize) {
        self.shared.rearrange(|discovery| {
            discovery.configure(&self.shared, engines, sources);
            true
        })
    }

    /// The replica was started (again), perhaps at another address: it is probed at once and used when it answers.
    pub fn replica_up(&self, id: ReplicaId, url: BaseUrl) {
        if let Some(engine) = self.shared.fleet.engine(id) {
            engine.move_to(url);
            engine.probe.notify_one();
        }
    }

    /// The replica's process is gone: nothing is sent to it until it answers a probe.
    pub fn replica_down(&self, id: ReplicaId) {
        let fleet = &self.shared.fleet;
        let Some(engine) = fleet.engine(id) else { return };
        fleet.set_unready(&engine, Health::Dead);
        fleet.with_desk(|desk, now| desk.gone(id, now));
    }

    /// Replicas that take requests.
    pub fn ready_replicas(&self) -> usize {
        self.shared.fleet.ready_replicas()
    }

    /// Ends when at least `replicas` take requests.
    pub async fn until_ready(&self, replicas: usize) {
        self.shared.fleet.until_ready(replicas).await;
    }

    /// Serves until `shutdown`; then `/ready` says 503, new requests are refused, running ones get until the drain deadline, and the
    /// rest end with an error event.
    pub async fn serve(&self, listener: TcpListener, shutdown: impl Future<Output = ()> + Send) -> Result<(), GatewayError> {
        let shared = self.shared.clone();
        let admin_listener = match shared.fleet.front().admin_bind {
            Some(address) => Some(TcpListener::bind(address).await.map_err(|error| GatewayError::Admin { address, error })?),
            None => None,
        };
        let address = admin_listener.as_ref().unwrap_or(&listener).local_addr()?;
        // A second `serve` of the same gateway keeps the first address; both are of one configuration.
        _ = shared.admin_address.set(address);
        if shared.fleet.front().admin_key.is_none() && !address.ip().is_loopback() {
            tracing::warn!(%address, "no admin_key is set and the address is not loopback: /baton/v1 is off");
        }
        let mut routes = api::routes(&shared);
        if admin_listener.is_none() {
            routes = routes.merge(admin::routes(&shared));
        }
        let admin_task = admin_listener.map(|listener| {
            tracing::info!(%address, "the admin API has an address of its own");
            TaskGuard::spawn(serve_admin(shared.clone(), listener))
        });
        let app = routes.method_not_allowed_fallback(async || Refusal::MethodNotAllowed);
        let app = app.layer(from_fn(api::echo_request_id)).with_state(shared.clone());
        let door = api::Door::new(shared.clone(), app);
        let fleet = shared.fleet.clone();
        let timer = TaskGuard::spawn(async move { fleet.keep_time().await });
        let fleet = shared.fleet.clone();
        let desk = TaskGuard::spawn(async move { fleet.keep_desk().await });
        let fleet = shared.fleet.clone();
        let balance = TaskGuard::spawn(async move { fleet.keep_balance().await });
        let keeper = TaskGuard::spawn(snapshot::keep(shared.fleet.clone()));
        let draining = async {
            self.drain_after(shutdown).await;
            drop((timer, desk, balance));
        };
        tokio::join!(listener::serve(listener, door, shared.fleet.clone()), draining);
        drop((keeper, admin_task));
        snapshot::save(shared.fleet.clone()).await;
        Ok(())
    }

    async fn drain_after(&self, shutdown: impl Future<Output = ()>) {
        shutdown.await;
        let fleet = &self.shared.fleet;
        tracing::info!(requests = fleet.live().len(), timeout = ?fleet.front().drain_timeout, "draining");
        fleet.set_stage(Stage::Draining);
        let deadline = Instant::now() + fleet.front().drain_timeout;
        let drained = timeout_at(deadline, fleet.emptied()).await.is_ok();
        if !drained {
            tracing::warn!(requests = fleet.live().len(), "drain deadline passed: the rest end with an error");
        }
        fleet.set_stage(Stage::Closing);
    }
}

/// The admin API alone, for as long as the gateway runs.
async fn serve_admin(shared: Arc<Shared>, listener: TcpListener) {
    let app = admin::own_routes(&shared).method_not_allowed_fallback(async || Refusal::MethodNotAllowed);
    let app = app.fallback(async || Refusal::NoSuchPath).with_state(shared);
    if let Err(error) = axum::serve(listener, app).await {
        tracing::error!(%error, "the admin API ended");
    }
}
