use std::{
    collections::{BTreeMap, HashSet},
    ops::Range,
    time::Duration,
};

use baton_units::Time;
use hashbrown::HashTable;

use super::{
    AT_ONCE,
    anchors::Anchors,
    holders::HolderTable,
    snapshot::{CopiedNode, Entry},
};
use crate::{BlockKey, EngineHash};

const NONE: u32 = u32::MAX;
/// Stamps begin here, so that a restored block can have been used before the run began.
const STAMP_ORIGIN: u64 = 1 << 60;
/// An engine that extends a chain uses all of it; a chain used this long ago is noted as used again.
const EXTENSION_TOUCHES_AFTER: u64 = 1_000_000_000;
/// Blocks that the smallest bound leaves room for.
const BLOCKS_MIN: usize = 1024;
/// Blocks that go together when room is made, or this share of all if that is less: a pause of some 0.1 ms.
const EVICTED_AT_ONCE: usize = 128;
const EVICTED_SHARE: usize = 16;
/// Expectations are looked through this often in a lifetime, since a look goes over all replicas.
const EXPIRIES_IN_LIFETIME: u64 = 1024;
/// Blocks that go from one list before its worth is compared again.
const EVICTED_IN_A_ROW: usize = 64;

/// A map has room for this many times its blocks: one that is fuller doubles when what was removed has left it without free places.
const MAP_SPACE: usize = 2;

const REUSED: u8 = 1;
/// Believed without a word of the engine.
const EXPECTED: u8 = 1 << 1;
/// Takes memory of the replica; a node without it only keeps the place of a parent or of a pin.
const RESIDENT: u8 = 1 << 2;
/// Two different blocks were seen after it, in the fleet.
const BRANCHES: u8 = 1 << 3;
/// Of a part's first block: some block of the part, after this one, may branch.
const PART_BRANCHES: u8 = 1 << 4;

/// Chains are searched for branches by parts of this many blocks.
const PART: u32 = 64;

/// Lists of a replica's nodes: by use those never reused and those reused, which may go, and in no order those which may not.
const LISTS: usize = 3;
const KEPT: usize = 2;

/// What the replicas' caches hold, as far as is known: one forest of chains for each replica, all in one slab.
///
/// A chain's use is noted on all its blocks, so a parent was never used before its children, and the least recently used block of a
/// replica is a leaf. Blocks of the same use go from the chain's end.
#[derive(Debug)]
pub(super) struct Caches {
    pub(super) holders: HolderTable,
    pub(super) anchors: Anchors,
    nodes: Vec<Node>,
    /// First unused node; the others follow by `older`.
    unused: u32,
    live: usize,
    by_key: HashTable<u32>,
    /// Nodes whose engine hash is not their key.
    by_hash: HashTable<u32>,
    /// Second and further hashes of a content.
    aliases: BTreeMap<(u16, EngineHash), Alias>,
    replicas: Vec<Cache>,
    lifetime: u64,
    /// No expectation ends before.
    next_expiry: u64,
    stamp: u64,
    bytes_max: usize,
    blocks_max: usize,
    /// Blocks for which nothing grows any more.
    reserved: usize,
    evicted_for_room: u64,
}

#[derive(Debug, Default)]
pub(super) struct Cache {
    lists: [List; LISTS],
    resident: usize,
    pinned: usize,
    held: usize,
    /// Held blocks whose parent is not held.
    holes: usize,
    /// The engine names some blocks by their keys.
    hashes_are_keys: bool,
}

#[derive(Debug, Clone, Copy)]
struct List {
    oldest: u32,
    youngest: u32,
    /// The oldest whose expectation may yet end.
    unexpired: u32,
}

impl Default for List {
    fn default() -> Self {
        Self { oldest: NONE, youngest: NONE, unexpired: NONE }
    }
}

#[derive(Debug, Clone, Copy)]
struct Alias {
    place: u32,
    copies: u32,
}

/// A block of one replica: one cache line.
#[derive(Debug, Clone, Copy)]
struct Node {
    key: BlockKey,
    /// As the engine names it, once confirmed.
    hash: EngineHash,
    /// Moment of the last use, in ns.
    used: u64,
    parent: u32,
    older: u32,
    younger: u32,
    children: u32,
    held_children: u32,
    /// Requests in flight whose prompt ends here, and children that have such.
    users: u32,
    depth: u32,
    /// How often the engine stored `hash`.
    copies: u32,
    slot: u16,
    /// Distinct engine hashes of this content that are stored.
    hashes: u16,
    flags: u8,
}

const _: () = assert!(size_of::<Node>() == 64);

impl Node {
    fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    fn held(&self) -> bool {
        self.hashes > 0 || self.has(EXPECTED)
    }

    fn list(&self) -> usize {
        if self.users > 0 || !self.has(RESIDENT) { KEPT } else { usize::from(self.has(REUSED)) }
    }
}

/// How long a block lay idle, and how its idle time ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Use {
    /// It had been used more than once before.
    pub reused_before: bool,
    pub idle: Duration,
    /// Ended by use; otherwise by eviction.
    pub reused: bool,
    /// Blocks of which this is true.
    pub blocks: u32,
}

/// A block that its replica would let go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Victim {
    /// Blocks before it in its chain.
    pub depth: u32,
    /// It was used more than once.
    pub reused: bool,
    pub idle: Duration,
    /// No other replica holds it.
    pub unique: bool,
}

impl Caches {
    pub(super) fn new(lifetime: Duration, bytes_max: usize) -> Self {
        let mut caches = Self {
            holders: HolderTable::new(),
            anchors: Anchors::new(),
            nodes: Vec::new(),
            unused: NONE,
            live: 0,
            by_key: HashTable::new(),
            by_hash: HashTable::new(),
            aliases: BTreeMap::new(),
            replicas: Vec::new(),
            lifetime: u64::try_from(lifetime.as_nanos()).unwrap_or(u64::MAX),
            next_expiry: u64::MAX,
            stamp: STAMP_ORIGIN,
            bytes_max,
            blocks_max: 0,
            reserved: 0,
            evicted_for_room: 0,
        };
        caches.bound_blocks();
        caches
    }

