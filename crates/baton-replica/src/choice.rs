//! The text of one choice, built token by token.

use baton_engine::{FinishReason, Output};
use baton_text::{Detokenizer, Tokenizer};
use baton_wire::openai;
use serde_json::{Value, json};

use crate::stop::{Released, StopMatcher};

/// How a request wants its output turned into text.
#[derive(Debug, Clone)]
pub(crate) struct TextOptions {
    pub(crate) stops: Vec<String>,
    /// Applies to stop strings and to stop tokens.
    pub(crate) include_stop: bool,
    pub(crate) skip_special: bool,
    /// Stop strings are not looked for in the text of this many first tokens.
    pub(crate) min_tokens: u32,
}

/// One choice on its way.
pub(crate) struct Choice {
    detokenizer: Detokenizer,
    stops: StopMatcher,
    include_stop: bool,
    min_tokens: u32,
    tokens: u32,
    ended: bool,
}

/// An output token as the engine drew it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Token {
    pub(crate) id: u32,
    pub(crate) logprob: Option<f32>,
    /// Likeliest tokens, best first.
    pub(crate) top: Vec<(u32, f32)>,
}

/// Why a choice ended, as the wire says it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct End {
    pub(crate) reason: openai::FinishReason,
    /// The stop string or stop token; null for the end-of-sequence token.
    pub(crate) stop_reason: Option<Value>,
    /// A stop string was found, which the engine does not know of.
    pub(crate) by_text: bool,
}

/// What one token, or the end without a token, adds to a choice.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Piece {
    /// May be empty: an incomplete character, or text that a stop string may begin with.
    pub(crate) text: String,
    /// `None` when the choice is aborted.
    pub(crate) token: Option<Token>,
    pub(crate) end: Option<End>,
}

impl Choice {
    pub(crate) fn new(tokenizer: &Tokenizer, options: &TextOptions) -> Self {
        Self {
            detokenizer: tokenizer.detokenizer(options.skip_special).continuing(),
            stops: StopMatcher::new(&options.stops, options.include_stop),
            include_stop: options.include_stop,
            min_tokens: options.min_tokens,
            tokens: 0,
            ended: false,
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended
    }

    /// Takes the next token; `None` once the choice has ended.
    pub(crate) fn push(&mut self, output: Output) -> Option<Piece> {
        if self.ended {
            return None;
        }
        self.tokens += 1;
        let finish = output.finish.map(|finish| finish.reason);
        let mut end = finish.map(engine_end);
        // The token that ends the output is no part of its text unless asked for.
        let by_token = matches!(finish, Some(FinishReason::EndOfSequence | FinishReason::StopToken(_)));
        let mut raw = if by_token && !self.include_stop { String::new() } else { self.detokenizer.push(output.token) };
        if end.is_some() {
            raw += &self.detokenizer.finish();
        }
        let mut text = self.release(&raw, &mut end);
        if end.is_some() {
            text += &self.stops.finish();
            self.ended = true;
        }
        let token = Token { id: output.token, logprob: output.logprob, top: output.top };
        Some(Piece { text, token: Some(token), end })
    }

    /// Ends the choice without a token; `None` if it has ended.
    pub(crate) fn abort(&mut self) -> Option<Piece> {
        if std::mem::replace(&mut self.ended, true) {
            return None;
        }
        let end = End { reason: openai::FinishReason::Abort, stop_reason: None, by_text: false };
        Some(Piece { text: self.stops.finish(), token: None, end: Some(end) })
    }

    fn release(&mut self, raw: &str, end: &mut Option<End>) -> String {
        if self.tokens <= self.min_tokens {
            return self.stops.pass(raw);
        }
        match self.stops.push(raw) {
            Released::Text(text) => text,
            Released::Stopped { text, stop } => {
                *end = Some(End { reason: openai::FinishReason::Stop, stop_reason: Some(json!(stop)), by_text: true });
                text
            }
        }
    }
}

fn engine_end(reason: FinishReason) -> End {
    let (reason, stop_reason) = match reason {
        FinishReason::EndOfSequence => (openai::FinishReason::Stop, None),
        FinishReason::StopToken(token) => (openai::FinishReason::Stop, Some(json!(token))),
        FinishReason::Length => (openai::FinishReason::Length, None),
    };
    End { reason, stop_reason, by_text: false }
}

#[cfg(test)]
mod tests {
    use baton_engine::{Finish, SequenceRecord};
    use baton_units::{RequestId, Time, Tokens};

