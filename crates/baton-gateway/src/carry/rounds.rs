//! The loop that moves requests: what the gateway knows, told to the rule that decides, and what was decided, carried out.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use baton_cost::{Link as Wire, MoveCase, MovePrice, MoveWay, StepLoad};
use baton_policy::{
    MoveTerms, PeerTerms,
    mover::{DrainForecast, FleetFacts, Move, MoveReason, Mover, MoverConfig, OrderRefusal, drain_forecast},
};
use baton_units::{Blocks, Bytes, Priority, ReplicaId, RequestId, Time, Tokens};
use baton_wire::migration::handshake::KvLayout;
use tokio::sync::oneshot::{self, error::TryRecvError};
use xxhash_rust::xxh3::xxh3_64;

use super::{
    Desk, MoveOutcome, MoveRecord, NotMovable,
    link_fit::{LATENCIES, LinkFit},
};
use crate::{
    config::MovesConfig,
    engine::Engine,
    exchange::LeaveOrder,
    fleet::Fleet,
    live::{Live, LiveState},
};

/// Between looks at the fleet, as in Llumnix.
const EVERY: Duration = Duration::from_millis(50);
/// Between the end of a drain's move and the look that begins the next one.
const AT_ONCE: Duration = Duration::from_micros(1);
/// Share of its blocks that an engine keeps free when it admits.
const WATERMARK: f64 = 0.01;

/// Decides moves, with what it goes by.
#[derive(Debug)]
pub(crate) struct Rounds {
    mover: Mover,
    /// Out of each replica, as its moves showed.
    links: BTreeMap<ReplicaId, LinkFit>,
    /// Out of any replica: what is thought of one that nothing has left yet.
    any_link: Option<LinkFit>,
    /// As the router was told last.
    peers: BTreeMap<ReplicaId, PeerTerms>,
    /// Of replicas that are to be empty, whose streams leave by themselves.
    leaves: BTreeMap<ReplicaId, Leaves>,
}

/// Streams that leave a replica one after the other.
#[derive(Debug, Default)]
struct Leaves {
    /// The one on its way, and where it tells what came of it.
    now: Option<(RequestId, oneshot::Receiver<Vec<MoveRecord>>)>,
    /// Those that could not.
    stayed: BTreeSet<RequestId>,
}

impl Leaves {
    /// Whether the next one may leave.
    fn is_free(&mut self) -> bool {
        let Some((request, told)) = &mut self.now else { return true };
        match told.try_recv() {
            Err(TryRecvError::Empty) => return false,
            Ok(records) if records.iter().any(|record| record.outcome == MoveOutcome::Stayed) => _ = self.stayed.insert(*request),
            Ok(_) | Err(TryRecvError::Closed) => {}
        }
        self.now = None;
        true
    }
}

/// A move's reason in words, and who hears how it ended.
pub(crate) type Ordered = (String, oneshot::Receiver<Vec<MoveRecord>>);

