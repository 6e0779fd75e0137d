//! A replica seen from outside: one binary, since linking takes longer than the tests.

#![allow(clippy::unwrap_used, reason = "all of this is test code")]
#![allow(clippy::float_cmp, reason = "counters are whole numbers")]

mod behaviour;
mod gateway;
mod kv_events;
mod metrics;
mod moves;
mod shapes;
mod support;
