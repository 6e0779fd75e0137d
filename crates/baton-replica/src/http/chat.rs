use std::sync::Arc;

use axum::{
    extract::{State, rejection::BytesRejection},
    response::Response,
};
use baton_openai::{Checked, check_chat, check_prompt, output_limit, template_arguments};
use baton_wire::openai::{ChatRequest, ErrorBody, Sampling};
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use serde_json::json;

use super::{App, answer, json_response, read, respond_to};

/// `POST /v1/chat/completions`.
pub(super) async fn chat(State(app): State<Arc<App>>, headers: HeaderMap, body: Result<Bytes, BytesRejection>) -> Response {
    answer(serve(&app, &headers, body).await)
}

async fn serve(app: &Arc<App>, headers: &HeaderMap, body: Result<Bytes, BytesRejection>) -> Result<Response, ErrorBody> {
    let request: ChatRequest = read(headers, body)?;
    let head = app.head("chatcmpl", headers, &request.sampling)?;
    let checked = Checked::chat(&app.service, &request)?;
    let tokens = prompt_tokens(app, &request).await?;
    let id = head.id.clone();
    let understood = checked.with_prompts(head, vec![tokens], fastrand::u64(..))?;
    respond_to(app, understood, |_| id.clone()).await
}

/// `POST /v1/chat/completions/render`: the prompt's tokens, as the body of a request to `/inference/v1/generate`.
pub(super) async fn render(State(app): State<Arc<App>>, headers: HeaderMap, body: Result<Bytes, BytesRejection>) -> Response {
    answer(rendered(&app, &headers, body).await)
}

async fn rendered(app: &Arc<App>, headers: &HeaderMap, body: Result<Bytes, BytesRejection>) -> Result<Response, ErrorBody> {
    let request: ChatRequest = read(headers, body)?;
    let head = app.head("chatcmpl", headers, &request.sampling)?;
    check_chat(&request)?;
    let tokens = prompt_tokens(app, &request).await?;
    check_prompt(&tokens, app.service.limits)?;
    let max_tokens = output_limit(tokens.len(), request.output_limit(), app.service.limits)?;
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
    let told = |field| request.rest.get(field).cloned();
    let kwargs = template_arguments(request.chat_template_kwargs.clone(), told("documents"), told("reasoning_effort"));
    let prompt = app.render(
        &request.messages,
        request.tools.as_ref(),
        request.add_generation_prompt,
        request.continue_final_message == Some(true),
        Some(&kwargs),
    )?;
    Ok(app.encode(prompt, request.sampling.add_special_tokens.unwrap_or(false)).await)
}
