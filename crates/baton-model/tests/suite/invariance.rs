//! Bitwise batch invariance: logits of a sequence depend on its tokens alone.

use baton_engine::Executor;
use baton_gguf::TensorKind;
use baton_kv::BlockId;
use baton_model::{CpuConfig, CpuExecutor};
use fastrand::Rng;
use proptest::prelude::*;

use crate::support::{Sequence, batch, config, free_blocks, greedy, kernel_paths};
use crate::tiny::{Family, Folder, Tiny, VOCAB};

/// Blocks of preempted sequences are not used again, as others may share them.
const BLOCKS: u32 = 600;
/// Preemptions, prefix hits and copies in one run at most.
const DISTURBANCES: usize = 16;

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// Logits after the last token of one sequence, alone in an executor and in one step.
fn alone(executor: &mut CpuExecutor, tokens: &[u32], block_size: usize) -> Vec<u32> {
    let params = greedy();
    let mut sequence = Sequence::new(tokens);
    sequence.reserve(tokens.len(), block_size, &mut free_blocks(BLOCKS));
    bits(&executor.logits(&batch(vec![sequence.row(tokens.len(), &params)]))[0])
}

/// Runs all sequences to their ends in random steps of random rows, with prefix hits, preemptions and copies of blocks; gives
/// the bits of the logits after each one's last token.
fn together(executor: &mut CpuExecutor, prompts: &[Vec<u32>], block_size: usize, rng: &mut Rng) -> Vec<Vec<u32>> {
    let params = greedy();
    let mut free = free_blocks(BLOCKS);
    rng.shuffle(&mut free);
    let mut sequences: Vec<Sequence> = prompts.iter().map(|prompt| Sequence::new(prompt)).collect();
    let mut results = vec![Vec::new(); prompts.len()];
    let mut disturbances = 0;
    while results.iter().any(Vec::is_empty) {
        if disturbances < DISTURBANCES {
            disturb(executor, &mut sequences, block_size, &mut free, rng);
            disturbances += 1;
        }
        let mut order: Vec<usize> = (0..prompts.len()).filter(|&index| results[index].is_empty() && rng.u32(..4) > 0).collect();
        rng.shuffle(&mut order);
        let mut counts = vec![0; prompts.len()];
        for &index in &order {
            let left = sequences[index].tokens.len() - sequences[index].computed;
            counts[index] = if rng.bool() { rng.usize(1..=left) } else { 1 };
            let end = sequences[index].computed + counts[index];
            sequences[index].reserve(end, block_size, &mut free);
        }
        let rows = order.iter().map(|&index| sequences[index].row(counts[index], &params)).collect();
        let mut logits = executor.logits(&batch(rows)).into_iter();
        for &index in &order {
            sequences[index].computed += counts[index];
            if sequences[index].computed == sequences[index].tokens.len() {
                results[index] = bits(&logits.next().expect("the row sampled"));
            }
        }
    }
    results
}

/// Sometimes preempts a sequence, lets it reuse the full blocks of another's equal prefix, or moves it to copies of its blocks.
fn disturb(executor: &mut CpuExecutor, sequences: &mut [Sequence], block_size: usize, free: &mut Vec<BlockId>, rng: &mut Rng) {
    let (index, other) = (rng.usize(..sequences.len()), rng.usize(..sequences.len()));
    if sequences[index].computed == sequences[index].tokens.len() {
        return;
    }
    match rng.u32(..4) {
        0 => (sequences[index].computed, sequences[index].blocks) = (0, Vec::new()),
        1 if index != other => {
            let equal = sequences[index].tokens.iter().zip(&sequences[other].tokens).take_while(|(a, b)| a == b).count();
            let usable = equal.min(sequences[other].computed).min(sequences[index].tokens.len() - 1);
            let hit = usable / block_size;
            sequences[index].blocks = sequences[other].blocks[..hit].to_vec();
            sequences[index].computed = hit * block_size;
        }
        2 => {
            let copies: Vec<BlockId> = sequences[index].blocks.iter().filter_map(|_| free.pop()).collect();
            if copies.len() == sequences[index].blocks.len() {
                let pairs: Vec<_> = sequences[index].blocks.iter().copied().zip(copies.iter().copied()).collect();
                executor.copy_blocks(&pairs);
                sequences[index].blocks = copies;
            }
        }
        _ => {}
    }
}