    fn bound_blocks(&mut self) {
        self.blocks_max = self.blocks_for_bytes();
        self.anchors.bound(self.blocks_max);
    }

    /// Makes the replica known.
    pub(super) fn ensure(&mut self, slot: usize) {
        if self.replicas.len() <= slot {
            self.replicas.resize_with(slot + 1, Cache::default);
            self.anchors.set_replicas(slot + 1);
            if self.holders.set_replicas(slot + 1) {
                self.bound_blocks();
            }
        }
    }

    /// Takes the memory for `blocks` in all at once, as far as the bound allows, so that nothing grows while they come.
    pub(super) fn reserve(&mut self, blocks: usize) {
        let blocks = blocks.min(self.blocks_max);
        if blocks <= self.reserved {
            return;
        }
        self.reserved = blocks;
        self.nodes.reserve_exact(blocks.saturating_sub(self.nodes.len()));
        self.holders.reserve(blocks);
        self.anchors.reserve(blocks);
        let (nodes, places) = (&self.nodes, blocks * MAP_SPACE);
        let node = |place: &u32| &nodes[*place as usize];
        self.by_key.reserve(places.saturating_sub(self.by_key.len()), |place| mix(node(place).slot as usize, node(place).key.0));
        self.by_hash.reserve(places.saturating_sub(self.by_hash.len()), |place| mix(node(place).slot as usize, node(place).hash.0));
    }

    pub(super) fn get(&self, slot: usize) -> Option<&Cache> {
        self.replicas.get(slot)
    }

    pub(super) fn replicas(&self) -> usize {
        self.replicas.len()
    }

    /// Bytes taken by all that grows with the number of blocks.
    pub(super) fn bytes(&self) -> usize {
        let maps = self.by_key.allocation_size() + self.by_hash.allocation_size();
        self.nodes.capacity() * size_of::<Node>() + maps + self.holders.bytes() + self.anchors.bytes()
    }

    /// Blocks that can be added before others must go.
    pub(super) fn room(&self) -> usize {
        self.blocks_max.saturating_sub(self.live)
    }

    pub(super) fn blocks_max(&self) -> usize {
        self.blocks_max
    }

    /// Blocks that went because of the bound.
    pub(super) fn evicted_for_room(&self) -> u64 {
        self.evicted_for_room
    }

