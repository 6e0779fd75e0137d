//! The answer to one request, written as its tokens come.

use std::sync::Arc;

use baton_engine::{FinishReason, SamplingOptions};
use baton_wire::migration::{self as wire, OutputEntry};
use serde::Serialize;

use crate::{Piece, Prompt, Service, TextOptions, Token, choice::Choice};

/// All choices of a request on their way to its client.
///
/// The output of a choice may be told in either of two ways, which give the same answer: an engine says with each token whether it ends
/// the output ([`Self::push`]), the migration protocol tells of the end after the last token ([`Self::push_entries`]).
pub struct Answer {
    progress: Progress,
    format: Box<dyn Format>,
}

/// How an API writes its answers.
pub trait Format: Send {
    /// Writes what the client is to be sent for a piece of choice `index`, which `progress` counts already; nothing if the answer is
    /// one body.
    fn piece(&mut self, progress: &Progress, index: u32, piece: Piece, out: &mut Vec<u8>);
    /// Writes the rest once every choice has ended: a stream's last events, or the body. Called once.
    fn end(&mut self, progress: &Progress, out: &mut Vec<u8>);
}

/// Where the choices of a request stand. They are numbered over all prompts, those of the first one first.
pub struct Progress {
    service: Arc<Service>,
    prompts: Vec<PromptProgress>,
    choices_per_prompt: u32,
}

struct PromptProgress {
    tokens: u32,
    cached: u32,
    /// What ends the output; all else is left at its default.
    ends: SamplingOptions,
    choices: Vec<Slot>,
}

struct Slot {
    choice: Choice,
    /// A token that may have ended the output, which decides whether its text is shown.
    held: Option<Token>,
    lag: Lag,
}

/// How a client's text of a resumed choice differs from what was released here: it ends somewhere else.
#[derive(Debug, Default)]
enum Lag {
    #[default]
    None,
    /// The client lacks this.
    Behind(String),
    /// The client has this already.
    Ahead(String),
}

impl Lag {
    /// What the client is to be sent of text that is released.
    fn sent(&mut self, text: String) -> String {
        match std::mem::take(self) {
            Self::None => text,
            Self::Behind(missing) => missing + &text,
            Self::Ahead(known) => {
                if let Some(new) = text.strip_prefix(known.as_str()) {
                    return new.to_owned();
                }
                // All that is released was held back when the client got it, so it begins as that did.
                *self = Self::Ahead(known.strip_prefix(text.as_str()).unwrap_or_default().to_owned());
                String::new()
            }
        }
    }
}

/// A stream cannot be resumed: its tokens make another text here than its client has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the tokens make another text here than the one that was sent")]
pub struct OtherText;

/// Where a choice stands after it took output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Pushed {
    Running,
    /// Its answer is complete; nothing that comes after counts.
    Ended,
    /// It has just ended by a stop string, of which whoever runs its sequence does not know and must be told.
    Stopped,
}

/// Token counts over all prompts and choices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    pub prompt: u32,
    pub output: u32,
    /// Prompt tokens found in a cache, as far as it is known.
    pub cached: u32,
}

impl Answer {
    /// `choices`: of each prompt.
    pub fn new(service: &Arc<Service>, prompts: &[Prompt], choices: u32, text: &TextOptions, format: Box<dyn Format>) -> Self {
        let slot = || Slot { choice: Choice::new(&service.tokenizer, text), held: None, lag: Lag::None };
        let prompt = |prompt: &Prompt| PromptProgress {
            tokens: prompt.tokens.len() as u32,
            cached: 0,
            ends: SamplingOptions {
                stop_token_ids: prompt.params.stop_token_ids.clone(),
                ignore_eos: prompt.params.ignore_eos,
                max_tokens: prompt.params.max_tokens,
                ..SamplingOptions::default()
            },
            choices: (0..choices).map(|_| slot()).collect(),
        };
        let prompts = prompts.iter().map(prompt).collect();
        Self { progress: Progress { service: Arc::clone(service), prompts, choices_per_prompt: choices }, format }
    }

    /// Takes the next token of choice `index`, and why it ends if it is the last one. Appends to `out` what the client is to be sent.
    pub fn push(&mut self, index: u32, token: Token, finish: Option<FinishReason>, out: &mut Vec<u8>) -> Pushed {
        let piece = self.progress.slot_mut(index).choice.push(token, finish);
        let stopped = self.show(index, piece, out);
        self.pushed(index, stopped)
    }

