//! How an engine is asked to compute from token ids, and how it tells those of its output.

use std::sync::Arc;

use baton_session::Fault;
use baton_text::{Cut, Tokenizer};
use baton_units::Tokens;
use baton_wire::{
    migration::FinishReason,
    openai::{StreamOptions, Usage},
};
use serde::{Deserialize, de::IgnoredAny};
use serde_json::Value;

use crate::{
    body::Edit,
    chunk::{Piece, Reading},
    intake::Api,
    json::RawObject,
};

/// An API of engines whose prompt may be token ids and whose answer names those of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenApi {
    /// `/v1/completions` with `return_token_ids`, of Baton, vLLM and SGLang.
    Completions,
    /// llama.cpp's `/completion`.
    LlamaCpp,
}

/// What an event adds to an output.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct TokenEvent {
    pub(crate) ids: Vec<u32>,
    /// The ids are not known to be the engine's: they stand for the text that it gave.
    pub(crate) guessed: bool,
    pub(crate) finish: Option<FinishReason>,
    /// Prompt tokens that were cached, where the event tells.
    pub(crate) cached: Option<Tokens>,
}

/// Reads the events of one attempt.
#[derive(Debug)]
pub(crate) struct TokenReader {
    api: TokenApi,
    text: Arc<Tokenizer>,
    /// Tokens of this attempt so far.
    told: u32,
}

impl TokenApi {
    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::Completions => Api::Completions.path(),
            Self::LlamaCpp => "/completion",
        }
    }

    /// What makes a client's body, without what belongs to its own API, a request for at most `max_tokens` after `prompt`.
    pub(crate) fn edits(self, prompt: &[u32], max_tokens: u32) -> Vec<Edit> {
        let mut edits = vec![Edit::set("prompt", &prompt), Edit::set("stream", &true)];
        edits.extend(match self {
            Self::Completions => vec![
                Edit::set("max_tokens", &max_tokens),
                Edit::set("stream_options", &StreamOptions { include_usage: Some(true), continuous_usage_stats: None }),
                Edit::set("return_token_ids", &true),
            ],
            // Its timings say with the first token already how much of the prompt was cached.
            Self::LlamaCpp => vec![
                Edit::remove("max_tokens"),
                Edit::set("n_predict", &max_tokens),
                Edit::remove("stream_options"),
                Edit::remove("return_token_ids"),
                Edit::remove("response_fields"),
                Edit::set("timings_per_token", &true),
            ],
        });
        edits
    }

    pub(crate) fn reader(self, text: Arc<Tokenizer>) -> TokenReader {
        TokenReader { api: self, text, told: 0 }
    }
}

impl TokenReader {
    /// Reads the data of one event.
    pub(crate) fn read(&mut self, data: &[u8]) -> Result<TokenEvent, Fault> {
        match self.api {
            TokenApi::Completions => self.read_completion(data),
            TokenApi::LlamaCpp => self.read_llamacpp(data),
        }
    }

    fn read_completion(&mut self, data: &[u8]) -> Result<TokenEvent, Fault> {
        let Reading::Chunk(chunk) = Reading::of(Api::Completions, data)? else { return Err(Fault::InBand) };
        let mut event = TokenEvent { cached: chunk.usage.as_ref().and_then(Usage::cached_tokens).map(Tokens), ..TokenEvent::default() };
        for (choice, piece) in chunk.choices.iter().zip(&chunk.pieces) {
            if piece.is_abort() {
                return Err(Fault::Aborted);
            }
            // The last text may come after the ids that it is of.
            let unnamed = piece.token_ids.is_empty() && piece.count > 0 && (piece.finish.is_none() || self.told == 0);
            if piece.choice != 0 || unnamed {
                return Err(Fault::Garbled);
            }
            self.told += piece.token_ids.len() as u32;
            event.ids.extend_from_slice(&piece.token_ids);
            event.finish = self.finish_of(choice, piece)?;
        }
        Ok(event)
    }

    /// Why the engine ended the output, if it did.
    fn finish_of(&self, choice: &RawObject<'_>, piece: &Piece) -> Result<Option<FinishReason>, Fault> {
        let stop_token = || -> Result<Option<u32>, Fault> {
            let told = |field| choice.read::<Value>(field).map_err(|_| Fault::Garbled);
            // SGLang names the end-of-sequence token as well.
            let id = told("stop_reason")?.or(told("matched_stop")?).and_then(|id| id.as_u64());
            Ok(id.map(|id| id as u32).filter(|id| !self.text.eos_ids().contains(id)))
        };
        Ok(match piece.finish.as_deref() {
            None => None,
            Some("stop") => Some(stop_token()?.map_or(FinishReason::EndOfSequence, FinishReason::StopToken)),
            Some("length") => Some(FinishReason::Length),
            Some(_) => return Err(Fault::Garbled),
        })
    }

