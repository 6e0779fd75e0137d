//! The routes of a vLLM server, and the replica's own report.

mod admin;
mod chat;
mod completions;
mod generate;
mod tokenize;

use std::sync::Arc;

use axum::{
    Router,
    body::Body,
    extract::{DefaultBodyLimit, rejection::BytesRejection},
    response::Response,
    routing::{get, post},
};
use baton_openai::{Service, Understood};
use baton_text::TemplateError;
use baton_wire::{
    openai::{ErrorBody, ErrorResponse, Head, Sampling, parse},
    replica::{KvEventSource, MigrationSource},
    sse,
};
use bytes::Bytes;
use futures_util::{Stream, stream};
use http::{HeaderMap, StatusCode, header};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};

use crate::{
    ReplicaConfig,
    clock::Clock,
    driver::EngineHandle,
    generation::{Generation, Step, engine_gone},
    metrics::Metrics,
};

/// A prompt of 128k token ids is about 1 MB of JSON; a batch of them must still fit.
const BODY_BYTES_MAX: usize = 64 << 20;
/// Text above this length is tokenized on a thread of its own: about a millisecond's work.
const TEXT_INLINE_MAX: usize = 4096;

/// What every handler works with.
pub(crate) struct App {
    pub(crate) config: ReplicaConfig,
    pub(crate) service: Arc<Service>,
    pub(crate) engine: EngineHandle,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) clock: Clock,
    pub(crate) kv_events: Option<KvEventSource>,
    pub(crate) migration: Option<MigrationSource>,
    pub(crate) numerics_id: String,
    pub(crate) incarnation: u64,
}

