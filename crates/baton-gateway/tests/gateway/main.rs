//! The gateway over real sockets, between a scripted engine and a client.
#![allow(clippy::unwrap_used, reason = "tests and their helpers")]

mod adapters;
mod beside;
mod by_tokens;
mod connections;
mod copies;
mod discovery;
mod front_door;
mod kv_events;
mod priced;
mod ranks;
mod reload;
mod rests;
mod resume;
mod slots;
mod streams;
mod support;
mod tenants;
mod tls;
