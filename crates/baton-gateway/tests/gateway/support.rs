//! A scripted engine and a client, for tests of the gateway over real sockets. Nothing here sleeps: the test decides when the engine
//! says what, and waits for what it did.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
};

use baton_gateway::{BaseUrl, EngineConfig, EngineKind, Gateway, GatewayConfig};
use baton_text::Tokenizer;
use baton_wire::{
    replica::Report,
    sse::{Decoder, Event},
};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, combinators::BoxBody};
use hyper::{
    body::{Body, Frame, Incoming},
    service::service_fn,
};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioIo},
};
use serde_json::{Map, Value, json};
use tokio::{
    net::TcpListener,
    sync::{Notify, mpsc, oneshot},
    task::JoinHandle,
};

pub(crate) const METRICS: &str = include_str!("../fixtures/metrics-fresh.txt");

/// Body and status of a recorded answer, its chunk framing taken off.
pub(crate) fn recorded(text: &str) -> (u16, Vec<u8>) {
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    (status, if chunked { dechunked(body.as_bytes()) } else { body.as_bytes().to_vec() })
}

/// What a client that cut the connection has read counts up to the last whole chunk.
fn dechunked(mut bytes: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(end) = bytes.windows(2).position(|pair| pair == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).unwrap().trim(), 16).unwrap_or(0);
        let Some(chunk) = bytes.get(end + 2..end + 2 + size).filter(|_| size > 0) else { break };
        body.extend_from_slice(chunk);
        bytes = bytes.get(end + 2 + size + 2..).unwrap_or_default();
    }
    body
}

/// The events of a stream, each with its blank line.
pub(crate) fn events(body: &[u8]) -> Vec<Bytes> {
    Decoder::default().push(body).map(|event| event.unwrap().raw).collect()
}

/// An engine that answers probes by itself and asks the test about everything else.
pub(crate) struct FakeEngine {
    pub(crate) url: BaseUrl,
    calls: mpsc::UnboundedReceiver<Call>,
    server: JoinHandle<()>,
    pub(crate) models: Arc<Mutex<String>>,
    /// Body of `/kv_event_sources`; 404 while empty.
    pub(crate) kv_sources: Arc<Mutex<String>>,
    /// Body of `/metrics`.
    pub(crate) metrics: Arc<Mutex<String>>,
    /// Body of `/baton/v1/replica`, for an engine that is configured as Baton's own.
    pub(crate) report: Arc<Mutex<String>>,
    /// Body of llama.cpp's `/props`; 404 while empty.
    props: Arc<Mutex<String>>,
    /// It says what it makes of text, as llama.cpp does; four bytes are a token.
    tokenizes: Arc<AtomicBool>,
    /// It computes what the gateway asks for itself.
    pub(crate) computes: Arc<AtomicBool>,
    /// It was asked to.
    pub(crate) asked: Arc<Notify>,
}

/// What an engine answers to probes.
#[derive(Clone)]
struct Pages {
    props: Arc<Mutex<String>>,
    tokenizes: Arc<AtomicBool>,
    computes: Arc<AtomicBool>,
    asked: Arc<Notify>,
    models: Arc<Mutex<String>>,
    kv_sources: Arc<Mutex<String>>,
    metrics: Arc<Mutex<String>>,
    report: Arc<Mutex<String>>,
}

/// A request that the engine has received and the test must answer.
pub(crate) struct Call {
    pub(crate) path: String,
    pub(crate) headers: http::HeaderMap,
    pub(crate) body: Value,
    answer: oneshot::Sender<Response<BoxBody<Bytes, Broken>>>,
}

/// Breaks the connection in the middle of a body.
#[derive(Debug)]
pub(crate) struct Broken;

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("broken on purpose")
    }
}

impl std::error::Error for Broken {}

