use std::sync::Arc;

use baton_text::Tokenizer;
use baton_units::BlockSize;
use baton_wire::openai::ErrorBody;

/// A model as it is served.
#[derive(Debug)]
pub struct Service {
    pub tokenizer: Arc<Tokenizer>,
    pub limits: Limits,
    /// Tokens that end an output unless the request goes on past them.
    pub eos: Vec<u32>,
    /// Of the engine's prefix cache; usage counts whole blocks.
    pub block_size: BlockSize,
    /// Where requests are served by arrival alone, one that names a priority is refused.
    pub orders_by_priority: bool,
}

/// What the model and its vocabulary allow.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Tokens of prompt and output.
    pub max_model_len: u32,
    /// Largest token id plus one.
    pub vocabulary: u64,
}

impl Service {
    /// The wire's priority within the engine's range.
    pub fn priority(&self, asked: Option<i64>) -> Result<i32, ErrorBody> {
        let asked = asked.unwrap_or(0);
        if asked != 0 && !self.orders_by_priority {
            let message = format!("Got priority {asked} but Priority scheduling is not enabled.");
            return Err(ErrorBody::new(400, "BadRequestError", Some("priority"), message));
        }
        Ok(asked.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as i32)
    }
}
