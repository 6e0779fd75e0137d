//! Clients' connections: how many there may be, how long one may take to ask and to read, what is kept for it meanwhile, and their end.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::{Sleep, sleep, timeout},
};
use tokio_rustls::TlsAcceptor;

use crate::{
    api::Door,
    fleet::{Fleet, Stage},
};

/// Of a connection: a request's head, what of a body is read at once, and what of an answer waits for the client.
const BUFFER_BYTES: usize = 64 << 10;

/// After the drain deadline: for error events to be taken and connections to close.
const CLOSING_GRACE: Duration = Duration::from_secs(2);

/// Serves connections until the fleet closes; then none is left.
pub(crate) async fn serve(mut listener: TcpListener, door: Door, fleet: Arc<Fleet>) {
    let door = Arc::new(door);
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).max_buf_size(BUFFER_BYTES);
    let mut connections = JoinSet::new();
    loop {
        let limit = fleet.front().connections;
        tokio::select! {
            biased;
            () = fleet.reached(Stage::Closing) => break,
            Some(_) = connections.join_next() => {}
            // Past the limit, clients wait in the kernel's queue.
            (stream, _) = Listener::accept(&mut listener), if connections.len() < limit => {
                http.header_read_timeout(fleet.front().receive_timeout);
                connections.spawn(carry(stream, http.clone(), door.clone(), fleet.clone()));
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

async fn carry(stream: TcpStream, http: http1::Builder, door: Arc<Door>, fleet: Arc<Fleet>) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a connection keeps Nagle's algorithm");
    }
    let front = fleet.front();
    let stream = Patient { stream, patience: front.stall_timeout, blocked: None };
    let Some(tls) = fleet.tls() else { return talk(stream, http, door, &fleet).await };
    let shaken = tokio::select! {
        biased;
        () = fleet.reached(Stage::Closing) => return,
        shaken = timeout(front.receive_timeout, TlsAcceptor::from(tls).accept(stream)) => shaken,
    };
    match shaken {
        Ok(Ok(stream)) => talk(stream, http, door, &fleet).await,
        Ok(Err(error)) => tracing::debug!(%error, "a client's TLS handshake failed"),
        Err(_) => tracing::debug!("a client's TLS handshake took too long"),
    }
}

async fn talk(stream: impl AsyncRead + AsyncWrite + Unpin, http: http1::Builder, door: Arc<Door>, fleet: &Fleet) {
    let mut connection = std::pin::pin!(http.serve_connection(TokioIo::new(stream), door));
    let ended = tokio::select! {
        biased;
        ended = connection.as_mut() => ended,
        () = fleet.reached(Stage::Closing) => {
            connection.as_mut().graceful_shutdown();
            // This also asks running exchanges, which see that the fleet closes.
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a client's connection ended early");
    }
}

/// A stream whose peer is taken for gone when it takes nothing for so long.
struct Patient {
    stream: TcpStream,
    patience: Duration,
    /// Rings when the peer has taken nothing for too long; `None` while it takes what there is.
    blocked: Option<Pin<Box<Sleep>>>,
}

impl Patient {
    fn bounded<T>(&mut self, written: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.blocked = None;
            return written;
        }
        let patience = self.patience;
        ready!(self.blocked.get_or_insert_with(|| Box::pin(sleep(patience))).as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read")))
    }
}

impl AsyncRead for Patient {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Patient {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.bounded(written, context)
    }

    fn poll_write_vectored(mut self: Pin<&mut Self>, context: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.bounded(written, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
