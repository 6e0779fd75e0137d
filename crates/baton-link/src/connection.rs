use std::{
    io::{ErrorKind, IoSlice},
    sync::Arc,
    time::Duration,
};

use baton_migration::GatewayName;
use baton_wire::migration::{
    BlockHeader, ControlFrame, FrameError, HEADER_BYTES, KvFrame, MAC_BYTES, Opener, Sealer,
    handshake::{FleetKey, Hello, HelloError, PROOF_BYTES, Role, Side, Transcript, VERSION},
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader, BufWriter};

use xxhash_rust::xxh3::Xxh3Default;

use crate::stream::{ReadHalf, Stream, WriteHalf};

/// Whoever connects and does not say who it is within this is not waited for.
const PATIENCE: Duration = Duration::from_secs(10);

/// A payload is read and looked at in pieces that the processor's cache holds.
const PIECE: usize = 128 << 10;

/// What a process says of itself and demands of the other side.
#[derive(Debug, Clone)]
pub struct Identity {
    /// Its nonce is drawn anew for each connection, and its role is that of the connection.
    pub hello: Hello,
    /// With a key, both sides prove that they know it, and all frames are authentic.
    pub fleet_key: Option<Arc<FleetKey>>,
}

/// A connection whose sides know each other.
#[derive(Debug)]
pub struct Connection {
    /// What the other side said of itself. Without a fleet key nothing proves it.
    pub hello: Hello,
    pub reader: FrameReader,
    pub writer: FrameWriter,
}

/// Why there is no connection, or why one ended.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    #[error("{address} cannot be reached: {error}")]
    Unreachable { address: String, error: std::io::Error },
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error(transparent)]
    Hello(#[from] HelloError),
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("the other side is a {0:?}, which has nothing to do here")]
    Role(Role),
    #[error("the other side did not introduce itself within {0:?}")]
    Silent(Duration),
    #[error("the system gives no random numbers: {0}")]
    Random(getrandom::Error),
}

/// A frame as it came.
#[derive(Debug)]
pub struct Raw<P = Vec<u8>> {
    pub kind: u16,
    /// Of a block frame, its header alone.
    pub body: Vec<u8>,
    /// The bytes of a block.
    pub payload: P,
    /// XXH3 of the payload, to be compared with the header's; 0 where there is none.
    pub checksum: u64,
}

/// The frames that come.
#[derive(Debug)]
pub struct FrameReader {
    stream: BufReader<ReadHalf>,
    opener: Opener,
}

/// Where frames go out.
#[derive(Debug)]
pub struct FrameWriter {
    stream: BufWriter<WriteHalf>,
    sealer: Sealer,
    sealed: Vec<u8>,
}

/// Connects to `host:port`, over a Unix socket where a [`Listener`](crate::Listener) on this host has one for it, and introduces both sides to each other, within `timeout` for all of it. `role` is what this side is on the
/// connection; the other one must be a replica.
pub async fn dial(address: &str, identity: &Identity, role: Role, timeout: Duration) -> Result<Connection, ConnectionError> {
    let connect = async {
        let connected = Stream::connect(address).await;
        let stream = connected.map_err(|error| ConnectionError::Unreachable { address: address.to_owned(), error })?;
        identity.introduce(stream, Side::Dialer, role).await
    };
    let connection = tokio::time::timeout(timeout, connect).await.map_err(|_| ConnectionError::Silent(timeout))??;
    if connection.hello.role == Role::Replica { Ok(connection) } else { Err(ConnectionError::Role(connection.hello.role)) }
}

impl Identity {
    /// A gateway, which computes nothing and takes no KV.
    pub fn of_gateway(name: GatewayName, fleet_key: Option<Arc<FleetKey>>) -> Self {
        let hello = Hello {
            version: VERSION,
            role: Role::Gateway,
            id: name.id,
            incarnation: name.incarnation,
            numerics_id: String::new(),
            kv_layout: None,
            freeze: None,
            kv_address: None,
            nonce: [0; 32],
        };
        Self { hello, fleet_key }
    }

    /// As a replica, introduces itself to who connected, which must be a `wanted`, and is waited for for 10 s.
    pub async fn accept(&self, stream: impl Into<Stream>, wanted: Role) -> Result<Connection, ConnectionError> {
        let introduced = tokio::time::timeout(PATIENCE, self.introduce(stream.into(), Side::Listener, Role::Replica));
        let connection = introduced.await.map_err(|_| ConnectionError::Silent(PATIENCE))??;
        if connection.hello.role == wanted { Ok(connection) } else { Err(ConnectionError::Role(connection.hello.role)) }
    }

    async fn introduce(&self, stream: Stream, side: Side, role: Role) -> Result<Connection, ConnectionError> {
        let (read, write) = stream.split()?;
        let (mut read, mut write) = (BufReader::new(read), BufWriter::new(write));
        let mut hello = Hello { role, ..self.hello.clone() };
        getrandom::fill(&mut hello.nonce).map_err(ConnectionError::Random)?;
        let ours = hello.to_bytes();
        // The dialer speaks first, in both exchanges.
        if side == Side::Dialer {
            send(&mut write, &ours).await?;
        }
        let theirs = read_hello(&mut read).await?;
        if side == Side::Listener {
            send(&mut write, &ours).await?;
        }
        let other = Hello::from_body(&theirs[4..])?;
        let transcript = match side {
            Side::Dialer => Transcript { dialer: ours, listener: theirs },
            Side::Listener => Transcript { dialer: theirs, listener: ours },
        };
        let keys = match &self.fleet_key {
            None => (None, None),
            Some(key) => {
                if side == Side::Dialer {
                    send(&mut write, &key.proof(side, &transcript)).await?;
                }
                let mut proof = [0; PROOF_BYTES];
                read.read_exact(&mut proof).await?;
                key.check(side.other(), &transcript, &proof)?;
                if side == Side::Listener {
                    send(&mut write, &key.proof(side, &transcript)).await?;
                }
                (Some(key.frame_key(side, &transcript)), Some(key.frame_key(side.other(), &transcript)))
            }
        };
        let writer = FrameWriter { stream: write, sealer: Sealer::new(keys.0), sealed: Vec::new() };
        Ok(Connection { hello: other, reader: FrameReader { stream: read, opener: Opener::new(keys.1) }, writer })
    }
}

