//! A replica seen from outside: one binary, since linking takes longer than the tests.

#![allow(clippy::unwrap_used, reason = "all of this is test code")]
#![allow(clippy::wildcard_enum_match_arm, reason = "what a test does not expect fails it")]
#![allow(clippy::float_cmp, reason = "counters are whole numbers")]

mod behaviour;
mod cpu_moves;
mod gateway;
mod kv_events;
mod metrics;
mod moves;
mod shapes;
mod support;
#[path = "../../../baton-model/tests/suite/tiny.rs"]
#[allow(dead_code, reason = "that crate's own tests use all of it")]
mod tiny;
