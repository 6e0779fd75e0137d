use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicU32, Ordering},
};

use baton_units::{ReplicaId, RequestId, Time, Tokens};
use serde::Serialize;
use tokio::sync::oneshot;

use crate::{exchange::LeaveOrder, trace::Trace};

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
    /// To whoever carries it, while it can be asked to leave its engine.
    orders: Mutex<Option<oneshot::Sender<LeaveOrder>>>,
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
        let (state, output) = (Mutex::new((LiveState::Held, None)), AtomicU32::new(0));
        Self { id, client_id, model, arrived, prompt, trace: None, state, output, orders: Mutex::default() }
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

    /// Orders to leave come here from now on.
    pub(crate) fn hear_orders(&self) -> oneshot::Receiver<LeaveOrder> {
        let (sender, orders) = oneshot::channel();
        *self.orders.lock().unwrap_or_else(PoisonError::into_inner) = Some(sender);
        orders
    }

    /// Has it leave its engine; gives the order back where it cannot.
    pub(crate) fn order(&self, order: LeaveOrder) -> Result<(), LeaveOrder> {
        match self.orders.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(sender) => sender.send(order),
            None => Err(order),
        }
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