impl FakeEngine {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url: BaseUrl = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
        let (tell, calls) = mpsc::unbounded_channel();
        let pages = Pages {
            props: Arc::default(),
            tokenizes: Arc::default(),
            computes: Arc::new(AtomicBool::new(true)),
            asked: Arc::default(),
            models: Arc::default(),
            kv_sources: Arc::default(),
            metrics: Arc::new(Mutex::new(METRICS.to_owned())),
            report: Arc::default(),
        };
        *pages.models.lock().unwrap() = String::from_utf8(recorded(include_str!("../fixtures/models.resp")).1).unwrap();
        let server = tokio::spawn(serve(listener, tell, pages.clone()));
        let Pages { props, tokenizes, models, kv_sources, metrics, report, computes, asked } = pages;
        Self { url, calls, server, models, kv_sources, metrics, report, props, tokenizes, computes, asked }
    }

    pub(crate) fn config(&self) -> EngineConfig {
        EngineConfig::new(self.url.clone(), EngineKind::Vllm)
    }

    /// From here on a Baton replica that says this of itself.
    pub(crate) fn baton(&self, report: &Report) -> EngineConfig {
        *self.report.lock().unwrap() = serde_json::to_string(report).unwrap();
        EngineConfig::new(self.url.clone(), EngineKind::Baton)
    }

    /// From here on a llama.cpp server.
    pub(crate) fn llamacpp(&self) -> EngineConfig {
        let page = |recording| String::from_utf8(recorded(recording).1).unwrap();
        *self.props.lock().unwrap() = page(include_str!("../fixtures/llamacpp-props.resp"));
        *self.models.lock().unwrap() = page(include_str!("../fixtures/llamacpp-models.resp"));
        self.tokenizes.store(true, Ordering::Relaxed);
        EngineConfig::new(self.url.clone(), EngineKind::LlamaCpp)
    }

    /// From here on it says nothing of what it makes of text.
    pub(crate) fn keep_text_to_itself(&self) {
        self.tokenizes.store(false, Ordering::Relaxed);
    }

    /// The next request for the test to answer.
    pub(crate) async fn call(&mut self) -> Call {
        self.calls.recv().await.expect("the engine's server runs")
    }

    /// Stops listening and closes every connection, as a killed process does.
    pub(crate) fn kill(&self) {
        self.server.abort();
    }
}

