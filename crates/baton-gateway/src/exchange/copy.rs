//! Carrying out the router's wish for a prefix at another replica than has it: for a request that waits for it, and as a second copy. Where the replica that has it and the one that is to have it copy
//! prefixes, and the link is faster than the arithmetic, the one brings it to the other while both do what they do; else one output token
//! is asked for where it is to be, so that the blocks of its prompt are there afterwards.

use std::{collections::VecDeque, future::poll_fn, pin::Pin, sync::Arc};

use baton_policy::{Outcome, PrefixCopy, PrefixFetch};
use baton_units::{Blocks, ReplicaId, Tokens};
use baton_wire::{migration::RunRequest, openai::PublicTokens};
use bytes::Bytes;
use http::StatusCode;
use serde::Serialize;
use tokio::{sync::oneshot, time::timeout};

use super::Admitted;
use crate::{
    carry::{MoveOutcome, MoveRecord, PrefixOrder},
    fleet::{Fleet, Stage},
    intake::Api,
    line::Head,
    token_api::TokenApi,
    upstream::{Arrived, Attempt, Expect},
};

/// A prefix that a request waits for; dropped, nobody waits any more.
pub(super) struct Fetching {
    /// Where the request is to run.
    pub(super) replica: ReplicaId,
    pub(super) arrives: Pin<Box<dyn Future<Output = bool> + Send>>,
}

/// Has what the request lacks at its replica brought there; `None` where that cannot be, and the request need not wait.
pub(super) fn fetch(fleet: &Arc<Fleet>, admitted: &Admitted, to: ReplicaId, fetch: PrefixFetch) -> Option<Fetching> {
    let PrefixFetch { from, blocks, takes, saves } = fetch;
    if !admitted.exact {
        return None;
    }
    let tokens = blocks.to_tokens(admitted.chain.block_size());
    let expected_ms = takes.as_secs_f64() * 1e3;
    let order = PrefixOrder {
        request: admitted.live.id,
        from,
        to,
        prefix: prefix_run(admitted, tokens)?,
        kind: "fetch",
        reason: format!("fetch: {blocks} of the prompt are at {from}, {expected_ms:.1} ms away"),
        expected_ms,
    };
    let (number, told) = fleet.with_desk(|desk, now| desk.copy_prefix(order, now))?;
    let waits = Waits { fleet: fleet.clone(), number };
    let arrives = async move {
        let told = timeout(saves, told).await;
        drop(waits);
        matches!(told, Ok(Ok(MoveRecord { outcome: MoveOutcome::Moved, .. })))
    };
    Some(Fetching { replica: to, arrives: Box::pin(arrives) })
}

/// Ends a copy when nobody waits for it any more.
struct Waits {
    fleet: Arc<Fleet>,
    number: u64,
}

impl Drop for Waits {
    fn drop(&mut self) {
        let number = self.number;
        self.fleet.with_desk(|desk, now| desk.end_copy(number, now));
    }
}

/// What would run after the first tokens of the prompt.
fn prefix_run(admitted: &Admitted, tokens: Tokens) -> Option<RunRequest> {
    Some(RunRequest {
        model: admitted.live.model.clone(),
        prompt: admitted.chain.tokens().get(..tokens.0 as usize)?.to_vec(),
        salt: admitted.intake.salt.clone(),
        public: admitted.chain.public().0,
        ..RunRequest::default()
    })
}

/// Sends the copy beside the request that paid for it, where the engine takes token ids and the tokens are its own.
pub(super) fn send(fleet: &Arc<Fleet>, admitted: &Admitted, from: ReplicaId, copy: PrefixCopy) {
    if let Some((number, told)) = begin(fleet, admitted, from, &copy) {
        tokio::spawn(take_over(fleet.clone(), copy, number, told));
        return;
    }
    match start(fleet, admitted, &copy) {
        Some(attempt) => _ = tokio::spawn(carry(fleet.clone(), copy, attempt)),
        None => fleet.finished(copy.request, Outcome::Cancelled, None),
    }
}

