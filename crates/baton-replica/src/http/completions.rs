use std::sync::Arc;

use axum::{
    extract::{State, rejection::BytesRejection},
    response::Response,
};
use baton_openai::Checked;
use baton_wire::openai::{CompletionRequest, ErrorBody, Prompt};
use bytes::Bytes;
use http::HeaderMap;

use super::{App, answer, read, respond_to};

/// `POST /v1/completions`.
pub(super) async fn completions(State(app): State<Arc<App>>, headers: HeaderMap, body: Result<Bytes, BytesRejection>) -> Response {
    answer(serve(&app, &headers, body).await)
}

async fn serve(app: &Arc<App>, headers: &HeaderMap, body: Result<Bytes, BytesRejection>) -> Result<Response, ErrorBody> {
    let request: CompletionRequest = read(headers, body)?;
    let head = app.head("cmpl", headers, &request.sampling)?;
    let checked = Checked::completion(&app.service, &request)?;
    let prompts = tokens_of(app, request.prompt, request.sampling.add_special_tokens.unwrap_or(true)).await;
    let id = head.id.clone();
    let understood = checked.with_prompts(head, prompts, fastrand::u64(..))?;
    respond_to(app, understood, |index| format!("{id}-{index}")).await
}

async fn tokens_of(app: &App, prompt: Prompt, add_special: bool) -> Vec<Vec<u32>> {
    let texts = match prompt {
        Prompt::Tokens(tokens) => return vec![tokens],
        Prompt::TokenLists(lists) => return lists,
        Prompt::Text(text) => vec![text],
        Prompt::Texts(texts) => texts,
    };
    let mut prompts = Vec::with_capacity(texts.len());
    for text in texts {
        prompts.push(app.encode(text, add_special).await);
    }
    prompts
}
