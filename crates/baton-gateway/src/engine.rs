//! One engine as the gateway knows it: where it is, what it can do, what it last said.

use std::{
    fmt,
    str::FromStr,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use baton_cost::{Calibrator, Device, ModelShape, StepCoefficients, StepLoad};
use baton_discovery::MemberId;
use baton_openai::Service;
use baton_policy::{LoadReport, ReplicaSpec, mover::DrainForecast};
use baton_session::Fault;
use baton_units::{Incarnation, ReplicaId, Time, Tokens};
use baton_wire::{openai::ModelCard, replica::KvEventSource};
use http::{Uri, uri::Scheme};
use serde::{Deserialize, Deserializer, Serialize};
use tokio::sync::{Notify, watch};
use tokio_rustls::rustls::ClientConfig;

use crate::{
    carry::link::Destination,
    config::{EngineConfig, EngineKind},
    fleet::Wanted,
    line::{Address, Lines},
    pulse::Pulse,
    slots::Slots,
    speed::Speed,
    tls,
    upstream::PlainClient,
};

/// `http://host:port` or `https://host:port`, with a path in front of the engine's own where there is one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BaseUrl {
    scheme: Scheme,
    authority: String,
    prefix: String,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    #[error("{url:?} is no URL: give http://HOST:PORT or https://HOST:PORT")]
    Malformed { url: String },
    #[error("{url:?} has scheme {scheme}: give an http:// or https:// address")]
    Scheme { url: String, scheme: String },
}

impl BaseUrl {
    /// Address of a path of the engine, which begins with `/`.
    pub(crate) fn join(&self, path: &str) -> Uri {
        let text = format!("{}://{}{}{path}", self.scheme, self.authority, self.prefix);
        text.parse().unwrap_or_else(|_| Uri::from_static("/"))
    }

    /// It is spoken to over TLS.
    pub(crate) fn is_tls(&self) -> bool {
        self.scheme == Scheme::HTTPS
    }

    /// Host and port.
    pub(crate) fn authority(&self) -> &str {
        &self.authority
    }

    /// What stands in front of the engine's paths.
    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Host name or address without the port; an IPv6 address keeps its brackets.
    pub(crate) fn host(&self) -> &str {
        match self.authority.rsplit_once(':') {
            Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
            _ => &self.authority,
        }
    }
}

impl FromStr for BaseUrl {
    type Err = UrlError;

    fn from_str(url: &str) -> Result<Self, UrlError> {
        let malformed = || UrlError::Malformed { url: url.to_owned() };
        let uri: Uri = url.parse().map_err(|_| malformed())?;
        let scheme = uri.scheme().ok_or_else(malformed)?;
        if *scheme != Scheme::HTTP && *scheme != Scheme::HTTPS {
            return Err(UrlError::Scheme { url: url.to_owned(), scheme: scheme.to_string() });
        }
        if *scheme == Scheme::HTTPS && uri.host().and_then(tls::server_name).is_none() {
            return Err(malformed());
        }
        let authority = uri.authority().filter(|authority| !authority.as_str().contains('@')).ok_or_else(malformed)?;
        Ok(Self { scheme: scheme.clone(), authority: authority.to_string(), prefix: uri.path().trim_end_matches('/').to_owned() })
    }
}

impl fmt::Display for BaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}{}", self.scheme, self.authority, self.prefix)
    }
}