    use super::*;

    fn options(stops: &[&str]) -> TextOptions {
        let stops = stops.iter().map(|&stop| stop.to_owned()).collect();
        TextOptions { stops, include_stop: false, skip_special: true, min_tokens: 0 }
    }

    fn output(text: &[u8], finish: Option<FinishReason>) -> Output {
        let mut bytes = [0; 4];
        bytes[..text.len()].copy_from_slice(text);
        let record = SequenceRecord {
            arrival: Time::ZERO,
            first_scheduled: None,
            first_token: None,
            finished: Time::ZERO,
            prompt_tokens: Tokens(1),
            output_tokens: Tokens(1),
            cached_tokens: Tokens(0),
            preemptions: 0,
        };
        Output {
            request: RequestId(1),
            choice: 0,
            index: 0,
            token: u32::from_le_bytes(bytes),
            logprob: None,
            top: Vec::new(),
            cached_tokens: Tokens(0),
            first_scheduled: None,
            finish: finish.map(|reason| Finish { reason, record }),
        }
    }

    fn run(options: &TextOptions, outputs: &[(&[u8], Option<FinishReason>)]) -> (String, Option<End>, bool) {
        let mut choice = Choice::new(&Tokenizer::bytes4(), options);
        let mut text = String::new();
        let mut end = None;
        for (bytes, finish) in outputs {
            let Some(piece) = choice.push(output(bytes, *finish)) else { continue };
            assert!(end.is_none(), "nothing comes after the end");
            text += &piece.text;
            end = piece.end;
        }
        (text, end, choice.has_ended())
    }

    #[test]
    fn a_stop_string_ends_the_text_and_what_follows_is_dropped() {
        let (text, end, ended) = run(&options(&["lo w"]), &[(b"hell", None), (b"o wo", None), (b"rld!", None)]);
        assert_eq!((text.as_str(), ended), ("hel", true));
        assert_eq!(end, Some(End { reason: openai::FinishReason::Stop, stop_reason: Some(json!("lo w")), by_text: true }));
    }

    #[test]
    fn what_was_held_back_comes_with_the_end() {
        let (text, end, _) = run(&options(&["lo!"]), &[(b"hell", None), (b"o", Some(FinishReason::Length))]);
        assert_eq!(text, "hello");
        assert_eq!(end.unwrap().reason, openai::FinishReason::Length);
        let (text, ..) = run(&options(&[]), &[(b"a\xc3", Some(FinishReason::Length))]);
        assert_eq!(text, "a\u{fffd}");
    }

    #[test]
    fn the_stop_token_is_text_only_if_asked_for() {
        let stop = Some(FinishReason::StopToken(9));
        let (text, end, _) = run(&options(&[]), &[(b"ab", None), (b"cd", stop)]);
        assert_eq!((text.as_str(), end.unwrap().stop_reason), ("ab", Some(json!(9))));
        let (text, ..) = run(&TextOptions { include_stop: true, ..options(&[]) }, &[(b"ab", None), (b"cd", stop)]);
        assert_eq!(text, "abcd");
        let (text, end, _) = run(&options(&[]), &[(b"ab", None), (b"", Some(FinishReason::EndOfSequence))]);
        assert_eq!((text.as_str(), end.unwrap().stop_reason), ("ab", None));
    }

    #[test]
    fn stop_strings_are_not_looked_for_before_the_minimum() {
        let options = TextOptions { min_tokens: 2, ..options(&["ab"]) };
        let (text, end, _) = run(&options, &[(b"ab", None), (b"ab", None), (b"xab", None)]);
        assert_eq!((text.as_str(), end.unwrap().by_text), ("ababx", true));
    }

    #[test]
    fn an_aborted_choice_gives_what_it_held_and_ends_once() {
        let mut choice = Choice::new(&Tokenizer::bytes4(), &options(&["bc"]));
        assert_eq!(choice.push(output(b"ab", None)).unwrap().text, "a");
        let piece = choice.abort().unwrap();
        assert_eq!((piece.text.as_str(), piece.token, piece.end.unwrap().reason), ("b", None, openai::FinishReason::Abort));
        assert!(choice.abort().is_none() && choice.push(output(b"x", None)).is_none());
    }
}
