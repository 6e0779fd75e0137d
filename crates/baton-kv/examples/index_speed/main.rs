//! Speed and memory of the fleet index, or of plain hash maps in its place, in this process alone; `bench/index` runs both and
//! prints the table. `index_speed structure=index|maps part=apply|match [replicas=64] [blocks=10000000]` prints one `name value` a line.
#![allow(clippy::print_stdout, clippy::disallowed_methods, reason = "a program that measures")]

mod maps;
mod others;

use std::{
    collections::BTreeMap,
    hint::black_box,
    time::{Duration, Instant},
};

use baton_kv::{BlockKey, EngineHash, FleetIndex, KeyDomain, KvEvent, KvEventBatch, chain_keys};
use baton_units::{BlockSize, Bytes, Incarnation, ReplicaId, Time};

use maps::Maps;
use others::{Locked, Papaya};

/// Blocks of one chain of the bulk: 8,000 tokens.
const CHAIN: u64 = 500;
/// Keys of a 100,000-token prompt.
const PROMPT: usize = 6250;
/// Prompts that are matched, of each kind, and matches of each kind.
const PROMPTS: u64 = 8;
const MATCHES: usize = 2000;
/// Keys probed between two matches, so that the caches of the processor are those of a busy router.
const PROBES_BETWEEN: usize = 10_000;

const DOMAIN: KeyDomain<'static> = KeyDomain { model: "m", adapter: None, salt: None };

/// What is measured of a structure.
trait Subject {
    fn apply(&mut self, replica: ReplicaId, batch: &KvEventBatch, now: Time);
    fn holds(&self, replica: ReplicaId, key: BlockKey) -> bool;
    fn matches_into(&self, keys: &[BlockKey], depths: &mut Vec<u32>);
    /// A request with this prompt is sent and ends.
    fn book(&mut self, replica: ReplicaId, keys: &[BlockKey], now: Time);
    /// Matches for another thread.
    fn reader(&self) -> impl FnMut(&[BlockKey], &mut Vec<u32>) + Send + 'static;
}

impl Subject for FleetIndex {
    fn apply(&mut self, replica: ReplicaId, batch: &KvEventBatch, now: Time) {
        let applied = self.apply(replica, Incarnation(1), batch, now);
        assert_eq!(applied, baton_kv::Applied::Ok, "batches come in order");
    }

    fn holds(&self, replica: ReplicaId, key: BlockKey) -> bool {
        self.holds(replica, key)
    }

    fn matches_into(&self, keys: &[BlockKey], depths: &mut Vec<u32>) {
        self.matches_into(keys, depths);
    }

    fn book(&mut self, replica: ReplicaId, keys: &[BlockKey], now: Time) {
        self.pin(replica, keys, now, |_| {});
        self.unpin(replica, keys, keys, true, now);
    }

    fn reader(&self) -> impl FnMut(&[BlockKey], &mut Vec<u32>) + Send + 'static {
        let reader = self.reader();
        move |keys, depths| reader.matches_into(keys, depths)
    }
}

fn main() {
    let given: BTreeMap<String, String> = std::env::args()
        .skip(1)
        .filter_map(|argument| argument.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned())))
        .collect();
    let number = |name: &str, default: u64| given.get(name).map_or(default, |text| text.parse().expect("a number"));
    let (replicas, blocks) = (number("replicas", 64), number("blocks", 10_000_000));
    let part = given.get("part").map_or("apply", String::as_str);
    match given.get("structure").map_or("index", String::as_str) {
        "index" => run(FleetIndex::new("m", Duration::from_mins(2), Bytes(4 << 30)), part, replicas, blocks),
        "maps" => run(Maps::default(), part, replicas, blocks),
        "papaya" => run(Papaya::default(), part, replicas, blocks),
        "locked" => run(Locked::default(), part, replicas, blocks),
        other => panic!("no structure is called {other}"),
    }
}

fn run(subject: impl Subject, part: &str, replicas: u64, blocks: u64) {
    let mut bench = Bench { subject, replicas, sequences: vec![0; replicas as usize], moment: 0 };
    let keys = bench.fill(blocks);
    match part {
        "apply" => bench.apply_and_probe(blocks, &keys),
        "match" => {
            bench.match_prompts("4_depths", 4, &keys);
            bench.match_prompts("64_depths", 64, &keys);
            bench.book_prompts(&keys);
        }
        "readers" => bench.match_while_writing(),
        other => panic!("no part is called {other}"),
    }
}

struct Bench<S> {
    subject: S,
    replicas: u64,
    sequences: Vec<u64>,
    moment: u64,
}

