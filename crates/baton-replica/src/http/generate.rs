//! Tokens in, tokens out: vLLM's `/inference/v1/generate`.

use std::sync::Arc;

use axum::{
    extract::{State, rejection::BytesRejection},
    response::Response,
};
use baton_openai::{
    Answer, Asked, End, Format, Piece, Progress, Prompt, Token, Understood, check_prompt, check_supported, choices, output_limit_or_short,
    own_logprob, sampling_options, text_options, with_max_tokens, written_logprob,
};
use baton_wire::{
    openai::{ErrorBody, Sampling, StreamOptions, Usage},
    sse,
};
use bytes::Bytes;
use http::HeaderMap;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{App, answer, read, request_id, respond_to};

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
    let (tokens, limits) = (request.token_ids, app.service.limits);
    check_prompt(&tokens, limits)?;
    let max_tokens = output_limit_or_short(tokens.len(), sampling.max_tokens, limits)?;
    let options = sampling_options(&sampling, Asked { max_tokens: Some(max_tokens), logprobs })?;
    let params = with_max_tokens(&options, max_tokens, &sampling, limits)?;
    let choices = choices(&sampling, 1)?;
    let priority = app.service.priority(request.priority)?;
    let text = text_options(&sampling)?;
    let id = format!("generate-tokens-{}", request_id(headers, &sampling));
    let shape = Shape { id: id.clone(), logprobs: logprobs.is_some() };
    let stream = sampling.is_stream();
    let format: Box<dyn Format> = if stream {
        Box::new(Stream { shape, usage: sampling.includes_usage() })
    } else {
        let gathered = (0..choices).map(|_| Gathered::default()).collect();
        Box::new(Whole { shape, model, created: app.clock.unix_now_s(), gathered })
    };
    let prompts = vec![Prompt { tokens, params }];
    let answer = Answer::new(&app.service, &prompts, choices, &text, format);
    let seed = sampling.seed.map_or_else(|| fastrand::u64(..), i64::cast_unsigned);
    let understood = Understood { prompts, choices, seed, priority, salt: request.cache_salt, public: None, stream, answer };
    respond_to(app, understood, |_| id.clone()).await
}

struct Shape {
    id: String,
    logprobs: bool,
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
}

fn logprob(token: &Token) -> Value {
    let rank = token.top.iter().position(|&(other, _)| other == token.id).map(|index| index + 1);
    let top: Vec<Value> = (1..)
        .zip(&token.top)
        .map(|(rank, &(token, logprob))| json!({ "token_id": token, "logprob": written_logprob(logprob), "rank": rank }))
        .collect();
    json!({ "token_id": token.id, "logprob": own_logprob(token), "rank": rank, "top_logprobs": top })
}

struct Whole {
    shape: Shape,
    model: String,
    created: u64,
    gathered: Vec<Gathered>,
}

#[derive(Default)]
struct Gathered {
    tokens: Vec<Token>,
    end: Option<End>,
}

impl Format for Whole {
    fn piece(&mut self, _progress: &Progress, index: u32, piece: Piece, _out: &mut Vec<u8>) {
        let choice = &mut self.gathered[index as usize];
        choice.tokens.extend(piece.token);
        choice.end = piece.end;
    }

    fn end(&mut self, progress: &Progress, out: &mut Vec<u8>) {
        let counts = progress.counts();
        let choices: Vec<Value> = (0..)
            .zip(&self.gathered)
            .map(|(index, choice)| self.shape.choice(index, &choice.tokens, choice.end.as_ref(), choice.tokens.len() as u32))
            .collect();
        let body = json!({
            "request_id": self.shape.id,
            "model": self.model,
            "created": self.created,
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
        serde_json::to_writer(out, &body).expect("plain values serialize");
    }
}

struct Stream {
    shape: Shape,
    /// A last event with the usage.
    usage: bool,
}

impl Format for Stream {
    fn piece(&mut self, progress: &Progress, index: u32, piece: Piece, out: &mut Vec<u8>) {
        let token: Vec<Token> = piece.token.into_iter().collect();
        let choice = self.shape.choice(index, &token, piece.end.as_ref(), progress.tokens_of(index));
        self.event(None, &[choice], out);
    }

    fn end(&mut self, progress: &Progress, out: &mut Vec<u8>) {
        if self.usage {
            let counts = progress.counts();
            let usage = Usage::completion_stream(counts.prompt, counts.output, counts.cached);
            self.event(Some(&usage), &[], out);
        }
        out.extend_from_slice(sse::DONE);
    }
}

impl Stream {
    fn event(&self, usage: Option<&Usage>, choices: &[Value], out: &mut Vec<u8>) {
        let event = json!({ "request_id": self.shape.id, "usage": usage, "output_mode": "tokens", "choices": choices });
        sse::write_json(&event, out);
    }
}
