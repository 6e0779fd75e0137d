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

mod check;
mod discovery;
mod read;
mod reference;
mod reload;
mod values;

use std::{fmt, net::SocketAddr, ops::RangeInclusive, path::PathBuf, time::Duration};

use baton_policy::{PolicyName, PriceWeights, PriorityClass, RouterConfig};
use baton_units::{Bytes, Priority};
use documented::{Documented, DocumentedFields};
use serde::{Deserialize, Serialize};

pub(crate) use self::discovery::Source;
pub use self::{
    discovery::{DiscoveryConfig, DiscoveryType, EngineTemplate},
    read::{ConfigError, Fault},
    reference::{reference, skeleton},
    reload::Reloaded,
    values::{KeyHash, NotAHash, Secret, Text},
};
use crate::{engine::BaseUrl, intake::Api, prompt::KEY_MODEL, reserved::PRIORITY_MAX, tls::Authorities, token_api::TokenApi};

/// Everything that `baton serve --config FILE` reads.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GatewayConfig {
    pub gateway: FrontConfig,
    pub engines: Vec<EngineConfig>,
    pub policy: PolicyConfig,
    pub moves: MovesConfig,
    pub discovery: Vec<DiscoveryConfig>,
    pub tenants: Vec<TenantConfig>,
    pub public_prefixes: Vec<PublicPrefixConfig>,
}

/// The front door and its bounds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Documented, DocumentedFields)]
#[serde(deny_unknown_fields, default)]
pub struct FrontConfig {
    /// Address to listen on.
    pub bind: SocketAddr,
    /// Time that running streams get to finish after SIGTERM; the rest end with an error event. Higher: fewer cut
    /// streams, slower restarts.
    #[serde(with = "values::duration")]
    pub drain_timeout: Duration,
    /// Longest life of a request, waiting included. Higher: a forgotten client holds its place longer.
    #[serde(with = "values::duration")]
    pub request_timeout: Duration,
    /// Longest silence of an engine after its first token, and longest time that a client may leave its stream unread. An engine that gives nobody anything for four
    /// times its longest silence so far, and four full steps, and 2 s, is taken for hung before that. Higher: hangs are found later; lower: slow steps are taken for hangs.
    #[serde(with = "values::duration")]
    pub stall_timeout: Duration,
    /// Least time that an engine gets for its first token. Where it has given eight, and another replica is ready, four times the longest that one took are enough, and 2 s.
    /// Higher: hangs are found later.
    #[serde(with = "values::duration")]
    pub first_token_timeout: Duration,
    /// An engine gets this many times the predicted time to the first token when that is longer.
    pub first_token_factor: f64,
    /// Time to open a connection to an engine.
    #[serde(with = "values::duration")]
    pub connect_timeout: Duration,
    /// Attempts for one request, the first included; only while the client has seen no output. Higher: more failures are
    /// hidden, and a request that kills engines kills more of them.
    pub attempts: u32,
    /// Largest request body. Higher: more memory for one request.
    #[serde(with = "values::size")]
    pub body_limit: usize,
    /// Most choices (`n` times prompts) in one request.
    pub choices_limit: u32,
    /// Clients' connections at once; further ones wait, unaccepted, until one closes. Higher: more memory and two file
    /// descriptors for each running request.
    pub connections: usize,
    /// Time that a client gets to send a request's head, and again for its body; a connection without a request is closed after it. Higher: slow or idle clients hold connections for longer.
    #[serde(with = "values::duration")]
    pub receive_timeout: Duration,
    /// Idle connections kept to each engine. Higher: fewer connects under bursts, more sockets.
    pub idle_connections: usize,
    /// Stream non-streaming requests from engines that allow it and assemble the answer here, so that a failed attempt can be
    /// repeated and load is seen token by token.
    pub assemble: bool,
    /// Whether a stream whose engine fails after its first token goes on at another one, from the tokens that its client has: `"exact"`, at
    /// engines that compute the same bits (see `engines.numerics`); `"any"`, at any engine of the model, where the text may go on otherwise
    /// than it would have; `"never"`, so that its client is told of the failure.
    pub continue_streams: Continue,
    /// Let clients send `chat_template`. A template is a program that runs on the engine.
    pub client_chat_template: bool,
    /// Name the replica that answers in each answer's header `x-baton-replica`. Without it clients cannot tell replicas apart by what the gateway
    /// says.
    pub expose_replica: bool,
    /// Memory for the tokens of text that was seen before, at most; a third each for messages, for the text between special tokens, and
    /// for words. At least `"64KiB"`. Lower: more of a growing conversation is tokenized again.
    #[serde(with = "values::size")]
    pub text_cache_bytes: usize,
    /// Address of its own for `/baton/v1`, which is then nowhere else. Default: none, it is served at `bind`.
    pub admin_bind: Option<SocketAddr>,
    /// Key for `/baton/v1`, as `Authorization: Bearer KEY`. Without one those paths exist only where they are served at a loopback address.
    #[serde(skip_serializing)]
    pub admin_key: Option<Secret>,
    /// Secret by which tenants' salts are made (`[[tenants]]` with `isolation = "salt"`): at least 16 characters, the same at every gateway of
    /// the fleet. Another one leaves what is cached behind. Default: none.
    #[serde(skip_serializing)]
    pub salt_secret: Option<Secret>,
    /// Certificate with which clients are served over TLS; without it they are served in the clear. The admin API is served with it, too, where it has
    /// no address of its own; at `admin_bind` it stays in the clear.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsConfig>,
    /// File with the fleet key, where replicas' control connections ask for one (`baton replica --fleet-key-file`). Default: none.
    pub fleet_key_file: Option<PathBuf>,
}

