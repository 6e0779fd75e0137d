use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, HashMap, VecDeque},
    hash::BuildHasherDefault,
    time::Duration,
};

use baton_cost::StepCoefficients;
use baton_kv::{BlockKey, EngineHash, KeyHasher, KvEvent};
use baton_policy::LoadReport;
use baton_units::{BlockSize, Blocks, DurationMs, RequestId, Time, Tokens};

use crate::{EngineOutput, EngineRequest, TimedEngine};

/// Sequences that the lab's engine runs at once.
const RUNNING_MAX: usize = 164;
const TOKEN_TIME: Duration = Duration::from_millis(20);

/// The engine that the lab measured the peers with: one whole prefill at a time in order of arrival, decoding apart at 20 ms a token,
/// a prefix cache over paged blocks that evicts the least recently used.
#[derive(Debug)]
pub struct SerialEngine {
    step: StepCoefficients,
    block_size: BlockSize,
    cache: Cache,
    waiting: VecDeque<EngineRequest>,
    prefilling: Option<Prefilling>,
    decoding: BinaryHeap<Reverse<(Time, RequestId)>>,
    running: BTreeMap<RequestId, EngineRequest>,
    events: Vec<KvEvent>,
    busy_ms: f64,
}

#[derive(Debug)]
struct Prefilling {
    request: RequestId,
    ends_at: Time,
    cached: Tokens,
    /// Places in its prompt of the blocks that it fills.
    fresh: Vec<usize>,
}

impl SerialEngine {
    pub fn new(step: StepCoefficients, block_size: BlockSize, blocks: Blocks) -> Self {
        Self {
            step,
            block_size,
            cache: Cache::new(blocks.0 as usize),
            waiting: VecDeque::new(),
            prefilling: None,
            decoding: BinaryHeap::new(),
            running: BTreeMap::new(),
            events: Vec::new(),
            busy_ms: 0.0,
        }
    }

    /// Blocks for the prompt's last partial block and the output.
    fn private_blocks(&self, request: &EngineRequest) -> usize {
        let size = self.block_size.get();
        let partial = request.prompt.len() as u32 % size;
        (request.output + partial).div_ceil(size) as usize + 1
    }

    /// Starts the next prefill, if none runs and memory and batch allow.
    fn start(&mut self, now: Time) {
        if self.prefilling.is_some() {
            return;
        }
        let Some(request) = self.waiting.front() else { return };
        let private = self.private_blocks(request);
        let fits = self.running.len() < RUNNING_MAX && self.cache.fits(&request.keys, private);
        if !self.running.is_empty() && !fits {
            return;
        }
        let request = self.waiting.pop_front().expect("it was just looked at");
        let hit = self.cache.hit(&request.keys);
        let fresh = self.cache.acquire(&request.keys, private, &mut self.events);
        let prompt = Tokens(request.prompt.len() as u32);
        let most = Tokens(prompt.0 - 1).full_blocks(self.block_size);
        let cached = Blocks(hit as u32).min(most).to_tokens(self.block_size);
        let ms = self.step.prefill_ms(prompt - cached, cached);
        self.busy_ms += ms;
        self.prefilling = Some(Prefilling { request: request.id, ends_at: now + Duration::from_ms(ms), cached, fresh });
        self.running.insert(request.id, request);
    }

    fn end_prefill(&mut self, now: Time) -> EngineOutput {
        let Prefilling { request, cached, fresh, .. } = self.prefilling.take().expect("a prefill runs");
        let engine_request = &self.running[&request];
        for run in fresh.chunk_by(|a, b| a + 1 == *b) {
            let (from, to) = (run[0], run[run.len() - 1] + 1);
            let tokens = &engine_request.prompt[from * self.block_size.get() as usize..to * self.block_size.get() as usize];
            self.events.push(stored(&engine_request.keys, from, to, tokens, self.block_size));
        }
        let first = next_token(engine_request, 0);
        let finished = engine_request.output <= 1;
        if finished {
            self.end_request(request);
        } else {
            self.decoding.push(Reverse((now + TOKEN_TIME * (engine_request.output - 1), request)));
        }
        EngineOutput { request, cached: Some(cached), tokens: vec![first], finished }
    }

    /// Caches the output's full blocks and lets go of all.
    fn end_request(&mut self, id: RequestId) {
        let request = self.running.remove(&id).expect("it runs");
        let size = self.block_size.get() as usize;
        let all: Vec<u32> = request.prompt.iter().copied().chain((0..request.output).map(|place| next_token(&request, place))).collect();
        let from = request.keys.len();
        let mut keys = request.keys.to_vec();
        for block in all.chunks_exact(size).skip(from) {
            keys.push(keys.last().expect("a prompt fills a block").child(block));
        }
        self.cache.release_private(self.private_blocks(&request));
        let fresh = self.cache.acquire(&keys[from..], 0, &mut self.events);
        if !fresh.is_empty() {
            self.events.push(stored(&keys, from, keys.len(), &all[from * size..keys.len() * size], self.block_size));
        }
        self.cache.release(&keys);
    }
}

impl TimedEngine for SerialEngine {
    fn submit(&mut self, request: EngineRequest, now: Time) {
        self.waiting.push_back(request);
        self.start(now);
    }

    fn next_at(&self) -> Option<Time> {
        let prefill = self.prefilling.as_ref().map(|prefilling| prefilling.ends_at);
        let decode = self.decoding.peek().map(|Reverse((at, _))| *at);
        prefill.into_iter().chain(decode).min()
    }

