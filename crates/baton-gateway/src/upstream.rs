//! The gateway as a client of its engines: a plain client for what is rare, and one attempt at one request as a sequence of arrivals.

use std::{
    collections::VecDeque,
    fmt,
    future::poll_fn,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use baton_session::Fault;
use baton_wire::sse::{Decoder, Event};
use bytes::{Bytes, BytesMut};
use http::{Method, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioIo, TokioTimer},
};
use tokio::time::timeout;
use tokio_rustls::rustls::ClientConfig;
use tower_service::Service as _;

use crate::{
    config::FrontConfig,
    engine::Engine,
    line::{Address, Busy, Head, Line, RANK},
    tls::{self, Transport},
};

/// Largest answer that is taken in one piece: an answer with logprobs for 100k tokens has some 30 MiB.
const WHOLE_BYTES_MAX: usize = 256 << 20;
/// Largest answer to a probe or an admin call; a metrics page has some 100 KiB.
const FETCH_BYTES_MAX: usize = 16 << 20;
/// The `x-request-id` of what the gateway asks for itself.
const PROBE_ID: &str = "baton-probe";
/// How long an idle connection of the plain client is kept; engines close theirs after 5 s (uvicorn) or more.
const IDLE_TIMEOUT: Duration = Duration::from_secs(4);
/// For the end of a body after its last event.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// Ways to the engines.
#[derive(Debug, Clone)]
pub(crate) struct Upstream {
    connector: Connector,
    idle_connections: usize,
}

/// An engine's client for what is rare: probes, admin calls, paths that are passed through.
pub(crate) type PlainClient = Client<EngineConnector, Full<Bytes>>;

/// Opens connections.
#[derive(Debug, Clone)]
struct Connector {
    tcp: HttpConnector,
    /// For the TLS handshake, as for the TCP one before it.
    timeout: Duration,
}

/// Opens connections to one engine.
#[derive(Debug, Clone)]
pub(crate) struct EngineConnector {
    connector: Connector,
    tls: Option<Arc<ClientConfig>>,
}

impl Connector {
    async fn open(mut self, uri: Uri, tls: Option<Arc<ClientConfig>>) -> io::Result<Transport> {
        let name = tls.as_ref().and_then(|_| tls::server_name(uri.host().unwrap_or_default()));
        let stream = self.tcp.call(uri).await.map_err(io::Error::other)?.into_inner();
        let Some(tls) = tls else { return Ok(stream.into()) };
        let name = name.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "no certificate can have the host's name"))?;
        let shaken = timeout(self.timeout, Transport::tls(stream, name, tls));
        shaken.await.unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, "the TLS handshake took too long")))
    }
}

