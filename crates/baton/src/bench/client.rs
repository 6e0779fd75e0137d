//! A streaming client for one OpenAI address, and what it saw of each request.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use baton_wire::{
    openai::{ChatChunk, ErrorResponse, ModelCard, ModelList, Usage},
    sse,
};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, Method, Request, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client as HttpClient, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde::Serialize;
use serde_json::{Value, json};

use crate::cli::BadInput;

/// Largest answer that is read whole.
const BODY_BYTES_MAX: usize = 16 << 20;

#[derive(Debug, Clone)]
pub(crate) struct Client {
    http: HttpClient<HttpConnector, Full<Bytes>>,
    base: String,
    key: Option<String>,
    timeout: Duration,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct ChatMessage {
    pub(crate) role: &'static str,
    pub(crate) content: String,
}

/// A chat request as the workload wants it.
#[derive(Debug)]
pub(crate) struct ChatCall<'a> {
    pub(crate) model: &'a str,
    pub(crate) messages: &'a [ChatMessage],
    pub(crate) max_tokens: u32,
    /// Always `max_tokens` tokens, so that runs do the same work; not every server knows the field.
    pub(crate) ignore_eos: bool,
    pub(crate) session: Option<&'a str>,
    /// Sent as `x-request-id`, so that a gateway's decisions can be found again.
    pub(crate) id: &'a str,
}

/// How a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ending {
    Finished,
    /// 429, or 503 with `Retry-After`: turned away on purpose.
    Refused,
    Error(String),
}

/// What the client saw. Times are from the moment of the call.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) ending: Ending,
    pub(crate) text: String,
    /// When each piece of output came.
    pub(crate) pieces: Vec<Duration>,
    pub(crate) end: Duration,
    pub(crate) usage: Option<Usage>,
}

impl Client {
    pub(crate) fn new(url: &str, key: Option<String>, timeout: Duration) -> Result<Self> {
        let uri: http::Uri =
            url.parse().map_err(|error| BadInput(format!("--url {url}: {error}; write for example http://127.0.0.1:8080")))?;
        if uri.scheme_str() != Some("http") || uri.host().is_none() {
            return Err(BadInput(format!("--url {url}: only http:// addresses can be loaded; put a TLS-ending proxy before others")).into());
        }
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(Duration::from_secs(5)));
        // `/v1` is added to each path, so an address that ends in it is taken as well.
        let base = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        Ok(Self { http: HttpClient::builder(TokioExecutor::new()).build(connector), base, key, timeout })
    }

    pub(crate) async fn models(&self) -> Result<Vec<ModelCard>> {
        let (status, body) = self.call(Method::GET, "/v1/models", None).await.with_context(|| format!("{} does not answer", self.base))?;
        ensure!(status.is_success(), "{}/v1/models answers {status}: {}", self.base, message(&body));
        let list: ModelList = serde_json::from_slice(&body).with_context(|| format!("{}/v1/models is not a list of models", self.base))?;
        Ok(list.data)
    }

    /// Tokens in a text, where the target has vLLM's `/tokenize`.
    pub(crate) async fn count_tokens(&self, model: &str, text: &str) -> Option<usize> {
        let body = json!({"model": model, "prompt": text, "add_special_tokens": false});
        let (status, body) = self.call(Method::POST, "/tokenize", Some(body)).await.ok()?;
        let answer: Value = serde_json::from_slice(&body).ok().filter(|_| status.is_success())?;
        usize::try_from(answer.get("count")?.as_u64()?).ok()
    }

    /// JSON of a path of Baton's admin API.
    pub(crate) async fn admin(&self, method: Method, path: &str, body: Option<Value>) -> Result<Value> {
        let what = format!("{method} {path}");
        let (status, body) = self.call(method, path, body).await.with_context(|| format!("{what} on {}", self.base))?;
        ensure!(status.is_success(), "{what} on {} answers {status}: {}", self.base, message(&body));
        Ok(if body.is_empty() { Value::Null } else { serde_json::from_slice(&body)? })
    }

    /// Sends a chat request and reads its stream to the end. Never fails: what goes wrong is in the ending.
    pub(crate) async fn chat(&self, call: &ChatCall<'_>) -> Seen {
        let mut seen = Seen { ending: Ending::Finished, text: String::new(), pieces: Vec::new(), end: Duration::ZERO, usage: None };
        let begun = Instant::now();
        let ending = match tokio::time::timeout(self.timeout, self.stream(call, begun, &mut seen)).await {
            Ok(Ok(ending)) => ending,
            Ok(Err(error)) => Ending::Error(format!("{error:#}")),
            Err(_) => Ending::Error(format!("no end after {}", humantime::format_duration(self.timeout))),
        };
        Seen { ending, end: begun.elapsed(), ..seen }
    }

    async fn stream(&self, call: &ChatCall<'_>, begun: Instant, seen: &mut Seen) -> Result<Ending> {
        let mut body = json!({
            "model": call.model, "messages": call.messages, "max_tokens": call.max_tokens, "temperature": 0,
            "stream": true, "stream_options": {"include_usage": true},
        });
        if call.ignore_eos {
            body["ignore_eos"] = Value::Bool(true);
        }
        let mut headers = HeaderMap::from_iter([(HeaderName::from_static("x-request-id"), call.id.parse()?)]);
        if let Some(session) = call.session {
            headers.insert("x-session-id", session.parse()?);
        }
        let response = self.send(Method::POST, "/v1/chat/completions", Some(body), headers).await?;
        let status = response.status();
        if !status.is_success() {
            let is_refusal = status == StatusCode::TOO_MANY_REQUESTS
                || status == StatusCode::SERVICE_UNAVAILABLE && response.headers().contains_key(header::RETRY_AFTER);
            let body = read_whole(response.into_body()).await?;
            return if is_refusal { Ok(Ending::Refused) } else { bail!("{status}: {}", message(&body)) };
        }
        read_stream(response.into_body(), || begun.elapsed(), seen).await
    }

    async fn call(&self, method: Method, path: &str, body: Option<Value>) -> Result<(StatusCode, Bytes)> {
        let exchange = async {
            let response = self.send(method, path, body, HeaderMap::new()).await?;
            Ok((response.status(), read_whole(response.into_body()).await?))
        };
        tokio::time::timeout(self.timeout, exchange).await.with_context(|| format!("no answer from {path} in time"))?
    }

    async fn send(&self, method: Method, path: &str, body: Option<Value>, headers: HeaderMap) -> Result<http::Response<Incoming>> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.base));
        if body.is_some() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        if let Some(key) = &self.key {
            request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
        }
        let bytes = body.map(|body| Bytes::from(body.to_string())).unwrap_or_default();
        let mut request = request.body(Full::new(bytes))?;
        request.headers_mut().extend(headers);
        Ok(self.http.request(request).await?)
    }
}

