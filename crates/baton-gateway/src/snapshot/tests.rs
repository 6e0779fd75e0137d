use std::os::unix::fs::PermissionsExt;

use baton_kv::{EngineHash, KvEvent, KvEventBatch};
use baton_policy::{Discipline, ReplicaSpec};
use baton_units::{BlockSize, Blocks, Time, Tokens};

use super::*;
use crate::config::{EngineConfig, EngineKind, FrontConfig, PolicyConfig};

/// A folder of this test, gone with it.
struct Folder(PathBuf);

impl Folder {
    fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("baton-{test}-{}-{:x}", std::process::id(), fastrand::u64(..)));
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn file(&self) -> PathBuf {
        self.0.join("index")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left is in the system's temporary folder.
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn parts() -> Vec<(String, Arc<Former>)> {
    let taken = SystemTime::UNIX_EPOCH + Duration::from_millis(1_700_000_000_123);
    let part = |life, mark, index: &[u8]| Arc::new(Former { life: Incarnation(life), mark, taken, index: index.to_vec() });
    vec![("http://a:1".into(), part(3, u64::MAX, b"\n{}\n")), ("http://b:2".into(), part(1, 0, b""))]
}

#[test]
fn a_file_comes_back_whole_and_only_its_owner_reads_it() {
    let folder = Folder::new("snapshot-whole");
    write(&folder.file(), &encode(&[])).unwrap();
    fs::write(folder.0.join("index.new"), "left by a gateway that was killed").unwrap();
    write(&folder.file(), &encode(&parts())).unwrap();
    assert_eq!(read(&folder.file()).unwrap(), parts().into_iter().collect());
    assert_eq!(fs::metadata(folder.file()).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 1, "nothing else is left");
}

#[test]
fn what_is_damaged_or_foreign_is_refused() {
    let whole = encode(&parts());
    for place in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[place] ^= 1;
        assert!(matches!(decode(&bytes), Err(FileError::Damaged)), "byte {place}");
        assert!(decode(&whole[..place]).is_err(), "{place} bytes");
    }
    let folder = Folder::new("snapshot-foreign");
    fs::write(folder.file(), "[gateway]\nbind = \"127.0.0.1:8080\"\n").unwrap();
    assert!(matches!(read(&folder.file()), Err(FileError::Foreign)));
    assert_eq!(fleet(&folder).0.snapshot.as_ref().unwrap().lock().len(), 0, "and counts as absent");
}

fn fleet(folder: &Folder) -> (Arc<Fleet>, Arc<Engine>) {
    let policy = PolicyConfig { index_snapshot: Some(folder.file()), ..PolicyConfig::default() };
    let fleet = Arc::new(Fleet::new(FrontConfig::default(), &policy));
    let engines = fleet.set_engines(vec![EngineConfig::new("http://127.0.0.1:9000".parse().unwrap(), EngineKind::Baton)]).fresh;
    (fleet, engines[0].clone())
}

fn spec(life: u64) -> ReplicaSpec {
    ReplicaSpec {
        id: ReplicaId(0),
        incarnation: Incarnation(life),
        block_size: BlockSize::new(2).unwrap(),
        kv_blocks: Blocks(100),
        max_model_len: Tokens(1000),
        max_running: 8,
        discipline: Discipline::Chunked { budget: Tokens(64) },
        step: baton_cost::StepCoefficients { fixed_s: 0.0, per_token_s: 1e-5, per_attended_s: 0.0, per_kv_token_s: 0.0, weights_s: 0.0 },
    }
}

fn batch(sequence: u64) -> KvEventBatch {
    let tokens: Vec<u32> = (0..8).map(|token| token + 100 * sequence as u32).collect();
    let hashes = (0..4).map(|place| EngineHash(10 * sequence + place)).collect();
    let event = KvEvent::Stored { hashes, parent: None, tokens, block_size: BlockSize::new(2).unwrap(), adapter: None, salt: None };
    KvEventBatch { sequence, timestamp_s: sequence as f64, events: vec![event], dp_rank: None }
}

/// A gateway's life in which its engine, in the life `mark`, tells of two batches.
fn first_life(folder: &Folder, mark: Option<u64>) {
    let (fleet, engine) = fleet(folder);
    {
        let mut facts = engine.facts();
        (facts.life, facts.mark, facts.spec) = (Incarnation(5), mark, Some(spec(5)));
    }
    fleet.engine_ready(spec(5), None);
    for sequence in 0..2 {
        fleet.with_router(|router, now| router.kv_events(ReplicaId(0), Incarnation(5), &batch(sequence), now));
    }
    fleet.snapshot.as_ref().unwrap().save(&fleet);
}

fn held(fleet: &Fleet) -> usize {
    fleet.peek_router(|router, _| router.index().blocks_held(ReplicaId(0)))
}

#[test]
fn entries_come_back_and_are_written_again_before_their_engine_answers() {
    let folder = Folder::new("snapshot-entries");
    first_life(&folder, Some(42));
    // A gateway that never saw the engine.
    let (unseen, _) = fleet(&folder);
    unseen.snapshot.as_ref().unwrap().save(&unseen);

    let (fleet, engine) = fleet(&folder);
    let file = fleet.snapshot.as_ref().unwrap();
    let former = file.former(&engine.whereabouts()).unwrap();
    assert_eq!((former.life, former.mark), (Incarnation(5), 42));
    fleet.engine_ready(spec(5), Some(&former));
    file.settle(&engine.whereabouts());
    fleet.with_router(|router, now| router.take_in(ReplicaId(0), usize::MAX, now));
    assert_eq!(held(&fleet), 8);
    fleet.peek_router(|router, _| assert!(router.index().doubtful(ReplicaId(0)) && router.index().next_sequence(ReplicaId(0)) == 2));
    // The last batch, repeated, proves that the stream is the same.
    fleet.with_router(|router, now| router.kv_events(ReplicaId(0), Incarnation(5), &batch(1), now));
    fleet.peek_router(|router, _: Time| assert!(!router.index().doubtful(ReplicaId(0))));
}

#[test]
fn an_engine_without_a_mark_is_not_written_down() {
    let folder = Folder::new("snapshot-unmarked");
    first_life(&folder, None);
    assert!(read(&folder.file()).unwrap().is_empty());
}