/// TLS towards clients: versions 1.2 and 1.3. Both files are read again on SIGHUP, for the connections that come then.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Documented, DocumentedFields)]
#[serde(deny_unknown_fields)]
pub struct TlsConfig {
    /// PEM file with the certificate, and after it those that vouch for it.
    pub cert: PathBuf,
    /// PEM file with the certificate's private key.
    pub key: PathBuf,
}

/// One replica; the table comes once for each.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Documented, DocumentedFields)]
#[serde(deny_unknown_fields)]
pub struct EngineConfig {
    /// Where its HTTP server is, for example `http://10.0.0.5:8000`, or `https://engine.example` where it speaks TLS.
    pub url: BaseUrl,
    /// What it is: `baton`, `vllm`, `sglang`, `llamacpp` or `openai`; decides which of its abilities are used.
    pub kind: EngineKind,
    /// Name in metrics and the admin API. Default `r0`, `r1`, … by position.
    #[serde(default)]
    pub name: Option<String>,
    /// PEM file with the certificates that vouch for an `https://` engine's, which must have the host of its URL as a name. Default: those that browsers
    /// trust. Read again on SIGHUP.
    #[serde(default)]
    pub ca: Option<Authorities>,
    /// Sent as `Authorization: Bearer KEY`; clients' own credentials never reach an engine.
    #[serde(default, skip_serializing)]
    pub key: Option<Secret>,
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
    /// Ranks of data parallelism behind the one address (`--data-parallel-size` of vLLM, `--dp-size` of SGLang). Each is a replica of its own here, named
    /// `NAME-dp0`, `NAME-dp1`, …, with its own cache, load and events, and gets its requests by the header `X-Data-Parallel-Rank`. Default 1.
    #[serde(default)]
    pub data_parallel_size: Option<u32>,
    /// ZMQ endpoint of its KV events, where it cannot be asked. A concrete host is dialled from here, unlike in vLLM's own rule.
    #[serde(default)]
    pub kv_events: Option<String>,
    /// ZMQ endpoint for replay of KV events.
    #[serde(default)]
    pub kv_replay: Option<String>,
    /// Folder of llama.cpp's `--slot-save-path`, as the gateway sees it: plain streams then take their KV along when their server drains or an
    /// operator moves them. Each life of the server is tried out first, since not every build goes on from a slot as it should. Default: none, they go on
    /// from their tokens.
    #[serde(default)]
    pub slot_path: Option<PathBuf>,
    /// Whether it orders requests by priority (vLLM's `--scheduling-policy priority`); vLLM refuses the field without it. Default
    /// true for `baton`, false otherwise.
    #[serde(default)]
    pub priorities: Option<bool>,
    /// Engines that name the same group are alike in hardware and settings: each counts as fast as all of them together have shown,
    /// until it has shown itself to be faster or slower, so that one unlucky measurement does not keep requests away. Default: those
    /// are alike that are of one kind, serve the same models and have the same size.
    #[serde(default)]
    pub group: Option<String>,
    /// Names what decides the bits of its answers: model, number formats, hardware and software. Engines of the same name go on with each
    /// other's streams. Default: kind, the model's root and the engine's version (of llama.cpp build, number format and file), as it tells them;
    /// engines that differ in more need names.
    #[serde(default)]
    pub numerics: Option<String>,
}

