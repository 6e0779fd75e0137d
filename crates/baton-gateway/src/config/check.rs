//! What no gateway could work with.

use std::{collections::BTreeSet, fmt, time::Duration};

use baton_policy::PriceWeights;
use baton_units::ReplicaId;
use http::HeaderValue;

use crate::control::of_rank;

use super::{ConfigError, EngineConfig, EngineKind, Fault, FrontConfig, GatewayConfig, Isolation, PolicyConfig, TenantConfig};

/// A third of it, in two generations, still holds a message of a few hundred words.
const TEXT_CACHE_BYTES_MIN: usize = 64 << 10;

/// As many as the index of the fleet's caches can tell apart.
const REPLICAS_MAX: usize = 4096;

/// Between two looks for engines.
const LOOK_EVERY_MAX: Duration = Duration::from_hours(24);
/// As many random characters as nobody tries out: 80 bits and more.
const SALT_SECRET_CHARS_MIN: usize = 16;

/// Faults, as they are found.
#[derive(Default)]
struct Check {
    faults: Vec<Fault>,
}

impl GatewayConfig {
    /// Refuses values with which nothing would work. A fleet without engines may be given some later.
    pub fn check(&self) -> Result<(), ConfigError> {
        let mut check = Check::default();
        check.front(&self.gateway);
        check.policy(&self.policy);
        check.engines(self);
        check.discovery(self);
        check.tenants(self);
        check.public_prefixes(self);
        ConfigError::unless(check.faults)
    }
}

impl Check {
    fn refuse(&mut self, option: impl Into<String>, value: impl fmt::Display, want: &str) {
        self.faults.push(Fault { line: None, option: option.into(), what: format!("{value}: {want}") });
    }

    fn positive(&mut self, option: impl Into<String>, value: u64) {
        if value == 0 {
            self.refuse(option, value, "must be at least 1");
        }
    }

    fn lasting(&mut self, option: impl Into<String>, span: Duration, want: &str) {
        if span.is_zero() {
            self.refuse(option, "\"0s\"", want);
        }
    }

    fn front(&mut self, front: &FrontConfig) {
        self.positive("gateway.attempts", front.attempts.into());
        self.positive("gateway.body_limit", front.body_limit as u64);
        self.positive("gateway.choices_limit", front.choices_limit.into());
        self.positive("gateway.connections", front.connections as u64);
        if front.text_cache_bytes < TEXT_CACHE_BYTES_MIN {
            self.refuse("gateway.text_cache_bytes", front.text_cache_bytes, "less than 64KiB remembers no message; give more");
        }
        for (option, span) in [
            ("gateway.request_timeout", front.request_timeout),
            ("gateway.stall_timeout", front.stall_timeout),
            ("gateway.first_token_timeout", front.first_token_timeout),
            ("gateway.connect_timeout", front.connect_timeout),
            ("gateway.receive_timeout", front.receive_timeout),
        ] {
            self.lasting(option, span, "nothing ends within no time; give more");
        }
        if front.first_token_factor.is_nan() || front.first_token_factor < 1.0 {
            self.refuse("gateway.first_token_factor", front.first_token_factor, "must be at least 1");
        }
        if front.admin_key.as_ref().is_some_and(|key| HeaderValue::from_str(key.reveal()).is_err()) {
            self.refuse("gateway.admin_key", "(not shown)", FITS_HEADER);
        }
        if front.salt_secret.as_ref().is_some_and(|secret| secret.reveal().chars().count() < SALT_SECRET_CHARS_MIN) {
            self.refuse(
                "gateway.salt_secret",
                "(not shown)",
                "a secret that can be guessed keeps nobody apart; give at least 16 characters",
            );
        }
    }

    fn policy(&mut self, policy: &PolicyConfig) {
        self.positive("policy.decisions", policy.decisions as u64);
        if let Some(path) = policy.index_snapshot.as_ref().filter(|path| path.file_name().is_none()) {
            self.refuse("policy.index_snapshot", format!("{:?}", path.display().to_string()), "must name a file");
        }
        self.positive("policy.classes", policy.classes.len() as u64);
        for (place, class) in policy.classes.iter().enumerate() {
            let option = |name: &str| format!("policy.classes[{place}].{name}");
            self.lasting(option("start_within"), class.start_within, "nothing starts within no time; give more");
            let objective = class.slo_ttft.unwrap_or(Duration::MAX);
            self.lasting(option("slo_ttft"), objective, "no first token comes within no time; give more");
            if place > 0 && policy.classes[place - 1].from >= class.from {
                self.refuse(option("from"), class.from, "must grow from class to class");
            }
        }
        let PriceWeights { delay, eviction, memory, waste, decode } = policy.weights;
        for (name, weight) in [("delay", delay), ("eviction", eviction), ("memory", memory), ("waste", waste), ("decode", decode)] {
            if !weight.is_finite() || weight < 0.0 {
                self.refuse(format!("policy.weights.{name}"), weight, "a weight must be a number of at least 0");
            }
        }
    }