impl Serialize for BaseUrl {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for BaseUrl {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Whether an engine answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Health {
    /// Never answered yet.
    Unknown,
    Ready,
    /// A request or a probe failed; a probe decides.
    Suspect,
    Dead,
}

/// Whether an engine makes the same tokens of a text and of a chat as are made here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Agreement {
    /// No tokenizer is known here, or the engine cannot be asked.
    Unchecked,
    Same,
    /// Nothing here rests on tokens that are the engine's.
    Different,
}

/// Failures in a row, without a hang, that a probe's answer makes up for.
const FAILURES_FORGIVEN: u32 = 2;

/// An engine of the fleet; its place is its [`ReplicaId`].
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) id: ReplicaId,
    /// The last life of those that had its place before; its own come after.
    pub(crate) before: Incarnation,
    pub(crate) name: String,
    pub(crate) config: EngineConfig,
    /// Where a source named it.
    pub(crate) member: Option<MemberId>,
    /// Which one it is of those behind its address.
    pub(crate) rank: Option<u32>,
    /// Connections for requests.
    pub(crate) lines: Arc<Lines>,
    /// For all else, made when it is first asked for.
    pub(crate) client: OnceLock<PlainClient>,
    /// With what it is spoken to over TLS.
    pub(crate) tls: Option<Arc<ClientConfig>>,
    facts: Mutex<Facts>,
    /// Of llama.cpp's server.
    slots: Mutex<Slots>,
    /// Wakes the engine's watcher before its time.
    pub(crate) probe: Notify,
    /// Its list of models may have changed.
    models_due: AtomicBool,
    pub(crate) pulse: Pulse,
    /// Times that it was found dead, or hung.
    deaths: watch::Sender<u32>,
}

/// What the watcher learns and requests read.
#[derive(Debug)]
pub(crate) struct Facts {
    pub(crate) url: BaseUrl,
    /// What names it, where that is not the configuration.
    pub(crate) source: Option<Arc<str>>,
    pub(crate) health: Health,
    /// Counts the engine's lives on from [`Engine::before`], since engines' own marks are random or missing and the index compares them by
    /// order.
    pub(crate) life: Incarnation,
    /// What the engine says of its life, where it does: Baton's incarnation, vLLM's start time.
    pub(crate) mark: Option<u64>,
    pub(crate) models: Vec<ModelCard>,
    /// Its version, where it tells one.
    pub(crate) version: Option<String>,
    /// Whether its tokens are the ones that are made here.
    pub(crate) tokens: Agreement,
    pub(crate) spec: Option<ReplicaSpec>,
    pub(crate) load: Option<LoadReport>,
    pub(crate) kv_source: Option<KvEventSource>,
    /// Where it takes part in migration.
    pub(crate) migration: Option<Destination>,
    /// What its slots hold can be taken to another server, by a file.
    pub(crate) carries_slots: bool,
    /// How answers are made of its tokens, once the first one was.
    pub(crate) service: Option<Arc<Service>>,
    /// It is to be empty.
    pub(crate) draining: Option<Drain>,
    pub(crate) calibrator: Calibrator,
    /// Attempts in a row that it let fail.
    pub(crate) failures: u32,
    /// Its word that it is well does not count until it has computed something.
    pub(crate) in_doubt: bool,
    /// It asked to be left alone for so long.
    pub(crate) rests_until: Option<Time>,
    /// Relative error of the engine's own step predictions, or of the calibration here.
    pub(crate) step_error: f64,
    /// As this engine alone has shown it; what counts is in the spec.
    pub(crate) speed: Speed,
}

/// A replica on its way to be empty.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Drain {
    pub(crate) since: Time,
    pub(crate) by: DrainOrder,
    /// As it was when the drain began.
    pub(crate) forecast: Option<DrainForecast>,
    /// When nothing was left.
    pub(crate) emptied: Option<Time>,
}

/// Who wants a replica empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum DrainOrder {
    Operator,
    /// The source that named it says that it terminates.
    Source,
}

impl Facts {
    pub(crate) fn takes_requests(&self) -> bool {
        self.health == Health::Ready && self.draining.is_none()
    }
}

impl Engine {
    /// Keeps up to `idle_connections` for the next requests.
    pub(crate) fn new(id: ReplicaId, before: Incarnation, wanted: Wanted, idle_connections: usize) -> Self {
        let Wanted { config, found, rank } = wanted;
        let (member, source) = found.map(|found| (found.member, found.source)).unzip();
        let facts = Facts {
            url: config.url.clone(),
            source,
            health: Health::Unknown,
            life: before,
            mark: None,
            models: config.models.iter().map(|model| static_card(model, config.max_model_len)).collect(),
            version: None,
            tokens: Agreement::Unchecked,
            spec: None,
            load: None,
            kv_source: None,
            migration: None,
            carries_slots: false,
            service: None,
            draining: None,
            calibrator: Calibrator::new(default_step()),
            failures: 0,
            in_doubt: false,
            rests_until: None,
            step_error: 0.0,
            speed: Speed::prior(default_step()),
        };
        let name = config.name.clone().unwrap_or_else(|| id.to_string());
        let tls = config.url.is_tls().then(|| tls::client(config.ca.as_ref()));
        let lines = Lines::new(Address::new(&config.url, config.key(), rank, tls.clone()), idle_connections);
        Self {
            id,
            before,
            name,
            lines: Arc::new(lines),
            client: OnceLock::new(),
            tls,
            config,
            member,
            rank,
            facts: Mutex::new(facts),
            slots: Mutex::default(),
            probe: Notify::new(),
            models_due: AtomicBool::new(false),
            pulse: Pulse::default(),
            deaths: watch::Sender::new(0),
        }
    }

