//! Weights and arithmetic: Llama-family models on the CPU, behind the engine's [`Executor`](baton_engine::Executor).
//!
//! Activations, accumulation and KV are f32; weights stay as in the file (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q8_0, Q4_K, Q6_K)
//! and become floats inside the kernels. Every result is bitwise independent of batching, chunking, prefix reuse, threads, block
//! size and instructions; `format` states the order of sums that makes it so.
//!
//! It schedules nothing, tokenizes nothing and runs on no accelerator; mixtures of experts and adapters are not here.

// A kernel that is not inlined into the function with the instructions is compiled without them; see `simd::Kernel`.
#![allow(clippy::inline_always)]
// Loops over tiles index several arrays by the same small constant; iterators would hide the shape.
#![allow(clippy::needless_range_loop)]

mod architecture;
mod checkpoint;
mod config;
mod error;
mod executor;
mod format;
mod forward;
mod kernels;
mod kv;
mod matrix;
mod memory;
mod model;
mod pool;
mod quant;
mod simd;
mod spares;
#[doc(hidden)]
pub mod testing;

pub use config::{CpuConfig, KernelPath};
pub use error::ModelError;
pub use executor::CpuExecutor;
