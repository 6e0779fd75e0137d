//! Control connections: each carries all requests of one gateway.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use baton_link::{Connection, ConnectionError, FrameReader, FrameWriter, Identity, Stream};
use baton_migration::{GatewayName, ToGateway};
use baton_wire::migration::{ControlFrame, handshake::Role};
use tokio::{net::TcpListener, sync::mpsc};

use super::{
    actor::Input,
    fault::{self, Point},
};

/// Gateways, and strangers that have not introduced themselves; more wait.
const CONNECTIONS_MAX: usize = 64;
/// Frames on their way to a gateway. One that does not take them is disconnected, and told all again when it comes back.
const QUEUED_FRAMES: usize = 1 << 16;
/// Frames that are written before the buffer is flushed.
const WRITTEN_AT_ONCE: usize = 256;

/// Which of the connections of a replica's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ConnectionId(u64);

/// Takes gateways in for ever.
pub(super) async fn listen(listener: TcpListener, identity: Arc<Identity>, inputs: mpsc::Sender<Input>) {
    let next = AtomicU64::new(0);
    let serve_next = |stream| {
        let (identity, inputs) = (Arc::clone(&identity), inputs.clone());
        let id = ConnectionId(next.fetch_add(1, Ordering::Relaxed));
        async move { serve(stream, &identity, id, &inputs).await }
    };
    baton_link::listen(listener, "control", CONNECTIONS_MAX, serve_next).await;
}

async fn serve(stream: Stream, identity: &Identity, id: ConnectionId, inputs: &mpsc::Sender<Input>) -> Result<(), ConnectionError> {
    let Connection { hello, reader, writer } = identity.accept(stream, Role::Gateway).await?;
    let gateway = hello.gateway_name();
    let (frames, queue) = mpsc::channel(QUEUED_FRAMES);
    // When the actor is gone, so is the replica.
    let _ = inputs.send(Input::Attached { gateway, connection: id, frames }).await;
    // Either end closes both directions.
    let ended = tokio::select! {
        ended = read(reader, gateway, id, inputs) => ended,
        ended = write(writer, queue) => ended,
    };
    let _ = inputs.send(Input::Detached { gateway, connection: id }).await;
    ended
}

async fn read(
    mut reader: FrameReader,
    gateway: GatewayName,
    connection: ConnectionId,
    inputs: &mpsc::Sender<Input>,
) -> Result<(), ConnectionError> {
    loop {
        let frame = Box::new(reader.control().await?);
        let _ = inputs.send(Input::Frame { gateway, connection, frame }).await;
    }
}

/// Until the actor lets go of the other end, which it does when a newer connection came.
async fn write(mut writer: FrameWriter, mut queue: mpsc::Receiver<ControlFrame>) -> Result<(), ConnectionError> {
    let mut frames = Vec::with_capacity(WRITTEN_AT_ONCE);
    while queue.recv_many(&mut frames, WRITTEN_AT_ONCE).await > 0 {
        let asks = frames.iter().any(|frame| matches!(frame, ControlFrame::ToGateway { message: ToGateway::CommitTarget { .. }, .. }));
        for frame in frames.drain(..) {
            writer.control(&frame).await?;
        }
        writer.flush().await?;
        if asks {
            fault::reached(Point::SourceAsked);
        }
    }
    Ok(())
}
