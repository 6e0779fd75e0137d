use std::{
    collections::{HashMap, VecDeque},
    hash::{BuildHasherDefault, Hash, Hasher},
    time::Duration,
};

use baton_kv::{BlockKey, KeyHasher};
use baton_units::{ReplicaId, Time};

/// A prompt that goes on with a chain has its end among the last blocks that are cached: what follows is new. A few more may be there of
/// another that went on from the same end.
const SEARCHED_MAX: usize = 64;
/// Requests that a session is taken to have before any has ended: a client that names one means to come back. It counts as much as one that did.
const SESSION_PRIOR: f64 = 10.0;
/// Weight of one ended chain in the mean of final sizes.
const FINAL_GAIN: f64 = 0.05;

/// What names a chain of requests that share a growing prefix: the client's session, or the last block of its latest prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChainId {
    Session(u64),
    End(BlockKey),
}

/// Both are hashes already.
impl Hash for ChainId {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(match self {
            Self::Session(session) => !session,
            Self::End(key) => key.0,
        });
    }
}

/// Chains that may go on: where each was last, how large it is, and what share of chains did go on.
#[derive(Debug)]
pub(crate) struct Chains {
    known: HashMap<ChainId, Chain, BuildHasherDefault<KeyHasher>>,
    /// Idle chains by the end of their last request; those in flight are not in it.
    order: VecDeque<(Time, ChainId)>,
    /// By the replica's index: chains and expected final blocks.
    alive: Vec<Alive>,
    idle: Idle,
    continued: f64,
    ended: f64,
    /// The same of sessions that clients named.
    sessions_continued: f64,
    sessions_ended: f64,
    /// What the chains that are idle count for among the ended ones: each the share of the age at which it will be let go.
    ending: f64,
    final_blocks: f64,
}

#[derive(Debug, Clone, Copy)]
struct Chain {
    replica: ReplicaId,
    idle_since: Option<Time>,
    blocks: f64,
    steps: u32,
    /// What it adds to its replica's sum.
    booked: f64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Alive {
    chains: u32,
    blocks: f64,
}

/// Chains that are idle, and the sum of the times since which they are.
#[derive(Debug, Clone, Copy, Default)]
struct Idle {
    chains: u32,
    since_ms: f64,
}

impl Idle {
    fn age_ms(self, now: Time) -> f64 {
        (f64::from(self.chains) * now.as_ms() - self.since_ms).max(0.0)
    }
}

impl Default for Chains {
    fn default() -> Self {
        // One chain that went on and one that did not: until more is known, a request without a session is not taken for a start.
        Self {
            known: HashMap::default(),
            order: VecDeque::new(),
            alive: Vec::new(),
            idle: Idle::default(),
            continued: 1.0,
            ended: 1.0,
            sessions_continued: SESSION_PRIOR,
            sessions_ended: 1.0,
            ending: 0.0,
            final_blocks: 0.0,
        }
    }
}

impl Chains {
    /// Name of the chain that a prompt belongs to, searched among its first `depth` blocks when there is no session.
    pub(crate) fn find(&self, session: Option<u64>, keys: &[BlockKey], depth: usize) -> Option<ChainId> {
        match session {
            Some(session) => Some(ChainId::Session(session)),
            None => keys[..depth.min(keys.len())]
                .iter()
                .rev()
                .take(SEARCHED_MAX)
                .map(|key| ChainId::End(*key))
                .find(|id| self.known.contains_key(id)),
        }
    }

    /// Where the chain was last.
    pub(crate) fn home(&self, id: ChainId) -> Option<ReplicaId> {
        self.known.get(&id).map(|chain| chain.replica)
    }

    /// A request of chain `id` (none: a new chain) was sent to `replica`.
    pub(crate) fn extend(&mut self, id: Option<ChainId>, session: Option<u64>, keys: &[BlockKey], replica: ReplicaId) {
        let before = id.and_then(|id| self.take(id));
        if before.is_some() {
            self.continued += 1.0;
            self.sessions_continued += f64::from(u8::from(session.is_some()));
        }
        let Some(last) = keys.last() else { return };
        let steps = before.map_or(0, |chain| chain.steps) + 1;
        let id = session.map_or(ChainId::End(*last), ChainId::Session);
        self.put(id, Chain { replica, idle_since: None, blocks: keys.len() as f64, steps, booked: 0.0 });
    }

    /// A request ended: the chain's next prompt will go on from `all`.
    pub(crate) fn end(&mut self, session: Option<u64>, prompt: &[BlockKey], all: &[BlockKey], now: Time) {
        let (Some(old), Some(new)) = (prompt.last(), all.last()) else { return };
        let name = |key: &BlockKey| session.map_or(ChainId::End(*key), ChainId::Session);
        if let Some(chain) = self.take(name(old)) {
            self.put(name(new), Chain { idle_since: Some(now), blocks: all.len() as f64, ..chain });
            self.order.push_back((now, name(new)));
        }
    }

    /// The latest request of a chain goes on at another replica.
    pub(crate) fn relocate(&mut self, session: Option<u64>, keys: &[BlockKey], replica: ReplicaId) {
        let Some(last) = keys.last() else { return };
        let id = session.map_or(ChainId::End(*last), ChainId::Session);
        if let Some(chain) = self.take(id) {
            self.put(id, Chain { replica, ..chain });
        }
    }

