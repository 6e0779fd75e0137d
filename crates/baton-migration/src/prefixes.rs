use std::{collections::BTreeMap, time::Duration};

use baton_units::{Blocks, Time};

use crate::{GatewayName, Place, RequestName, Tag, Timing};

/// Copies under way that a replica takes part in, on each side, at most: they share its link, and one more would make all late.
pub const PREFIX_COPIES_MAX: usize = 4;

/// What a replica is to do for a copy of a cached prefix, or says of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PrefixOutput {
    /// Take references on what is cached of it and bring it to the target.
    Send { target: Place },
    /// End its connection and let go of what is held for it.
    Drop,
    /// To the gateway: so many leading blocks of it are in this side's cache.
    Copied { blocks: Blocks },
    /// To the gateway: nothing comes of it.
    Aborted,
}

/// The copies of cached prefixes that one life of a replica takes part in. Nobody owns such a copy and nothing is frozen for it: whoever
/// fails leaves both caches valid. So each side lets go by itself, when the other one is gone, when the gateway says so or is not heard
/// of, and at last by time; and what it answered once it answers again.
#[derive(Debug, Default)]
pub(crate) struct Prefixes {
    copies: BTreeMap<RequestName, Copy>,
}

#[derive(Debug)]
struct Copy {
    attempt: Tag,
    side: Side,
    /// When it began, or ended.
    since: Time,
    /// None while it is under way.
    end: Option<End>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Holder,
    Target,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Copied(Blocks),
    Aborted,
    /// The gateway wants no answer.
    Stopped,
}

impl End {
    fn answer(self) -> Option<PrefixOutput> {
        match self {
            Self::Copied(blocks) => Some(PrefixOutput::Copied { blocks }),
            Self::Aborted => Some(PrefixOutput::Aborted),
            Self::Stopped => None,
        }
    }
}

type Outputs = Vec<(RequestName, Tag, PrefixOutput)>;

impl Prefixes {
    /// Whether the copy is under way at this side.
    pub(crate) fn holds(&self, request: RequestName, attempt: Tag) -> bool {
        self.copies.get(&request).is_some_and(|copy| copy.attempt == attempt && copy.end.is_none())
    }

    pub(crate) fn under_way(&self) -> impl Iterator<Item = RequestName> {
        self.copies.iter().filter(|(_, copy)| copy.end.is_none()).map(|(name, _)| *name)
    }

    /// The gateway wants it copied to `target`. `over`: it was stopped before.
    pub(crate) fn copy(&mut self, request: RequestName, attempt: Tag, target: Place, over: bool, now: Time, out: &mut Outputs) {
        if let Some(copy) = self.copies.get(&request).filter(|copy| copy.attempt >= attempt) {
            let answer = copy.end.filter(|_| copy.attempt == attempt).and_then(End::answer);
            out.extend(answer.map(|answer| (request, attempt, answer)));
            return;
        }
        let refused = over || self.is_full(Side::Holder);
        self.begin(request, attempt, Side::Holder, now, out);
        if refused {
            // For good, as its gateway will hear.
            self.copies.insert(request, Copy { attempt, side: Side::Holder, since: now, end: Some(End::Aborted) });
            out.push((request, attempt, PrefixOutput::Aborted));
        } else {
            out.push((request, attempt, PrefixOutput::Send { target }));
        }
    }

    /// A holder that was announced brings it; [`Self::holds`] tells whether it may.
    pub(crate) fn take(&mut self, request: RequestName, attempt: Tag, now: Time, out: &mut Outputs) {
        let known = self.copies.get(&request).is_some_and(|copy| copy.attempt >= attempt);
        if !known && !self.is_full(Side::Target) {
            self.begin(request, attempt, Side::Target, now, out);
        }
    }

    fn begin(&mut self, request: RequestName, attempt: Tag, side: Side, now: Time, out: &mut Outputs) {
        if let Some(older) = self.copies.get(&request).filter(|copy| copy.end.is_none()) {
            out.push((request, older.attempt, PrefixOutput::Drop));
        }
        self.copies.insert(request, Copy { attempt, side, since: now, end: None });
    }

    fn is_full(&self, side: Side) -> bool {
        self.copies.values().filter(|copy| copy.side == side && copy.end.is_none()).count() >= PREFIX_COPIES_MAX
    }

    /// What this side's part of the copy came to: blocks that are cached, or none where it failed.
    pub(crate) fn ended(&mut self, request: RequestName, attempt: Tag, blocks: Option<Blocks>, now: Time, out: &mut Outputs) {
        if self.holds(request, attempt) {
            self.end(request, blocks.map_or(End::Aborted, End::Copied), now, out);
        }
    }

    pub(crate) fn stop(&mut self, request: RequestName, upto: Tag, now: Time, out: &mut Outputs) {
        if self.copies.get(&request).is_some_and(|copy| copy.attempt <= upto && copy.end.is_none()) {
            self.end(request, End::Stopped, now, out);
        }
    }

    /// No lease covers the gateway's copies any more.
    pub(crate) fn lapse(&mut self, gateway: GatewayName, now: Time, out: &mut Outputs) {
        self.end_where(|name, _| name.gateway == gateway, End::Stopped, now, out);
    }

    pub(crate) fn timeout(&mut self, timing: &Timing, now: Time, out: &mut Outputs) {
        self.end_where(|_, copy| now.since(copy.since) >= timing.attempt, End::Aborted, now, out);
        self.copies.retain(|_, copy| copy.end.is_none() || now.since(copy.since) < remembered(timing));
    }

    pub(crate) fn poll_timeout(&self, timing: &Timing) -> Time {
        let due = |copy: &Copy| copy.since + if copy.end.is_none() { timing.attempt } else { remembered(timing) };
        self.copies.values().map(due).min().unwrap_or(Time::NEVER)
    }

    fn end_where(&mut self, ends: impl Fn(&RequestName, &Copy) -> bool, end: End, now: Time, out: &mut Outputs) {
        let names: Vec<RequestName> =
            self.copies.iter().filter(|(name, copy)| copy.end.is_none() && ends(name, copy)).map(|(name, _)| *name).collect();
        for request in names {
            self.end(request, end, now, out);
        }
    }

    fn end(&mut self, request: RequestName, end: End, now: Time, out: &mut Outputs) {
        let Some(copy) = self.copies.get_mut(&request) else { return };
        (copy.end, copy.since) = (Some(end), now);
        let attempt = copy.attempt;
        out.push((request, attempt, PrefixOutput::Drop));
        out.extend(end.answer().map(|answer| (request, attempt, answer)));
    }
}

/// A repeated order is known as such for so long after the end.
fn remembered(timing: &Timing) -> Duration {
    2 * timing.free_after
}
