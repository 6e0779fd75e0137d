//! Carrying out the router's wish for a second copy of a prefix: one output token that nobody waits for, so that the blocks of its
//! prompt are there afterwards.

use std::sync::Arc;

use baton_policy::{Outcome, PrefixCopy};
use bytes::Bytes;
use http::{Method, Request, StatusCode, header};
use http_body_util::Full;
use tokio::time::timeout;

use super::Admitted;
use crate::{
    fleet::{Fleet, Stage},
    upstream::{self, Arrived, Expect},
};

/// Sends the copy beside the request that paid for it, where the engine takes token ids and the tokens are its own.
pub(super) fn send(fleet: &Arc<Fleet>, admitted: &Admitted, copy: PrefixCopy) {
    match request(fleet, admitted, &copy) {
        Some(request) => _ = tokio::spawn(carry(fleet.clone(), copy, request)),
        None => fleet.finished(copy.request, Outcome::Cancelled, None),
    }
}

fn request(fleet: &Fleet, admitted: &Admitted, copy: &PrefixCopy) -> Option<Request<Full<Bytes>>> {
    let engine = fleet.engine(copy.to).filter(|engine| admitted.exact && engine.config.kind.gives_token_ids())?;
    let tokens = copy.blocks * admitted.chain.block_size().get() as usize;
    let prefix = admitted.chain.tokens().get(..tokens)?;
    let mut body = serde_json::json!({ "model": admitted.live.model, "prompt": prefix, "max_tokens": 1, "temperature": 0 });
    if let Some(salt) = &admitted.intake.salt {
        body["cache_salt"] = salt.as_str().into();
    }
    let request = upstream::request(Method::POST, engine.url().join("/v1/completions"), engine.config.key.as_deref())
        .header(header::CONTENT_TYPE, "application/json")
        .header("x-request-id", fleet.upstream_id(copy.request, 1));
    request.body(Full::new(Bytes::from(body.to_string()))).ok()
}

async fn carry(fleet: Arc<Fleet>, copy: PrefixCopy, request: Request<Full<Bytes>>) {
    let limit = fleet.front.first_token_timeout;
    let mut attempt = fleet.upstream.start(request, Expect::Whole);
    let done = tokio::select! {
        arrived = timeout(limit, attempt.next()) => matches!(arrived, Ok(Arrived::Answer { status: StatusCode::OK, .. })),
        () = fleet.reached(Stage::Closing) => false,
    };
    if done {
        fleet.with_router(|router, now| router.first_token(copy.request, None, now));
    }
    fleet.finished(copy.request, if done { Outcome::Finished } else { Outcome::Failed }, None);
}
