//! The text of one choice, built token by token.

use baton_engine::FinishReason;
use baton_text::{Detokenizer, Tokenizer};
use baton_wire::openai;
use serde_json::{Value, json};

use crate::stop::{Released, StopMatcher};

/// How a request wants its output turned into text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextOptions {
    pub stops: Vec<String>,
    /// Applies to stop strings and to stop tokens.
    pub include_stop: bool,
    pub skip_special: bool,
    /// Stop strings are not looked for in the text of this many first tokens.
    pub min_tokens: u32,
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
pub struct Token {
    pub id: u32,
    pub logprob: Option<f32>,
    /// Likeliest tokens, best first.
    pub top: Vec<(u32, f32)>,
}

/// Why a choice ended, as the wire says it.
#[derive(Debug, Clone, PartialEq)]
pub struct End {
    pub reason: openai::FinishReason,
    /// The stop string or stop token; null for the end-of-sequence token.
    pub stop_reason: Option<Value>,
    /// A stop string was found, which the engine does not know of.
    pub by_text: bool,
}

/// What one token, or the end without a token, adds to a choice.
#[derive(Debug, Clone, PartialEq)]
pub struct Piece {
    /// May be empty: an incomplete character, or text that a stop string may begin with.
    pub text: String,
    /// `None` when the choice is aborted, or its end was told after its last token.
    pub token: Option<Token>,
    pub end: Option<End>,
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

    /// Tokens taken so far.
    pub(crate) fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Text that is held back because a stop string may begin with it.
    pub(crate) fn held_text(&self) -> &str {
        self.stops.held()
    }

    /// Takes the next token, and the end if it is the last one; `None` once the choice has ended.
    pub(crate) fn push(&mut self, token: Token, finish: Option<FinishReason>) -> Option<Piece> {
        if self.ended {
            return None;
        }
        self.tokens += 1;
        // The token that ends the output is no part of its text unless asked for.
        let by_token = matches!(finish, Some(FinishReason::EndOfSequence | FinishReason::StopToken(_)));
        let raw = if by_token && !self.include_stop { String::new() } else { self.detokenizer.push(token.id) };
        let (mut text, mut end) = self.release(&raw);
        if let (Some(reason), None) = (finish, &end) {
            let (rest, rest_end) = self.rest(reason);
            text += &rest;
            end = Some(rest_end);
        }
        self.ended = end.is_some();
        Some(Piece { text, token: Some(token), end })
    }

    /// Ends the choice after its last token; `None` if it has ended.
    pub(crate) fn finish(&mut self, reason: FinishReason) -> Option<Piece> {
        if std::mem::replace(&mut self.ended, true) {
            return None;
        }
        let (text, end) = self.rest(reason);
        Some(Piece { text, token: None, end: Some(end) })
    }

    /// Ends the choice without its sequence's end; `None` if it has ended.
    pub(crate) fn abort(&mut self) -> Option<Piece> {
        if std::mem::replace(&mut self.ended, true) {
            return None;
        }
        let end = End { reason: openai::FinishReason::Abort, stop_reason: None, by_text: false };
        Some(Piece { text: self.stops.finish(), token: None, end: Some(end) })
    }

    /// What was held back, when no token follows. In a step of its own, so that the text does not depend on whether the end was known
    /// with the last token.
    fn rest(&mut self, reason: FinishReason) -> (String, End) {
        let raw = self.detokenizer.finish();
        let (mut text, end) = self.release(&raw);
        text += &self.stops.finish();
        (text, end.unwrap_or_else(|| engine_end(reason)))
    }

    fn release(&mut self, raw: &str) -> (String, Option<End>) {
        if self.tokens <= self.min_tokens {
            return (self.stops.pass(raw), None);
        }
        match self.stops.push(raw) {
            Released::Text(text) => (text, None),
            Released::Stopped { text, stop } => {
                (text, Some(End { reason: openai::FinishReason::Stop, stop_reason: Some(json!(stop)), by_text: true }))
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
    use super::*;

    fn options(stops: &[&str]) -> TextOptions {
        let stops = stops.iter().map(|&stop| stop.to_owned()).collect();
        TextOptions { stops, include_stop: false, skip_special: true, min_tokens: 0 }
    }

    fn token(text: &[u8]) -> Token {
        let mut bytes = [0; 4];
        bytes[..text.len()].copy_from_slice(text);
        Token { id: u32::from_le_bytes(bytes), logprob: None, top: Vec::new() }
    }

    fn run(options: &TextOptions, outputs: &[(&[u8], Option<FinishReason>)]) -> (String, Option<End>, bool) {
        let mut choice = Choice::new(&Tokenizer::bytes4(), options);
        let mut text = String::new();
        let mut end = None;
        for (bytes, finish) in outputs {
            let Some(piece) = choice.push(token(bytes), *finish) else { continue };
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
        assert_eq!(choice.push(token(b"ab"), None).unwrap().text, "a");
        let piece = choice.abort().unwrap();
        assert_eq!((piece.text.as_str(), piece.token, piece.end.unwrap().reason), ("b", None, openai::FinishReason::Abort));
        assert!(choice.abort().is_none() && choice.push(token(b"x"), None).is_none());
    }

    #[test]
    fn the_end_may_come_after_the_last_token() {
        let mut choice = Choice::new(&Tokenizer::bytes4(), &options(&["bc"]));
        assert_eq!(choice.push(token(b"ab\xc3"), None).unwrap().text, "a");
        let piece = choice.finish(FinishReason::Length).unwrap();
        assert_eq!((piece.text.as_str(), piece.token, piece.end.unwrap().reason), ("b\u{fffd}", None, openai::FinishReason::Length));
        assert!(choice.finish(FinishReason::Length).is_none() && choice.push(token(b"x"), None).is_none());
    }

    #[test]
    fn what_is_left_of_a_character_may_complete_a_stop_string() {
        let mut choice = Choice::new(&Tokenizer::bytes4(), &options(&["a\u{fffd}", "a"]));
        let whole = choice.push(token(b"a\xc3"), Some(FinishReason::Length)).unwrap();
        let mut choice = Choice::new(&Tokenizer::bytes4(), &options(&["a\u{fffd}", "a"]));
        let apart = choice.push(token(b"a\xc3"), None).unwrap();
        assert_eq!((&whole.text, &whole.end), (&apart.text, &apart.end));
        assert_eq!(whole.end.unwrap().stop_reason, Some(json!("a")));
    }
}
