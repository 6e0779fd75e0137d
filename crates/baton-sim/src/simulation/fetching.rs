//! Prefixes that are brought from one engine's cache to another's before the requests that want them start there.

use std::time::Duration;

use baton_engine::Prefix;
use baton_policy::{PeerTerms, PrefixFetch};
use baton_units::{Blocks, ReplicaId, RequestId, Time, Tokens};

use super::{Event, Simulation};
use crate::{EngineModel, ScheduledEngine};

/// One side's part in bringing a prefix, between two steps of its engine.
#[derive(Debug)]
pub(super) struct Fetching {
    request: RequestId,
    /// Where this part is done, and where the request waits.
    at: (usize, u64),
    to: (usize, u64),
    blocks: Blocks,
    part: Part,
}

#[derive(Debug)]
enum Part {
    /// What the holder has is read, and takes so long on its way.
    Read { takes: Duration },
    /// It is there.
    Write { bytes: Vec<u8> },
}

impl Simulation<'_> {
    /// What the router may know of a replica's link; only the scheduler's engines give and take KV.
    pub(super) fn tell_peer(&mut self, replica: usize) {
        let peers = self.scenario.peers.as_ref().filter(|_| matches!(self.scenario.engine, EngineModel::Scheduler { .. }));
        let terms = peers.map(|peers| PeerTerms {
            group: 0,
            kv_bytes_per_token: peers.kv_bytes_per_token,
            latency_s: peers.link.latency_s,
            bytes_per_s: peers.link.bytes_per_s,
        });
        if terms.is_some() {
            self.router.set_peer_terms(ReplicaId(replica as u32), terms);
        }
    }

    /// Has the prefix brought; the request starts when it is there.
    pub(super) fn fetch(&mut self, request: RequestId, to: ReplicaId, fetch: PrefixFetch, now: Time) {
        let (from, to) = (fetch.from.index(), to.index());
        let to = (to, self.replicas[to].incarnation);
        self.live.get_mut(&request).expect("a placed request is alive").sent_to = Some(to);
        let at = (from, self.replicas[from].incarnation);
        let part = Part::Read { takes: fetch.takes };
        self.queue.schedule(now, Event::Fetch(Fetching { request, at, to, blocks: fetch.blocks, part }));
    }

    /// A part's time has come: it is done at once, or when the step that runs there has ended.
    pub(super) fn take_fetching(&mut self, fetching: Fetching, now: Time) {
        let (replica, incarnation) = fetching.at;
        if !self.lives(replica, incarnation) {
            return self.start_without(&fetching, now);
        }
        let busy = self.replicas[replica].engine.movable().is_some_and(|engine| !engine.between_steps());
        if busy {
            self.replicas[replica].fetching.push(fetching);
            return;
        }
        self.perform_fetching(fetching, now);
        self.go_on_at(replica, now);
    }

    pub(super) fn perform_fetching(&mut self, fetching: Fetching, now: Time) {
        if !self.waits(&fetching) {
            return;
        }
        let prefix = self.prefix(&fetching);
        let Fetching { request, at, to, blocks, part } = fetching;
        let engine = self.replicas[at.0].engine.movable().expect("peers are the scheduler's engines");
        match part {
            Part::Read { takes } => match read(engine, &prefix) {
                Some((blocks, bytes)) => {
                    let part = Part::Write { bytes };
                    self.queue.schedule(now + takes, Event::Fetch(Fetching { request, at: to, to, blocks, part }));
                }
                None => self.start_without(&Fetching { request, at, to, blocks, part: Part::Read { takes } }, now),
            },
            Part::Write { bytes } => {
                let written = write(engine, &prefix, blocks, &bytes);
                self.start_with(request, to.0, written, now);
            }
        }
    }

    /// The replica has died: requests that waited for what it was to bring start without.
    pub(super) fn end_fetches_of(&mut self, replica: usize, now: Time) {
        for fetching in std::mem::take(&mut self.replicas[replica].fetching) {
            self.start_without(&fetching, now);
        }
    }

    fn start_without(&mut self, fetching: &Fetching, now: Time) {
        if self.waits(fetching) && self.lives(fetching.to.0, fetching.to.1) {
            self.start_with(fetching.request, fetching.to.0, false, now);
        }
    }

    fn start_with(&mut self, request: RequestId, replica: usize, fetched: bool, now: Time) {
        self.router.fetched(request, fetched, now);
        self.tally.fetches += u32::from(fetched);
        self.send(request, ReplicaId(replica as u32), now);
    }

    /// Whether the request waits for it still; its replica may have died.
    fn waits(&self, fetching: &Fetching) -> bool {
        self.live.get(&fetching.request).is_some_and(|live| live.sent_to == Some(fetching.to))
    }

    fn prefix(&self, fetching: &Fetching) -> Prefix {
        let tokens = fetching.blocks.to_tokens(self.scenario.block_size).0 as usize;
        let tokens = self.live[&fetching.request].prompt[..tokens].to_vec();
        Prefix { model: self.scenario.router.model.clone(), tokens, adapter: None, salt: None, public: Tokens::ZERO }
    }
}

/// Leading blocks of the prefix that the engine has; `None` where it has none.
fn read(engine: &mut ScheduledEngine, prefix: &Prefix) -> Option<(Blocks, Vec<u8>)> {
    let held = engine.engine_mut().hold_prefix(prefix, Blocks::ZERO).ok()?;
    let view = engine.engine().prepared(held).expect("it was just held");
    let (blocks, bytes) = (view.held, engine.read_blocks(view.blocks));
    engine.engine_mut().abandon(held);
    (blocks > Blocks::ZERO).then_some((blocks, bytes))
}

/// Whether there was room for them.
fn write(engine: &mut ScheduledEngine, prefix: &Prefix, blocks: Blocks, bytes: &[u8]) -> bool {
    let Ok(room) = engine.engine_mut().hold_prefix(prefix, blocks) else { return false };
    let view = engine.engine().prepared(room).expect("it was just held");
    let (held, missing) = (view.held.0 as usize, view.blocks[view.held.0 as usize..].to_vec());
    let block_bytes = bytes.len() / blocks.0 as usize;
    engine.write_blocks(&missing, &bytes[held * block_bytes..]);
    engine.engine_mut().install(room).is_ok()
}
