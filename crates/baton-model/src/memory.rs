use std::io;

use baton_engine::KvBytes;
use memmap2::MmapMut;
use xxhash_rust::xxh3::xxh3_64;

/// Zeroed memory straight from the system, on huge pages where it has them: weights and KV are read end to end every step, and
/// small pages cost a fifth of the bandwidth (13.6 against 16.7 GB/s on one core of a Xeon). Pages are taken when first touched, or by
/// [`touch`](Self::touch).
pub(crate) struct Memory {
    map: MmapMut,
    /// XXH3 of the bytes since they were [sealed](Self::seal), until they are written.
    checksum: Option<u64>,
}

impl Memory {
    pub(crate) fn zeroed(bytes: usize) -> io::Result<Self> {
        let map = MmapMut::map_anon(bytes.max(1))?;
        // A system without huge pages is slower, not wrong.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Self { map, checksum: None })
    }

    /// Takes all its pages now: the system clears each when it is first written to, which takes as long as a copy to it. Where the system
    /// cannot do it ahead that stays as it is.
    pub(crate) fn touch(&self) {
        #[cfg(target_os = "linux")]
        let _ = self.map.advise(memmap2::Advice::PopulateWrite);
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        self.checksum = None;
        &mut self.map
    }

    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    /// Nothing is to be written for now, and the bytes may still lie in the processor's cache: whoever sends them later need not read them for
    /// their checksum.
    pub(crate) fn seal(&mut self) {
        self.checksum = Some(xxh3_64(&self.map));
    }

    pub(crate) fn checksum(&self) -> Option<u64> {
        self.checksum
    }

    pub(crate) fn floats(&self) -> &[f32] {
        // SAFETY: a mapping starts on a page, which is aligned for f32; any bytes are an f32; the length is rounded down.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast(), self.map.len() / size_of::<f32>()) }
    }

    pub(crate) fn floats_mut(&mut self) -> &mut [f32] {
        self.checksum = None;
        // SAFETY: as in `floats`; the borrow of `self` is exclusive and any f32 is four bytes.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().cast(), self.map.len() / size_of::<f32>()) }
    }
}

/// # Panics
/// When the system has no memory.
impl Clone for Memory {
    fn clone(&self) -> Self {
        let mut copy = Self::zeroed(self.len()).expect("the system has memory for one more of what there is");
        copy.bytes_mut().copy_from_slice(self.bytes());
        copy
    }
}

impl KvBytes for Memory {
    fn bytes(&self) -> &[u8] {
        self.bytes()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes_mut()
    }

    fn checksum(&self) -> Option<u64> {
        self.checksum()
    }
}
