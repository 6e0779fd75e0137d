//! The OpenAI API over token streams: what a request asks of an engine, and its answer from the tokens that come back, wherever they are
//! computed. A replica answers its own engine's tokens with it, a gateway those of whichever replica runs the request.
//!
//! A request becomes a [`Checked`], with its prompts' tokens an [`Understood`], whose [`Answer`] takes output tokens and writes the
//! client's events or body. Answers and refusals are those of a vLLM server. This crate renders no chat template, tokenizes nothing,
//! runs nothing and draws nothing: prompts come as tokens, and the seed from the caller.
//!
//! ```
//! # use std::sync::Arc;
//! # use baton_openai::{Checked, Limits, Service, Token};
//! # use baton_engine::FinishReason;
//! # use baton_text::Tokenizer;
//! # use baton_units::BlockSize;
//! # use baton_wire::openai::{CompletionRequest, ErrorBody, Head, parse};
//! # fn main() -> Result<(), ErrorBody> {
//! let service = Arc::new(Service {
//!     tokenizer: Arc::new(Tokenizer::bytes4()),
//!     limits: Limits { max_model_len: 2048, vocabulary: 1 << 32 },
//!     eos: Vec::new(),
//!     block_size: BlockSize::DEFAULT,
//!     orders_by_priority: false,
//! });
//! let request: CompletionRequest = parse(br#"{ "prompt": "Once", "max_tokens": 1 }"#)?;
//! let prompt = service.tokenizer.encode("Once", true);
//! let head = Head { id: "cmpl-1".into(), created: 0, model: "m".into(), system_fingerprint: None };
//! let mut understood = Checked::completion(&service, &request)?.with_prompts(head, vec![prompt], 7)?;
//! // An engine runs `understood.prompts`, and draws this:
//! let token = Token { id: u32::from_le_bytes(*b" upo"), logprob: None, top: Vec::new() };
//! let mut body = Vec::new();
//! let _ = understood.answer.push(0, token, Some(FinishReason::Length), &mut body);
//! assert!(understood.answer.has_ended());
//! understood.answer.finish(&mut body);
//! assert!(String::from_utf8_lossy(&body).contains(r#""text":" upo""#));
//! # Ok(())
//! # }
//! ```

mod answer;
mod chat;
mod checks;
mod choice;
mod completion;
mod logprobs;
mod request;
mod sampling;
mod service;
mod stop;

pub use answer::{Answer, Counts, Format, OtherText, Progress, Pushed};
pub use chat::{check_chat, template_arguments};
pub use checks::{
    Asked, check_prompt, check_supported, choices, output_limit, output_limit_or_short, sampling_options, text_options, with_max_tokens,
};
pub use choice::{End, Piece, TextOptions, Token};
pub use logprobs::{own_logprob, written_logprob};
pub use request::{Checked, Prompt, Understood};
pub use sampling::{sampling_from_wire, sampling_to_wire};
pub use service::{Limits, Service};