impl<S: Subject> Bench<S> {
    /// Fills the structure with chains, each on one replica. Returns (replica, key) pairs to probe, in random order.
    fn fill(&mut self, blocks: u64) -> Vec<(ReplicaId, BlockKey)> {
        let before = resident_bytes();
        let (mut took, mut longest) = (Duration::ZERO, Duration::ZERO);
        let chains = blocks / CHAIN;
        let mut probes = Vec::new();
        for chain in 0..chains {
            let tokens = tokens(chain, CHAIN as usize);
            let keys = chain_keys(DOMAIN.root(), &tokens, BlockSize::DEFAULT);
            if chain % chains.div_ceil(2000) == 0 {
                probes.extend(keys.iter().map(|key| (self.home(chain), *key)));
            }
            let batch = self.publish(self.home(chain), stored(&keys, tokens));
            (took, longest) = (took + batch, longest.max(batch));
        }
        println!("fill_ns_per_block {:.0}", took.as_secs_f64() * 1e9 / blocks as f64);
        println!("longest_ms {:.1}", longest.as_secs_f64() * 1e3);
        println!("bytes_per_block {:.0}", (resident_bytes() - before) as f64 / blocks as f64);
        fastrand::Rng::with_seed(1).shuffle(&mut probes);
        probes
    }

    fn apply_and_probe(&mut self, blocks: u64, probes: &[(ReplicaId, BlockKey)]) {
        let chains = blocks / CHAIN;
        let (mut stores, mut removals) = (Vec::new(), Vec::new());
        for round in 0..2000.min(chains) {
            let old = (round * 7919) % chains;
            let keys = chain_keys(DOMAIN.root(), &tokens(old, CHAIN as usize), BlockSize::DEFAULT);
            let removed = KvEvent::Removed { hashes: keys.iter().rev().map(|key| hash(*key)).collect() };
            removals.push(self.publish(self.home(old), removed));
            let tokens = tokens(1 << 40 | round, CHAIN as usize);
            let keys = chain_keys(DOMAIN.root(), &tokens, BlockSize::DEFAULT);
            stores.push(self.publish(self.home(old), stored(&keys, tokens)));
        }
        let per_block = |took: &mut Vec<Duration>| percentile_us(took, 0.5) * 1e3 / CHAIN as f64;
        println!("store_ns {:.0}", per_block(&mut stores));
        println!("remove_ns {:.0}", per_block(&mut removals));
        let mut rounds: Vec<Duration> = (0..9).map(|_| self.probe(probes)).collect();
        println!("probe_ns {:.0}", percentile_us(&mut rounds, 0.5) * 1e3 / probes.len() as f64);
    }

    fn match_prompts(&mut self, name: &str, depths: u64, probes: &[(ReplicaId, BlockKey)]) {
        let prompts: Vec<Vec<BlockKey>> = (0..PROMPTS).map(|prompt| self.store_prompt(1 << 32 | depths << 16 | prompt, depths)).collect();
        let mut found = Vec::new();
        let mut took: Vec<Duration> = (0..MATCHES)
            .map(|turn| {
                let from = turn * PROBES_BETWEEN % probes.len().saturating_sub(PROBES_BETWEEN).max(1);
                // Again where others took the core away meanwhile: that is their time.
                loop {
                    self.probe(&probes[from..][..PROBES_BETWEEN.min(probes.len())]);
                    // A router has just computed the keys that it matches.
                    let keys = prompts[turn % prompts.len()].clone();
                    let before = switches();
                    let start = Instant::now();
                    self.subject.matches_into(black_box(&keys), &mut found);
                    let took = start.elapsed();
                    if switches() == before {
                        return took;
                    }
                }
            })
            .collect();
        let expected: std::collections::BTreeSet<u32> = found.iter().copied().collect();
        assert_eq!(expected.len() as u64, depths.min(self.replicas), "{expected:?}");
        println!("match_{name}_p50_us {:.1}", percentile_us(&mut took, 0.5));
        println!("match_{name}_p99_us {:.1}", percentile_us(&mut took, 0.99));
    }