    /// Lets chains go that were idle for longer than `age`: they will not go on.
    pub(crate) fn expire(&mut self, age: Duration, now: Time) {
        while let Some(&(since, id)) = self.order.front()
            && now.since(since) > age
        {
            self.order.pop_front();
            if self.known.get(&id).is_some_and(|chain| chain.idle_since == Some(since))
                && let Some(chain) = self.take(id)
            {
                self.ended += 1.0;
                self.sessions_ended += f64::from(u8::from(matches!(id, ChainId::Session(_))));
                if chain.steps > 1 {
                    let gain = if self.final_blocks == 0.0 { 1.0 } else { FINAL_GAIN };
                    self.final_blocks += gain * (chain.blocks - self.final_blocks);
                }
            }
        }
        // A chain of which nothing was seen yet says as much as its silence is long; those that wait for their age to pass would
        // otherwise look alive for as long as the first of them, which for requests that are all alone is a whole age.
        self.ending = self.idle.age_ms(now) / (age.as_secs_f64() * 1e3);
    }

    /// Blocks that the live chains of a replica are expected to want.
    pub(crate) fn blocks_wanted(&self, replica: ReplicaId) -> f64 {
        self.continues() * self.alive.get(replica.index()).map_or(0.0, |alive| alive.blocks)
    }

    /// Share of chains that go on.
    pub(crate) fn continues(&self) -> f64 {
        self.continued / (self.continued + self.ended + self.ending)
    }

    /// Requests that are expected to follow on one of a chain. Of sessions those that are silent do not count as ended until they are, since
    /// most begin before it is known how long silences last.
    pub(crate) fn further(&self, session: Option<u64>) -> f64 {
        match session {
            Some(_) => self.sessions_continued / self.sessions_ended,
            None => self.continued / (self.ended + self.ending),
        }
    }

    /// Chains that are alive.
    pub(crate) fn alive(&self) -> usize {
        self.known.len()
    }

    /// Chains that were on the replica last and are alive.
    pub(crate) fn alive_on(&self, replica: ReplicaId) -> u32 {
        self.alive.get(replica.index()).map_or(0, |alive| alive.chains)
    }

    fn put(&mut self, id: ChainId, mut chain: Chain) {
        self.take(id);
        // A start is small, but what it will grow to is what the replica must hold.
        chain.booked = chain.blocks.max(self.final_blocks);
        let place = chain.replica.index();
        if self.alive.len() <= place {
            self.alive.resize_with(place + 1, Alive::default);
        }
        let alive = &mut self.alive[place];
        alive.chains += 1;
        alive.blocks += chain.booked;
        if let Some(since) = chain.idle_since {
            self.idle.chains += 1;
            self.idle.since_ms += since.as_ms();
        }
        self.known.insert(id, chain);
    }

    fn take(&mut self, id: ChainId) -> Option<Chain> {
        let chain = self.known.remove(&id)?;
        if let Some(alive) = self.alive.get_mut(chain.replica.index()) {
            alive.chains -= 1;
            alive.blocks = if alive.chains == 0 { 0.0 } else { alive.blocks - chain.booked };
        }
        if let Some(since) = chain.idle_since {
            self.idle.chains -= 1;
            self.idle.since_ms = if self.idle.chains == 0 { 0.0 } else { self.idle.since_ms - since.as_ms() };
        }
        Some(chain)
    }
}

#[cfg(test)]
#[allow(clippy::float_cmp, reason = "ratios of small whole numbers")]
mod tests {
    use super::*;

    const AGE: Duration = Duration::from_secs(30);

    fn at(seconds: f64) -> Time {
        Time::from_ms(seconds * 1e3)
    }

    /// A chain's first request, which ends at `seconds`.
    fn single(chains: &mut Chains, key: u64, seconds: f64) {
        let keys = [BlockKey(key)];
        chains.extend(None, None, &keys, ReplicaId(0));
        chains.end(None, &keys, &keys, at(seconds));
    }

    #[test]
    fn chains_that_are_silent_count_as_ended_by_the_share_of_their_age() {
        let mut chains = Chains::default();
        (0..100).for_each(|key| single(&mut chains, key, 0.0));
        chains.expire(AGE, at(0.0));
        assert_eq!(chains.continues(), 0.5, "nothing is known yet");
        chains.expire(AGE, at(15.0));
        assert_eq!(chains.continues(), 1.0 / 52.0);
        chains.expire(AGE, at(31.0));
        assert_eq!(chains.continues(), 1.0 / 102.0, "all have ended, and none counts twice");
        assert_eq!(chains.blocks_wanted(ReplicaId(0)), 0.0);
    }

    #[test]
    fn chains_that_go_on_count_no_more_as_silent() {
        let mut chains = Chains::default();
        for step in 0..100 {
            let id = (step > 0).then_some(ChainId::End(BlockKey(step)));
            let keys = [BlockKey(step + 1)];
            chains.extend(id, None, &keys, ReplicaId(0));
            chains.end(None, &keys, &keys, at(step as f64));
        }
        chains.expire(AGE, at(99.0));
        assert_eq!(chains.continues(), 100.0 / 101.0);
    }
}
