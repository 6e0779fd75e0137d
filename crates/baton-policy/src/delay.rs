/// Points of the quadrature; they lie at `top * (i / POINTS)^3`, dense where the integrand is not flat. Its error is some percent where
/// replicas take turns as the earliest, which moves no choice that the model's own error would not.
const POINTS: usize = 24;

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
        self.wait_after(0.0, work_ms)
    }

    fn wait_after(&self, elapsed_ms: f64, work_ms: f64) -> f64 {
        let left = (self.ms - elapsed_ms).max(0.0);
        if work_ms > self.long_chunk_ms { left } else { left.min(self.short_ms) }
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

/// Expected delay in ms that work placed on a replica imposes on requests yet to come, for each replica.
///
/// For arrivals at `rate` per ms, each like one of the `recent` (their costs, one slice a request, by replica) and each going to
/// where it would start and end first, the integral over time of how much later it ends with `work_ms[k]` more on replica k. One
/// replica gives `rate * (B c + c^2 / 2)`; while two equal replicas are idle the next arrival is not delayed at all.
pub(crate) fn delay_of_others<'a>(
    backlogs: &[Backlog],
    work_ms: &[f64],
    recent: impl ExactSizeIterator<Item = &'a [f64]>,
    rate: f64,
    delays: &mut Vec<f64>,
) {
    let fleet = backlogs.len();
    delays.clear();
    delays.resize(fleet, 0.0);
    let count = recent.len();
    if count == 0 || fleet == 0 {
        return;
    }
    let after: Vec<Backlog> = backlogs.iter().zip(work_ms).map(|(backlog, work)| backlog.with(*work)).collect();
    let top = after.iter().map(|backlog| backlog.ms).fold(0.0, f64::max);
    let times: [f64; POINTS + 1] = std::array::from_fn(|point| top * (point as f64 / POINTS as f64).powi(3));
    let mut previous = vec![0.0; fleet];
    for costs in recent {
        for (point, &time) in times.iter().enumerate() {
            let (first, place, second) = two_least(backlogs, costs, time);
            let width = if point == 0 { 0.0 } else { 0.5 * (time - times[point - 1]) };
            for replica in 0..fleet {
                if work_ms[replica] <= 0.0 {
                    continue;
                }
                let without = if place == replica { second } else { first };
                let with = after[replica].wait_after(time, costs[replica]) + costs[replica];
                let late = with.min(without) - first;
                delays[replica] += width * (late + previous[replica]);
                previous[replica] = late;
            }
        }
    }
    for delay in delays {
        *delay *= rate / count as f64;
    }
}

/// The earliest end over the fleet, where, and the earliest elsewhere.
fn two_least(backlogs: &[Backlog], costs: &[f64], time: f64) -> (f64, usize, f64) {
    let (mut first, mut place, mut second) = (f64::INFINITY, 0, f64::INFINITY);
    for (replica, (backlog, &cost)) in backlogs.iter().zip(costs).enumerate() {
        let end = backlog.wait_after(time, cost) + cost;
        if end < first {
            (second, first, place) = (first, end, replica);
        } else if end < second {
            second = end;
        }
    }
    (first, place, second)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn delays(backlog_ms: &[f64], work_ms: &[f64], recent: &[Vec<f64>], rate: f64) -> Vec<f64> {
        let backlogs: Vec<Backlog> = backlog_ms.iter().map(|ms| Backlog::in_order(*ms)).collect();
        let mut delays = Vec::new();
        delay_of_others(&backlogs, work_ms, recent.iter().map(Vec::as_slice), rate, &mut delays);
        delays
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
            assert!((got / want - 1.0).abs() < 0.02, "{got} for {want}");
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
        let delays = delays(&[0.0, 0.0, 70.0], &[500.0; 3], &[vec![10.0; 3], vec![200.0; 3]], 0.2);
        assert_eq!(delays[..2], [0.0, 0.0]);
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
        fn a_delay_is_never_negative_and_grows_with_the_work((mut backlog, mut work, mut recent) in fleet(), more in 1.0f64..500.0) {
            // One long queue keeps the grid of the quadrature where it is.
            backlog.push(5000.0);
            work.push(1.0);
            for costs in &mut recent {
                costs.push(100.0);
            }
            let least = delays(&backlog, &work, &recent, 0.1);
            let larger: Vec<f64> = work[..work.len() - 1].iter().map(|ms| ms + more).chain([1.0]).collect();
            let most = delays(&backlog, &larger, &recent, 0.1);
            for (a, b) in least.iter().zip(&most) {
                prop_assert!(*a >= 0.0 && *b >= a - 1e-9, "{a} then {b}");
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