    /// Matches in another thread while this one takes events in without a pause.
    fn match_while_writing(&mut self) {
        let prompt = self.store_prompt(1 << 34, 4);
        let mut reader = self.subject.reader();
        let (done, (mut took, wrong)) = std::thread::scope(|scope| {
            let matching = scope.spawn(move || {
                let (mut depths, mut wrong) = (Vec::new(), 0);
                let matching = |_| {
                    let start = Instant::now();
                    reader(&prompt, &mut depths);
                    let took = start.elapsed();
                    wrong += usize::from(depths.contains(&0));
                    std::thread::sleep(Duration::from_micros(200));
                    took
                };
                ((0..MATCHES).map(matching).collect::<Vec<Duration>>(), wrong)
            });
            let mut done = 0;
            while !matching.is_finished() {
                let tokens = tokens(1 << 40 | done, CHAIN as usize);
                let keys = chain_keys(DOMAIN.root(), &tokens, BlockSize::DEFAULT);
                self.publish(self.home(done), stored(&keys, tokens));
                self.publish(self.home(done), KvEvent::Removed { hashes: keys.iter().rev().map(|key| hash(*key)).collect() });
                done += 1;
            }
            (done, matching.join().expect("the reader ends"))
        });
        assert_eq!(wrong, 0, "of {} matches while {done} chains came and went", took.len());
        println!("read_p50_us {:.1}", percentile_us(&mut took, 0.5));
        println!("read_p99_us {:.1}", percentile_us(&mut took, 0.99));
    }

    /// A prompt that every replica holds a part of, with so many different lengths of the part.
    fn store_prompt(&mut self, text: u64, depths: u64) -> Vec<BlockKey> {
        let tokens = tokens(text, PROMPT);
        let keys = chain_keys(DOMAIN.root(), &tokens, BlockSize::DEFAULT);
        for replica in 0..self.replicas {
            // Not at powers of two, which a bisection would find first.
            let held = (replica % depths + 1) * PROMPT as u64 / depths - replica % depths % 7;
            let tokens = tokens[..held as usize * 16].to_vec();
            self.publish(ReplicaId(replica as u32), stored(&keys[..held as usize], tokens));
        }
        keys
    }

    fn book_prompts(&mut self, probes: &[(ReplicaId, BlockKey)]) {
        let prompts: Vec<Vec<BlockKey>> =
            (0..PROMPTS).map(|prompt| chain_keys(DOMAIN.root(), &tokens(1 << 33 | prompt, PROMPT), BlockSize::DEFAULT)).collect();
        for name in ["new", "held"] {
            let mut took: Vec<Duration> = (0..if name == "new" { prompts.len() } else { 200 })
                .map(|turn| {
                    self.probe(&probes[..PROBES_BETWEEN.min(probes.len())]);
                    self.moment += 1;
                    let start = Instant::now();
                    let (keys, now) = (&prompts[turn % prompts.len()], Time(self.moment * 1_000_000));
                    self.subject.book(ReplicaId(0), black_box(keys), now);
                    start.elapsed()
                })
                .collect();
            println!("book_{name}_p50_us {:.0}", percentile_us(&mut took, 0.5));
        }
    }

    fn probe(&self, probes: &[(ReplicaId, BlockKey)]) -> Duration {
        let start = Instant::now();
        let held = probes.iter().filter(|(replica, key)| self.subject.holds(*replica, *key)).count();
        let took = start.elapsed();
        assert!(black_box(held) <= probes.len());
        took
    }

    fn publish(&mut self, replica: ReplicaId, event: KvEvent) -> Duration {
        let sequence = &mut self.sequences[replica.index()];
        let batch = KvEventBatch { sequence: *sequence, timestamp_s: *sequence as f64, events: vec![event], dp_rank: None };
        *sequence += 1;
        self.moment += 1;
        let now = Time(self.moment * 1_000);
        let start = Instant::now();
        self.subject.apply(replica, black_box(&batch), now);
        start.elapsed()
    }

    fn home(&self, chain: u64) -> ReplicaId {
        ReplicaId((chain % self.replicas) as u32)
    }
}

/// Tokens of so many blocks, different for each text.
fn tokens(text: u64, blocks: usize) -> Vec<u32> {
    let mut state = text.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..blocks * BlockSize::DEFAULT.get() as usize)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 47) as u32
        })
        .collect()
}

/// Another name than the key, as engines with their own hashes give.
fn hash(key: BlockKey) -> EngineHash {
    EngineHash(key.0.rotate_left(7))
}

fn stored(keys: &[BlockKey], tokens: Vec<u32>) -> KvEvent {
    KvEvent::Stored {
        hashes: keys.iter().map(|key| hash(*key)).collect(),
        parent: None,
        tokens,
        block_size: BlockSize::DEFAULT,
        adapter: None,
        salt: None,
    }
}

fn percentile_us(took: &mut [Duration], share: f64) -> f64 {
    took.sort_unstable();
    took[((took.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e6
}

/// Memory of this process.
fn resident_bytes() -> u64 {
    status("VmRSS:") * 1024
}

/// How often the core was taken away from this process, which has one thread.
fn switches() -> u64 {
    status("nonvoluntary_ctxt_switches:")
}

/// A line of what Linux tells of this process.
fn status(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux tells it");
    let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("it has this line");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}
