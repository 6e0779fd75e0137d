use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::Bound,
    time::Duration,
};

use baton_units::{DurationMs, Priority, RequestId, Time};

use crate::Arrival;

/// Of the queue's rates. Longer than a long prompt, shorter than a change of the load.
const RATE_TAU_MS: f64 = 10_000.0;
/// For so long the first guess of the rate counts as if it had been seen.
const PRIOR_MS: f64 = 1_000.0;
/// Of the load that is asked for: those told to come back do so minutes later and meet what is usual then, not the burst of the moment.
const LOAD_TAU_MS: f64 = 120_000.0;
/// Share of the fleet's rate that those told to come back are spread over at least, however much else is asked for. Lower: fewer of them
/// come in vain while an overload lasts, and the fleet idles longer when it ends.
const RETURNS_SHARE: f64 = 0.25;
/// Bounds of what a client is told to wait: clients count in seconds, and nobody knows the load of an hour ahead.
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_mins(10);
/// What one request that was not served in time adds to the stretch of waits, how long that counts, and the most in all.
const STRETCH_STEP: f64 = 0.05;
const STRETCH_TAU_MS: f64 = 60_000.0;
const STRETCH_MAX: f64 = 7.0;

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
    /// Work that was asked for over the decayed time since, by class; without that of those who were told to come, as it falls due.
    offered_ms: Vec<f64>,
    seen_ms: f64,
    /// Work that was told to come back, by second and class. No more seconds than a client is told to wait at most.
    due: BTreeMap<(u64, usize), f64>,
    /// When the next one that is told to come back finds those told before it gone, by class.
    next_return: Vec<Time>,
    /// By how much the wait of the unluckiest exceeds that of the mean, as a share of it, by class: some wait for one replica, and those
    /// behind them who do not are let past.
    stretch: Vec<f64>,
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
    pub(crate) work_ms: f64,
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

    /// The classes are others from here on: what was learnt of each is forgotten, and those who were told to come back are no longer expected.
    pub(crate) fn forget_classes(&mut self) {
        (self.entering, self.offered_ms, self.next_return, self.stretch) = Default::default();
        self.due.clear();
    }

    /// Moves the rates to `now`.
    pub(crate) fn advance(&mut self, now: Time) {
        let elapsed = now.since(self.at).as_ms();
        self.at = now.max(self.at);
        let decay = (-elapsed / RATE_TAU_MS).exp();
        for stretch in &mut self.stretch {
            *stretch *= (-elapsed / STRETCH_TAU_MS).exp();
        }
        let decay_load = (-elapsed / LOAD_TAU_MS).exp();
        self.seen_ms = self.seen_ms * decay_load + LOAD_TAU_MS * (1.0 - decay_load);
        for offered in &mut self.offered_ms {
            *offered *= decay_load;
        }
        while let Some(due) = self.due.first_entry().filter(|due| due.key().0 <= second(self.at)) {
            let ((_, class), work_ms) = due.remove_entry();
            let offered = at_class(&mut self.offered_ms, class);
            *offered = (*offered - work_ms).max(0.0);
        }
        if !self.waiting.is_empty() {
            self.released_ms *= decay;
            self.waited_ms = self.waited_ms * decay + RATE_TAU_MS * (1.0 - decay);
        }
        for rate in &mut self.entering {
            *rate *= decay;
        }
    }

    /// Until those who go before a new request of this importance have left, in ms, for nearly all. Of classes that matter more, those
    /// who will come meanwhile count as well. `fleet` replicas work, each at one ms a ms: the guess before anything was seen.
    pub(crate) fn wait_ms(&self, priority: Priority, class: usize, fleet: usize) -> f64 {
        let ahead: f64 = self.work.range(..=priority).map(|(_, work)| work).sum();
        if ahead <= 0.0 {
            return 0.0;
        }
        let before: f64 = self.entering.iter().take(class).sum();
        let stretch = 1.0 + self.stretch.get(class).copied().unwrap_or(0.0);
        stretch * ahead / (self.rate(fleet) - before).max(f64::MIN_POSITIVE)
    }

    /// A request of `work_ms` was turned away that would have waited `excess_ms` too long: when to come back.
    ///
    /// Those told so are spread over what the usual load of their class, and of those that matter more, leaves of the fleet: each finds
    /// the ones told before it gone. If fewer come back than were told, the load looks lower by as much, and the next are told to come
    /// sooner.
    pub(crate) fn promise(&mut self, class: usize, work_ms: f64, excess_ms: f64, fleet: usize) -> Duration {
        let rate = self.rate(fleet);
        let load = self.offered_ms.iter().take(class + 1).sum::<f64>() / (self.seen_ms + PRIOR_MS);
        let spare = (rate - load).max(RETURNS_SHARE * rate);
        let before = self.next_return.iter().take(class + 1).copied().fold(self.at, Time::max);
        *at_class(&mut self.next_return, class) = (before + Duration::from_ms(work_ms / spare)).min(self.at + RETRY_MAX);
        let after = before.since(self.at).saturating_add(Duration::from_ms(excess_ms)).clamp(RETRY_MIN, RETRY_MAX);
        *self.due.entry((second(self.at + after), class)).or_default() += work_ms;
        after
    }

    /// A request was asked for.
    pub(crate) fn offer(&mut self, class: usize, work_ms: f64) {
        *at_class(&mut self.offered_ms, class) += work_ms;
    }

    /// A request was let in, to a replica at once or to wait here.
    pub(crate) fn enter(&mut self, class: usize, work_ms: f64) {
        *at_class(&mut self.entering, class) += work_ms / RATE_TAU_MS;
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

    pub(crate) fn first(&self) -> Option<&Waiting> {
        self.waiting.first_key_value().map(|(_, waiting)| waiting)
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

    /// A request was let in and not served in time: fewer are let in from here on.
    pub(crate) fn missed(&mut self, class: usize) {
        let stretch = at_class(&mut self.stretch, class);
        *stretch = (*stretch + STRETCH_STEP).min(STRETCH_MAX);
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

fn at_class<T: Clone + Default>(values: &mut Vec<T>, class: usize) -> &mut T {
    if values.len() <= class {
        values.resize(class + 1, T::default());
    }
    &mut values[class]
}

fn second(at: Time) -> u64 {
    (at.as_ms() / 1e3) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ten minutes of one request of 100 ms every so often, on one replica.
    fn after_load(every_ms: f64) -> Held {
        let mut held = Held::default();
        for place in 0..(600_000.0 / every_ms) as u32 {
            held.advance(Time::from_ms(f64::from(place) * every_ms));
            held.offer(1, 100.0);
        }
        held
    }

    #[test]
    fn those_told_to_come_back_are_spread_over_what_the_usual_load_leaves() {
        for (every_ms, apart_ms) in [(200.0, 200.0), (143.0, 333.0), (50.0, 400.0)] {
            let mut held = after_load(every_ms);
            let told: Vec<f64> = (0..100).map(|_| held.promise(1, 100.0, 0.0, 1).as_ms()).collect();
            let apart = (told[99] - told[50]) / 49.0;
            assert!((apart / apart_ms - 1.0).abs() < 0.05, "one every {every_ms} ms: {apart}");
        }
    }

    #[test]
    fn those_who_come_when_told_are_no_usual_load() {
        let mut held = after_load(200.0);
        // Two minutes of them, one every 200 ms beside the others.
        (0..600).for_each(|_| _ = held.promise(1, 100.0, 0.0, 1));
        let began = held.at;
        for place in 0..600_u32 {
            held.advance(began + Duration::from_millis(200) * place);
            (0..2).for_each(|_| held.offer(1, 100.0));
        }
        let first = held.promise(1, 100.0, 0.0, 1);
        let apart = (held.next_return[1] - held.at).as_ms();
        assert!(first == RETRY_MIN && (180.0..220.0).contains(&apart), "{first:?}, then {apart} ms");
    }

    #[test]
    fn the_important_do_not_wait_for_those_told_of_a_lesser_class() {
        let mut held = after_load(200.0);
        let lesser: Vec<Duration> = (0..50).map(|_| held.promise(1, 100.0, 0.0, 1)).collect();
        assert_eq!(held.promise(0, 100.0, 0.0, 1), RETRY_MIN);
        assert!(held.promise(1, 100.0, 0.0, 1) >= *lesser.last().unwrap());
    }

    #[test]
    fn misses_lengthen_the_expected_wait_of_their_class_and_are_forgotten() {
        let mut held = Held::default();
        let arrival = Arrival {
            request: RequestId(1),
            keys: [].into(),
            prompt: baton_units::Tokens(10),
            max_output: None,
            session: None,
            program: None,
            priority: Priority(0),
            excluded: Vec::new(),
        };
        held.push(arrival, Time::from_ms(1e9), 1000.0, Time::ZERO);
        let wait = |held: &Held, class| held.wait_ms(Priority(0), class, 1);
        let usual = wait(&held, 1);
        (0..20).for_each(|_| held.missed(1));
        assert!((wait(&held, 1) / usual - 2.0).abs() < 1e-9 && (wait(&held, 0) - usual).abs() < 1e-9);
        (0..1000).for_each(|_| held.missed(1));
        assert!((wait(&held, 1) / usual - 1.0 - STRETCH_MAX).abs() < 1e-9, "no wait is taken for more than that many times as long");
        held.advance(Time::from_ms(600_000.0));
        assert!(wait(&held, 1) < 2.0 * wait(&held, 0));
    }
}
