use std::sync::Arc;

use axum::{
    extract::{State, rejection::BytesRejection},
    response::Response,
};
use baton_wire::{
    openai::{
        ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatLogprobs, ChatRequest, Delta, ErrorBody, FinishReason, Head, Message,
        Sampling, Usage,
    },
    sse,
};
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use serde_json::{Value, json};

use super::{App, Format, answer, json_response, logprobs::Names, read, seed, stream_response};
use crate::{
    choice::{End, Piece},
    generation::{Common, Generation, Prepared, Step, engine_gone},
    request::{Asked, check_prompt, check_supported, choices, output_limit, sampling_options, text_options, with_max_tokens},
};

/// `POST /v1/chat/completions`.
pub(super) async fn chat(State(app): State<Arc<App>>, headers: HeaderMap, body: Result<Bytes, BytesRejection>) -> Response {
    answer(serve(&app, &headers, body).await)
}

async fn serve(app: &Arc<App>, headers: &HeaderMap, body: Result<Bytes, BytesRejection>) -> Result<Response, ErrorBody> {
    let request: ChatRequest = read(headers, body)?;
    let head = app.head("chatcmpl", headers, &request.sampling)?;
    check(&request)?;
    let sampling = &request.sampling;
    let asked = Asked { max_tokens: request.output_limit(), logprobs: logprobs(&request)? };
    let options = sampling_options(sampling, asked)?;
    let common = Common {
        choices: choices(sampling, 1)?,
        seed: seed(sampling),
        priority: app.priority(sampling.priority)?,
        salt: sampling.cache_salt.clone(),
        text: text_options(sampling)?,
    };
    let tokens = prompt_tokens(app, &request).await?;
    let max_tokens = output_limit(tokens.len(), asked.max_tokens, app.limits)?;
    let params = with_max_tokens(&options, max_tokens, sampling, app.limits)?;
    let return_ids = sampling.return_token_ids == Some(true);
    let prompt_token_ids = return_ids.then(|| tokens.clone());
    let prepared = Prepared { tokens, params, name: head.id.clone() };
    let generation = Generation::start(&app.engine, &app.tokenizer, vec![prepared], &common).await?;
    let shape = Shape {
        app: Arc::clone(app),
        head,
        prompt_token_ids,
        return_ids,
        logprobs: asked.logprobs.is_some(),
        as_ids: sampling.return_tokens_as_token_ids == Some(true),
    };
    if sampling.is_stream() {
        let (usage, continuous) = (sampling.includes_usage(), sampling.includes_continuous_usage());
        return Ok(stream_response(generation, ChatStream { shape, usage, continuous, begun: false }));
    }
    shape.whole(generation).await
}

/// `POST /v1/chat/completions/render`: the prompt's tokens, as the body of a request to `/inference/v1/generate`.
pub(super) async fn render(State(app): State<Arc<App>>, headers: HeaderMap, body: Result<Bytes, BytesRejection>) -> Response {
    answer(rendered(&app, &headers, body).await)
}

async fn rendered(app: &Arc<App>, headers: &HeaderMap, body: Result<Bytes, BytesRejection>) -> Result<Response, ErrorBody> {
    let request: ChatRequest = read(headers, body)?;
    let head = app.head("chatcmpl", headers, &request.sampling)?;
    check(&request)?;
    let tokens = prompt_tokens(app, &request).await?;
    let max_tokens = output_limit(tokens.len(), request.output_limit(), app.limits)?;
    let Sampling { cache_salt, priority, .. } = request.sampling.clone();
    let sampling = Sampling {
        model: None,
        request_id: None,
        stream: None,
        stream_options: None,
        cache_salt: None,
        priority: None,
        max_tokens: Some(max_tokens),
        ..request.sampling
    };
    let answer = json!({
        "request_id": head.id, "token_ids": tokens, "sampling_params": sampling, "model": head.model, "stream": false,
        "stream_options": null, "cache_salt": cache_salt, "priority": priority.unwrap_or(0),
    });
    Ok(json_response(StatusCode::OK, &answer))
}

async fn prompt_tokens(app: &App, request: &ChatRequest) -> Result<Vec<u32>, ErrorBody> {
    let prompt = app.render(
        &request.messages,
        request.tools.as_ref().filter(|_| request.tool_choice != Some(json!("none"))),
        request.add_generation_prompt,
        request.continue_final_message == Some(true),
        request.chat_template_kwargs.as_ref(),
    )?;
    let tokens = app.encode(prompt, request.sampling.add_special_tokens.unwrap_or(false)).await;
    check_prompt(&tokens, app.limits)?;
    Ok(tokens)
}

