use crate::BlockKey;

use super::holders::Holders;

/// Leading blocks of `keys` that each replica holds, by slot, into `depths`.
///
/// While a replica holds the parent of every block that it holds, the sets along a chain only shrink, and equal sets at both ends of
/// an interval mean that nothing ends between them: a bisection looks up `log2(keys)` blocks for each different depth. Replicas with
/// holes are followed block by block.
pub(super) fn matches(holders: &Holders, keys: &[BlockKey], depths: &mut Vec<u32>) {
    match holders.words() {
        1 => match_words::<1>(holders, keys, depths),
        2 => match_words::<2>(holders, keys, depths),
        4 => match_words::<4>(holders, keys, depths),
        8 => match_words::<8>(holders, keys, depths),
        16 => match_words::<16>(holders, keys, depths),
        32 => match_words::<32>(holders, keys, depths),
        _ => match_words::<64>(holders, keys, depths),
    }
}

/// Whether `depths` are still those of [`matches`], but for replicas with holes, of which only the ends are looked at: two blocks
/// are looked up for each different depth.
pub(super) fn still_matches(holders: &Holders, keys: &[BlockKey], depths: &[u32]) -> bool {
    match holders.words() {
        1 => still_words::<1>(holders, keys, depths),
        2 => still_words::<2>(holders, keys, depths),
        4 => still_words::<4>(holders, keys, depths),
        8 => still_words::<8>(holders, keys, depths),
        16 => still_words::<16>(holders, keys, depths),
        32 => still_words::<32>(holders, keys, depths),
        _ => still_words::<64>(holders, keys, depths),
    }
}

fn match_words<const W: usize>(holders: &Holders, keys: &[BlockKey], depths: &mut Vec<u32>) {
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
        bisect(holders, keys, (0, closed), (keys.len() - 1, at_last), depths);
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

/// Finds the depths that end between two places whose sets are known.
///
/// All intervals are halved in turn, so that the look-ups of a round wait for memory together.
fn bisect<const W: usize>(holders: &Holders, keys: &[BlockKey], low: End<W>, high: End<W>, depths: &mut [u32]) {
    let mut open = Vec::new();
    split(low, high, &mut open, depths);
    let (mut sets, mut halves) = (Vec::new(), Vec::new());
    while !open.is_empty() {
        sets.extend(open.iter().map(|(low, high): &(End<W>, End<W>)| holders.get::<W>(keys[usize::midpoint(low.0, high.0)])));
        for ((low, high), set) in open.drain(..).zip(sets.drain(..)) {
            // Cut to what holds at both sides, should the writer be at work between the look-ups.
            let middle = (usize::midpoint(low.0, high.0), both(low.1, set));
            split(low, middle, &mut halves, depths);
            split(middle, (high.0, both(middle.1, high.1)), &mut halves, depths);
        }
        std::mem::swap(&mut open, &mut halves);
    }
}

/// A place in the chain and who holds its block.
type End<const W: usize> = (usize, [u64; W]);

/// Keeps an interval in which depths end, or tells them if they can end at one place only.
fn split<const W: usize>(low: End<W>, high: End<W>, open: &mut Vec<(End<W>, End<W>)>, depths: &mut [u32]) {
    if low.1 == high.1 {
        return;
    }
    if low.0 + 1 == high.0 {
        end(minus(low.1, high.1), high.0, depths);
    } else {
        open.push((low, high));
    }
}

fn still_words<const W: usize>(holders: &Holders, keys: &[BlockKey], depths: &[u32]) -> bool {
    if depths.len() != holders.replicas() {
        return false;
    }
    let mut checked: [u32; 8] = [u32::MAX; 8];
    let mut distinct = 0;
    depths.iter().all(|&depth| {
        if checked.contains(&depth) {
            return true;
        }
        checked[distinct % checked.len()] = depth;
        distinct += 1;
        let (mut reach, mut pass) = ([0; W], [0; W]);
        for (slot, &other) in depths.iter().enumerate() {
            reach[slot / 64] |= u64::from(other >= depth) << (slot % 64);
            pass[slot / 64] |= u64::from(other > depth) << (slot % 64);
        }
        let ends_here = minus(reach, pass);
        let depth = depth as usize;
        let reached = depth == 0 || keys.get(depth - 1).is_some_and(|key| is_empty(minus(reach, holders.get(*key))));
        reached && keys.get(depth).is_none_or(|key| is_empty(both(ends_here, holders.get(*key))))
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
