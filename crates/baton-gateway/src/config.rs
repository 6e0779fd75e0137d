//! The gateway's configuration file.
//!
//! ```
//! let config = baton_gateway::GatewayConfig::from_toml(r#"
//!     [gateway]
//!     bind = "127.0.0.1:8080"
//!
//!     [[engines]]
//!     url = "http://127.0.0.1:8101"
//!     kind = "vllm"
//!
//!     [policy]
//!     name = "price"
//! "#).unwrap();
//! assert_eq!(config.engines.len(), 1);
//! ```

use std::{collections::BTreeSet, fmt, net::SocketAddr, path::PathBuf, time::Duration};

use baton_policy::{PolicyName, PriceWeights, PriorityClass, RouterConfig};
use baton_units::{Bytes, Priority, ReplicaId};
use http::HeaderValue;
use serde::{Deserialize, Deserializer};

use crate::{engine::BaseUrl, prompt::KEY_MODEL};

/// A third of it, in two generations, still holds a message of a few hundred words.
const TEXT_CACHE_BYTES_MIN: usize = 64 << 10;

/// Everything that `baton serve --config FILE` reads.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GatewayConfig {
    pub gateway: FrontConfig,
    pub engines: Vec<EngineConfig>,
    pub policy: PolicyConfig,
    pub moves: MovesConfig,
}

/// `[gateway]`: the front door and its bounds.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FrontConfig {
    /// Address to listen on. Default `127.0.0.1:8080`.
    pub bind: SocketAddr,
    /// Time that running streams get to finish after SIGTERM; the rest end with an error event. Default `"30s"`. Higher: fewer cut
    /// streams, slower restarts.
    #[serde(deserialize_with = "duration")]
    pub drain_timeout: Duration,
    /// Longest life of a request, waiting included. Default `"1h"`. Higher: a forgotten client holds its place longer.
    #[serde(deserialize_with = "duration")]
    pub request_timeout: Duration,
    /// Longest silence of an engine after its first token, and longest time that a client may leave its stream unread. Default
    /// `"2m"`. Higher: hangs are found later; lower: slow steps are taken for hangs.
    #[serde(deserialize_with = "duration")]
    pub stall_timeout: Duration,
    /// Least time that an engine gets for its first token. Default `"60s"`. Higher: hangs are found later.
    #[serde(deserialize_with = "duration")]
    pub first_token_timeout: Duration,
    /// An engine gets this many times the predicted time to the first token when that is longer. Default 10.
    pub first_token_factor: f64,
    /// Time to open a connection to an engine. Default `"2s"`.
    #[serde(deserialize_with = "duration")]
    pub connect_timeout: Duration,
    /// Attempts for one request, the first included; only while the client has seen no output. Default 3. Higher: more failures are
    /// hidden, and a request that kills engines kills more of them.
    pub attempts: u32,
    /// Largest request body. Default `"64MiB"`. Higher: more memory for one request.
    #[serde(deserialize_with = "bytes")]
    pub body_limit: usize,
    /// Most choices (`n` times prompts) in one request. Default 128.
    pub choices_limit: u32,
    /// Clients' connections at once; further ones wait, unaccepted, until one closes. Default 4096. Higher: more memory and two file
    /// descriptors for each running request.
    pub connections: usize,
    /// Time that a client gets to send a request's head, and again for its body; a connection without a request is closed after it.
    /// Default `"60s"`. Higher: slow or idle clients hold connections for longer.
    #[serde(deserialize_with = "duration")]
    pub receive_timeout: Duration,
    /// Idle connections kept to each engine. Default 64. Higher: fewer connects under bursts, more sockets.
    pub idle_connections: usize,
    /// Stream non-streaming requests from engines that allow it and assemble the answer here, so that a failed attempt can be
    /// repeated and load is seen token by token. Default true.
    pub assemble: bool,
    /// Let clients send `chat_template`. Default false: a template is a program that runs on the engine.
    pub client_chat_template: bool,
    /// Memory for the tokens of text that was seen before, at most; a third each for messages, for the text between special tokens, and
    /// for words. Default `"96MiB"`, at least `"64KiB"`. Lower: more of a growing conversation is tokenized again.
    #[serde(deserialize_with = "bytes")]
    pub text_cache_bytes: usize,
    /// Address of its own for `/baton/v1`, which is then nowhere else. Default: none, it is served at `bind`.
    pub admin_bind: Option<SocketAddr>,
    /// Key for `/baton/v1`, as `Authorization: Bearer KEY`. Without one those paths exist only where they are served at a loopback address.
    pub admin_key: Option<String>,
    /// File with the fleet key, where replicas' control connections ask for one (`baton replica --fleet-key-file`). Default: none.
    pub fleet_key_file: Option<PathBuf>,
}

