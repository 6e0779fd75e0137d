//! Traces: what was asked of a fleet and when, and which prompts begin alike; never any text.
//!
//! [`Trace::read`] takes the public forms (see [`Format`]). A prompt is a length and the names of its blocks: two prompts begin with the same
//! tokens as far as their names are the same. This crate plays nothing; it answers what a trace alone can answer, as
//! [`hit_rate`](curve::hit_rate).

pub mod curve;
mod format;
mod read;

use std::ops::Range;

use baton_units::{BlockSize, Time, Tokens};

pub use self::{format::Format, read::TraceError};

/// Requests in order of arrival.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    format: Format,
    requests: Vec<TraceRequest>,
    /// Of all requests, one after the other.
    blocks: Vec<u32>,
    distinct: u32,
}

/// One request of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceRequest {
    /// Since the trace's first one.
    pub at: Time,
    pub prompt: Tokens,
    pub output: Tokens,
    /// Which conversation it belongs to, where the trace tells.
    pub session: Option<u32>,
    blocks: Range<usize>,
}

impl Trace {
    /// Where the trace is from.
    pub fn format(&self) -> Format {
        self.format
    }

    pub fn requests(&self) -> &[TraceRequest] {
        &self.requests
    }

    /// Names of a prompt's blocks, the last of which may be in part empty: all below [`Self::distinct_blocks`]. None where the trace does not
    /// tell what prompts share.
    pub fn blocks(&self, request: &TraceRequest) -> &[u32] {
        &self.blocks[request.blocks.clone()]
    }

    /// How many blocks have a name.
    pub fn distinct_blocks(&self) -> u32 {
        self.distinct
    }

    /// Tokens of a block; `None` where the trace does not tell what prompts share.
    pub fn block_size(&self) -> Option<BlockSize> {
        self.format.block_size()
    }

    /// Tokens of all prompts.
    pub fn prompt_tokens(&self) -> u64 {
        self.requests.iter().map(|request| u64::from(request.prompt.0)).sum()
    }
}
