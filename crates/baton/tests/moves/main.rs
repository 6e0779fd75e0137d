//! Live migration between real processes: a gateway, replicas, and clients that must notice nothing.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic like tests")]

#[path = "../common/mod.rs"]
mod common;

mod client;
mod drain;
mod faults;
mod fleet;
mod partition;
mod prefix_fetch;
mod room;
mod streams;