/// Where a stream may go on that has lost its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Continue {
    Exact,
    Any,
    Never,
}

/// Where requests go.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Documented, DocumentedFields)]
#[serde(deny_unknown_fields, default)]
pub struct PolicyConfig {
    /// Rule by which a replica is chosen: `price`, `round-robin`, `random`, `least-outstanding`, `least-response-time`, `least-kv`,
    /// `session-hash`, `power-of-two`, `longest-prefix` or `cheap-signals`; `PUT /baton/v1/policy` changes it at run time.
    #[serde(with = "values::text")]
    pub name: PolicyName,
    /// Seed of ties and of random rules.
    pub seed: u64,
    /// Requests that may wait at the gateway for a place; one more is refused with 429. Higher: longer waits before a
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
    #[serde(with = "values::size")]
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

/// Running requests that change their replica.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Documented, DocumentedFields)]
#[serde(deny_unknown_fields, default)]
pub struct MovesConfig {
    /// Move requests where that is worth more than it costs: to balance memory, to make room for long ones, to be fair. Without
    /// it they still move where an operator orders it, where a replica drains, and where one is lost.
    pub enabled: bool,
}

/// Clients that share keys, limits and books; the table comes once for each. With at least one, who brings no tenant's key is turned away
/// with 401; without any, the gateway is open to all who reach it. Tenants and their keys change while it serves (SIGHUP).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Documented, DocumentedFields)]
#[serde(deny_unknown_fields)]
pub struct TenantConfig {
    /// Name in metrics.
    pub name: String,
    /// Keys of its clients, which send one as `Authorization: Bearer KEY` or `x-api-key: KEY`. Each is `"sha256:…"`, as `baton hash-key`
    /// prints it, or `{ env = "NAME" }` or `{ file = "PATH" }` with a hash or the key itself. Keys should be long and random.
    #[serde(skip_serializing)]
    pub keys: Vec<KeyHash>,
    /// Most important priority that its requests get; what asks for a more important one, a lower number, gets this. Default: none, -1000.
    #[serde(default)]
    pub priority_max: Option<i32>,
    /// Names of the `[[policy.classes]]` that its requests may be of. A priority of another class becomes the nearest one, less important
    /// where there is such, that they may have. Default: all.
    #[serde(default)]
    pub classes: Vec<String>,
    /// `salt`: its prefixes are kept apart from all others', in engines' caches and in what is known of them, so that no other tenant can
    /// learn from its times what this one sent; needs `[gateway] salt_secret` and engines that take a salt (`baton`, `vllm`, `sglang`).
    /// `none`: prefixes are shared with all tenants that say so, too. Default `salt`; what is shared is computed once for each tenant.
    #[serde(default)]
    pub isolation: Isolation,
    /// Holds the first token of a prompt that the tenant did not send itself of late back to where it would be had nobody else sent it: by what a
    /// prefix saves that another tenant brought, and then to the end of a span of this length, so that its clients cannot tell from their
    /// times what others sent where prefixes are shared. The rest of the answer comes as much later. Longer: less can be told from prices
    /// that are not exact, and new prompts wait longer, by half of it on average. Default: none, nothing is held back.
    #[serde(default, with = "values::some_duration")]
    pub ttft_padding: Option<Duration>,
    /// Its part of the fleet where requests wait: of two tenants with requests of equal importance waiting all along, one gets so many times the
    /// other's service, prompts that are computed and twice their output in tokens. Default 1.
    #[serde(default = "equal_weight")]
    pub weight: f64,
    /// Requests that may begin in a minute, and as many at once after a quiet one; more are refused with 429. Default: any number.
    #[serde(default)]
    pub requests_per_minute: Option<u64>,
    /// Tokens of prompts and output together in a minute, and as many at once after a quiet one. A request sets aside its prompt and the output
    /// that it allows itself (`max_tokens`), and gives back what it did not use; what it uses beyond that is owed. Default: any number.
    #[serde(default)]
    pub tokens_per_minute: Option<u64>,
    /// Requests at once, those that wait in the gateway included; more are refused with 429. Default: any number.
    #[serde(default)]
    pub concurrency: Option<u32>,
}

/// A beginning of prompts that is no secret, such as a system prompt; the table comes once for each. Its KV is computed and held once for all
/// tenants, and what follows it is each tenant's own, as its `isolation` says: salts count from the first block on that is not wholly of
/// the prefix. Only `baton` engines can do that: requests for a model that others serve, too, are salted from their first token on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Documented, DocumentedFields)]
#[serde(deny_unknown_fields)]
pub struct PublicPrefixConfig {
    /// System prompt with which chats begin, as text or `{ file = "PATH" }`, which is read again on SIGHUP. Tools and template arguments
    /// that change what is before its end make it another one.
    #[serde(default)]
    pub system: Option<Text>,
    /// Text with which prompts of completions begin, likewise.
    #[serde(default)]
    pub text: Option<Text>,
}

fn equal_weight() -> f64 {
    1.0
}

/// Whether a tenant's prefixes are its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Isolation {
    #[default]
    Salt,
    None,
}

