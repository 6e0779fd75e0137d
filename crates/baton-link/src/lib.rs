//! Connections of the migration protocol (`docs/migration-protocol.md`): the handshake, then frames.
//!
//! [`dial`] makes one, [`Identity::accept`] takes one in, and [`listen()`] takes in all that come to an address. What the frames mean, when a
//! connection is made again and what is held of requests is the caller's.

mod connection;
mod fleet_key;
mod listen;
mod stream;

pub use connection::{Connection, ConnectionError, FrameReader, FrameWriter, Identity, Raw, dial};
pub use fleet_key::{FleetKeyError, read_fleet_key};
pub use listen::listen;
pub use stream::{Listener, Stream};

#[cfg(test)]
mod tests;
