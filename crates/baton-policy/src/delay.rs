/// Free replicas beyond which one less makes no small request wait.
const CROWD_MAX: usize = 16;
/// What takes less than this share of some work is small beside it.
const SMALL_SHARE: f64 = 0.5;

/// Prefill work queued on one replica, and what a prompt waits there.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Backlog {
    pub(crate) ms: f64,
    /// Wait of a short prompt where chunks interleave; infinite where prompts go in order.
    pub(crate) short_ms: f64,
    /// A long prompt's chunk: what takes longer than this is long.
    pub(crate) long_chunk_ms: f64,
    pub(crate) has_long: bool,
}

impl Backlog {
    /// Prompts in order.
    pub(crate) fn in_order(ms: f64) -> Self {
        Self { ms, short_ms: f64::INFINITY, long_chunk_ms: f64::INFINITY, has_long: false }
    }

    /// What a prompt of `work_ms` waits.
    pub(crate) fn wait_ms(&self, work_ms: f64) -> f64 {
        self.ms.min(self.short_wait_ms(work_ms))
    }

    /// At most this, as long as the backlog lasts.
    fn short_wait_ms(&self, work_ms: f64) -> f64 {
        if work_ms > self.long_chunk_ms { f64::INFINITY } else { self.short_ms }
    }

    fn with(&self, work_ms: f64) -> Self {
        let long = work_ms > self.long_chunk_ms;
        let more = match (long, self.has_long) {
            (false, _) => work_ms,
            (true, false) => 1.5 * self.long_chunk_ms,
            (true, true) => 0.0,
        };
        Self { ms: self.ms + work_ms, short_ms: self.short_ms + more, has_long: self.has_long || long, ..*self }
    }
}

/// One request that may come: what it costs on each candidate, and when it would end on the best replica that is none.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Coming<'a> {
    pub(crate) costs: &'a [f64],
    pub(crate) elsewhere: f64,
    /// It is not late as long as it ends this soon after it came. Zero counts all of its time.
    pub(crate) in_time_ms: f64,
}

/// Computes what work on a replica costs those who come later; kept for its memory.
#[derive(Debug, Default)]
pub(crate) struct Delays {
    queues: Vec<Queue>,
    /// Those that matter to one request, with its cost there.
    kept: Vec<(Queue, f64)>,
    /// By the number of queues that are over: what the others offer.
    busy: Vec<Busy>,
    by_place: Vec<f64>,
    /// Least cost of each that may come, in order, and sums over them.
    small: Vec<f64>,
}

/// A candidate before and after the work, by the end of its backlog.
#[derive(Debug, Clone, Copy)]
struct Queue {
    place: usize,
    before: Backlog,
    after: Backlog,
    work_ms: f64,
}

/// Ends on offer by replicas that are not yet idle. A prompt that comes at `t` ends at `ends - t` after it came, or at `shorts` where
/// chunks interleave.
#[derive(Debug, Clone, Copy)]
struct Busy {
    ends: TwoLeast,
    shorts: TwoLeast,
}

