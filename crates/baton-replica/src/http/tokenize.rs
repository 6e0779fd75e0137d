use std::sync::Arc;

use axum::{
    extract::{State, rejection::BytesRejection},
    response::Response,
};
use baton_wire::openai::{DetokenizeRequest, DetokenizeResponse, ErrorBody, TokenizeRequest, TokenizeResponse};
use bytes::Bytes;
use http::{HeaderMap, StatusCode};

use super::{App, answer, json_response, read};

/// `POST /tokenize`.
pub(super) async fn tokenize(State(app): State<Arc<App>>, headers: HeaderMap, body: Result<Bytes, BytesRejection>) -> Response {
    answer(tokenized(&app, &headers, body).await)
}

async fn tokenized(app: &App, headers: &HeaderMap, body: Result<Bytes, BytesRejection>) -> Result<Response, ErrorBody> {
    let request: TokenizeRequest = read(headers, body)?;
    app.model(request.model.as_deref())?;
    let (text, add_special) = match (&request.messages, request.prompt) {
        (Some(messages), _) => {
            let prompt = app.render(
                messages,
                request.tools.as_ref(),
                request.add_generation_prompt,
                request.continue_final_message == Some(true),
                request.chat_template_kwargs.as_ref(),
            )?;
            (prompt, request.add_special_tokens.unwrap_or(false))
        }
        (None, Some(prompt)) => (prompt, request.add_special_tokens.unwrap_or(true)),
        (None, None) => return Err(ErrorBody::missing_field("prompt")),
    };
    let tokens = app.encode(text, add_special).await;
    let strs = || tokens.iter().map(|&token| app.service.tokenizer.token_str(token).unwrap_or_default()).collect();
    let token_strs = (request.return_token_strs == Some(true)).then(strs);
    let answer = TokenizeResponse { count: tokens.len(), max_model_len: app.service.limits.max_model_len, tokens, token_strs };
    Ok(json_response(StatusCode::OK, &answer))
}

/// `POST /detokenize`.
pub(super) async fn detokenize(State(app): State<Arc<App>>, headers: HeaderMap, body: Result<Bytes, BytesRejection>) -> Response {
    let detokenized = || {
        let request: DetokenizeRequest = read(&headers, body)?;
        app.model(request.model.as_deref())?;
        if let Some(&token) = request.tokens.iter().find(|&&token| u64::from(token) >= app.service.limits.vocabulary) {
            return Err(ErrorBody::token_out_of_vocabulary(u64::from(token)));
        }
        let prompt = app.service.tokenizer.decode(&request.tokens, false);
        Ok(json_response(StatusCode::OK, &DetokenizeResponse { prompt }))
    };
    answer(detokenized())
}