/// `[[engines]]`: one replica.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineConfig {
    /// Where its HTTP server is, for example `http://10.0.0.5:8000`. TLS is not spoken here; put a proxy beside the engine.
    pub url: BaseUrl,
    /// What it is; decides which of its abilities are used.
    pub kind: EngineKind,
    /// Name in metrics and the admin API. Default `r0`, `r1`, … by position.
    #[serde(default)]
    pub name: Option<String>,
    /// Sent as `Authorization: Bearer KEY`; clients' own credentials never reach an engine.
    #[serde(default)]
    pub key: Option<String>,
    /// Models that it serves, where its `/v1/models` does not say.
    #[serde(default)]
    pub models: Vec<String>,
    /// Prompt and output together, in tokens, where the engine does not say. Default: no limit known.
    #[serde(default)]
    pub max_model_len: Option<u32>,
    /// Tokens per KV block, where the engine does not say. Default 16.
    #[serde(default)]
    pub block_size: Option<u32>,
    /// KV blocks, where the engine does not say. Default 8192.
    #[serde(default)]
    pub kv_blocks: Option<u32>,
    /// Requests that it runs at once, where it does not say. Default 256, vLLM's `--max-num-seqs`.
    #[serde(default)]
    pub max_running: Option<u32>,
    /// Tokens that it computes in one step. Default 2048, vLLM's `--max-num-batched-tokens` for serving.
    #[serde(default)]
    pub token_budget: Option<u32>,
    /// ZMQ endpoint of its KV events, where it cannot be asked. A concrete host is dialled from here, unlike in vLLM's own rule.
    #[serde(default)]
    pub kv_events: Option<String>,
    /// ZMQ endpoint for replay of KV events.
    #[serde(default)]
    pub kv_replay: Option<String>,
    /// Whether it orders requests by priority (vLLM's `--scheduling-policy priority`); vLLM refuses the field without it. Default
    /// true for `baton`, false otherwise.
    #[serde(default)]
    pub priorities: Option<bool>,
    /// Engines that name the same group are alike in hardware and settings: each counts as fast as all of them together have shown,
    /// until it has shown itself to be faster or slower, so that one unlucky measurement does not keep requests away. Default: those
    /// are alike that are of one kind, serve the same models and have the same size.
    #[serde(default)]
    pub group: Option<String>,
}

/// `[policy]`: where requests go.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PolicyConfig {
    /// Rule by which a replica is chosen. Default `price`.
    #[serde(deserialize_with = "from_str")]
    pub name: PolicyName,
    /// Seed of ties and of random rules. Default 0.
    pub seed: u64,
    /// Requests that may wait at the gateway for a place; one more is refused with 429. Default 1024. Higher: longer waits before a
    /// refusal.
    pub queue: usize,
    /// Classes of requests by their priority, in order of importance: who is served before whom, and within what time a prompt must
    /// start to be computed. A request that would start later is turned away at once, with 429 and the time after which it would be
    /// let in. Default: one class of all, `"30s"`. Longer: fewer are turned away in an overload, and those let in wait longer.
    pub classes: Vec<ClassConfig>,
    /// Decisions kept for `/baton/v1/decisions`. Default 4096; about 1 KiB each and more with many replicas.
    pub decisions: usize,
    /// Memory for what is known of the replicas' caches, at most. Default `"1GiB"`: some 7 million blocks, 109 million tokens of KV. Where
    /// it is full, those blocks are forgotten that are expected to save least prefill. Lower: more hits go unseen.
    #[serde(deserialize_with = "bytes")]
    pub index_bytes: usize,
    /// File in which what is known of the engines' caches is kept over a restart of the gateway, written every 10 seconds and at
    /// shutdown. An engine that lives on is routed to by its cache at once when the gateway is back; without the file that takes the
    /// engine's replay of its events, as far as it reaches. Default: none. It holds hashes of prompts' blocks and no text, some 24 to
    /// 32 bytes a block, and only its owner can read it.
    pub index_snapshot: Option<PathBuf>,
    /// Requests of this priority and more important ones (lower numbers) ask for quiet: their replica is left no more load than lets it
    /// decode at nearly full speed. Others that would exceed it go elsewhere unless that costs them more, and running ones are moved
    /// off. Default: none ask. Higher: more of the fleet is kept half empty.
    pub quiet_from: Option<i32>,
    /// Weights of the terms of `price`; all 1. Zero switches a term off.
    pub weights: PriceWeights,
}

