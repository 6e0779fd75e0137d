//! The engines, the router that chooses among them, and the requests that run: what the data path and the control loops share.

use std::{
    collections::{BTreeMap, HashMap, HashSet, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use arc_swap::{ArcSwap, ArcSwapOption};
use baton_cost::StepCoefficients;
use baton_discovery::MemberId;
use baton_kv::{Applied, Copying, IndexReader, KvEventBatch, Snapshot};
use baton_link::Identity;
use baton_migration::GatewayName;
use baton_openai::{Limits, Service};
use baton_policy::{Arrival, Outcome, Placed, ReplicaSpec, ReplicaState, Router, Verdict};
use baton_session::Fault;
use baton_text::Tokenizer;
use baton_units::{BlockSize, Incarnation, Priority, ReplicaId, RequestId, Time, Tokens};
use baton_wire::{migration::handshake::FleetKey, openai::ModelCard};
use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::sync::{Notify, oneshot, watch};
use tokio_rustls::rustls::ServerConfig;

use crate::{
    carry::{Desk, Effect, Rounds},
    clock::Clock,
    config::{EngineConfig, FrontConfig, GatewayConfig, MovesConfig, PolicyConfig},
    engine::{Drain, DrainOrder, Engine, Health},
    live::Live,
    metrics::Metrics,
    refusal::{NO_REPLICA_RETRY, Refusal},
    retries::Retries,
    snapshot::{Former, SnapshotFile},
    speed::{Likeness, Speed, Speeds},
    tenants::{Grant, PublicPrefixes, Tenants},
    upstream::Upstream,
};

/// Blocks of events, or of what is dropped or restored, that are taken in while others wait: some 0.05 ms.
const TAKEN_IN_AT_ONCE: usize = 128;
/// Places of the index that are copied while others wait.
const COPIED_AT_ONCE: usize = 1024;
/// Between looks at all engines' models for one that nobody is known to have: clients that ask for such keep no engine busy.
const MODELS_MISSED_EVERY: Duration = Duration::from_secs(1);

/// Longest rest that an engine is given at its word.
const REST_MAX: Duration = Duration::from_mins(5);

/// Names the replica that answers.
pub(crate) const REPLICA_HEADER: HeaderName = HeaderName::from_static("x-baton-replica");

/// How far the gateway is from its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    Serving,
    /// No new requests; running ones go on.
    Draining,
    /// Running ones end now.
    Closing,
}

#[derive(Debug)]
pub(crate) struct Fleet {
    pub(crate) clock: Clock,
    front: ArcSwap<FrontConfig>,
    pub(crate) metrics: Metrics,
    pub(crate) upstream: Upstream,
    /// What a gateway before this one knew, where that is kept.
    pub(crate) snapshot: Option<SnapshotFile>,
    /// Bound of the router's index.
    pub(crate) index_bytes_max: usize,
    /// By id; a place is free after its engine was taken out, until another one comes.
    engines: RwLock<Vec<Option<Arc<Engine>>>>,
    /// The last life of any engine that has left its place. Who comes there counts on from it, so that what still runs at one that left is not
    /// taken for the newcomer's.
    lives_ended: Mutex<BTreeMap<ReplicaId, Incarnation>>,
    catalogue: RwLock<Arc<Catalogue>>,
    /// When a client last asked for a model that nobody has, and the engines were asked again.
    models_missed: Mutex<Option<Time>>,
    /// Fair where it is asked to be: writers of the index hand it to who waits.
    placement: parking_lot::Mutex<Placement>,
    /// Of the router's index, for matches without its lock.
    reader: IndexReader,
    /// Read by each batch of events on its way in, written by a copy of the index: between batches only.
    events: tokio::sync::RwLock<()>,
    /// When the router wants to be asked again, for the task that does so.
    timer: Notify,
    timer_at: AtomicU64,
    /// What replicas run over control connections.
    desk: parking_lot::Mutex<Desk>,
    /// When the desk wants to be asked again, for the task that does so.
    desk_timer: Notify,
    desk_timer_at: AtomicU64,
    rounds: parking_lot::Mutex<Rounds>,
    moves: ArcSwap<MovesConfig>,
    tenants: ArcSwap<Tenants>,
    public_prefixes: ArcSwap<PublicPrefixes>,
    /// With what clients are served over TLS.
    tls: ArcSwapOption<ServerConfig>,
    /// Told when a request has arrived where it moved to.
    pub(crate) arrived: Notify,
    identity: Identity,
    /// The served model's, where it is known.
    tokenizer: Option<Arc<Tokenizer>>,
    requests: Mutex<Requests>,
    speeds: Mutex<Speeds>,
    retries: Mutex<Retries>,
    /// Told when the last request ends.
    empty: Notify,
    next_request: AtomicU64,
    /// Tells this process's requests from those of its predecessor at the engines.
    incarnation: u64,
    stage: watch::Sender<Stage>,
    /// Replicas that take requests.
    ready: watch::Sender<usize>,
}

/// The router with those who wait for its verdict; one lock, held for one call.
#[derive(Debug)]
struct Placement {
    router: Router,
    waiting: HashMap<RequestId, oneshot::Sender<Verdict>>,
    /// Of the first engine that told one: keys of requests are cut by it.
    block_size: Option<BlockSize>,
}

#[derive(Debug, Default)]
struct Requests {
    live: BTreeMap<RequestId, Arc<Live>>,
    /// The latest ids that clients know, for decisions; as many as the router keeps decisions.
    named: HashMap<String, RequestId>,
    names: VecDeque<Named>,
    names_kept: usize,
}

/// What a request is called outside.
#[derive(Debug, Clone)]
pub(crate) struct Named {
    request: RequestId,
    /// By its client.
    pub(crate) client_id: String,
    /// Of the trace that it is part of.
    pub(crate) trace_id: Option<String>,
}

/// The models that engines serve or served, made anew when one tells another list.
#[derive(Debug, Default)]
pub(crate) struct Catalogue {
    /// By name.
    pub(crate) models: BTreeMap<String, Listed>,
    /// Of any engine.
    pub(crate) longest_context: Option<Tokens>,
}

#[derive(Debug)]
pub(crate) struct Listed {
    pub(crate) card: ModelCard,
    /// Replicas that do not serve it.
    pub(crate) lacking: Vec<ReplicaId>,
    /// All others let a salt count from a later token than the first on.
    pub(crate) takes_public: bool,
}

/// An engine that is to be in the fleet.
#[derive(Debug)]
pub(crate) struct Wanted {
    pub(crate) config: EngineConfig,
    /// Where a source names it.
    pub(crate) found: Option<Found>,
    /// Which one of those behind the address.
    pub(crate) rank: Option<u32>,
}

/// An engine that a source names.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    pub(crate) member: MemberId,
    pub(crate) source: Arc<str>,
    /// It is on its way out.
    pub(crate) draining: bool,
}

