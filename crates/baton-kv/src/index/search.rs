use std::sync::atomic::Ordering;

use super::{anchors::SPACING, holders::Holders};
use crate::BlockKey;

/// Look-ups that wait for memory together. A core keeps about so many loads in flight; more would only be more work.
const TOGETHER: usize = 16;

/// Leading blocks of `keys` that each replica holds, by slot, into `depths`.
///
/// While a replica holds the parent of every block that it holds, the sets along a chain only shrink, and equal sets at both ends of
/// an interval mean that nothing ends between them, so only intervals with different ends are parted further: first at the anchors,
/// then between two of them. Replicas with holes are followed block by block.
pub(super) fn matches(holders: &Holders, anchors: &Holders, keys: &[BlockKey], depths: &mut Vec<u32>) {
    match holders.words() {
        1 => match_words::<1>(holders, anchors, keys, depths),
        2 => match_words::<2>(holders, anchors, keys, depths),
        4 => match_words::<4>(holders, anchors, keys, depths),
        8 => match_words::<8>(holders, anchors, keys, depths),
        16 => match_words::<16>(holders, anchors, keys, depths),
        32 => match_words::<32>(holders, anchors, keys, depths),
        _ => match_words::<64>(holders, anchors, keys, depths),
    }
}

/// Where the depths of a match end and for which replicas, kept with it to see later whether it still holds.
#[derive(Debug, Default)]
pub struct MatchEnds {
    replicas: usize,
    /// The different depths, the largest first.
    depths: Vec<u32>,
    /// For each, the words of the set of replicas whose match ends there.
    sets: Vec<u64>,
}

impl MatchEnds {
    pub(super) fn find(&mut self, holders: &Holders, of: &[u32]) {
        self.replicas = of.len();
        self.depths.clear();
        self.depths.extend_from_slice(of);
        self.depths.sort_unstable_by(|a, b| b.cmp(a));
        self.depths.dedup();
        let words = holders.words();
        self.sets.clear();
        self.sets.resize(self.depths.len() * words, 0);
        let mut place = 0;
        for (slot, depth) in of.iter().enumerate() {
            if self.depths[place] != *depth {
                place = self.depths.binary_search_by(|other| depth.cmp(other)).expect("each depth is listed");
            }
            self.sets[place * words + slot / 64] |= 1 << (slot % 64);
        }
    }
}

/// Whether the depths with these `ends` are still those of [`matches`], but for replicas with holes, of which only the ends are looked
/// at: two blocks are looked up for each different depth.
pub(super) fn still_matches(holders: &Holders, keys: &[BlockKey], ends: &MatchEnds) -> bool {
    match holders.words() {
        1 => still_words::<1>(holders, keys, ends),
        2 => still_words::<2>(holders, keys, ends),
        4 => still_words::<4>(holders, keys, ends),
        8 => still_words::<8>(holders, keys, ends),
        16 => still_words::<16>(holders, keys, ends),
        32 => still_words::<32>(holders, keys, ends),
        _ => still_words::<64>(holders, keys, ends),
    }
}

fn match_words<const W: usize>(holders: &Holders, anchors: &Holders, keys: &[BlockKey], depths: &mut Vec<u32>) {
    depths.clear();
    depths.resize(holders.replicas(), 0);
    let [first, .., last] = keys else {
        if let [only] = keys {
            end(holders.get::<W>(*only), 1, depths);
        }
        return;
    };
    let at_first = holders.get::<W>(*first);
    let holes = holders.holes::<W>();
    let closed = minus(at_first, holes);
    if !is_empty(closed) {
        let at_last = both(closed, holders.get(*last));
        let whole = ((0, closed), (keys.len() - 1, at_last));
        let mut open = if anchors.words() == W && anchors.missing.load(Ordering::Acquire) == 0 {
            between_anchors(anchors, keys, whole)
        } else {
            vec![whole]
        };
        narrow(holders, |place| keys[place], &mut open, |low, high| end(minus(low.1, high.1), high.0, depths));
        end(at_last, keys.len(), depths);
    }
    let mut left = both(at_first, holes);
    for (place, key) in keys.iter().enumerate().skip(1) {
        if is_empty(left) {
            return;
        }
        let still = both(left, holders.get(*key));
        end(minus(left, still), place, depths);
        left = still;
    }
    end(left, keys.len(), depths);
}