impl Delays {
    /// Expected delay in ms that work placed on a candidate imposes on requests yet to come, for each candidate.
    ///
    /// For arrivals at `rate` per ms, each like one of `coming` and each going to where it would end first, the integral over time of
    /// how much later it ends with `work_ms[k]` more on candidate k. One replica gives `rate * (B c + c^2 / 2)`; while two equal
    /// replicas are idle the next arrival is not delayed at all.
    ///
    /// The integral is exact; what small requests wait for each other ([`Self::add_crowding`]) comes on top. Where a prompt that comes at `t` would end is a constant or falls with `t` on each replica, so the
    /// earliest end is a minimum of one least constant (replicas idle by then), one least falling line (the others) and, where chunks
    /// interleave, one more constant; only the owners of these three are missed by anyone, and each until their second bests take over.
    pub(crate) fn compute<'a>(
        &mut self,
        backlogs: &[Backlog],
        work_ms: &[f64],
        coming: impl ExactSizeIterator<Item = Coming<'a>>,
        rate: f64,
    ) {
        let share = rate / coming.len().max(1) as f64;
        self.integrate(backlogs, work_ms, coming, share);
        self.add_crowding(share);
    }

    /// As [`Self::compute`] without crowding, for arrivals like each of `coming` `share` times a ms. Of those that have time, only what
    /// comes later counts.
    pub(crate) fn integrate<'a>(&mut self, backlogs: &[Backlog], work_ms: &[f64], coming: impl Iterator<Item = Coming<'a>>, share: f64) {
        self.by_place.clear();
        self.by_place.resize(backlogs.len(), 0.0);
        self.queues.clear();
        self.queues.extend(backlogs.iter().zip(work_ms).enumerate().map(|(place, (before, &work_ms))| Queue {
            place,
            before: *before,
            after: before.with(work_ms),
            work_ms,
        }));
        self.queues.sort_unstable_by(|a, b| a.before.ms.total_cmp(&b.before.ms));
        self.small.clear();
        for request in coming {
            self.add(request);
        }
        for delay in &mut self.by_place {
            *delay *= share;
        }
        self.small.sort_unstable_by(f64::total_cmp);
    }

    /// Adds what small requests wait for each other while the work keeps them to fewer free replicas. The integral above lets each
    /// find the fleet as it is, so two free replicas are as good to it as three; a stream of small requests that fills one of them is
    /// of another opinion. `share`: arrivals a ms like each of the window.
    fn add_crowding(&mut self, share: f64) {
        let (mut crowd, mut of_work) = (Crowd::default(), f64::NAN);
        for (place, queue) in self.queues.iter().enumerate() {
            let (work, mut from) = (queue.work_ms, queue.before.ms);
            let mut free = place + 1;
            while self.queues.get(free).is_some_and(|next| next.before.ms <= from) {
                free += 1;
            }
            if work <= 0.0 || free > CROWD_MAX {
                continue;
            }
            if work.to_bits() != of_work.to_bits() {
                let small = self.small.iter().take_while(|cost| **cost < SMALL_SHARE * work);
                (crowd, of_work) = (Crowd::new(small, share, work), work);
            }
            let end = from + work;
            while from < end && free <= CROWD_MAX {
                let to = self.queues.get(free).map_or(end, |next| next.before.ms.min(end));
                self.by_place[queue.place] += (to - from) * crowd.lost(free);
                (from, free) = (to, free + 1);
            }
        }
    }

    /// Of the candidate at `place`, in ms; zero where nothing was computed.
    pub(crate) fn at(&self, place: usize) -> f64 {
        self.by_place.get(place).copied().unwrap_or(0.0)
    }

    /// What those yet to come cost at the least, on average.
    pub(crate) fn mean_least(&self) -> f64 {
        self.small.iter().sum::<f64>() / self.small.len().max(1) as f64
    }

    pub(crate) fn clear(&mut self) {
        self.by_place.clear();
    }

    /// Adds the integrals for arrivals that are all like `request`.
    fn add(&mut self, request: Coming<'_>) {
        let Self { queues, kept, busy, by_place, small } = self;
        let area = |flat, falling, from, to| area_beyond(request.in_time_ms, flat, falling, from, to);
        // Whoever is idle no earlier than two others and costs no less is never first nor missed, and most are like that.
        let mut before = TwoLeast { first: request.elsewhere, ..TwoLeast::NONE };
        kept.clear();
        for (place, queue) in queues.iter().enumerate() {
            let cost = request.costs[queue.place];
            if cost < before.second || queue.before.short_ms.is_finite() {
                kept.push((*queue, cost));
            }
            before.add(cost, place);
        }
        small.push(before.first);
        busy.clear();
        busy.resize(kept.len() + 1, Busy { ends: TwoLeast::NONE, shorts: TwoLeast::NONE });
        for (place, (queue, cost)) in kept.iter().enumerate().rev() {
            let mut all = busy[place + 1];
            all.ends.add(queue.before.ms + cost, place);
            all.shorts.add(queue.before.short_wait_ms(*cost) + cost, place);
            busy[place] = all;
        }
        let mut idle = TwoLeast { first: request.elsewhere, ..TwoLeast::NONE };
        let (mut over, mut from) = (0, 0.0);
        loop {
            while let Some((_, cost)) = kept.get(over).filter(|(queue, _)| queue.before.ms <= from) {
                idle.add(*cost, over);
                over += 1;
            }
            let to = kept.get(over).map_or(f64::INFINITY, |(queue, _)| queue.before.ms);
            let Busy { ends, shorts } = busy[over];
            // Each in turn: the one that ends first between `low` and `high`, and the best of the rest then.
            if let Some(&(queue, cost)) = kept.get(idle.owner).filter(|(queue, _)| queue.work_ms > 0.0 && idle.first <= shorts.first) {
                let high = to.min(queue.after.ms).min(ends.first - cost);
                let flat = idle.second.min(shorts.first).min(queue.after.short_wait_ms(cost) + cost);
                let falling = ends.first.min(queue.after.ms + cost);
                by_place[queue.place] += area(flat, falling, from, high) - area(cost, f64::INFINITY, from, high);
            }
            if let Some(&(queue, cost)) = kept.get(ends.owner).filter(|(queue, _)| queue.work_ms > 0.0) {
                let low = from.max(ends.first - idle.first.min(shorts.first));
                let flat = idle.first.min(shorts.without(ends.owner)).min(queue.after.short_wait_ms(cost) + cost);
                let falling = ends.second.min(queue.after.ms + cost);
                by_place[queue.place] += area(flat, falling, low, to) - area(f64::INFINITY, ends.first, low, to);
            }
            if let Some(&(queue, cost)) = kept.get(shorts.owner).filter(|(queue, _)| queue.work_ms > 0.0 && shorts.first < idle.first) {
                let high = to.min(ends.first - shorts.first);
                let flat = idle.first.min(shorts.second).min(queue.after.short_wait_ms(cost) + cost);
                let falling = ends.without(shorts.owner).min(queue.after.ms + cost);
                by_place[queue.place] += area(flat, falling, from, high) - area(shorts.first, f64::INFINITY, from, high);
            }
            if over == kept.len() {
                break;
            }
            from = to;
        }
    }
}

