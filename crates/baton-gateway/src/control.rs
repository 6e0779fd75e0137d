//! What the gateway does about its engines without being asked: one watcher an engine, which probes it, tells the router what it
//! learns, and follows its KV events.

mod kv_events;
mod prometheus;
mod sighting;
mod tokens;

pub(crate) use kv_events::of_rank;

use std::{sync::Arc, time::Duration};

use baton_policy::{ReplicaSpec, Trust};
use baton_units::{Incarnation, Time};
use tokio::task::JoinHandle;

use crate::{
    carry::link::{self, Destination},
    config::EngineKind,
    engine::{Agreement, Engine, Health},
    fleet::Fleet,
    slots,
    snapshot::Former,
    speed::{self, Likeness},
    upstream::FetchError,
};
use sighting::Sighting;

/// Between probes of an engine that answers.
const PROBE_EVERY: Duration = Duration::from_millis(250);
/// The same for Baton's own replicas, whose report is cheap and carries the load.
const REPORT_EVERY: Duration = Duration::from_millis(100);
/// Longest pause between probes of one that does not; a replica that returns is used within twice this.
const PROBE_PAUSE_MAX: Duration = Duration::from_secs(1);
/// A busy vLLM answers its probes late: its HTTP server shares a process with tokenizing.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// An engine in doubt has so much time for one token, or that of a full step; one that returns is used again within this and a pause.
const TOKEN_TIMEOUT: Duration = Duration::from_secs(1);
/// Probes in a row without an answer that make a replica suspect, and dead.
const UNANSWERED_SUSPECT: u32 = 2;
const UNANSWERED_DEAD: u32 = 4;
/// Between looks at an engine's list of models, since adapters come and go; a request that misses one has it looked at before.
const MODELS_EVERY: Duration = Duration::from_secs(10);

/// Stops its task when dropped.
#[derive(Debug)]
pub(crate) struct TaskGuard(JoinHandle<()>);

impl TaskGuard {
    pub(crate) fn spawn(task: impl Future<Output = ()> + Send + 'static) -> Self {
        Self(tokio::spawn(task))
    }
}

impl Drop for TaskGuard {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Watches one engine for as long as it is part of the fleet.
pub(crate) async fn watch(fleet: Arc<Fleet>, engine: Arc<Engine>) {
    let mut watcher = Watcher {
        fleet,
        engine,
        unanswered: 0,
        models_at: None,
        former: None,
        beside: None,
        asks_beside: true,
        events: None,
        link: None,
        trust: Trust::Trusted,
    };
    let mut pause = PROBE_EVERY;
    loop {
        let asked_at = watcher.fleet.clock.now();
        match watcher.probe().await {
            Ok(sighting) => {
                watcher.seen(sighting, asked_at).await;
                pause = if watcher.engine.config.kind == EngineKind::Baton { REPORT_EVERY } else { PROBE_EVERY };
            }
            Err(error) => {
                watcher.unseen(&error);
                pause = (pause * 2).clamp(PROBE_EVERY, PROBE_PAUSE_MAX);
            }
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = watcher.engine.probe.notified() => {}
        }
    }
}

struct Watcher {
    fleet: Arc<Fleet>,
    engine: Arc<Engine>,
    unanswered: u32,
    models_at: Option<Time>,
    /// What was known of the engine's life before the gateway started, until it joins.
    former: Option<Arc<Former>>,
    /// Where what runs beside an engine of another kind takes part in migration, and whether that is still to be asked in this life.
    beside: Option<Destination>,
    asks_beside: bool,
    events: Option<(kv_events::Stream, TaskGuard)>,
    link: Option<(Destination, TaskGuard)>,
    /// As the operator was told last.
    trust: Trust,
}

impl Watcher {
    async fn probe(&self) -> Result<Sighting, FetchError> {
        sighting::probe(&self.fleet.upstream, &self.engine, PROBE_TIMEOUT).await
    }

