use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::Bound,
    time::Duration,
};

use baton_units::{DurationMs, Priority, RequestId, Time};

use crate::{
    Arrival, Share,
    turns::{Turn, Turns},
};

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

/// Requests that stay in the router, by importance, then by their tenants' turns, then by arrival. Bounded by the router's `held_max`.
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
    turns: Turns,
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

pub(crate) type Place = (Priority, Turn, u64);

#[derive(Debug, Clone)]
pub(crate) struct Waiting {
    pub(crate) arrival: Arrival,
    pub(crate) since: Time,
    pub(crate) deadline: Time,
    /// Its prefill, as quoted when it came.
    pub(crate) work_ms: f64,
    /// What its tenant was charged.
    service: f64,
}

impl Held {
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Whether somebody waits whose turn is before that of this new request.
    pub(crate) fn someone_before(&self, arrival: &Arrival) -> bool {
        self.waiting.first_key_value().is_some_and(|(first, _)| *first < self.place_of(arrival))
    }

    /// Where a request that comes now would wait.
    fn place_of(&self, arrival: &Arrival) -> Place {
        (arrival.priority, self.turns.of(arrival.share), self.next)
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

    /// Until those who go before this new request have left, in ms, for nearly all. Of classes that matter more, those
    /// who will come meanwhile count as well. `fleet` replicas work, each at one ms a ms: the guess before anything was seen.
    pub(crate) fn wait_ms(&self, arrival: &Arrival, class: usize, fleet: usize) -> f64 {
        let ahead: f64 = if self.turns.is_plain() {
            self.work.range(..=arrival.priority).map(|(_, work)| work).sum()
        } else {
            self.waiting.range(..self.place_of(arrival)).map(|(_, waiting)| waiting.work_ms).sum()
        };
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

    /// A request of so much service went to a replica without waiting.
    pub(crate) fn pass(&mut self, arrival: &Arrival, service: f64, work_ms: f64) {
        let turn = self.turns.take(arrival.share, service);
        self.turns.came(turn);
        if !self.is_empty() {
            self.released_ms += work_ms;
        }
    }

    /// Where all places are taken: ends the time of the one whose turn is last, for a request whose tenant's turn is before it. False where
    /// there is none such, or where the last one who had to go is still here.
    pub(crate) fn displace_last(&mut self, arrival: &Arrival, now: Time) -> bool {
        let place = self.place_of(arrival);
        let last = self.waiting.last_entry().filter(|last| arrival.share.is_some() && *last.key() > place && last.get().deadline > now);
        let Some(mut last) = last else { return false };
        let place = *last.key();
        self.deadlines.remove(&(last.get().deadline, place));
        last.get_mut().deadline = now;
        self.deadlines.insert((now, place));
        true
    }

    /// The tenant of a running request got output.
    pub(crate) fn serve(&mut self, share: Option<Share>, service: f64) {
        self.turns.serve(share, service);
    }

    pub(crate) fn push(&mut self, arrival: Arrival, deadline: Time, service: f64, work_ms: f64, now: Time) {
        let place = (arrival.priority, self.turns.take(arrival.share, service), self.next);
        self.next += 1;
        self.places.insert(arrival.request, place);
        self.deadlines.insert((deadline, place));
        *self.work.entry(arrival.priority).or_default() += work_ms;
        self.waiting.insert(place, Waiting { arrival, since: now, deadline, work_ms, service });
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
        if let Some(waiting) = self.take(place) {
            self.released_ms += waiting.work_ms;
            self.turns.came(place.1);
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

    /// It leaves without having been served.
    pub(crate) fn remove(&mut self, place: Place) -> Option<Waiting> {
        let waiting = self.take(place)?;
        self.turns.serve(waiting.arrival.share, -waiting.service);
        Some(waiting)
    }

    fn take(&mut self, place: Place) -> Option<Waiting> {
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
    use proptest::prelude::*;

    use super::*;
    use crate::Slo;

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

    fn arrival(request: u64, share: Option<Share>) -> Arrival {
        Arrival {
            request: RequestId(request),
            keys: [].into(),
            prompt: baton_units::Tokens(10),
            max_output: None,
            session: None,
            program: None,
            share,
            priority: Priority(0),
            slo: Slo::default(),
            excluded: Vec::new(),
        }
    }

    #[test]
    fn misses_lengthen_the_expected_wait_of_their_class_and_are_forgotten() {
        let mut held = Held::default();
        held.push(arrival(1, None), Time::from_ms(1e9), 10.0, 1000.0, Time::ZERO);
        let wait = |held: &Held, class| held.wait_ms(&arrival(2, None), class, 1);
        let usual = wait(&held, 1);
        (0..20).for_each(|_| held.missed(1));
        assert!((wait(&held, 1) / usual - 2.0).abs() < 1e-9 && (wait(&held, 0) - usual).abs() < 1e-9);
        (0..1000).for_each(|_| held.missed(1));
        assert!((wait(&held, 1) / usual - 1.0 - STRETCH_MAX).abs() < 1e-9, "no wait is taken for more than that many times as long");
        held.advance(Time::from_ms(600_000.0));
        assert!(wait(&held, 1) < 2.0 * wait(&held, 0));
    }

    /// The next one goes to a replica: its tenant and its service.
    fn serve_next(held: &mut Held) -> Option<(u64, f64)> {
        let place = *held.waiting.keys().next()?;
        let waiting = &held.waiting[&place];
        let served = (waiting.arrival.share.map_or(0, |share| share.tenant), waiting.service);
        held.release(place);
        Some(served)
    }

    proptest! {
        /// Goyal's bound: while two tenants have requests waiting all along, what they got by their weights differs by no more than a
        /// request of each.
        #[test]
        fn tenants_who_wait_all_along_are_served_by_their_weights(
            weights in (1u32..10, 1u32..10),
            sizes in prop::collection::vec((1u32..1000, 1u32..1000), 40..80),
            begun in 0u32..5000,
        ) {
            let weights = [f64::from(weights.0), f64::from(weights.1)];
            let share = |tenant: usize| Some(Share { tenant: tenant as u64, weight: weights[tenant] });
            let mut held = Held::default();
            // One of them had the fleet to itself for a while, which the other cannot claim back.
            held.pass(&arrival(0, share(0)), f64::from(begun), 1.0);
            held.pass(&arrival(0, share(0)), 1.0, 1.0);
            let mut requests = 1;
            for (first, second) in &sizes {
                for (tenant, service) in [(0, first), (1, second)] {
                    held.push(arrival(requests, share(tenant)), Time::from_ms(1e9), f64::from(*service), 1.0, Time::ZERO);
                    requests += 1;
                }
            }
            let (mut got, mut left) = ([0.0; 2], [sizes.len(); 2]);
            let largest = |pick: fn(&(u32, u32)) -> u32| f64::from(sizes.iter().map(pick).max().unwrap());
            let bound = largest(|sizes| sizes.0) / weights[0] + largest(|sizes| sizes.1) / weights[1];
            while let Some((tenant, service)) = serve_next(&mut held) {
                got[tenant as usize] += service / weights[tenant as usize];
                left[tenant as usize] -= 1;
                if left.contains(&0) {
                    break;
                }
                prop_assert!((got[0] - got[1]).abs() <= bound + 1.0, "{:?} of {:?} with {}", got, weights, bound);
            }
        }

        /// Without tenants, and among one tenant's requests, it is the order of arrival.
        #[test]
        fn requests_of_one_tenant_leave_as_they_came(services in prop::collection::vec(1u32..1000, 1..50), alone in any::<bool>()) {
            let mut held = Held::default();
            let share = alone.then_some(Share { tenant: 3, weight: 2.0 });
            for (request, service) in services.iter().enumerate() {
                held.push(arrival(request as u64, share), Time::from_ms(1e9), f64::from(*service), 1.0, Time::ZERO);
            }
            let order: Vec<u64> = held.waiting.values().map(|waiting| waiting.arrival.request.0).collect();
            prop_assert!(order.is_sorted());
        }
    }

    #[test]
    fn output_counts_and_what_was_never_served_does_not() {
        let share = |tenant| Some(Share { tenant, weight: 1.0 });
        let mut held = Held::default();
        let forever = Time::from_ms(1e9);
        held.push(arrival(1, share(1)), forever, 100.0, 1.0, Time::ZERO);
        held.push(arrival(2, share(2)), forever, 100.0, 1.0, Time::ZERO);
        held.serve(share(1), 50.0);
        held.cancel(RequestId(2));
        held.push(arrival(3, share(1)), forever, 100.0, 1.0, Time::ZERO);
        held.push(arrival(4, share(2)), forever, 100.0, 1.0, Time::ZERO);
        held.push(arrival(5, share(2)), forever, 100.0, 1.0, Time::ZERO);
        let order: Vec<u64> = held.waiting.values().map(|waiting| waiting.arrival.request.0).collect();
        assert_eq!(order, [1, 4, 5, 3]);
    }
}