    /// Takes the next entries of choice `index`, any number at a time. Appends to `out` what the client is to be sent.
    ///
    /// What the client reads does not depend on how entries are cut into calls, but for one case: an output ended by a length that its
    /// request does not name (what a replica's memory holds), with the finish in a later call than the last token. It is then sent with
    /// an empty text of its own. A token that may end the output by its id waits for the entry after it, since its text is shown only
    /// if it does not; the last of `max_tokens` ends it at once.
    pub fn push_entries(&mut self, index: u32, entries: impl IntoIterator<Item = OutputEntry>, out: &mut Vec<u8>) -> Pushed {
        let mut stopped = false;
        for entry in entries {
            let slot = self.progress.slot_mut(index);
            let held = slot.held.take();
            let piece = match entry {
                OutputEntry::Token { id, logprobs } => {
                    let (logprob, top) = logprobs.map_or((None, Vec::new()), |logprobs| (Some(logprobs.chosen), logprobs.top));
                    slot.held = Some(Token { id, logprob, top });
                    held.and_then(|token| slot.choice.push(token, None))
                }
                OutputEntry::Finish(reason) => {
                    let reason = engine_reason(reason);
                    match held {
                        Some(token) => slot.choice.push(token, Some(reason)),
                        None => slot.choice.finish(reason),
                    }
                }
            };
            stopped |= self.show(index, piece, out);
        }
        let piece = self.progress.take_decided(index);
        stopped |= self.show(index, piece, out);
        self.pushed(index, stopped)
    }

    /// Goes on with a stream that somebody else began: of choice `index` its client has the tokens `ids`, and `seen` of their text. Where that
    /// ends may differ from what would have been sent here, since servers hold text back by rules of their own. Appends nothing to `out`
    /// unless the tokens end the output, whose end then was lost on its way. To be called before any other output of the choice.
    pub fn resume(&mut self, index: u32, ids: &[u32], seen: &str, out: &mut Vec<u8>) -> Result<Pushed, OtherText> {
        let (mut text, mut end) = (String::new(), None);
        for &id in ids {
            let finish = self.progress.end_with(index, id);
            let token = Token { id, logprob: None, top: Vec::new() };
            let Some(piece) = self.progress.slot_mut(index).choice.push(token, finish) else { break };
            text += &piece.text;
            end = piece.end;
        }
        let slot = self.progress.slot_mut(index);
        slot.lag = match (text.strip_prefix(seen), seen.strip_prefix(text.as_str())) {
            (Some(""), _) => Lag::None,
            (Some(missing), _) => Lag::Behind(missing.to_owned()),
            (None, Some(known)) if end.is_none() && slot.choice.held_text().starts_with(known) => Lag::Ahead(known.to_owned()),
            (None, _) => return Err(OtherText),
        };
        // What an answer begins with is not written again.
        let begun = Piece { text: seen.to_owned(), token: None, end: None };
        self.format.piece(&self.progress, index, begun, &mut Vec::new());
        let last = end.map(|end| Piece { text: String::new(), token: None, end: Some(end) });
        let stopped = self.show(index, last, out);
        Ok(self.pushed(index, stopped))
    }

    /// Ends choice `index` if its last token does so by request and model: whoever ran it is lost, and with it the word that was to come after
    /// the token.
    pub fn settle(&mut self, index: u32, out: &mut Vec<u8>) -> Pushed {
        let piece = self.progress.end_of_held(index).and_then(|end| {
            let slot = self.progress.slot_mut(index);
            let token = slot.held.take()?;
            slot.choice.push(token, Some(end))
        });
        let stopped = self.show(index, piece, out);
        self.pushed(index, stopped)
    }

    /// Ends choice `index` from outside, as an operator does. One that has ended stays as it is; so does one whose last token came and
    /// only its finish is missing.
    pub fn abort(&mut self, index: u32, out: &mut Vec<u8>) {
        let end = self.progress.end_of_held(index);
        let slot = self.progress.slot_mut(index);
        let piece = match slot.held.take() {
            Some(token) => slot.choice.push(token, end),
            None => slot.choice.abort(),
        };
        self.show(index, piece, out);
    }

    /// Prompt tokens of prompt `prompt` that were found in a cache.
    pub fn set_cached(&mut self, prompt: u32, tokens: u32) {
        self.progress.prompts[prompt as usize].cached = tokens;
    }

    /// Whether every choice has.
    pub fn has_ended(&self) -> bool {
        (0..self.progress.prompts.len() as u32).all(|prompt| self.prompt_has_ended(prompt))
    }

