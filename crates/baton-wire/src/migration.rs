//! The Baton migration protocol on the wire, version 1 (`docs/migration-protocol.md`).
//!
//! Two kinds of connection: control, between a gateway and a replica, and KV, between the source and the target of one attempt. Both
//! begin with a handshake ([`handshake`]) and then carry frames ([`Sealer`], [`Opener`]) whose bodies are `MessagePack` arrays
//! ([`ControlFrame`], [`KvFrame`]). What the messages mean is `baton-migration`'s.

mod body;
mod control;
mod entry;
mod frame;
pub mod handshake;
mod kv;
mod run;

pub use control::{ControlFrame, Copied, Heartbeat, PrefixCopied};
pub use entry::{FinishReason, OutputEntry, TokenLogprobs};
pub use frame::{FrameError, FrameKey, HEADER_BYTES, Header, MAC_BYTES, Opened, Opener, Sealer};
pub use kv::{BlockHeader, HeldBlocks, KvFrame, KvPlan, Refusal};
pub use run::{MoveTo, RunEnds, RunProgress, RunRequest, RunSampling};

#[cfg(test)]
mod tests;
