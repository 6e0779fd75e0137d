//! A replica with an emulated engine and the real tokenizer, and a client that sees raw bytes.

use std::{
    fs::{self, File},
    io::Read,
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, LazyLock},
    time::Duration,
};

use baton_cost::StepCoefficients;
use baton_engine::{EngineConfig, Executor, Order, Timed, TokenBudget, TokenSource};
use baton_gguf::Header;
use baton_replica::{Pace, ReplicaConfig, ReplicaError, serve};
use baton_text::Tokenizer;
use baton_units::{BlockSize, Blocks, Tokens};
use baton_wire::replica::Report;
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::oneshot,
    task::JoinHandle,
};

pub(crate) const MODEL: &str = "smollm2-135m";
/// A hung server fails the test instead of holding it up.
const PATIENCE: Duration = Duration::from_mins(1);

static SMOLLM2: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let mut bytes = Vec::new();
    File::open(baton_testkit::smollm2()).unwrap().take(8 << 20).read_to_end(&mut bytes).unwrap();
    Arc::new(Tokenizer::from_gguf(&Header::parse(&bytes).unwrap()).unwrap())
});

pub(crate) fn smollm2() -> Arc<Tokenizer> {
    Arc::clone(&SMOLLM2)
}

/// A captured file.
fn fixture(name: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    fs::read(path).unwrap()
}

/// What vLLM answered.
pub(crate) fn captured(name: &str) -> Answer {
    Answer::parse(&fixture(&format!("{name}.resp")))
}

/// The captured request, byte for byte.
pub(crate) fn request(name: &str) -> Vec<u8> {
    fixture(&format!("{name}.req"))
}

/// A step of `ms` milliseconds whatever is in it.
pub(crate) fn steps_of(ms: f64) -> StepCoefficients {
    StepCoefficients { fixed_s: ms / 1e3, per_token_s: 0.0, per_attended_s: 0.0, per_kv_token_s: 0.0, weights_s: 0.0 }
}

/// The engine of the captured server: 128 blocks of 32, 2,048 tokens, here with steps of a model millisecond.
pub(crate) fn config() -> ReplicaConfig {
    let engine = EngineConfig {
        block_size: BlockSize::new(32).unwrap(),
        budget: TokenBudget::Fixed(Tokens(2048)),
        order: Order::Priority,
        ..EngineConfig::new(MODEL, Blocks(128), Tokens(2048), steps_of(1.0))
    };
    ReplicaConfig { drain: Duration::from_secs(5), ..ReplicaConfig::new("r0", MODEL, engine, Pace::Modelled { time_scale: 0.1 }) }
}

pub(crate) fn timed(config: &ReplicaConfig) -> Box<dyn Executor + Send> {
    let engine = &config.engine;
    Box::new(Timed::new(engine.step_prior, engine.blocks, engine.block_size, TokenSource::Vocabulary(49_000), vec![2]))
}

pub(crate) struct Replica {
    pub(crate) address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    pub(crate) served: JoinHandle<Result<(), ReplicaError>>,
}

impl Replica {
    pub(crate) async fn start(config: ReplicaConfig) -> Self {
        let executor = timed(&config);
        Self::start_with(config, executor).await
    }

    pub(crate) async fn start_with(config: ReplicaConfig, executor: Box<dyn Executor + Send>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let shutdown = async {
            let _ = stopped.await;
        };
        let served = tokio::spawn(serve(config, executor, smollm2(), listener, shutdown));
        Self { address, stop: Some(stop), served }
    }

    pub(crate) async fn stop(mut self) -> Result<(), ReplicaError> {
        let _ = self.stop.take().unwrap().send(());
        tokio::time::timeout(PATIENCE, self.served).await.expect("the replica stops").unwrap()
    }

    /// Ends it as a crash would: nobody is told.
    pub(crate) async fn kill(self) {
        self.served.abort();
        assert!(self.served.await.unwrap_err().is_cancelled());
    }

