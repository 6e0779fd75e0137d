//! One replica's engine: the scheduler of continuous batching over paged KV, and sampling. Pure: the caller passes the time.
//!
//! An [`Executor`] carries out the steps that the engine plans: real arithmetic elsewhere, or [`Timed`], which computes nothing and
//! says how long it would have taken. This crate holds no weights, tokenizes nothing, matches no stop strings and opens no sockets.

// Neutral values of options (a penalty of 1) are exact, and equal bits are what the tests are about.
#![allow(clippy::float_cmp)]

mod budget;
mod config;
mod engine;
mod executor;
mod philox;
mod request;
mod sample;
mod sampling_params;
mod status;
mod timed;

pub use config::{ConfigError, EngineConfig, Order, TokenBudget};
pub use engine::{Engine, Plan, Step};
pub use executor::{Batch, BatchRow, Executor, SampleRequest, Sampled, SequenceId, StepResult};
pub use philox::philox4x32_10;
pub use request::{Finish, FinishReason, NewRequest, Output, SequenceRecord, SubmitError};
pub use sample::sample;
pub use sampling_params::{LOGPROBS_MAX, SamplingError, SamplingOptions, SamplingParams};
pub use status::{Counters, Status};
pub use timed::{Timed, TokenSource};