/// `[moves]`: running requests that change their replica.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MovesConfig {
    /// Move requests where that is worth more than it costs: to balance memory, to make room for long ones, to be fair. Default true. Without
    /// it they still move where an operator orders it, where a replica drains, and where one is lost.
    pub enabled: bool,
}

/// `[[policy.classes]]`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClassConfig {
    /// Label of its counters.
    pub name: String,
    /// Its most important priority, the lowest number; it reaches to where the next class begins. Default: all that matter more than
    /// the next class.
    #[serde(default = "most_important")]
    pub from: i32,
    #[serde(deserialize_with = "duration")]
    pub start_within: Duration,
    /// Objective for `price`: a first token is late after this, and mean lateness counts above all else. Short: replicas are kept free
    /// of long prompts for the others; long: those wait a little for long ones' sake. Default: none, each ms counts alike.
    #[serde(default, deserialize_with = "some_duration")]
    pub slo_ttft: Option<Duration>,
}

fn most_important() -> i32 {
    i32::MIN
}

/// What an engine is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    Baton,
    Vllm,
    Sglang,
    LlamaCpp,
    OpenAi,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("the configuration cannot be read: {0}")]
    Toml(#[from] toml::de::Error),
    #[error("no [[engines]] are configured; name at least one url and kind")]
    NoEngines,
    #[error("[gateway] fleet_key_file: {0}")]
    FleetKey(#[from] baton_link::FleetKeyError),
    #[error("{option} = {value}: {want}")]
    OutOfRange { option: &'static str, value: String, want: &'static str },
}

impl GatewayConfig {
    /// Reads and checks a configuration file.
    pub fn from_toml(text: &str) -> Result<Self, ConfigError> {
        let config: Self = toml::from_str(text)?;
        if config.engines.is_empty() {
            return Err(ConfigError::NoEngines);
        }
        config.check()?;
        Ok(config)
    }

    /// Refuses values with which nothing would work.
    pub fn check(&self) -> Result<(), ConfigError> {
        let front = &self.gateway;
        let positive = |option, value: u64| {
            if value > 0 { Ok(()) } else { Err(ConfigError::OutOfRange { option, value: value.to_string(), want: "must be at least 1" }) }
        };
        positive("gateway.attempts", front.attempts.into())?;
        positive("gateway.body_limit", front.body_limit as u64)?;
        positive("gateway.choices_limit", front.choices_limit.into())?;
        positive("gateway.connections", front.connections as u64)?;
        if front.text_cache_bytes < TEXT_CACHE_BYTES_MIN {
            let (option, value) = ("gateway.text_cache_bytes", front.text_cache_bytes.to_string());
            return Err(ConfigError::OutOfRange { option, value, want: "less than 64KiB remembers no message; give more" });
        }
        positive("policy.decisions", self.policy.decisions as u64)?;
        if let Some(path) = self.policy.index_snapshot.as_ref().filter(|path| path.file_name().is_none()) {
            let value = format!("{:?}", path.display().to_string());
            return Err(ConfigError::OutOfRange { option: "policy.index_snapshot", value, want: "must name a file" });
        }
        for (option, span) in [
            ("gateway.request_timeout", front.request_timeout),
            ("gateway.stall_timeout", front.stall_timeout),
            ("gateway.first_token_timeout", front.first_token_timeout),
            ("gateway.connect_timeout", front.connect_timeout),
            ("gateway.receive_timeout", front.receive_timeout),
        ] {
            if span.is_zero() {
                return Err(ConfigError::OutOfRange { option, value: "\"0s\"".into(), want: "nothing ends within no time; give more" });
            }
        }
        positive("policy.classes", self.policy.classes.len() as u64)?;
        for class in &self.policy.classes {
            if class.start_within.is_zero() {
                let (option, value) = ("policy.classes.start_within", "\"0s\"".into());
                return Err(ConfigError::OutOfRange { option, value, want: "nothing starts within no time; give more" });
            }
            if class.slo_ttft.is_some_and(|slo| slo.is_zero()) {
                let (option, value) = ("policy.classes.slo_ttft", "\"0s\"".into());
                return Err(ConfigError::OutOfRange { option, value, want: "no first token comes within no time; give more" });
            }
        }
        if !self.policy.classes.is_sorted_by(|a, b| a.from < b.from) {
            let value = self.policy.classes.iter().map(|class| class.from.to_string()).collect::<Vec<_>>().join(", ");
            return Err(ConfigError::OutOfRange { option: "policy.classes.from", value, want: "must grow from class to class" });
        }
        self.check_names()?;
        let PriceWeights { delay, eviction, memory, waste, decode } = self.policy.weights;
        for weight in [delay, eviction, memory, waste, decode] {
            if !weight.is_finite() || weight < 0.0 {
                let want = "a weight must be a number of at least 0";
                return Err(ConfigError::OutOfRange { option: "policy.weights", value: weight.to_string(), want });
            }
        }
        for engine in &self.engines {
            if engine.key.as_ref().is_some_and(|key| HeaderValue::from_str(key).is_err()) {
                let want = "a key goes into an HTTP header: printable ASCII without line breaks";
                return Err(ConfigError::OutOfRange { option: "engines.key", value: "(not shown)".into(), want });
            }
            for (option, value) in [
                ("engines.max_model_len", engine.max_model_len),
                ("engines.block_size", engine.block_size),
                ("engines.kv_blocks", engine.kv_blocks),
                ("engines.max_running", engine.max_running),
                ("engines.token_budget", engine.token_budget),
            ] {
                value.map_or(Ok(()), |value| positive(option, value.into()))?;
            }
        }
        if front.first_token_factor.is_nan() || front.first_token_factor < 1.0 {
            let value = front.first_token_factor.to_string();
            return Err(ConfigError::OutOfRange { option: "gateway.first_token_factor", value, want: "must be at least 1" });
        }
        Ok(())
    }
}

impl GatewayConfig {
    /// Two engines under one name would be one in metrics, and one address twice is one engine with half of its load unseen.
    fn check_names(&self) -> Result<(), ConfigError> {
        let (mut names, mut urls) = (BTreeSet::new(), BTreeSet::new());
        for (place, engine) in self.engines.iter().enumerate() {
            let name = engine.name.clone().unwrap_or_else(|| ReplicaId(place as u32).to_string());
            if !names.insert(name.clone()) {
                return Err(ConfigError::OutOfRange { option: "engines.name", value: name, want: "each engine needs a name of its own" });
            }
            let url = engine.url.to_string();
            if !urls.insert(url.clone()) {
                return Err(ConfigError::OutOfRange { option: "engines.url", value: url, want: "an engine is named twice; leave one out" });
            }
        }
        Ok(())
    }
}

impl Default for FrontConfig {
    fn default() -> Self {
        Self {
            bind: SocketAddr::from(([127, 0, 0, 1], 8080)),
            drain_timeout: Duration::from_secs(30),
            request_timeout: Duration::from_hours(1),
            stall_timeout: Duration::from_mins(2),
            first_token_timeout: Duration::from_mins(1),
            first_token_factor: 10.0,
            connect_timeout: Duration::from_secs(2),
            attempts: 3,
            body_limit: 64 << 20,
            choices_limit: 128,
            connections: 4096,
            receive_timeout: Duration::from_mins(1),
            idle_connections: 64,
            assemble: true,
            client_chat_template: false,
            text_cache_bytes: 96 << 20,
            admin_bind: None,
            admin_key: None,
            fleet_key_file: None,
        }
    }
}

impl Default for PolicyConfig {
    fn default() -> Self {
        Self {
            name: PolicyName::Price,
            seed: 0,
            queue: 1024,
            classes: vec![ClassConfig {
                name: "default".to_owned(),
                from: most_important(),
                start_within: Duration::from_secs(30),
                slo_ttft: None,
            }],
            decisions: 4096,
            index_bytes: 1 << 30,
            index_snapshot: None,
            quiet_from: None,
            weights: PriceWeights::default(),
        }
    }
}

impl Default for MovesConfig {
    fn default() -> Self {
        Self { enabled: true }
    }
}

impl PolicyConfig {
    fn classes(&self) -> Vec<PriorityClass> {
        let class = |class: &ClassConfig| PriorityClass {
            name: class.name.clone(),
            from: Priority(class.from),
            start_within: class.start_within,
            slo_ttft: class.slo_ttft,
        };
        self.classes.iter().map(class).collect()
    }

    pub(crate) fn router(&self) -> RouterConfig {
        RouterConfig {
            policy: self.name,
            model: KEY_MODEL.to_owned(),
            held_max: self.queue,
            classes: self.classes(),
            decisions_kept: self.decisions,
            index_bytes: Bytes(self.index_bytes as u64),
            weights: self.weights,
            quiet_from: self.quiet_from.map(Priority),
            ..RouterConfig::default()
        }
    }
}

impl EngineConfig {
    /// An engine of which only address and kind are known.
    pub fn new(url: BaseUrl, kind: EngineKind) -> Self {
        Self {
            url,
            kind,
            name: None,
            key: None,
            models: Vec::new(),
            max_model_len: None,
            block_size: None,
            kv_blocks: None,
            max_running: None,
            token_budget: None,
            kv_events: None,
            kv_replay: None,
            priorities: None,
            group: None,
        }
    }
}

impl fmt::Debug for EngineConfig {
    /// Leaves the key out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineConfig").field("url", &self.url).field("kind", &self.kind).field("name", &self.name).finish_non_exhaustive()
    }
}