impl tower_service::Service<Uri> for EngineConnector {
    type Response = TokioIo<Transport>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<TokioIo<Transport>>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.connector.tcp.poll_ready(context).map_err(io::Error::other)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let Self { connector, tls } = self.clone();
        Box::pin(async move { connector.open(uri, tls).await.map(TokioIo::new) })
    }
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
        let mut tcp = HttpConnector::new();
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(front.connect_timeout));
        tcp.set_keepalive(Some(Duration::from_secs(30)));
        // What is spoken over TLS comes through here as well.
        tcp.enforce_http(false);
        Self { connector: Connector { tcp, timeout: front.connect_timeout }, idle_connections: front.idle_connections }
    }

    fn client<'e>(&self, engine: &'e Engine) -> &'e PlainClient {
        engine.client.get_or_init(|| {
            Client::builder(TokioExecutor::new())
                .pool_timer(TokioTimer::new())
                .pool_idle_timeout(IDLE_TIMEOUT)
                .pool_max_idle_per_host(self.idle_connections)
                .build(EngineConnector { connector: self.connector.clone(), tls: engine.tls.clone() })
        })
    }

    /// Sends a request, head and pieces of its body, whose answer comes as `expect` says.
    pub(crate) fn start(&self, engine: &Engine, request: VecDeque<Bytes>, expect: Expect) -> Attempt {
        Attempt::new(request, expect, engine.lines.enter(), self.connector.clone())
    }

    /// The whole answer to a small request without a body.
    pub(crate) async fn fetch(&self, engine: &Engine, method: Method, path: &str, timeout: Duration) -> Result<Bytes, FetchError> {
        self.exchange(engine, request(engine, method, path).body(Full::default()), timeout).await
    }

    /// The whole answer to a small request with a body of JSON, under an id that says whose it is.
    pub(crate) async fn post(&self, engine: &Engine, path: &str, body: Bytes, timeout: Duration) -> Result<Bytes, FetchError> {
        let request = request(engine, Method::POST, path).header(header::CONTENT_TYPE, "application/json").header("x-request-id", PROBE_ID);
        self.exchange(engine, request.body(Full::new(body)), timeout).await
    }

    async fn exchange(&self, engine: &Engine, request: http::Result<Request<Full<Bytes>>>, timeout: Duration) -> Result<Bytes, FetchError> {
        let request = request.map_err(|error| FetchError::Unreadable(error.to_string()))?;
        let exchange = async {
            let response = self.client(engine).request(request).await.map_err(|error| FetchError::of(&error))?;
            let status = response.status();
            let body = http_body_util::Limited::new(response.into_body(), FETCH_BYTES_MAX).collect().await;
            let body = body.map_err(|error| FetchError::Unreadable(error.to_string()))?.to_bytes();
            if status.is_success() { Ok(body) } else { Err(FetchError::Status(status)) }
        };
        tokio::time::timeout(timeout, exchange).await.unwrap_or(Err(FetchError::TimedOut(timeout)))
    }

    /// Passes a request on and gives back the answer with its body unread.
    pub(crate) async fn forward(&self, engine: &Engine, request: Request<Full<Bytes>>) -> Result<http::Response<Incoming>, FetchError> {
        self.client(engine).request(request).await.map_err(|error| FetchError::of(&error))
    }
}

/// A request to an engine with the engine's own key, at its rank.
pub(crate) fn request(engine: &Engine, method: Method, path: &str) -> http::request::Builder {
    let mut builder = Request::builder().method(method).uri(engine.url().join(path));
    if let Some(key) = engine.config.key() {
        builder = builder.header(header::AUTHORIZATION, format!("Bearer {key}"));
    }
    match engine.rank {
        Some(rank) => builder.header(RANK, rank),
        None => builder,
    }
}

/// In which form an answer with status 200 is expected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expect {
    Events,
    Whole,
}

/// One try of a request at one engine. Dropped before its end, it closes the connection, which makes the engine stop.
#[derive(Debug)]
pub(crate) struct Attempt {
    expect: Expect,
    lines: Busy,
    state: State,
}

enum State {
    Connecting { request: VecDeque<Bytes>, line: Pin<Box<dyn Future<Output = io::Result<Line>> + Send>> },
    Waiting(Line),
    Events { line: Line, decoder: Decoder },
    Whole { line: Line, head: Head, bytes: BytesMut },
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
        head: Head,
        body: Bytes,
    },
    Failed(Fault),
}

impl Attempt {
    fn new(request: VecDeque<Bytes>, expect: Expect, lines: Busy, connector: Connector) -> Self {
        let state = match lines.take() {
            Some(mut line) => {
                line.send(request);
                State::Waiting(line)
            }
            None => State::Connecting { request, line: Box::pin(connect(connector, lines.address())) },
        };
        Self { expect, lines, state }
    }

