use baton_migration::{Place, RequestName, Tag};
use serde::{Deserialize, Serialize};

use super::{
    FrameError, OutputEntry, Sealer,
    body::{body, name, place, read, request, wire_place},
};

/// What a source will bring, so that its target can take room and references.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvPlan {
    /// Of the prompt and the output so far, in order; the target compares them where it counts a block as held.
    pub tokens: Vec<u32>,
    /// Names of the full blocks among them, in order.
    pub keys: Vec<u64>,
    /// Blocks that the request has, the last one partly filled.
    pub blocks: u32,
    /// What the target must know to run it, as in the frame that starts a request.
    pub request: Vec<u8>,
}

/// Of the blocks in a plan, those that the target has already and keeps for the attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldBlocks {
    /// The first blocks, by number: a held block has held parents.
    pub held: u32,
}

/// Why a target takes nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// The gateway announced no such attempt here.
    #[error("nobody announced this attempt")]
    NotExpected,
    #[error("it needs {needed} blocks, and {free} can be had")]
    NoRoom { needed: u32, free: u32 },
    #[error("the two replicas do not compute the same bits: {0}")]
    OtherNumerics(String),
    #[error("{0} cannot be moved exactly")]
    CannotTravel(String),
    #[error("{0}")]
    Other(String),
}

/// Goes before the bytes of one KV block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockHeader {
    /// Place in the request's block table.
    pub index: u32,
    /// Tokens whose KV is in it.
    pub tokens: u32,
    /// XXH3-64 of the bytes.
    pub checksum: u64,
}

/// A frame between the source and the target of one attempt. The connection is opened for it and serves no other.
#[derive(Debug, Clone, PartialEq)]
pub enum KvFrame {
    /// Source, first.
    Open {
        request: RequestName,
        attempt: Tag,
        source: Place,
        target: Place,
        /// As the gateway told both sides for this attempt.
        nonce: [u8; 16],
    },
    Prepare(KvPlan),
    /// Target: what need not travel, and how many bytes may.
    Have {
        blocks: HeldBlocks,
        credit: u64,
    },
    Refuse(Refusal),
    /// Target: so many more bytes may travel.
    Credit {
        bytes: u64,
    },
    /// Source; the block's bytes follow the header in the same frame.
    Block(BlockHeader),
    /// Source, frozen: all that was computed. `plan` is of the whole request; the last blocks came before it.
    State {
        entries: Vec<OutputEntry>,
        plan: KvPlan,
    },
    /// Target: all is here and checked, with so many entries.
    Prepared {
        entries: u32,
    },
    /// Source, in place of `Prepare`: a cached prefix comes, and nothing is to run. All its blocks are full, and of what to run model,
    /// adapter and salt count.
    Prefix(KvPlan),
    /// Source: all blocks of the prefix that the target lacked went before.
    PrefixSent,
    /// Target: so many leading blocks of the prefix are cached here.
    Installed {
        blocks: u32,
    },
    /// Either.
    Abort {
        why: String,
    },
}

mod kind {
    pub(super) const OPEN: u16 = 0x40;
    pub(super) const PREPARE: u16 = 0x41;
    pub(super) const BLOCK: u16 = 0x42;
    pub(super) const STATE: u16 = 0x43;
    pub(super) const ABORT: u16 = 0x44;
    pub(super) const PREFIX: u16 = 0x45;
    pub(super) const PREFIX_SENT: u16 = 0x46;
    pub(super) const HAVE: u16 = 0x50;
    pub(super) const REFUSE: u16 = 0x51;
    pub(super) const CREDIT: u16 = 0x52;
    pub(super) const PREPARED: u16 = 0x53;
    pub(super) const INSTALLED: u16 = 0x54;
}

impl KvFrame {
    /// Bytes of a block frame's body before the block's own: fixed, so that the rest can be read to where it will lie.
    pub const BLOCK_HEADER_BYTES: usize = 16;

    pub fn is_block(kind: u16) -> bool {
        kind == kind::BLOCK
    }

