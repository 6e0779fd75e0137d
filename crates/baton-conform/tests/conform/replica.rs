//! Two replicas in this process.

use std::{fs::File, io::Read, sync::Arc, time::Duration};

use baton_cost::StepCoefficients;
use baton_engine::{EngineConfig, Executor, Timed, TokenBudget, TokenSource};
use baton_gguf::TensorKind;
use baton_model::{CpuConfig, CpuExecutor};
use baton_replica::{MigrationConfig, Pace, ReplicaConfig, ReplicaError, serve};
use baton_text::Tokenizer;
use baton_units::{BlockSize, Blocks, Tokens};
use baton_wire::{migration::handshake::FleetKey, replica::Report};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::oneshot,
    task::JoinHandle,
};

use crate::tiny::{Family, Folder, Tiny, VOCAB};

pub(crate) const MODEL: &str = "tiny";
/// Of the model that computes.
const CONTEXT: usize = 1024;
/// What is left of it behind a prompt of 60: long enough that a request is there while it is moved, on a busy machine too.
pub(crate) const COMPUTED_OUTPUT: u32 = CONTEXT as u32 - 60;
const BLOCK: u32 = 8;
const BLOCKS: Blocks = Blocks(1024);
/// So slow that a request is there while it is moved, on a busy machine too.
const STEP_S: f64 = 5e-4;
const PATIENCE: Duration = Duration::from_mins(1);

pub(crate) struct Fleet {
    pub(crate) replicas: [Replica; 2],
    /// Weights, which are read as long as they run.
    _folder: Option<Folder>,
}

pub(crate) struct Replica {
    /// Where gateways attach.
    pub(crate) control: String,
    pub(crate) http: String,
    stop: oneshot::Sender<()>,
    served: JoinHandle<Result<(), ReplicaError>>,
}

impl Fleet {
    /// Emulated engines.
    pub(crate) async fn timed(key: Option<&str>) -> Self {
        let step = StepCoefficients { fixed_s: STEP_S, per_token_s: 0.0, per_attended_s: 0.0, per_kv_token_s: 0.0, weights_s: 0.0 };
        let start = async |id: &str| {
            let engine = EngineConfig { budget: TokenBudget::Fixed(Tokens(64)), ..engine(BLOCKS, Tokens(4096), step) };
            let executor = Timed::new(step, BLOCKS, engine.block_size, TokenSource::Vocabulary(40_000), vec![2]);
            Replica::start(config(id, engine, Pace::Modelled { time_scale: 1.0 }, key), Box::new(executor)).await
        };
        Self { replicas: [start("a").await, start("b").await], _folder: None }
    }

    /// Engines that compute a model of two layers.
    pub(crate) async fn computing() -> Self {
        let folder = Folder::new();
        folder.file("model.gguf", &Tiny { context: CONTEXT, ..Tiny::new(Family::Llama, TensorKind::Q8_0, 3) }.to_gguf());
        let free = StepCoefficients { fixed_s: 0.0, per_token_s: 0.0, per_attended_s: 0.0, per_kv_token_s: 0.0, weights_s: 0.0 };
        let start = async |id: &str| {
            let cpu = CpuConfig { threads: 1, block_size: BLOCK as usize, blocks: BLOCKS.0 as usize, kernel: None, max_model_len: None };
            let executor = CpuExecutor::load(&folder.path().join("model.gguf"), &cpu).unwrap();
            let engine = EngineConfig {
                budget: TokenBudget::Fixed(Tokens(16)),
                vocabulary: VOCAB as u32,
                ..engine(BLOCKS, Tokens(CONTEXT as u32), free)
            };
            Replica::start(config(id, engine, Pace::Measured, None), Box::new(executor)).await
        };
        Self { replicas: [start("a").await, start("b").await], _folder: Some(folder) }
    }

    pub(crate) async fn stop(self) {
        for replica in self.replicas {
            let _ = replica.stop.send(());
            tokio::time::timeout(PATIENCE, replica.served).await.expect("the replica stops").unwrap().unwrap();
        }
    }
}

fn engine(blocks: Blocks, length: Tokens, step: StepCoefficients) -> EngineConfig {
    EngineConfig { block_size: BlockSize::new(BLOCK).unwrap(), ..EngineConfig::new(MODEL, blocks, length, step) }
}

fn config(id: &str, engine: EngineConfig, pace: Pace, key: Option<&str>) -> ReplicaConfig {
    let migration = MigrationConfig { fleet_key: key.map(FleetKey::new), ..MigrationConfig::default() };
    ReplicaConfig {
        migration: Some(migration),
        drain: Duration::from_secs(5),
        kv_events: None,
        ..ReplicaConfig::new(id, MODEL, engine, pace)
    }
}

impl Replica {
    async fn start(config: ReplicaConfig, executor: Box<dyn Executor + Send>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let http = listener.local_addr().unwrap().to_string();
        let (stop, stopped) = oneshot::channel::<()>();
        let shutdown = async {
            let _ = stopped.await;
        };
        let served = tokio::spawn(serve(config, executor, tokenizer(), listener, shutdown));
        let control = report(&http).await.migration.unwrap().control_address;
        Self { control, http, stop, served }
    }
}

fn tokenizer() -> Arc<Tokenizer> {
    let mut bytes = Vec::new();
    File::open(baton_testkit::smollm2()).unwrap().take(8 << 20).read_to_end(&mut bytes).unwrap();
    Arc::new(Tokenizer::from_gguf(&baton_gguf::Header::parse(&bytes).unwrap()).unwrap())
}

async fn report(http: &str) -> Report {
    let mut stream = TcpStream::connect(http).await.unwrap();
    stream.write_all(b"GET /baton/v1/replica HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    tokio::time::timeout(PATIENCE, stream.read_to_string(&mut answer)).await.expect("it answers and closes").unwrap();
    serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
}