    /// The next arrival. After [`Arrived::End`], an answer or a failure there is none.
    pub(crate) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Arrived> {
        let arrived = loop {
            match &mut self.state {
                State::Connecting { request, line } => match ready!(line.as_mut().poll(context)) {
                    Ok(mut line) => {
                        line.send(std::mem::take(request));
                        self.state = State::Waiting(line);
                    }
                    Err(error) => {
                        tracing::debug!(%error, "no connection to the engine");
                        break Arrived::Failed(Fault::Unreachable);
                    }
                },
                State::Waiting(line) => match ready!(line.poll_head(context)) {
                    Ok(head) => {
                        if let Err(fault) = self.take_head(head) {
                            break Arrived::Failed(fault);
                        }
                    }
                    Err(error) => {
                        tracing::debug!(%error, "no answer from the engine");
                        break Arrived::Failed(Fault::Unreachable);
                    }
                },
                State::Events { line, decoder } => {
                    match decoder.push(&[]).next() {
                        Some(Ok(event)) => return Poll::Ready(Arrived::Event(event)),
                        Some(Err(_)) => break Arrived::Failed(Fault::Garbled),
                        None => {}
                    }
                    match ready!(line.poll_data(context)) {
                        // Its events are taken in the next round.
                        Ok(Some(data)) => _ = decoder.push(data),
                        Ok(None) => match decoder.finish() {
                            Some(event) => return Poll::Ready(Arrived::Event(event)),
                            None => break Arrived::End,
                        },
                        Err(_) => break Arrived::Failed(Fault::Truncated),
                    }
                }
                State::Whole { line, bytes, .. } => match ready!(line.poll_data(context)) {
                    Ok(Some(data)) => {
                        bytes.extend_from_slice(data);
                        if bytes.len() > WHOLE_BYTES_MAX {
                            break Arrived::Failed(Fault::Garbled);
                        }
                    }
                    Ok(None) => break self.take_answer(),
                    Err(_) => break Arrived::Failed(Fault::Truncated),
                },
                // Asking again after the end is the caller's bug; waiting for ever would hide it from nobody but cost nothing.
                State::Over => return Poll::Pending,
            }
        };
        self.state = State::Over;
        Poll::Ready(arrived)
    }

    fn take_head(&mut self, head: Head) -> Result<(), Fault> {
        let State::Waiting(line) = std::mem::replace(&mut self.state, State::Over) else { return Ok(()) };
        let is_stream = head.content_type.as_ref().is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
        self.state = match (self.expect, head.status) {
            (Expect::Events, StatusCode::OK) if is_stream => State::Events { line, decoder: Decoder::default() },
            (Expect::Events, StatusCode::OK) => return Err(Fault::Garbled),
            _ => State::Whole { line, head, bytes: BytesMut::new() },
        };
        Ok(())
    }

    fn take_answer(&mut self) -> Arrived {
        let State::Whole { line, head, bytes } = std::mem::replace(&mut self.state, State::Over) else { return Arrived::End };
        self.lines.put(line);
        Arrived::Answer { head, body: bytes.freeze() }
    }

    /// The request has all that it wanted: the connection serves the next one as soon as the rest of the body is out of the way.
    pub(crate) fn release(self) {
        let Self { lines, state, .. } = self;
        let lines = lines.clone();
        let State::Events { mut line, .. } = state else { return };
        match drain(&mut line, &mut Context::from_waker(Waker::noop())) {
            Poll::Ready(()) => lines.put(line),
            // Engines end their chunks a moment after `[DONE]`.
            Poll::Pending => drop(tokio::spawn(async move {
                if timeout(DRAIN_TIMEOUT, poll_fn(|context| drain(&mut line, context))).await.is_ok() {
                    lines.put(line);
                }
            })),
        }
    }
}

/// Reads to the end of a body; a broken one makes the connection useless, which [`crate::line::Lines::put`] sees.
fn drain(line: &mut Line, context: &mut Context<'_>) -> Poll<()> {
    while let Ok(Some(_)) = ready!(line.poll_data(context)) {}
    Poll::Ready(())
}

async fn connect(connector: Connector, address: Arc<Address>) -> io::Result<Line> {
    let stream = connector.open(address.uri.clone(), address.tls.clone()).await?;
    Ok(Line::new(stream, address))
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Connecting { .. } => "Connecting",
            Self::Waiting(_) => "Waiting",
            Self::Events { .. } => "Events",
            Self::Whole { .. } => "Whole",
            Self::Over => "Over",
        })
    }
}
