use baton_cost::StepCoefficients;
use baton_units::{Blocks, Tokens};

/// What an engine says of itself, as of the last call that changed it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Status {
    /// Sequences that wait: new ones and preempted ones.
    pub waiting: u32,
    /// Sequences that run; frozen ones and those prepared for hold places and blocks beside them.
    pub running: u32,
    /// Tokens known and not computed, of running and waiting sequences; a decoding sequence counts none. Prefix hits that waiting
    /// ones may find are not taken off.
    pub prefill_backlog: Tokens,
    pub blocks_total: Blocks,
    /// Blocks that hold nothing.
    pub blocks_free: Blocks,
    /// Blocks that hold a cached prefix which nobody uses; given to whoever needs them.
    pub blocks_reclaimable: Blocks,
    /// Tokens that the next step could compute with what is running, for a prefill without context.
    pub token_budget: Tokens,
    pub step_fit: StepCoefficients,
    pub step_prior: StepCoefficients,
    /// Relative error of the predicted step time, averaged over recent steps.
    pub step_error: f64,
    pub counters: Counters,
}

/// Counts since the engine began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    pub steps: u64,
    /// Tokens whose KV was computed, including what preemption made necessary again.
    pub computed_tokens: u64,
    /// Prompt tokens of sequences that reached their first output token.
    pub prompt_tokens: u64,
    /// Of those, tokens that came from the prefix cache.
    pub prompt_tokens_cached: u64,
    pub generation_tokens: u64,
    /// Prompt tokens looked up in the prefix cache, at first admissions.
    pub prefix_queries: u64,
    /// Of those, tokens found.
    pub prefix_hits: u64,
    pub preemptions: u64,
    /// Choices that ended by end of sequence, a stop token, or [`Engine::stop`](crate::Engine::stop).
    pub finished_stop: u64,
    pub finished_length: u64,
    pub finished_abort: u64,
    /// Choices that came from another engine, and those that went to one.
    pub moved_in: u64,
    pub moved_out: u64,
}