    fn read_llamacpp(&mut self, data: &[u8]) -> Result<TokenEvent, Fault> {
        let event: LlamaEvent = serde_json::from_slice(data).map_err(|_| Fault::Garbled)?;
        if event.error.is_some() {
            return Err(Fault::InBand);
        }
        let finish = match (event.stop, event.stop_type.as_deref()) {
            (false, _) => None,
            (true, Some("eos" | "word")) => Some(FinishReason::EndOfSequence),
            (true, Some("limit")) => Some(FinishReason::Length),
            (true, _) => return Err(Fault::Aborted),
        };
        let cached = event.timings.and_then(|timings| u32::try_from(timings.cache_n?).ok()).map(Tokens);
        let (ids, guessed) = match event.tokens.as_slice() {
            [] if event.content.is_empty() => (Vec::new(), false),
            [] => return Err(Fault::Garbled),
            _ => self.all_ids(event.tokens, &event.content, event.tokens_predicted),
        };
        Ok(TokenEvent { ids, guessed, finish, cached })
    }

    /// The ids of an event and of those before it that were kept back. llama.cpp sends nothing for a token that leaves a character
    /// incomplete; when the character is complete it sends the text of all of its tokens, the id of the last one, and how many tokens
    /// there were in all. With that, and the text that each token makes, the others are known where there is one way only.
    fn all_ids(&mut self, ids: Vec<u32>, content: &str, predicted: Option<u32>) -> (Vec<u32>, bool) {
        let before = self.told;
        self.told += ids.len() as u32;
        let missing = predicted.map_or(0, |predicted| predicted.saturating_sub(self.told));
        let own: Vec<u8> = ids.iter().flat_map(|&id| self.text.token_bytes(id)).collect();
        // Counts run ahead of the text where the engine drafts tokens.
        if missing == 0 || content.as_bytes() == own {
            return (ids, false);
        }
        self.told = before.max(predicted.unwrap_or(0));
        let kept_back = content.as_bytes().strip_suffix(&own[..]).and_then(|bytes| self.text.fragments(bytes, missing as usize));
        match kept_back {
            Some(Cut { tokens, is_sure }) => ([tokens, ids].concat(), !is_sure),
            None => (self.text.encode(content, false), true),
        }
    }
}

/// An event of llama.cpp's `/completion`.
#[derive(Debug, Deserialize)]
struct LlamaEvent {
    #[serde(default)]
    content: String,
    #[serde(default)]
    tokens: Vec<u32>,
    /// Of this answer so far.
    tokens_predicted: Option<u32>,
    #[serde(default)]
    stop: bool,
    stop_type: Option<String>,
    timings: Option<LlamaTimings>,
    error: Option<IgnoredAny>,
}

#[derive(Debug, Deserialize)]
struct LlamaTimings {
    cache_n: Option<i64>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn reader(api: TokenApi) -> TokenReader {
        api.reader(Arc::new(Tokenizer::bytes4()))
    }

    fn id(text: &[u8]) -> u32 {
        let mut bytes = [0; 4];
        bytes[..text.len()].copy_from_slice(text);
        u32::from_le_bytes(bytes)
    }

    fn llama(content: &str, token: &[u8], predicted: u32) -> Vec<u8> {
        json!({ "index": 0, "content": content, "tokens": [id(token)], "stop": false, "tokens_predicted": predicted }).to_string().into()
    }

    /// The data of a recorded stream's events.
    fn recorded(text: &str) -> Vec<&str> {
        text.lines().filter_map(|line| line.strip_prefix("data: ")).collect()
    }

    #[test]
    fn a_recorded_stream_of_llamacpp_is_its_ids_and_its_end() {
        let mut reader = reader(TokenApi::LlamaCpp);
        let events = recorded(include_str!("../tests/fixtures/llamacpp-completion-stream.resp"));
        let events: Vec<TokenEvent> = events.into_iter().map(|data| reader.read(data.as_bytes()).unwrap()).collect();
        let ids: Vec<u32> = events.iter().flat_map(|event| event.ids.iter().copied()).collect();
        assert_eq!(ids, [7042, 30, 198, 198, 504, 1797]);
        assert!(events.iter().all(|event| !event.guessed && event.cached == Some(Tokens(0))));
        let ends: Vec<_> = events.iter().filter_map(|event| event.finish).collect();
        assert_eq!(ends, [FinishReason::Length]);
    }

