use crate::BlockId;

/// Blocks in order of last use, as a doubly linked list inside two arrays: every operation is O(1) and allocates nothing.
#[derive(Debug, Clone)]
pub(crate) struct LruList {
    /// Neighbours of each block; the last entry is the list's head and tail. A block outside the list points to itself.
    before: Vec<u32>,
    after: Vec<u32>,
    len: u32,
}

impl LruList {
    pub(crate) fn new(blocks: u32) -> Self {
        Self { before: (0..=blocks).collect(), after: (0..=blocks).collect(), len: 0 }
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// Adds a block that is not in the list as the most recently used.
    pub(crate) fn push(&mut self, block: BlockId) {
        debug_assert_eq!(self.after[block.index()], block.0, "the block is in the list");
        let ends = self.before.len() - 1;
        let last = self.before[ends];
        self.before[block.index()] = last;
        self.after[block.index()] = ends as u32;
        self.after[last as usize] = block.0;
        self.before[ends] = block.0;
        self.len += 1;
    }

    pub(crate) fn remove(&mut self, block: BlockId) {
        debug_assert_ne!(self.after[block.index()], block.0, "the block is not in the list");
        let (before, after) = (self.before[block.index()], self.after[block.index()]);
        self.after[before as usize] = after;
        self.before[after as usize] = before;
        (self.before[block.index()], self.after[block.index()]) = (block.0, block.0);
        self.len -= 1;
    }

    /// Takes the least recently used block.
    pub(crate) fn pop(&mut self) -> Option<BlockId> {
        let ends = self.after.len() - 1;
        let first = self.after[ends];
        (first as usize != ends).then(|| {
            self.remove(BlockId(first));
            BlockId(first)
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_list_is_a_queue_with_removal(operations in prop::collection::vec((0u32..8, any::<bool>()), 0..100)) {
            let (mut list, mut model) = (LruList::new(8), Vec::new());
            for (block, pop) in operations {
                match model.iter().position(|&other| other == BlockId(block)) {
                    _ if pop => {
                        let expected = (!model.is_empty()).then(|| model.remove(0));
                        prop_assert_eq!(list.pop(), expected);
                    }
                    Some(place) => {
                        model.remove(place);
                        list.remove(BlockId(block));
                    }
                    None => {
                        model.push(BlockId(block));
                        list.push(BlockId(block));
                    }
                }
                prop_assert_eq!(list.len() as usize, model.len());
            }
        }
    }
}
