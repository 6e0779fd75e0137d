//! Clients' connections: how many there may be, how long one may take to ask, and their end.

use std::{sync::Arc, time::Duration};

use axum::{Router, serve::Listener};
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::timeout,
};

use crate::fleet::{Fleet, Stage};

/// After the drain deadline: for error events to be taken and connections to close.
const CLOSING_GRACE: Duration = Duration::from_secs(2);

/// Serves connections until the fleet closes; then none is left.
pub(crate) async fn serve(mut listener: TcpListener, app: Router, fleet: Arc<Fleet>) {
    let limit = fleet.front.connections;
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(fleet.front.receive_timeout);
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            () = fleet.reached(Stage::Closing) => break,
            Some(_) = connections.join_next() => {}
            // Past the limit, clients wait in the kernel's queue.
            (stream, _) = Listener::accept(&mut listener), if connections.len() < limit => {
                connections.spawn(carry(stream, http.clone(), app.clone(), fleet.clone()));
                if connections.len() == limit {
                    tracing::warn!(limit, "no more connections are accepted until one closes; gateway.connections is the bound");
                }
            }
        }
    }
    drop(listener);
    // Who stays past the grace is cut: the set aborts what it drops.
    _ = timeout(CLOSING_GRACE, async { while connections.join_next().await.is_some() {} }).await;
}

async fn carry(stream: TcpStream, http: http1::Builder, app: Router, fleet: Arc<Fleet>) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a connection keeps Nagle's algorithm");
    }
    let mut connection = std::pin::pin!(http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(app)));
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = fleet.reached(Stage::Closing) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a client's connection ended early");
    }
}