    #[test]
    fn tokens_that_were_kept_back_are_known_by_their_text_where_that_is_sure() {
        let smile = "ab😀".as_bytes();
        let mut known = reader(TokenApi::LlamaCpp);
        assert_eq!(known.read(&llama("once", b"once", 1)).unwrap().ids, [id(b"once")]);
        // One token of four bytes was kept back.
        let event = known.read(&llama("ab😀!", &[smile[4], smile[5], b'!'], 3)).unwrap();
        assert_eq!((event.ids, event.guessed), (vec![id(&smile[..4]), id(&[smile[4], smile[5], b'!'])], false));
        // Two were, of three bytes: one and two, or two and one.
        let event = known.read(&llama("😀", &smile[5..], 6)).unwrap();
        assert_eq!(
            (event.ids, event.guessed),
            (vec![id(&smile[2..3]), id(&smile[3..5]), id(&smile[5..])], true),
            "as many, and the same text"
        );
        // One was that is no beginning of the text that it is said to be of.
        let event = known.read(&llama("\u{fffd}!", b"!", 8)).unwrap();
        assert_eq!((event.ids, event.guessed), (Tokenizer::bytes4().encode("\u{fffd}!", false), true));
        // What comes after is counted from there.
        let event = known.read(&llama("time", b"time", 9)).unwrap();
        assert_eq!((event.ids, event.guessed), (vec![id(b"time")], false));
    }

    #[test]
    fn counts_that_run_ahead_of_the_text_hide_no_token() {
        let mut reader = reader(TokenApi::LlamaCpp);
        for text in [b"once", b" upo", b"n a "] {
            let event = reader.read(&llama(std::str::from_utf8(text).unwrap(), text, 3)).unwrap();
            assert_eq!((event.ids, event.guessed), (vec![id(text)], false));
        }
    }

    #[test]
    fn errors_and_ends_without_a_reason_are_failures() {
        let mut reader = reader(TokenApi::LlamaCpp);
        assert_eq!(reader.read(br#"{"error":{"code":500,"message":"x","type":"server_error"}}"#), Err(Fault::InBand));
        assert_eq!(reader.read(br#"{"content":"","tokens":[],"stop":true,"stop_type":"none"}"#), Err(Fault::Aborted));
        assert_eq!(reader.read(br#"{"content":"text without ids","stop":false}"#), Err(Fault::Garbled));
        assert_eq!(reader.read(b"<html>"), Err(Fault::Garbled));
        assert_eq!(
            reader.read(br#"{"content":"","tokens":[],"stop":true,"stop_type":"eos"}"#).unwrap().finish,
            Some(FinishReason::EndOfSequence)
        );
    }

    #[test]
    fn sglang_s_matched_stop_is_a_stop_token() {
        let read = |more: &str| {
            let data = format!(r#"{{"choices":[{{"index":0,"text":"x","token_ids":[7],"finish_reason":"stop"{more}}}]}}"#);
            reader(TokenApi::Completions).read(data.as_bytes()).unwrap().finish
        };
        assert_eq!(read(r#","matched_stop":9"#), Some(FinishReason::StopToken(9)));
        assert_eq!(read(r#","stop_reason":9"#), Some(FinishReason::StopToken(9)));
        assert_eq!([read(""), read(r#","stop_reason":null,"matched_stop":null"#)], [Some(FinishReason::EndOfSequence); 2]);
    }

    #[test]
    fn each_api_is_asked_in_its_own_words() {
        let written = |api: TokenApi| {
            let body =
                crate::body::JsonBody::parse(r#"{"prompt":"x","max_tokens":9,"temperature":0,"stream_options":{}}"#.into(), None).unwrap();
            String::from_utf8(Vec::from(body.edited(&api.edits(&[1, 2], 3))).concat()).unwrap()
        };
        assert_eq!(
            written(TokenApi::Completions),
            r#"{"prompt":[1,2],"max_tokens":3,"temperature":0,"stream_options":{"include_usage":true},"stream":true,"return_token_ids":true}"#
        );
        assert_eq!(written(TokenApi::LlamaCpp), r#"{"prompt":[1,2],"temperature":0,"stream":true,"n_predict":3,"timings_per_token":true}"#);
    }
}
