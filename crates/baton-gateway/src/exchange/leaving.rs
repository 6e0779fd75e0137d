//! A stream that leaves its engine while that is well, since an operator asks for it or the engine is to be empty: it is stopped there, and goes on at
//! another one from its tokens, between llama.cpp's servers with the KV of its slot.

use std::{pin::Pin, sync::Arc};

use baton_session::Input;
use baton_units::{ReplicaId, Time};
use tokio::sync::oneshot;

use super::{Exchange, Running, Way};
use crate::{
    carry::{MoveOutcome, MoveRecord},
    engine::Engine,
    fleet::Fleet,
    slots::{self, Slot},
};

/// Asks a stream to leave.
#[derive(Debug)]
pub(crate) struct LeaveOrder {
    pub(crate) to: ReplicaId,
    /// One word, as a label.
    pub(crate) kind: &'static str,
    pub(crate) reason: String,
    /// Hears what came of it.
    pub(crate) told: oneshot::Sender<Vec<MoveRecord>>,
}

/// A stream on its way.
pub(super) struct Leaving {
    record: MoveRecord,
    told: oneshot::Sender<Vec<MoveRecord>>,
    since: Time,
    last_token_at: Option<Time>,
    /// Where it ran, with its KV.
    slot: Option<Slot>,
    /// Its KV on the way.
    carrying: Option<Pin<Box<dyn Future<Output = Option<Carried>> + Send>>>,
    /// Where its KV is now.
    pub(super) target: Option<Slot>,
}

/// KV that is where it is to be.
pub(super) struct Carried {
    slot: Slot,
    bytes: u64,
}

impl Leaving {
    pub(super) fn to(&self) -> ReplicaId {
        self.record.to
    }

    pub(super) fn poll_carried(&mut self, context: &mut std::task::Context<'_>) -> std::task::Poll<Option<Carried>> {
        let Some(carrying) = &mut self.carrying else { return std::task::Poll::Pending };
        let carried = std::task::ready!(carrying.as_mut().poll(context));
        self.carrying = None;
        std::task::Poll::Ready(carried)
    }

    fn end(self, fleet: &Fleet, outcome: MoveOutcome, why: Option<String>) {
        let record = MoveRecord { outcome, why, took_ms: fleet.clock.now().since(self.since).as_secs_f64() * 1e3, ..self.record };
        fleet.with_desk(|desk, _| desk.note(record.clone()));
        // Who asked may have left.
        let _ = self.told.send(vec![record]);
    }
}

impl Exchange {
    /// From here on the stream can be asked to leave.
    pub(super) fn hear_orders(&mut self) {
        self.leave = Some(self.admitted.live.hear_orders());
    }

    pub(super) fn leave(&mut self, order: LeaveOrder) {
        let LeaveOrder { to, kind, reason, told } = order;
        let Some(Running { engine, epoch, .. }) = &self.attempt else { return };
        let (from, epoch, now) = (engine.clone(), *epoch, self.fleet.clock.now());
        let live = &self.admitted.live;
        let tokens = live.prompt + live.output();
        let record = MoveRecord::begun(live.id, 0, (from.id, to), kind, reason, tokens);
        let last_token_at = self.last_token_at;
        let mut leaving = Leaving { record, told, since: now, last_token_at, slot: None, carrying: None, target: None };
        if let Some(why) = self.cannot_leave(&from, to) {
            leaving.end(&self.fleet, MoveOutcome::Stayed, Some(why.to_owned()));
            return self.hear_orders();
        }
        if let Some(Running { way: Way::ByTokens(by_tokens), .. }) = &mut self.attempt {
            leaving.slot = by_tokens.slot.take();
        }
        if self.ends_before_it_fails() {
            return leaving.end(&self.fleet, MoveOutcome::Ended, None);
        }
        if self.rest.is_none() {
            if let Some(Running { way: Way::ByTokens(by_tokens), .. }) = &mut self.attempt {
                by_tokens.slot = leaving.slot.take();
            }
            leaving.end(
                &self.fleet,
                MoveOutcome::Stayed,
                Some("what its client asks for, or its engine tells, keeps it from going on elsewhere".to_owned()),
            );
            return self.hear_orders();
        }
        // Its connection is closed, which makes the engine stop.
        self.attempt = None;
        self.leaving = Some(leaving);
        self.session.handle(Input::Leave { epoch }, now);
    }

    fn cannot_leave(&self, from: &Engine, to: ReplicaId) -> Option<&'static str> {
        let model = &self.admitted.live.model;
        let numerics = from.numerics(model);
        let only = (self.fleet.front().continue_streams != crate::config::Continue::Any).then_some(numerics.as_str());
        if from.id == to {
            Some("it runs there")
        } else if !self.first_told {
            Some("it has no token yet")
        } else if self.fleet.cannot_resume(model, only).contains(&to) {
            Some("that replica does not compute the same bits, or not from tokens")
        } else if !self.fleet.engine(to).is_some_and(|engine| engine.facts().takes_requests()) {
            Some("that replica takes no requests")
        } else {
            None
        }
    }

    /// Has the KV of its slot brought to the replica that it leaves for; false where there is none to bring.
    pub(super) fn carry_slot(&mut self, replica: ReplicaId) -> bool {
        let Some(leaving) = &mut self.leaving else { return false };
        let (Some(from), Some(engine)) = (leaving.slot.take(), self.fleet.engine(replica)) else { return false };
        let so_far = (self.admitted.chain.prompt(), self.rest.as_ref().map_or(&[][..], |rest| rest.output()));
        let Some(to) = Slot::take(&engine, so_far) else { return false };
        let fleet: Arc<Fleet> = self.fleet.clone();
        leaving.carrying = Some(Box::pin(async move {
            match slots::carry(&fleet.upstream, &from, &to).await {
                Ok(bytes) => Some(Carried { slot: to, bytes }),
                Err(error) => {
                    tracing::warn!(replica = %engine.name, %error, "a slot is not carried: the stream goes on from its tokens");
                    None
                }
            }
        }));
        true
    }

    pub(super) fn slot_carried(&mut self, carried: Option<Carried>) {
        let Some(leaving) = &mut self.leaving else { return };
        if let Some(Carried { slot, bytes }) = carried {
            leaving.record.bytes_sent = bytes;
            leaving.target = Some(slot);
        }
        let to = leaving.to();
        self.placed(to);
    }

    /// There is no place where it was to go; true where the place that it had will do.
    pub(super) fn stays_after_all(&mut self) -> bool {
        let Some(leaving) = self.leaving.take() else { return false };
        leaving.end(&self.fleet, MoveOutcome::Stayed, Some("there was no place at its target".to_owned()));
        true
    }

    /// Its first token since it left is there.
    pub(super) fn has_left(&mut self, now: Time) {
        let Some(mut leaving) = self.leaving.take() else { return };
        let is_there = self.session.owner().is_some_and(|owner| owner.replica == leaving.record.to);
        leaving.record.gap_ms = leaving.last_token_at.map(|last| now.since(last).as_secs_f64() * 1e3);
        leaving.end(&self.fleet, if is_there { MoveOutcome::Moved } else { MoveOutcome::Continued }, None);
    }

    pub(super) fn left_for_good(&mut self) {
        if let Some(leaving) = self.leaving.take() {
            leaving.end(&self.fleet, MoveOutcome::Ended, None);
        }
    }
}
