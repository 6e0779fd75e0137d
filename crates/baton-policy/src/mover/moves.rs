//! A move and the reason for it, in words.

use std::{fmt, time::Duration};

use baton_cost::{MovePrice, MoveWay};
use baton_units::{Blocks, ReplicaId, RequestId, Tokens};

use crate::ReplicaState;

/// One request is to go on elsewhere. Its `Display` is a line for an event log.
#[derive(Debug, Clone, PartialEq)]
pub struct Move {
    pub request: RequestId,
    pub from: ReplicaId,
    pub to: ReplicaId,
    /// Of the sequence when it was decided.
    pub tokens: Tokens,
    /// With its KV, or by its tokens alone.
    pub way: MoveWay,
    pub reason: MoveReason,
    pub price: MovePrice,
}

/// Why a request moves.
#[derive(Debug, Clone, PartialEq)]
pub enum MoveReason {
    /// Its replica's memory ends soon, and another's later. Freeness in steps, or tokens that are missing where it is negative.
    Balance { freeness_from: f64, freeness_to: f64, benefit_ms: f64 },
    /// The head of a queue fits nowhere, though the blocks for it are there in pieces.
    Defragment { head: RequestId, demand: Blocks, free: Blocks },
    /// An important request beside it is to decode at full speed.
    Priority { freeness_from: f64, freeness_to: f64, benefit_ms: f64 },
    /// Its replica is to be empty; so many requests were there.
    Drain { left: u32 },
    /// Its program has had more than its share, and one that had less waits beside it.
    Fairness { program: u64, times_median: f64, waiting: RequestId, waited: Duration },
    /// Somebody asked for it.
    Operator,
    /// Its replica is lost, or thought to be.
    Forced { state: ReplicaState },
}

/// Why an operator's move cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OrderRefusal {
    #[error("no replica has request {0}; it ended, or waits at the router")]
    NotHere(RequestId),
    #[error("request {0} is moving already; try again when it has arrived")]
    Moving(RequestId),
    #[error("request {0} cannot be moved where it is, or not before its prompt is computed")]
    NotMovable(RequestId),
    #[error("no replica can take request {request}, which needs {demand}, or each takes in or gives another one now; try again")]
    NoTarget { request: RequestId, demand: Blocks },
    #[error("{target} cannot take request {request}, which needs {demand}: it is not ready, of other numerics, full, or takes in another")]
    Target { request: RequestId, target: ReplicaId, demand: Blocks },
}

impl MoveReason {
    /// One word, as for a metric's label.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Balance { .. } => "balance",
            Self::Defragment { .. } => "defragment",
            Self::Priority { .. } => "priority",
            Self::Drain { .. } => "drain",
            Self::Fairness { .. } => "fairness",
            Self::Operator => "operator",
            Self::Forced { .. } => "forced",
        }
    }
}

impl fmt::Display for Move {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { request, from, to, tokens, .. } = self;
        write!(f, "{request} of {tokens}, {from} to {to}, {}: ", self.reason.name())?;
        match &self.reason {
            MoveReason::Balance { freeness_from, freeness_to, benefit_ms } => {
                write!(f, "{from} has {}, {to} {}; the end is put off by {benefit_ms:.0} ms", Left(*freeness_from), Left(*freeness_to))?;
            }
            MoveReason::Defragment { head, demand, free } => {
                write!(f, "{head} needs {demand} where {free} are free, though the fleet has them")?;
            }
            MoveReason::Priority { freeness_from, freeness_to, benefit_ms } => {
                let (here, there) = (Left(*freeness_from), Left(*freeness_to));
                write!(f, "an important request on {from} asks for quiet, {here} there and {there} on {to}; worth {benefit_ms:.0} ms")?;
            }
            MoveReason::Drain { left } => write!(f, "{from} drains and has {left} requests left")?,
            MoveReason::Fairness { program, times_median, waiting, waited } => {
                let waited_ms = waited.as_secs_f64() * 1e3;
                write!(
                    f,
                    "program {program:x} had {times_median:.1} times the median, and {waiting} of another waits since {waited_ms:.0} ms"
                )?;
            }
            MoveReason::Operator => write!(f, "as ordered")?,
            MoveReason::Forced { state: ReplicaState::Dead } => write!(f, "{from} is dead")?,
            MoveReason::Forced { .. } => write!(f, "{from} does not answer")?,
        }
        match self.price.kv.filter(|_| self.way == MoveWay::Kv) {
            Some(kv) => {
                let (cost_ms, megabytes, total_ms) = (kv.cost_s() * 1e3, self.price.bytes / 1e6, kv.total_s * 1e3);
                write!(f, "; {cost_ms:.1} ms by KV of {megabytes:.1} MB, {total_ms:.1} ms in all")
            }
            None => write!(f, "; {:.1} ms to compute it there", self.price.recompute.compute_s * 1e3),
        }
    }
}

/// Freeness in words.
struct Left(f64);

impl fmt::Display for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            none if none < 0.0 => write!(f, "{:.0} tokens too few", -none),
            f64::INFINITY => write!(f, "nothing to do"),
            left => write!(f, "{left:.0} steps left"),
        }
    }
}
