use baton_cost::StepCoefficients;
use baton_units::{BlockSize, Blocks, Incarnation, ReplicaId, Time, Tokens};
use serde::{Deserialize, Serialize};

use crate::Trust;

/// What a replica says of itself when it joins.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ReplicaSpec {
    pub id: ReplicaId,
    pub incarnation: Incarnation,
    pub block_size: BlockSize,
    pub kv_blocks: Blocks,
    pub max_model_len: Tokens,
    /// Most sequences in one step.
    pub max_running: u32,
    pub discipline: Discipline,
    pub step: StepCoefficients,
}

impl ReplicaSpec {
    /// Prefill of a prompt after a hit, as the engine runs it.
    pub fn prefill_ms(&self, prompt: Tokens, hit: Tokens) -> f64 {
        let (new, step) = (prompt.saturating_sub(hit), &self.step);
        match self.discipline {
            Discipline::Serial => step.prefill_ms(new, hit),
            Discipline::Chunked { budget } => step.prefill_chunked_ms(new, hit, budget),
            Discipline::Interleaved { budget, long_chunk } => {
                step.prefill_chunked_ms(new, hit, if new > long_chunk { long_chunk } else { budget })
            }
        }
    }
}

/// How an engine shares its time between prompts; it decides what a wait and a prefill cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Discipline {
    /// One whole prompt at a time, in order; decoding goes on beside it.
    Serial,
    /// Steps of at most `budget` tokens, prompts in order, decodes in the same steps.
    Chunked { budget: Tokens },
    /// As `Chunked`, but one long prompt gets at most `long_chunk` tokens of a step and shorter ones share the rest.
    Interleaved { budget: Tokens, long_chunk: Tokens },
}

/// Whether new requests may go to a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReplicaState {
    Ready,
    /// Finishes what it has.
    Draining,
    /// Did not answer lately; what it has may still end well.
    Suspect,
    Dead,
}

/// A replica's word on its load; a belief with an age.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadReport {
    pub taken_at: Time,
    pub waiting: u32,
    pub running: u32,
    /// Free and reclaimable.
    pub kv_blocks_free: Blocks,
    /// Prompt tokens of waiting and running requests that are not computed yet.
    pub prefill_backlog: Tokens,
}

/// One replica as the router sees it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ReplicaStatus {
    pub id: ReplicaId,
    pub incarnation: Incarnation,
    pub state: ReplicaState,
    /// Wait before a new prompt would start, by the ledger, predicted at the time of the call.
    pub queue_ms: f64,
    /// Requests sent and not ended.
    pub in_flight: u32,
    /// Of these, those without a first token.
    pub prefilling: u32,
    pub kv_blocks_total: Blocks,
    /// Blocks not pinned by requests in flight, by the ledger and the latest report.
    pub kv_blocks_free: Blocks,
    /// Blocks whose content is believed to be on the replica.
    pub kv_blocks_indexed: u32,
    /// The index lacks events of this replica.
    pub index_doubtful: bool,
    /// How far its events are believed, by what its engine reports of hits.
    pub index_trust: Trust,
    pub report: Option<LoadReport>,
}