    /// The engine answered.
    async fn seen(&mut self, sighting: Sighting, asked_at: Time) {
        self.unanswered = 0;
        let (life, began) = self.life(&sighting);
        if self.engine.rests_for(asked_at).is_some()
            || self.is_silent()
            || self.hangs()
            || (self.is_in_doubt(began) && !self.computes().await)
        {
            return;
        }
        let models_due = self.engine.take_models_due() || self.models_at.is_none_or(|at| asked_at.since(at) >= MODELS_EVERY);
        if began || models_due {
            self.look_at_models(began).await;
            self.models_at = Some(asked_at);
            if began {
                self.compare_tokens().await;
                self.try_slots().await;
            }
            self.asks_beside |= began;
            self.look_beside().await;
        }
        self.tell_router(&sighting, life, began, asked_at);
        self.fleet.take_in(self.engine.id).await;
        self.tell_trust();
        self.engine.lines.prune();
        self.follow_events(life);
        self.attach(sighting.migration.or_else(|| self.beside.clone()));
    }

    /// Whether it gives nobody anything any more, though it says that it is well.
    fn is_silent(&self) -> bool {
        let (engine, now) = (&self.engine, self.fleet.clock.now());
        let Some(silence) = engine.pulse.silence(now).filter(|_| engine.facts().health == Health::Ready) else { return false };
        let hangs = silence > engine.pulse.patience(engine.full_step(), self.fleet.front().stall_timeout);
        if hangs {
            self.fleet.hung(engine, silence);
        }
        hangs
    }

    /// Whether its word that it is well must not count, after failures of requests. A new life begins without blame.
    fn is_in_doubt(&self, life_began: bool) -> bool {
        let mut facts = self.engine.facts();
        if life_began && facts.spec.is_none() {
            (facts.failures, facts.in_doubt) = (0, false);
            self.engine.pulse.forget();
        }
        facts.health == Health::Suspect && facts.in_doubt
    }

    /// Whether it computes a token, which says more than its word. One that has no such path, or no model of its own, is believed.
    async fn computes(&self) -> bool {
        let model = self.engine.facts().models.iter().find(|card| card.parent.is_none()).map(|card| card.id.clone());
        let Some(model) = model else { return true };
        let within = self.engine.full_step().clamp(TOKEN_TIMEOUT, PROBE_TIMEOUT * 5);
        let answer = sighting::one_token(&self.fleet.upstream, &self.engine, &model, within).await;
        let computes = match &answer {
            Ok(()) => true,
            Err(FetchError::Status(status)) => status.is_client_error(),
            Err(_) => false,
        };
        tracing::debug!(replica = %self.engine.name, computes, ?answer, "asked for a token");
        if computes {
            self.engine.succeeded();
        }
        computes
    }

    /// Whether this life of the engine is known to hang, though it answered. A new life has a connection of its own.
    fn hangs(&self) -> bool {
        self.engine.facts().spec.is_some() && self.fleet.with_desk(|desk, _| desk.hangs(self.engine.id))
    }

    /// Which life of the engine this is, and whether it has just begun (or begun again after silence).
    fn life(&mut self, sighting: &Sighting) -> (Incarnation, bool) {
        let whereabouts = self.engine.whereabouts();
        let mut facts = self.engine.facts();
        let never_seen = self.engine.before;
        if facts.life == never_seen
            && let Some(snapshot) = &self.fleet.snapshot
            && let Some(former) = snapshot.former(&whereabouts)
        {
            if sighting.mark == Some(former.mark) && former.life > never_seen {
                facts.life = former.life;
                facts.mark = Some(former.mark);
                self.former = Some(former);
            } else {
                facts.life = Incarnation(former.life.max(never_seen).0 + 1);
                facts.mark = sighting.mark;
                snapshot.settle(&whereabouts);
            }
        }
        let other = facts.mark != sighting.mark && sighting.mark.is_some();
        // Without a mark, a process that went away must be taken for another one when it is back.
        let unmarked_return = sighting.mark.is_none() && facts.health == Health::Dead;
        if facts.life == never_seen || other || unmarked_return {
            facts.life.0 += 1;
            facts.mark = sighting.mark;
            facts.spec = None;
        }
        (facts.life, facts.spec.is_none() || facts.health != Health::Ready)
    }