    pub(crate) fn facts(&self) -> MutexGuard<'_, Facts> {
        // A panic elsewhere leaves plain values behind, none of them half written.
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It was found dead, or hung: attempts at it may go elsewhere.
    pub(crate) fn died(&self) {
        self.deaths.send_modify(|deaths| *deaths = deaths.wrapping_add(1));
    }

    /// Changes when it is found dead from here on.
    pub(crate) fn deaths(&self) -> watch::Receiver<u32> {
        self.deaths.subscribe()
    }

    /// An attempt began to give tokens.
    pub(crate) fn succeeded(&self) {
        let mut facts = self.facts();
        (facts.failures, facts.in_doubt) = (0, false);
    }

    /// An attempt failed. The first failures are left to the next probe; who answers probes but lets one request after another fail must
    /// compute something before it is used again. A hang costs its request much, so it counts at once.
    pub(crate) fn failed(&self, fault: Fault) {
        let mut facts = self.facts();
        facts.failures = facts.failures.saturating_add(1);
        let hung = matches!(fault, Fault::NoFirstToken(_) | Fault::Stalled(_));
        facts.in_doubt |= hung || facts.failures > FAILURES_FORGIVEN;
    }

    /// How much longer it asked to be left alone, in this life.
    pub(crate) fn rests_for(&self, now: Time) -> Option<Duration> {
        let facts = self.facts();
        let until = facts.rests_until.filter(|until| *until > now && facts.spec.is_some())?;
        Some(until.since(now))
    }

    /// Time of a step that is full of prompts, as far as it is known.
    pub(crate) fn full_step(&self) -> Duration {
        let Some(spec) = self.facts().spec else { return Duration::ZERO };
        let load = StepLoad::prefill(Tokens(self.token_budget()), Tokens::ZERO);
        Duration::try_from_secs_f64(spec.step.step_s(&load)).unwrap_or(Duration::MAX)
    }

    /// It was started at another address, or again at the same; one that is spoken to over TLS still is.
    pub(crate) fn move_to(&self, url: BaseUrl) {
        self.lines.move_to(Address::new(&url, self.config.key(), self.rank, self.tls.clone()));
        self.facts().url = url;
    }

    pub(crate) fn url(&self) -> BaseUrl {
        self.facts().url.clone()
    }

    /// Its address, and its rank there: what tells it from all others over a restart of the gateway.
    pub(crate) fn whereabouts(&self) -> String {
        let url = self.url();
        self.rank.map_or_else(|| url.to_string(), |rank| format!("{url}#{rank}"))
    }

    /// Has its watcher look at its models now.
    pub(crate) fn expect_models(&self) {
        self.models_due.store(true, Ordering::Relaxed);
        self.probe.notify_one();
    }

    /// Whether its models are to be looked at before their time.
    pub(crate) fn take_models_due(&self) -> bool {
        self.models_due.swap(false, Ordering::Relaxed)
    }

    /// The card of a model that this engine serves.
    pub(crate) fn model(&self, name: &str) -> Option<ModelCard> {
        self.facts().models.iter().find(|card| card.id == name).cloned()
    }

    /// Takes in the time to the first token of a request that nothing else delayed. The watcher tells the router.
    pub(crate) fn observe_prefill(&self, new: Tokens, cached: Tokens, ttft: Duration, now: Time) {
        let mut facts = self.facts();
        let chunk = Tokens(self.token_budget());
        facts.calibrator.observe_prefill(new, cached, chunk, ttft.as_secs_f64());
        facts.step_error = facts.calibrator.error();
        let step = facts.calibrator.fit();
        facts.speed.observed(step, now);
    }

