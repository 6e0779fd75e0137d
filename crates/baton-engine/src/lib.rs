//! One replica's engine: the scheduler of continuous batching over paged KV, and sampling. Pure: the caller passes the time.
//!
//! An [`Executor`] carries out the steps that the engine plans: real arithmetic elsewhere, or [`Timed`], which computes nothing and
//! says how long it would have taken. This crate holds no weights, tokenizes nothing, matches no stop strings and opens no sockets.
//!
//! ```
//! # use baton_cost::{Device, ModelShape, StepCoefficients};
//! # use baton_engine::{Engine, EngineConfig, NewRequest, SamplingParams, Timed, TokenSource};
//! # use baton_units::{Blocks, RequestId, Time, Tokens};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let cost = StepCoefficients::from_profile(&ModelShape::preset("llama-3-8b")?, &Device::preset("h100")?);
//! let config = EngineConfig::new("llama-3-8b", Blocks(1_000), Tokens(8_192), cost);
//! let mut executor = Timed::new(cost, config.blocks, config.block_size, TokenSource::Text, config.eos.clone());
//! let mut engine = Engine::new(config)?;
//! engine.submit(NewRequest::new(RequestId(1), vec![1, 2, 3], SamplingParams::greedy(2)?), Time::ZERO)?;
//! let mut now = Time::ZERO;
//! while let Some(plan) = engine.plan(now) {
//!     let result = plan.run(&mut executor);
//!     now += result.elapsed; // A server waits here; a simulator only sets its clock.
//!     for output in engine.complete(result, now) {
//!         println!("token {} at {now}", output.token);
//!     }
//! }
//! assert_eq!(engine.status().counters.generation_tokens, 2);
//! # Ok(())
//! # }
//! ```

// Neutral values of options (a penalty of 1) are exact, and equal bits are what the tests are about.
#![allow(clippy::float_cmp)]

mod budget;
mod config;
mod engine;
mod executor;
mod exp;
mod kv_memory;
mod migration;
mod philox;
mod request;
mod sample;
mod sampling_params;
mod status;
mod timed;

pub use config::{ConfigError, EngineConfig, Order, TokenBudget};
pub use engine::{Engine, Plan, Step};
pub use executor::{Batch, BatchRow, Executor, SampleRequest, Sampled, SequenceId, StepResult};
pub use kv_memory::{KvBytes, KvLayout, KvMemory, Numerics, NumericsError};
pub use migration::{History, MoveRefusal, OutputEnds, Phase, Prefix, PreparedId, PreparedView, SequenceState, SequenceView};
pub use philox::philox4x32_10;
pub use request::{Finish, FinishReason, NewRequest, Output, SequenceRecord, SubmitError};
pub use sample::sample;
pub use sampling_params::{LOGPROBS_MAX, SamplingError, SamplingOptions, SamplingParams};
pub use status::{Counters, Status};
pub use timed::{Timed, TokenSource};