/// Prompts of which some share a beginning.
fn prompts(rng: &mut Rng, longest: usize) -> Vec<Vec<u32>> {
    let stem: Vec<u32> = (0..longest).map(|_| rng.u32(..VOCAB as u32)).collect();
    let prompt = |_| {
        let shared = rng.usize(..longest);
        let tail = rng.usize(1..=longest - shared);
        let mut prompt = stem[..shared].to_vec();
        prompt.extend((0..tail).map(|_| rng.u32(..VOCAB as u32)));
        prompt
    };
    let count = 4;
    (0..count).map(prompt).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20))]

    #[test]
    fn logits_depend_on_the_tokens_alone(
        seed in any::<u64>(),
        family in prop::sample::select(Family::ALL.to_vec()),
        kind in prop::sample::select(vec![TensorKind::F32, TensorKind::F16, TensorKind::Q4_0, TensorKind::Q4_1, TensorKind::Q8_0, TensorKind::Q4_K, TensorKind::Q6_K]),
        threads in 1usize..=3,
        block_size in prop::sample::select(vec![8usize, 16, 32, 5]),
        path in prop::sample::select(kernel_paths()),
    ) {
        let mut rng = Rng::with_seed(seed);
        let folder = Folder::new();
        let file = folder.file("model.gguf", &Tiny::new(family, kind, seed).to_gguf());
        let prompts = prompts(&mut rng, 60);
        let mut plain = CpuExecutor::load(&file, &CpuConfig { blocks: BLOCKS as usize, ..config() }).unwrap();
        let expected: Vec<Vec<u32>> = prompts.iter().map(|prompt| alone(&mut plain, prompt, 16)).collect();

        let config = CpuConfig { threads, block_size, blocks: BLOCKS as usize, kernel: Some(path), max_model_len: None };
        let mut executor = CpuExecutor::load(&file, &config).unwrap();
        prop_assert_eq!(executor.numerics_id(), plain.numerics_id());
        let found = together(&mut executor, &prompts, block_size, &mut rng);
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            prop_assert!(found == expected, "sequence {} of {} tokens differs", index, prompts[index].len());
        }
    }
}

#[test]
fn the_real_model_is_invariant_too() {
    let path = baton_testkit::smollm2();
    let mut rng = Rng::with_seed(3);
    let load = |kernel, threads, block_size| {
        CpuExecutor::load(&path, &CpuConfig { threads, block_size, blocks: BLOCKS as usize, kernel, max_model_len: None }).unwrap()
    };
    let prompts: Vec<Vec<u32>> = prompts(&mut rng, 120);
    let mut plain = load(None, 1, 16);
    let expected: Vec<Vec<u32>> = prompts.iter().map(|prompt| alone(&mut plain, prompt, 16)).collect();
    for (threads, block_size) in [(1, 32), (2, 8), (3, 16)] {
        let found = together(&mut load(None, threads, block_size), &prompts, block_size, &mut rng);
        assert!(found == expected, "{threads} threads, blocks of {block_size}");
    }
    for kernel in kernel_paths() {
        // Without a fused multiply-add in the machine type the portable path takes a second for a few tokens.
        let short = &prompts[0][..prompts[0].len().min(6)];
        assert!(alone(&mut load(Some(kernel), 2, 16), short, 16) == alone(&mut plain, short, 16), "{kernel}");
    }
}

/// The same in a sampled step: tokens and log-probabilities.
#[test]
fn samples_of_a_row_do_not_depend_on_its_neighbours() {
    let folder = Folder::new();
    let file = folder.file("model.gguf", &Tiny::new(Family::Llama, TensorKind::Q4_1, 1).to_gguf());
    let mut executor = CpuExecutor::load(&file, &config()).unwrap();
    let params = greedy();
    let mut free = free_blocks(200);
    let mut sequences: Vec<Sequence> = (0..30).map(|i| Sequence::new(&(0..=i).map(|k| k * 17 % 250).collect::<Vec<u32>>())).collect();
    for sequence in &mut sequences {
        sequence.reserve(sequence.tokens.len(), 16, &mut free);
    }
    let rows = |sequences: &[Sequence]| executor.step(&batch(sequences.iter().map(|s| s.row(s.tokens.len(), &params)).collect())).samples;
    let mut rows = rows;
    let together = rows(&sequences);
    assert!(together.iter().flatten().all(|sample| sample.logprob.is_some() && sample.top.len() == 3));
    for (sequence, expected) in sequences.iter().zip(&together) {
        assert_eq!(rows(std::slice::from_ref(sequence))[0], *expected);
    }
}

/// Logits after "The capital of France is" for each build and path. Whoever changes them must raise `REDUCTION_RULE` too, as
/// replicas that claim one `numerics_id` continue each other's requests.
#[test]
fn the_numerics_id_stands_for_these_bits() {
    let path = baton_testkit::smollm2();
    for kernel in kernel_paths() {
        let mut executor = CpuExecutor::load(&path, &CpuConfig { kernel: Some(kernel), ..config() }).unwrap();
        let logits = alone(&mut executor, &[504, 3575, 282, 4649, 314], 16);
        let bytes: Vec<u8> = logits.iter().flat_map(|bits| bits.to_le_bytes()).collect();
        let expected_id = "baton-cpu/rule=1/model=1dff70ef9e211d0ab8951aa641e75aa1/weights=Q4_1+Q8_0+F32/kv=f32/activations=f32";
        assert_eq!(executor.numerics_id(), expected_id);
        assert_eq!(xxhash_rust::xxh3::xxh3_64(&bytes), 0xbc39_4687_a247_2b99, "{kernel}");
    }
}
