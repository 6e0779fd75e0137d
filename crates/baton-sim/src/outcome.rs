use std::time::Duration;

use baton_policy::DecisionRecord;
use baton_units::{Blocks, Priority, RequestId, Time, Tokens};
use serde::Serialize;

use crate::{RequestKind, percentile};

/// What happened in one run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    /// By arrival; a client that comes back makes one more.
    pub requests: Vec<RequestOutcome>,
    /// Requests sent to each replica, retries and copies included.
    pub sent: Vec<u32>,
    pub busy_ms: Vec<f64>,
    pub copies: u32,
    /// Requests whose prefix was brought from a peer.
    #[serde(skip_serializing_if = "is_zero")]
    pub fetches: u32,
    pub retries: u32,
    pub held: u32,
    /// How often an engine took a running request's blocks for another one.
    pub preemptions: u64,
    /// What the loop moved, in the order of its decisions.
    pub moves: Vec<MoveRecord>,
    /// In the order of the scenario's drains as they began.
    pub drains: Vec<DrainRecord>,
    pub ended_at: Time,
    /// What was left in flight at the end, by the router's books, and blocks in use by the engines': zero, or something leaks.
    pub left_in_flight: u32,
    pub left_in_use: Blocks,
    /// Broken laws, in words.
    pub violations: Vec<String>,
    /// By request; as many of the latest as the router was told to keep.
    pub decisions: Vec<DecisionRecord>,
}

/// A replica that was to be emptied.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct DrainRecord {
    pub replica: usize,
    pub began: Time,
    /// Requests that it had.
    pub had: u32,
    /// What the loop predicted; `None` where nothing moves.
    pub forecast: Option<Duration>,
    pub empty: Option<Time>,
}

/// One move, and what came of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MoveRecord {
    pub decided: Time,
    pub request: RequestId,
    pub reason: &'static str,
    /// The decision in words.
    pub text: String,
    /// From the freeze at the source until it was in the target's batch or queue; `None` where it stayed.
    pub gap: Option<Duration>,
    /// Why it stayed.
    pub stayed: Option<&'static str>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RequestOutcome {
    pub arrived: Time,
    pub kind: RequestKind,
    pub priority: Priority,
    /// From 1: how often its client has asked for the same.
    pub attempt: u32,
    pub prompt: Tokens,
    pub output: u32,
    pub replica: Option<u32>,
    pub cached: Option<Tokens>,
    pub first_token: Option<Time>,
    pub finished: Option<Time>,
    /// When it was turned away.
    pub refused: Option<Time>,
    /// What a refusal for the load said.
    pub retry_after: Option<Duration>,
    /// It was lost with its replica after its first token, or too often.
    pub failed: bool,
    /// Moves to another replica that were made.
    pub moves: u32,
    /// Digest of the output's tokens.
    pub output_digest: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "as serde wants it")]
fn is_zero(count: &u32) -> bool {
    *count == 0
}

impl Outcome {
    /// Times to first token in ms, sorted.
    pub fn ttft_ms(&self) -> Vec<f64> {
        sorted(self.requests.iter().filter_map(RequestOutcome::ttft_ms))
    }

    /// The same of one kind of request.
    pub fn ttft_ms_of(&self, kind: RequestKind) -> Vec<f64> {
        sorted(self.requests.iter().filter(|request| request.kind == kind).filter_map(RequestOutcome::ttft_ms))
    }

    /// Mean times between a request's tokens in ms, sorted.
    pub fn tpot_ms(&self) -> Vec<f64> {
        sorted(self.requests.iter().filter_map(RequestOutcome::tpot_ms))
    }

    /// Times from arrival to the last token in ms, sorted.
    pub fn whole_ms(&self) -> Vec<f64> {
        sorted(self.requests.iter().filter_map(|request| Some(request.finished?.as_ms() - request.arrived.as_ms())))
    }

    pub fn ttft_percentile_ms(&self, share: f64) -> f64 {
        percentile(&self.ttft_ms(), share)
    }

    /// Share of prompt tokens that engines had cached.
    pub fn hit_rate(&self) -> f64 {
        let (cached, all) = self
            .requests
            .iter()
            .filter_map(|request| request.cached.map(|cached| (cached, request.prompt)))
            .fold((0.0, 0.0), |(cached, all), (more, prompt)| (cached + more.as_f64(), all + prompt.as_f64()));
        if all > 0.0 { cached / all } else { 0.0 }
    }

    /// Requests of the busiest replica over the mean.
    pub fn imbalance(&self) -> f64 {
        let most = self.sent.iter().copied().max().unwrap_or(0);
        let all: u32 = self.sent.iter().sum();
        f64::from(most) * self.sent.len() as f64 / f64::from(all.max(1))
    }
}

impl RequestOutcome {
    pub fn ttft_ms(&self) -> Option<f64> {
        Some(self.first_token?.as_ms() - self.arrived.as_ms())
    }

    /// Mean time between its tokens; `None` of a single one.
    pub fn tpot_ms(&self) -> Option<f64> {
        let gaps = self.output.checked_sub(1).filter(|gaps| *gaps > 0)?;
        Some((self.finished?.as_ms() - self.first_token?.as_ms()) / f64::from(gaps))
    }
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut all: Vec<f64> = values.collect();
    all.sort_by(f64::total_cmp);
    all
}