/// Requests of one importance: who is served before whom, and how soon.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Documented, DocumentedFields)]
#[serde(deny_unknown_fields)]
pub struct ClassConfig {
    /// Label of its counters.
    pub name: String,
    /// Its most important priority, the lowest number; it reaches to where the next class begins. Default: all that matter more than
    /// the next class.
    #[serde(default = "most_important")]
    pub from: i32,
    /// Longest time from a request's arrival to its prompt's first step; one that would start later is turned away.
    #[serde(with = "values::duration")]
    pub start_within: Duration,
    /// Objective for `price`: a first token is late after this, and mean lateness counts above all else. Short: replicas are kept free
    /// of long prompts for the others; long: those wait a little for long ones' sake. Default: none, each ms counts alike.
    #[serde(default, with = "values::some_duration")]
    pub slo_ttft: Option<Duration>,
}

fn most_important() -> i32 {
    i32::MIN
}

/// What an engine is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    Baton,
    Vllm,
    Sglang,
    LlamaCpp,
    OpenAi,
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
            continue_streams: Continue::Exact,
            client_chat_template: false,
            expose_replica: false,
            text_cache_bytes: 96 << 20,
            admin_bind: None,
            admin_key: None,
            salt_secret: None,
            tls: None,
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

impl TenantConfig {
    /// A tenant without keys and limits.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            keys: Vec::new(),
            priority_max: None,
            classes: Vec::new(),
            isolation: Isolation::default(),
            ttft_padding: None,
            weight: equal_weight(),
            requests_per_minute: None,
            tokens_per_minute: None,
            concurrency: None,
        }
    }

    /// Priorities that its requests may have, in order; none where its options contradict each other.
    pub(crate) fn priorities(&self, classes: &[ClassConfig]) -> Vec<RangeInclusive<i32>> {
        let most = self.priority_max.unwrap_or(-PRIORITY_MAX).max(-PRIORITY_MAX);
        if self.classes.is_empty() {
            return vec![most..=PRIORITY_MAX];
        }
        let range = |(place, class): (usize, &ClassConfig)| {
            // What is more important than all classes is of the first.
            let from = if place == 0 { most } else { class.from.max(most) };
            let to = classes.get(place + 1).map_or(PRIORITY_MAX, |next| next.from.saturating_sub(1).min(PRIORITY_MAX));
            (self.classes.contains(&class.name) && from <= to).then_some(from..=to)
        };
        classes.iter().enumerate().filter_map(range).collect()
    }
}

