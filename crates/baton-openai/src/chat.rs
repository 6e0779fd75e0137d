//! Chat completions: the API's own checks, and its answers.

use std::sync::Arc;

use baton_wire::{
    openai::{
        ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatLogprobs, ChatRequest, Delta, ErrorBody, FinishReason, Head, Message,
        Sampling, Usage,
    },
    sse,
};
use serde_json::{Map, Value};

use crate::{Counts, End, Format, Piece, Progress, Service, answer::write_body, check_supported, logprobs::Names};

/// Refuses what changes a chat's prompt or answer and cannot be done here; part of [`Checked::chat`](crate::Checked::chat).
pub fn check_chat(request: &ChatRequest) -> Result<(), ErrorBody> {
    check_supported(&request.sampling, &request.rest)?;
    if request.chat_template.is_some() {
        let message =
            "Chat template is passed with request, but this server uses the model's own. Refused request with untrusted chat template.";
        return Err(ErrorBody::new(400, "BadRequestError", Some("chat_template"), message));
    }
    match &request.tool_choice {
        None | Some(Value::Null) => Ok(()),
        Some(Value::String(choice)) if choice == "auto" || choice == "none" => Ok(()),
        Some(_) => {
            let message = "tool_choice other than \"auto\" and \"none\" is not supported by this server, which cannot force a tool call";
            Err(ErrorBody::new(400, "BadRequestError", Some("tool_choice"), message))
        }
    }
}

/// Arguments of the chat template: its own, and what other fields of a request tell it (vLLM's `build_chat_params`).
pub fn template_arguments(
    own: Option<Map<String, Value>>,
    documents: Option<Value>,
    reasoning_effort: Option<Value>,
) -> Map<String, Value> {
    let told = |value: Option<Value>| value.filter(|value| !value.is_null() && value != "auto");
    let mut all = own.unwrap_or_default();
    if let Some(effort) = told(reasoning_effort) {
        // Who asks for thoughts gets them where a template has to be told.
        all.entry("enable_thinking").or_insert_with(|| Value::Bool(effort != "none"));
        all.insert("reasoning_effort".to_owned(), effort);
    }
    all.extend(told(documents).map(|documents| ("documents".to_owned(), documents)));
    all
}

/// Candidates to report per token, if log-probabilities were asked for.
pub(crate) fn logprobs(request: &ChatRequest) -> Result<Option<u32>, ErrorBody> {
    match (request.logprobs, request.top_logprobs) {
        (Some(true), top) => Ok(Some(top.unwrap_or(0))),
        (_, None | Some(0)) => Ok(None),
        (_, Some(_)) => {
            let message = "when using `top_logprobs`, `logprobs` must be set to true.";
            Err(ErrorBody::new(400, "BadRequestError", Some("top_logprobs"), message))
        }
    }
}

/// What the answer looks like, streamed or whole.
pub(crate) struct Shape {
    pub(crate) service: Arc<Service>,
    pub(crate) head: Head,
    pub(crate) prompt_token_ids: Option<Vec<u32>>,
    pub(crate) return_ids: bool,
    pub(crate) logprobs: bool,
    pub(crate) as_ids: bool,
}

pub(crate) fn format(shape: Shape, sampling: &Sampling, choices: u32) -> Box<dyn Format> {
    if sampling.is_stream() {
        let (usage, continuous) = (sampling.includes_usage(), sampling.includes_continuous_usage());
        return Box::new(Stream { shape, usage, continuous, begun: false });
    }
    Box::new(Whole { shape, gathered: (0..choices).map(|_| Gathered::default()).collect() })
}

impl Shape {
    fn logprobs(&self, piece: &Piece) -> Option<ChatLogprobs> {
        let names = Names { tokenizer: &self.service.tokenizer, as_ids: self.as_ids };
        piece.token.as_ref().filter(|_| self.logprobs).map(|token| names.chat(token))
    }

    /// Prompt tokens that fill blocks and were not found there.
    fn created_cache_tokens(&self, counts: Counts) -> u32 {
        let size = self.service.block_size.get();
        (counts.prompt / size * size).saturating_sub(counts.cached)
    }

