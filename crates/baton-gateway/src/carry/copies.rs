//! Copies of cached prefixes, which replicas make at the gateway's word and without a request.

use baton_migration::{OwnersInput, Place, RequestName, Tag, ToSeat};
use baton_units::{DurationMs, ReplicaId, RequestId, Time, Tokens};
use baton_wire::migration::{ControlFrame, MoveTo, PrefixCopied, RunRequest};
use tokio::sync::oneshot;
use xxhash_rust::xxh3::xxh3_64;

use super::{Desk, Effect, MoveOutcome, MoveRecord};

/// A copy is tried once, under a name of its own.
const ATTEMPT: Tag = Tag(1);

/// What is to be copied where, and for what.
#[derive(Debug)]
pub(crate) struct PrefixOrder {
    /// For whom: the request that waits for it, or the router's own.
    pub(crate) request: RequestId,
    pub(crate) from: ReplicaId,
    pub(crate) to: ReplicaId,
    /// Of what would run after the prefix, model, prompt, adapter and salt.
    pub(crate) prefix: RunRequest,
    /// One word, and in words and numbers.
    pub(crate) kind: &'static str,
    pub(crate) reason: String,
    /// What it is expected to take.
    pub(crate) expected_ms: f64,
}

/// A copy that is under way.
#[derive(Debug)]
pub(super) struct Copying {
    from: Place,
    to: Place,
    record: MoveRecord,
    since: Time,
    told: oneshot::Sender<MoveRecord>,
}

impl Desk {
    /// Whether what is cached at `from` can be copied to `to`: both are reached, know how, and read each other's KV.
    pub(crate) fn can_copy(&self, from: ReplicaId, to: ReplicaId) -> bool {
        let (Some((from, holder)), Some((to, target))) = (self.link(from), self.link(to)) else { return false };
        let alike = holder.numerics_id == target.numerics_id && holder.kv_layout == target.kv_layout && holder.kv_layout.is_some();
        from != to && holder.copies_prefixes && target.copies_prefixes && alike && target.kv_address.is_some()
    }

    /// Names what decides the bits of a replica's KV and how they lie, where it is reached and copies prefixes.
    pub(crate) fn peer_group(&self, replica: ReplicaId) -> Option<u64> {
        let (_, link) = self.link(replica).filter(|(_, link)| link.copies_prefixes)?;
        let layout = link.kv_layout.as_ref()?;
        Some(xxh3_64(format!("{}\n{layout:?}", link.numerics_id).as_bytes()))
    }

    /// Begins a copy, and tells by what number it can be ended; the receiver hears how it ended. `None` where it cannot be.
    pub(crate) fn copy_prefix(&mut self, order: PrefixOrder, now: Time) -> Option<(u64, oneshot::Receiver<MoveRecord>)> {
        if !self.can_copy(order.from, order.to) {
            return None;
        }
        let ((from, _), (to, target)) = (self.link(order.from)?, self.link(order.to)?);
        let mut nonce = [0; 16];
        getrandom::fill(&mut nonce).expect("the system has random numbers");
        let move_to = MoveTo { kv_address: target.kv_address.clone()?, nonce }.to_bytes();
        let number = self.next;
        self.next += 1;
        let request = RequestName { gateway: self.name, sequence: number };
        self.send_frame(to, ControlFrame::Expect { request, attempt: ATTEMPT, source: from, nonce });
        let prefix = order.prefix.to_bytes();
        self.send_frame(from, ControlFrame::CopyPrefix { request, attempt: ATTEMPT, target: to, to: move_to, prefix });
        let tokens = Tokens(order.prefix.prompt.len() as u32);
        let record = MoveRecord {
            outcome: MoveOutcome::Stayed,
            expected_ms: Some(order.expected_ms),
            ..MoveRecord::begun(order.request, 0, (order.from, order.to), order.kind, order.reason, tokens)
        };
        let (told, receiver) = oneshot::channel();
        self.copies.insert(number, Copying { from, to, record, since: now, told });
        Some((number, receiver))
    }

    /// Nobody waits for the copy any more: both replicas let go of what they hold for it. What comes of it all the same is cached there.
    pub(crate) fn end_copy(&mut self, number: u64, now: Time) {
        let Some(copying) = self.copies.get(&number) else { return };
        let request = RequestName { gateway: self.name, sequence: number };
        for place in [copying.from, copying.to] {
            // Once: what is not heard ends by itself, with its connection or its lease.
            self.send_frame(place, ControlFrame::ToSeat { request, message: ToSeat::Stop { upto: Tag::ALL }, with: Vec::new() });
        }
        self.close_copy(number, MoveOutcome::Ended, None, now);
    }

    pub(super) fn is_copy(&self, number: u64) -> bool {
        self.copies.contains_key(&number)
    }

    /// Either side has it: it is there when the target has.
    pub(super) fn copy_done(&mut self, number: u64, from: Place, copied: PrefixCopied, now: Time) {
        let Some(copying) = self.copies.get_mut(&number).filter(|copying| copying.to == from) else { return };
        let record = &mut copying.record;
        (record.bytes_sent, record.blocks_already_held) = (copied.bytes, copied.held);
        record.copied_ms = Some(now.since(copying.since).as_ms());
        self.close_copy(number, MoveOutcome::Moved, None, now);
    }

    /// Either side gave it up.
    pub(super) fn copy_failed(&mut self, number: u64, why: &str, now: Time) {
        self.close_copy(number, MoveOutcome::Stayed, Some(why.to_owned()), now);
    }

    /// A life of a replica is over, and its copies with it.
    pub(super) fn end_copies_of(&mut self, place: Place, now: Time) {
        let lost = |copying: &Copying| copying.from == place || copying.to == place;
        let numbers: Vec<u64> = self.copies.iter().filter(|(_, copying)| lost(copying)).map(|(number, _)| *number).collect();
        for number in numbers {
            self.copy_failed(number, "its replica is lost", now);
        }
    }

    fn close_copy(&mut self, number: u64, outcome: MoveOutcome, why: Option<String>, now: Time) {
        let Some(Copying { record, since, told, .. }) = self.copies.remove(&number) else { return };
        let record = MoveRecord { outcome, why, took_ms: now.since(since).as_ms(), ..record };
        self.log.push(record.clone());
        self.effects.push(Effect::Ended(record.clone()));
        // Who asked may have gone.
        _ = told.send(record);
    }

    /// A place that is gone, in whatever way.
    pub(super) fn lose(&mut self, place: Place, now: Time) {
        self.end_copies_of(place, now);
        self.tell(OwnersInput::Gone { place }, now);
    }
}