impl EngineConfig {
    /// An engine of which only address and kind are known.
    pub fn new(url: BaseUrl, kind: EngineKind) -> Self {
        Self {
            url,
            kind,
            name: None,
            ca: None,
            key: None,
            models: Vec::new(),
            max_model_len: None,
            block_size: None,
            kv_blocks: None,
            max_running: None,
            token_budget: None,
            data_parallel_size: None,
            kv_events: None,
            kv_replay: None,
            slot_path: None,
            priorities: None,
            group: None,
            numerics: None,
        }
    }

    pub(crate) fn key(&self) -> Option<&str> {
        self.key.as_ref().map(Secret::reveal)
    }

    /// Its ranks, where there are several.
    pub(crate) fn ranks(&self) -> Option<u32> {
        self.data_parallel_size.filter(|&size| size > 1)
    }

    /// Replicas of the fleet that it is.
    pub(crate) fn replicas(&self) -> usize {
        self.ranks().unwrap_or(1) as usize
    }

    /// What one of its ranks is called.
    pub(crate) fn rank_name(&self, rank: u32) -> Option<String> {
        Some(format!("{}-dp{rank}", self.name.as_ref()?))
    }
}

impl fmt::Debug for EngineConfig {
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

    /// `return_token_ids` gives each chunk's token ids.
    pub(crate) fn gives_token_ids(self, api: Api) -> bool {
        match self {
            Self::Baton | Self::Vllm => true,
            // Its chunks of a chat have no place for them.
            Self::Sglang => api == Api::Completions,
            Self::LlamaCpp | Self::OpenAi => false,
        }
    }

    /// Its streams hold everything that an answer in one piece needs.
    pub fn streams_fully(self) -> bool {
        matches!(self, Self::Baton | Self::Vllm)
    }

    /// How it computes from token ids, where it does.
    pub(crate) fn token_api(self) -> Option<TokenApi> {
        match self {
            Self::Baton | Self::Vllm | Self::Sglang => Some(TokenApi::Completions),
            Self::LlamaCpp => Some(TokenApi::LlamaCpp),
            Self::OpenAi => None,
        }
    }

    /// `stream_options.include_usage` is understood. An unknown server may refuse a field that its client did not send.
    pub fn gives_usage(self) -> bool {
        !matches!(self, Self::OpenAi)
    }

    /// `cache_salt` separates prefix caches.
    pub fn takes_salt(self) -> bool {
        matches!(self, Self::Baton | Self::Vllm | Self::Sglang)
    }

    /// A salt may count from a later token than the first on (`cache_public`).
    pub fn takes_public(self) -> bool {
        matches!(self, Self::Baton)
    }

    /// `X-Data-Parallel-Rank` chooses who of several engines behind one address computes a request.
    pub fn has_ranks(self) -> bool {
        matches!(self, Self::Vllm | Self::Sglang)
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

#[cfg(test)]
mod tests;