impl EngineKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Baton => "baton",
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::LlamaCpp => "llamacpp",
            Self::OpenAi => "openai",
        }
    }

    /// `return_token_ids` gives each chunk's token ids. Both engines also stream everything that an assembled answer needs.
    pub fn gives_token_ids(self) -> bool {
        matches!(self, Self::Baton | Self::Vllm)
    }

    /// `stream_options.include_usage` is understood. An unknown server may refuse a field that its client did not send.
    pub fn gives_usage(self) -> bool {
        !matches!(self, Self::OpenAi)
    }

    /// `cache_salt` separates prefix caches.
    pub fn takes_salt(self) -> bool {
        matches!(self, Self::Baton | Self::Vllm | Self::Sglang)
    }

    /// It reports fitted step coefficients itself.
    pub fn reports_steps(self) -> bool {
        matches!(self, Self::Baton)
    }

    /// Every choice of a stream gets a finish reason before `[DONE]`.
    pub fn finishes_every_choice(self) -> bool {
        matches!(self, Self::Baton | Self::Vllm)
    }
}

fn some_duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    duration(deserializer).map(Some)
}

fn duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    humantime::parse_duration(&text).map_err(|error| serde::de::Error::custom(format!("{text:?} is no duration like \"250ms\": {error}")))
}

