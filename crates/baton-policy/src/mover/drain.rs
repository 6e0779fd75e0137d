//! How long a drain will take.

use std::time::Duration;

use baton_units::ReplicaId;

use super::{Cached, FleetFacts, MoverConfig, board::Board, way_price};

/// What draining a replica would take, as things are: outputs that end by themselves meanwhile make it shorter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DrainForecast {
    /// Requests that would move.
    pub moves: u32,
    /// Requests for which nobody has room, or that cannot move: they stay until they end.
    pub stays: u32,
    /// Until the last one has moved, one copy after the other.
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
    let period_s = period.as_secs_f64().max(f64::MIN_POSITIVE);
    let (mut moves, mut stays, mut total_s) = (0, 0, 0.0);
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
            None => stays += 1,
        }
    }
    let mut running: Vec<_> = replica.running.iter().collect();
    running.sort_by_key(|one| (one.tokens, one.request));
    for one in running {
        let demand = one.demand(replica.block_size);
        let may = |to: usize| to != from && board.same_numerics(from, to) && board.loads[to].with(demand).freeness() >= 0.0;
        match board.freest(may).filter(|_| one.movable) {
            Some(to) => {
                let move_s = way_price(&board.price(from, to, one.request, one.tokens, !one.prefilling)).total_s;
                total_s += (move_s / period_s).ceil() * period_s;
                board.copy(from, to, one);
                moves += 1;
            }
            None => stays += 1,
        }
    }
    Some(DrainForecast { moves, stays, finishes_in: Duration::from_secs_f64(total_s) })
}
