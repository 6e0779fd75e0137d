//! Answers of the completions API.

use std::sync::Arc;

use baton_wire::{
    openai::{Completion, CompletionChoice, CompletionChunk, CompletionChunkChoice, CompletionLogprobs, Head, Sampling, Usage},
    sse,
};

use crate::{End, Format, Piece, Progress, Service, answer::write_body, logprobs::Names};

/// What the answer looks like, streamed or whole.
pub(crate) struct Shape {
    pub(crate) service: Arc<Service>,
    pub(crate) head: Head,
    /// Per prompt.
    pub(crate) choices: u32,
    /// Text of each prompt, if it is to stand before the output.
    pub(crate) echoes: Vec<String>,
    /// Tokens of each prompt, if ids were asked for.
    pub(crate) prompts: Vec<Vec<u32>>,
    pub(crate) logprobs: bool,
    pub(crate) as_ids: bool,
}

/// `choices`: over all prompts.
pub(crate) fn format(shape: Shape, sampling: &Sampling, choices: usize) -> Box<dyn Format> {
    if sampling.is_stream() {
        let (usage, continuous) = (sampling.includes_usage(), sampling.includes_continuous_usage());
        return Box::new(Stream { shape, usage, continuous, begun: vec![false; choices], offsets: vec![0; choices] });
    }
    let begin = |index| Gathered { text: shape.echo(index).to_owned(), ..Gathered::default() };
    let gathered = (0..choices as u32).map(begin).collect();
    Box::new(Whole { shape, gathered })
}

impl Shape {
    fn names(&self) -> Names<'_> {
        Names { tokenizer: &self.service.tokenizer, as_ids: self.as_ids }
    }

    fn echo(&self, index: u32) -> &str {
        self.echoes.get((index / self.choices) as usize).map_or("", String::as_str)
    }

    fn prompt_ids(&self, index: u32) -> Option<Vec<u32>> {
        self.prompts.get((index / self.choices) as usize).cloned()
    }

    fn returns_ids(&self) -> bool {
        !self.prompts.is_empty()
    }

    fn choice(&self, index: u32, gathered: Gathered) -> CompletionChoice {
        let end = gathered.end.expect("a choice ends before its request does");
        CompletionChoice {
            logprobs: self.logprobs.then_some(gathered.logprobs),
            stop_reason: end.stop_reason,
            token_ids: self.returns_ids().then_some(gathered.tokens),
            prompt_token_ids: self.prompt_ids(index),
            ..CompletionChoice::new(index, gathered.text, end.reason)
        }
    }
}

struct Whole {
    shape: Shape,
    gathered: Vec<Gathered>,
}

/// A choice that is being gathered.
#[derive(Default)]
struct Gathered {
    text: String,
    /// Characters of the output so far.
    chars: usize,
    tokens: Vec<u32>,
    logprobs: CompletionLogprobs,
    end: Option<End>,
}

impl Format for Whole {
    fn piece(&mut self, _progress: &Progress, index: u32, piece: Piece, _out: &mut Vec<u8>) {
        let choice = &mut self.gathered[index as usize];
        if let Some(token) = piece.token.as_ref().filter(|_| self.shape.logprobs) {
            self.shape.names().add_completion(&mut choice.logprobs, token, choice.chars);
        }
        choice.chars += piece.text.chars().count();
        choice.text += &piece.text;
        choice.tokens.extend(piece.token.map(|token| token.id));
        choice.end = piece.end;
    }

    fn end(&mut self, progress: &Progress, out: &mut Vec<u8>) {
        let counts = progress.counts();
        let usage = Usage::completion(counts.prompt, counts.output, counts.cached);
        let gathered = std::mem::take(&mut self.gathered);
        let choices = (0..).zip(gathered).map(|(index, choice)| self.shape.choice(index, choice)).collect();
        write_body(&Completion::new(self.shape.head.clone(), choices, usage), out);
    }
}

struct Stream {
    shape: Shape,
    /// A last chunk with the usage.
    usage: bool,
    /// Usage in every chunk.
    continuous: bool,
    /// Which choices have sent something.
    begun: Vec<bool>,
    /// Characters that each choice has sent.
    offsets: Vec<usize>,
}

impl Format for Stream {
    fn piece(&mut self, progress: &Progress, index: u32, piece: Piece, out: &mut Vec<u8>) {
        let shape = &self.shape;
        let is_first = !std::mem::replace(&mut self.begun[index as usize], true);
        let offset = &mut self.offsets[index as usize];
        let logprobs = piece.token.as_ref().filter(|_| shape.logprobs).map(|token| {
            let mut logprobs = CompletionLogprobs::default();
            shape.names().add_completion(&mut logprobs, token, *offset);
            logprobs
        });
        *offset += piece.text.chars().count();
        let text = if is_first { format!("{}{}", shape.echo(index), piece.text) } else { piece.text };
        let choice = CompletionChunkChoice {
            logprobs,
            prompt_token_ids: is_first.then(|| shape.prompt_ids(index)).flatten(),
            token_ids: shape.returns_ids().then(|| piece.token.iter().map(|token| token.id).collect()),
            ..CompletionChunkChoice::text(index, text)
        };
        let chunk = match piece.end {
            None => CompletionChunk::new(&shape.head, vec![choice]),
            Some(end) => {
                let chunk = CompletionChunk::new(&shape.head, vec![choice.finished(end.reason, end.stop_reason)]);
                if self.usage { chunk } else { chunk.with_fingerprint(&shape.head) }
            }
        };
        let usage = self.continuous.then(|| Usage::counts(progress.prompt_tokens_of(index), progress.tokens_of(index)));
        sse::write_json(&CompletionChunk { usage, ..chunk }, out);
    }

    fn end(&mut self, progress: &Progress, out: &mut Vec<u8>) {
        if self.usage {
            let counts = progress.counts();
            let usage = Usage::completion_stream(counts.prompt, counts.output, counts.cached);
            sse::write_json(&CompletionChunk::usage(&self.shape.head, usage), out);
        }
        out.extend_from_slice(sse::DONE);
    }
}
