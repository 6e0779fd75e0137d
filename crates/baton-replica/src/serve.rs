use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use axum::serve::ListenerExt;
use baton_engine::{ConfigError, Engine, Executor};
use baton_text::Tokenizer;
use tokio::{net::TcpListener, sync::watch};

use crate::{
    Pace, ReplicaConfig,
    clock::Clock,
    driver::{self, EngineHandle, Parts},
    http::{App, router},
    kv_publisher::KvPublisher,
    metrics::Metrics,
    request::Limits,
};

/// Why a replica does not serve, or stopped.
#[derive(Debug, thiserror::Error)]
pub enum ReplicaError {
    #[error("the replica has no model name; give at least one")]
    NoModel,
    #[error("the time scale is {0}; it must be a number above 0")]
    TimeScale(f64),
    #[error(transparent)]
    Engine(#[from] ConfigError),
    #[error("the sockets for KV events cannot be opened: {0}")]
    KvEvents(#[from] zeromq::ZmqError),
    #[error("the engine thread cannot be started: {0}")]
    Thread(std::io::Error),
    #[error("the HTTP server failed: {0}")]
    Http(std::io::Error),
    #[error("the engine failed and the replica with it; restart it")]
    EngineFailed,
}

/// Serves one engine until `shutdown` resolves, then lets running requests finish for as long as the configuration says.
///
/// A failure of the engine ends running requests with an error and this call with [`ReplicaError::EngineFailed`].
pub async fn serve(
    mut config: ReplicaConfig,
    executor: Box<dyn Executor + Send>,
    tokenizer: Arc<Tokenizer>,
    listener: TcpListener,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), ReplicaError> {
    complete(&mut config, &tokenizer)?;
    let clock = Clock::start(config.pace.time_scale());
    let engine = Engine::new(config.engine.clone())?;
    let publisher = match &config.kv_events {
        Some(kv_events) => Some(KvPublisher::start(kv_events).await?),
        None => None,
    };
    let metrics = Arc::new(Metrics::default());
    let limits = Limits { max_model_len: engine.max_model_len().0, vocabulary: u64::from(config.engine.vocabulary) };
    let numerics_id = executor.numerics_id().to_owned();
    let modelled = matches!(config.pace, Pace::Modelled { .. });
    let kv_events = publisher.as_ref().map(|publisher| publisher.sender.clone());
    let parts = Parts { engine, executor, clock, modelled, metrics: Arc::clone(&metrics), kv_events };
    let (engine, thread) = driver::start(parts).map_err(ReplicaError::Thread)?;
    let drain = config.drain;
    let app = App {
        config,
        tokenizer,
        engine: engine.clone(),
        metrics,
        clock,
        limits,
        kv_events: publisher.as_ref().map(|publisher| publisher.source.clone()),
        numerics_id,
        incarnation: incarnation(),
    };
    let served = serve_http(app, listener, until_stopped(shutdown, engine.clone()), drain).await;
    let failed = engine.has_failed();
    engine.shut_down();
    // The thread may be inside a step; no handler waits for it any more.
    let _ = tokio::task::spawn_blocking(move || thread.join()).await;
    served.map_err(ReplicaError::Http)?;
    if failed { Err(ReplicaError::EngineFailed) } else { Ok(()) }
}

/// Checks what the engine does not, and fills in what the tokenizer knows.
fn complete(config: &mut ReplicaConfig, tokenizer: &Tokenizer) -> Result<(), ReplicaError> {
    if config.models.is_empty() {
        return Err(ReplicaError::NoModel);
    }
    if let Pace::Modelled { time_scale } = config.pace
        && !(time_scale > 0.0 && time_scale.is_finite())
    {
        return Err(ReplicaError::TimeScale(time_scale));
    }
    if config.engine.eos.is_empty() {
        config.engine.eos = tokenizer.eos_ids().to_vec();
    }
    let vocabulary = u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX);
    config.engine.vocabulary = config.engine.vocabulary.min(vocabulary);
    // Nobody would take them.
    config.engine.kv_events = config.kv_events.is_some();
    Ok(())
}

async fn until_stopped(shutdown: impl Future<Output = ()>, engine: EngineHandle) {
    tokio::select! {
        () = shutdown => {}
        () = engine.failed() => {}
    }
}

async fn serve_http(
    app: App,
    listener: TcpListener,
    stopped: impl Future<Output = ()> + Send + 'static,
    drain: std::time::Duration,
) -> std::io::Result<()> {
    let (sender, mut receiver) = watch::channel(false);
    let stopped = async move {
        stopped.await;
        sender.send_replace(true);
    };
    // Without it a token waits for the client's acknowledgement of the one before.
    let listener = listener.tap_io(|stream| {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "a connection keeps its delay");
        }
    });
    let server = axum::serve(listener, router(Arc::new(app))).with_graceful_shutdown(stopped);
    let deadline = async move {
        let _ = receiver.wait_for(|&stopped| stopped).await;
        tokio::time::sleep(drain).await;
    };
    tokio::select! {
        served = server => served,
        () = deadline => {
            tracing::warn!(?drain, "requests that still ran at the end of the shutdown are cut off");
            Ok(())
        }
    }
}

/// Differs in each life of the process, and grows.
fn incarnation() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}
