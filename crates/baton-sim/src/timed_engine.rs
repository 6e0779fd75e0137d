use std::sync::Arc;

use baton_kv::{BlockKey, KvEvent};
use baton_policy::LoadReport;
use baton_units::{Blocks, RequestId, Time, Tokens};

use crate::ScheduledEngine;

/// A request as an engine gets it.
#[derive(Debug, Clone)]
pub struct EngineRequest {
    pub id: RequestId,
    pub prompt: Arc<[u32]>,
    /// Keys of the prompt's full blocks.
    pub keys: Arc<[BlockKey]>,
    pub output: u32,
}

/// What an engine says of one request at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineOutput {
    pub request: RequestId,
    /// With the first token: prompt tokens that were cached.
    pub cached: Option<Tokens>,
    pub tokens: Vec<u32>,
    pub finished: bool,
}

/// An engine in virtual time.
pub trait TimedEngine {
    fn submit(&mut self, request: EngineRequest, now: Time);

    /// When its state changes next by itself.
    fn next_at(&self) -> Option<Time>;

    /// Lets all happen that is due by `now`, which is never past `next_at`.
    fn advance(&mut self, now: Time) -> Vec<EngineOutput>;

    /// What its cache did since the last call.
    fn take_events(&mut self) -> Vec<KvEvent>;

    fn load(&self, now: Time) -> LoadReport;

    /// Whether a block of this content can be hit: the truth that beliefs are checked against.
    fn holds(&self, key: BlockKey) -> bool;

    /// Free, cached and in use together make the whole pool; an engine that lost a block says how many.
    fn check_blocks(&self) -> Result<(), String>;

    /// Blocks that requests in flight hold.
    fn blocks_in_use(&self) -> Blocks;

    /// How often it took a running request's blocks for another.
    fn preemptions(&self) -> u64 {
        0
    }

    /// The engine that requests can leave and join while they run; `None` of one that takes no part in moves.
    fn movable(&mut self) -> Option<&mut ScheduledEngine> {
        None
    }

    /// Time spent computing prompts, or steps where prompts and decodes share them, in ms.
    fn busy_ms(&self) -> f64;
}