    /// Whether tokens that are known here may stand for the engine's.
    pub(crate) fn knows_tokens(&self) -> bool {
        self.facts().tokens != Agreement::Different
    }

    /// Whether its answers can be made here from tokens, where it is reached over a control connection. Beside vLLM a program of others
    /// speaks on it, so that only tokens which were compared count.
    pub(crate) fn takes_tokens(&self) -> bool {
        match self.config.kind {
            EngineKind::Baton => self.knows_tokens(),
            EngineKind::Vllm => self.facts().tokens == Agreement::Same,
            EngineKind::Sglang | EngineKind::LlamaCpp | EngineKind::OpenAi => false,
        }
    }

    /// Names what decides the bits of its answers, as far as anybody has told.
    pub(crate) fn numerics(&self, model: &str) -> String {
        if let Some(name) = &self.config.numerics {
            return name.clone();
        }
        let facts = self.facts();
        let root = facts.models.iter().find(|card| card.id == model).and_then(|card| card.root.as_deref()).unwrap_or(model);
        format!("{} {} {root}", self.config.kind.as_str(), facts.version.as_deref().unwrap_or_default())
    }

    pub(crate) fn token_budget(&self) -> u32 {
        self.config.token_budget.unwrap_or(2048)
    }
}

fn static_card(model: &str, max_model_len: Option<u32>) -> ModelCard {
    ModelCard {
        id: model.to_owned(),
        object: "model".into(),
        created: 0,
        owned_by: String::new(),
        root: None,
        parent: None,
        max_model_len,
        permission: Vec::new(),
    }
}

/// Where nothing is known: an 8-billion-parameter model on one H100. The calibration leaves it after some tens of requests.
fn default_step() -> StepCoefficients {
    let shape = ModelShape::preset("llama-3-8b").expect("a preset");
    let device = Device::preset("h100").expect("a preset");
    StepCoefficients::from_profile(&shape, &device).weights_as_fixed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_joins_with_paths_and_names_its_host() {
        let url: BaseUrl = "http://10.0.0.5:8000/engine/".parse().unwrap();
        assert_eq!(url.join("/v1/models").to_string(), "http://10.0.0.5:8000/engine/v1/models");
        assert_eq!((url.host(), url.to_string().as_str()), ("10.0.0.5", "http://10.0.0.5:8000/engine"));
        let v6: BaseUrl = "http://[::1]:8000".parse().unwrap();
        assert_eq!(v6.host(), "[::1]");
        for url in ["https://[::1]:8000", "https://engine.example/v2", "https://10.0.0.5:8000"] {
            let tls: BaseUrl = url.parse().unwrap();
            assert!(tls.is_tls() && !v6.is_tls());
            assert_eq!(tls.join("/x").to_string(), format!("{url}/x"));
        }
    }

    #[test]
    fn what_is_no_address_of_a_server_is_refused() {
        assert!(matches!("ftp://a".parse::<BaseUrl>(), Err(UrlError::Scheme { .. })));
        for url in ["a:80", "/v1", "http://user:word@a", "http://", "https://-a", "https://a..b"] {
            assert!(url.parse::<BaseUrl>().is_err(), "{url}");
        }
    }

    #[test]
    fn who_fails_again_and_again_is_in_doubt_and_a_success_forgives() {
        let config = EngineConfig::new("http://h:1".parse().unwrap(), EngineKind::Vllm);
        let engine = Engine::new(ReplicaId(0), Incarnation(0), config.into(), 1);
        let in_doubt = |fault| {
            engine.failed(fault);
            engine.facts().in_doubt
        };
        assert_eq!([(); 3].map(|()| in_doubt(Fault::InBand)), [false, false, true]);
        engine.succeeded();
        assert!(!in_doubt(Fault::InBand));
        assert!(in_doubt(Fault::Stalled(Duration::from_secs(2))), "a hang counts at once");
    }

    #[test]
    fn the_prior_of_unknown_engines_exists() {
        assert!(default_step().per_token_s > 0.0);
    }
}