pub(crate) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat::chat))
        .route("/v1/chat/completions/render", post(chat::render))
        .route("/v1/completions", post(completions::completions))
        .route("/inference/v1/generate", post(generate::generate))
        .route("/health", get(admin::health))
        .route("/ping", get(admin::health).post(admin::health))
        .route("/load", get(admin::load))
        .route("/version", get(admin::version))
        .route("/metrics", get(admin::metrics))
        .route("/v1/models", get(admin::models))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/kv_event_sources", get(admin::kv_event_sources))
        .route("/abort_requests", post(admin::abort_requests))
        .route("/reset_prefix_cache", post(admin::reset_prefix_cache))
        .route("/baton/v1/replica", get(admin::report))
        .fallback(|| async { plain(StatusCode::NOT_FOUND, "Not Found") })
        .method_not_allowed_fallback(|| async { plain(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed") })
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(app)
}

/// An error of the web framework's, which has no OpenAI body.
fn plain(status: StatusCode, detail: &str) -> Response {
    json_response(status, &json!({ "detail": detail }))
}

fn json_response(status: StatusCode, value: &impl Serialize) -> Response {
    let body = serde_json::to_vec(value).expect("wire types serialize");
    respond(status, "application/json", Body::from(body))
}

fn respond(status: StatusCode, content_type: &'static str, body: Body) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(content_type));
    response
}

fn answer(result: Result<Response, ErrorBody>) -> Response {
    result.unwrap_or_else(|error| {
        let status = StatusCode::from_u16(error.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = respond(status, "application/json", Body::from(error.to_json()));
        if status == StatusCode::TOO_MANY_REQUESTS {
            response.headers_mut().insert(header::RETRY_AFTER, header::HeaderValue::from_static("1"));
        }
        response
    })
}

/// The request as JSON of its type; vLLM takes no other media type.
fn read<T: DeserializeOwned>(headers: &HeaderMap, body: Result<Bytes, BytesRejection>) -> Result<T, ErrorBody> {
    let media_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    if !media_type.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json") {
        return Err(ErrorBody::unsupported_media_type());
    }
    parse(&body.map_err(|rejection| ErrorBody::new(rejection.status().as_u16(), "BadRequestError", None, rejection.body_text()))?)
}

impl App {
    /// The name to answer under; a model that is not here is 404.
    fn model(&self, asked: Option<&str>) -> Result<String, ErrorBody> {
        let names = &self.config.models;
        match asked {
            None => Ok(names[0].clone()),
            Some(asked) if names.iter().any(|name| name == asked) => Ok(asked.to_owned()),
            Some(asked) => Err(ErrorBody::model_not_found(asked, &names.iter().map(String::as_str).collect::<Vec<_>>())),
        }
    }

    /// Id, time and model of an answer; the id is the client's own where it names one.
    fn head(&self, prefix: &str, headers: &HeaderMap, sampling: &Sampling) -> Result<Head, ErrorBody> {
        Ok(Head {
            id: format!("{prefix}-{}", request_id(headers, sampling)),
            created: self.clock.unix_now_s(),
            model: self.model(sampling.model.as_deref())?,
            system_fingerprint: Some(fingerprint()),
        })
    }

    /// Tokens of a text, without holding up other requests when it is long.
    async fn encode(&self, text: String, add_special: bool) -> Vec<u32> {
        if text.len() <= TEXT_INLINE_MAX {
            return self.service.tokenizer.encode(&text, add_special);
        }
        let tokenizer = Arc::clone(&self.service.tokenizer);
        tokio::task::spawn_blocking(move || tokenizer.encode(&text, add_special)).await.expect("encoding does not panic")
    }

    /// The prompt of a conversation, which may be made to end inside its last message.
    fn render(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        add_generation_prompt: Option<bool>,
        continue_final_message: bool,
        kwargs: Option<&Map<String, Value>>,
    ) -> Result<String, ErrorBody> {
        let add_generation_prompt = add_generation_prompt.unwrap_or(!continue_final_message);
        if add_generation_prompt && continue_final_message {
            let message = "Cannot set both `continue_final_message` and `add_generation_prompt` to True.";
            return Err(ErrorBody::new(400, "BadRequestError", Some("continue_final_message"), message));
        }
        if messages.as_array().is_some_and(Vec::is_empty) {
            return Err(ErrorBody::new(400, "BadRequestError", Some("messages"), "You must pass at least one message"));
        }
        let none = Map::new();
        let (tokenizer, kwargs) = (&self.service.tokenizer, kwargs.unwrap_or(&none));
        let prompt = if continue_final_message {
            tokenizer.render_chat_to_continue(messages, tools, kwargs)
        } else {
            tokenizer.render_chat(messages, tools, add_generation_prompt, kwargs)
        };
        prompt.map_err(|error| template_error(&error))
    }
}

fn template_error(error: &TemplateError) -> ErrorBody {
    ErrorBody::new(400, "BadRequestError", Some("messages"), error.to_string())
}

/// Names this build, as vLLM names its own.
fn fingerprint() -> String {
    format!("baton-{}", env!("CARGO_PKG_VERSION"))
}

/// `X-Request-Id`, else the body's own id, else a new one.
fn request_id(headers: &HeaderMap, sampling: &Sampling) -> String {
    let named = headers.get("x-request-id").and_then(|id| id.to_str().ok());
    named.or(sampling.request_id.as_deref()).map_or_else(|| format!("{:016x}", fastrand::u64(..)), str::to_owned)
}

/// Runs a request, and answers with its stream or, when it is complete, its body. `name`: the id of each prompt for `/abort_requests`.
async fn respond_to(app: &App, understood: Understood, name: impl Fn(usize) -> String) -> Result<Response, ErrorBody> {
    let stream = understood.stream;
    let generation = Generation::start(&app.engine, understood, name).await?;
    if stream {
        return Ok(respond(StatusCode::OK, "text/event-stream; charset=utf-8", Body::from_stream(events(generation))));
    }
    Ok(respond(StatusCode::OK, "application/json", Body::from(generation.whole().await?)))
}

/// One event at a time, so that each is a chunk of its own as at vLLM; an error event and the end mark if the engine failed.
fn events(generation: Generation) -> impl Stream<Item = Result<Bytes, std::convert::Infallible>> {
    stream::unfold((generation, Bytes::new(), false), |(mut generation, mut ready, mut ended)| async move {
        if ready.is_empty() && !ended {
            (ready, ended) = match generation.next().await {
                Step::Events(events) => (events, false),
                Step::Done(events) => (events, true),
                Step::Failed => {
                    let mut events = Vec::new();
                    sse::write_json(&ErrorResponse { error: engine_gone() }, &mut events);
                    events.extend_from_slice(sse::DONE);
                    (events.into(), true)
                }
            };
        }
        (!ready.is_empty()).then(|| (Ok(sse::take_written(&mut ready)), (generation, ready, ended)))
    })
}