/// Has the prefix brought from where it is to where it is to be; `None` where that cannot be, or takes longer than computing.
fn begin(fleet: &Fleet, admitted: &Admitted, from: ReplicaId, copy: &PrefixCopy) -> Option<(u64, oneshot::Receiver<MoveRecord>)> {
    let tokens = prefix(admitted, copy)?;
    let price = fleet.price_of_copy(from, copy.to, tokens)?;
    if price.fetch.total_s >= price.recompute.total_s {
        return None;
    }
    let order = PrefixOrder {
        request: copy.request,
        from,
        to: copy.to,
        prefix: prefix_run(admitted, tokens)?,
        kind: "replicate",
        reason: format!("replicate: a shared prefix of {} is wanted there; {price}", Blocks(copy.blocks as u32)),
        expected_ms: price.fetch.total_s * 1e3,
    };
    fleet.with_desk(|desk, now| desk.copy_prefix(order, now))
}

/// Tokens of the prefix, where they are the engine's.
fn prefix(admitted: &Admitted, copy: &PrefixCopy) -> Option<Tokens> {
    admitted.exact.then(|| Blocks(copy.blocks as u32).to_tokens(admitted.chain.block_size()))
}

async fn take_over(fleet: Arc<Fleet>, copy: PrefixCopy, number: u64, told: oneshot::Receiver<MoveRecord>) {
    let limit = fleet.front().first_token_timeout;
    let waits = Waits { fleet: fleet.clone(), number };
    let done = tokio::select! {
        told = timeout(limit, told) => matches!(told, Ok(Ok(MoveRecord { outcome: MoveOutcome::Moved, .. }))),
        () = fleet.reached(Stage::Closing) => false,
    };
    drop(waits);
    if done {
        fleet.with_router(|router, now| router.first_token(copy.request, None, now));
    }
    fleet.finished(copy.request, if done { Outcome::Finished } else { Outcome::Failed }, None);
}

/// As much of a completion as leaves its prompt's blocks in a cache.
#[derive(Serialize)]
struct OneToken<'a> {
    model: &'a str,
    prompt: &'a [u32],
    max_tokens: u32,
    temperature: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_salt: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_public: Option<PublicTokens>,
}

fn start(fleet: &Fleet, admitted: &Admitted, copy: &PrefixCopy) -> Option<Attempt> {
    let engine = fleet.engine(copy.to).filter(|engine| engine.config.kind.token_api() == Some(TokenApi::Completions))?;
    let prefix = admitted.chain.tokens().get(..prefix(admitted, copy)?.0 as usize)?;
    let public = (admitted.chain.public().0 as usize).min(prefix.len());
    let salt = admitted.intake.salt.as_deref();
    let takes_public = salt.is_some() && engine.config.kind.takes_public() && public > 0;
    let body = OneToken {
        model: &admitted.live.model,
        prompt: prefix,
        max_tokens: 1,
        temperature: 0,
        cache_salt: salt,
        cache_public: takes_public.then(|| PublicTokens::new(&prefix[..public])),
    };
    let body = Bytes::from(serde_json::to_vec(&body).ok()?);
    let head = engine.lines.address().head(Api::Completions.path(), &fleet.upstream_id(copy.request, 1), None, body.len());
    Some(fleet.upstream.start(&engine, VecDeque::from([head, body]), Expect::Whole))
}

async fn carry(fleet: Arc<Fleet>, copy: PrefixCopy, mut attempt: Attempt) {
    let limit = fleet.front().first_token_timeout;
    let done = tokio::select! {
        arrived = timeout(limit, poll_fn(|context| attempt.poll_next(context))) => {
            matches!(arrived, Ok(Arrived::Answer { head: Head { status: StatusCode::OK, .. }, .. }))
        }
        () = fleet.reached(Stage::Closing) => false,
    };
    if done {
        fleet.with_router(|router, now| router.first_token(copy.request, None, now));
    }
    fleet.finished(copy.request, if done { Outcome::Finished } else { Outcome::Failed }, None);
}
