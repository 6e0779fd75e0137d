//! What the router knew of the engines' caches, in a file: a gateway that starts again goes on with it. The file holds keys of blocks,
//! which are hashes, and no text of prompts.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, SystemTime},
};

use baton_kv::Copying;
use baton_units::{Incarnation, ReplicaId};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::{engine::Engine, fleet::Fleet};

/// Between writes: what happened since the last one comes back by the engines' replay, if at all.
const EVERY: Duration = Duration::from_secs(10);
/// Begins the file. A line of JSON for each engine follows, each with its index's bytes after it, and a checksum of all.
const MAGIC: &[u8] = b"baton index snapshot 1\n";
const CHECKSUM: usize = 8;

/// What was known of one engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Former {
    pub(crate) life: Incarnation,
    /// The engine's own mark of that life.
    pub(crate) mark: u64,
    taken: SystemTime,
    /// As `Copying::take` gives it.
    pub(crate) index: Vec<u8>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Head {
    url: String,
    mark: u64,
    life: Incarnation,
    taken_unix_ms: u64,
    bytes: usize,
}

/// Why a file is not used.
#[derive(Debug, thiserror::Error)]
enum FileError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("it is no index snapshot of this version")]
    Foreign,
    #[error("it is cut short or damaged")]
    Damaged,
}

/// The file, and what of it the engines have not yet been compared with.
#[derive(Debug)]
pub(crate) struct SnapshotFile {
    path: PathBuf,
    /// By the engines' [whereabouts](Engine::whereabouts).
    former: Mutex<BTreeMap<String, Arc<Former>>>,
    /// The last write failed, so the next one that does is not told of.
    failing: AtomicBool,
}

impl SnapshotFile {
    /// Reads the file if there is one. One that is damaged, or not ours, is told of and counts as absent; the next write replaces it.
    pub(crate) fn open(path: PathBuf) -> Self {
        let former = match read(&path) {
            Ok(former) => former,
            Err(FileError::Io(error)) if error.kind() == io::ErrorKind::NotFound => BTreeMap::new(),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "the index snapshot is not used");
                BTreeMap::new()
            }
        };
        Self { path, former: Mutex::new(former), failing: AtomicBool::new(false) }
    }

    /// What was known of the engine when this gateway started, until it is [settled](Self::settle).
    pub(crate) fn former(&self, whereabouts: &str) -> Option<Arc<Former>> {
        self.lock().get(whereabouts).cloned()
    }

    /// The engine's former entries were taken in, or are of no use: from here on what the router knows is written.
    pub(crate) fn settle(&self, whereabouts: &str) {
        self.lock().remove(whereabouts);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Former>>> {
        self.former.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes what is known of all engines. Blocks; not to be called by a task.
    fn save(&self, fleet: &Fleet) {
        let mut parts = Vec::new();
        let engines = fleet.engines();
        let replicas: Vec<ReplicaId> = engines.iter().map(|engine| engine.id).collect();
        let (mut copying, taken) = (fleet.copy_index(&replicas), SystemTime::now());
        for engine in engines {
            let whereabouts = engine.whereabouts();
            // One that has not answered yet keeps what is known of it.
            if let Some(former) = self.former(&whereabouts).or_else(|| Former::of(&engine, &mut copying, taken).map(Arc::new)) {
                parts.push((whereabouts, former));
            }
        }
        match write(&self.path, &encode(&parts)) {
            Ok(()) => self.failing.store(false, Ordering::Relaxed),
            Err(error) if !self.failing.swap(true, Ordering::Relaxed) => {
                tracing::warn!(path = %self.path.display(), %error, "the index snapshot cannot be written");
            }
            Err(_) => {}
        }
    }
}

impl Former {
    /// Of an engine that tells its lives apart and has joined.
    fn of(engine: &Engine, copying: &mut Copying, taken: SystemTime) -> Option<Self> {
        let (life, mark) = {
            let facts = engine.facts();
            (facts.life, facts.mark.filter(|_| facts.spec.is_some())?)
        };
        Some(Self { life, mark, taken, index: copying.take(engine.id)? })
    }

    /// Time since it was written down, by this machine's clock; none where the clock was set back.
    pub(crate) fn age(&self) -> Duration {
        self.taken.elapsed().unwrap_or_default()
    }
}

/// Writes the snapshot again and again, if there is to be one.
pub(crate) async fn keep(fleet: Arc<Fleet>) {
    let mut ticks = tokio::time::interval(EVERY);
    // The first tick is now, when nothing is known yet.
    ticks.tick().await;
    loop {
        ticks.tick().await;
        save(fleet.clone()).await;
    }
}

/// Writes the snapshot, if there is to be one.
pub(crate) async fn save(fleet: Arc<Fleet>) {
    let saved = tokio::task::spawn_blocking(move || {
        if let Some(file) = &fleet.snapshot {
            file.save(&fleet);
        }
    });
    if let Err(error) = saved.await {
        tracing::error!(%error, "writing the index snapshot failed");
    }
}

/// A reader sees the former file or this one. After a crash of the machine it may be neither, which its checksum tells.
fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    file.write_all(bytes)?;
    drop(file);
    fs::rename(&temporary, path)
}

fn encode(parts: &[(String, Arc<Former>)]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    for (url, former) in parts {
        let taken = former.taken.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let head = Head {
            url: url.clone(),
            mark: former.mark,
            life: former.life,
            taken_unix_ms: u64::try_from(taken.as_millis()).unwrap_or(u64::MAX),
            bytes: former.index.len(),
        };
        serde_json::to_writer(&mut bytes, &head).expect("a head is plain data");
        bytes.push(b'\n');
        bytes.extend(&former.index);
    }
    bytes.extend(xxh3_64(&bytes).to_le_bytes());
    bytes
}

fn read(path: &Path) -> Result<BTreeMap<String, Arc<Former>>, FileError> {
    let mut file = fs::File::open(path)?;
    // What is not ours may be of any size.
    let mut bytes = Vec::new();
    (&mut file).take(MAGIC.len() as u64).read_to_end(&mut bytes)?;
    if bytes != MAGIC {
        return Err(FileError::Foreign);
    }
    file.read_to_end(&mut bytes)?;
    decode(&bytes)
}

fn decode(bytes: &[u8]) -> Result<BTreeMap<String, Arc<Former>>, FileError> {
    let (body, checksum) = bytes.split_last_chunk::<CHECKSUM>().ok_or(FileError::Damaged)?;
    if xxh3_64(body) != u64::from_le_bytes(*checksum) {
        return Err(FileError::Damaged);
    }
    let mut rest = body.strip_prefix(MAGIC).ok_or(FileError::Foreign)?;
    let mut former = BTreeMap::new();
    while !rest.is_empty() {
        let end = memchr::memchr(b'\n', rest).ok_or(FileError::Damaged)?;
        let head: Head = serde_json::from_slice(&rest[..end]).map_err(|_| FileError::Damaged)?;
        let (index, after) = rest[end + 1..].split_at_checked(head.bytes).ok_or(FileError::Damaged)?;
        let taken = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(head.taken_unix_ms)).ok_or(FileError::Damaged)?;
        former.insert(head.url, Arc::new(Former { life: head.life, mark: head.mark, taken, index: index.to_vec() }));
        rest = after;
    }
    Ok(former)
}

/// Reads what a file has that is ours and whole.
#[cfg(fuzzing)]
pub(crate) fn fuzz(body: &[u8]) {
    let mut file = [MAGIC, body].concat();
    file.extend(xxh3_64(&file).to_le_bytes());
    let _ = decode(&file);
}

#[cfg(test)]
mod tests;