    async fn look_at_models(&self, began: bool) {
        let models = sighting::models(&self.fleet.upstream, &self.engine, PROBE_TIMEOUT).await;
        let (source, version) = if began {
            let (upstream, engine) = (&self.fleet.upstream, &self.engine);
            tokio::join!(sighting::kv_source(upstream, engine, PROBE_TIMEOUT), sighting::version(upstream, engine, PROBE_TIMEOUT))
        } else {
            (None, None)
        };
        let mut facts = self.engine.facts();
        match models {
            Ok(models) if !models.is_empty() => facts.models = models,
            Ok(_) => {}
            Err(error) => tracing::debug!(replica = %self.engine.name, %error, "no list of models"),
        }
        if source.is_some() {
            facts.kv_source = source;
        }
        if version.is_some() {
            facts.version = version;
        }
        drop(facts);
        self.fleet.list_models();
    }

    /// Asks until it is answered, which is once for each life.
    async fn look_beside(&mut self) {
        if !self.asks_beside {
            return;
        }
        match sighting::migration(&self.fleet.upstream, &self.engine, PROBE_TIMEOUT).await {
            Ok(beside) => (self.beside, self.asks_beside) = (beside, false),
            Err(error) => tracing::debug!(replica = %self.engine.name, %error, "no report of migration"),
        }
    }

    /// Whether the engine makes the same tokens, which all rests on that is done with tokens here.
    async fn compare_tokens(&self) {
        let (fleet, engine) = (&self.fleet, &self.engine);
        let model = engine.facts().models.iter().find(|card| card.parent.is_none()).map(|card| card.id.clone());
        let (Some(text), Some(model)) = (fleet.tokenizer(), model) else { return };
        let tokens = tokens::compare(&fleet.upstream, engine, &model, text, PROBE_TIMEOUT).await;
        if tokens == Agreement::Different {
            tracing::warn!(replica = %engine.name, model, "the replica makes other tokens than --tokenizer: nothing there rests on tokens; give the tokenizer and template of its model");
        }
        engine.facts().tokens = tokens;
    }

    /// Whether what its slots hold can be taken elsewhere. Once in each life, before it gets requests.
    async fn try_slots(&self) {
        let engine = &self.engine;
        if engine.config.slot_path.is_none() || engine.facts().spec.is_some() {
            return;
        }
        let travels = slots::travel(&self.fleet.upstream, engine).await;
        match &travels {
            Ok(true) => tracing::debug!(replica = %engine.name, "slots can be carried"),
            Ok(false) => {
                tracing::warn!(replica = %engine.name, "slots are not carried: the server goes on otherwise from one that was saved and restored");
            }
            Err(error) => {
                tracing::warn!(replica = %engine.name, %error, "slots are not carried: saving and restoring one failed; is --slot-save-path the engine's slot_path?");
            }
        }
        engine.facts().carries_slots = travels.unwrap_or(false);
    }

    fn tell_router(&mut self, sighting: &Sighting, life: Incarnation, began: bool, asked_at: Time) {
        let (former, spec) = {
            let mut facts = self.engine.facts();
            if let Some(step) = sighting.step {
                facts.speed.reported(step, sighting.steps, began, asked_at);
            }
            if let Some(source) = &sighting.kv_source {
                facts.kv_source = Some(source.clone());
            }
            facts.load = sighting.load(asked_at);
            if let Some(error) = sighting.step_error {
                facts.step_error = error;
            }
            let mut spec = sighting.spec(&self.engine, &facts, life);
            let like = Likeness::of(&self.engine.config, &facts, &spec);
            spec.step = self.fleet.blend_speed(self.engine.id, like, facts.speed, asked_at);
            if let Some(former) = facts.spec.filter(|former| speed::hardly_differ(&former.step, &spec.step)) {
                spec.step = former.step;
            }
            let was = std::mem::replace(&mut facts.health, Health::Ready);
            if was != Health::Ready {
                tracing::info!(replica = %self.engine.name, url = %facts.url, life = life.0, "replica is ready");
            }
            (facts.spec.replace(spec), spec)
        };
        match former {
            Some(former) if !began && former == spec => {}
            Some(former) if !began && former == (ReplicaSpec { step: former.step, ..spec }) => {
                self.fleet.with_router(|router, _| router.update_step(self.engine.id, spec.step));
            }
            Some(former) if former == spec => self.join(spec),
            Some(_) | None => {
                self.fleet.list_models();
                self.join(spec);
            }
        }
        if let Some(load) = sighting.load(asked_at) {
            self.fleet.with_router(|router, now| router.report(self.engine.id, load, now));
        }
    }

