use std::{
    sync::{Arc, OnceLock},
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use axum::serve::ListenerExt;
use baton_engine::{ConfigError, Engine, Executor, Numerics, Order};
use baton_openai::{Limits, Service};
use baton_text::Tokenizer;
use tokio::{
    net::TcpListener,
    sync::{mpsc, watch},
};

use crate::{
    Pace, ReplicaConfig,
    clock::Clock,
    driver::{self, EngineHandle, Parts},
    http::{App, router},
    kv_publisher::KvPublisher,
    metrics::Metrics,
    migration::{Listeners, Migration, MigrationError, Models},
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
    #[error(transparent)]
    Migration(#[from] MigrationError),
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
    let listeners = match &config.migration {
        Some(migration) => Some((migration.clone(), Listeners::bind(migration).await?)),
        None => None,
    };
    let metrics = Arc::new(Metrics::default());
    let service = Service {
        tokenizer,
        limits: Limits { max_model_len: engine.max_model_len().0, vocabulary: u64::from(config.engine.vocabulary) },
        eos: config.engine.eos.clone(),
        block_size: config.engine.block_size,
        orders_by_priority: config.engine.order != Order::Arrival,
    };
    let numerics = Numerics::of(executor.as_ref());
    let modelled = matches!(config.pace, Pace::Modelled { .. });
    let kv_events = publisher.as_ref().map(|publisher| publisher.sender.clone());
    let (move_sender, move_events) = mpsc::unbounded_channel();
    let move_sender = listeners.is_some().then_some(move_sender);
    let parts = Parts { engine, executor, clock, modelled, metrics: Arc::clone(&metrics), kv_events, move_events: move_sender };
    let (engine, thread) = driver::start(parts).map_err(ReplicaError::Thread)?;
    let (drain, incarnation) = (config.drain, incarnation());
    let mut migration = listeners.map(|(migration, listeners)| {
        let models = Models { engine: config.engine.model.clone(), served: config.models.clone() };
        Migration::start(&migration, listeners, (&config.id, incarnation), models, &numerics, engine.clone(), move_events)
    });
    let app = App {
        config,
        service: Arc::new(service),
        engine: engine.clone(),
        metrics,
        clock,
        kv_events: publisher.as_ref().map(|publisher| publisher.source.clone()),
        migration: migration.as_ref().map(|migration| migration.source.clone()),
        numerics_id: numerics.id,
        incarnation,
    };
    let stopped_at = Arc::new(OnceLock::new());
    let served = serve_http(app, listener, until_stopped(shutdown, engine.clone(), Arc::clone(&stopped_at)), drain).await;
    let failed = engine.has_failed();
    if let (Some(migration), Some(stopped_at), false) = (&mut migration, stopped_at.get(), failed) {
        migration.drained(drain.saturating_sub(stopped_at.elapsed())).await;
    }
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

async fn until_stopped(shutdown: impl Future<Output = ()>, engine: EngineHandle, stopped_at: Arc<OnceLock<Instant>>) {
    tokio::select! {
        () = shutdown => {}
        () = engine.failed() => {}
    }
    stopped_at.get_or_init(Instant::now);
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