async fn send(write: &mut BufWriter<WriteHalf>, bytes: &[u8]) -> std::io::Result<()> {
    write.write_all(bytes).await?;
    write.flush().await
}

/// As it was sent, its length included.
async fn read_hello(read: &mut BufReader<ReadHalf>) -> Result<Vec<u8>, ConnectionError> {
    let mut length = [0; 4];
    read.read_exact(&mut length).await?;
    let mut bytes = length.to_vec();
    bytes.resize(4 + Hello::body_bytes(length)?, 0);
    read.read_exact(&mut bytes[4..]).await?;
    Ok(bytes)
}

impl FrameReader {
    /// The next frame; an end of the connection is an error of kind `UnexpectedEof`. Must not be dropped before it returns, unless
    /// nothing more is read.
    pub async fn read(&mut self) -> Result<Raw, ConnectionError> {
        self.read_to(|bytes| vec![0; bytes]).await
    }

    /// As [`Self::read`], a block's bytes to where they are to lie: to what `place` gives for their count, which must have as many. For a
    /// frame without a block it is asked for none.
    pub async fn read_to<P: AsMut<[u8]>>(&mut self, place: impl FnOnce(usize) -> P) -> Result<Raw<P>, ConnectionError> {
        let mut head = [0; HEADER_BYTES];
        self.stream.read_exact(&mut head).await?;
        let header = self.opener.header(&head)?;
        let length = header.body as usize;
        let covered = if KvFrame::is_block(header.kind) { length.min(KvFrame::BLOCK_HEADER_BYTES) } else { length };
        let (mut body, mut payload, mut trailer) = (vec![0; covered], place(length - covered), [0; MAC_BYTES]);
        self.stream.read_exact(&mut body).await?;
        let checksum = if covered < length { self.read_payload(payload.as_mut()).await? } else { 0 };
        let trailer = &mut trailer[..self.opener.trailer_bytes()];
        self.stream.read_exact(trailer).await?;
        self.opener.check(&head, &body, trailer)?;
        Ok(Raw { kind: header.kind, body, payload, checksum })
    }

    /// Fills it, and gives its XXH3.
    async fn read_payload(&mut self, payload: &mut [u8]) -> std::io::Result<u64> {
        let mut sum = Xxh3Default::new();
        for piece in payload.chunks_mut(PIECE) {
            self.stream.read_exact(piece).await?;
            sum.update(piece);
        }
        Ok(sum.digest())
    }

    /// The next frame of a control connection; as [`Self::read`].
    pub async fn control(&mut self) -> Result<ControlFrame, ConnectionError> {
        let raw = self.read().await?;
        Ok(ControlFrame::decode(raw.kind, &raw.body)?)
    }
}

impl FrameWriter {
    /// Until [`Self::flush`] it may lie in a buffer.
    pub async fn control(&mut self, frame: &ControlFrame) -> std::io::Result<()> {
        self.sealed.clear();
        frame.seal(&mut self.sealer, &mut self.sealed);
        self.stream.write_all(&self.sealed).await
    }

    /// Sends the frame at once.
    pub async fn kv(&mut self, frame: &KvFrame) -> std::io::Result<()> {
        self.sealed.clear();
        frame.seal(&mut self.sealer, &mut self.sealed);
        self.stream.write_all(&self.sealed).await?;
        self.stream.flush().await
    }

    /// Sends the bytes of blocks at once from where they lie, each behind its header: as few writes as the system takes.
    pub async fn blocks(&mut self, blocks: &[(BlockHeader, &[u8])]) -> std::io::Result<()> {
        self.stream.flush().await?;
        let seal = |&(header, bytes): &(BlockHeader, &[u8])| KvFrame::seal_block(header, bytes.len(), &mut self.sealer);
        let sealed: Vec<_> = blocks.iter().map(seal).collect();
        let mut slices: Vec<IoSlice<'_>> = Vec::with_capacity(3 * blocks.len());
        for ((before, mac), (_, bytes)) in sealed.iter().zip(blocks) {
            slices.extend([IoSlice::new(before), IoSlice::new(bytes)]);
            slices.extend(mac.as_ref().map(|mac| IoSlice::new(mac)));
        }
        let mut left = &mut slices[..];
        while !left.is_empty() {
            match self.stream.get_mut().write_vectored(left).await? {
                0 => return Err(ErrorKind::WriteZero.into()),
                written => IoSlice::advance_slices(&mut left, written),
            }
        }
        Ok(())
    }

    /// Sends what lies in the buffer.
    pub async fn flush(&mut self) -> std::io::Result<()> {
        self.stream.flush().await
    }
    /// Sends what lies in the buffer, and then that nothing more comes.
    pub async fn shutdown(&mut self) -> std::io::Result<()> {
        self.stream.shutdown().await
    }
}
