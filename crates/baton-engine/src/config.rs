use std::time::Duration;

use baton_cost::StepCoefficients;
use baton_units::{BlockSize, Blocks, Tokens};

/// What an [`Engine`](crate::Engine) is and may do.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineConfig {
    /// Model and revision as the fleet names it: part of every block key.
    pub model: String,
    pub block_size: BlockSize,
    /// KV blocks in the pool.
    pub blocks: Blocks,
    /// Prompt and output tokens of one sequence, at most. A pool that holds fewer lowers it: see
    /// [`Engine::max_model_len`](crate::Engine::max_model_len).
    pub max_model_len: Tokens,
    /// Sequences in one step, at most. Default 256. More of them share a step's fixed cost and lengthen the step.
    pub max_running: u32,
    /// Requests waiting, at most; more are refused. Default 65,536.
    pub max_waiting: u32,
    /// Tokens of one step. Default: derived from a step of 50 ms, from 64 to 8,192.
    pub budget: TokenBudget,
    /// Tokens of one sequence in one step, at most; `None`, the default, leaves it to the budget. Lower, it lets short prompts pass
    /// a long one's prefill and makes that one slower.
    pub long_prefill: Option<Tokens>,
    /// Share of the pool that is kept free when a request is admitted beside running ones. Default 0.01. Higher, fewer running
    /// requests are preempted and fewer run at once.
    pub watermark: f64,
    pub order: Order,
    /// The model's end-of-sequence tokens.
    pub eos: Vec<u32>,
    /// Tokens of the model's vocabulary; ids from there on are refused.
    pub vocabulary: u32,
    /// Seeds the draw of seeds for requests that bring none.
    pub seed: u64,
    /// What a step is expected to cost before any was measured.
    pub step_prior: StepCoefficients,
    /// Whether changes of the prefix cache are told; the owner must then take them with every step. Default true.
    pub kv_events: bool,
}

impl EngineConfig {
    /// The defaults around what has none.
    pub fn new(model: &str, blocks: Blocks, max_model_len: Tokens, step_prior: StepCoefficients) -> Self {
        Self {
            model: model.to_owned(),
            block_size: BlockSize::DEFAULT,
            blocks,
            max_model_len,
            max_running: 256,
            max_waiting: 1 << 16,
            budget: TokenBudget::default(),
            long_prefill: None,
            watermark: 0.01,
            order: Order::Arrival,
            eos: Vec::new(),
            vocabulary: u32::MAX,
            seed: 0,
            step_prior,
            kv_events: true,
        }
    }
}

/// In which order requests are admitted, and in reverse which one loses its blocks first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Order {
    /// First come, first served; vLLM's `fcfs`.
    #[default]
    Arrival,
    /// More important ones first, by arrival among equals; vLLM's `priority`.
    Priority,
}

/// How many tokens one step may compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenBudget {
    /// Always this many, as engines with a configured budget do.
    Fixed(Tokens),
    /// The most whose step is predicted, by the fit of measured steps, to take no longer than `target`. Decode rows are always
    /// taken (up to `most`); prefills are cut to fit beside them (Sarathi-Serve, OSDI'24).
    Latency {
        /// Time between two tokens of a running sequence, at most.
        target: Duration,
        /// Tokens that a step may compute whatever the prediction says, so that prefills go on beside slow decodes.
        least: Tokens,
        most: Tokens,
    },
}

impl Default for TokenBudget {
    fn default() -> Self {
        Self::Latency { target: Duration::from_millis(50), least: Tokens(64), most: Tokens(8192) }
    }
}

/// Why an engine cannot be built.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ConfigError {
    #[error("a step of at most 0 tokens computes nothing; give the token budget at least 1")]
    EmptyBudget,
    #[error("the token budget's least, {least}, is above its most, {most}")]
    BudgetBounds { least: Tokens, most: Tokens },
    #[error("max_running is 0; at least 1 sequence must run")]
    NothingRuns,
    #[error("long_prefill is 0 tokens; give at least 1, or none to leave it to the token budget")]
    EmptyPrefill,
    #[error("the watermark is {0}, not a share from 0 up to but not including 1")]
    Watermark(f64),
    #[error("{blocks} and a max_model_len of {max_model_len} leave no room for a prompt and one output token")]
    TooSmall { blocks: Blocks, max_model_len: Tokens },
}

impl EngineConfig {
    /// Tokens of one sequence that both the model and the pool hold: the last token's KV is never computed.
    pub(crate) fn length_limit(&self) -> Tokens {
        let capacity = u64::from(self.blocks.0) * u64::from(self.block_size.get()) + 1;
        Tokens(u64::from(self.max_model_len.0).min(capacity) as u32)
    }

    pub(crate) fn watermark_blocks(&self) -> Blocks {
        Blocks((self.watermark * self.blocks.as_f64()).ceil() as u32)
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let (least, most) = match self.budget {
            TokenBudget::Fixed(tokens) => (tokens, tokens),
            TokenBudget::Latency { least, most, .. } => (least, most),
        };
        if most == Tokens::ZERO || least == Tokens::ZERO {
            return Err(ConfigError::EmptyBudget);
        }
        if least > most {
            return Err(ConfigError::BudgetBounds { least, most });
        }
        if self.max_running == 0 {
            return Err(ConfigError::NothingRuns);
        }
        if self.long_prefill == Some(Tokens::ZERO) {
            return Err(ConfigError::EmptyPrefill);
        }
        if !(0.0..1.0).contains(&self.watermark) {
            return Err(ConfigError::Watermark(self.watermark));
        }
        if self.length_limit() < Tokens(2) {
            return Err(ConfigError::TooSmall { blocks: self.blocks, max_model_len: self.max_model_len });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> EngineConfig {
        let free = StepCoefficients { fixed_s: 0.0, per_token_s: 0.0, per_attended_s: 0.0, per_kv_token_s: 0.0, weights_s: 0.0 };
        EngineConfig::new("m", Blocks(10), Tokens(100), free)
    }

    #[test]
    fn a_config_that_could_not_work_is_refused_with_its_numbers() {
        let error = |change: fn(&mut EngineConfig)| {
            let mut config = config();
            change(&mut config);
            config.check().unwrap_err().to_string()
        };
        assert_eq!(config().check(), Ok(()));
        assert!(error(|config| config.budget = TokenBudget::Fixed(Tokens(0))).contains("0 tokens"));
        let bounds = |config: &mut EngineConfig| {
            config.budget = TokenBudget::Latency { target: Duration::ZERO, least: Tokens(9), most: Tokens(8) };
        };
        assert_eq!(error(bounds), "the token budget's least, 9 tokens, is above its most, 8 tokens");
        assert!(error(|config| config.max_running = 0).contains("max_running"));
        assert!(error(|config| config.long_prefill = Some(Tokens(0))).contains("long_prefill"));
        assert!(error(|config| config.watermark = 1.0).contains("watermark is 1"));
        assert!(error(|config| config.blocks = Blocks(0)).contains("0 blocks"));
    }

    #[test]
    fn a_small_pool_bounds_the_length_of_a_sequence() {
        let with = |blocks| EngineConfig { blocks: Blocks(blocks), ..config() }.length_limit();
        assert_eq!(with(10), Tokens(100));
        assert_eq!(with(6), Tokens(97));
    }
}
