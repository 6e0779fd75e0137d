//! Text to tokens and back: tokenizers from a GGUF header or Hugging Face files, an incremental detokenizer, chat templates.
//!
//! Encoding is done by the `tokenizers` crate; decoding is ours, from each token's bytes, because a stream needs exactly the
//! text that decoding everything at once would give. Templates run in a sandbox that can neither read files nor run for long.
//! This crate keeps no cache of its own, matches no stop strings and knows no model but by its metadata.

mod chat;
mod conversation;
mod detokenizer;
mod error;
mod fragments;
mod gguf;
mod hf;
mod strftime;
mod tokenizer;
mod vocabulary;

pub use chat::{ChatTemplate, Clock};
pub use detokenizer::Detokenizer;
pub use error::{TemplateError, TextError};
pub use fragments::Cut;
pub use tokenizer::Tokenizer;
