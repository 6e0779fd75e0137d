//! Tokens in, tokens out: vLLM's `/inference/v1/generate`.

use std::sync::Arc;

use axum::{
    extract::{State, rejection::BytesRejection},
    response::Response,
};
use baton_wire::{
    openai::{ErrorBody, Sampling, StreamOptions, Usage},
    sse,
};
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{App, Format, answer, json_response, logprobs, read, request_id, seed, stream_response};
use crate::{
    choice::{End, Piece, Token},
    generation::{Common, Generation, Prepared, Step, engine_gone},
    request::{Asked, check_prompt, check_supported, choices, output_limit, sampling_options, text_options, with_max_tokens},
};

/// Output tokens where none are named, as in vLLM's sampling parameters.
const MAX_TOKENS_DEFAULT: u32 = 16;

#[derive(Debug, Deserialize)]
struct GenerateRequest {
    token_ids: Vec<u32>,
    sampling_params: SamplingParams,
    #[serde(default)]
    request_id: Option<String>,
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    stream: Option<bool>,
    #[serde(default)]
    stream_options: Option<StreamOptions>,
    #[serde(default)]
    cache_salt: Option<String>,
    #[serde(default)]
    priority: Option<i64>,
}

#[derive(Debug, Deserialize)]
struct SamplingParams {
    #[serde(flatten)]
    sampling: Sampling,
    #[serde(default)]
    logprobs: Option<u32>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

pub(super) async fn generate(State(app): State<Arc<App>>, headers: HeaderMap, body: Result<Bytes, BytesRejection>) -> Response {
    answer(serve(&app, &headers, body).await)
}

async fn serve(app: &Arc<App>, headers: &HeaderMap, body: Result<Bytes, BytesRejection>) -> Result<Response, ErrorBody> {
    let request: GenerateRequest = read(headers, body)?;
    let SamplingParams { sampling, logprobs, rest } = request.sampling_params;
    let sampling = Sampling { request_id: request.request_id, stream: request.stream, stream_options: request.stream_options, ..sampling };
    let model = app.model(request.model.as_deref())?;
    check_supported(&sampling, &rest)?;
    check_prompt(&request.token_ids, app.limits)?;
    let fits = app.limits.max_model_len.saturating_sub(request.token_ids.len() as u32);
    let wanted = sampling.max_tokens.or(Some(MAX_TOKENS_DEFAULT.min(fits)).filter(|&tokens| tokens > 0));
    let max_tokens = output_limit(request.token_ids.len(), wanted, app.limits)?;
    let options = sampling_options(&sampling, Asked { max_tokens: Some(max_tokens), logprobs })?;
    let params = with_max_tokens(&options, max_tokens, &sampling, app.limits)?;
    let common = Common {
        choices: choices(&sampling, 1)?,
        seed: seed(&sampling),
        priority: app.priority(request.priority)?,
        salt: request.cache_salt,
        text: text_options(&sampling)?,
    };
    let id = format!("generate-tokens-{}", request_id(headers, &sampling));
    let prepared = Prepared { tokens: request.token_ids, params, name: id.clone() };
    let generation = Generation::start(&app.engine, &app.tokenizer, vec![prepared], &common).await?;
    let shape = Shape { id, logprobs: logprobs.is_some(), usage: sampling.includes_usage() };
    if sampling.is_stream() {
        return Ok(stream_response(generation, shape));
    }
    shape.whole(generation, &model, app.clock.unix_now_s()).await
}

struct Shape {
    id: String,
    logprobs: bool,
    /// A last event with the usage.
    usage: bool,
}

#[derive(Default)]
struct Gathered {
    tokens: Vec<Token>,
    end: Option<End>,
}

impl Shape {
    fn choice(&self, index: u32, tokens: &[Token], end: Option<&End>, count: u32) -> Value {
        let ids: Vec<u32> = tokens.iter().map(|token| token.id).collect();
        let logprobs = self.logprobs.then(|| json!({ "content": tokens.iter().map(logprob).collect::<Vec<_>>() }));
        json!({
            "index": index,
            "finish_reason": end.map(|end| &end.reason),
            "stop_reason": end.and_then(|end| end.stop_reason.as_ref()),
            "token_ids": ids,
            "routed_experts": null,
            "sampling_mask": null,
            "weight_versions": end.map(|_| json!([{ "version": "default", "start": 0, "end": count }])),
            "logprobs": logprobs,
        })
    }

    async fn whole(self, mut generation: Generation, model: &str, created: u64) -> Result<Response, ErrorBody> {
        let mut gathered: Vec<Gathered> = (0..generation.choice_count()).map(|_| Gathered::default()).collect();
        loop {
            match generation.next().await {
                Step::Piece { index, piece, .. } => {
                    let choice = &mut gathered[index as usize];
                    choice.tokens.extend(piece.token);
                    choice.end = piece.end;
                }
                Step::Done => break,
                Step::Failed => return Err(engine_gone()),
            }
        }
        let counts = generation.counts();
        let choices: Vec<Value> = (0..)
            .zip(&gathered)
            .map(|(index, choice)| self.choice(index, &choice.tokens, choice.end.as_ref(), choice.tokens.len() as u32))
            .collect();
        let answer = json!({
            "request_id": self.id,
            "model": model,
            "created": created,
            "usage": Usage::completion(counts.prompt, counts.output, counts.cached),
            "prompt_logprobs": null,
            "prompt_token_id_logprobs": null,
            "prompt_token_ids": null,
            "mm_placeholders": null,
            "metrics": null,
            "kv_transfer_params": null,
            "ec_transfer_params": null,
            "output_mode": "tokens",
            "choices": choices,
        });
        Ok(json_response(StatusCode::OK, &answer))
    }

    fn event(&self, usage: Option<&Usage>, choices: &[Value]) -> Bytes {
        sse::encode_json(&json!({ "request_id": self.id, "usage": usage, "output_mode": "tokens", "choices": choices }))
    }
}

fn logprob(token: &Token) -> Value {
    let rank = token.top.iter().position(|&(other, _)| other == token.id).map(|index| index + 1);
    let top: Vec<Value> = (1..)
        .zip(&token.top)
        .map(|(rank, &(token, logprob))| json!({ "token_id": token, "logprob": logprobs::written(logprob), "rank": rank }))
        .collect();
    json!({ "token_id": token.id, "logprob": logprobs::own(token), "rank": rank, "top_logprobs": top })
}

impl Format for Shape {
    fn piece(&mut self, _generation: &Generation, index: u32, piece: Piece, tokens: u32) -> Vec<Bytes> {
        let token: Vec<Token> = piece.token.into_iter().collect();
        vec![self.event(None, &[self.choice(index, &token, piece.end.as_ref(), tokens)])]
    }

    fn end(&mut self, generation: &Generation) -> Vec<Bytes> {
        let counts = generation.counts();
        let usage = Usage::completion_stream(counts.prompt, counts.output, counts.cached);
        self.usage.then(|| self.event(Some(&usage), &[])).into_iter().collect()
    }
}
