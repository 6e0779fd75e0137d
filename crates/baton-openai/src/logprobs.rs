//! Log-probabilities in the forms of both APIs.

use baton_text::Tokenizer;
use baton_wire::openai::{ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob};
use serde_json::{Map, Value, json};

use crate::Token;

/// JSON has no infinity; vLLM writes this for a token of no probability.
const LOGPROB_MIN: f64 = -9999.0;

/// How tokens are written.
#[derive(Clone, Copy)]
pub(crate) struct Names<'a> {
    pub(crate) tokenizer: &'a Tokenizer,
    /// As `token_id:N` instead of text.
    pub(crate) as_ids: bool,
}

impl Names<'_> {
    fn name(&self, token: u32) -> String {
        if self.as_ids { format!("token_id:{token}") } else { String::from_utf8_lossy(&self.tokenizer.token_bytes(token)).into_owned() }
    }

    /// Chat form of one token.
    pub(crate) fn chat(&self, token: &Token) -> ChatLogprobs {
        let bytes = |token| Some(self.tokenizer.token_bytes(token));
        let top =
            |&(token, logprob): &(u32, f32)| TopLogprob { token: self.name(token), logprob: written_logprob(logprob), bytes: bytes(token) };
        ChatLogprobs {
            content: vec![TokenLogprob {
                token: self.name(token.id),
                logprob: own_logprob(token),
                bytes: bytes(token.id),
                top_logprobs: token.top.iter().map(top).collect(),
            }],
        }
    }

    /// Adds one token in the completions form; `offset` counts the characters of the text before it.
    pub(crate) fn add_completion(&self, logprobs: &mut CompletionLogprobs, token: &Token, offset: usize) {
        let mut top: Map<String, Value> =
            token.top.iter().map(|&(token, logprob)| (self.name(token), json!(written_logprob(logprob)))).collect();
        let name = self.name(token.id);
        if token.top.iter().all(|&(other, _)| other != token.id) {
            top.insert(name.clone(), json!(own_logprob(token)));
        }
        logprobs.text_offset.push(offset);
        logprobs.token_logprobs.push(Some(own_logprob(token)));
        logprobs.tokens.push(name);
        logprobs.top_logprobs.push(Some(top));
    }
}

/// The drawn token's own log-probability as JSON has it.
pub fn own_logprob(token: &Token) -> f64 {
    written_logprob(token.logprob.unwrap_or(f32::NEG_INFINITY))
}

/// A log-probability as JSON has it.
pub fn written_logprob(logprob: f32) -> f64 {
    f64::from(logprob).max(LOGPROB_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(text: [u8; 4]) -> u32 {
        u32::from_le_bytes(text)
    }

    #[test]
    fn the_drawn_token_is_among_the_candidates_once() {
        let tokenizer = Tokenizer::bytes4();
        let names = Names { tokenizer: &tokenizer, as_ids: false };
        let mut logprobs = CompletionLogprobs::default();
        let top = vec![(id(*b"aaaa"), -0.5), (id(*b"bbbb"), f32::NEG_INFINITY)];
        names.add_completion(&mut logprobs, &Token { id: id(*b"cccc"), logprob: Some(-3.0), top: top.clone() }, 7);
        names.add_completion(&mut logprobs, &Token { id: id(*b"aaaa"), logprob: Some(-0.5), top }, 11);
        let top: Vec<Value> = logprobs.top_logprobs.iter().map(|top| json!(top)).collect();
        assert_eq!(top, [json!({ "aaaa": -0.5, "bbbb": -9999.0, "cccc": -3.0 }), json!({ "aaaa": -0.5, "bbbb": -9999.0 })]);
        assert_eq!((logprobs.text_offset, logprobs.tokens), (vec![7, 11], vec!["cccc".to_owned(), "aaaa".to_owned()]));
    }

    #[test]
    fn a_token_can_be_written_as_its_id() {
        let tokenizer = Tokenizer::bytes4();
        let names = Names { tokenizer: &tokenizer, as_ids: true };
        let chat = names.chat(&Token { id: 97, logprob: Some(-1.0), top: vec![(98, -0.25)] });
        assert_eq!((chat.content[0].token.as_str(), chat.content[0].bytes.as_deref()), ("token_id:97", Some(b"a".as_slice())));
        assert_eq!(chat.content[0].top_logprobs[0].token, "token_id:98");
    }
}
