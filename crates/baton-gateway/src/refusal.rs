//! Every error that the gateway itself answers with: one table from cause to HTTP status and OpenAI body.

use std::time::Duration;

use axum::{
    Json,
    body::Body,
    response::{IntoResponse, Response},
};
use baton_session::{End, Fault};
use baton_units::{Blocks, Tokens};
use baton_wire::{
    openai::{ErrorBody, ErrorResponse},
    sse,
};
use bytes::Bytes;
use http::{
    HeaderValue, StatusCode,
    header::{RETRY_AFTER, WWW_AUTHENTICATE},
};
use serde_json::json;

use crate::tenants::Limit;

/// Why a client gets an error instead of an answer. The text of the body says what to do; it names no replica and no address.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Refusal {
    /// The body is not what the path takes; vLLM's text.
    Body(ErrorBody),
    BodyTooLarge {
        limit: usize,
    },
    /// The body did not arrive in time.
    BodyLate {
        within: Duration,
    },
    NoModelNamed {
        models: Vec<String>,
    },
    UnknownModel {
        model: String,
        models: Vec<String>,
    },
    TooManyChoices {
        choices: u64,
        limit: u32,
    },
    PromptTooLong {
        prompt: Tokens,
        limit: Tokens,
    },
    /// No replica can hold the request, however long it waits. `fits`: tokens that one could hold, prompt and output together.
    NeverFits {
        needed: Blocks,
        limit: Blocks,
        fits: Tokens,
    },
    Overloaded {
        retry_after: Duration,
    },
    NoReplica {
        retry_after: Duration,
    },
    Draining,
    /// The engine does not have this path, or nobody does.
    NoSuchPath,
    MethodNotAllowed,
    Unauthorized,
    /// No tenant has the client's key, or it sent none.
    UnknownKey {
        given: bool,
    },
    /// The client's tenant has no room for it.
    TenantLimit {
        limit: Limit,
        retry_after: Duration,
    },
    NotFound(String),
    /// It cannot be done as things are.
    Conflict(String),
    /// The request ran and came to nothing.
    Ended(End),
}

/// Time after which a fleet without replicas may have one again: the longest pause between probes.
pub(crate) const NO_REPLICA_RETRY: Duration = Duration::from_secs(1);

impl Refusal {
    /// The table.
    fn row(&self) -> (u16, ErrorBody) {
        let body = match self {
            Self::Body(body) => body.clone(),
            Self::BodyTooLarge { limit } => {
                ErrorBody::new(413, "PayloadTooLargeError", None, format!("the body is larger than the limit of {limit} bytes"))
            }
            Self::BodyLate { within } => ErrorBody::new(
                408,
                "RequestTimeoutError",
                None,
                format!("the body did not arrive within {within:?}; send it faster or less"),
            ),
            Self::NoModelNamed { models } => {
                let message = format!("name a model; this fleet serves {}", models.join(", "));
                ErrorBody::new(400, "BadRequestError", Some("model"), message)
            }
            Self::UnknownModel { model, models } => {
                ErrorBody::model_not_found(model, &models.iter().map(String::as_str).collect::<Vec<_>>())
            }
            Self::TooManyChoices { choices, limit } => {
                let message = format!("the request asks for {choices} choices; this gateway allows {limit}");
                ErrorBody::invalid("n", choices, &message)
            }
            Self::PromptTooLong { prompt, limit } => ErrorBody::prompt_too_long(prompt.0, limit.0),
            Self::NeverFits { needed, limit, fits } => {
                let message = format!(
                    "The request needs {needed} of KV and the largest replica holds {limit}, which is {fits}, prompt and output together. \
                     Please reduce the length of the input prompt or the number of requested output tokens."
                );
                ErrorBody::bad_request(message)
            }
            Self::Overloaded { retry_after } => ErrorBody::overloaded(format!(
                "the fleet is too busy to start this request in time; retry after {} s",
                seconds(*retry_after)
            )),
            Self::NoReplica { retry_after } => {
                ErrorBody::unavailable(format!("no replica is ready for this request; retry after {} s", seconds(*retry_after)))
            }
            Self::Draining => ErrorBody::unavailable("this gateway is shutting down; send the request again, to another one"),
            Self::NoSuchPath => ErrorBody::not_found("no engine of this fleet has this path"),
            Self::MethodNotAllowed => ErrorBody::new(405, "MethodNotAllowedError", None, "this path does not take this method"),
            Self::Unauthorized => ErrorBody::new(401, "AuthenticationError", None, "send the admin key as `Authorization: Bearer KEY`"),
            Self::UnknownKey { given } => {
                let what = if *given { "the API key is not known here" } else { "no API key was sent" };
                let message = format!("{what}; send one of this gateway as `Authorization: Bearer KEY`");
                ErrorBody::new(401, "invalid_request_error", None, message)
            }
            Self::TenantLimit { limit, retry_after } => {
                let kind = if *limit == Limit::Tokens { "tokens" } else { "requests" };
                let message = format!("your limit {} is reached; retry after {} s", limit.option(), seconds(*retry_after).max(1));
                ErrorBody::new(429, kind, None, message)
            }
            Self::NotFound(what) => ErrorBody::not_found(what.clone()),
            Self::Conflict(why) => ErrorBody::new(409, "ConflictError", None, why.clone()),
            Self::Ended(end) => ended(*end),
        };
        (body.code, body)
    }

    fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Overloaded { retry_after } | Self::NoReplica { retry_after } | Self::TenantLimit { retry_after, .. } => {
                Some(*retry_after)
            }
            Self::Draining | Self::Ended(End::Exhausted(_) | End::Drained) => Some(NO_REPLICA_RETRY),
            Self::Body(_)
            | Self::BodyTooLarge { .. }
            | Self::BodyLate { .. }
            | Self::NoModelNamed { .. }
            | Self::UnknownModel { .. }
            | Self::TooManyChoices { .. }
            | Self::PromptTooLong { .. }
            | Self::NeverFits { .. }
            | Self::NoSuchPath
            | Self::MethodNotAllowed
            | Self::Unauthorized
            | Self::UnknownKey { .. }
            | Self::NotFound(_)
            | Self::Conflict(_)
            | Self::Ended(_) => None,
        }
    }

    /// OpenAI's name of the error where its clients look for one; elsewhere `code` is the status, as vLLM has it.
    fn openai_code(&self) -> Option<&'static str> {
        match self {
            Self::UnknownKey { .. } => Some("invalid_api_key"),
            Self::TenantLimit { .. } => Some("rate_limit_exceeded"),
            Self::Body(_)
            | Self::BodyTooLarge { .. }
            | Self::BodyLate { .. }
            | Self::NoModelNamed { .. }
            | Self::UnknownModel { .. }
            | Self::TooManyChoices { .. }
            | Self::PromptTooLong { .. }
            | Self::NeverFits { .. }
            | Self::Overloaded { .. }
            | Self::NoReplica { .. }
            | Self::Draining
            | Self::NoSuchPath
            | Self::MethodNotAllowed
            | Self::Unauthorized
            | Self::NotFound(_)
            | Self::Conflict(_)
            | Self::Ended(_) => None,
        }
    }

    /// The error as an event of a stream that has begun. No `[DONE]` may follow it.
    pub(crate) fn event(&self) -> Bytes {
        sse::encode_json(&ErrorResponse { error: self.row().1 })
    }
}

fn ended(end: End) -> ErrorBody {
    match end {
        End::Failed(fault) | End::Exhausted(fault) => {
            let code = if matches!(fault, Fault::NoFirstToken(_) | Fault::Stalled(_)) { 504 } else { 502 };
            let kind = if code == 504 { "GatewayTimeoutError" } else { "BadGatewayError" };
            let advice =
                if matches!(end, End::Exhausted(_)) { "no other replica could take it; retry" } else { "the answer is incomplete; retry" };
            ErrorBody::new(code, kind, None, format!("{fault}; {advice}"))
        }
        End::Drained => ErrorBody::unavailable("this gateway is shutting down; the answer is incomplete, send the request again"),
        End::TimedOut(limit) => {
            ErrorBody::new(504, "GatewayTimeoutError", None, format!("the request ran longer than its limit of {limit:?}"))
        }
        End::Finished | End::Cancelled | End::Refused | End::Rejected => ErrorBody::internal(format!("the request ended: {end}")),
    }
}

fn seconds(span: Duration) -> u64 {
    span.as_secs() + u64::from(span.subsec_nanos() > 0)
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response<Body> {
        let (status, error) = self.row();
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = match self.openai_code() {
            None => (status, Json(ErrorResponse { error })).into_response(),
            Some(code) => {
                let ErrorBody { message, kind, param, .. } = error;
                let error = json!({ "message": message, "type": kind, "param": param, "code": code });
                (status, Json(json!({ "error": error }))).into_response()
            }
        };
        if matches!(self, Self::UnknownKey { .. }) {
            response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(span) = self.retry_after() {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds(span).max(1)));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_and_empty_fleets_say_when_to_retry() {
        for (refusal, status) in [
            (Refusal::Overloaded { retry_after: Duration::from_millis(1500) }, 429),
            (Refusal::NoReplica { retry_after: Duration::from_secs(2) }, 503),
        ] {
            let response = refusal.into_response();
            assert_eq!(response.status().as_u16(), status);
            assert_eq!(response.headers()[RETRY_AFTER], "2");
        }
    }

    #[test]
    fn a_request_that_fits_nowhere_is_told_what_would() {
        let (status, body) = Refusal::NeverFits { needed: Blocks(313), limit: Blocks(64), fits: Tokens(1024) }.row();
        assert_eq!(status, 400);
        assert!(body.message.contains("313 blocks") && body.message.contains("1024 tokens"), "{}", body.message);
    }

    #[test]
    fn an_error_event_is_no_end_of_stream() {
        let event = Refusal::Ended(End::Failed(Fault::InBand)).event();
        assert!(event.starts_with(b"data: {\"error\":{\"message\":") && event.ends_with(b"\n\n"));
        assert!(!event.windows(6).any(|part| part == b"[DONE]"));
    }
}
