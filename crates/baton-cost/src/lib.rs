//! Prices in milliseconds and bytes: what a prefill, a decode step, a migration, an adapter or an expert costs on a device.
//!
//! A [`ModelShape`] on a [`Device`] gives [`StepCoefficients`], the common currency of engine, policy and simulator; a
//! [`Calibrator`] fits them to what a replica really took. The rest are closed formulas, each named after its source.
//! This crate decides nothing, measures nothing and knows no fleet: measured numbers are passed in.

// Tests compare numbers that must be the same number.
#![cfg_attr(test, allow(clippy::float_cmp))]

pub mod agent;
pub mod lecture;
pub mod lora;
pub mod moe;

mod affinity;
mod calibrator;
mod hardware;
mod move_price;
mod quantised_kv;
mod shape;
mod step;
mod transfer;

pub use affinity::{affinity_budget_ms, affinity_gain_ms, replication_threshold_sessions};
pub use calibrator::Calibrator;
pub use hardware::{Device, Link, UnknownName};
pub use move_price::{MoveCase, MovePrice, MoveWay, WayPrice};
pub use quantised_kv::QuantisedKv;
pub use shape::{Attention, Experts, ModelShape, ShapeError};
pub use step::{StepCoefficients, StepLoad};
pub use transfer::{Migration, copy_round_ratio, copy_share, fetch_s, kv_budget_bytes};