/// What makes an engine the one that it was: a source's word; else its name where it has one, else its address; and its rank there.
#[derive(Debug, PartialEq, Eq, Hash)]
enum Known {
    Found(MemberId, Option<u32>),
    Name(String),
    Address(String, Option<u32>),
}

impl Known {
    fn of(config: &EngineConfig, member: Option<MemberId>, rank: Option<u32>) -> Self {
        match (member, &config.name) {
            (Some(member), _) => Self::Found(member, rank),
            (None, Some(name)) => Self::Name(name.clone()),
            (None, None) => Self::Address(config.url.to_string(), rank),
        }
    }
}

impl From<EngineConfig> for Wanted {
    fn from(config: EngineConfig) -> Self {
        Self { config, found: None, rank: None }
    }
}

impl Wanted {
    /// Each rank as an engine of its own.
    fn by_rank(self) -> Vec<Self> {
        let Some(ranks) = self.config.ranks() else { return vec![self] };
        let of_rank = |rank| {
            let config = EngineConfig { name: self.config.rank_name(rank), ..self.config.clone() };
            Self { config, found: self.found.clone(), rank: Some(rank) }
        };
        (0..ranks).map(of_rank).collect()
    }
}

/// What became of the engines that there were.
pub(crate) struct EngineChanges {
    /// New or changed: their watchers are to start.
    pub(crate) fresh: Vec<Arc<Engine>>,
    /// No longer there; a place among these may have been given to one of the others.
    pub(crate) gone: Vec<ReplicaId>,
}

/// A verdict now, or later.
pub(crate) enum Placing {
    Now(Verdict),
    Later(oneshot::Receiver<Verdict>),
}

impl Fleet {
    pub(crate) fn new(front: FrontConfig, policy: &PolicyConfig) -> Self {
        let router = Router::new(policy.router(), policy.seed);
        let incarnation = fastrand::u64(..);
        // A gateway keeps no identity over a restart: what it left at replicas ends by its leases.
        let name = GatewayName { id: fastrand::u64(..), incarnation };
        Self {
            clock: Clock::new(),
            metrics: Metrics::default(),
            upstream: Upstream::new(&front),
            snapshot: policy.index_snapshot.clone().map(SnapshotFile::open),
            index_bytes_max: policy.index_bytes,
            engines: RwLock::default(),
            lives_ended: Mutex::default(),
            catalogue: RwLock::default(),
            models_missed: Mutex::default(),
            reader: router.index().reader(),
            placement: parking_lot::Mutex::new(Placement { router, waiting: HashMap::new(), block_size: None }),
            events: tokio::sync::RwLock::default(),
            timer: Notify::new(),
            timer_at: AtomicU64::new(u64::MAX),
            desk: parking_lot::Mutex::new(Desk::new(name)),
            desk_timer: Notify::new(),
            desk_timer_at: AtomicU64::new(u64::MAX),
            rounds: parking_lot::Mutex::new(Rounds::new(policy.quiet_from.map(Priority))),
            moves: ArcSwap::default(),
            tenants: ArcSwap::default(),
            public_prefixes: ArcSwap::default(),
            tls: ArcSwapOption::empty(),
            arrived: Notify::new(),
            identity: Identity::of_gateway(name, None),
            tokenizer: None,
            requests: Mutex::new(Requests { names_kept: policy.decisions, ..Requests::default() }),
            speeds: Mutex::default(),
            retries: Mutex::default(),
            empty: Notify::new(),
            next_request: AtomicU64::new(1),
            incarnation,
            stage: watch::Sender::new(Stage::Serving),
            ready: watch::Sender::new(0),
            front: ArcSwap::from_pointee(front),
        }
    }

