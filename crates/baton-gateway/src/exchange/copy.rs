//! Carrying out the router's wish for a second copy of a prefix: one output token that nobody waits for, so that the blocks of its
//! prompt are there afterwards.

use std::{collections::VecDeque, future::poll_fn, sync::Arc};

use baton_policy::{Outcome, PrefixCopy};
use bytes::Bytes;
use http::StatusCode;
use tokio::time::timeout;

use super::Admitted;
use crate::{
    fleet::{Fleet, Stage},
    intake::Api,
    line::Head,
    upstream::{Arrived, Attempt, Expect},
};

/// Sends the copy beside the request that paid for it, where the engine takes token ids and the tokens are its own.
pub(super) fn send(fleet: &Arc<Fleet>, admitted: &Admitted, copy: PrefixCopy) {
    match start(fleet, admitted, &copy) {
        Some(attempt) => _ = tokio::spawn(carry(fleet.clone(), copy, attempt)),
        None => fleet.finished(copy.request, Outcome::Cancelled, None),
    }
}

fn start(fleet: &Fleet, admitted: &Admitted, copy: &PrefixCopy) -> Option<Attempt> {
    let engine = fleet.engine(copy.to).filter(|engine| admitted.exact && engine.config.kind.gives_token_ids())?;
    let tokens = copy.blocks * admitted.chain.block_size().get() as usize;
    let prefix = admitted.chain.tokens().get(..tokens)?;
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
