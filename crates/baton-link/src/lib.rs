//! Connections of the migration protocol (`docs/migration-protocol.md`): the handshake, then frames.
//!
//! [`dial`] makes one, [`Identity::accept`] takes one in, and [`listen()`] takes in all that come to an address. What the frames mean, when a
//! connection is made again and what is held of requests is the caller's.

mod connection;
mod fleet_key;
mod listen;

pub use connection::{Connection, ConnectionError, FrameReader, FrameWriter, Identity, Raw, dial};
pub use fleet_key::{FleetKeyError, read_fleet_key};
pub use listen::listen;

#[cfg(test)]
mod tests;