    /// Appends the frame to `out`; a block goes by [`Self::seal_block`].
    pub fn seal(&self, sealer: &mut Sealer, out: &mut Vec<u8>) {
        let (kind, body) = match self {
            Self::Open { request, attempt, source, target, nonce } => {
                (kind::OPEN, body(&(name(*request), attempt.0, wire_place(*source), wire_place(*target), nonce)))
            }
            Self::Prepare(plan) => (kind::PREPARE, body(plan)),
            Self::Have { blocks, credit } => (kind::HAVE, body(&(blocks, credit))),
            Self::Refuse(refusal) => (kind::REFUSE, body(refusal)),
            Self::Credit { bytes } => (kind::CREDIT, body(&(bytes,))),
            Self::Block(header) => (kind::BLOCK, header.to_bytes().to_vec()),
            Self::State { entries, plan } => (kind::STATE, body(&(entries, plan))),
            Self::Prepared { entries } => (kind::PREPARED, body(&(entries,))),
            Self::Abort { why } => (kind::ABORT, body(&(why,))),
            Self::Prefix(plan) => (kind::PREFIX, body(plan)),
            Self::PrefixSent => (kind::PREFIX_SENT, body(&())),
            Self::Installed { blocks } => (kind::INSTALLED, body(&(blocks,))),
        };
        sealer.seal(kind, &body, out);
    }

    /// What goes before and after the `bytes` of a block, which are sent from where they lie.
    pub fn seal_block(header: BlockHeader, bytes: usize, sealer: &mut Sealer) -> (Vec<u8>, Option<[u8; super::MAC_BYTES]>) {
        sealer.seal_around(kind::BLOCK, &header.to_bytes(), bytes)
    }

    /// `body` of a block frame is its header alone.
    pub fn decode(kind: u16, body: &[u8]) -> Result<Self, FrameError> {
        Ok(match kind {
            kind::OPEN => {
                let (named, attempt, source, target, nonce) = read(kind, body)?;
                Self::Open { request: request(named), attempt: Tag(attempt), source: place(source), target: place(target), nonce }
            }
            kind::PREPARE => Self::Prepare(read(kind, body)?),
            kind::HAVE => {
                let (blocks, credit) = read(kind, body)?;
                Self::Have { blocks, credit }
            }
            kind::REFUSE => Self::Refuse(read(kind, body)?),
            kind::CREDIT => {
                let (bytes,) = read(kind, body)?;
                Self::Credit { bytes }
            }
            kind::BLOCK => {
                let bytes = body.try_into().map_err(|_| FrameError::Malformed { kind, why: "a block's header has 16 bytes".to_owned() })?;
                Self::Block(BlockHeader::from_bytes(bytes))
            }
            kind::STATE => {
                let (entries, plan) = read(kind, body)?;
                Self::State { entries, plan }
            }
            kind::PREPARED => {
                let (entries,) = read(kind, body)?;
                Self::Prepared { entries }
            }
            kind::ABORT => {
                let (why,) = read(kind, body)?;
                Self::Abort { why }
            }
            kind::PREFIX => Self::Prefix(read(kind, body)?),
            kind::PREFIX_SENT => Self::PrefixSent,
            kind::INSTALLED => {
                let (blocks,) = read(kind, body)?;
                Self::Installed { blocks }
            }
            _ => return Err(FrameError::UnknownKind(kind)),
        })
    }
}

impl BlockHeader {
    fn to_bytes(self) -> [u8; KvFrame::BLOCK_HEADER_BYTES] {
        let mut bytes = [0; KvFrame::BLOCK_HEADER_BYTES];
        bytes[..4].copy_from_slice(&self.index.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.tokens.to_le_bytes());
        bytes[8..].copy_from_slice(&self.checksum.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; KvFrame::BLOCK_HEADER_BYTES]) -> Self {
        Self {
            index: u32::from_le_bytes(bytes[..4].try_into().expect("four bytes")),
            tokens: u32::from_le_bytes(bytes[4..8].try_into().expect("four bytes")),
            checksum: u64::from_le_bytes(bytes[8..].try_into().expect("eight bytes")),
        }
    }
}
