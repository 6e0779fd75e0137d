//! One engine as the gateway knows it: where it is, what it can do, what it last said.

use std::{
    fmt,
    str::FromStr,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use baton_cost::{Calibrator, Device, ModelShape, StepCoefficients};
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
    config::EngineConfig,
    line::{Address, Lines},
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

/// Failures in a row, without a hang, that a probe's answer makes up for.
const FAILURES_FORGIVEN: u32 = 2;
/// First hold-off; it doubles with each further failure.
const HOLD_OFF: Duration = Duration::from_millis(500);
const HOLD_OFF_MAX: Duration = Duration::from_secs(10);

/// An engine of the fleet; its place is its [`ReplicaId`].
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) id: ReplicaId,
    pub(crate) name: String,
    pub(crate) config: EngineConfig,
    /// Connections for requests.
    pub(crate) lines: Arc<Lines>,
    /// For all else, made when it is first asked for.
    pub(crate) client: OnceLock<PlainClient>,
    /// With what it is spoken to over TLS.
    pub(crate) tls: Option<Arc<ClientConfig>>,
    facts: Mutex<Facts>,
    /// Wakes the engine's watcher before its time.
    pub(crate) probe: Notify,
    /// When output last came from it, for any request.
    spoke_at: AtomicU64,
    /// Times that it was found dead.
    deaths: watch::Sender<u32>,
}

/// What the watcher learns and requests read.
#[derive(Debug)]
pub(crate) struct Facts {
    pub(crate) url: BaseUrl,
    pub(crate) health: Health,
    /// Counts the engine's lives, since engines' own marks are random or missing and the index compares them by order.
    pub(crate) life: Incarnation,
    /// What the engine says of its life, where it does: Baton's incarnation, vLLM's start time.
    pub(crate) mark: Option<u64>,
    pub(crate) models: Vec<ModelCard>,
    pub(crate) spec: Option<ReplicaSpec>,
    pub(crate) load: Option<LoadReport>,
    pub(crate) kv_source: Option<KvEventSource>,
    /// Where it takes part in migration.
    pub(crate) migration: Option<Destination>,
    /// How answers are made of its tokens, once the first one was.
    pub(crate) service: Option<Arc<Service>>,
    /// It is to be empty.
    pub(crate) draining: Option<Drain>,
    pub(crate) calibrator: Calibrator,
    /// Attempts in a row that it let fail.
    pub(crate) failures: u32,
    /// No answer to a probe makes it ready before.
    pub(crate) held_off_until: Time,
    /// Relative error of the engine's own step predictions, or of the calibration here.
    pub(crate) step_error: f64,
    /// As this engine alone has shown it; what counts is in the spec.
    pub(crate) speed: Speed,
}

/// A replica on its way to be empty.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Drain {
    pub(crate) since: Time,
    /// As it was when the drain began.
    pub(crate) forecast: Option<DrainForecast>,
    /// When nothing was left.
    pub(crate) emptied: Option<Time>,
}

impl Facts {
    pub(crate) fn takes_requests(&self) -> bool {
        self.health == Health::Ready && self.draining.is_none()
    }
}

impl Engine {
    /// Keeps up to `idle_connections` for the next requests.
    pub(crate) fn new(id: ReplicaId, config: EngineConfig, idle_connections: usize) -> Self {
        let facts = Facts {
            url: config.url.clone(),
            health: Health::Unknown,
            life: Incarnation(0),
            mark: None,
            models: config.models.iter().map(|model| static_card(model, config.max_model_len)).collect(),
            spec: None,
            load: None,
            kv_source: None,
            migration: None,
            service: None,
            draining: None,
            calibrator: Calibrator::new(default_step()),
            failures: 0,
            held_off_until: Time::ZERO,
            step_error: 0.0,
            speed: Speed::prior(default_step()),
        };
        let name = config.name.clone().unwrap_or_else(|| id.to_string());
        let tls = config.url.is_tls().then(|| tls::client(config.ca.as_ref()));
        let lines = Lines::new(Address::new(&config.url, config.key(), tls.clone()), idle_connections);
        Self {
            id,
            name,
            lines: Arc::new(lines),
            client: OnceLock::new(),
            tls,
            config,
            facts: Mutex::new(facts),
            probe: Notify::new(),
            spoke_at: AtomicU64::new(0),
            deaths: watch::Sender::new(0),
        }
    }

    pub(crate) fn facts(&self) -> MutexGuard<'_, Facts> {
        // A panic elsewhere leaves plain values behind, none of them half written.
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Output came from it.
    pub(crate) fn spoke(&self, now: Time) {
        self.spoke_at.store(now.0, Ordering::Relaxed);
    }

    pub(crate) fn spoke_at(&self) -> Time {
        Time(self.spoke_at.load(Ordering::Relaxed))
    }

    /// It was found dead: attempts that wait for its first token may go elsewhere.
    pub(crate) fn died(&self) {
        self.deaths.send_modify(|deaths| *deaths = deaths.wrapping_add(1));
    }

    /// Changes when it is found dead from here on.
    pub(crate) fn deaths(&self) -> watch::Receiver<u32> {
        self.deaths.subscribe()
    }

    /// An attempt began to give tokens.
    pub(crate) fn succeeded(&self) {
        self.facts().failures = 0;
    }

    /// An attempt failed. The first failure is left to the next probe; who answers probes but lets one request after another fail is
    /// held off for longer and longer. A hang costs its request much, so it counts at once.
    pub(crate) fn failed(&self, fault: Fault, now: Time) {
        let mut facts = self.facts();
        facts.failures = facts.failures.saturating_add(1);
        let hung = matches!(fault, Fault::NoFirstToken(_) | Fault::Stalled(_));
        let forgiven = if hung { 0 } else { FAILURES_FORGIVEN };
        let excess = facts.failures.saturating_sub(forgiven);
        if excess > 0 {
            facts.held_off_until = now + HOLD_OFF.saturating_mul(1 << (excess - 1).min(16)).min(HOLD_OFF_MAX);
        }
    }

    /// It was started at another address, or again at the same; one that is spoken to over TLS still is.
    pub(crate) fn move_to(&self, url: BaseUrl) {
        self.lines.move_to(Address::new(&url, self.config.key(), self.tls.clone()));
        self.facts().url = url;
    }

    pub(crate) fn url(&self) -> BaseUrl {
        self.facts().url.clone()
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
    StepCoefficients::from_profile(&shape, &device)
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
    fn who_fails_again_and_again_is_held_off_and_a_success_forgives() {
        let engine = Engine::new(ReplicaId(0), EngineConfig::new("http://h:1".parse().unwrap(), crate::config::EngineKind::Vllm), 1);
        let until = |fault| {
            engine.failed(fault, Time(5));
            engine.facts().held_off_until
        };
        assert_eq!([until(Fault::InBand), until(Fault::InBand)], [Time::ZERO; 2]);
        assert_eq!([until(Fault::InBand), until(Fault::InBand)], [Time(5) + HOLD_OFF, Time(5) + HOLD_OFF * 2]);
        (0..40).for_each(|_| _ = until(Fault::InBand));
        assert_eq!(engine.facts().held_off_until, Time(5) + HOLD_OFF_MAX);
        engine.succeeded();
        assert_eq!(until(Fault::Stalled(HOLD_OFF)), Time(5) + HOLD_OFF);
    }

    #[test]
    fn the_prior_of_unknown_engines_exists() {
        assert!(default_step().per_token_s > 0.0);
    }
}
