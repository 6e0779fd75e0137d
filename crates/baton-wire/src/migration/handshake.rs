//! The first exchange of a connection: who each side is, what it computes, and, with a fleet key, that it knows the key.
//!
//! ```text
//! dialer -> listener   HELLO  u32 length | `MessagePack` array
//! listener -> dialer   HELLO
//! dialer -> listener   PROOF  32 bytes, where there is a key
//! listener -> dialer   PROOF
//! ```
//! A proof is HMAC-SHA-256 by the fleet key over a name of the role and both hellos as they were sent, so that it is good for this
//! connection alone. The keys of the frames come from the fleet key and both hellos by HKDF-SHA-256, one for each direction.

use baton_migration::{GatewayName, Place};
use baton_units::{Incarnation, ReplicaId};
use hkdf::Hkdf;
use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use super::FrameKey;

pub const VERSION: u16 = 1;
/// The longest hello that is read.
pub const HELLO_MAX: usize = 64 << 10;
pub const PROOF_BYTES: usize = 32;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role {
    #[serde(rename = "gateway")]
    Gateway,
    #[serde(rename = "replica")]
    Replica,
    /// A replica that dials another's KV address.
    #[serde(rename = "source")]
    Source,
}

/// What happens to a request that is frozen when it does not move after all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Freeze {
    /// It goes on where it was.
    #[serde(rename = "resumable")]
    Resumable,
    /// It must be computed again.
    #[serde(rename = "final")]
    Final,
}

/// How KV lies in a block's bytes. Two replicas with equal layouts read each other's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvLayout {
    /// Names order, type and counts of the values, and the rule by which they lie.
    pub format: String,
    /// Tokens of a block.
    pub block_size: u32,
    pub block_bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    pub version: u16,
    pub role: Role,
    /// Stays over restarts.
    pub id: u64,
    /// Drawn at each start.
    pub incarnation: u64,
    /// Of all that decides the bits: model revision, weights, KV and activation types, kernels. Empty for a gateway.
    pub numerics_id: String,
    pub kv_layout: Option<KvLayout>,
    pub freeze: Option<Freeze>,
    /// Where sources take KV to, as `host:port`; none where nothing can be moved to.
    pub kv_address: Option<String>,
    pub nonce: [u8; 32],
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    #[error("a hello of {0} bytes is longer than the {HELLO_MAX} that are read")]
    TooLong(u32),
    #[error("the hello cannot be read: {0}")]
    Malformed(String),
    #[error("the other side speaks version {0} of the protocol, and this one {VERSION}")]
    Version(u16),
    #[error("the other side does not know the fleet key")]
    WrongKey,
}

impl Hello {
    /// As it is sent: its length, then itself.
    pub fn to_bytes(&self) -> Vec<u8> {
        let body = rmp_serde::to_vec(self).expect("a hello serializes");
        let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
        bytes.extend(body);
        bytes
    }

    /// Bytes that follow the four of the length.
    pub fn body_bytes(length: [u8; 4]) -> Result<usize, HelloError> {
        let length = u32::from_le_bytes(length);
        if length as usize > HELLO_MAX { Err(HelloError::TooLong(length)) } else { Ok(length as usize) }
    }

    pub fn from_body(body: &[u8]) -> Result<Self, HelloError> {
        let hello: Self = rmp_serde::from_slice(body).map_err(|error| HelloError::Malformed(error.to_string()))?;
        if hello.version == VERSION { Ok(hello) } else { Err(HelloError::Version(hello.version)) }
    }

    /// Of a replica, also as a source.
    pub fn place(&self) -> Place {
        Place { replica: ReplicaId(self.id as u32), incarnation: Incarnation(self.incarnation) }
    }

    /// Of a gateway.
    pub fn gateway_name(&self) -> GatewayName {
        GatewayName { id: self.id, incarnation: self.incarnation }
    }
}

/// A secret that all gateways and replicas of a fleet know.
#[derive(Clone)]
pub struct FleetKey(Vec<u8>);

impl std::fmt::Debug for FleetKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FleetKey(..)")
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Dialer,
    Listener,
}

impl Side {
    fn name(self) -> &'static [u8] {
        match self {
            Self::Dialer => b"baton migration 1 dialer",
            Self::Listener => b"baton migration 1 listener",
        }
    }

    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::Dialer => Self::Listener,
            Self::Listener => Self::Dialer,
        }
    }
}

/// Both hellos as they were sent, lengths included.
#[derive(Debug, Clone)]
pub struct Transcript {
    pub dialer: Vec<u8>,
    pub listener: Vec<u8>,
}

impl FleetKey {
    pub fn new(secret: impl Into<Vec<u8>>) -> Self {
        Self(secret.into())
    }

    /// What `side` sends to show that it knows the key.
    pub fn proof(&self, side: Side, transcript: &Transcript) -> [u8; PROOF_BYTES] {
        self.mac(side, transcript).finalize().into_bytes().into()
    }

    pub fn check(&self, side: Side, transcript: &Transcript, proof: &[u8; PROOF_BYTES]) -> Result<(), HelloError> {
        self.mac(side, transcript).verify_slice(proof).map_err(|_| HelloError::WrongKey)
    }

    /// The key of the frames that `sender` sends.
    pub fn frame_key(&self, sender: Side, transcript: &Transcript) -> FrameKey {
        let salt = [transcript.dialer.as_slice(), &transcript.listener].concat();
        let mut key = [0; 32];
        Hkdf::<Sha256>::new(Some(&salt), &self.0).expand(sender.name(), &mut key).expect("32 bytes can be had");
        FrameKey::new(&key)
    }

    fn mac(&self, side: Side, transcript: &Transcript) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("any length is a key");
        mac.update(side.name());
        mac.update(&transcript.dialer);
        mac.update(&transcript.listener);
        mac
    }
}