    /// Whether every choice of prompt `prompt` has.
    pub fn prompt_has_ended(&self, prompt: u32) -> bool {
        self.progress.prompts[prompt as usize].choices.iter().all(|slot| slot.choice.has_ended())
    }

    pub fn counts(&self) -> Counts {
        self.progress.counts()
    }

    /// Appends to `out`, once every choice has ended, a stream's usage event if it was asked for and its end mark, or the whole body.
    ///
    /// To be called once.
    ///
    /// # Panics
    /// If a choice has not ended.
    pub fn finish(&mut self, out: &mut Vec<u8>) {
        assert!(self.has_ended(), "an answer is finished when its choices are");
        self.format.end(&self.progress, out);
    }

    /// True when the piece ended by a stop string.
    fn show(&mut self, index: u32, piece: Option<Piece>, out: &mut Vec<u8>) -> bool {
        let Some(mut piece) = piece else { return false };
        piece.text = self.progress.slot_mut(index).lag.sent(piece.text);
        let stopped = piece.end.as_ref().is_some_and(|end| end.by_text);
        self.format.piece(&self.progress, index, piece, out);
        stopped
    }

    fn pushed(&self, index: u32, stopped: bool) -> Pushed {
        match (stopped, self.progress.slot(index).choice.has_ended()) {
            (true, _) => Pushed::Stopped,
            (false, true) => Pushed::Ended,
            (false, false) => Pushed::Running,
        }
    }
}

impl Progress {
    pub fn counts(&self) -> Counts {
        self.prompts.iter().fold(Counts::default(), |sum, prompt| Counts {
            prompt: sum.prompt + prompt.tokens,
            output: sum.output + prompt.choices.iter().map(|slot| slot.choice.tokens()).sum::<u32>(),
            cached: sum.cached + prompt.cached,
        })
    }

    /// Choices over all prompts.
    pub fn choice_count(&self) -> u32 {
        self.prompts.len() as u32 * self.choices_per_prompt
    }

    /// Tokens of the prompt that choice `index` goes on from.
    pub fn prompt_tokens_of(&self, index: u32) -> u32 {
        self.prompts[self.place(index).0].tokens
    }

    /// Output tokens of choice `index` so far.
    pub fn tokens_of(&self, index: u32) -> u32 {
        self.slot(index).choice.tokens()
    }

    /// Its prompt, and its place among that one's choices.
    fn place(&self, index: u32) -> (usize, usize) {
        ((index / self.choices_per_prompt) as usize, (index % self.choices_per_prompt) as usize)
    }

    fn slot(&self, index: u32) -> &Slot {
        let (prompt, choice) = self.place(index);
        &self.prompts[prompt].choices[choice]
    }

    fn slot_mut(&mut self, index: u32) -> &mut Slot {
        let (prompt, choice) = self.place(index);
        &mut self.prompts[prompt].choices[choice]
    }

    /// Why the held token ends its output, if by request and model it does.
    fn end_of_held(&self, index: u32) -> Option<FinishReason> {
        self.slot(index).held.as_ref().and_then(|token| self.end_with(index, token.id))
    }

    /// Why the output ends, if by request and model it does, when `token` is the next one.
    fn end_with(&self, index: u32, token: u32) -> Option<FinishReason> {
        let ends = &self.prompts[self.place(index).0].ends;
        ends.end_after(token, self.slot(index).choice.tokens() + 1, &self.service.eos)
    }

    /// What the held token adds, unless the next entry decides that.
    fn take_decided(&mut self, index: u32) -> Option<Piece> {
        let end = self.end_of_held(index);
        let slot = self.slot_mut(index);
        match end {
            // Which tokens end the output is for the replica to say; that `max_tokens` do is not.
            Some(FinishReason::EndOfSequence | FinishReason::StopToken(_)) if !slot.choice.has_ended() => None,
            Some(_) | None => slot.held.take().and_then(|token| slot.choice.push(token, end)),
        }
    }
}

/// A body of JSON.
pub(crate) fn write_body(body: &impl Serialize, out: &mut Vec<u8>) {
    serde_json::to_writer(out, body).expect("wire types serialize");
}

fn engine_reason(reason: wire::FinishReason) -> FinishReason {
    match reason {
        wire::FinishReason::EndOfSequence => FinishReason::EndOfSequence,
        wire::FinishReason::StopToken(token) => FinishReason::StopToken(token),
        wire::FinishReason::Length => FinishReason::Length,
    }
}