fn check(request: &ChatRequest) -> Result<(), ErrorBody> {
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

fn logprobs(request: &ChatRequest) -> Result<Option<u32>, ErrorBody> {
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
struct Shape {
    app: Arc<App>,
    head: Head,
    prompt_token_ids: Option<Vec<u32>>,
    return_ids: bool,
    logprobs: bool,
    as_ids: bool,
}

/// A choice that is being gathered.
#[derive(Default)]
struct Gathered {
    text: String,
    tokens: Vec<u32>,
    logprobs: ChatLogprobs,
    end: Option<End>,
}

impl Shape {
    fn logprobs(&self, piece: &Piece) -> Option<ChatLogprobs> {
        let names = Names { tokenizer: &self.app.tokenizer, as_ids: self.as_ids };
        piece.token.as_ref().filter(|_| self.logprobs).map(|token| names.chat(token))
    }

    /// Prompt tokens that fill blocks and were not found there.
    fn created_cache_tokens(&self, prompt: u32, cached: u32) -> u32 {
        let size = self.app.config.engine.block_size.get();
        (prompt / size * size).saturating_sub(cached)
    }

    async fn whole(self, mut generation: Generation) -> Result<Response, ErrorBody> {
        let mut gathered: Vec<Gathered> = (0..generation.choice_count()).map(|_| Gathered::default()).collect();
        loop {
            match generation.next().await {
                Step::Piece { index, piece, .. } => {
                    let logprobs = self.logprobs(&piece);
                    let choice = &mut gathered[index as usize];
                    choice.text += &piece.text;
                    choice.tokens.extend(piece.token.map(|token| token.id));
                    choice.logprobs.content.extend(logprobs.into_iter().flat_map(|logprobs| logprobs.content));
                    choice.end = piece.end;
                }
                Step::Done => break,
                Step::Failed => return Err(engine_gone()),
            }
        }
        let counts = generation.counts();
        let created = self.created_cache_tokens(counts.prompt, counts.cached);
        let usage = Usage::chat(counts.prompt, counts.output, counts.cached, created);
        let choices = (0..).zip(gathered).map(|(index, choice)| self.choice(index, choice)).collect();
        let answer = ChatCompletion { prompt_token_ids: self.prompt_token_ids, ..ChatCompletion::new(self.head, choices, usage) };
        Ok(json_response(StatusCode::OK, &answer))
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

struct ChatStream {
    shape: Shape,
    /// A last chunk with the usage.
    usage: bool,
    /// Usage in every chunk.
    continuous: bool,
    begun: bool,
}

impl ChatStream {
    fn with_usage(&self, chunk: ChatChunk, prompt: u32, output: u32) -> Bytes {
        let usage = self.continuous.then(|| Usage::chat_continuous(prompt, output));
        sse::encode_json(&ChatChunk { usage, ..chunk })
    }
}

impl Format for ChatStream {
    fn piece(&mut self, generation: &Generation, index: u32, piece: Piece, tokens: u32) -> Vec<Bytes> {
        let prompt = generation.prompt_tokens_of(index);
        let mut events = Vec::new();
        if !std::mem::replace(&mut self.begun, true) {
            // With the first token, not before: a client may take its first event for it.
            let roles = (0..generation.choice_count())
                .map(|index| self.with_usage(ChatChunk::role(&self.shape.head, index, self.shape.prompt_token_ids.clone()), prompt, 0));
            events.extend(roles);
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
        events.push(self.with_usage(chunk, prompt, tokens));
        events
    }

    fn end(&mut self, generation: &Generation) -> Vec<Bytes> {
        let counts = generation.counts();
        let created = self.shape.created_cache_tokens(counts.prompt, counts.cached);
        let usage = || Usage::chat_stream(counts.prompt, counts.output, counts.cached, created);
        self.usage.then(|| sse::encode_json(&ChatChunk::usage(&self.shape.head, usage()))).into_iter().collect()
    }
}

impl ChatStream {
    fn last(&self, choice: ChatChunkChoice, reason: FinishReason, stop_reason: Option<Value>) -> ChatChunk {
        let chunk = ChatChunk::new(&self.shape.head, vec![choice.finished(reason, stop_reason)]);
        if self.usage { chunk } else { chunk.with_fingerprint(&self.shape.head) }
    }
}