/// Intervals between neighbouring anchors in which depths end, for an interval from the first key to the last.
fn between_anchors<const W: usize>(anchors: &Holders, keys: &[BlockKey], (first, last): Interval<W>) -> Vec<Interval<W>> {
    // Counts the first key, each anchor after it, and the last key.
    let last_place = (keys.len() - 1) / SPACING + 1;
    let place_of = |anchor: usize| match anchor {
        0 => 0,
        _ if anchor == last_place => last.0,
        _ => anchor * SPACING - 1,
    };
    let mut open = Vec::with_capacity(TOGETHER);
    open.push(((0, first.1), (last_place, last.1)));
    let mut found = Vec::with_capacity(TOGETHER);
    let in_keys = |end: End<W>| (place_of(end.0), end.1);
    narrow(anchors, |anchor| keys[place_of(anchor)], &mut open, |low, high| found.push((in_keys(low), in_keys(high))));
    found
}

/// Tells `found` each pair of neighbouring places within the `open` intervals whose sets differ.
///
/// All intervals are parted in turn, so that the look-ups of a round wait for memory together: few intervals each at several places,
/// since a round takes as long as one look-up, and many in halves, which takes the fewest look-ups.
fn narrow<const W: usize>(
    table: &Holders,
    key_at: impl Fn(usize) -> BlockKey,
    open: &mut Vec<Interval<W>>,
    mut found: impl FnMut(End<W>, End<W>),
) {
    let mut parts = Vec::with_capacity(TOGETHER);
    let mut keep = |low: End<W>, high: End<W>, parts: &mut Vec<Interval<W>>| match low.1 == high.1 {
        true => {}
        false if low.0 + 1 == high.0 => found(low, high),
        false => parts.push((low, high)),
    };
    for (low, high) in open.drain(..) {
        keep(low, high, &mut parts);
    }
    std::mem::swap(open, &mut parts);
    while !open.is_empty() {
        let cuts = (TOGETHER / open.len()).max(1);
        for intervals in open.chunks(TOGETHER) {
            table.warm(intervals.iter().flat_map(|(low, high)| places(low.0, high.0, cuts)).map(&key_at));
            for &(low, high) in intervals {
                let mut before = low;
                for place in places(low.0, high.0, cuts) {
                    // Cut to what holds at both sides, should the writer be at work between the look-ups.
                    let at = (place, both(before.1, table.get(key_at(place))));
                    keep(before, at, &mut parts);
                    before = at;
                }
                keep(before, (high.0, both(before.1, high.1)), &mut parts);
            }
        }
        open.clear();
        std::mem::swap(open, &mut parts);
    }
}

/// At most so many places between `low` and `high`, at even distances.
fn places(low: usize, high: usize, cuts: usize) -> impl Iterator<Item = usize> {
    let cuts = cuts.min(high - low - 1);
    (1..=cuts).map(move |cut| low + (high - low) * cut / (cuts + 1))
}

/// A place in the chain and who holds its block.
type End<const W: usize> = (usize, [u64; W]);
type Interval<const W: usize> = (End<W>, End<W>);

fn still_words<const W: usize>(holders: &Holders, keys: &[BlockKey], ends: &MatchEnds) -> bool {
    if ends.replicas != holders.replicas() || ends.sets.len() != ends.depths.len() * W {
        return false;
    }
    let mut reach = [0; W];
    ends.depths.iter().zip(ends.sets.chunks_exact(W)).all(|(&depth, set)| {
        let end_here: [u64; W] = std::array::from_fn(|word| set[word]);
        reach = std::array::from_fn(|word| reach[word] | end_here[word]);
        let depth = depth as usize;
        let reached = depth == 0 || keys.get(depth - 1).is_some_and(|key| is_empty(minus(reach, holders.get(*key))));
        reached && keys.get(depth).is_none_or(|key| is_empty(both(end_here, holders.get(*key))))
    })
}

fn end<const W: usize>(set: [u64; W], depth: usize, depths: &mut [u32]) {
    for (word, mut left) in set.into_iter().enumerate() {
        while left != 0 {
            let slot = word * 64 + left.trailing_zeros() as usize;
            // A replica that joined since the depths were sized has none.
            if let Some(of_slot) = depths.get_mut(slot) {
                *of_slot = depth as u32;
            }
            left &= left - 1;
        }
    }
}

fn both<const W: usize>(a: [u64; W], b: [u64; W]) -> [u64; W] {
    std::array::from_fn(|word| a[word] & b[word])
}

fn minus<const W: usize>(a: [u64; W], b: [u64; W]) -> [u64; W] {
    std::array::from_fn(|word| a[word] & !b[word])
}

fn is_empty<const W: usize>(set: [u64; W]) -> bool {
    set == [0; W]
}
