//! One replica's engine: the scheduler of continuous batching over paged KV, and sampling. Pure: the caller passes the time.
//!
//! An [`Executor`] carries out the steps that the engine plans. This crate holds no weights, tokenizes nothing, matches no stop
//! strings and opens no sockets.

// Neutral values of options (a penalty of 1) are exact, and equal bits are what the tests are about.
#![allow(clippy::float_cmp)]

mod executor;
mod philox;
mod sample;
mod sampling_params;

pub use executor::{Batch, BatchRow, Executor, SampleRequest, Sampled, SequenceId, StepResult};
pub use philox::philox4x32_10;
pub use sample::sample;
pub use sampling_params::{LOGPROBS_MAX, SamplingError, SamplingOptions, SamplingParams};
