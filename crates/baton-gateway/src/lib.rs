//! The front door of a fleet: an OpenAI-compatible HTTP server that sends each request where the router of `baton-policy` says, and
//! carries its life as `baton-session` prescribes.
//!
//! It parses a body once, tokenizes and keys the prompt, streams the answer event by event, retries while the client has seen
//! nothing, and watches its engines (health, load, KV events). It computes no price and holds no rule of choice; it generates no
//! token; it logs no prompt and no output, and keeps of both only tokens, in bounded memory.

mod admin;
mod api;
mod assemble;
mod body;
mod carry;
mod chunk;
mod clock;
mod config;
mod control;
mod discovery;
mod engine;
mod exchange;
mod fleet;
#[cfg(fuzzing)]
pub mod fuzzing;
mod gateway;
mod identity;
mod intake;
mod json;
mod line;
mod listener;
mod live;
#[doc(hidden)]
pub mod measure;
mod metrics;
mod passthrough;
mod pieces;
mod plain;
mod priced;
mod prompt;
mod pulse;
mod refusal;
mod reserved;
mod retries;
mod segments;
mod slo;
mod slots;
mod snapshot;
mod speed;
mod tenants;
mod tls;
mod token_api;
mod trace;
mod turns;
mod upstream;
mod words;

pub use config::{
    ClassConfig, ConfigError, Continue, DiscoveryConfig, DiscoveryType, EngineConfig, EngineKind, EngineTemplate, Fault, FrontConfig,
    GatewayConfig, Isolation, KeyHash, MovesConfig, NotAHash, PolicyConfig, PublicPrefixConfig, Reloaded, Secret, TenantConfig, Text,
    TlsConfig, reference, skeleton,
};
pub use engine::{BaseUrl, UrlError};
pub use gateway::{Gateway, GatewayError};
pub use reserved::{RESERVED, Reserved, Rule};
pub use tls::{Authorities, TlsError};
