//! All tests of this crate in one program, through its public interface: the kernels are compiled once.

#![allow(clippy::unwrap_used)] // All of this is test code, helpers included.

mod files;
mod greedy;
mod invariance;
mod moves;
mod oracle;
mod products;
mod support;
mod tiny;