    pub(crate) async fn connect(&self, request: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(request).await.unwrap();
        stream
    }

    /// Sends raw bytes and reads until the server closes.
    pub(crate) async fn raw(&self, request: &[u8]) -> Answer {
        read_answer(self.connect(request).await).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Answer {
        self.raw(&post(path, body, "")).await
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.raw(format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").as_bytes()).await
    }

    pub(crate) async fn report(&self) -> Report {
        serde_json::from_slice(&self.get("/baton/v1/replica").await.body).unwrap()
    }

    /// Asks for the report until it satisfies.
    pub(crate) async fn report_when(&self, wanted: impl Fn(&Report) -> bool) -> Report {
        let poll = async {
            loop {
                let report = self.report().await;
                if wanted(&report) {
                    return report;
                }
            }
        };
        tokio::time::timeout(PATIENCE, poll).await.expect("the replica gets there")
    }
}

pub(crate) fn post(path: &str, body: &Value, headers: &str) -> Vec<u8> {
    let body = body.to_string();
    let length = body.len();
    format!("POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n{headers}\r\n{body}")
        .into_bytes()
}

pub(crate) async fn read_answer(mut stream: TcpStream) -> Answer {
    let mut bytes = Vec::new();
    tokio::time::timeout(PATIENCE, stream.read_to_end(&mut bytes)).await.expect("the server answers and closes").unwrap();
    Answer::parse(&bytes)
}

/// An HTTP answer taken apart.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) content_type: Option<String>,
    pub(crate) headers: String,
    pub(crate) body: Vec<u8>,
    /// The chunks of a chunked body.
    pub(crate) chunks: Vec<Vec<u8>>,
}

impl Answer {
    pub(crate) fn parse(bytes: &[u8]) -> Self {
        let split = bytes.windows(4).position(|window| window == b"\r\n\r\n").expect("a head and a body");
        let headers = String::from_utf8(bytes[..split].to_vec()).unwrap().to_lowercase();
        let status = headers.split(' ').nth(1).unwrap().parse().unwrap();
        let value = |name: &str| headers.lines().find_map(|line| line.strip_prefix(name)).map(|value| value.trim().to_owned());
        let (content_type, chunked) = (value("content-type:"), value("transfer-encoding:").as_deref() == Some("chunked"));
        let rest = &bytes[split + 4..];
        let chunks = if chunked { chunks(rest) } else { Vec::new() };
        let body = if chunked { chunks.concat() } else { rest.to_vec() };
        Self { status, content_type, headers, body, chunks }
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&self.body)))
    }

    /// Data of all events; `[DONE]` is null.
    pub(crate) fn events(&self) -> Vec<Value> {
        let mut decoder = baton_wire::sse::Decoder::default();
        let events: Vec<_> = decoder.push(&self.body).map(Result::unwrap).collect();
        assert!(decoder.pending().is_empty(), "the stream ends with a whole event");
        let data = |event: &baton_wire::sse::Event| {
            if event.is_done() { Value::Null } else { serde_json::from_slice(event.data.as_ref().unwrap()).unwrap() }
        };
        events.iter().map(data).collect()
    }

    /// Text of choice `index` in a stream of either API.
    pub(crate) fn streamed_text(&self, index: u64) -> String {
        let events = self.events();
        let choices = events.iter().filter_map(|event| event["choices"].as_array()).flatten().filter(|choice| choice["index"] == index);
        choices.filter_map(|choice| choice["text"].as_str().or_else(|| choice["delta"]["content"].as_str())).collect()
    }
}

fn chunks(mut bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut chunks = Vec::new();
    loop {
        let Some(end) = bytes.windows(2).position(|window| window == b"\r\n") else { return chunks };
        let length = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).unwrap(), 16).unwrap();
        if length == 0 {
            return chunks;
        }
        chunks.push(bytes[end + 2..end + 2 + length].to_vec());
        bytes = &bytes[end + 2 + length + 2..];
    }
}
