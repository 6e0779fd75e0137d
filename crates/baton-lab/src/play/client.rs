use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use baton_wire::{
    openai::{ChatChunk, ErrorResponse},
    sse,
};
use bytes::Bytes;
use http::{Request, Response, header};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client as HttpClient, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde_json::json;
use tokio::time::Instant;

use super::conversation::Message;

/// A client of one address.
#[derive(Debug, Clone)]
pub(super) struct Client {
    http: HttpClient<HttpConnector, Full<Bytes>>,
    base: String,
    model: String,
    timeout: Duration,
}

/// A finished answer; times are from when its request was due.
#[derive(Debug)]
pub(super) struct Seen {
    pub(super) first: Duration,
    pub(super) last: Duration,
    pub(super) text: String,
    pub(super) prompt_tokens: u32,
    pub(super) cached_tokens: Option<u32>,
}

impl Client {
    pub(super) fn new(url: &str, model: &str, timeout: Duration) -> Result<Self> {
        ensure!(url.starts_with("http://"), "--url {url}: write for example http://127.0.0.1:8080");
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let http = HttpClient::builder(TokioExecutor::new()).pool_max_idle_per_host(usize::MAX).build(connector);
        Ok(Self { http, base: url.trim_end_matches('/').to_owned(), model: model.to_owned(), timeout })
    }

    /// Sends a chat and reads its stream to the end; anything but a whole answer of `output` tokens is an error.
    pub(super) async fn chat(&self, messages: &[Message], output: u32, session: Option<&str>, due: Instant) -> Result<Seen> {
        let exchange = async {
            let body = json!({
                "model": self.model, "messages": messages, "max_tokens": output, "temperature": 0, "ignore_eos": true,
                "stream": true, "stream_options": {"include_usage": true},
            });
            let mut request = Request::post(format!("{}/v1/chat/completions", self.base)).header(header::CONTENT_TYPE, "application/json");
            if let Some(session) = session {
                request = request.header("x-session-id", session);
            }
            let answer = self.http.request(request.body(Full::new(Bytes::from(body.to_string())))?).await.context("no answer")?;
            ensure!(answer.status().is_success(), "{}", answer.status());
            read(answer, output, due).await
        };
        tokio::time::timeout(self.timeout, exchange).await.context("no end in time")?
    }
}

async fn read(answer: Response<Incoming>, output: u32, due: Instant) -> Result<Seen> {
    let mut body = answer.into_body();
    let mut decoder = sse::Decoder::default();
    let (mut first, mut last, mut text, mut usage) = (None, due, String::new(), None);
    while let Some(frame) = body.frame().await {
        let Ok(bytes) = frame.context("the stream broke")?.into_data() else { continue };
        let now = Instant::now();
        for event in decoder.push(&bytes) {
            let event = event?;
            if event.is_done() {
                let (first, usage) = (first.context("no output")?, usage.context("no usage")?);
                let usage: baton_wire::openai::Usage = usage;
                ensure!(usage.completion_tokens == output, "an answer of the wrong length");
                return Ok(Seen {
                    first: now_since(first, due),
                    last: now_since(last, due),
                    text,
                    prompt_tokens: usage.prompt_tokens,
                    cached_tokens: usage.cached_tokens(),
                });
            }
            let Some(data) = event.data else { continue };
            let chunk = chunk(&data)?;
            let piece: String = chunk.choices.into_iter().filter_map(|choice| choice.delta.content.flatten()).collect();
            if !piece.is_empty() {
                first.get_or_insert(now);
                last = now;
                text.push_str(&piece);
            }
            usage = chunk.usage.or(usage);
        }
    }
    bail!("the stream was cut")
}

fn now_since(moment: Instant, due: Instant) -> Duration {
    moment.saturating_duration_since(due)
}

fn chunk(data: &[u8]) -> Result<ChatChunk> {
    serde_json::from_slice(data).map_err(|_| match serde_json::from_slice::<ErrorResponse>(data) {
        Ok(error) => anyhow::anyhow!("in the stream: {}", error.error.message),
        Err(_) => anyhow::anyhow!("an event is neither a chunk nor an error"),
    })
}
