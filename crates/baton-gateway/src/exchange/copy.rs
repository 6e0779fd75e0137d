//! Carrying out the router's wish for a second copy of a prefix. Where the replica that has it and the one that is to have it take part
//! in migration, and the link is faster than the arithmetic, a request that nobody waits for begins where the prefix is and moves;
//! else one output token is asked for where it is to be, so that the blocks of its prompt are there afterwards.

use std::{collections::VecDeque, future::poll_fn, sync::Arc};

use baton_cost::{MovePrice, MoveWay};
use baton_policy::{
    Outcome, PrefixCopy,
    mover::{Move, MoveReason},
};
use baton_units::{Blocks, ReplicaId, Tokens};
use baton_wire::migration::{RunRequest, RunSampling};
use bytes::Bytes;
use http::StatusCode;
use tokio::{sync::oneshot, time::timeout};

use super::Admitted;
use crate::{
    carry::{MoveOutcome, Run, RunEvent},
    fleet::{Fleet, Stage},
    intake::Api,
    line::Head,
    upstream::{Arrived, Attempt, Expect},
};

/// Sends the copy beside the request that paid for it, where the engine takes token ids and the tokens are its own.
pub(super) fn send(fleet: &Arc<Fleet>, admitted: &Admitted, from: ReplicaId, copy: PrefixCopy) {
    if let Some((run, decided)) = begin(fleet, admitted, from, &copy) {
        tokio::spawn(take_over(fleet.clone(), copy, run, decided));
        return;
    }
    match start(fleet, admitted, &copy) {
        Some(attempt) => _ = tokio::spawn(carry(fleet.clone(), copy, attempt)),
        None => fleet.finished(copy.request, Outcome::Cancelled, None),
    }
}

/// A request for the prefix where it is, and its move to where it is to be; `None` where that cannot be, or pays less than computing.
fn begin(fleet: &Arc<Fleet>, admitted: &Admitted, from: ReplicaId, copy: &PrefixCopy) -> Option<(Run, Move)> {
    let prefix = prefix(admitted, copy)?;
    let price = fleet.price_of_copy(from, copy.to, prefix)?;
    let MovePrice { kv: Some(kv), recompute, .. } = &price else { return None };
    if kv.total_s >= recompute.total_s {
        return None;
    }
    let run = RunRequest {
        model: admitted.live.model.clone(),
        prompt: admitted.chain.tokens().get(..prefix.0 as usize)?.to_vec(),
        // Until it has moved; what is not acknowledged stops it before that.
        sampling: RunSampling { temperature: 0.0, ignore_eos: true, ..RunSampling::default() },
        salt: admitted.intake.salt.clone(),
        ..RunRequest::default()
    };
    let run = Run::start(fleet, copy.request, from, &[run], 1)?;
    let reason = MoveReason::Replicate { blocks: Blocks(copy.blocks as u32) };
    Some((run, Move { request: copy.request, from, to: copy.to, tokens: prefix, way: MoveWay::Kv, reason, price }))
}

/// Tokens of the prefix, where they are the engine's.
fn prefix(admitted: &Admitted, copy: &PrefixCopy) -> Option<Tokens> {
    admitted.exact.then(|| Blocks(copy.blocks as u32).to_tokens(admitted.chain.block_size()))
}

async fn take_over(fleet: Arc<Fleet>, copy: PrefixCopy, mut run: Run, decided: Move) {
    let limit = fleet.front.first_token_timeout;
    let done = tokio::select! {
        there = timeout(limit, arrive(&fleet, &mut run, decided)) => there.unwrap_or(false),
        () = fleet.reached(Stage::Closing) => false,
    };
    // Its blocks stay in both caches.
    drop(run);
    if done {
        fleet.with_router(|router, now| router.first_token(copy.request, None, now));
    }
    fleet.finished(copy.request, if done { Outcome::Finished } else { Outcome::Failed }, None);
}

/// Whether the request went on where it is wanted.
async fn arrive(fleet: &Fleet, run: &mut Run, decided: Move) -> bool {
    let mut told = None;
    loop {
        let (_, event) = poll_fn(|context| run.poll_next(context)).await;
        match event {
            RunEvent::Lost(_) => return false,
            RunEvent::Cached(_) | RunEvent::Moved(_) | RunEvent::Anew(_) => {}
            RunEvent::Entry(_) if told.is_none() => {
                let (tell, receiver) = oneshot::channel();
                if fleet.with_desk(|desk, now| desk.depart(decided.clone(), Some(tell), now)).is_err() {
                    return false;
                }
                told = Some(receiver);
            }
            RunEvent::Entry(_) => {
                // The move's end is told with the first entry after it.
                if let Ok(records) = told.as_mut().expect("it was asked for").try_recv() {
                    return records.iter().all(|record| record.outcome == MoveOutcome::Moved);
                }
            }
        }
    }
}

fn start(fleet: &Fleet, admitted: &Admitted, copy: &PrefixCopy) -> Option<Attempt> {
    let engine = fleet.engine(copy.to).filter(|engine| engine.config.kind.gives_token_ids())?;
    let prefix = admitted.chain.tokens().get(..prefix(admitted, copy)?.0 as usize)?;
    let mut body = serde_json::json!({ "model": admitted.live.model, "prompt": prefix, "max_tokens": 1, "temperature": 0 });
    if let Some(salt) = &admitted.intake.salt {
        body["cache_salt"] = salt.as_str().into();
    }
    let body = Bytes::from(body.to_string());
    let head = engine.lines.address().head(Api::Completions.path(), &fleet.upstream_id(copy.request, 1), body.len());
    Some(fleet.upstream.start(&engine, VecDeque::from([head, body]), Expect::Whole))
}

async fn carry(fleet: Arc<Fleet>, copy: PrefixCopy, mut attempt: Attempt) {
    let limit = fleet.front.first_token_timeout;
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