    /// The engine takes requests from here on, with what was known of its cache.
    fn join(&mut self, spec: ReplicaSpec) {
        let former = self.former.take();
        self.fleet.engine_ready(spec, former.as_deref());
        if let Some(snapshot) = self.fleet.snapshot.as_ref().filter(|_| former.is_some()) {
            snapshot.settle(&self.engine.whereabouts());
        }
    }

    /// Logs when the engine's events are not believed any more, or again.
    fn tell_trust(&mut self) {
        let trust = self.fleet.peek_router(|router, now| router.trust(self.engine.id, now));
        if std::mem::replace(&mut self.trust, trust) == trust {
            return;
        }
        let replica = &self.engine.name;
        match trust {
            Trust::Quarantined => {
                tracing::warn!(%replica, "what the replica's KV events told was not in its cache: they count for nothing for a while; is their endpoint its own?");
            }
            Trust::Probation => tracing::info!(%replica, "the replica's KV events count half until its hits bear them out"),
            Trust::Trusted => tracing::info!(%replica, "the replica's KV events are believed again"),
        }
    }

    fn follow_events(&mut self, life: Incarnation) {
        let wanted = kv_events::Stream::of(&self.engine, life);
        if self.events.as_ref().map(|(stream, _)| stream) == wanted.as_ref() {
            return;
        }
        self.events = wanted.map(|stream| {
            let task = kv_events::follow(self.fleet.clone(), self.engine.id, stream.clone());
            (stream, TaskGuard::spawn(task))
        });
    }

    /// Keeps a control connection to the life of the engine that was seen.
    fn attach(&mut self, wanted: Option<Destination>) {
        if self.link.as_ref().map(|(to, _)| to) == wanted.as_ref() {
            return;
        }
        if self.link.is_some() {
            // Another life: what the former one ran is with nobody.
            self.fleet.with_desk(|desk, now| desk.gone(self.engine.id, now));
        }
        self.engine.facts().migration.clone_from(&wanted);
        self.link = wanted.map(|to| {
            let task = link::keep(self.fleet.clone(), self.engine.id, to.clone());
            (to, TaskGuard::spawn(task))
        });
    }

    /// The engine did not answer, or says that it cannot serve.
    fn unseen(&mut self, error: &FetchError) {
        self.unanswered += 1;
        let health = self.engine.facts().health;
        let verdict = match error {
            FetchError::Unreachable => Health::Dead,
            FetchError::Status(_) | FetchError::Broken | FetchError::Unreadable(_) => Health::Suspect,
            FetchError::TimedOut(_) if self.unanswered >= UNANSWERED_SUSPECT => Health::Suspect,
            FetchError::TimedOut(_) => return,
        };
        let verdict = if self.unanswered >= UNANSWERED_DEAD { Health::Dead } else { verdict };
        if health == Health::Unknown || health == Health::Dead || health == verdict {
            return;
        }
        tracing::warn!(replica = %self.engine.name, %error, state = ?verdict, "replica does not answer");
        self.fleet.set_unready(&self.engine, verdict);
    }
}

/// Reads a page of another server's metrics.
#[cfg(fuzzing)]
pub(crate) fn fuzz_metrics(page: &str) {
    let page = prometheus::Page::of_rank(page, "engine", Some(1));
    let _ = page.sum("vllm:num_requests_running");
    let _ = page.label("vllm:cache_config_info", "block_size");
}
