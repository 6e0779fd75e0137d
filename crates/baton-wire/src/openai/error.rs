use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Map, Value, error::Category};

/// Bodies up to this size are read again, once for each field, to find the one at fault.
const SEARCHED_BYTES_MAX: usize = 64 << 10;

/// `{"error": {…}}`: the body of every refusal and failure, and the in-band event of a stream that failed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ErrorResponse {
    pub error: ErrorBody,
}

/// What went wrong, in vLLM's fields. Texts are vLLM's where vLLM has one, since clients match on them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ErrorBody {
    pub message: String,
    #[serde(rename = "type", default)]
    pub kind: String,
    /// The request's field at fault.
    #[serde(default)]
    pub param: Option<String>,
    /// The HTTP status, in vLLM; OpenAI itself sends a name or null, which reads as 0 here.
    #[serde(default, deserialize_with = "status_or_zero")]
    pub code: u16,
}

/// Reads a request body; the error is what a vLLM server answers.
pub fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ErrorBody> {
    serde_json::from_slice(body).map_err(|error| {
        let text = error.to_string();
        let missing = text.strip_prefix("missing field `").and_then(|rest| rest.split('`').next());
        match (error.classify(), missing) {
            (Category::Data, Some(field)) => ErrorBody::missing_field(field),
            (Category::Data, None) => {
                let field = field_at_fault::<T>(body, &text);
                let place = field.map_or_else(|| "body".to_owned(), |field| format!("body.{field}"));
                ErrorBody::validation("value_error", &place, problem(&text))
            }
            (Category::Syntax | Category::Eof | Category::Io, _) => {
                ErrorBody::validation("json_invalid", &format!("body.{}", offset(body, &error)), &format!("JSON decode error: {text}"))
            }
        }
    })
}

/// The field without which the body can be read, or fails otherwise. serde does not say: it reads flattened fields at the object's end.
fn field_at_fault<T: DeserializeOwned>(body: &[u8], text: &str) -> Option<String> {
    if body.len() > SEARCHED_BYTES_MAX {
        return None;
    }
    let fields: Map<String, Value> = serde_json::from_slice(body).ok()?;
    let cures = |name: &&String| {
        let rest: Map<String, Value> = fields.iter().filter(|(other, _)| other != name).map(|(k, v)| (k.clone(), v.clone())).collect();
        serde_json::from_value::<T>(Value::Object(rest)).err().is_none_or(|error| {
            let left = error.to_string();
            left != problem(text) && !left.starts_with("missing field")
        })
    };
    fields.keys().find(cures).cloned()
}

/// serde's words without its line and column, which are those of a body that a proxy may have written anew.
fn problem(text: &str) -> &str {
    text.rsplit_once(" at line ").map_or(text, |(problem, _)| problem)
}

/// Bytes before the place that serde names by line and column.
fn offset(body: &[u8], error: &serde_json::Error) -> usize {
    let lines = body.split_inclusive(|&byte| byte == b'\n').take(error.line().saturating_sub(1));
    lines.map(<[u8]>::len).sum::<usize>() + error.column()
}

fn status_or_zero<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<u16, D::Error> {
    let code = Value::deserialize(deserializer)?;
    Ok(code.as_u64().and_then(|code| u16::try_from(code).ok()).unwrap_or(0))
}

impl ErrorBody {
    pub fn new(code: u16, kind: &str, param: Option<&str>, message: impl Into<String>) -> Self {
        Self { message: message.into(), kind: kind.into(), param: param.map(Into::into), code }
    }

    /// 400 without a field at fault.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequestError", None, message)
    }

    /// 400 for one field: vLLM appends the field and its value to the message.
    pub fn invalid(param: &str, value: impl std::fmt::Display, message: &str) -> Self {
        Self::new(400, "BadRequestError", Some(param), format!("{message} (parameter={param}, value={value})"))
    }

    /// 400 from reading the body; `place` is like `body.messages`.
    pub fn validation(kind: &str, place: &str, message: &str) -> Self {
        let message = format!("1 validation error:\n  {{'type': '{kind}', 'loc': '{place}', 'msg': '{message}'}}");
        Self::new(400, "Bad Request", Some(place), message)
    }

    pub fn missing_field(field: &str) -> Self {
        Self::validation("missing", &format!("body.{field}"), "Field required")
    }

    pub fn unsupported_media_type() -> Self {
        let message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed";
        Self::new(400, "Bad Request", None, message)
    }

    /// 400: the prompt alone does not fit the model.
    pub fn prompt_too_long(prompt_tokens: u32, max_model_len: u32) -> Self {
        let message = format!(
            "This model's maximum context length is {max_model_len} tokens. However, your prompt contains {prompt_tokens} input tokens, \
             which exceeds this limit even without any output tokens. Please reduce the length of the input prompt."
        );
        Self::invalid("input_tokens", prompt_tokens, &message)
    }

    /// 400: the output asked for could fit no prompt.
    pub fn max_tokens_too_large(max_tokens: u32, max_model_len: u32) -> Self {
        let message =
            format!("max_tokens={max_tokens} cannot be greater than max_model_len={max_model_len}. Please request fewer output tokens.");
        Self::invalid("max_tokens", max_tokens, &message)
    }

    /// 400: prompt and output together do not fit the model.
    pub fn context_exceeded(prompt_tokens: u32, max_tokens: u32, max_model_len: u32) -> Self {
        let message = format!(
            "This model's maximum context length is {max_model_len} tokens. However, you requested {max_tokens} output tokens and your \
             prompt contains {prompt_tokens} input tokens, for a total of {} tokens. Please reduce the length of the input prompt or the \
             number of requested output tokens.",
            u64::from(prompt_tokens) + u64::from(max_tokens)
        );
        Self::invalid("input_tokens", prompt_tokens, &message)
    }

    pub fn token_out_of_vocabulary(token: u64) -> Self {
        Self::bad_request(format!("Token id {token} is out of vocabulary"))
    }

    /// 404 with the names that would work.
    pub fn model_not_found(model: &str, aliases: &[&str]) -> Self {
        let message = format!("The model `{model}` does not exist. Valid aliases: {}.", aliases.join(", "));
        Self::new(404, "NotFoundError", Some("model"), message)
    }

    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(404, "NotFoundError", None, message)
    }

    /// 429: retry later; the answer should carry `Retry-After`.
    pub fn overloaded(message: impl Into<String>) -> Self {
        Self::new(429, "RateLimitError", None, message)
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(500, "InternalServerError", None, message)
    }

    /// 503: nobody can serve it now.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(503, "ServiceUnavailableError", None, message)
    }

    /// The whole body.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(&ErrorResponse { error: self.clone() }).expect("plain values serialize")
    }
}
