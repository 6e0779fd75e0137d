use std::collections::BTreeMap;

use baton_units::{Priority, RequestId, Time};

use crate::Arrival;

/// Requests that stay in the router, by importance and then by arrival. Bounded by the router's `held_max`.
#[derive(Debug, Default)]
pub(crate) struct Held {
    waiting: BTreeMap<Place, Waiting>,
    next: u64,
    /// Something changed since they were last looked at.
    pub(crate) stale: bool,
}

pub(crate) type Place = (Priority, u64);

#[derive(Debug, Clone)]
pub(crate) struct Waiting {
    pub(crate) arrival: Arrival,
    pub(crate) since: Time,
}

impl Held {
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(crate) fn push(&mut self, arrival: Arrival, now: Time) {
        self.waiting.insert((arrival.priority, self.next), Waiting { arrival, since: now });
        self.next += 1;
    }

    /// Places in order.
    pub(crate) fn places(&self) -> Vec<Place> {
        self.waiting.keys().copied().collect()
    }

    pub(crate) fn get(&self, place: Place) -> Option<&Waiting> {
        self.waiting.get(&place)
    }

    pub(crate) fn remove(&mut self, place: Place) -> Option<Waiting> {
        self.waiting.remove(&place)
    }

    /// Removes a request whose client left.
    pub(crate) fn cancel(&mut self, request: RequestId) -> bool {
        let place = self.waiting.iter().find(|(_, waiting)| waiting.arrival.request == request).map(|(place, _)| *place);
        place.is_some_and(|place| self.waiting.remove(&place).is_some())
    }

    /// When the first of them entered.
    pub(crate) fn oldest(&self) -> Option<Time> {
        self.waiting.values().map(|waiting| waiting.since).min()
    }
}
