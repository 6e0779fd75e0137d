use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicU32, Ordering},
};

use baton_units::{ReplicaId, RequestId, Time, Tokens};
use serde::Serialize;

use crate::trace::Trace;

/// A request in the gateway, for those who look at it from outside.
#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) id: RequestId,
    /// As the client knows it.
    pub(crate) client_id: String,
    pub(crate) model: String,
    pub(crate) arrived: Time,
    pub(crate) prompt: Tokens,
    /// That its client's request is part of.
    pub(crate) trace: Option<Trace>,
    state: Mutex<(LiveState, Option<ReplicaId>)>,
    output: AtomicU32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum LiveState {
    /// Waits in the router for a place.
    Held,
    /// Sent to a replica, no token yet.
    Prefill,
    Decode,
}

impl Live {
    pub(crate) fn new(id: RequestId, client_id: String, model: String, arrived: Time, prompt: Tokens) -> Self {
        Self { id, client_id, model, arrived, prompt, trace: None, state: Mutex::new((LiveState::Held, None)), output: AtomicU32::new(0) }
    }

    /// As part of its client's trace, where that names one.
    pub(crate) fn traced(self, trace: Option<Trace>) -> Self {
        Self { trace, ..self }
    }

    /// Its trace's name, for the log.
    pub(crate) fn trace_id(&self) -> Option<&str> {
        self.trace.as_ref().map(|trace| trace.id.as_str())
    }

    pub(crate) fn set(&self, state: LiveState, replica: Option<ReplicaId>) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = (state, replica);
    }

    pub(crate) fn state(&self) -> (LiveState, Option<ReplicaId>) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add_output(&self, tokens: u32) {
        self.output.fetch_add(tokens, Ordering::Relaxed);
    }

    pub(crate) fn reset_output(&self) {
        self.output.store(0, Ordering::Relaxed);
    }

    pub(crate) fn output(&self) -> Tokens {
        Tokens(self.output.load(Ordering::Relaxed))
    }
}
