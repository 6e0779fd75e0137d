//! The loop that decides which requests go on at another replica.
//!
//! A placement made at arrival becomes wrong: outputs turn out long, memory is free in pieces that hold nobody, an important request wants
//! quiet, a replica is to be drained. [`Mover::plan`] looks at the fleet every 50 ms or so and says what moves. It is after Llumnix
//! (OSDI 2024), with prices: nothing moves whose benefit in ms is not above what the move costs. It moves nothing itself.

mod board;
mod drain;
mod facts;
mod moves;

use std::{
    cmp::Reverse,
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use baton_cost::{MovePrice, MoveWay, WayPrice};
use baton_units::{Blocks, Priority, ReplicaId, RequestId, Time, Tokens};

pub use board::freeness;
pub(crate) use board::steps_or_tokens;
pub use drain::{DrainForecast, drain_forecast};
pub use facts::{FleetFacts, ReplicaFacts, RunningFacts, WaitingFacts};
pub(crate) use facts::{QUIET_STEP, quiet_blocks};
pub use moves::{Move, MoveReason, OrderRefusal};

use crate::ReplicaState;
use board::Board;

/// What the loop goes by.
#[derive(Debug, Clone, PartialEq)]
pub struct MoverConfig {
    /// A replica with fewer steps left gives requests away, one with more takes them. Default 48: Llumnix's 3 blocks a request. Higher,
    /// more is moved before memory ends.
    pub freeness_low: f64,
    /// A request that moved stays for so long.
    pub cooldown: Duration,
    /// Moves of one request by the loop, drains and orders apart.
    pub moves_max: u32,
    /// Requests of this priority and more important ones are given quiet. `None`: none are. The router is told the same
    /// ([`RouterConfig::quiet_from`](crate::RouterConfig::quiet_from)), else it sends others to where the loop moves them off again.
    pub quiet_from: Option<Priority>,
    /// An under-served program may wait for so long beside an over-served one.
    pub fair_wait: Duration,
    /// Moves of one program within a minute, for fairness.
    pub fair_moves_per_minute: u32,
    /// A move of which nothing was heard for so long counts as ended. The migration protocol's longest attempt.
    pub attempt: Duration,
}

impl Default for MoverConfig {
    fn default() -> Self {
        Self {
            freeness_low: 48.0,
            cooldown: Duration::from_secs(5),
            moves_max: 3,
            quiet_from: None,
            fair_wait: Duration::from_secs(1),
            fair_moves_per_minute: 4,
            attempt: Duration::from_mins(15),
        }
    }
}

/// Decides moves; remembers those under way, and who moved lately.
#[derive(Debug, Default)]
pub struct Mover {
    config: MoverConfig,
    ongoing: BTreeMap<RequestId, Ongoing>,
    /// Of requests in flight that moved.
    moved: BTreeMap<RequestId, Moved>,
    /// When requests of a program moved for fairness.
    fair_moves: BTreeMap<u64, VecDeque<Time>>,
}

/// A move that was decided and has not ended.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ongoing {
    from: ReplicaId,
    to: ReplicaId,
    /// What it takes at its target.
    blocks: Blocks,
    /// It takes a place among the copies.
    copies: bool,
    since: Time,
}

#[derive(Debug, Clone, Copy)]
struct Moved {
    count: u32,
    last: Time,
}

/// Leading tokens of a request whose KV a replica has in its cache.
pub type Cached<'a> = &'a dyn Fn(RequestId, ReplicaId) -> Tokens;

/// The plan in the making.
struct Planning<'a> {
    mover: &'a Mover,
    board: Board<'a>,
    facts: &'a FleetFacts,
    now: Time,
    moves: Vec<Move>,
}

impl Mover {
    #[must_use]
    pub fn new(config: MoverConfig) -> Self {
        Self { config, ..Self::default() }
    }

    pub fn config(&self) -> &MoverConfig {
        &self.config
    }

