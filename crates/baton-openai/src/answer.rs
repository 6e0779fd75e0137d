//! The answer to one request, written as its tokens come.

use std::sync::Arc;

use baton_engine::FinishReason;
use serde::Serialize;

use crate::{Piece, Prompt, Service, TextOptions, Token, choice::Choice};

/// All choices of a request on their way to its client.
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
    prompts: Vec<PromptProgress>,
    choices_per_prompt: u32,
}

struct PromptProgress {
    tokens: u32,
    cached: u32,
    choices: Vec<Choice>,
}

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
        let prompt = |prompt: &Prompt| PromptProgress {
            tokens: prompt.tokens.len() as u32,
            cached: 0,
            choices: (0..choices).map(|_| Choice::new(&service.tokenizer, text)).collect(),
        };
        let prompts = prompts.iter().map(prompt).collect();
        Self { progress: Progress { prompts, choices_per_prompt: choices }, format }
    }

    /// Takes the next token of choice `index`, and why it ends if it is the last one. Appends to `out` what the client is to be sent.
    pub fn push(&mut self, index: u32, token: Token, finish: Option<FinishReason>, out: &mut Vec<u8>) -> Pushed {
        let piece = self.progress.choice_mut(index).push(token, finish);
        let stopped = self.show(index, piece, out);
        self.pushed(index, stopped)
    }

    /// Ends choice `index` from outside, as an operator does. One that has ended stays as it is.
    pub fn abort(&mut self, index: u32, out: &mut Vec<u8>) {
        let piece = self.progress.choice_mut(index).abort();
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
        self.progress.prompts[prompt as usize].choices.iter().all(Choice::has_ended)
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
        let Some(piece) = piece else { return false };
        let stopped = piece.end.as_ref().is_some_and(|end| end.by_text);
        self.format.piece(&self.progress, index, piece, out);
        stopped
    }

    fn pushed(&self, index: u32, stopped: bool) -> Pushed {
        match (stopped, self.progress.choice(index).has_ended()) {
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
            output: sum.output + prompt.choices.iter().map(Choice::tokens).sum::<u32>(),
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
        self.choice(index).tokens()
    }

    /// Its prompt, and its place among that one's choices.
    fn place(&self, index: u32) -> (usize, usize) {
        ((index / self.choices_per_prompt) as usize, (index % self.choices_per_prompt) as usize)
    }

    fn choice(&self, index: u32) -> &Choice {
        let (prompt, choice) = self.place(index);
        &self.prompts[prompt].choices[choice]
    }

    fn choice_mut(&mut self, index: u32) -> &mut Choice {
        let (prompt, choice) = self.place(index);
        &mut self.prompts[prompt].choices[choice]
    }
}

/// A body of JSON.
pub(crate) fn write_body(body: &impl Serialize, out: &mut Vec<u8>) {
    serde_json::to_writer(out, body).expect("wire types serialize");
}