    /// Most (replica, block) pairs within the bound, if each block were on one replica only.
    fn blocks_for_bytes(&self) -> usize {
        let map = |blocks: usize| (blocks * MAP_SPACE * 8 / 7 + 1).next_power_of_two() * (size_of::<u32>() + 1);
        // While one map or the table grows, its former self is still there: the table's is counted, the maps' are halves.
        let words = self.holders.shared().words();
        let tables = |blocks: usize| HolderTable::bytes_for(blocks, words) + Anchors::bytes_for(blocks, words);
        let cost = |blocks: usize| blocks * size_of::<Node>() + 2 * map(blocks) + map(blocks) / 2 + tables(blocks);
        let (mut low, mut high) = (BLOCKS_MIN, (self.bytes_max / size_of::<Node>()).max(BLOCKS_MIN).min(NONE as usize));
        while low < high {
            let middle = (low + high).div_ceil(2);
            if cost(middle) <= self.bytes_max {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        low
    }

    // Uses

    /// Notes that the whole chain was used at `now`. `believe`: it is expected to be there from now on, and what is new is added.
    pub(super) fn touch(&mut self, slot: usize, keys: &[BlockKey], believe: bool, now: Time) {
        let touch = Touch { used: self.tick(now), now: stamp_of(now), believe, counts: false, keeps: false };
        let (present, place) = self.deepest(slot, keys);
        let place = if believe { self.extend(slot, keys, present, place, touch.used) } else { place };
        self.touch_from(place, (keys, present), touch, &mut |_| {});
    }

    /// A request with this prompt is sent: its blocks are expected, and kept until [`Self::unpin`]. Tells how long each idle time was.
    pub(super) fn pin(&mut self, slot: usize, keys: &[BlockKey], now: Time, see: &mut impl FnMut(Use)) {
        let used = self.tick(now);
        let (present, place) = self.deepest(slot, keys);
        let place = self.extend(slot, keys, present, place, used);
        // A chain that the bound cut short is not kept, since its end would not be found again.
        let keeps = place != NONE && self.nodes[place as usize].depth as usize + 1 == keys.len();
        let touch = Touch { used, now: stamp_of(now), believe: true, counts: true, keeps };
        self.touch_from(place, (keys, present), touch, see);
    }

    /// The request ended: what only it kept may go, as young as can be. `all` is its chain with the output's blocks, which are there
    /// from now on if `believe`.
    pub(super) fn unpin(&mut self, slot: usize, prompt: &[BlockKey], all: &[BlockKey], believe: bool, now: Time) {
        self.touch(slot, all, believe, now);
        let used = self.stamp;
        let mut at = prompt.last().and_then(|key| self.find(slot, *key)).unwrap_or(NONE);
        while at != NONE {
            let node = &mut self.nodes[at as usize];
            // A restart in between let go of everything.
            if node.users == 0 {
                break;
            }
            let parent = node.parent;
            if node.users > 1 {
                node.users -= 1;
                break;
            }
            self.unlink(at);
            let node = &mut self.nodes[at as usize];
            node.users = 0;
            node.used = used;
            let resident = node.has(RESIDENT);
            self.append(at);
            if resident {
                self.replicas[slot].pinned -= 1;
            } else {
                self.free_if_empty(at);
            }
            at = parent;
        }
    }

    pub(super) fn is_pinned(&self, slot: usize, key: BlockKey) -> bool {
        self.find(slot, key).is_some_and(|place| self.nodes[place as usize].users > 0)
    }

    /// Leading blocks of the chain that requests in flight keep; found soonest where there are `guess`.
    pub(super) fn pinned_prefix(&self, slot: usize, keys: &[BlockKey], guess: usize) -> usize {
        let (before, after) = keys.split_at(guess.min(keys.len()));
        let is_pinned = |key: &BlockKey| self.is_pinned(slot, *key);
        if !before.last().is_none_or(is_pinned) {
            before.partition_point(is_pinned)
        } else if !after.first().is_some_and(is_pinned) {
            before.len()
        } else {
            before.len() + after.partition_point(is_pinned)
        }
    }

    pub(super) fn confirmed(&self, slot: usize, key: BlockKey) -> bool {
        self.find(slot, key).is_some_and(|place| self.nodes[place as usize].hashes > 0)
    }

    /// Length of the longest prefix of `keys[..held]` that ends where chains part, of blocks that the replica holds.
    pub(super) fn deepest_branch(&self, slot: usize, keys: &[BlockKey], held: usize) -> Option<usize> {
        let (_, mut at) = self.deepest(slot, &keys[..held]);
        while at != NONE {
            let first = self.nodes[at as usize].depth / PART * PART;
            // Most parts of a long chain are its own from end to end.
            if let Some(place) = self.find(slot, keys[first as usize]) {
                let node = &self.nodes[place as usize];
                if !node.has(PART_BRANCHES) {
                    at = node.parent;
                    continue;
                }
            }
            while at != NONE {
                let node = &self.nodes[at as usize];
                if node.depth < first {
                    break;
                }
                if node.has(BRANCHES) && node.held() {
                    return Some(node.depth as usize + 1);
                }
                at = node.parent;
            }
        }
        None
    }

    fn set_branches(&mut self, place: u32) {
        self.nodes[place as usize].flags |= BRANCHES;
        let mut at = place;
        while at != NONE {
            let node = &mut self.nodes[at as usize];
            if node.depth.is_multiple_of(PART) {
                node.flags |= PART_BRANCHES;
                return;
            }
            at = node.parent;
        }
    }

    /// Ends the expectations whose lifetime is over.
    pub(super) fn expire(&mut self, now: Time) {
        let now = stamp_of(now);
        if now < self.next_expiry {
            return;
        }
        let mut next = u64::MAX;
        for slot in 0..self.replicas.len() {
            for list in 0..KEPT {
                loop {
                    let at = self.replicas[slot].lists[list].unexpired;
                    if at == NONE {
                        break;
                    }
                    let node = self.nodes[at as usize];
                    let ends = node.used.saturating_add(self.lifetime);
                    if ends > now {
                        next = next.min(ends);
                        break;
                    }
                    self.replicas[slot].lists[list].unexpired = node.younger;
                    if node.has(EXPECTED) {
                        self.nodes[at as usize].flags &= !EXPECTED;
                        self.let_go(at);
                    }
                }
            }
        }
        self.next_expiry = next.max(now.saturating_add(self.lifetime / EXPIRIES_IN_LIFETIME));
    }

    // The engine's word

    /// The place of a stored block by its engine's name.
    pub(super) fn place_of(&self, slot: usize, hash: EngineHash) -> Option<u32> {
        let named = |place: &u32| {
            let node = &self.nodes[*place as usize];
            node.hash == hash && node.copies > 0
        };
        if self.replicas[slot].hashes_are_keys
            && let Some(place) = self.find(slot, BlockKey(hash.0)).filter(named)
        {
            return Some(place);
        }
        let own = self.by_hash.find(mix(slot, hash.0), |place| self.nodes[*place as usize].slot as usize == slot && named(place));
        own.copied().or_else(|| self.aliases.get(&(slot as u16, hash)).map(|alias| alias.place))
    }

    pub(super) fn key_at(&self, place: u32) -> BlockKey {
        self.nodes[place as usize].key
    }

    /// Loads what [`Self::confirm`] of these blocks will need, so that the waits for memory overlap.
    pub(super) fn warm_stored(&self, slot: usize, keys: &[BlockKey], hashes: &[EngineHash]) {
        self.holders.warm(keys.iter().copied());
        let mut loaded = 0;
        for (key, hash) in keys.iter().zip(hashes) {
            loaded ^= u64::from(self.by_key.find(mix(slot, key.0), |_| false).is_some());
            loaded ^= u64::from(self.by_hash.find(mix(slot, hash.0), |_| false).is_some());
        }
        std::hint::black_box(loaded);
    }

    /// As [`Self::warm_stored`], for [`Self::remove`].
    pub(super) fn warm_removed(&self, slot: usize, hashes: &[EngineHash]) {
        let mut loaded = 0;
        let places = hashes.iter().filter_map(|hash| self.place_of(slot, *hash));
        self.holders.warm(places.clone().map(|place| self.nodes[place as usize].key));
        for place in places {
            let key = self.nodes[place as usize].key;
            loaded ^= u64::from(self.by_key.find(mix(slot, key.0), |_| false).is_some());
        }
        std::hint::black_box(loaded);
    }

    /// The engine stored `key`, which it calls `hash`, after the block at `parent`. `None` when the bound leaves no room.
    pub(super) fn confirm(&mut self, slot: usize, key: BlockKey, hash: EngineHash, parent: Option<u32>, now: Time) -> Option<u32> {
        if let Some(place) = self.place_of(slot, hash) {
            self.count_copy(slot, place, hash);
            return Some(place);
        }
        let place = match self.find(slot, key) {
            Some(place) => place,
            None => self.add_confirmed(slot, key, parent.unwrap_or(NONE), now)?,
        };
        self.name(slot, place, hash);
        let node = self.nodes[place as usize];
        if !node.has(RESIDENT) {
            self.unlink(place);
            self.take_in(place);
            self.append(place);
            self.touch_path(place, now);
        }
        let named = &mut self.nodes[place as usize];
        named.hashes += 1;
        named.flags &= !EXPECTED;
        if !node.held() {
            self.take_hold(place);
            if node.parent != NONE {
                self.follow(self.nodes[node.parent as usize].key, key);
            }
        }
        Some(place)
    }

    /// The engine removed one copy of a block.
    pub(super) fn remove(&mut self, slot: usize, hash: EngineHash) {
        // A hash that was stored in a missing batch, or is an orphan, says nothing of what is known.
        let Some(place) = self.place_of(slot, hash) else { return };
        if self.uncount_copy(slot, place, hash) {
            return;
        }
        let node = &mut self.nodes[place as usize];
        node.hashes -= 1;
        if node.hashes == 0 {
            self.let_go(place);
            self.take_out(place);
        }
    }

    /// Takes out a block that the engine did not confirm. Tells whether it is gone.
    pub(super) fn forget(&mut self, slot: usize, key: BlockKey) -> bool {
        match self.find(slot, key) {
            Some(place) if self.nodes[place as usize].hashes == 0 => {
                self.drop_belief(place);
                self.take_out(place);
                true
            }
            Some(_) | None => false,
        }
    }

    /// The blocks of `gone` were not there when a request came that has computed them since. So what hangs on them is not there
    /// either, but for what the engine told of or a request keeps.
    pub(super) fn disprove(&mut self, slot: usize, gone: &[BlockKey]) {
        let mut lost: HashSet<u32> = gone.iter().filter_map(|key| self.find(slot, *key)).collect();
        let mut hanging = Vec::new();
        // From the youngest on, parents come before children.
        for list in [1, 0] {
            let mut at = self.replicas[slot].lists[list].youngest;
            while at != NONE {
                let node = &self.nodes[at as usize];
                if node.hashes == 0 && lost.contains(&node.parent) && lost.insert(at) {
                    hanging.push(at);
                }
                at = node.older;
            }
        }
        for at in hanging.into_iter().rev() {
            self.drop_belief(at);
            self.take_out(at);
        }
    }

    /// Drops `blocks` of a replica's blocks, the least recently used first, as if they had been evicted; in the end, those that requests
    /// keep all at once. Tells whether all are gone.
    pub(super) fn clear_some(&mut self, slot: usize, blocks: usize) -> bool {
        if blocks < self.replicas[slot].resident {
            for _ in 0..blocks {
                let Some(place) = self.oldest(slot) else { break };
                self.evict(place);
            }
            if self.oldest(slot).is_some() {
                return false;
            }
        }
        self.clear(slot);
        true
    }

    /// Drops all of a replica's blocks.
    pub(super) fn clear(&mut self, slot: usize) {
        for list in 0..LISTS {
            let mut at = self.replicas[slot].lists[list].oldest;
            while at != NONE {
                let node = self.nodes[at as usize];
                if node.held() {
                    self.anchors.remove(node.key, node.depth, slot);
                    self.holders.remove(node.key, slot);
                }
                self.unname(at);
                self.free(at);
                at = node.younger;
            }
        }
        self.aliases.retain(|(of, _), _| *of as usize != slot);
        self.replicas[slot] = Cache::default();
        self.holders.set_holes(slot, false);
    }

    // Snapshots

    /// Nodes that were ever in use: the places that [`Self::copy_into`] goes over.
    pub(super) fn places(&self) -> usize {
        self.nodes.len()
    }

    /// Copies what is believed at `places`, each block to its replica's place in `copies`. A block of several engine hashes keeps one.
    pub(super) fn copy_into(&self, places: Range<usize>, copies: &mut [Option<&mut Vec<CopiedNode>>]) {
        for node in self.nodes[places].iter().filter(|node| node.held()) {
            if let Some(Some(copies)) = copies.get_mut(node.slot as usize) {
                copies.push(CopiedNode {
                    key: node.key,
                    parent: (node.parent != NONE).then(|| self.nodes[node.parent as usize].key),
                    used: node.used,
                    reused: node.has(REUSED),
                    stored: (node.copies > 0).then_some((node.hash, node.copies)),
                });
            }
        }
    }

    /// Takes in a block of a snapshot, last used at `used`, as the oldest of the replica: after its parent, after all that were used
    /// later. One that is expected there by now keeps its place; one whose parent is not there, or that has no room, is left out.
    pub(super) fn restore(&mut self, slot: usize, entry: &Entry, parent: Option<BlockKey>, used: u64) {
        let parent = match parent.map(|key| self.find(slot, key)) {
            Some(None) => return,
            Some(Some(place)) => place,
            None => NONE,
        };
        if let Some(place) = self.find(slot, entry.key) {
            if let Some((hash, copies)) = entry.stored.filter(|_| self.nodes[place as usize].has(EXPECTED)) {
                self.restore_name(place, hash, copies);
                self.nodes[place as usize].flags &= !EXPECTED;
            }
            return;
        }
        let depth = if parent == NONE { 0 } else { self.nodes[parent as usize].depth + 1 };
        let Some(place) = self.add(slot, entry.key, parent, depth, used) else { return };
        self.nodes[place as usize].flags |= if entry.reused { REUSED } else { 0 };
        match entry.stored {
            Some((hash, copies)) => self.restore_name(place, hash, copies),
            None => self.nodes[place as usize].flags |= EXPECTED,
        }
        self.prepend(place);
        self.take_hold(place);
        if parent != NONE {
            self.follow(self.nodes[parent as usize].key, entry.key);
        }
    }

    fn restore_name(&mut self, place: u32, hash: EngineHash, copies: u32) {
        self.name(self.nodes[place as usize].slot as usize, place, hash);
        let node = &mut self.nodes[place as usize];
        (node.copies, node.hashes) = (copies.max(1), 1);
    }

    // Eviction

    /// Takes out the least recently used blocks of a replica until at most `limit` take memory there.
    pub(super) fn evict_to(&mut self, slot: usize, limit: usize, now: Time, see: &mut impl FnMut(Use)) {
        let mut warm = 0;
        while self.replicas[slot].resident > limit
            && let Some(place) = self.oldest(slot)
        {
            if warm == 0 {
                warm = AT_ONCE.min(self.replicas[slot].resident - limit);
                self.warm_oldest(slot, warm);
            }
            warm -= 1;
            see(self.cut_short(place, now));
            self.evict(place);
        }
    }

    /// Blocks that no request keeps, the next to go first.
    pub(super) fn victims(&self, slot: usize, now: Time) -> impl Iterator<Item = Victim> {
        self.oldest_first(slot).map(move |place| self.victim(place, now))
    }

    fn oldest_first(&self, slot: usize) -> impl Iterator<Item = u32> + Clone {
        let mut heads = self.replicas.get(slot).map_or([NONE; 2], |cache| [cache.lists[0].oldest, cache.lists[1].oldest]);
        std::iter::from_fn(move || {
            let place = self.first_of(heads)?;
            let node = &self.nodes[place as usize];
            heads[node.list()] = node.younger;
            Some(place)
        })
    }

    /// Loads what the eviction of the next `blocks` will need.
    fn warm_oldest(&self, slot: usize, blocks: usize) {
        let keys = self.oldest_first(slot).take(blocks).map(|place| self.nodes[place as usize].key);
        self.holders.warm(keys.clone());
        self.warm_nodes(slot, keys);
    }

    /// Loads what a look-up of the keys' nodes will need.
    fn warm_nodes(&self, slot: usize, keys: impl Iterator<Item = BlockKey>) {
        let found = keys.fold(false, |found, key| found ^ self.by_key.find(mix(slot, key.0), |_| false).is_some());
        std::hint::black_box(found);
    }

    /// Makes room for `blocks` more: evicts, over the whole fleet, where `worth` of a block (what it saves, in ms) is least. Blocks
    /// take equal memory, so this is the least loss per byte. Within one replica and kind the least recently used goes first. Returns
    /// the idle times that this cuts short.
    pub(super) fn make_room(&mut self, blocks: usize, now: Time, worth: impl Fn(usize, Victim) -> f64) -> Vec<Use> {
        let mut cut: Vec<Use> = Vec::new();
        if self.room() >= blocks {
            return cut;
        }
        let wanted = blocks.max(EVICTED_AT_ONCE.min(self.blocks_max / EVICTED_SHARE)).min(self.blocks_max);
        let value = |caches: &Self, slot: usize, list: usize| {
            let place = caches.replicas[slot].lists[list].oldest;
            (place != NONE).then(|| if caches.nodes[place as usize].held() { worth(slot, caches.victim(place, now)) } else { 0.0 })
        };
        let mut heads = std::collections::BinaryHeap::new();
        for slot in 0..self.replicas.len() {
            for list in 0..KEPT {
                if let Some(value) = value(self, slot, list) {
                    heads.push(Head { value, slot, list });
                }
            }
        }
        while self.room() < wanted
            && let Some(Head { slot, list, .. }) = heads.pop()
        {
            for _ in 0..EVICTED_IN_A_ROW {
                let place = self.replicas[slot].lists[list].oldest;
                if place == NONE || self.room() >= wanted {
                    break;
                }
                // What hangs on it was used no later, so it is in the other list's front.
                let leaf = if self.nodes[place as usize].children > 0 { self.oldest(slot).unwrap_or(place) } else { place };
                let ended = self.cut_short(leaf, now);
                match cut.last_mut() {
                    Some(last) if (last.idle, last.reused_before) == (ended.idle, ended.reused_before) => last.blocks += 1,
                    Some(_) | None => cut.push(ended),
                }
                self.evict(leaf);
                self.evicted_for_room += 1;
            }
            if let Some(value) = value(self, slot, list) {
                heads.push(Head { value, slot, list });
            }
        }
        cut
    }

    fn victim(&self, place: u32, now: Time) -> Victim {
        let node = &self.nodes[place as usize];
        Victim {
            depth: node.depth,
            reused: node.has(REUSED),
            idle: idle(node.used, stamp_of(now)),
            unique: !self.holders.held_elsewhere(node.key, node.slot as usize),
        }
    }

    /// The least recently used block that may go.
    fn oldest(&self, slot: usize) -> Option<u32> {
        let lists = &self.replicas[slot].lists;
        self.first_of([lists[0].oldest, lists[1].oldest])
    }

    /// Of the fronts of both lists the one to go first; of one use those never reused before are the chain's end.
    fn first_of(&self, [fresh, reused]: [u32; 2]) -> Option<u32> {
        match (fresh, reused) {
            (NONE, NONE) => None,
            (place, NONE) | (NONE, place) => Some(place),
            _ => Some(if self.nodes[fresh as usize].used <= self.nodes[reused as usize].used { fresh } else { reused }),
        }
    }

    fn cut_short(&self, place: u32, now: Time) -> Use {
        let node = &self.nodes[place as usize];
        Use { reused_before: node.has(REUSED), idle: idle(node.used, stamp_of(now)), reused: false, blocks: 1 }
    }

    fn evict(&mut self, place: u32) {
        self.unname(place);
        self.drop_belief(place);
        self.take_out(place);
    }

    // Nodes

    fn find(&self, slot: usize, key: BlockKey) -> Option<u32> {
        let is = |place: &u32| {
            let node = &self.nodes[*place as usize];
            node.key == key && node.slot as usize == slot
        };
        self.by_key.find(mix(slot, key.0), is).copied()
    }

    /// The last block of the chain that has a node, and how many have one: a node's parent has one too.
    fn deepest(&self, slot: usize, keys: &[BlockKey]) -> (usize, u32) {
        let Some(last) = keys.last() else { return (0, NONE) };
        if let Some(place) = self.find(slot, *last) {
            return (keys.len(), place);
        }
        let mut found = NONE;
        // The last one that a bisection finds is the deepest.
        let present = keys.partition_point(|key| self.find(slot, *key).inspect(|place| found = *place).is_some());
        (present, found)
    }

    /// Adds the blocks of the chain that have no node, not yet in a list. Returns the deepest.
    fn extend(&mut self, slot: usize, keys: &[BlockKey], present: usize, mut place: u32, used: u64) -> u32 {
        let mut depth = present as u32;
        for keys in keys[present..].chunks(AT_ONCE) {
            self.warm_nodes(slot, keys.iter().copied());
            for key in keys {
                let Some(added) = self.add(slot, *key, place, depth, used) else { return place };
                (place, depth) = (added, depth + 1);
            }
        }
        place
    }

    /// A new node without belief and in no list.
    fn add(&mut self, slot: usize, key: BlockKey, parent: u32, depth: u32, used: u64) -> Option<u32> {
        if self.live >= self.blocks_max {
            return None;
        }
        let node = Node {
            key,
            hash: EngineHash(0),
            used,
            parent,
            older: NONE,
            younger: NONE,
            children: 0,
            held_children: 0,
            users: 0,
            depth,
            copies: 0,
            slot: slot as u16,
            hashes: 0,
            flags: RESIDENT,
        };
        let place = if self.unused == NONE {
            if self.nodes.len() == self.nodes.capacity() {
                // Not by doubling: the bound is in bytes.
                self.nodes.reserve_exact((self.nodes.len() / 8).max(64).min(self.blocks_max - self.nodes.len()));
            }
            self.nodes.push(node);
            self.nodes.len() as u32 - 1
        } else {
            let place = self.unused;
            self.unused = self.nodes[place as usize].older;
            self.nodes[place as usize] = node;
            place
        };
        self.live += 1;
        let nodes = &self.nodes;
        self.by_key.insert_unique(mix(slot, key.0), place, |place| {
            let node = &nodes[*place as usize];
            mix(node.slot as usize, node.key.0)
        });
        self.replicas[slot].resident += 1;
        if parent != NONE {
            let parent = &mut self.nodes[parent as usize];
            parent.children += 1;
        }
        Some(place)
    }

    /// A new block that the engine told of: used when its parent was, if no request of ours keeps that.
    fn add_confirmed(&mut self, slot: usize, key: BlockKey, parent: u32, now: Time) -> Option<u32> {
        let before = if parent == NONE { None } else { Some(self.nodes[parent as usize]) };
        let depth = before.map_or(0, |node| node.depth + 1);
        match before {
            Some(node) if node.users == 0 && node.has(RESIDENT) => {
                if stamp_of(now).saturating_sub(node.used) > EXTENSION_TOUCHES_AFTER {
                    self.touch_path(parent, now);
                }
                let used = self.nodes[parent as usize].used;
                let place = self.add(slot, key, parent, depth, used)?;
                self.nodes[place as usize].flags |= self.nodes[parent as usize].flags & REUSED;
                self.link_before(place, parent);
                Some(place)
            }
            Some(_) | None => {
                let used = self.tick(now);
                let place = self.add(slot, key, parent, depth, used)?;
                self.append(place);
                Some(place)
            }
        }
    }

    /// Notes a use on the node and all before it. Of the chain `keys`, the first `present` blocks had a node before the use, and the others
    /// are in no list yet.
    fn touch_from(&mut self, place: u32, (keys, present): (&[BlockKey], usize), touch: Touch, see: &mut impl FnMut(Use)) {
        let mut at = place;
        let mut told: Option<(u64, Use)> = None;
        let mut after: Option<BlockKey> = None;
        let mut keeps = touch.keeps;
        let mut run: Option<Run> = None;
        while at != NONE {
            let node = self.nodes[at as usize];
            let depth = node.depth as usize;
            let new = depth >= present;
            if new && (after.is_none() || (depth + 1).is_multiple_of(AT_ONCE)) {
                self.holders.warm(keys[depth / AT_ONCE * AT_ONCE..=depth].iter().copied());
            }
            let existed = !new && node.has(RESIDENT);
            if touch.counts && existed && touch.now > node.used {
                // Blocks of one use in a row are told together.
                match &mut told {
                    Some((used, run)) if *used == node.used && run.reused_before == node.has(REUSED) => run.blocks += 1,
                    other => {
                        let run = Use { reused_before: node.has(REUSED), idle: idle(node.used, touch.now), reused: true, blocks: 1 };
                        if let Some((_, ended)) = other.replace((node.used, run)) {
                            see(ended);
                        }
                    }
                }
            }
            // What is kept stays in its list, which has no order.
            let moves = node.users == 0;
            let in_run = moves && keeps && !new;
            if in_run {
                run = Some(self.extend_run(run, at));
            } else if moves && !new {
                self.unlink(at);
            }
            let touched = &mut self.nodes[at as usize];
            touched.used = touch.used;
            if touch.counts && existed {
                touched.flags |= REUSED;
            }
            if keeps {
                touched.users += 1;
                self.replicas[node.slot as usize].pinned += usize::from(moves && node.has(RESIDENT));
                // What is before a block that was kept was kept too.
                keeps = moves;
            }
            if touch.believe && !node.has(RESIDENT) {
                self.take_in(at);
            }
            if moves && !in_run {
                self.append(at);
            }
            let became_held = touch.believe && !node.held();
            if became_held {
                self.nodes[at as usize].flags |= EXPECTED;
                self.take_hold(at);
            }
            if let Some(after) = after
                && (became_held || depth + 1 >= present)
            {
                self.follow(node.key, after);
            }
            after = Some(node.key);
            at = node.parent;
        }
        if let Some(run) = run {
            self.keep_run(run);
        }
        if let Some((_, run)) = told {
            see(run);
        }
    }

    /// Notes a use of what is there, without any new belief.
    fn touch_path(&mut self, place: u32, now: Time) {
        let touch = Touch { used: self.tick(now), now: stamp_of(now), believe: false, counts: false, keeps: false };
        self.touch_from(place, (&[], usize::MAX), touch, &mut |_| {});
    }

    /// Adds a node that is about to be kept to the run before it, or begins another and moves the one before. A chain that was used as
    /// a whole lies in its list as one run.
    fn extend_run(&mut self, run: Option<Run>, place: u32) -> Run {
        let node = &self.nodes[place as usize];
        let list = node.list();
        let unexpired = self.replicas[node.slot as usize].lists[list].unexpired == place;
        match run {
            Some(run) if self.nodes[run.youngest as usize].younger == place => {
                Run { youngest: place, unexpired: run.unexpired || unexpired, ..run }
            }
            other => {
                if let Some(run) = other {
                    self.keep_run(run);
                }
                Run { oldest: place, youngest: place, list, unexpired }
            }
        }
    }

    /// Moves a run to the list of those that may not go.
    fn keep_run(&mut self, run: Run) {
        let (older, younger) = (self.nodes[run.oldest as usize].older, self.nodes[run.youngest as usize].younger);
        let lists = &mut self.replicas[self.nodes[run.oldest as usize].slot as usize].lists;
        let list = &mut lists[run.list];
        if run.unexpired {
            list.unexpired = younger;
        }
        if older == NONE {
            list.oldest = younger;
        } else {
            self.nodes[older as usize].younger = younger;
        }
        if younger == NONE {
            list.youngest = older;
        } else {
            self.nodes[younger as usize].older = older;
        }
        let kept = &mut lists[KEPT];
        let before = std::mem::replace(&mut kept.youngest, run.youngest);
        if before == NONE {
            kept.oldest = run.oldest;
        } else {
            self.nodes[before as usize].younger = run.oldest;
        }
        self.nodes[run.oldest as usize].older = before;
        self.nodes[run.youngest as usize].younger = NONE;
    }

    /// Lets a node that only kept a place take memory again; the caller links it.
    fn take_in(&mut self, place: u32) {
        let node = &mut self.nodes[place as usize];
        // A block whose chain went on was used before, whatever became of it in between.
        node.flags |= RESIDENT | if node.children > 0 { REUSED } else { 0 };
        let cache = &mut self.replicas[node.slot as usize];
        cache.resident += 1;
        cache.pinned += usize::from(node.users > 0);
    }

    /// Takes a block that nobody believes in out of the replica's memory; its node stays while others need it.
    fn take_out(&mut self, place: u32) {
        let node = self.nodes[place as usize];
        if node.has(RESIDENT) {
            self.unlink(place);
            let cache = &mut self.replicas[node.slot as usize];
            cache.resident -= 1;
            cache.pinned -= usize::from(node.users > 0);
            self.nodes[place as usize].flags &= !(RESIDENT | REUSED);
            self.append(place);
        }
        self.free_if_empty(place);
    }

    /// Frees a node that keeps no place for anything, and so on with its parent.
    fn free_if_empty(&mut self, place: u32) {
        let mut at = place;
        while at != NONE {
            let node = self.nodes[at as usize];
            if node.has(RESIDENT) || node.children > 0 || node.users > 0 {
                return;
            }
            self.unlink(at);
            self.free(at);
            if node.parent != NONE {
                self.nodes[node.parent as usize].children -= 1;
            }
            at = node.parent;
        }
    }

    fn free(&mut self, place: u32) {
        let node = &self.nodes[place as usize];
        let entry = self.by_key.find_entry(mix(node.slot as usize, node.key.0), |other| *other == place);
        entry.expect("a node has its key").remove();
        let node = &mut self.nodes[place as usize];
        // Nobody believes in it, whoever looks at the slab.
        (node.hashes, node.flags, node.older) = (0, 0, self.unused);
        self.unused = place;
        self.live -= 1;
    }

    // Belief

    /// The block counts as held from now on.
    fn take_hold(&mut self, place: u32) {
        let node = self.nodes[place as usize];
        let slot = node.slot as usize;
        let cache = &mut self.replicas[slot];
        cache.held += 1;
        let holes = cache.holes;
        if node.parent != NONE {
            let parent = &mut self.nodes[node.parent as usize];
            parent.held_children += 1;
            cache.holes += usize::from(!parent.held());
        }
        // Readers hear of a hole before it is there, and of its end after.
        if holes == 0 && cache.holes > 0 {
            self.holders.set_holes(slot, true);
        }
        let branches = self.holders.insert(node.key, slot);
        self.anchors.insert(node.key, node.depth, slot);
        let cache = &mut self.replicas[slot];
        let before = cache.holes;
        cache.holes -= node.held_children as usize;
        if before > 0 && cache.holes == 0 {
            self.holders.set_holes(slot, false);
        }
        if branches {
            self.set_branches(place);
        } else {
            self.nodes[place as usize].flags &= !BRANCHES;
        }
    }

    /// The block no longer counts as held.
    fn let_go(&mut self, place: u32) {
        let node = self.nodes[place as usize];
        let slot = node.slot as usize;
        let cache = &mut self.replicas[slot];
        cache.held -= 1;
        let before = cache.holes;
        cache.holes += node.held_children as usize;
        if before == 0 && cache.holes > 0 {
            self.holders.set_holes(slot, true);
        }
        self.anchors.remove(node.key, node.depth, slot);
        self.holders.remove(node.key, slot);
        let cache = &mut self.replicas[slot];
        let before = cache.holes;
        if node.parent != NONE {
            let parent = &mut self.nodes[node.parent as usize];
            parent.held_children -= 1;
            cache.holes -= usize::from(!parent.held());
        }
        if before > 0 && cache.holes == 0 {
            self.holders.set_holes(slot, false);
        }
    }

    fn drop_belief(&mut self, place: u32) {
        let node = &mut self.nodes[place as usize];
        if node.held() {
            node.hashes = 0;
            node.flags &= !EXPECTED;
            self.let_go(place);
        }
    }

    fn follow(&mut self, key: BlockKey, next: BlockKey) {
        if self.holders.follow(key, next) {
            let holders: Vec<usize> = self.holders.holders(key).collect();
            for slot in holders {
                if let Some(place) = self.find(slot, key) {
                    self.set_branches(place);
                }
            }
        }
    }

    // Engine hashes

    fn name(&mut self, slot: usize, place: u32, hash: EngineHash) {
        let node = &mut self.nodes[place as usize];
        if node.copies > 0 {
            self.aliases.insert((slot as u16, hash), Alias { place, copies: 1 });
            return;
        }
        (node.hash, node.copies) = (hash, 1);
        if hash.0 == node.key.0 {
            self.replicas[slot].hashes_are_keys = true;
            return;
        }
        let nodes = &self.nodes;
        self.by_hash.insert_unique(mix(slot, hash.0), place, |place| {
            let node = &nodes[*place as usize];
            mix(node.slot as usize, node.hash.0)
        });
    }

    /// Takes all names off a node.
    fn unname(&mut self, place: u32) {
        let node = &self.nodes[place as usize];
        if node.hashes > u16::from(node.copies > 0) {
            self.aliases.retain(|_, alias| alias.place != place);
        }
        self.unname_first(place);
    }

    fn unname_first(&mut self, place: u32) {
        let node = &mut self.nodes[place as usize];
        if node.copies == 0 {
            return;
        }
        node.copies = 0;
        if node.hash.0 != node.key.0 {
            let entry = self.by_hash.find_entry(mix(node.slot as usize, node.hash.0), |other| *other == place);
            entry.expect("a named node has its hash").remove();
        }
    }

    fn count_copy(&mut self, slot: usize, place: u32, hash: EngineHash) {
        match self.aliases.get_mut(&(slot as u16, hash)) {
            Some(alias) => alias.copies += 1,
            None => self.nodes[place as usize].copies += 1,
        }
    }

    /// Takes one copy off a name, and the name with the last. Tells whether copies are left.
    fn uncount_copy(&mut self, slot: usize, place: u32, hash: EngineHash) -> bool {
        if let Some(alias) = self.aliases.get_mut(&(slot as u16, hash)) {
            alias.copies -= 1;
            if alias.copies > 0 {
                return true;
            }
            self.aliases.remove(&(slot as u16, hash));
            return false;
        }
        let node = &mut self.nodes[place as usize];
        if node.copies > 1 {
            node.copies -= 1;
            return true;
        }
        self.unname_first(place);
        false
    }

    // Lists

    fn append(&mut self, place: u32) {
        let node = self.nodes[place as usize];
        let list = &mut self.replicas[node.slot as usize].lists[node.list()];
        let older = std::mem::replace(&mut list.youngest, place);
        if older == NONE {
            list.oldest = place;
        }
        if node.list() != KEPT && list.unexpired == NONE {
            list.unexpired = place;
            self.next_expiry = self.next_expiry.min(node.used.saturating_add(self.lifetime));
        }
        if older != NONE {
            self.nodes[older as usize].younger = place;
        }
        let node = &mut self.nodes[place as usize];
        (node.older, node.younger) = (older, NONE);
    }

    /// Links a node at the front of its list: the oldest.
    fn prepend(&mut self, place: u32) {
        let node = self.nodes[place as usize];
        let list = &mut self.replicas[node.slot as usize].lists[node.list()];
        let younger = std::mem::replace(&mut list.oldest, place);
        if younger == NONE {
            list.youngest = place;
        }
        if node.list() != KEPT {
            list.unexpired = place;
            self.next_expiry = self.next_expiry.min(node.used.saturating_add(self.lifetime));
        }
        if younger != NONE {
            self.nodes[younger as usize].older = place;
        }
        let node = &mut self.nodes[place as usize];
        (node.older, node.younger) = (NONE, younger);
    }

    /// Links a node just before another, in its list.
    fn link_before(&mut self, place: u32, next: u32) {
        let node = self.nodes[next as usize];
        if node.older == NONE {
            self.replicas[node.slot as usize].lists[node.list()].oldest = place;
        } else {
            self.nodes[node.older as usize].younger = place;
        }
        self.nodes[next as usize].older = place;
        let new = &mut self.nodes[place as usize];
        (new.older, new.younger) = (node.older, next);
    }

    /// Takes a node out of its list, if it is in one.
    fn unlink(&mut self, place: u32) {
        let node = self.nodes[place as usize];
        let list = &mut self.replicas[node.slot as usize].lists[node.list()];
        if list.unexpired == place {
            list.unexpired = node.younger;
        }
        if node.older != NONE {
            self.nodes[node.older as usize].younger = node.younger;
        } else if list.oldest == place {
            list.oldest = node.younger;
        }
        if node.younger != NONE {
            self.nodes[node.younger as usize].older = node.older;
        } else if list.youngest == place {
            list.youngest = node.older;
        }
        let node = &mut self.nodes[place as usize];
        (node.older, node.younger) = (NONE, NONE);
    }

    fn tick(&mut self, now: Time) -> u64 {
        self.stamp = stamp_of(now).max(self.stamp);
        self.stamp
    }
}

impl Cache {
    /// Blocks that take memory of the replica, as far as is known.
    pub(super) fn resident(&self) -> usize {
        self.resident
    }

    /// Of these, those that requests in flight keep.
    pub(super) fn pinned(&self) -> usize {
        self.pinned
    }

    /// Blocks that a request would find.
    pub(super) fn held(&self) -> usize {
        self.held
    }
}

#[derive(Debug, Clone, Copy)]
struct Touch {
    used: u64,
    now: u64,
    believe: bool,
    counts: bool,
    /// A request keeps the blocks from now on.
    keeps: bool,
}

/// Neighbours in a list.
#[derive(Debug, Clone, Copy)]
struct Run {
    oldest: u32,
    youngest: u32,
    list: usize,
    /// The list's first whose expectation may yet end is among them.
    unexpired: bool,
}

/// The front of a list, the least worth first.
#[derive(Debug)]
struct Head {
    value: f64,
    slot: usize,
    list: usize,
}

impl Ord for Head {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        other.value.total_cmp(&self.value).then((other.slot, other.list).cmp(&(self.slot, self.list)))
    }
}

impl PartialOrd for Head {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Head {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Head {}

pub(super) fn stamp_of(now: Time) -> u64 {
    STAMP_ORIGIN.saturating_add(now.0)
}

pub(super) fn idle(used: u64, now: u64) -> Duration {
    Duration::from_nanos(now.saturating_sub(used))
}

/// Keys are hashes already; the product makes all bits of a pair depend on the slot too.
fn mix(slot: usize, key: u64) -> u64 {
    let product = (key ^ (slot as u64).wrapping_mul(0xa076_1d64_78bd_642f)).wrapping_mul(0xe703_7ed1_a0b4_28db);
    product ^ product >> 32
}