/// Reads a stream of chunks up to `[DONE]`, noting when output came.
async fn read_stream(mut body: Incoming, elapsed: impl Fn() -> Duration, seen: &mut Seen) -> Result<Ending> {
    let mut decoder = sse::Decoder::default();
    let mut finished = false;
    while let Some(frame) = body.frame().await {
        let Ok(bytes) = frame?.into_data() else { continue };
        let now = elapsed();
        for event in decoder.push(&bytes) {
            let event = event?;
            if event.is_done() {
                ensure!(finished, "the stream ended without a finish reason");
                return Ok(Ending::Finished);
            }
            if let Some(data) = event.data {
                finished |= note_chunk(&data, now, seen)?;
            }
        }
    }
    bail!("the stream was cut {}", if finished { "after its finish reason" } else { "before its end" })
}

/// Takes a chunk's output and usage over; true when it ends the answer.
fn note_chunk(data: &[u8], now: Duration, seen: &mut Seen) -> Result<bool> {
    let Ok(chunk) = serde_json::from_slice::<ChatChunk>(data) else {
        let error = serde_json::from_slice::<ErrorResponse>(data).context("an event is neither a chunk nor an error")?;
        bail!("in the stream: {}", error.error.message);
    };
    let mut finished = false;
    for choice in chunk.choices {
        let text = choice.delta.content.flatten().unwrap_or_default();
        // The role chunk is no output: servers send it before the first token exists.
        if !text.is_empty() || choice.finish_reason.is_none() && choice.delta.role.is_none() {
            seen.pieces.push(now);
        }
        seen.text.push_str(&text);
        finished |= choice.finish_reason.is_some();
    }
    seen.usage = chunk.usage.or(seen.usage.take());
    Ok(finished)
}

async fn read_whole(mut body: Incoming) -> Result<Bytes> {
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        if let Ok(data) = frame?.into_data() {
            ensure!(bytes.len() + data.len() <= BODY_BYTES_MAX, "an answer has more than {BODY_BYTES_MAX} bytes");
            bytes.extend_from_slice(&data);
        }
    }
    Ok(bytes.into())
}

/// The error's message, or the start of the body when it is no OpenAI error.
fn message(body: &[u8]) -> String {
    match serde_json::from_slice::<ErrorResponse>(body) {
        Ok(error) => error.error.message,
        Err(_) => String::from_utf8_lossy(body).chars().take(200).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_cannot_be_loaded_are_bad_input() {
        let client = |url| Client::new(url, None, Duration::from_secs(1));
        for url in ["https://example.org", "127.0.0.1:80", "", "http://"] {
            assert!(client(url).unwrap_err().is::<BadInput>(), "{url}");
        }
        assert_eq!(client("http://h:1/v1/").unwrap().base, "http://h:1");
    }

    #[test]
    fn output_counts_from_the_first_token() {
        let mut seen = Seen { ending: Ending::Finished, text: String::new(), pieces: Vec::new(), end: Duration::ZERO, usage: None };
        let chunk = |choices: Value| {
            json!({"id": "i", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices}).to_string()
        };
        let delta = |delta: Value, finish: Value| chunk(json!([{"index": 0, "delta": delta, "finish_reason": finish}]));
        let ms = Duration::from_millis;
        let mut note = |data: String, at| note_chunk(data.as_bytes(), ms(at), &mut seen).unwrap();
        assert!(!note(delta(json!({"role": "assistant", "content": ""}), Value::Null), 1));
        assert!(!note(delta(json!({"content": "a"}), Value::Null), 5));
        // A token that completes no character is a token all the same.
        assert!(!note(delta(json!({"content": ""}), Value::Null), 7));
        assert!(note(delta(json!({"content": "b"}), json!("length")), 9));
        assert!(!note(chunk(json!([])), 10));
        assert_eq!((seen.text.as_str(), seen.pieces), ("ab", vec![ms(5), ms(7), ms(9)]));
    }

    #[test]
    fn an_error_inside_a_stream_is_an_error() {
        let mut seen = Seen { ending: Ending::Finished, text: String::new(), pieces: Vec::new(), end: Duration::ZERO, usage: None };
        let error = br#"{"error": {"message": "engine died", "type": "InternalServerError", "param": null, "code": 500}}"#;
        assert!(note_chunk(error, Duration::ZERO, &mut seen).unwrap_err().to_string().contains("engine died"));
    }
}