fn from_str<'de, D: Deserializer<'de>, T: std::str::FromStr<Err: fmt::Display>>(deserializer: D) -> Result<T, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
}

/// `"64MiB"`, `"512KiB"`, or a plain number of bytes.
fn bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Size {
        Bytes(usize),
        Text(String),
    }
    let text = match Size::deserialize(deserializer)? {
        Size::Bytes(bytes) => return Ok(bytes),
        Size::Text(text) => text,
    };
    let digits = text.find(|character: char| !character.is_ascii_digit()).unwrap_or(text.len());
    let unit: usize = match text[digits..].trim() {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        unit => return Err(serde::de::Error::custom(format!("{unit:?} is no unit of bytes; use B, KiB, MiB or GiB"))),
    };
    let count = text[..digits].parse::<usize>().ok().and_then(|count| count.checked_mul(unit));
    count.ok_or_else(|| serde::de::Error::custom(format!("{text:?} is no size like \"64MiB\"")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENGINE: &str = "[[engines]]\nurl = \"http://127.0.0.1:1\"\nkind = \"vllm\"\n";

    fn error(text: &str) -> String {
        GatewayConfig::from_toml(text).unwrap_err().to_string()
    }

    #[test]
    fn durations_sizes_and_names_are_read() {
        let text = format!("[gateway]\ndrain_timeout = \"250ms\"\nbody_limit = \"2KiB\"\n{ENGINE}[policy]\nname = \"round-robin\"\n");
        let config = GatewayConfig::from_toml(&text).unwrap();
        assert_eq!(config.gateway.drain_timeout, Duration::from_millis(250));
        assert_eq!(config.gateway.body_limit, 2048);
        assert_eq!(config.policy.name, PolicyName::RoundRobin);
        assert_eq!(config.engines[0].kind, EngineKind::Vllm);
        assert!(config.moves.enabled && !GatewayConfig::from_toml(&format!("{ENGINE}[moves]\nenabled = false\n")).unwrap().moves.enabled);
    }

    #[test]
    fn what_cannot_work_is_refused_with_its_name() {
        assert!(error(&format!("[gateway]\nattemps = 3\n{ENGINE}")).contains("attemps"));
        assert!(error(&format!("[gateway]\nattempts = 0\n{ENGINE}")).contains("gateway.attempts"));
        assert!(error(&format!("[gateway]\ndrain_timeout = 3\n{ENGINE}")).contains("drain_timeout"));
        assert!(error(&format!("[policy]\nname = \"cheapest\"\n{ENGINE}")).contains("cheapest"));
        assert!(error("[gateway]\n").contains("[[engines]]"));
        assert!(error(&format!("{ENGINE}[moves]\nenable = true\n")).contains("enable"));
        assert!(error("[[engines]]\nurl = \"https://a\"\nkind = \"vllm\"\n").contains("https"));
        assert!(error(&format!("[gateway]\nconnections = 0\n{ENGINE}")).contains("gateway.connections"));
        let too_little = error(&format!("[gateway]\ntext_cache_bytes = \"1KiB\"\n{ENGINE}"));
        assert!(too_little.contains("gateway.text_cache_bytes = 1024") && too_little.contains("64KiB"), "{too_little}");
        assert!(error(&format!("[gateway]\nreceive_timeout = \"0s\"\n{ENGINE}")).contains("gateway.receive_timeout"));
        assert!(error(&format!("{ENGINE}[policy]\nindex_snapshot = \"\"\n")).contains("policy.index_snapshot = \"\""));
        let class = |options: &str| format!("{ENGINE}[[policy.classes]]\nname = \"a\"\nstart_within = \"1s\"\n{options}\n");
        assert!(error(&class("slo_ttft = \"0s\"")).contains("policy.classes.slo_ttft"));
        let objective = GatewayConfig::from_toml(&class("slo_ttft = \"300ms\"")).unwrap().policy.router().classes[0].slo_ttft;
        assert_eq!(objective, Some(Duration::from_millis(300)));
        let key = error(&format!("{ENGINE}key = \"top\\nsecret\"\n"));
        assert!(key.contains("engines.key") && !key.contains("secret"), "{key}");
        assert!(error(&format!("[gateway]\nstall_timeout = \"0s\"\n{ENGINE}")).contains("gateway.stall_timeout"));
        assert!(error(&format!("{ENGINE}[policy.weights]\nwaste = -1\n")).contains("policy.weights = -1"));
        assert!(error(&format!("{ENGINE}{ENGINE}")).contains("engines.url = http://127.0.0.1:1"));
        let other = ENGINE.replace(":1\"", ":2\"");
        assert!(error(&format!("{ENGINE}name = \"r1\"\n{other}")).contains("engines.name = r1"), "the second one's default name");
    }

    #[test]
    fn a_key_is_not_printed() {
        let mut engine = EngineConfig::new("http://h:1".parse().unwrap(), EngineKind::OpenAi);
        engine.key = Some("secret".into());
        assert!(!format!("{engine:?}").contains("secret"));
    }
}