    fn choice(&self, index: u32, gathered: Gathered) -> ChatChoice {
        let end = gathered.end.expect("a choice ends before its request does");
        ChatChoice {
            logprobs: self.logprobs.then_some(gathered.logprobs),
            stop_reason: end.stop_reason,
            token_ids: self.return_ids.then_some(gathered.tokens),
            ..ChatChoice::new(index, Message::assistant(Some(gathered.text)), end.reason)
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
    tokens: Vec<u32>,
    logprobs: ChatLogprobs,
    end: Option<End>,
}

impl Format for Whole {
    fn piece(&mut self, _progress: &Progress, index: u32, piece: Piece, _out: &mut Vec<u8>) {
        let logprobs = self.shape.logprobs(&piece);
        let choice = &mut self.gathered[index as usize];
        choice.text += &piece.text;
        choice.tokens.extend(piece.token.map(|token| token.id));
        choice.logprobs.content.extend(logprobs.into_iter().flat_map(|logprobs| logprobs.content));
        choice.end = piece.end;
    }

    fn end(&mut self, progress: &Progress, out: &mut Vec<u8>) {
        let counts = progress.counts();
        let created = self.shape.created_cache_tokens(counts);
        let usage = Usage::chat(counts.prompt, counts.output, counts.cached, created);
        let gathered = std::mem::take(&mut self.gathered);
        let choices = (0..).zip(gathered).map(|(index, choice)| self.shape.choice(index, choice)).collect();
        let prompt_token_ids = self.shape.prompt_token_ids.take();
        write_body(&ChatCompletion { prompt_token_ids, ..ChatCompletion::new(self.shape.head.clone(), choices, usage) }, out);
    }
}

struct Stream {
    shape: Shape,
    /// A last chunk with the usage.
    usage: bool,
    /// Usage in every chunk.
    continuous: bool,
    begun: bool,
}

impl Format for Stream {
    fn piece(&mut self, progress: &Progress, index: u32, piece: Piece, out: &mut Vec<u8>) {
        let prompt = progress.prompt_tokens_of(index);
        if !std::mem::replace(&mut self.begun, true) {
            // With the first token, not before: a client may take its first event for it.
            for index in 0..progress.choice_count() {
                let role = ChatChunk::role(&self.shape.head, index, self.shape.prompt_token_ids.clone());
                self.write(role, prompt, 0, out);
            }
        }
        let logprobs = self.shape.logprobs(&piece);
        let empty_end = piece.text.is_empty() && piece.end.is_some();
        let delta = if empty_end { Delta::default() } else { Delta::text(&piece.text) };
        let token_ids = self.shape.return_ids.then(|| piece.token.iter().map(|token| token.id).collect());
        let choice = ChatChunkChoice { logprobs, token_ids: Some(token_ids), ..ChatChunkChoice::delta(index, delta) };
        let chunk = match piece.end {
            None => ChatChunk::new(&self.shape.head, vec![choice]),
            Some(End { reason, stop_reason, .. }) => self.last(choice, reason, stop_reason),
        };
        self.write(chunk, prompt, progress.tokens_of(index), out);
    }

    fn end(&mut self, progress: &Progress, out: &mut Vec<u8>) {
        if self.usage {
            let counts = progress.counts();
            let created = self.shape.created_cache_tokens(counts);
            let usage = Usage::chat_stream(counts.prompt, counts.output, counts.cached, created);
            sse::write_json(&ChatChunk::usage(&self.shape.head, usage), out);
        }
        out.extend_from_slice(sse::DONE);
    }
}

impl Stream {
    fn write(&self, chunk: ChatChunk, prompt: u32, output: u32, out: &mut Vec<u8>) {
        let usage = self.continuous.then(|| Usage::chat_continuous(prompt, output));
        sse::write_json(&ChatChunk { usage, ..chunk }, out);
    }

    fn last(&self, choice: ChatChunkChoice, reason: FinishReason, stop_reason: Option<Value>) -> ChatChunk {
        let chunk = ChatChunk::new(&self.shape.head, vec![choice.finished(reason, stop_reason)]);
        if self.usage { chunk } else { chunk.with_fingerprint(&self.shape.head) }
    }
}