/// Why an operator's move was not begun.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotMoved {
    #[error(transparent)]
    Refused(#[from] OrderRefusal),
    #[error(transparent)]
    NotMovable(#[from] NotMovable),
}

impl Rounds {
    /// Requests from `quiet_from` on are given quiet.
    pub(crate) fn new(quiet_from: Option<Priority>) -> Self {
        let mover = Mover::new(MoverConfig { quiet_from, ..MoverConfig::default() });
        Self { mover, links: BTreeMap::new(), any_link: None, peers: BTreeMap::new(), leaves: BTreeMap::new() }
    }

    /// The replica's link, as its own moves showed it, else as all others' did, else as assumed of a replica with such steps.
    pub(crate) fn link(&self, replica: ReplicaId, step_s: f64) -> Wire {
        self.links.get(&replica).copied().or(self.any_link).unwrap_or(LinkFit::prior(step_s)).link()
    }

    /// Takes in what a move showed.
    pub(crate) fn observe(&mut self, record: &MoveRecord, step_s: f64) {
        if let Some(ms) = record.copied_ms.filter(|_| record.outcome == MoveOutcome::Moved) {
            let known = self.any_link.unwrap_or(LinkFit::prior(step_s));
            for fit in [self.links.entry(record.from).or_insert(known), self.any_link.insert(known)] {
                fit.observe(record.bytes_sent as f64, record.rounds, ms / 1e3);
            }
        }
    }

    /// The request is at rest again.
    pub(crate) fn settled(&mut self, request: RequestId) {
        self.mover.ended(request);
    }
}

impl Fleet {
    /// Looks after the fleet for as long as the gateway runs.
    pub(crate) async fn keep_balance(&self) {
        let mut ticks = tokio::time::interval(EVERY);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                // A drain moves one after the other, and goes on at once.
                () = self.arrived.notified() => {}
            }
            self.tell_peers();
            self.balance(&self.moves());
            self.leave_drained();
            self.note_drained();
        }
    }

    /// Tells the router who can bring whom cached prefixes, and how fast, where that has changed.
    fn tell_peers(&self) {
        let of = |desk: &Desk, id: ReplicaId| {
            let (group, layout) = (desk.peer_group(id)?, desk.kv_layout_of(id)?);
            let link = self.link(id);
            // A copy waits for its engines as often as a move does.
            let latency_s = LATENCIES * link.latency_s;
            let kv_bytes_per_token = bytes_per_token(layout);
            Some((id, PeerTerms { group, kv_bytes_per_token, latency_s, bytes_per_s: link.bytes_per_s }))
        };
        let engines = self.engines();
        let peers: BTreeMap<ReplicaId, PeerTerms> =
            self.with_desk(|desk, _| engines.iter().filter_map(|engine| of(desk, engine.id)).collect());
        let former = std::mem::replace(&mut self.rounds().peers, peers.clone());
        let changed: Vec<(ReplicaId, Option<PeerTerms>)> = former
            .keys()
            .chain(peers.keys())
            .filter(|id| former.get(id) != peers.get(id))
            .map(|id| (*id, peers.get(id).copied()))
            .collect();
        if !changed.is_empty() {
            self.with_router(|router, _| changed.iter().for_each(|&(id, terms)| router.set_peer_terms(id, terms)));
        }
    }

    fn balance(&self, config: &MovesConfig) {
        let now = self.clock.now();
        let facts = self.facts(now);
        if facts.replicas.len() < 2 {
            return;
        }
        let moves = self.rounds().mover.plan(&facts, &|request, on| self.cached(request, on), now);
        for decided in moves {
            // Who lost a replica is placed by its own exchange, by price.
            if matches!(decided.reason, MoveReason::Forced { .. }) {
                self.rounds().settled(decided.request);
                continue;
            }
            let request = decided.request;
            if !config.enabled && !matches!(decided.reason, MoveReason::Drain { .. }) {
                self.rounds().settled(request);
                continue;
            }
            if let Err(error) = self.with_desk(|desk, now| desk.depart(decided, None, now)) {
                tracing::debug!(%request, %error, "a move was not begun");
                self.rounds().settled(request);
            }
        }
    }

    /// Begins the move that an operator asks for; gives its reason in words, and who hears how it ended.
    pub(crate) fn order_move(&self, request: RequestId, to: ReplicaId) -> Result<Ordered, NotMoved> {
        let now = self.clock.now();
        match self.with_desk(|desk, _| desk.check_departure(request, to)) {
            Err(NotMovable::NotCarried) => {
                let reason = "ordered: an operator asks for it".to_owned();
                return self.order_leave(request, to, "order", reason).ok_or_else(|| NotMovable::NotCarried.into());
            }
            checked => checked?,
        }
        let facts = self.facts(now);
        let ordered = self.rounds().mover.order(&facts, request, Some(to), &|request, on| self.cached(request, on), now)?;
        // Whoever orders a move wants the KV moved, whatever is cheaper.
        let ordered = Move { way: MoveWay::Kv, ..ordered };
        let (tell, told) = oneshot::channel();
        let departed = self.with_desk(|desk, now| desk.depart(ordered.clone(), Some(tell), now));
        if let Err(error) = departed {
            self.rounds().settled(request);
            return Err(error.into());
        }
        Ok((ordered.to_string(), told))
    }

    /// Has a stream that is not carried leave its engine; `None` where it is none that can.
    fn order_leave(&self, request: RequestId, to: ReplicaId, kind: &'static str, reason: String) -> Option<Ordered> {
        let live = self.live().into_iter().find(|live| live.id == request)?;
        let (told, hears) = oneshot::channel();
        live.order(LeaveOrder { to, kind, reason: reason.clone(), told }).ok()?;
        Some((reason, hears))
    }

    /// Streams of engines that are to be empty leave with the KV of their slots, one after the other.
    fn leave_drained(&self) {
        let engines = self.engines();
        let (draining, others): (Vec<_>, Vec<_>) =
            engines.into_iter().filter(|engine| engine.facts().carries_slots).partition(|engine| engine.facts().draining.is_some());
        self.rounds().leaves.retain(|id, _| draining.iter().any(|engine| engine.id == *id));
        for from in draining {
            if !self.rounds().leaves.entry(from.id).or_default().is_free() {
                continue;
            }
            let stayed = self.rounds().leaves.get(&from.id).map(|leaves| leaves.stayed.clone()).unwrap_or_default();
            let is_next = |live: &Live| live.state() == (LiveState::Decode, Some(from.id)) && !stayed.contains(&live.id);
            let Some(live) = self.live().into_iter().find(|live| is_next(live)) else { continue };
            let free = |to: &&Arc<Engine>| has_free_slot(to) && to.numerics(&live.model) == from.numerics(&live.model);
            let Some(to) = others.iter().filter(free).min_by_key(|to| to.slots().busy()) else { continue };
            let ordered = self.order_leave(live.id, to.id, "drain", format!("drain: {} is to be empty", from.name));
            if let Some(leaves) = self.rounds().leaves.get_mut(&from.id) {
                match ordered {
                    Some((_, told)) => leaves.now = Some((live.id, told)),
                    None => _ = leaves.stayed.insert(live.id),
                }
            }
        }
    }

    /// What draining the replica would take, as things are.
    pub(crate) fn forecast_drain(&self, replica: ReplicaId) -> Option<DrainForecast> {
        let facts = self.facts(self.clock.now());
        let config = self.rounds().mover.config().clone();
        drain_forecast(&facts, replica, &config, &|request, on| self.cached(request, on), AT_ONCE)
    }

    fn cached(&self, request: RequestId, on: ReplicaId) -> Tokens {
        self.peek_router(|router, _| router.cached(request, on))
    }

    /// What it costs that a prefix of so many tokens comes to `to` from `from`; `None` where it cannot travel between them.
    pub(crate) fn price_of_copy(&self, from: ReplicaId, to: ReplicaId, tokens: Tokens) -> Option<MovePrice> {
        let spec = self.engine(to)?.facts().spec?;
        let kv_bytes_per_token = self.with_desk(|desk, _| {
            let copies = desk.can_copy(from, to);
            desk.kv_layout_of(from).filter(|_| copies).map(bytes_per_token)
        })?;
        let link = self.link(from);
        Some(MovePrice::of(&MoveCase {
            kv_bytes_per_token,
            block_size: spec.block_size,
            link: &link,
            step: &spec.step,
            step_s: spec.step.step_s(&StepLoad::decode(1.0, tokens.as_f64())),
            tokens,
            held: Tokens::ZERO,
            // Nothing runs behind the copy.
            decodes: false,
            queue_s: 0.0,
        }))
    }

    /// The replica's link for moves.
    pub(crate) fn link(&self, replica: ReplicaId) -> Wire {
        let step_s = self.step_s(replica);
        self.rounds().link(replica, step_s)
    }

    /// A decode step of what runs on the replica, or would; zero where nothing is known of it.
    pub(crate) fn step_s(&self, replica: ReplicaId) -> f64 {
        let Some(engine) = self.engine(replica) else { return 0.0 };
        let facts = engine.facts();
        let rows = facts.load.map_or(1, |load| load.running.max(1));
        facts.spec.map_or(0.0, |spec| spec.step.step_s(&StepLoad::decode(f64::from(rows), 0.0)))
    }

    /// The fleet as the rule wants to see it: replicas that are reached, and of their requests which can be moved.
    fn facts(&self, now: Time) -> FleetFacts {
        let terms = self.with_desk(|desk, _| self.terms(desk));
        if terms.is_empty() {
            return FleetFacts::default();
        }
        let mut facts = self.told_by_router(&terms, now);
        self.with_desk(|desk, _| {
            for replica in &mut facts.replicas {
                for one in &mut replica.running {
                    // Before its first token it can move as soon as that has come.
                    one.movable &= if one.prefilling { desk.can_begin_anew(one.request) } else { desk.is_movable(one.request) };
                }
                for one in &mut replica.waiting {
                    one.movable &= desk.can_begin_anew(one.request);
                }
            }
        });
        facts
    }

    /// A replica at a time, so that who wants a place waits for one of them at most.
    fn told_by_router(&self, terms: &BTreeMap<ReplicaId, MoveTerms>, now: Time) -> FleetFacts {
        let (mut facts, before) = self.peek_router(|router, _| (router.fleet_facts(|_| None, now), router.relocations()));
        for (id, terms) in terms {
            facts.replicas.extend(self.peek_router(|router, _| router.replica_facts(*id, terms.clone(), now)));
        }
        self.peek_router(|router, _| {
            // A move ended meanwhile, which is rare: all of one moment.
            if router.relocations() == before { facts } else { router.fleet_facts(|id| terms.get(&id).cloned(), now) }
        })
    }

    fn terms(&self, desk: &Desk) -> BTreeMap<ReplicaId, MoveTerms> {
        let rounds = self.rounds();
        let of = |id: ReplicaId| {
            let layout = desk.kv_layout_of(id)?;
            let blocks = self.engine(id)?.facts().spec?.kv_blocks;
            Some(MoveTerms {
                numerics: xxh3_64(desk.numerics_of(id)?.as_bytes()),
                kv_bytes_per_token: bytes_per_token(layout),
                link: rounds.link(id, self.step_s(id)),
                watermark: Blocks((blocks.as_f64() * WATERMARK) as u32),
            })
        };
        self.engines().iter().filter_map(|engine| Some((engine.id, of(engine.id)?))).collect()
    }
}

fn bytes_per_token(layout: &KvLayout) -> f64 {
    Bytes(layout.block_bytes).as_f64() / f64::from(layout.block_size.max(1))
}

/// Whether a stream that comes to the engine runs at once.
fn has_free_slot(engine: &Engine) -> bool {
    let slots = {
        let facts = engine.facts();
        facts.spec.filter(|_| facts.takes_requests()).map_or(0, |spec| spec.max_running)
    };
    engine.slots().busy() < slots as usize
}
