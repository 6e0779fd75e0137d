//! A connection byte by byte, to say what no right party says.

use std::{sync::Arc, time::Duration};

use baton_wire::migration::{
    Sealer,
    handshake::{FleetKey, Hello, PROOF_BYTES, Role, Side, Transcript, VERSION},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::{
    suite::{Suite, random},
    verdict::{Checked, Unmet, failed},
};

/// More than a replica says to a gateway that it refuses.
const READ_MAX: u64 = 1 << 20;

pub(crate) struct Raw {
    stream: TcpStream,
    patience: Duration,
    sealer: Sealer,
}

/// As a gateway that nobody has seen before.
pub(crate) fn gateway_hello() -> Checked<Hello> {
    let (half, nonce) = ([random()?, random()?].map(u64::to_le_bytes).concat(), [random()?, random()?].map(u64::to_le_bytes).concat());
    let nonce: Vec<u8> = half.into_iter().chain(nonce).collect();
    Ok(Hello {
        version: VERSION,
        role: Role::Gateway,
        id: random()?,
        incarnation: 1,
        numerics_id: String::new(),
        kv_layout: None,
        freeze: None,
        kv_address: None,
        nonce: nonce.try_into().expect("four times eight bytes"),
    })
}

impl Raw {
    pub(crate) async fn connect(suite: &Suite, address: &str) -> Checked<Self> {
        let connected = tokio::time::timeout(suite.patience(), TcpStream::connect(address)).await;
        let Ok(stream) = connected else { return failed(format!("{address} cannot be reached")) };
        let stream = stream?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, patience: suite.patience(), sealer: Sealer::new(None) })
    }

    /// Introduces itself as `hello`, with the right key, and reads the replica's.
    pub(crate) async fn introduced(suite: &Suite, address: &str, hello: &Hello) -> Checked<Self> {
        let mut raw = Self::connect(suite, address).await?;
        let ours = hello.to_bytes();
        raw.send(&ours).await?;
        let theirs = raw.hello_bytes().await?;
        if let Some(key) = &suite.options.fleet_key {
            let transcript = Transcript { dialer: ours, listener: theirs };
            raw.prove(key, &transcript).await?;
            raw.sealer = Sealer::new(Some(key.frame_key(Side::Dialer, &transcript)));
        }
        Ok(raw)
    }

    async fn prove(&mut self, key: &Arc<FleetKey>, transcript: &Transcript) -> Checked {
        self.send(&key.proof(Side::Dialer, transcript)).await?;
        let mut proof = [0; PROOF_BYTES];
        self.read_exact(&mut proof, "the replica's proof").await?;
        key.check(Side::Listener, transcript, &proof).map_err(|error| Unmet::Failed(error.to_string()))
    }

    pub(crate) async fn send(&mut self, bytes: &[u8]) -> Checked {
        Ok(self.stream.write_all(bytes).await?)
    }

    /// A right frame of this kind.
    pub(crate) async fn frame(&mut self, kind: u16, body: &[u8]) -> Checked {
        let bytes = self.sealed(kind, body);
        self.send(&bytes).await
    }

    /// As it would be sent next.
    pub(crate) fn sealed(&mut self, kind: u16, body: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.sealer.seal(kind, body, &mut bytes);
        bytes
    }

    /// The other side's hello as it was sent.
    pub(crate) async fn hello_bytes(&mut self) -> Checked<Vec<u8>> {
        let mut length = [0; 4];
        self.read_exact(&mut length, "the length of the replica's hello").await?;
        let mut bytes = length.to_vec();
        bytes.resize(4 + Hello::body_bytes(length).map_err(|error| Unmet::Failed(error.to_string()))?, 0);
        self.read_exact(&mut bytes[4..], "the replica's hello").await?;
        Ok(bytes)
    }

    async fn read_exact(&mut self, bytes: &mut [u8], what: &str) -> Checked {
        match tokio::time::timeout(self.patience, self.stream.read_exact(bytes)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => failed(format!("{what} was due: {error}")),
            Err(_) => failed(format!("{what} did not come within {:?}", self.patience)),
        }
    }

    /// The replica closes the connection. Returns what it said before.
    pub(crate) async fn ended(mut self) -> Checked<Vec<u8>> {
        let mut said = Vec::new();
        let mut rest = (&mut self.stream).take(READ_MAX);
        match tokio::time::timeout(self.patience, rest.read_to_end(&mut said)).await {
            // A reset says the same, where something that was sent is not read any more.
            Ok(_) => Ok(said),
            Err(_) => failed("the connection stays, and should have ended"),
        }
    }
}