    fn advance(&mut self, now: Time) -> Vec<EngineOutput> {
        let mut outputs = Vec::new();
        while let Some(Reverse((at, request))) = self.decoding.peek().copied()
            && at <= now
        {
            self.decoding.pop();
            let tokens = (1..self.running[&request].output).map(|place| next_token(&self.running[&request], place)).collect();
            self.end_request(request);
            outputs.push(EngineOutput { request, cached: None, tokens, finished: true });
        }
        if self.prefilling.as_ref().is_some_and(|prefilling| prefilling.ends_at <= now) {
            outputs.push(self.end_prefill(now));
        }
        self.start(now);
        outputs
    }

    fn take_events(&mut self) -> Vec<KvEvent> {
        std::mem::take(&mut self.events)
    }

    fn load(&self, now: Time) -> LoadReport {
        let waiting: usize = self.waiting.iter().map(|request| request.prompt.len()).sum();
        let prefilling = self.prefilling.as_ref().map_or(0, |prefilling| {
            let prompt = self.running[&prefilling.request].prompt.len();
            prompt - prefilling.cached.0 as usize
        });
        LoadReport {
            taken_at: now,
            waiting: self.waiting.len() as u32,
            running: self.running.len() as u32,
            kv_blocks_free: Blocks(self.cache.free() as u32),
            prefill_backlog: Tokens((waiting + prefilling) as u32),
        }
    }

    fn holds(&self, key: BlockKey) -> bool {
        self.cache.blocks.contains_key(&key)
    }

    fn check_blocks(&self) -> Result<(), String> {
        self.cache.check()
    }

    fn blocks_in_use(&self) -> Blocks {
        Blocks((self.cache.used + self.cache.private) as u32)
    }

    fn busy_ms(&self) -> f64 {
        self.busy_ms
    }
}

fn stored(keys: &[BlockKey], from: usize, to: usize, tokens: &[u32], block_size: BlockSize) -> KvEvent {
    KvEvent::Stored {
        hashes: keys[from..to].iter().map(|key| EngineHash(key.0)).collect(),
        parent: from.checked_sub(1).map(|before| EngineHash(keys[before].0)),
        tokens: tokens.to_vec(),
        block_size,
        adapter: None,
        salt: None,
    }
}

/// A token that depends on the whole prompt and its place, and on nothing else.
fn next_token(request: &EngineRequest, place: u32) -> u32 {
    let last = request.keys.last().map_or(0, |key| key.0);
    let tail = request.prompt.last().copied().unwrap_or(0);
    BlockKey(last).child(&[tail, request.prompt.len() as u32, place]).0 as u32 >> 1
}

/// Cached and used blocks by content, and a count of blocks without a key yet.
#[derive(Debug)]
struct Cache {
    capacity: usize,
    blocks: HashMap<BlockKey, CachedBlock, BuildHasherDefault<KeyHasher>>,
    /// Unused blocks by the moment that their last user left.
    idle: BTreeMap<u64, BlockKey>,
    releases: u64,
    used: usize,
    private: usize,
}

#[derive(Debug)]
struct CachedBlock {
    users: u32,
    released: u64,
}

impl Cache {
    fn new(capacity: usize) -> Self {
        Self { capacity, blocks: HashMap::default(), idle: BTreeMap::new(), releases: 0, used: 0, private: 0 }
    }

    fn free(&self) -> usize {
        self.capacity.saturating_sub(self.used + self.private)
    }

    fn hit(&self, keys: &[BlockKey]) -> usize {
        keys.iter().take_while(|key| self.blocks.contains_key(key)).count()
    }

    fn fits(&self, keys: &[BlockKey], private: usize) -> bool {
        let unused = keys.iter().filter(|key| self.blocks.get(key).is_none_or(|block| block.users == 0)).count();
        unused + private <= self.free()
    }

    /// Takes a use of each block and returns the places of those that were not there.
    fn acquire(&mut self, keys: &[BlockKey], private: usize, events: &mut Vec<KvEvent>) -> Vec<usize> {
        let mut fresh = Vec::new();
        for (place, key) in keys.iter().enumerate() {
            if let Some(block) = self.blocks.get_mut(key) {
                if block.users == 0 {
                    self.idle.remove(&block.released);
                    self.used += 1;
                }
                block.users += 1;
                continue;
            }
            self.evict_to(self.capacity.saturating_sub(1), events);
            self.blocks.insert(*key, CachedBlock { users: 1, released: 0 });
            self.used += 1;
            fresh.push(place);
        }
        self.private += private;
        self.evict_to(self.capacity, events);
        fresh
    }

    fn release_private(&mut self, blocks: usize) {
        self.private -= blocks;
    }

    /// Gives up a use of each block, the chain's end first, so that tails are evicted before heads.
    fn release(&mut self, keys: &[BlockKey]) {
        for key in keys.iter().rev() {
            let block = self.blocks.get_mut(key).expect("a used block stays");
            block.users -= 1;
            if block.users == 0 {
                self.releases += 1;
                block.released = self.releases;
                self.idle.insert(self.releases, *key);
                self.used -= 1;
            }
        }
    }

    fn evict_to(&mut self, limit: usize, events: &mut Vec<KvEvent>) {
        while self.blocks.len() + self.private > limit {
            let Some((_, key)) = self.idle.pop_first() else { return };
            self.blocks.remove(&key);
            events.push(KvEvent::Removed { hashes: vec![EngineHash(key.0)] });
        }
    }

    fn check(&self) -> Result<(), String> {
        if self.used + self.idle.len() == self.blocks.len() {
            return Ok(());
        }
        Err(format!("{} used and {} idle blocks are not the {} cached", self.used, self.idle.len(), self.blocks.len()))
    }
}