/// Delay a ms of small requests on so many replicas, the first alone at place 1.
#[derive(Debug, Default)]
struct Crowd([f64; CROWD_MAX + 1]);

impl Crowd {
    /// Small requests of these costs, each coming `share` times a ms, for the next `horizon` ms.
    ///
    /// The mean wait on m servers is Sakasegawa's (1977; exact for one server: Pollaczek-Khinchine) where there is one, and no more
    /// than what builds up from nothing within the horizon: the mean of a reflected Brownian motion, and the excess of work.
    fn new<'a>(costs: impl Iterator<Item = &'a f64>, share: f64, horizon: f64) -> Self {
        let (count, sum, squares) =
            costs.fold((0.0, 0.0, 0.0), |(count, sum, squares), cost| (count + 1.0, sum + cost, squares + cost * cost));
        let (rate, load) = (share * count, share * sum);
        if load <= 0.0 {
            return Self::default();
        }
        let wait = |servers: f64| {
            let busy = load / servers;
            let spread = (2.0 * share * squares / servers * horizon / std::f64::consts::PI).sqrt();
            let built_up = 2.0 / 3.0 * spread + (busy - 1.0).max(0.0) * horizon / 2.0;
            let steady = squares / (2.0 * sum) * busy.powf((2.0 * (servers + 1.0)).sqrt() - 1.0) / (servers * (1.0 - busy));
            if busy < 1.0 { steady.min(built_up) } else { built_up }
        };
        Self(std::array::from_fn(|servers| if servers == 0 { 0.0 } else { rate * wait(servers as f64) }))
    }

    /// Delay a ms with one of `free` replicas less. The last one is not for here: who finds none free waits for one, in the integral.
    fn lost(&self, free: usize) -> f64 {
        if free < 2 { 0.0 } else { (self.0[free - 1] - self.0[free]).max(0.0) }
    }
}

/// The least of some values, whose it is, and the least of the others.
#[derive(Debug, Clone, Copy)]
struct TwoLeast {
    first: f64,
    owner: usize,
    second: f64,
}

impl TwoLeast {
    /// Of no values; nobody has that place.
    const NONE: Self = Self { first: f64::INFINITY, owner: usize::MAX, second: f64::INFINITY };

    fn add(&mut self, value: f64, owner: usize) {
        if value < self.first {
            *self = Self { first: value, owner, second: self.first };
        } else if value < self.second {
            self.second = value;
        }
    }

    fn without(&self, owner: usize) -> f64 {
        if self.owner == owner { self.second } else { self.first }
    }
}

/// Integral of `max(least, min(flat, falling - t))` over `t` between `from` and `to`; zero when they are in the other order.
fn area_beyond(least: f64, flat: f64, falling: f64, from: f64, to: f64) -> f64 {
    if least <= 0.0 || to <= from {
        return area(flat, falling, from, to);
    }
    let reaches = if flat > least { (falling - least).clamp(from, to) } else { from };
    let rest = if to > reaches { least * (to - reaches) } else { 0.0 };
    area(flat, falling, from, reaches) + rest
}