    fn engines(&mut self, config: &GatewayConfig) {
        let (mut names, mut urls, mut replicas) = (BTreeSet::new(), BTreeSet::new(), 0);
        for (place, engine) in config.engines.iter().enumerate() {
            let option = |name: &str| format!("engines[{place}].{name}");
            // Two engines under one name would be one in metrics, and one address twice is one engine with half of its load unseen.
            for rank in 0..engine.replicas().min(REPLICAS_MAX) as u32 {
                let own = if engine.ranks().is_some() { engine.rank_name(rank) } else { engine.name.clone() };
                let name = own.unwrap_or_else(|| ReplicaId(replicas + rank).to_string());
                if !names.insert(name.clone()) {
                    self.refuse(option("name"), name, "each engine needs a name of its own");
                }
            }
            replicas = replicas.saturating_add(engine.replicas() as u32);
            let url = engine.url.to_string();
            if !urls.insert(url.clone()) {
                self.refuse(option("url"), url, "an engine is named twice; leave one out");
            }
            if engine.ca.is_some() && !engine.url.is_tls() {
                self.refuse(option("ca"), "(set)", "an http:// engine shows no certificate; write https://, or leave this out");
            }
            self.engine(config, engine, option);
        }
    }

    /// What is to be said of one engine alone.
    fn engine(&mut self, config: &GatewayConfig, engine: &EngineConfig, option: impl Fn(&str) -> String) {
        if engine.key.as_ref().is_some_and(|key| HeaderValue::from_str(key.reveal()).is_err()) {
            self.refuse(option("key"), "(not shown)", FITS_HEADER);
        }
        if !engine.kind.takes_salt() && config.tenants.iter().any(|tenant| tenant.isolation == Isolation::Salt) {
            let want = "engines of this kind take no salt and would share prefixes among tenants; leave it out, or set isolation = \"none\" for all";
            self.refuse(option("kind"), format!("{:?}", engine.kind.as_str()), want);
        }
        for (name, value) in [
            ("max_model_len", engine.max_model_len),
            ("block_size", engine.block_size),
            ("kv_blocks", engine.kv_blocks),
            ("max_running", engine.max_running),
            ("token_budget", engine.token_budget),
            ("data_parallel_size", engine.data_parallel_size),
        ] {
            self.positive(option(name), value.map_or(1, u64::from));
        }
        if let Some(path) = engine.slot_path.as_ref().filter(|_| engine.kind != EngineKind::LlamaCpp) {
            self.refuse(option("slot_path"), path.display(), "only llamacpp engines have slots; leave it out");
        }
        if let Some(ranks) = engine.ranks() {
            if !engine.kind.has_ranks() {
                self.refuse(option("data_parallel_size"), ranks, "only vllm and sglang engines have ranks; leave it out");
            }
            for (name, endpoint) in [("kv_events", &engine.kv_events), ("kv_replay", &engine.kv_replay)] {
                if let Some(endpoint) = endpoint.as_ref().filter(|endpoint| of_rank(endpoint, ranks - 1).is_none()) {
                    self.refuse(option(name), endpoint, "each rank publishes at the next port after this one; give tcp://HOST:PORT");
                }
            }
        }
    }

