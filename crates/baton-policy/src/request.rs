use std::{sync::Arc, time::Duration};

use baton_kv::BlockKey;
use baton_units::{Blocks, Priority, ReplicaId, RequestId, Tokens};

use crate::Share;

/// A request that wants a replica.
#[derive(Debug, Clone)]
pub struct Arrival {
    pub request: RequestId,
    /// Keys of the prompt's full blocks, in order, in the domain of its model, adapter and salt.
    pub keys: Arc<[BlockKey]>,
    pub prompt: Tokens,
    /// The client's own bound; the router reads no other output length.
    pub max_output: Option<Tokens>,
    /// Hash of the session's id, where the client sends one.
    pub session: Option<u64>,
    /// Hash of the program's id, kept on the decision's record.
    pub program: Option<u64>,
    /// Of the tenant whose request it is, where there are tenants: among requests of equal importance that wait, those go first whose tenant
    /// had less of what is its part.
    pub share: Option<Share>,
    pub priority: Priority,
    pub slo: Slo,
    /// Replicas that must not be chosen, as after a failed try there.
    pub excluded: Vec<ReplicaId>,
}

/// What a request wants of its own times, where that is more than its class says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Slo {
    /// From its arrival to its first token. It stands for its class's objective, and one that would start too late for it is turned away; it
    /// waits no longer than its class may, all the same, since those behind it do not either.
    pub ttft: Option<Duration>,
    /// Mean time between its tokens (`price` only). It chooses the replica, and refuses nothing.
    pub tpot: Option<Duration>,
}

/// What to do with a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    Run(Placed),
    /// It stays in the router; `released` will tell.
    Hold,
    Refuse(Refusal),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    pub replica: ReplicaId,
    pub copy: Option<PrefixCopy>,
    /// What is to be brought there first.
    pub fetch: Option<PrefixFetch>,
}

/// The first `blocks` blocks of the request's prompt are at `from`, and it is faster to bring them to the request's replica than to
/// compute them there.
///
/// Have them brought, start the request then, and tell by [`Router::fetched`](crate::Router::fetched) how it ended. Whoever cannot do so
/// says so at once, and starts the request without.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefixFetch {
    pub from: ReplicaId,
    pub blocks: Blocks,
    /// What it is expected to take.
    pub takes: Duration,
    /// What computing it takes. Whoever waits for it so long and computes it then has waited at most twice as long as was best (Karlin et
    /// al., competitive snoopy caching), however wrong the expectation was.
    pub saves: Duration,
}

/// The first `blocks` blocks of the request's prompt are worth having on `to` as well.
///
/// Send them there as a request of one output token that no user waits for, and report its life under `request` like any other
/// (`first_token`, `finished`), whatever becomes of it. Whoever cannot do so calls `finished` with [`Outcome::Cancelled`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixCopy {
    /// Minted by the router, from the upper half of the ids.
    pub request: RequestId,
    pub to: ReplicaId,
    pub blocks: usize,
}

/// Why a request gets no replica.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the prompt has {prompt}, the longest context of the fleet takes {limit}; shorten the prompt")]
    TooLong { prompt: Tokens, limit: Tokens },
    /// Prompt and asked output together exceed every replica's KV memory.
    #[error("the request needs {needed} of KV, the largest replica holds {limit}, which is {fits} with prompt and output; ask for less")]
    NeverFits { needed: Blocks, limit: Blocks, fits: Tokens },
    #[error("no replica is ready to take the request; retry when one is")]
    NoReplica,
    #[error("the fleet cannot start this request soon enough; retry after {retry_after:?}")]
    Overloaded { retry_after: Duration },
}

/// How a request ended on its replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Finished,
    /// The client left, or the request was moved.
    Cancelled,
    Failed,
}