    /// With what it takes to run requests over control connections: the key that these ask for, and the served model's tokenizer.
    #[must_use]
    pub(crate) fn carrying(mut self, fleet_key: Option<FleetKey>, tokenizer: Option<Arc<Tokenizer>>) -> Self {
        self.identity.fleet_key = fleet_key.map(Arc::new);
        self.tokenizer = tokenizer;
        self
    }

    /// How it serves, as of now.
    pub(crate) fn front(&self) -> Arc<FrontConfig> {
        self.front.load_full()
    }

    pub(crate) fn set_front(&self, front: FrontConfig) {
        self.front.store(Arc::new(front));
    }

    /// Which requests may move, as of now.
    pub(crate) fn moves(&self) -> Arc<MovesConfig> {
        self.moves.load_full()
    }

    pub(crate) fn set_moves(&self, moves: MovesConfig) {
        self.moves.store(Arc::new(moves));
    }

    /// Who may ask, as of now.
    pub(crate) fn tenants(&self) -> Arc<Tenants> {
        self.tenants.load_full()
    }

    pub(crate) fn set_tenants(&self, config: &GatewayConfig) {
        self.tenants.store(Arc::new(self.tenants().replaced_by(config, self.clock.now())));
    }

    /// What salts need not hide, as of now.
    pub(crate) fn public_prefixes(&self) -> Arc<PublicPrefixes> {
        self.public_prefixes.load_full()
    }

    pub(crate) fn set_public_prefixes(&self, prefixes: PublicPrefixes) {
        self.public_prefixes.store(Arc::new(prefixes));
        self.tell_unshared(&Catalogue::default(), &self.catalogue());
    }

    /// Says which models have their public prefixes apart for each tenant all the same, where that was not so before.
    fn tell_unshared(&self, before: &Catalogue, now: &Catalogue) {
        if self.public_prefixes().is_empty() {
            return;
        }
        for (model, _) in now.models.iter().filter(|(_, listed)| !listed.takes_public) {
            if before.models.get(model).is_none_or(|listed| listed.takes_public) {
                tracing::warn!(model, "public prefixes are not shared among salted tenants: not all engines of the model are Baton's");
            }
        }
    }

    /// How the next client is served: over TLS with this, or in the clear.
    pub(crate) fn tls(&self) -> Option<Arc<ServerConfig>> {
        self.tls.load_full()
    }

    pub(crate) fn set_tls(&self, server: Option<Arc<ServerConfig>>) {
        self.tls.store(server);
    }

    /// Lets in a request of the tenant whose key its headers have; without a grant where the gateway is open.
    pub(crate) fn enter(&self, headers: &HeaderMap) -> Result<Option<Grant>, Refusal> {
        self.tenants().of(headers)?.map(|tenant| tenant.enter(self.clock)).transpose()
    }

    // The router.

    /// Calls the router and passes on what the call released.
    pub(crate) fn with_router<R>(&self, call: impl FnOnce(&mut Router, Time) -> R) -> R {
        let now = self.clock.now();
        let mut placement = self.placement.lock();
        let result = call(&mut placement.router, now);
        self.release_held(&mut placement, now);
        result
    }

    /// As [`Self::with_router`], for calls that free no place.
    pub(crate) fn peek_router<R>(&self, call: impl FnOnce(&mut Router, Time) -> R) -> R {
        call(&mut self.placement.lock().router, self.clock.now())
    }

    /// Chooses; [`Self::keep_books`] is to be called once the request is on its way.
    pub(crate) fn place(&self, arrival: Arrival) -> Placing {
        // One that rests comes back when it said, and not before.
        if *self.ready.borrow() == 0 && self.engines().iter().any(|engine| engine.rests_for(self.clock.now()).is_some()) {
            return Placing::Now(Verdict::Refuse(baton_policy::Refusal::NoReplica));
        }
        let matched = self.reader.matches(&arrival.keys);
        let now = self.clock.now();
        let request = arrival.request;
        let mut placement = self.placement.lock();
        let verdict = placement.router.decide(arrival, Some(matched), now);
        let placing = if verdict == Verdict::Hold {
            let (tell, told) = oneshot::channel();
            placement.waiting.insert(request, tell);
            Placing::Later(told)
        } else {
            Placing::Now(verdict)
        };
        self.release_held(&mut placement, now);
        placing
    }

    /// Enters in the index what was placed; not before it was sent, since it takes longer than the choice.
    pub(crate) fn keep_books(&self) {
        self.placement.lock().router.keep_books();
    }

    /// A request ended before it heard its verdict: a copy that the verdict may have brought is not made.
    pub(crate) fn decline(&self, mut told: oneshot::Receiver<Verdict>) {
        // From here on a verdict that comes goes back to who sends it.
        told.close();
        if let Ok(Verdict::Run(Placed { copy: Some(copy), .. })) = told.try_recv() {
            self.finished(copy.request, Outcome::Cancelled, None);
        }
    }