    /// What moves now, most pressing first. Tell of each one's end by [`Self::ended`]; until then its blocks count at its target. `cached` is
    /// asked of those that may move, for their price.
    pub fn plan(&mut self, facts: &FleetFacts, cached: Cached<'_>, now: Time) -> Vec<Move> {
        self.forget_old(facts, now);
        let mut planning = self.planning(facts, cached, now);
        planning.leave_the_lost();
        planning.drain();
        planning.seat_heads();
        planning.be_fair();
        planning.balance();
        let moves = planning.moves;
        for one in &moves {
            self.note(one, facts, now);
        }
        moves
    }

    /// Decides the move that an operator asks for, to the freest replica where none is named; it takes no benefit, only room.
    pub fn order(
        &mut self,
        facts: &FleetFacts,
        request: RequestId,
        to: Option<ReplicaId>,
        cached: Cached<'_>,
        now: Time,
    ) -> Result<Move, OrderRefusal> {
        self.forget_old(facts, now);
        let ordered = self.planning(facts, cached, now).order(request, to)?;
        self.note(&ordered, facts, now);
        Ok(ordered)
    }

    /// A move ended, at its target or where it began.
    pub fn ended(&mut self, request: RequestId) {
        self.ongoing.remove(&request);
    }

    /// Moves that were decided and have not ended.
    pub fn ongoing(&self) -> usize {
        self.ongoing.len()
    }

    fn planning<'a>(&'a self, facts: &'a FleetFacts, cached: Cached<'a>, now: Time) -> Planning<'a> {
        Planning { mover: self, board: Board::new(facts, &self.config, self.ongoing.iter(), cached), facts, now, moves: Vec::new() }
    }

    /// Lets go of what is over: bounded by the requests in flight, and by the moves of a minute.
    fn forget_old(&mut self, facts: &FleetFacts, now: Time) {
        let mut here: Vec<RequestId> = facts.replicas.iter().flat_map(ReplicaFacts::requests).collect();
        here.sort_unstable();
        let is_here = |request: &RequestId| here.binary_search(request).is_ok();
        self.ongoing.retain(|request, ongoing| is_here(request) && now.since(ongoing.since) < self.config.attempt);
        self.moved.retain(|request, _| is_here(request));
        self.fair_moves.retain(|_, times| {
            while times.front().is_some_and(|time| now.since(*time) >= MINUTE) {
                times.pop_front();
            }
            !times.is_empty()
        });
    }

    fn note(&mut self, one: &Move, facts: &FleetFacts, now: Time) {
        let target = facts.replicas.iter().find(|replica| replica.id == one.to).expect("a target is in the facts");
        let blocks = (one.tokens + Tokens(1)).to_blocks(target.block_size);
        let copies = one.way == MoveWay::Kv;
        self.ongoing.insert(one.request, Ongoing { from: one.from, to: one.to, blocks, copies, since: now });
        let moved = self.moved.entry(one.request).or_insert(Moved { count: 0, last: now });
        moved.last = now;
        moved.count += u32::from(!matches!(one.reason, MoveReason::Drain { .. } | MoveReason::Operator | MoveReason::Forced { .. }));
        if let MoveReason::Fairness { program, .. } = one.reason {
            self.fair_moves.entry(program).or_default().push_back(now);
        }
    }

    /// Whether the loop may move a request on its own account.
    fn may_choose(&self, request: RequestId, now: Time) -> bool {
        let rests = |moved: &Moved| now.since(moved.last) < self.config.cooldown || moved.count >= self.config.moves_max;
        !self.ongoing.contains_key(&request) && !self.moved.get(&request).is_some_and(rests)
    }
}

const MINUTE: Duration = Duration::from_mins(1);

impl ReplicaFacts {
    fn requests(&self) -> impl Iterator<Item = RequestId> {
        self.running.iter().map(|request| request.request).chain(self.waiting.iter().map(|request| request.request))
    }
}

/// The cheaper of the two ways that engines have for what runs.
fn way_of(price: &MovePrice) -> MoveWay {
    match price.kv {
        Some(kv) if kv.cost_s() <= price.recompute.cost_s() => MoveWay::Kv,
        Some(_) | None => MoveWay::Recompute,
    }
}

fn way_price(price: &MovePrice) -> WayPrice {
    price.way(way_of(price)).unwrap_or(price.recompute)
}

