use std::{
    io,
    sync::{Arc, Mutex},
};

use baton_engine::KvBytes;

use crate::memory::Memory;

/// Spare memory that is kept, in bytes: what two copies on their way here have at a time.
const KEPT_BYTES: usize = 32 << 20;

/// Memory for KV blocks that is in no block, kept for who needs some next: new memory would have to be cleared by the system first.
pub(crate) struct Spares {
    block_bytes: usize,
    /// Of these at most.
    most: usize,
    kept: Mutex<Vec<Memory>>,
}

/// Memory for one block. It goes back to where it is from when it is dropped.
pub(crate) struct Spare {
    /// Until it is taken out.
    memory: Option<Memory>,
    from: Arc<Spares>,
}

impl Spares {
    /// Beside a cache of so many blocks.
    pub(crate) fn new(block_bytes: usize, blocks: usize) -> io::Result<Self> {
        let most = (KEPT_BYTES / block_bytes.max(1)).clamp(1, blocks.max(1));
        let kept = (0..most).map(|_| Memory::zeroed(block_bytes)).collect::<io::Result<_>>()?;
        Ok(Self { block_bytes, most, kept: Mutex::new(kept) })
    }

    /// Takes all their pages.
    pub(crate) fn touch(&self) {
        for memory in self.kept.lock().expect("no holder panics").iter() {
            memory.touch();
        }
    }

    /// One that was kept, or a new one.
    ///
    /// # Panics
    /// When the system has no memory.
    pub(crate) fn take(this: &Arc<Self>) -> Spare {
        let kept = this.kept.lock().expect("no holder panics").pop();
        let memory = kept.unwrap_or_else(|| Memory::zeroed(this.block_bytes).expect("the system has memory for one more block"));
        Self::hold(this, memory)
    }

    pub(crate) fn hold(this: &Arc<Self>, memory: Memory) -> Spare {
        Spare { memory: Some(memory), from: Arc::clone(this) }
    }
}

impl Spare {
    pub(crate) fn into_memory(mut self) -> Memory {
        self.memory.take().expect("it is taken out once")
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        let mut kept = self.from.kept.lock().expect("no holder panics");
        if kept.len() < self.from.most && memory.len() == self.from.block_bytes {
            kept.push(memory);
        }
    }
}

impl KvBytes for Spare {
    fn bytes(&self) -> &[u8] {
        self.memory.as_ref().map_or(&[], Memory::bytes)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.memory.as_mut().map_or(&mut [], Memory::bytes_mut)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_dropped_is_given_out_again_up_to_a_bound() {
        let spares = Arc::new(Spares::new(4096, 3).unwrap());
        let mut taken: Vec<Spare> = (0..5).map(|_| Spares::take(&spares)).collect();
        for (mark, spare) in (1..).zip(&mut taken) {
            spare.bytes_mut().fill(mark);
        }
        drop(taken);
        assert_eq!(spares.kept.lock().unwrap().len(), 3);
        let again: Vec<Spare> = (0..4).map(|_| Spares::take(&spares)).collect();
        let mut marks: Vec<u8> = again.iter().map(|spare| spare.bytes()[0]).collect();
        marks.sort_unstable();
        assert_eq!(marks, [0, 1, 2, 3]);
        assert!(again.iter().all(|spare| spare.bytes().len() == 4096));
    }

    #[test]
    fn memory_that_became_a_block_does_not_come_back() {
        let spares = Arc::new(Spares::new(64, 1).unwrap());
        let memory = Spares::take(&spares).into_memory();
        assert!(spares.kept.lock().unwrap().is_empty());
        assert_eq!(memory.len(), 64);
    }
}
