use std::time::Duration;

use baton_cost::StepLoad;
use baton_kv::BlockId;
use baton_units::Tokens;

use crate::{KvMemory, SamplingParams, budget::row_load};

/// One sequence of tokens inside one engine: one choice of one request. Never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub u64);

/// What one engine step computes: one row per scheduled sequence.
#[derive(Debug, Clone, Default)]
pub struct Batch<'a> {
    pub rows: Vec<BatchRow<'a>>,
}

impl Batch<'_> {
    /// What the step computes and reads, for its price.
    pub fn load(&self) -> StepLoad {
        self.rows.iter().map(|row| row_load(row.tokens.len() as u32, row.start)).fold(StepLoad::default(), StepLoad::and)
    }

    /// Tokens computed, of all rows.
    pub fn tokens(&self) -> Tokens {
        self.rows.iter().map(|row| Tokens(row.tokens.len() as u32)).sum()
    }
}

/// Tokens of one sequence whose KV is to be computed in this step.
#[derive(Debug, Clone)]
pub struct BatchRow<'a> {
    pub sequence: SequenceId,
    /// The tokens to compute; never empty.
    pub tokens: &'a [u32],
    /// Position of the first of `tokens`, which is also the count of tokens whose KV exists.
    pub start: u32,
    /// Block table: position `p` lives in `blocks[p / block_size]` at offset `p % block_size`. Covers `start + tokens.len()`; may
    /// be longer. Blocks that hold only positions below `start` may be shared with other rows and must not be written.
    pub blocks: &'a [BlockId],
    /// `Some` when a token is to be drawn from the logits after the last of `tokens`.
    pub sample: Option<SampleRequest<'a>>,
}

/// All that the draw of one token depends on besides the logits.
#[derive(Debug, Clone, Copy)]
pub struct SampleRequest<'a> {
    pub params: &'a SamplingParams,
    pub seed: u64,
    /// Which prompt of a request that has several.
    pub prompt_index: u32,
    /// Which of the `n` choices.
    pub choice_index: u32,
    /// Index of the token to draw among the output, from 0.
    pub output_index: u32,
    pub prompt: &'a [u32],
    /// Output tokens before this one; `output_index` of them.
    pub output: &'a [u32],
    /// Tokens that may not be drawn: end-of-sequence and stop ids before `min_tokens`, else empty.
    pub suppressed: &'a [u32],
}

/// A drawn token.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    pub token: u32,
    /// Natural logarithm of the token's probability under the model itself, before penalties, bias, temperature and filters;
    /// `None` unless log-probabilities were asked for.
    pub logprob: Option<f32>,
    /// The asked number of most likely tokens with their log-probabilities, likeliest first, equal ones by lower id.
    pub top: Vec<(u32, f32)>,
}

/// What a step gave.
#[derive(Debug, Clone, PartialEq)]
pub struct StepResult {
    /// One entry per row, `Some` where the row asked for a sample.
    pub samples: Vec<Option<Sampled>>,
    /// How long the step took: measured, or in model time for an executor that computes nothing.
    pub elapsed: Duration,
}

/// Carries out steps: real arithmetic or a cost model.
///
/// A row's samples must depend on nothing but the row's own tokens and its sample request: not on the other rows, nor on how its
/// tokens were cut into steps, nor on which blocks hold its KV.
pub trait Executor {
    /// Computes the KV of every row's tokens into the row's blocks and draws the tokens asked for.
    fn step(&mut self, batch: &Batch<'_>) -> StepResult;

    /// Copies whole blocks, (from, to), in order. Called before the step that writes to the copies.
    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]);

    /// Names everything that decides the bits of the result: two executors with equal ids give equal tokens and log-probabilities.
    fn numerics_id(&self) -> &str;

    /// The bytes of its KV blocks; `None` for an executor that does not hand them out, whose sequences move by their tokens alone.
    fn kv(&self) -> Option<&dyn KvMemory> {
        None
    }

    /// The same, to be written between two steps.
    fn kv_mut(&mut self) -> Option<&mut dyn KvMemory> {
        None
    }
}