    /// Releases all that is booked for a request, wherever it was.
    pub(crate) fn finished(&self, request: RequestId, outcome: Outcome, keys: Option<Arc<[baton_kv::BlockKey]>>) {
        let now = self.clock.now();
        let mut placement = self.placement.lock();
        placement.waiting.remove(&request);
        placement.router.finished(request, outcome, keys, now);
        self.release_held(&mut placement, now);
    }

    /// A verdict whose request has left meanwhile is released by that request's own end; a copy in it is no part of the request.
    fn release_held(&self, placement: &mut Placement, now: Time) {
        for (request, verdict) in placement.router.released(now) {
            let Some(tell) = placement.waiting.remove(&request) else { continue };
            if let Err(Verdict::Run(Placed { copy: Some(copy), .. })) = tell.send(verdict) {
                placement.router.finished(copy.request, Outcome::Cancelled, None, now);
            }
        }
        let next = placement.router.next_timeout().map_or(u64::MAX, |time| time.0);
        if next < self.timer_at.swap(next, Ordering::Relaxed) {
            self.timer.notify_one();
        }
    }

    /// Asks the router again when it wants to be asked; runs as long as the gateway.
    pub(crate) async fn keep_time(&self) {
        loop {
            let next = Time(self.timer_at.load(Ordering::Relaxed));
            tokio::select! {
                () = tokio::time::sleep_until(self.clock.instant(next)) => {}
                () = self.timer.notified() => continue,
            }
            self.with_router(|_, _| ());
        }
    }

    // Requests that are carried.

    /// Calls the desk, and does what follows from the call.
    pub(crate) fn with_desk<R>(&self, call: impl FnOnce(&mut Desk, Time) -> R) -> R {
        let mut desk = self.desk.lock();
        let result = call(&mut desk, self.clock.now());
        let effects = desk.take_effects();
        let next = desk.poll_timeout().0;
        let earlier = next < self.desk_timer_at.swap(next, Ordering::Relaxed);
        drop(desk);
        if earlier {
            self.desk_timer.notify_one();
        }
        let arrived = effects.iter().any(|effect| matches!(effect, Effect::Arrived { .. }));
        for effect in effects {
            self.follow(effect);
        }
        if arrived {
            self.arrived.notify_one();
        }
        result
    }

    fn follow(&self, effect: Effect) {
        match effect {
            Effect::Suspected { replica, suspicion } => {
                let Some(engine) = self.engine(replica) else { return };
                if engine.facts().health == Health::Ready {
                    tracing::warn!(replica = %engine.name, %suspicion, "replica is suspected");
                    self.set_unready(&engine, Health::Suspect);
                }
                engine.probe.notify_one();
            }
            Effect::Trusted { replica } => {
                if let Some(engine) = self.engine(replica) {
                    engine.probe.notify_one();
                }
            }
            Effect::Arrived { request, to } => _ = self.with_router(|router, now| router.moved(request, to, now)),
            Effect::Settled { request } => self.rounds().settled(request),
            Effect::Ended(record) => {
                let step_s = self.step_s(record.from);
                self.rounds().observe(&record, step_s);
                self.metrics.move_ended(&record);
                let name = |id: ReplicaId| self.engine(id).map_or_else(|| id.to_string(), |engine| engine.name.clone());
                tracing::info!(
                    request = %record.request, choice = record.choice, from = name(record.from), to = name(record.to),
                    outcome = record.outcome.name(), why = record.why, bytes_sent = record.bytes_sent, blocks_already_held = record.blocks_already_held,
                    gap_ms = record.gap_ms, took_ms = record.took_ms, "move: {}", record.reason
                );
            }
        }
    }

    /// Asks the desk again when it wants to be asked; runs as long as the gateway.
    pub(crate) async fn keep_desk(&self) {
        loop {
            let next = Time(self.desk_timer_at.load(Ordering::Relaxed));
            tokio::select! {
                () = tokio::time::sleep_until(self.clock.instant(next)) => self.with_desk(Desk::timeout),
                () = self.desk_timer.notified() => {}
            }
        }
    }

