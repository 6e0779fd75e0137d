//! How long a drain will take.

use std::time::Duration;

use baton_units::{ReplicaId, Tokens};

use super::{Cached, FleetFacts, MoverConfig, RunningFacts, board::Board, way_price};

/// What draining a replica would take, as things are: outputs that end by themselves meanwhile make it shorter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DrainForecast {
    /// Requests that would move.
    pub moves: u32,
    /// Requests for which nobody has room, that cannot move, or that their bound ends before their turn: they stay until they end.
    pub stays: u32,
    /// Until the last of those that stay has ended, each with all the output that its client's bound allows, a token a step. `None` where
    /// none stays, or one of them has no bound.
    pub stays_for: Option<Duration>,
    /// Until the last one has moved, one copy after the other, and the last one that stays has ended. One without a bound does not count.
    pub finishes_in: Duration,
}

/// What draining `id` would take where the loop looks every `period`, which is when the next copy begins; `None` where it is not in the
/// facts.
pub fn drain_forecast(
    facts: &FleetFacts,
    id: ReplicaId,
    config: &MoverConfig,
    cached: Cached<'_>,
    period: Duration,
) -> Option<DrainForecast> {
    let mut board = Board::new(facts, config, std::iter::empty(), cached);
    let from = board.place(id)?;
    let replica = board.loads[from].facts;
    let step_s = board.loads[from].step_s;
    let period_s = period.as_secs_f64().max(f64::MIN_POSITIVE);
    let (mut moves, mut total_s) = (0, 0.0_f64);
    // Seconds until those that stay have ended.
    let mut stays: Vec<Option<f64>> = Vec::new();
    // A bound is the latest end.
    let until_end = |starts_s: f64, left: Option<Tokens>| left.map(|left| starts_s + left.as_f64() * step_s);
    for waiting in &replica.waiting {
        let may = |to: usize| {
            let target = &board.loads[to];
            to != from && (waiting.fresh || board.same_numerics(from, to)) && waiting.demand <= target.facts.capacity()
        };
        match board.freest(may).filter(|_| waiting.movable) {
            Some(to) => {
                board.pass_on(from, to, waiting.demand);
                moves += 1;
            }
            None => stays.push(until_end(replica.queue_s, waiting.left_at_most)),
        }
    }
    let mut running: Vec<&RunningFacts> = replica.running.iter().collect();
    // Who has no token yet has one when the prefill that is booked here is done, and leaves then.
    running.sort_by_key(|one| (one.prefilling, one.tokens, one.request));
    for one in running {
        let starts_s = if one.prefilling { replica.queue_s } else { 0.0 };
        let demand = one.demand(replica.block_size);
        let may = |to: usize| to != from && board.same_numerics(from, to) && board.loads[to].with(demand).freeness() >= 0.0;
        let (ends_s, turn_s) = (until_end(starts_s, one.left_at_most), total_s.max(starts_s));
        let has_ended = ends_s.is_some_and(|ends_s| ends_s <= turn_s);
        match board.freest(may).filter(|_| one.movable && !has_ended) {
            Some(to) => {
                let move_s = way_price(&board.price(from, to, one.request, one.tokens, true)).total_s;
                let moved_s = turn_s + (move_s / period_s).ceil() * period_s;
                total_s = ends_s.map_or(moved_s, |ends_s| moved_s.min(ends_s));
                board.copy(from, to, one);
                moves += 1;
            }
            None => stays.push(ends_s),
        }
    }
    let stays_s = stays.iter().flatten().copied().fold(0.0, f64::max);
    let all_bounded = !stays.is_empty() && stays.iter().all(Option::is_some);
    Some(DrainForecast {
        moves,
        stays: stays.len() as u32,
        stays_for: all_bounded.then(|| Duration::from_secs_f64(stays_s)),
        finishes_in: Duration::from_secs_f64(total_s.max(stays_s)),
    })
}