    fn discovery(&mut self, config: &GatewayConfig) {
        let mut labels = BTreeSet::new();
        let mut replicas: usize = config.engines.iter().fold(0, |sum, engine| sum.saturating_add(engine.replicas()));
        if replicas > REPLICAS_MAX {
            self.refuse("engines", replicas, "a fleet has at most 4096 replicas, each rank of an engine counted; give less");
            return;
        }
        for (place, source) in config.discovery.iter().enumerate() {
            let option = |name: &str| format!("discovery[{place}].{name}");
            for wrong in source.source().err().unwrap_or_default() {
                self.refuse(option(wrong.option), wrong.value, &wrong.want);
            }
            if !labels.insert(source.label()) {
                self.refuse(option("type"), source.label(), "a source is named twice; leave one out");
            }
            let every = source.every.unwrap_or(LOOK_EVERY_MAX);
            self.lasting(option("every"), every, "nobody looks without a pause; give more");
            if every > LOOK_EVERY_MAX {
                self.refuse(option("every"), humantime::format_duration(every), "engines come and go within a day; give less");
            }
            self.positive(option("max_engines"), source.max_engines as u64);
            let each = source.engine.data_parallel_size.unwrap_or(1) as usize;
            replicas = replicas.saturating_add(source.max_engines.saturating_mul(each));
            if replicas > REPLICAS_MAX {
                self.refuse(
                    option("max_engines"),
                    source.max_engines,
                    "a fleet has at most 4096 replicas, configured and found, each rank of an engine counted; give less",
                );
            }
            let nowhere = "http://engine".parse().expect("it is a URL");
            self.engine(config, &source.engine.at(nowhere), |name| option(&format!("engine.{name}")));
            for (name, endpoint) in [("kv_events", &source.engine.kv_events), ("kv_replay", &source.engine.kv_replay)] {
                if let Some(endpoint) = endpoint.as_ref().filter(|endpoint| !endpoint.starts_with("tcp://*:")) {
                    self.refuse(option(&format!("engine.{name}")), endpoint, "engines that are found have a host each; give tcp://*:PORT");
                }
            }
        }
    }

    fn public_prefixes(&mut self, config: &GatewayConfig) {
        for (place, prefix) in config.public_prefixes.iter().enumerate() {
            if prefix.system.is_none() && prefix.text.is_none() {
                self.refuse(format!("public_prefixes[{place}].system"), "(none)", "nothing is public by this; give system or text");
            }
        }
    }

    fn tenants(&mut self, config: &GatewayConfig) {
        let (mut names, mut keys) = (BTreeSet::new(), BTreeSet::new());
        for (place, tenant) in config.tenants.iter().enumerate() {
            let option = |name: &str| format!("tenants[{place}].{name}");
            let TenantConfig { name, .. } = tenant;
            if name.is_empty() || name.chars().any(char::is_control) {
                self.refuse(option("name"), format!("{name:?}"), "a tenant has a name without control characters");
            }
            if !names.insert(name) {
                self.refuse(option("name"), name, "each tenant needs a name of its own");
            }
            if tenant.keys.is_empty() {
                self.refuse(option("keys"), "[]", "nobody can be this tenant; give at least one key");
            }
            if tenant.keys.iter().filter(|key| !keys.insert(**key)).count() > 0 {
                self.refuse(option("keys"), "(not shown)", "a key is given twice; it can name one tenant only");
            }
            let bounds = [
                ("requests_per_minute", tenant.requests_per_minute),
                ("tokens_per_minute", tenant.tokens_per_minute),
                ("concurrency", tenant.concurrency.map(u64::from)),
            ];
            for (name, bound) in bounds {
                self.positive(option(name), bound.unwrap_or(1));
            }
            self.lasting(
                option("ttft_padding"),
                tenant.ttft_padding.unwrap_or(Duration::MAX),
                "a span has a length; give more, or leave it out",
            );
            if !tenant.weight.is_finite() || tenant.weight <= 0.0 {
                self.refuse(option("weight"), tenant.weight, "a weight must be a number above 0");
            }
            let classes = &config.policy.classes;
            for unknown in tenant.classes.iter().filter(|name| !classes.iter().any(|class| class.name == **name)) {
                self.refuse(option("classes"), format!("{unknown:?}"), "no [[policy.classes]] has this name");
            }
            if tenant.isolation == Isolation::Salt && config.gateway.salt_secret.is_none() {
                self.refuse(option("isolation"), "\"salt\"", "salts need a secret; set [gateway] salt_secret, or isolation = \"none\"");
            }
            if tenant.priorities(classes).is_empty() {
                let want = "no priority is both in its classes and as unimportant as priority_max and -1000 to 1000 allow; widen one";
                self.refuse(option("classes"), format!("{:?}", tenant.classes), want);
            }
        }
    }
}

const FITS_HEADER: &str = "a key goes into an HTTP header: printable ASCII without line breaks";