/// Integral of `min(flat, falling - t)` over `t` between `from` and `to`; zero when they are in the other order.
fn area(flat: f64, falling: f64, from: f64, to: f64) -> f64 {
    if to <= from {
        return 0.0;
    }
    let bend = (falling - flat).clamp(from, to);
    let constant = if bend > from { flat * (bend - from) } else { 0.0 };
    let slope = if to > bend { (to - bend) * (falling - 0.5 * (to + bend)) } else { 0.0 };
    constant + slope
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn delays(backlog_ms: &[f64], work_ms: &[f64], recent: &[Vec<f64>], rate: f64) -> Vec<f64> {
        let backlogs: Vec<Backlog> = backlog_ms.iter().map(|ms| Backlog::in_order(*ms)).collect();
        of(&backlogs, work_ms, recent, rate)
    }

    fn of(backlogs: &[Backlog], work_ms: &[f64], recent: &[Vec<f64>], rate: f64) -> Vec<f64> {
        let coming = recent.iter().map(|costs| Coming { costs, elsewhere: f64::INFINITY, in_time_ms: 0.0 });
        let mut delays = Delays::default();
        delays.compute(backlogs, work_ms, coming, rate);
        delays.by_place
    }

    /// The same by the definition: each step of time, each request, each replica.
    fn by_definition(backlogs: &[Backlog], work_ms: &[f64], recent: &[Vec<f64>], in_time_ms: f64, rate: f64) -> Vec<f64> {
        let earliest = |fleet: &[Backlog], costs: &[f64], time: f64| {
            let end = |(backlog, cost): (&Backlog, &f64)| (backlog.ms - time).max(0.0).min(backlog.short_wait_ms(*cost)) + cost;
            fleet.iter().zip(costs).map(end).fold(f64::INFINITY, f64::min).max(in_time_ms)
        };
        let top = backlogs.iter().zip(work_ms).map(|(backlog, work)| backlog.ms + work).fold(0.0, f64::max);
        let step = top / 20_000.0;
        let delay = |place: usize| {
            let mut after = backlogs.to_vec();
            after[place] = after[place].with(work_ms[place]);
            let late = |costs: &Vec<f64>, time: f64| earliest(&after, costs, time) - earliest(backlogs, costs, time);
            let times = (0..20_000).map(|point| (f64::from(point) + 0.5) * step);
            let all: f64 = times.map(|time| recent.iter().map(|costs| late(costs, time)).sum::<f64>()).sum();
            all * step * rate / recent.len() as f64
        };
        (0..backlogs.len()).map(delay).collect()
    }

    fn fleet() -> impl Strategy<Value = (Vec<f64>, Vec<f64>, Vec<Vec<f64>>)> {
        (1usize..6).prop_flat_map(|replicas| {
            let times = move || prop::collection::vec(0.0f64..500.0, replicas);
            (times(), prop::collection::vec(1.0f64..2000.0, replicas), prop::collection::vec(times(), 1..5))
        })
    }

    #[test]
    fn one_replica_gives_the_numerator_of_pollaczek_and_khinchine() {
        for (backlog, work, cost) in [(0.0, 100.0, 10.0), (250.0, 40.0, 3.0), (10.0, 2000.0, 500.0)] {
            let rate = 0.05;
            let got = delays(&[backlog], &[work], &[vec![cost]], rate)[0];
            let want = rate * (backlog * work + work * work / 2.0);
            assert!((got / want - 1.0).abs() < 1e-9, "{got} for {want}");
        }
    }

    #[test]
    fn the_last_idle_replica_is_left_idle_when_the_next_one_frees_late_enough() {
        // A long prompt takes the idle replica, or waits `frees_in` for the busy one; short prompts come all the time.
        let (rate, shadow) = (0.05, 2.0);
        let threshold = 2.0 * (1.0 + shadow) / rate;
        for (share, leave) in [(0.8, false), (1.25, true)] {
            let frees_in = share * threshold;
            let delays = delays(&[0.0, frees_in], &[2000.0, 2000.0], &[vec![0.0, 0.0]], rate);
            let wait_price = frees_in + shadow * frees_in;
            assert_eq!(delays[0] > wait_price + delays[1], leave, "{delays:?} against {wait_price}");
        }
    }

    #[test]
    fn nobody_is_delayed_while_another_equal_replica_is_idle() {
        let delays = delays(&[0.0, 0.0, 70.0], &[500.0; 3], &[vec![300.0; 3], vec![400.0; 3]], 0.2);
        assert_eq!(delays[..2], [0.0, 0.0]);
    }

    #[test]
    fn a_stream_of_small_requests_is_left_as_many_replicas_as_it_fills() {
        // 0.11 a ms of 9 ms each: one replica's whole time.
        let of_free = |free: usize| {
            let mut backlog = vec![1000.0; 8];
            backlog[..free].fill(0.0);
            delays(&backlog, &[2000.0; 8], &[vec![9.0; 8]], 0.11)[0]
        };
        // A long prompt waits a second rather than leave one replica to them, and some ms rather than leave two.
        assert!(of_free(2) > 3000.0, "{}", of_free(2));
        assert!(of_free(3) > 30.0 && of_free(3) < 0.1 * of_free(2), "{}", of_free(3));
        assert!(of_free(5) < 30.0, "{}", of_free(5));
    }

    #[test]
    fn small_requests_on_one_replica_wait_as_pollaczek_and_khinchine_say() {
        let costs = [4.0, 12.0, 20.0];
        let share = 0.02;
        let crowd = Crowd::new(costs.iter(), share, 1e9);
        let (load, squares) = (share * 36.0, share * 560.0);
        let wait = squares / (2.0 * (1.0 - load));
        assert!((crowd.0[1] - 3.0 * share * wait).abs() < 1e-9);
    }

    #[test]
    fn a_short_prompt_passes_a_long_one_where_chunks_interleave() {
        let idle = Backlog { ms: 0.0, short_ms: 0.0, long_chunk_ms: 80.0, has_long: false };
        let busy = idle.with(2000.0);
        assert!((busy.wait_ms(10.0) - 120.0).abs() < 1e-9 && (busy.wait_ms(100.0) - 2000.0).abs() < 1e-9);
        assert!((busy.with(2000.0).wait_ms(10.0) - 120.0).abs() < 1e-9, "long ones take turns");
    }

    proptest! {
        #[test]
        fn it_is_what_the_definition_says(
            (backlogs, work, recent) in fleet(),
            interleaved in any::<bool>(),
            idle in 0usize..3,
            in_time_ms in prop_oneof![Just(0.0), 0.0f64..900.0],
        ) {
            let backlog = |(place, ms): (usize, &f64)| {
                let ms = if place < idle { 0.0 } else { *ms };
                let interleaving = Backlog { ms, short_ms: 0.3 * ms, long_chunk_ms: 80.0, has_long: ms > 80.0 };
                if interleaved { interleaving } else { Backlog::in_order(ms) }
            };
            let backlogs: Vec<Backlog> = backlogs.iter().enumerate().map(backlog).collect();
            let mut exact = Delays::default();
            let coming = recent.iter().map(|costs| Coming { costs, elsewhere: f64::INFINITY, in_time_ms });
            exact.integrate(&backlogs, &work, coming, 0.1 / recent.len() as f64);
            for (got, want) in exact.by_place.iter().zip(by_definition(&backlogs, &work, &recent, in_time_ms, 0.1)) {
                prop_assert!((got - want).abs() <= 1e-3 * (1.0 + want), "{got} for {want}");
            }
        }

        #[test]
        fn a_delay_is_never_negative_and_grows_with_the_work((backlog, work, recent) in fleet(), more in 1.0f64..500.0) {
            let least = delays(&backlog, &work, &recent, 0.1);
            let larger: Vec<f64> = work.iter().map(|ms| ms + more).collect();
            let most = delays(&backlog, &larger, &recent, 0.1);
            for (a, b) in least.iter().zip(&most) {
                prop_assert!(*a >= -1e-9 && *b >= a - 1e-9 * (1.0 + a), "{a} then {b}");
            }
        }

        #[test]
        fn the_order_of_replicas_does_not_matter((backlog, work, recent) in fleet()) {
            let reversed = |values: &[f64]| values.iter().rev().copied().collect::<Vec<f64>>();
            let there = delays(&backlog, &work, &recent, 0.1);
            let back: Vec<Vec<f64>> = recent.iter().map(|costs| reversed(costs)).collect();
            let back = reversed(&delays(&reversed(&backlog), &reversed(&work), &back, 0.1));
            for (a, b) in there.iter().zip(&back) {
                prop_assert!((a - b).abs() <= 1e-9 * (1.0 + a));
            }
        }

        #[test]
        fn times_in_another_unit_give_the_same_delay_in_that_unit((backlog, work, recent) in fleet(), unit in 0.01f64..100.0) {
            let scaled = |values: &[f64]| values.iter().map(|value| value * unit).collect::<Vec<f64>>();
            let plain = delays(&backlog, &work, &recent, 0.1);
            let recent: Vec<Vec<f64>> = recent.iter().map(|costs| scaled(costs)).collect();
            let other = delays(&scaled(&backlog), &scaled(&work), &recent, 0.1 / unit);
            for (a, b) in plain.iter().zip(&other) {
                prop_assert!((a * unit - b).abs() <= 1e-6 * (1.0 + b));
            }
        }
    }
}
