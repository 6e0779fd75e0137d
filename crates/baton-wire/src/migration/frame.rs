use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// Length, kind, flags and sequence.
pub const HEADER_BYTES: usize = 16;
pub const MAC_BYTES: usize = 16;
/// The largest body that is read: a KV block and its header, or the tokens of a long request.
const BODY_MAX: usize = 64 << 20;

/// ```text
/// u32 body length | u16 kind | u16 flags, zero | u64 sequence, from 1 | body | 16 bytes of MAC where the connection has a key
/// ```
/// All little-endian. The MAC is the first half of HMAC-SHA-256 over header and body, without what [`Sealer::seal_around`] leaves out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    pub body: u32,
    pub kind: u16,
    pub sequence: u64,
}

/// Authenticates the frames of one direction of one connection.
#[derive(Clone)]
pub struct FrameKey(Hmac<Sha256>);

impl std::fmt::Debug for FrameKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FrameKey(..)")
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("a frame of {0} bytes is longer than the {BODY_MAX} that are read")]
    TooLong(u32),
    #[error("frame {got} came where {wanted} was due: frames were lost or repeated on the connection")]
    OutOfOrder { got: u64, wanted: u64 },
    #[error("frame {0} is not authentic: the fleet keys differ, or it was altered")]
    NotAuthentic(u64),
    #[error("a frame of kind {0:#x} is not known here")]
    UnknownKind(u16),
    #[error("a frame of kind {kind:#x} has a body that cannot be read: {why}")]
    Malformed { kind: u16, why: String },
}

impl FrameKey {
    pub fn new(key: &[u8; 32]) -> Self {
        Self(Hmac::new_from_slice(key).expect("any length is a key"))
    }

    fn mac(&self, parts: &[&[u8]]) -> [u8; MAC_BYTES] {
        let mut mac = self.0.clone();
        for part in parts {
            mac.update(part);
        }
        let full = mac.finalize().into_bytes();
        full[..MAC_BYTES].try_into().expect("it is longer")
    }
}

/// Writes the frames of one direction.
#[derive(Debug)]
pub struct Sealer {
    key: Option<FrameKey>,
    sequence: u64,
}

impl Sealer {
    pub fn new(key: Option<FrameKey>) -> Self {
        Self { key, sequence: 0 }
    }

    /// Appends a frame to `out`.
    pub fn seal(&mut self, kind: u16, body: &[u8], out: &mut Vec<u8>) {
        let header = self.header(kind, body.len());
        out.extend_from_slice(&header);
        out.extend_from_slice(body);
        if let Some(key) = &self.key {
            out.extend_from_slice(&key.mac(&[&header, body]));
        }
    }

    /// A frame whose body is `head` and then `payload` bytes, which go out from where they lie. What is returned goes before them and
    /// after them. The MAC leaves the payload out: `head` must hold a checksum of it.
    pub fn seal_around(&mut self, kind: u16, head: &[u8], payload: usize) -> (Vec<u8>, Option<[u8; MAC_BYTES]>) {
        let mut before = self.header(kind, head.len() + payload).to_vec();
        before.extend_from_slice(head);
        let mac = self.key.as_ref().map(|key| key.mac(&[&before]));
        (before, mac)
    }

    fn header(&mut self, kind: u16, body: usize) -> [u8; HEADER_BYTES] {
        self.sequence += 1;
        let mut header = [0; HEADER_BYTES];
        header[..4].copy_from_slice(&u32::try_from(body).expect("bodies are below 4 GiB").to_le_bytes());
        header[4..6].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&self.sequence.to_le_bytes());
        header
    }
}

/// Reads the frames of one direction.
#[derive(Debug)]
pub struct Opener {
    key: Option<FrameKey>,
    sequence: u64,
}

/// A frame that was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opened<'a> {
    pub kind: u16,
    pub body: &'a [u8],
    /// Bytes of the buffer that it took.
    pub taken: usize,
}

impl Opener {
    pub fn new(key: Option<FrameKey>) -> Self {
        Self { key, sequence: 0 }
    }

    /// Bytes after the body.
    pub fn trailer_bytes(&self) -> usize {
        if self.key.is_some() { MAC_BYTES } else { 0 }
    }

    /// The header of the next frame: read its body and trailer, then call [`Self::check`].
    pub fn header(&mut self, bytes: &[u8; HEADER_BYTES]) -> Result<Header, FrameError> {
        let body = u32::from_le_bytes(bytes[..4].try_into().expect("four bytes"));
        let kind = u16::from_le_bytes(bytes[4..6].try_into().expect("two bytes"));
        let sequence = u64::from_le_bytes(bytes[8..].try_into().expect("eight bytes"));
        if body as usize > BODY_MAX {
            return Err(FrameError::TooLong(body));
        }
        self.sequence += 1;
        if sequence != self.sequence {
            return Err(FrameError::OutOfOrder { got: sequence, wanted: self.sequence });
        }
        Ok(Header { body, kind, sequence })
    }

    /// `covered`: the part of the body that the MAC covers, which is all of it but a payload.
    pub fn check(&self, header: &[u8; HEADER_BYTES], covered: &[u8], trailer: &[u8]) -> Result<(), FrameError> {
        let Some(key) = &self.key else { return Ok(()) };
        let wanted = key.mac(&[header, covered]);
        // In a time that does not depend on where they differ.
        let differs = wanted.iter().zip(trailer).fold(0, |all, (a, b)| all | (a ^ b));
        let authentic = trailer.len() == MAC_BYTES && differs == 0;
        if authentic { Ok(()) } else { Err(FrameError::NotAuthentic(self.sequence)) }
    }

    /// The next frame of `buffer`, if all of it is there and none of it is a payload outside of the MAC.
    pub fn open<'a>(&mut self, buffer: &'a [u8]) -> Result<Option<Opened<'a>>, FrameError> {
        let Some(header) = buffer.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let body = u32::from_le_bytes(header[..4].try_into().expect("four bytes"));
        if body as usize > BODY_MAX {
            return Err(FrameError::TooLong(body));
        }
        let (begin, end) = (HEADER_BYTES, HEADER_BYTES + body as usize);
        let whole = end + self.trailer_bytes();
        if buffer.len() < whole {
            return Ok(None);
        }
        let Header { kind, .. } = self.header(header)?;
        self.check(header, &buffer[begin..end], &buffer[end..whole])?;
        Ok(Some(Opened { kind, body: &buffer[begin..end], taken: whole }))
    }
}
