use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::Bound,
};

use baton_units::{DurationMs, Priority, RequestId, Time};

use crate::Arrival;

/// Of the queue's rates. Longer than a long prompt, shorter than a change of the load.
const RATE_TAU_MS: f64 = 10_000.0;
/// For so long the first guess of the rate counts as if it had been seen.
const PRIOR_MS: f64 = 1_000.0;

/// Requests that stay in the router, by importance and then by arrival. Bounded by the router's `held_max`.
///
/// It knows how fast it empties, in ms of prefill per ms, measured while somebody waits: so whatever bounds the fleet (prefill, memory,
/// slots) is in the figure, and the wait of one more request is the work before it over that rate.
#[derive(Debug, Default)]
pub(crate) struct Held {
    waiting: BTreeMap<Place, Waiting>,
    places: HashMap<RequestId, Place>,
    deadlines: BTreeSet<(Time, Place)>,
    /// Work that waits, in ms, by importance.
    work: BTreeMap<Priority, f64>,
    next: u64,
    /// Where the last look at those beyond the head ended.
    cursor: Option<Place>,
    at: Time,
    /// Decayed sums over the time that somebody waited: work that left for a replica, and that time.
    released_ms: f64,
    waited_ms: f64,
    /// Work a ms that enters, by class.
    entering: Vec<f64>,
    /// Work that was turned away with a time to come back, and would still be ahead of the next one told to.
    promised_ms: f64,
    /// Something changed since they were last looked at.
    pub(crate) stale: bool,
}

pub(crate) type Place = (Priority, u64);

#[derive(Debug, Clone)]
pub(crate) struct Waiting {
    pub(crate) arrival: Arrival,
    pub(crate) since: Time,
    pub(crate) deadline: Time,
    /// Its prefill, as quoted when it came.
    work_ms: f64,
}

impl Held {
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Whether somebody waits whose turn is before that of a new request of this importance.
    pub(crate) fn someone_before(&self, priority: Priority) -> bool {
        self.waiting.first_key_value().is_some_and(|((first, _), _)| *first <= priority)
    }

    /// Moves the rates to `now`. `fleet` replicas work, each at one ms a ms: the guess before anything was seen.
    pub(crate) fn advance(&mut self, fleet: usize, now: Time) {
        let elapsed = now.since(self.at).as_ms();
        self.at = now.max(self.at);
        let decay = (-elapsed / RATE_TAU_MS).exp();
        self.promised_ms = (self.promised_ms - elapsed * self.rate(fleet)).max(0.0);
        if !self.waiting.is_empty() {
            self.released_ms *= decay;
            self.waited_ms = self.waited_ms * decay + RATE_TAU_MS * (1.0 - decay);
        }
        for rate in &mut self.entering {
            *rate *= decay;
        }
    }

    /// Until those who go before a new request of this importance have left, in ms. Of classes that matter more, those who will come
    /// meanwhile count as well.
    pub(crate) fn wait_ms(&self, priority: Priority, class: usize, fleet: usize) -> f64 {
        let ahead: f64 = self.work.range(..=priority).map(|(_, work)| work).sum();
        if ahead <= 0.0 {
            return 0.0;
        }
        let before: f64 = self.entering.iter().take(class).sum();
        ahead / (self.rate(fleet) - before).max(f64::MIN_POSITIVE)
    }

    /// A request of `work_ms` was turned away that would have waited `excess_ms` too long: when to come back so that those told the same
    /// do not all come at once.
    pub(crate) fn promise_ms(&mut self, work_ms: f64, excess_ms: f64, fleet: usize) -> f64 {
        let after = excess_ms + self.promised_ms / self.rate(fleet);
        self.promised_ms += work_ms;
        after
    }

    /// A request was let in, to a replica at once or to wait here.
    pub(crate) fn enter(&mut self, class: usize, work_ms: f64) {
        if self.entering.len() <= class {
            self.entering.resize(class + 1, 0.0);
        }
        self.entering[class] += work_ms / RATE_TAU_MS;
    }

    /// A request went to a replica without waiting.
    pub(crate) fn pass(&mut self, work_ms: f64) {
        if !self.is_empty() {
            self.released_ms += work_ms;
        }
    }

    pub(crate) fn push(&mut self, arrival: Arrival, deadline: Time, work_ms: f64, now: Time) {
        let place = (arrival.priority, self.next);
        self.next += 1;
        self.places.insert(arrival.request, place);
        self.deadlines.insert((deadline, place));
        *self.work.entry(arrival.priority).or_default() += work_ms;
        self.waiting.insert(place, Waiting { arrival, since: now, deadline, work_ms });
        self.stale = true;
    }

    /// At most `most` places, in order: half of them from the head, the rest from where the last call ended, so that those who could go
    /// are found behind ones who wait for something else.
    pub(crate) fn look_at(&mut self, most: usize) -> Vec<Place> {
        let mut places: Vec<Place> = self.waiting.keys().take(most / 2).copied().collect();
        let Some(&last) = places.last() else { return places };
        let from = self.cursor.map_or(last, |cursor| cursor.max(last));
        let beyond = (Bound::Excluded(from), Bound::Unbounded);
        places.extend(self.waiting.range(beyond).take(most - places.len()).map(|(place, _)| *place));
        self.cursor = if places.len() == most { places.last().copied() } else { None };
        places
    }

    pub(crate) fn get(&self, place: Place) -> Option<&Waiting> {
        self.waiting.get(&place)
    }

    /// It goes to a replica.
    pub(crate) fn release(&mut self, place: Place) {
        if let Some(waiting) = self.remove(place) {
            self.released_ms += waiting.work_ms;
        }
    }

    /// The first whose deadline has come, taken out.
    pub(crate) fn take_late(&mut self, now: Time) -> Option<Waiting> {
        let &(_, place) = self.deadlines.first().filter(|(deadline, _)| *deadline <= now)?;
        self.remove(place)
    }

    /// Removes a request whose client left.
    pub(crate) fn cancel(&mut self, request: RequestId) -> bool {
        let place = self.places.get(&request).copied();
        place.is_some_and(|place| self.remove(place).is_some())
    }

    pub(crate) fn first_deadline(&self) -> Option<Time> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    pub(crate) fn remove(&mut self, place: Place) -> Option<Waiting> {
        let waiting = self.waiting.remove(&place)?;
        self.places.remove(&waiting.arrival.request);
        self.deadlines.remove(&(waiting.deadline, place));
        if let Some(work) = self.work.get_mut(&place.0) {
            *work -= waiting.work_ms;
            if *work <= 1e-6 {
                self.work.remove(&place.0);
            }
        }
        Some(waiting)
    }

    /// Work that leaves a ms while somebody waits.
    fn rate(&self, fleet: usize) -> f64 {
        (self.released_ms + fleet.max(1) as f64 * PRIOR_MS) / (self.waited_ms + PRIOR_MS)
    }
}
