//! Prices in milliseconds and bytes: what a prefill, a decode step, a migration, an adapter or an expert costs on a device.
//!
//! A [`ModelShape`] on a [`Device`] gives [`StepCoefficients`], the common currency of engine, policy and simulator; a
//! [`Calibrator`] fits them to what a replica really took. The rest are closed formulas, each named after its source.
//! This crate decides nothing, measures nothing and knows no fleet: measured numbers are passed in.

// Tests compare numbers that must be the same number.
#![cfg_attr(test, allow(clippy::float_cmp))]

mod calibrator;
mod hardware;
mod shape;
mod step;

pub use calibrator::Calibrator;
pub use hardware::{Device, Link, UnknownName};
pub use shape::{Attention, Experts, ModelShape};
pub use step::{StepCoefficients, StepLoad};