impl Drop for FakeEngine {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn serve(listener: TcpListener, tell: mpsc::UnboundedSender<Call>, pages: Pages) {
    // Connections live in the set and die with this task.
    let mut connections = tokio::task::JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        stream.set_nodelay(true).unwrap();
        let (tell, pages) = (tell.clone(), pages.clone());
        let service = service_fn(move |request: Request<Incoming>| {
            let (tell, pages) = (tell.clone(), pages.clone());
            async move { answer(request, &tell, &pages).await }
        });
        connections.spawn(async move {
            // Errors here are the broken connections that tests ask for.
            _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

async fn answer(
    request: Request<Incoming>,
    tell: &mpsc::UnboundedSender<Call>,
    pages: &Pages,
) -> Result<Response<BoxBody<Bytes, Broken>>, Broken> {
    let path = request.uri().path().to_owned();
    match path.as_str() {
        "/health" => return Ok(whole(200, "")),
        "/metrics" => return Ok(page(&pages.metrics)),
        "/version" => return Ok(whole(200, r#"{"version":"0.32.0"}"#)),
        "/v1/models" => return Ok(whole(200, &pages.models.lock().unwrap())),
        "/kv_event_sources" => return Ok(page(&pages.kv_sources)),
        "/baton/v1/replica" => return Ok(page(&pages.report)),
        "/props" => return Ok(page(&pages.props)),
        "/tokenize" | "/apply-template" if pages.tokenizes.load(Ordering::Relaxed) => {
            let body = request.into_body().collect().await.map_err(|_| Broken)?.to_bytes();
            return Ok(whole(200, &made_of_text(&path, &serde_json::from_slice(&body).unwrap())));
        }
        _ => {}
    }
    let headers = request.headers().clone();
    // What the gateway asks for itself after failures; how slots are tried out is the test's to say.
    let tries_slots = path == "/completion" || path.starts_with("/slots/");
    if !tries_slots && headers.get("x-request-id").is_some_and(|id| id == "baton-probe") {
        let computes = pages.computes.load(Ordering::Relaxed);
        pages.asked.notify_one();
        return Ok(whole(if computes { 200 } else { 503 }, "{}"));
    }
    let body = request.into_body().collect().await.map_err(|_| Broken)?.to_bytes();
    let (answer, answered) = oneshot::channel();
    let body = serde_json::from_slice(&body).unwrap_or_default();
    tell.send(Call { path, headers, body, answer }).map_err(|_| Broken)?;
    // A call that the test drops breaks the connection before any answer.
    answered.await.map_err(|_| Broken)
}

/// As llama.cpp's server answers.
fn made_of_text(path: &str, body: &Value) -> String {
    let text = Tokenizer::bytes4();
    let answer = match path {
        "/tokenize" => json!({ "tokens": text.encode(body["content"].as_str().unwrap(), false) }),
        _ => json!({ "prompt": text.render_chat(&body["messages"], None, true, &Map::new()).unwrap() }),
    };
    answer.to_string()
}

fn page(page: &Mutex<String>) -> Response<BoxBody<Bytes, Broken>> {
    let page = page.lock().unwrap();
    if page.is_empty() { whole(404, "{}") } else { whole(200, &page) }
}

fn whole(status: u16, body: &str) -> Response<BoxBody<Bytes, Broken>> {
    let body = Full::new(Bytes::from(body.to_owned())).map_err(|never: Infallible| match never {}).boxed();
    let builder = Response::builder().status(status).header(header::CONTENT_TYPE, "application/json");
    builder.body(body).unwrap()
}

impl Call {
    /// Answers with a whole body.
    pub(crate) fn reply(self, status: u16, body: &[u8]) {
        // A gateway that has given up the request takes no answer.
        _ = self.answer.send(whole(status, std::str::from_utf8(body).unwrap()));
    }

    /// Refuses, and asks for so many seconds of rest.
    pub(crate) fn ask_for_rest(self, status: u16, seconds: u64) {
        let mut response = whole(status, r#"{"error":{"message":"slow down","type":"rate_limit","code":429}}"#);
        response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
        _ = self.answer.send(response);
    }

    /// Closes the connection without an answer.
    pub(crate) fn hang_up(self) {
        drop(self.answer);
    }

    /// Waits until the gateway gives the request up.
    pub(crate) async fn given_up(mut self) {
        self.answer.closed().await;
    }

    /// Begins an event stream.
    pub(crate) fn stream(self) -> EventSender {
        let (parts, receiver) = mpsc::channel(1);
        let body = BoxBody::new(ChannelBody { parts: receiver });
        let builder = Response::builder().header(header::CONTENT_TYPE, "text/event-stream; charset=utf-8");
        _ = self.answer.send(builder.body(body).unwrap());
        EventSender { parts }
    }

    /// Streams a recorded body and ends it properly.
    pub(crate) async fn play(self, body: &[u8]) {
        let sender = self.stream();
        for event in events(body) {
            sender.send(event).await;
        }
    }
}

/// The engine's side of a stream; dropped, it ends the body.
pub(crate) struct EventSender {
    parts: mpsc::Sender<Result<Bytes, Broken>>,
}

impl EventSender {
    pub(crate) async fn send(&self, bytes: impl Into<Bytes>) {
        // Nobody takes it when the gateway has left; tests of that look at `closed`.
        _ = self.parts.send(Ok(bytes.into())).await;
    }

    /// Cuts the connection: the body has no end.
    pub(crate) async fn cut(self) {
        _ = self.parts.send(Err(Broken)).await;
    }

    /// Waits until the gateway has closed the stream.
    pub(crate) async fn closed(&self) {
        self.parts.closed().await;
    }
}

struct ChannelBody {
    parts: mpsc::Receiver<Result<Bytes, Broken>>,
}

impl Body for ChannelBody {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        self.parts.poll_recv(context).map(|part| part.map(|part| part.map(Frame::data)))
    }
}

/// A gateway under test and a client of it.
pub(crate) struct Front {
    pub(crate) gateway: Gateway,
    pub(crate) address: String,
    client: Client<HttpConnector, Full<Bytes>>,
    shutdown: Option<oneshot::Sender<()>>,
    pub(crate) served: JoinHandle<Result<(), baton_gateway::GatewayError>>,
}

impl Front {
    /// A gateway over these engines, all of them ready.
    pub(crate) async fn over(engines: &[&FakeEngine]) -> Self {
        Self::with(config(engines)).await
    }

    pub(crate) async fn with(config: GatewayConfig) -> Self {
        Self::with_text(config, None).await
    }

    /// One that knows the model's tokens.
    pub(crate) async fn with_text(config: GatewayConfig, text: Option<Arc<Tokenizer>>) -> Self {
        let count = config.engines.len();
        Self::start(config, text, count).await
    }

    /// A gateway of which so many engines are ready.
    pub(crate) async fn with_ready(config: GatewayConfig, count: usize) -> Self {
        Self::start(config, None, count).await
    }

    async fn start(config: GatewayConfig, text: Option<Arc<Tokenizer>>, count: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let gateway = Gateway::new(config, text).unwrap();
        gateway.until_ready(count).await;
        let (shutdown, ordered) = oneshot::channel::<()>();
        let serving = gateway.clone();
        let served = tokio::spawn(async move { serving.serve(listener, async { _ = ordered.await }).await });
        let client = Client::builder(TokioExecutor::new()).build(HttpConnector::new());
        Self { gateway, address, client, shutdown: Some(shutdown), served }
    }

    pub(crate) fn shut_down(&mut self) {
        _ = self.shutdown.take().unwrap().send(());
    }

    pub(crate) async fn send(&self, method: Method, path: &str, headers: &[(&str, &str)], body: &str) -> Response<Incoming> {
        let mut request = Request::builder().method(method).uri(format!("http://{}{path}", self.address));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.client.request(request.body(Full::new(Bytes::from(body.to_owned()))).unwrap()).await.unwrap()
    }

    pub(crate) async fn post(&self, path: &str, body: &str) -> Response<Incoming> {
        self.send(Method::POST, path, &[("content-type", "application/json")], body).await
    }

    pub(crate) async fn get(&self, path: &str) -> (StatusCode, Value) {
        let response = self.send(Method::GET, path, &[], "").await;
        let status = response.status();
        (status, serde_json::from_slice(&read(response).await).unwrap_or_default())
    }

    /// Sends a chat request and gives its response once the task has it.
    pub(crate) fn chat(&self, body: &str) -> JoinHandle<Response<Incoming>> {
        self.spawn_post("/v1/chat/completions", body, &[])
    }

    pub(crate) fn completion(&self, body: &str) -> JoinHandle<Response<Incoming>> {
        self.spawn_post("/v1/completions", body, &[])
    }

    pub(crate) fn spawn_post(&self, path: &str, body: &str, headers: &[(&str, &str)]) -> JoinHandle<Response<Incoming>> {
        let mut request = Request::post(format!("http://{}{path}", self.address)).header("content-type", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(Bytes::from(body.to_owned()))).unwrap();
        let client = self.client.clone();
        tokio::spawn(async move { client.request(request).await.unwrap() })
    }
}

/// The default configuration over these engines.
pub(crate) fn config(engines: &[&FakeEngine]) -> GatewayConfig {
    let engines = engines.iter().map(|engine| engine.config()).collect();
    GatewayConfig { engines, ..GatewayConfig::default() }
}

/// The whole body.
pub(crate) async fn read(response: Response<Incoming>) -> Vec<u8> {
    response.into_body().collect().await.unwrap().to_bytes().to_vec()
}

pub(crate) async fn read_json(response: Response<Incoming>) -> Value {
    serde_json::from_slice(&read(response).await).unwrap()
}

/// A stream read event by event.
pub(crate) struct EventReader {
    body: Incoming,
    decoder: Decoder,
    ready: std::collections::VecDeque<Event>,
}

impl EventReader {
    pub(crate) fn new(response: Response<Incoming>) -> Self {
        assert_eq!(response.status(), 200);
        Self { body: response.into_body(), decoder: Decoder::default(), ready: [].into() }
    }

    pub(crate) async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event.raw);
            }
            let frame = self.body.frame().await?.unwrap();
            let data = frame.into_data().unwrap();
            self.ready.extend(self.decoder.push(&data).map(Result::unwrap));
        }
    }
}
