//! The control connection to one life of one replica, made again as often as it breaks.

use std::{sync::Arc, time::Duration};

use baton_link::{Connection, ConnectionError, FrameReader, FrameWriter, dial};
use baton_migration::Place;
use baton_units::{Incarnation, ReplicaId};
use baton_wire::migration::{
    ControlFrame,
    handshake::{Hello, Role},
};
use tokio::sync::mpsc;

use super::Link;
use crate::fleet::Fleet;

/// A replica that does not answer within this is taken for unreachable.
const DIAL_TIMEOUT: Duration = Duration::from_secs(2);
/// Between attempts to connect, doubling.
const PAUSE: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Frames on their way to a replica. What matters of those that find no room is repeated.
const QUEUED_FRAMES: usize = 1 << 16;
/// Frames that are written before the buffer is flushed.
const WRITTEN_AT_ONCE: usize = 256;

/// Where a replica takes part in migration, as its report tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Destination {
    pub(crate) place: Place,
    pub(crate) control_address: String,
    pub(crate) copies_prefixes: bool,
}

impl Destination {
    pub(crate) fn of(source: &baton_wire::replica::MigrationSource, incarnation: u64) -> Self {
        let place = Place { replica: ReplicaId(source.replica), incarnation: Incarnation(incarnation) };
        Self { place, control_address: source.control_address.clone(), copies_prefixes: source.copies_prefixes }
    }
}

/// Keeps the connection for as long as the replica's life is watched.
pub(crate) async fn keep(fleet: Arc<Fleet>, replica: ReplicaId, to: Destination) {
    let mut pause = PAUSE;
    loop {
        let ended = match dial(&to.control_address, fleet.carry_identity(), Role::Gateway, DIAL_TIMEOUT).await {
            Ok(connection) => {
                let place =
                    Place { replica: ReplicaId(connection.hello.id as u32), incarnation: Incarnation(connection.hello.incarnation) };
                if place == to.place {
                    pause = PAUSE;
                    serve(&fleet, replica, &to, connection).await
                } else {
                    // Another process has the address now; the next report tells which.
                    tracing::debug!(%replica, "another life of the replica answers its control address");
                    Ok(())
                }
            }
            Err(error) => {
                fleet.with_desk(|desk, now| desk.disconnected(to.place, now));
                Err(error)
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%replica, %error, "no control connection");
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

async fn serve(fleet: &Fleet, replica: ReplicaId, to: &Destination, connection: Connection) -> Result<(), ConnectionError> {
    let Connection { hello, reader, writer } = connection;
    let (place, copies_prefixes) = (to.place, to.copies_prefixes);
    let (frames, queue) = mpsc::channel(QUEUED_FRAMES);
    let Hello { numerics_id, kv_layout, kv_address, .. } = hello;
    let link = Link { replica, numerics_id, kv_layout, kv_address, copies_prefixes, frames };
    fleet.with_desk(|desk, now| desk.connected(place, link, now));
    // Either direction's end is the end.
    tokio::select! {
        ended = read(fleet, place, reader) => ended,
        ended = write(writer, queue) => ended,
    }
}

async fn read(fleet: &Fleet, place: Place, mut reader: FrameReader) -> Result<(), ConnectionError> {
    loop {
        let frame = reader.control().await?;
        fleet.with_desk(|desk, now| desk.heard(place, frame, now));
    }
}

async fn write(mut writer: FrameWriter, mut queue: mpsc::Receiver<ControlFrame>) -> Result<(), ConnectionError> {
    let mut frames = Vec::with_capacity(WRITTEN_AT_ONCE);
    while queue.recv_many(&mut frames, WRITTEN_AT_ONCE).await > 0 {
        for frame in frames.drain(..) {
            writer.control(&frame).await?;
        }
        writer.flush().await?;
    }
    Ok(())
}