    /// What decides moves. The router may be asked while it is held, the desk never: whoever has the desk may ask for this.
    pub(crate) fn rounds(&self) -> parking_lot::MutexGuard<'_, Rounds> {
        self.rounds.lock()
    }

    pub(crate) fn carry_identity(&self) -> &Identity {
        &self.identity
    }

    /// By what answers of an engine's tokens are made; none where the gateway does not know its model's tokenizer or its size.
    pub(crate) fn service(&self, engine: &Engine) -> Option<Arc<Service>> {
        let tokenizer = self.tokenizer.as_ref()?;
        let mut facts = engine.facts();
        let spec = facts.spec?;
        let fits = |service: &&Arc<Service>| service.limits.max_model_len == spec.max_model_len.0 && service.block_size == spec.block_size;
        if let Some(service) = facts.service.as_ref().filter(fits) {
            return Some(service.clone());
        }
        let service = Arc::new(Service {
            tokenizer: tokenizer.clone(),
            limits: Limits { max_model_len: spec.max_model_len.0, vocabulary: tokenizer.vocab_size() },
            eos: tokenizer.eos_ids().to_vec(),
            block_size: spec.block_size,
            orders_by_priority: true,
        });
        facts.service = Some(service.clone());
        Some(service)
    }

    /// Replicas that cannot go on with what was computed with those bits.
    pub(crate) fn cannot_go_on(&self, numerics: &str) -> Vec<ReplicaId> {
        let engines = self.engines();
        let desk = self.desk.lock();
        engines.iter().map(|engine| engine.id).filter(|id| desk.numerics_of(*id) != Some(numerics)).collect()
    }

    /// The model's tokenizer, where it is known.
    pub(crate) fn tokenizer(&self) -> Option<&Arc<Tokenizer>> {
        self.tokenizer.as_ref()
    }

    /// Replicas that cannot go on with a stream of the model from its tokens: by what they are, or because they compute other bits than
    /// `numerics` where that matters.
    pub(crate) fn cannot_resume(&self, model: &str, numerics: Option<&str>) -> Vec<ReplicaId> {
        let can = |engine: &Engine| {
            engine.config.kind.token_api().is_some()
                && engine.knows_tokens()
                && engine.model(model).is_some()
                && numerics.is_none_or(|numerics| engine.numerics(model) == numerics)
        };
        self.engines().iter().filter(|engine| !can(engine)).map(|engine| engine.id).collect()
    }

    // The index.

    /// Takes in a batch of a replica's events, in slices between which requests go.
    pub(crate) async fn kv_events(&self, id: ReplicaId, life: Incarnation, batch: KvEventBatch) -> Applied {
        let _between_copies = self.events.read().await;
        let batch = Arc::new(batch);
        let applied = self.with_router(|router, now| router.begin_kv_events(id, life, batch.clone(), now));
        self.take_in(id).await;
        // What it was made of is freed here, and not while others wait.
        drop(batch);
        applied
    }

    /// Goes on without batches of a replica's events that nobody has.
    pub(crate) async fn skip_kv_gap(&self, id: ReplicaId) {
        let _between_copies = self.events.read().await;
        self.with_router(|router, _| router.begin_skip_kv_gap(id));
        self.take_in(id).await;
    }

    /// Goes on with what was begun of a replica's cache until all is in.
    pub(crate) async fn take_in(&self, id: ReplicaId) {
        while self.take_in_some(id) {
            tokio::task::yield_now().await;
        }
    }

    fn take_in_some(&self, id: ReplicaId) -> bool {
        let mut placement = self.placement.lock();
        let more = placement.router.take_in(id, TAKEN_IN_AT_ONCE, self.clock.now());
        parking_lot::MutexGuard::unlock_fair(placement);
        more
    }

    /// Drops what is known of a replica's cache, but not if it is of this life, before the router would drop it at once. It takes no
    /// requests from here on.
    fn clear_ahead(&self, id: ReplicaId, unless: Option<Incarnation>) {
        self.with_router(|router, now| {
            if router.begin_clear(id, unless) {
                router.set_state(id, ReplicaState::Suspect, now);
            }
        });
        self.in_parts(|router, now| router.take_in(id, TAKEN_IN_AT_ONCE, now));
    }

    /// Copies what is known of the replicas. Events wait until all is copied, requests for a part only.
    pub(crate) fn copy_index(&self, replicas: &[ReplicaId]) -> Copying {
        let _no_batch = self.events.blocking_write();
        for id in replicas {
            // Whoever followed its events may have been stopped amid a batch.
            self.in_parts(|router, now| router.take_in(*id, TAKEN_IN_AT_ONCE, now));
        }
        let mut copying = self.peek_router(|router, now| router.index().begin_copy(replicas.iter().copied(), now));
        self.in_parts(|router, _| router.index().copy_some(&mut copying, COPIED_AT_ONCE));
        copying
    }

    /// Calls the router until it is done, and lets in between in who waits.
    fn in_parts(&self, mut part: impl FnMut(&mut Router, Time) -> bool) {
        let mut placement = self.placement.lock();
        while part(&mut placement.router, self.clock.now()) {
            parking_lot::MutexGuard::bump(&mut placement);
        }
    }

    /// Tokens per block by which prompts are cut, once an engine has told.
    pub(crate) fn block_size(&self) -> BlockSize {
        self.placement.lock().block_size.unwrap_or_default()
    }

    // The engines.

    pub(crate) fn engines(&self) -> Vec<Arc<Engine>> {
        self.engines.read().unwrap_or_else(PoisonError::into_inner).iter().flatten().cloned().collect()
    }

    pub(crate) fn engine(&self, id: ReplicaId) -> Option<Arc<Engine>> {
        self.engines.read().unwrap_or_else(PoisonError::into_inner).get(id.index()).cloned().flatten()
    }

    /// The engine's name for a header of an answer, where clients are to know it.
    pub(crate) fn shown_name(&self, engine: &Engine) -> Option<HeaderValue> {
        if self.front().expose_replica { HeaderValue::from_str(&engine.name).ok() } else { None }
    }

    /// Replaces the engines. One that is [known](Known) keeps its place, and if nothing else of it changed its state.
    pub(crate) fn set_engines(&self, wanted: impl IntoIterator<Item: Into<Wanted>>) -> EngineChanges {
        let idle_connections = self.front().idle_connections;
        let wanted: Vec<Wanted> = wanted.into_iter().map(Into::into).flat_map(Wanted::by_rank).collect();
        let mut engines = self.engines.write().unwrap_or_else(PoisonError::into_inner);
        let mut former = std::mem::take(&mut *engines);
        engines.resize(former.len(), None);
        let known = |engine: &Arc<Engine>| Known::of(&engine.config, engine.member, engine.rank);
        let places: HashMap<Known, usize> =
            former.iter().enumerate().filter_map(|(place, engine)| Some((known(engine.as_ref()?), place))).collect();
        let names: HashSet<String> = wanted.iter().filter_map(|wanted| wanted.config.name.clone()).collect();
        let leave = |engine: &Engine| {
            // A look at it may be under way, which begins one more.
            let last = Incarnation(engine.facts().life.0 + 1);
            lock(&self.lives_ended).insert(engine.id, last);
        };
        let mut fresh = Vec::new();
        let mut start = |place: usize, wanted: Wanted| {
            let id = ReplicaId(place as u32);
            let before = lock(&self.lives_ended).get(&id).copied().unwrap_or_default();
            let engine = Arc::new(Engine::new(id, before, wanted, idle_connections));
            fresh.push(engine.clone());
            engine
        };
        let mut new = Vec::new();
        for wanted in wanted {
            let place = places.get(&Known::of(&wanted.config, wanted.found.as_ref().map(|found| found.member), wanted.rank));
            match place.and_then(|place| Some((*place, former[*place].take()?))) {
                Some((place, engine)) if engine.config == wanted.config => {
                    engine.facts().source = wanted.found.map(|found| found.source);
                    engines[place] = Some(engine);
                }
                Some((place, engine)) => {
                    leave(&engine);
                    engines[place] = Some(start(place, wanted));
                }
                None => new.push(wanted),
            }
        }
        former.iter().flatten().for_each(|engine| leave(engine));
        for wanted in new {
            // One without a name is called by its place, and so can be no other.
            let is_free = |place: &usize| {
                let named_otherwise = wanted.config.name.is_some() || !names.contains(&ReplicaId(*place as u32).to_string());
                engines.get(*place).is_none_or(Option::is_none) && named_otherwise
            };
            let place = (0..=engines.len() + names.len()).find(is_free).expect("no more places are taken or named than these");
            if place >= engines.len() {
                engines.resize(place + 1, None);
            }
            engines[place] = Some(start(place, wanted));
        }
        let gone: Vec<ReplicaId> = former.into_iter().flatten().map(|engine| engine.id).collect();
        drop(engines);
        lock(&self.speeds).forget(&gone);
        self.metrics.forget(&gone);
        self.list_models();
        for id in gone.iter().copied().chain(fresh.iter().map(|engine| engine.id)) {
            self.clear_ahead(id, None);
            self.with_router(|router, _| router.remove_replica(id));
            // What it ran over its control connection goes on elsewhere.
            self.with_desk(|desk, now| desk.gone(id, now));
        }
        self.health_changed();
        EngineChanges { fresh, gone }
    }

    /// The engine answered and told its shape: it takes requests from here on. `former` is what was known of this life of it before the
    /// gateway started, to be [taken in](Self::take_in). Of an engine that has left, a word that comes too late counts for nothing.
    pub(crate) fn engine_ready(&self, spec: ReplicaSpec, former: Option<&Former>) {
        if self.has_left(&spec) {
            return;
        }
        self.clear_ahead(spec.id, Some(spec.incarnation));
        let former = former.map(|former| (Snapshot::read(&former.index), former.age()));
        let now = self.clock.now();
        let mut placement = self.placement.lock();
        // Whoever leaves is taken out of the router after this is known.
        if self.has_left(&spec) {
            return;
        }
        let common = *placement.block_size.get_or_insert(spec.block_size);
        if common != spec.block_size {
            tracing::warn!(
                replica = %spec.id, block_size = spec.block_size.get(), fleet = common.get(),
                "engine has another block size than the fleet; its prefixes are not found by its events"
            );
        }
        placement.router.upsert_replica(spec, now);
        let restored = former.map(|(snapshot, age)| {
            let begun = snapshot.and_then(|snapshot| placement.router.begin_restore(spec.id, snapshot, age, now));
            (begun, age)
        });
        let drains = self.engine(spec.id).is_some_and(|engine| engine.facts().draining.is_some());
        placement.router.set_state(spec.id, if drains { ReplicaState::Draining } else { ReplicaState::Ready }, now);
        self.release_held(&mut placement, now);
        drop(placement);
        match restored {
            Some((Ok(()), age)) => tracing::info!(replica = %spec.id, ?age, "index is restored from the snapshot"),
            Some((Err(error), _)) => tracing::warn!(replica = %spec.id, %error, "index not restored from the snapshot"),
            None => {}
        }
        self.health_changed();
    }

    fn has_left(&self, spec: &ReplicaSpec) -> bool {
        lock(&self.lives_ended).get(&spec.id).is_some_and(|last| spec.incarnation <= *last)
    }

    /// A request failed there: new ones go elsewhere until a probe, which starts now, succeeds.
    pub(crate) fn suspect(&self, id: ReplicaId, fault: Fault) {
        let Some(engine) = self.engine(id) else { return };
        engine.failed(fault);
        if engine.facts().health != Health::Ready {
            return;
        }
        tracing::warn!(replica = %engine.name, %fault, "replica is suspect");
        self.set_unready(&engine, Health::Suspect);
        engine.probe.notify_one();
    }

    /// It asked not to be asked for so long, and so gets nothing new until then.
    pub(crate) fn rest(&self, engine: &Engine, span: Duration) {
        let until = self.clock.now() + span.min(REST_MAX);
        let is_ready = {
            let mut facts = engine.facts();
            facts.rests_until = Some(until);
            facts.health == Health::Ready
        };
        if is_ready {
            tracing::info!(replica = %engine.name, ?span, "replica asks to be left alone");
            self.set_unready(engine, Health::Suspect);
        }
    }

    /// When a client may try again where no replica takes its request: when the first one that rests is back, else soon.
    pub(crate) fn retry_after(&self) -> Duration {
        let now = self.clock.now();
        self.engines().iter().filter_map(|engine| engine.rests_for(now)).min().unwrap_or_default().max(NO_REPLICA_RETRY)
    }

    /// Whether a request may be tried again that an engine has refused.
    pub(crate) fn may_retry(&self) -> bool {
        lock(&self.retries).spend()
    }

    /// It answers probes and gives nobody anything.
    pub(crate) fn hung(&self, engine: &Engine, silence: Duration) {
        let fault = Fault::Stalled(silence);
        self.metrics.fault(fault);
        self.suspect(engine.id, fault);
        engine.died();
    }

    /// How fast the engine counts by what it has shown itself and what those like it have.
    pub(crate) fn blend_speed(&self, id: ReplicaId, like: Likeness, own: Speed, now: Time) -> StepCoefficients {
        lock(&self.speeds).blend(id, like, own, now)
    }

    pub(crate) fn any_ready(&self) -> bool {
        self.ready_replicas() > 0
    }

    pub(crate) fn ready_replicas(&self) -> usize {
        self.engines().iter().filter(|engine| engine.facts().takes_requests()).count()
    }

    /// To be called after an engine's health changed.
    fn health_changed(&self) {
        self.ready.send_replace(self.ready_replicas());
    }

    /// Sets what the router and those who wait for replicas know of an engine's health.
    pub(crate) fn set_unready(&self, engine: &Engine, health: Health) {
        engine.facts().health = health;
        let state = if health == Health::Dead { ReplicaState::Dead } else { ReplicaState::Suspect };
        if health == Health::Dead {
            self.clear_ahead(engine.id, None);
        }
        self.with_router(|router, now| router.set_state(engine.id, state, now));
        self.health_changed();
        if health == Health::Dead {
            engine.died();
        }
    }

    /// Requests that were sent to the replica and have not ended.
    pub(crate) fn in_flight(&self, id: ReplicaId) -> u32 {
        let statuses = self.peek_router(|router, now| router.fleet(now));
        statuses.iter().find(|status| status.id == id).map_or(0, |status| status.in_flight)
    }

    /// Notes which draining replicas are empty by now.
    pub(crate) fn note_drained(&self) {
        for engine in self.engines() {
            if engine.facts().draining.is_some_and(|drain| drain.emptied.is_none()) && self.in_flight(engine.id) == 0 {
                let now = self.clock.now();
                let mut facts = engine.facts();
                if let Some(drain) = &mut facts.draining {
                    drain.emptied = Some(now);
                    tracing::info!(replica = engine.name, took = ?now.since(drain.since), "drained");
                }
            }
        }
    }

    /// No new requests go to the engine, and those that can move leave it, until it is told otherwise. Outlives its process.
    pub(crate) fn set_draining(&self, engine: &Engine, drain: Option<Drain>) {
        let health = {
            let mut facts = engine.facts();
            facts.draining = drain;
            facts.health
        };
        if health == Health::Ready {
            let state = if drain.is_some() { ReplicaState::Draining } else { ReplicaState::Ready };
            self.with_router(|router, now| router.set_state(engine.id, state, now));
        }
        self.health_changed();
    }

    /// No new requests go to the engine, as who ordered it wants.
    pub(crate) fn begin_drain(&self, engine: &Engine, by: DrainOrder) {
        let forecast = self.forecast_drain(engine.id);
        let in_flight = self.in_flight(engine.id);
        tracing::info!(replica = engine.name, in_flight, ?by, ?forecast, "draining");
        self.set_draining(engine, Some(Drain { since: self.clock.now(), by, forecast, emptied: None }));
    }

    /// A source says whether the engine is on its way out. What an operator ordered stays.
    pub(crate) fn drain_as_found(&self, engine: &Engine, draining: bool) {
        let by = engine.facts().draining.map(|drain| drain.by);
        if draining && by.is_none() {
            self.begin_drain(engine, DrainOrder::Source);
        } else if !draining && by == Some(DrainOrder::Source) {
            tracing::info!(replica = engine.name, "takes requests again");
            self.set_draining(engine, None);
        }
    }

    /// Ends when at least `replicas` take requests.
    pub(crate) async fn until_ready(&self, replicas: usize) {
        // The sender lives as long as `self`, so waiting cannot fail.
        _ = self.ready.subscribe().wait_for(|ready| *ready >= replicas).await;
    }

    // Models.

    /// Every model that an engine serves or served, each once.
    pub(crate) fn models(&self) -> Vec<ModelCard> {
        self.catalogue().models.values().map(|listed| listed.card.clone()).collect()
    }

    pub(crate) fn catalogue(&self) -> Arc<Catalogue> {
        self.catalogue.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// To be called after an engine's models or shape changed.
    pub(crate) fn list_models(&self) {
        let engines = self.engines();
        let mut models: BTreeMap<String, Listed> = BTreeMap::new();
        let mut longest_context = None;
        for engine in &engines {
            let facts = engine.facts();
            longest_context = longest_context.max(facts.spec.map(|spec| spec.max_model_len));
            for card in &facts.models {
                models.entry(card.id.clone()).or_insert_with(|| Listed { card: card.clone(), lacking: Vec::new(), takes_public: true });
            }
        }
        for (name, listed) in &mut models {
            for engine in &engines {
                match engine.model(name) {
                    Some(_) => listed.takes_public &= engine.config.kind.takes_public(),
                    None => listed.lacking.push(engine.id),
                }
            }
        }
        let catalogue = Arc::new(Catalogue { models, longest_context });
        let before = std::mem::replace(&mut *self.catalogue.write().unwrap_or_else(PoisonError::into_inner), catalogue.clone());
        self.tell_unshared(&before, &catalogue);
    }

    /// A client asks for a model that no engine is known to have: one may have just loaded it.
    pub(crate) fn miss_model(&self) {
        let now = self.clock.now();
        let mut before = lock(&self.models_missed);
        if before.is_some_and(|before| now.since(before) < MODELS_MISSED_EVERY) {
            return;
        }
        *before = Some(now);
        drop(before);
        for engine in self.engines() {
            engine.expect_models();
        }
    }

    // Requests.

    pub(crate) fn mint(&self) -> RequestId {
        RequestId(self.next_request.fetch_add(1, Ordering::Relaxed))
    }

    /// An id for the engines: no two requests of any gateway share one, nor two attempts of a request.
    pub(crate) fn upstream_id(&self, request: RequestId, attempt: u32) -> String {
        format!("baton-{:016x}-{}-{attempt}", self.incarnation, request.0)
    }

    /// An id for a client that sent none.
    pub(crate) fn client_id(&self, request: RequestId) -> String {
        format!("req-{:08x}{:08x}", self.incarnation as u32, request.0)
    }

    /// Lists a request; the guard is to be kept until its end is booked.
    pub(crate) fn admit(self: &Arc<Self>, live: Arc<Live>) -> Booked {
        let booked = Booked { fleet: self.clone(), request: live.id };
        lock(&self.retries).earn();
        let mut requests = lock(&self.requests);
        requests.named.insert(live.client_id.clone(), live.id);
        let trace_id = live.trace.as_ref().map(|trace| trace.id.clone());
        requests.names.push_back(Named { request: live.id, client_id: live.client_id.clone(), trace_id });
        if requests.names.len() > requests.names_kept
            && let Some(Named { request, client_id, .. }) = requests.names.pop_front()
            && requests.named.get(&client_id) == Some(&request)
        {
            requests.named.remove(&client_id);
        }
        requests.live.insert(live.id, live);
        booked
    }

    pub(crate) fn retire(&self, request: RequestId) {
        let empty = {
            let mut requests = lock(&self.requests);
            requests.live.remove(&request);
            requests.live.is_empty()
        };
        if empty {
            self.empty.notify_waiters();
        }
    }

    /// Ends when no request is left.
    pub(crate) async fn emptied(&self) {
        loop {
            let mut notified = std::pin::pin!(self.empty.notified());
            notified.as_mut().enable();
            if lock(&self.requests).live.is_empty() {
                return;
            }
            notified.await;
        }
    }

    pub(crate) fn live(&self) -> Vec<Arc<Live>> {
        lock(&self.requests).live.values().cloned().collect()
    }

    /// The latest request that a client named so.
    pub(crate) fn request_named(&self, name: &str) -> Option<RequestId> {
        lock(&self.requests).named.get(name).copied()
    }

    /// Names of the latest requests by id.
    pub(crate) fn names(&self) -> HashMap<RequestId, Named> {
        lock(&self.requests).names.iter().map(|named| (named.request, named.clone())).collect()
    }

    // The end.

    pub(crate) fn stage(&self) -> Stage {
        *self.stage.borrow()
    }

    pub(crate) fn set_stage(&self, stage: Stage) {
        self.stage.send_replace(stage);
    }

    /// Ends when `stage` is reached.
    pub(crate) async fn reached(&self, stage: Stage) {
        let mut changes = self.stage.subscribe();
        // The sender lives as long as `self`, so waiting cannot fail.
        _ = changes.wait_for(|current| *current >= stage).await;
    }
}

/// Ends a request whose task panics: our bug in one must not fill a replica's books, nor keep the gateway from its end.
#[derive(Debug)]
pub(crate) struct Booked {
    fleet: Arc<Fleet>,
    request: RequestId,
}

impl Drop for Booked {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.fleet.finished(self.request, Outcome::Failed, None);
            self.fleet.retire(self.request);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The router is consistent after each call; a panic inside one is a bug that the next request should survive.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
