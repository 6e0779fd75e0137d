//! What became of moves, for operators.

use std::{collections::VecDeque, time::SystemTime};

use baton_units::{ReplicaId, RequestId, Tokens};
use serde::Serialize;

/// How a move ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum MoveOutcome {
    /// The target goes on, with the KV.
    Moved,
    /// The source goes on.
    Stayed,
    /// Another replica goes on from the tokens, since the one that ran it is lost.
    Continued,
    /// The request ended first.
    Ended,
}

impl MoveOutcome {
    /// The request is at its target.
    pub(super) fn is_there(self) -> bool {
        matches!(self, Self::Moved | Self::Continued)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Moved => "moved",
            Self::Stayed => "stayed",
            Self::Continued => "continued",
            Self::Ended => "ended",
        }
    }
}

/// One move of one sequence, from its decision to the first token after it.
#[derive(Debug, Clone)]
pub(crate) struct MoveRecord {
    pub(crate) at: SystemTime,
    pub(crate) request: RequestId,
    /// Of the request's choices.
    pub(crate) choice: u32,
    pub(crate) from: ReplicaId,
    pub(crate) to: ReplicaId,
    /// One word, as a label.
    pub(crate) kind: &'static str,
    /// In words and numbers.
    pub(crate) reason: String,
    pub(crate) outcome: MoveOutcome,
    /// Why it did not move, where somebody said.
    pub(crate) why: Option<String>,
    /// Prompt and output when it was decided.
    pub(crate) tokens: Tokens,
    pub(crate) bytes_sent: u64,
    pub(crate) blocks_already_held: u32,
    pub(crate) rounds: u32,
    /// From its beginning at the source until the target had all.
    pub(crate) copied_ms: Option<f64>,
    /// From the freeze at the source until it asked to be followed; none where the source did not say.
    pub(crate) compute_gap_ms: Option<f64>,
    /// Between the tokens before and after it, as they left the gateway.
    pub(crate) gap_ms: Option<f64>,
    /// From the decision to the first token after it, or to its end.
    pub(crate) took_ms: f64,
    /// What it was expected to take.
    pub(crate) expected_ms: Option<f64>,
}

impl MoveRecord {
    /// Of a move that begins now, of which nothing came yet; one that nobody decided goes on from its tokens.
    pub(crate) fn begun(
        request: RequestId,
        choice: u32,
        (from, to): (ReplicaId, ReplicaId),
        kind: &'static str,
        reason: String,
        tokens: Tokens,
    ) -> Self {
        Self {
            at: SystemTime::now(),
            request,
            choice,
            from,
            to,
            kind,
            reason,
            outcome: MoveOutcome::Continued,
            why: None,
            tokens,
            bytes_sent: 0,
            blocks_already_held: 0,
            rounds: 0,
            copied_ms: None,
            compute_gap_ms: None,
            gap_ms: None,
            took_ms: 0.0,
            expected_ms: None,
        }
    }
}

/// The latest moves.
#[derive(Debug)]
pub(crate) struct MoveLog {
    kept: usize,
    records: VecDeque<MoveRecord>,
}

impl MoveLog {
    pub(crate) fn new(kept: usize) -> Self {
        Self { kept, records: VecDeque::new() }
    }

    pub(crate) fn push(&mut self, record: MoveRecord) {
        if self.records.len() >= self.kept {
            self.records.pop_front();
        }
        self.records.push_back(record);
    }

    /// The latest ones, newest first.
    pub(crate) fn latest(&self, limit: usize) -> Vec<MoveRecord> {
        self.records.iter().rev().take(limit).cloned().collect()
    }
}
