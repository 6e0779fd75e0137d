/// Points of the quadrature; they lie at `top * (i / POINTS)^3`, dense where the integrand is not flat.
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
