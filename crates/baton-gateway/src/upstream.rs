//! The gateway as a client of its engines: one pooled HTTP/1.1 client, and one attempt at one request as a sequence of arrivals.

use std::{collections::VecDeque, time::Duration};

use baton_session::Fault;
use baton_wire::sse::{Decoder, Event};
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Method, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client, ResponseFuture, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};

use crate::config::FrontConfig;

/// Largest answer that is taken in one piece: an answer with logprobs for 100k tokens has some 30 MiB.
const WHOLE_BYTES_MAX: usize = 256 << 20;
/// Largest answer to a probe or an admin call; a metrics page has some 100 KiB.
const FETCH_BYTES_MAX: usize = 16 << 20;
/// How long an idle connection is kept; engines close theirs after 5 s (uvicorn) or more.
const IDLE_TIMEOUT: Duration = Duration::from_secs(4);

/// The pooled client.
#[derive(Debug, Clone)]
pub(crate) struct Upstream {
    client: Client<HttpConnector, Full<Bytes>>,
}

/// Why a small exchange (a probe, an admin call) gave nothing.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FetchError {
    #[error("no connection")]
    Unreachable,
    #[error("the connection broke")]
    Broken,
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    #[error("status {0}")]
    Status(StatusCode),
    #[error("an answer that cannot be read: {0}")]
    Unreadable(String),
}

impl FetchError {
    fn of(error: &hyper_util::client::legacy::Error) -> Self {
        if error.is_connect() { Self::Unreachable } else { Self::Broken }
    }
}

impl Upstream {
    pub(crate) fn new(front: &FrontConfig) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(front.connect_timeout));
        connector.set_keepalive(Some(Duration::from_secs(30)));
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_TIMEOUT)
            .pool_max_idle_per_host(front.idle_connections)
            .build(connector);
        Self { client }
    }

    /// Sends a request whose answer comes as `expect` says.
    pub(crate) fn start(&self, request: Request<Full<Bytes>>, expect: Expect) -> Attempt {
        Attempt { state: State::Connecting(self.client.request(request)), expect, arrived: VecDeque::new() }
    }

    /// The whole answer to a small request.
    pub(crate) async fn fetch(&self, method: Method, uri: Uri, key: Option<&str>, timeout: Duration) -> Result<Bytes, FetchError> {
        let request = request(method, uri, key).body(Full::default()).map_err(|error| FetchError::Unreadable(error.to_string()))?;
        let exchange = async {
            let response = self.client.request(request).await.map_err(|error| FetchError::of(&error))?;
            let status = response.status();
            let body = http_body_util::Limited::new(response.into_body(), FETCH_BYTES_MAX).collect().await;
            let body = body.map_err(|error| FetchError::Unreadable(error.to_string()))?.to_bytes();
            if status.is_success() { Ok(body) } else { Err(FetchError::Status(status)) }
        };
        tokio::time::timeout(timeout, exchange).await.unwrap_or(Err(FetchError::TimedOut(timeout)))
    }

    /// Passes a request on and gives back the answer with its body unread.
    pub(crate) async fn forward(&self, request: Request<Full<Bytes>>) -> Result<http::Response<Incoming>, FetchError> {
        self.client.request(request).await.map_err(|error| FetchError::of(&error))
    }
}

/// A request to an engine with the engine's own key.
pub(crate) fn request(method: Method, uri: Uri, key: Option<&str>) -> http::request::Builder {
    let builder = Request::builder().method(method).uri(uri);
    match key {
        Some(key) => builder.header(header::AUTHORIZATION, format!("Bearer {key}")),
        None => builder,
    }
}

/// In which form an answer with status 200 is expected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expect {
    Events,
    Whole,
}

/// One try at an engine. Dropping it closes its connection unless the answer was complete, which makes the engine stop.
#[derive(Debug)]
pub(crate) struct Attempt {
    state: State,
    expect: Expect,
    arrived: VecDeque<Arrived>,
}

#[derive(Debug)]
enum State {
    Connecting(ResponseFuture),
    Events { body: Incoming, decoder: Decoder },
    Whole { status: StatusCode, headers: HeaderMap, body: Incoming, bytes: BytesMut },
    Over,
}

/// What comes from an attempt, in order.
#[derive(Debug)]
pub(crate) enum Arrived {
    Event(Event),
    /// The body ended; of a stream without its `[DONE]` that is a truncation.
    End,
    /// A whole answer, or an error status with its body.
    Answer {
        status: StatusCode,
        headers: HeaderMap,
        body: Bytes,
    },
    Failed(Fault),
}

impl Attempt {
    /// The next arrival. Cancel-safe: what has arrived stays.
    pub(crate) async fn next(&mut self) -> Arrived {
        loop {
            if let Some(arrived) = self.arrived.pop_front() {
                return arrived;
            }
            self.read().await;
        }
    }

    async fn read(&mut self) {
        match &mut self.state {
            State::Connecting(response) => match response.await {
                Ok(response) => self.take_head(response),
                Err(error) => {
                    tracing::debug!(%error, "no answer from the engine");
                    self.end(Arrived::Failed(Fault::Unreachable));
                }
            },
            State::Events { body, decoder } => match body.frame().await {
                Some(Ok(frame)) => {
                    let Ok(data) = frame.into_data() else { return };
                    for event in decoder.push(&data) {
                        let Ok(event) = event else { return self.end(Arrived::Failed(Fault::Garbled)) };
                        self.arrived.push_back(Arrived::Event(event));
                    }
                }
                Some(Err(_)) => self.end(Arrived::Failed(Fault::Truncated)),
                None => {
                    let last = decoder.finish().map(Arrived::Event);
                    self.arrived.extend(last);
                    self.end(Arrived::End);
                }
            },
            State::Whole { status, headers, body, bytes } => match body.frame().await {
                Some(Ok(frame)) => {
                    let Ok(data) = frame.into_data() else { return };
                    bytes.extend_from_slice(&data);
                    if bytes.len() > WHOLE_BYTES_MAX {
                        self.end(Arrived::Failed(Fault::Garbled));
                    }
                }
                Some(Err(_)) => self.end(Arrived::Failed(Fault::Truncated)),
                None => {
                    let answer =
                        Arrived::Answer { status: *status, headers: std::mem::take(headers), body: std::mem::take(bytes).freeze() };
                    self.end(answer);
                }
            },
            // Asking again after the end is the caller's bug; waiting for ever would hide it from nobody but cost nothing.
            State::Over => std::future::pending().await,
        }
    }

    fn take_head(&mut self, response: http::Response<Incoming>) {
        let (head, body) = response.into_parts();
        let is_stream = head.headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
        self.state = match (self.expect, head.status) {
            (Expect::Events, StatusCode::OK) if is_stream => State::Events { body, decoder: Decoder::default() },
            (Expect::Events, StatusCode::OK) => return self.end(Arrived::Failed(Fault::Garbled)),
            (_, status) => State::Whole { status, headers: head.headers, body, bytes: BytesMut::new() },
        };
    }

    fn end(&mut self, last: Arrived) {
        self.arrived.push_back(last);
        self.state = State::Over;
    }
}