impl Planning<'_> {
    /// What ran on replicas that are lost goes on elsewhere, from its tokens.
    fn leave_the_lost(&mut self) {
        for from in 0..self.board.loads.len() {
            let lost = self.board.loads[from].facts;
            if !matches!(lost.state, ReplicaState::Suspect | ReplicaState::Dead) {
                continue;
            }
            let running = lost.running.iter().filter(|one| one.movable).map(|one| (one.request, one.tokens, false));
            let waiting = lost.waiting.iter().filter(|one| one.movable).map(|one| (one.request, one.tokens, one.fresh));
            for (request, tokens, fresh) in running.chain(waiting).collect::<Vec<_>>() {
                if self.mover.ongoing.contains_key(&request) {
                    continue;
                }
                let demand = (tokens + Tokens(1)).to_blocks(lost.block_size);
                let exact = |board: &Board<'_>, to: usize| fresh || board.same_numerics(from, to);
                let may =
                    |to: usize| self.board.may_go(from, to) && exact(&self.board, to) && demand <= self.board.loads[to].facts.capacity();
                let Some(to) = self.board.freest(may) else { continue };
                let price = self.board.price(from, to, request, tokens, false);
                self.push(request, tokens, from, to, MoveReason::Forced { state: lost.state }, price, MoveWay::Recompute);
                self.board.pass_on(from, to, demand);
            }
        }
    }

    /// Replicas that are to be empty: what waits goes at once, what runs one after the other, the quickest first.
    fn drain(&mut self) {
        for from in 0..self.board.loads.len() {
            let facts = self.board.loads[from].facts;
            if facts.state != ReplicaState::Draining {
                continue;
            }
            let left = (facts.running.len() + facts.waiting.len()) as u32;
            for waiting in facts.waiting.iter().filter(|one| one.movable && !self.mover.ongoing.contains_key(&one.request)) {
                let may = |to| self.may_take_waiting(from, to, waiting) && waiting.demand <= self.board.loads[to].facts.capacity();
                let Some(to) = self.board.freest(may) else { continue };
                self.pass_on(waiting, from, to, MoveReason::Drain { left });
            }
            let mut running: Vec<&RunningFacts> = facts.running.iter().filter(|one| self.may_leave(one, false)).collect();
            running.sort_by_key(|one| (one.tokens, one.request));
            for one in running {
                if let Some(to) = self.target_for(from, one) {
                    let price = self.board.price(from, to, one.request, one.tokens, true);
                    self.copy(one, from, to, MoveReason::Drain { left }, price);
                    break;
                }
            }
        }
    }

    /// Heads of queues that lack blocks: they go where they fit; where none fits, a running request makes room.
    fn seat_heads(&mut self) {
        for from in self.board.ready().collect::<Vec<_>>() {
            let load = &self.board.loads[from];
            let Some(head) = load.head().filter(|head| !load.fits(head.demand)) else { continue };
            let missing = (head.demand.as_f64() - load.free()).max(1.0);
            if self.mover.may_choose(head.request, self.now) && head.movable && self.seat_elsewhere(from, head, missing) {
                continue;
            }
            self.make_room(from, head, missing);
        }
        let fits_somewhere = |head: &WaitingFacts| self.board.ready().any(|place| self.board.loads[place].fits(head.demand));
        if let Some(head) = self.facts.held.filter(|head| !fits_somewhere(head)) {
            let missing = |place: usize| head.demand.as_f64() - self.board.loads[place].free();
            // Where somebody waits already, the room would be that one's.
            let no_queue = self.board.ready().filter(|&place| self.board.loads[place].head().is_none());
            let nearest = no_queue.min_by(|&a, &b| missing(a).total_cmp(&missing(b)));
            if let Some(place) = nearest {
                self.make_room(place, &head, missing(place).max(1.0));
            }
        }
    }

    /// A request without KV goes for free. The target's own queue keeps its order: only one that comes before its head, by importance and
    /// age, passes it.
    fn seat_elsewhere(&mut self, from: usize, head: &WaitingFacts, missing: f64) -> bool {
        let in_turn =
            |to: usize| self.board.loads[to].head().is_none_or(|theirs| (head.priority, head.arrived) < (theirs.priority, theirs.arrived));
        let may = |to: usize| self.may_take_waiting(from, to, head) && self.board.loads[to].fits(head.demand) && in_turn(to);
        let Some(to) = self.board.freest(may) else { return false };
        let (source, target) = (self.board.loads[from].facts, self.board.loads[to].facts);
        // It computes the same there, but perhaps later.
        let later_ms = (target.queue_s - source.queue_s).max(0.0) * 1e3;
        if self.benefit_of_blocks_ms(from, missing) <= later_ms {
            return false;
        }
        let reason = MoveReason::Defragment { head: head.request, demand: head.demand, free: blocks(self.board.loads[from].free()) };
        self.pass_on(head, from, to, reason);
        true
    }

    /// Moves a running request off `from`, so that `head` fits there: the smallest that suffices, or the largest if it takes several.
    fn make_room(&mut self, from: usize, head: &WaitingFacts, missing: f64) {
        let load = &self.board.loads[from];
        let mut candidates: Vec<&RunningFacts> = load.facts.running.iter().filter(|one| self.may_leave(one, true)).collect();
        candidates.sort_by_key(|one| {
            let suffices = one.blocks.as_f64() >= missing;
            (Reverse(suffices), if suffices { one.blocks.0 } else { u32::MAX - one.blocks.0 }, one.request)
        });
        // Room that others have beside their own queues; without enough of it, moves would help nobody.
        let room = |place: usize| {
            (self.board.loads[place].free() - self.board.loads[place].head().map_or(0.0, |own| own.demand.as_f64())).max(0.0)
        };
        let rooms: f64 = self.board.ready().filter(|&place| place != from && self.board.same_numerics(from, place)).map(room).sum();
        if rooms < missing {
            return;
        }
        let demand = head.demand;
        let free = blocks(load.free());
        for one in candidates {
            let wanted = one.demand(load.facts.block_size).as_f64();
            let may = |to: usize| {
                self.board.may_copy(from, to)
                    && self.board.same_numerics(from, to)
                    && room(to) >= wanted
                    && self.board.loads[to].has_place()
            };
            let Some(to) = self.board.freest(may) else { continue };
            let price = self.board.price(from, to, one.request, one.tokens, true);
            let benefit_ms = self.benefit_of_blocks_ms(from, missing.min(one.blocks.as_f64()));
            if self.ends_before(one, from, &price) || benefit_ms <= way_price(&price).cost_s() * 1e3 {
                continue;
            }
            self.copy(one, from, to, MoveReason::Defragment { head: head.request, demand, free }, price);
            return;
        }
    }

    /// Where an under-served program waits for memory beside an over-served one, a request of the latter goes (Autellix's programs,
    /// arXiv 2502.13965, made to share by moves). Where nobody can take it, it stays: the migration protocol has no word by which a replica
    /// puts a running request behind its queue, and a START to the replica that runs it lets it run on.
    fn be_fair(&mut self) {
        let Some(median) = median(self.facts.programs.values().copied()) else { return };
        let attained = |program: Option<u64>| program.and_then(|program| self.facts.programs.get(&program).copied());
        for from in self.board.ready().collect::<Vec<_>>() {
            let facts = self.board.loads[from].facts;
            let waits = facts.waiting.iter().skip(self.board.loads[from].heads_gone).find(|one| {
                let waited = self.now.since(one.arrived) > self.mover.config.fair_wait;
                waited && attained(one.program).is_some_and(|service| service <= median)
            });
            let Some(waiting) = waits else { continue };
            let over_served = |one: &&RunningFacts| {
                let yields = |program: &u64| {
                    let moves = self.mover.fair_moves.get(program).map_or(0, VecDeque::len);
                    moves < self.mover.config.fair_moves_per_minute as usize
                };
                attained(one.program).is_some_and(|service| service > 2.0 * median) && one.program.as_ref().is_some_and(yields)
            };
            let mut candidates: Vec<&RunningFacts> =
                facts.running.iter().filter(over_served).filter(|one| self.may_leave(one, true)).collect();
            // The one with the largest surplus first.
            candidates.sort_by(|a, b| {
                let service = |one: &RunningFacts| attained(one.program).unwrap_or(0.0);
                service(b).total_cmp(&service(a)).then((a.tokens, a.request).cmp(&(b.tokens, b.request)))
            });
            for one in candidates {
                let Some(to) = self.target_for(from, one) else { continue };
                let price = self.board.price(from, to, one.request, one.tokens, true);
                let waited = self.now.since(waiting.arrived);
                let worth_it = waited.as_secs_f64() > way_price(&price).cost_s() && !self.ends_before(one, from, &price);
                let (Some(program), Some(service)) = (one.program, attained(one.program).filter(|_| worth_it)) else { continue };
                let reason = MoveReason::Fairness {
                    program,
                    times_median: service / median.max(f64::MIN_POSITIVE),
                    waiting: waiting.request,
                    waited,
                };
                self.copy(one, from, to, reason, price);
                break;
            }
        }
    }

    /// Pairs the replica whose memory ends first with the one whose memory ends last, as long as that puts the first end off.
    fn balance(&mut self) {
        let low = self.mover.config.freeness_low;
        let mut sources: Vec<usize> = self.board.ready().filter(|&place| self.board.loads[place].freeness() < low).collect();
        sources.sort_by(|&a, &b| self.board.loads[a].freeness().total_cmp(&self.board.loads[b].freeness()).then(a.cmp(&b)));
        for from in sources {
            let may = |to| self.board.may_copy(from, to) && self.board.same_numerics(from, to) && self.board.loads[to].freeness() > low;
            let Some(to) = self.board.freest(may) else { continue };
            self.relieve(from, to);
        }
    }

    fn relieve(&mut self, from: usize, to: usize) {
        let low = self.mover.config.freeness_low;
        let (source, target) = (&self.board.loads[from], &self.board.loads[to]);
        let before = source.freeness().min(target.freeness());
        let for_quiet = source.freeness_of_memory() >= low;
        let mut candidates: Vec<&RunningFacts> = source.facts.running.iter().filter(|one| self.may_leave(one, true)).collect();
        // The least important, then the shortest, which costs least; then the latest, which its engine would preempt first.
        candidates.sort_by_key(|one| (Reverse(one.priority), one.tokens, Reverse(one.started_at), one.request));
        for one in candidates {
            let important = self.mover.config.quiet_from.is_some_and(|from| one.priority <= from);
            let demand = one.demand(target.facts.block_size);
            if for_quiet && important || !target.fits(demand) {
                continue;
            }
            let after = source.without(one).freeness().min(target.with(demand).freeness());
            if after <= before {
                continue;
            }
            let benefit_ms = (after.min(low) - before) * source.step_s * 1e3;
            let price = self.board.price(from, to, one.request, one.tokens, true);
            if benefit_ms <= way_price(&price).cost_s() * 1e3 || self.ends_before(one, from, &price) {
                continue;
            }
            let (freeness_from, freeness_to) = (source.freeness(), target.freeness());
            let reason = if for_quiet {
                MoveReason::Priority { freeness_from, freeness_to, benefit_ms }
            } else {
                MoveReason::Balance { freeness_from, freeness_to, benefit_ms }
            };
            self.copy(one, from, to, reason, price);
            return;
        }
    }

    fn order(&self, request: RequestId, to: Option<ReplicaId>) -> Result<Move, OrderRefusal> {
        if self.mover.ongoing.contains_key(&request) {
            return Err(OrderRefusal::Moving(request));
        }
        let here = |place: &usize| self.board.loads[*place].facts.requests().any(|own| own == request);
        let from = (0..self.board.loads.len()).find(here).ok_or(OrderRefusal::NotHere(request))?;
        let facts = self.board.loads[from].facts;
        let running = facts.running.iter().find(|one| one.request == request);
        let waiting = facts.waiting.iter().find(|one| one.request == request);
        let (tokens, movable, fresh) = match (running, waiting) {
            (Some(one), _) => (one.tokens, one.movable && !one.prefilling, false),
            (None, Some(one)) => (one.tokens, one.movable, one.fresh),
            (None, None) => return Err(OrderRefusal::NotHere(request)),
        };
        if !movable {
            return Err(OrderRefusal::NotMovable(request));
        }
        let demand = (tokens + Tokens(1)).to_blocks(facts.block_size);
        let may = |place: usize| {
            let slots = if running.is_some() { self.board.may_copy(from, place) } else { self.board.may_go(from, place) };
            slots && (fresh || self.board.same_numerics(from, place)) && self.board.loads[place].fits(demand)
        };
        let to = match to {
            None => self.board.freest(may).ok_or(OrderRefusal::NoTarget { request, demand })?,
            Some(id) => self.board.place(id).filter(|&place| may(place)).ok_or(OrderRefusal::Target { request, target: id, demand })?,
        };
        let price = self.board.price(from, to, request, tokens, running.is_some());
        let way = if running.is_some() { way_of(&price) } else { MoveWay::Recompute };
        let (from, to) = (facts.id, self.board.loads[to].facts.id);
        Ok(Move { request, from, to, tokens, way, reason: MoveReason::Operator, price })
    }

    /// The freest replica that a running request fits, and that is left with room for its own queue.
    fn target_for(&self, from: usize, one: &RunningFacts) -> Option<usize> {
        let demand = one.demand(self.board.loads[from].facts.block_size);
        let may = |to: usize| {
            let target = &self.board.loads[to];
            self.board.may_copy(from, to)
                && self.board.same_numerics(from, to)
                && target.fits(demand)
                && target.with(demand).freeness() >= 0.0
        };
        self.board.freest(may)
    }

    fn may_take_waiting(&self, from: usize, to: usize, waiting: &WaitingFacts) -> bool {
        self.board.may_go(from, to) && (waiting.fresh || self.board.same_numerics(from, to))
    }

    /// Whether a running request can be copied, and, where the loop `chooses` it, is not left alone for a while.
    fn may_leave(&self, one: &RunningFacts, chooses: bool) -> bool {
        let rests = if chooses { !self.mover.may_choose(one.request, self.now) } else { self.mover.ongoing.contains_key(&one.request) };
        one.movable && !one.prefilling && !rests && !self.moves.iter().any(|chosen| chosen.request == one.request)
    }

    /// Its client's bound ends it before it would be worth its move.
    fn ends_before(&self, one: &RunningFacts, from: usize, price: &MovePrice) -> bool {
        let step_s = self.board.loads[from].step_s;
        one.left_at_most.is_some_and(|left| left.as_f64() * step_s <= 2.0 * way_price(price).total_s)
    }

    /// What it is worth that blocks are there which the head of a queue lacks, in ms: as negative freeness, a step for each of their tokens.
    fn benefit_of_blocks_ms(&self, from: usize, blocks: f64) -> f64 {
        let load = &self.board.loads[from];
        blocks * f64::from(load.facts.block_size.get()) * load.step_s * 1e3
    }

    fn copy(&mut self, one: &RunningFacts, from: usize, to: usize, reason: MoveReason, price: MovePrice) {
        let way = way_of(&price);
        self.push(one.request, one.tokens, from, to, reason, price, way);
        self.board.copy(from, to, one);
    }

    fn pass_on(&mut self, waiting: &WaitingFacts, from: usize, to: usize, reason: MoveReason) {
        let price = self.board.price(from, to, waiting.request, waiting.tokens, false);
        self.push(waiting.request, waiting.tokens, from, to, reason, price, MoveWay::Recompute);
        self.board.pass_on(from, to, waiting.demand);
    }

    #[allow(clippy::too_many_arguments, reason = "the fields of a move")]
    fn push(&mut self, request: RequestId, tokens: Tokens, from: usize, to: usize, reason: MoveReason, price: MovePrice, way: MoveWay) {
        let (from, to) = (self.board.loads[from].facts.id, self.board.loads[to].facts.id);
        self.moves.push(Move { request, from, to, tokens, way, reason, price });
    }
}

fn blocks(count: f64) -> Blocks {
    Blocks(count.max(0.0) as u32)
}

/// The lower one of the two in the middle.
fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len().checked_sub(1)? / 2).copied()
}

#[cfg(test)]
mod tests;
