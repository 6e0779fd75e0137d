//! A sequence that moves between replicas with its KV has the bits of one that stays.

use baton_cost::StepCoefficients;
use baton_engine::{
    Engine, EngineConfig, Executor, KvBytes, KvMemory, NewRequest, Numerics, NumericsError, Output, Phase, SamplingOptions, SamplingParams,
    SequenceId, SequenceState, TokenBudget,
};
use baton_gguf::TensorKind;
use baton_model::{CpuConfig, CpuExecutor};
use baton_units::{BlockSize, Blocks, RequestId, Time, Tokens};
use fastrand::Rng;
use xxhash_rust::xxh3::xxh3_64;

use crate::support::{config, kernel_paths};
use crate::tiny::{Family, Folder, Tiny, VOCAB};

const BLOCK: u32 = 8;
const BLOCKS: u32 = 64;
const ID: RequestId = RequestId(1);

/// Tokens of one stream with the bits of their log-probabilities, and the reason of its end as text.
type Stream = Vec<(u32, Option<u32>, Vec<(u32, u32)>, Option<String>)>;

struct Replica {
    engine: Engine,
    executor: CpuExecutor,
    stream: Stream,
}

impl Replica {
    fn new(folder: &Folder, cpu: &CpuConfig, budget: u32) -> Self {
        let executor = CpuExecutor::load(&folder.path().join("model.gguf"), cpu).unwrap();
        let free = StepCoefficients { fixed_s: 0.0, per_token_s: 0.0, per_attended_s: 0.0, per_kv_token_s: 0.0, weights_s: 0.0 };
        let config = EngineConfig {
            block_size: BlockSize::new(cpu.block_size as u32).unwrap(),
            budget: TokenBudget::Fixed(Tokens(budget)),
            vocabulary: VOCAB as u32,
            ..EngineConfig::new("tiny", Blocks(cpu.blocks as u32), Tokens(200), free)
        };
        Self { engine: Engine::new(config).unwrap(), executor, stream: Vec::new() }
    }

    fn submit(&mut self, request: NewRequest) {
        self.engine.submit(request, Time::ZERO).unwrap();
    }

    /// One step; keeps what it tells of the stream. False when there is nothing to do.
    fn step(&mut self) -> bool {
        let Some(step) = self.engine.step(&mut self.executor, Time::ZERO) else { return false };
        let of_stream = step.outputs.into_iter().filter(|output| output.request == ID);
        self.stream.extend(of_stream.map(|output| {
            let Output { token, logprob, top, finish, .. } = output;
            let top = top.into_iter().map(|(token, logprob)| (token, logprob.to_bits())).collect();
            (token, logprob.map(f32::to_bits), top, finish.map(|finish| format!("{:?}", finish.reason)))
        }));
        true
    }

    fn run(&mut self) {
        while self.step() {}
    }

    fn find(&self) -> Option<SequenceId> {
        self.engine.find(ID, 0)
    }
}

/// Copies blocks from where they lie to where they are to lie, by memory that the target gave and by other memory.
fn copy(source: &Replica, target: &mut Replica, prepared: baton_engine::PreparedId, blocks: std::ops::Range<usize>) {
    let from = source.engine.look(source.find().unwrap()).unwrap().blocks;
    let to = target.engine.prepared(prepared).unwrap().blocks;
    for index in blocks {
        let lent = source.executor.share(from[index]);
        let mut memory: Box<dyn KvBytes> = if index % 2 == 0 { target.executor.spare() } else { Box::new(vec![0; lent.bytes().len()]) };
        memory.bytes_mut().copy_from_slice(lent.bytes());
        let other = target.executor.put(to[index], memory);
        assert_eq!(other.bytes().len(), lent.bytes().len());
    }
}

/// Moves the stream in two rounds, between which the source goes on and the target computes what it has; gives how many blocks
/// travelled, of how many. `None` when it ended meanwhile.
fn migrate(source: &mut Replica, target: &mut Replica) -> Option<(usize, usize)> {
    Numerics::of(&target.executor).check_kv(&Numerics::of(&source.executor)).unwrap();
    let id = source.find()?;
    let prepared = target.engine.prepare(&source.engine.export(id, Time::ZERO).unwrap()).unwrap();
    let held = target.engine.prepared(prepared).unwrap().held.0 as usize;
    let full = source.engine.look(id).unwrap().keys.len().max(held);
    copy(source, target, prepared, held..full);
    source.step();
    target.step();
    if !source.engine.freeze(id) {
        assert!(target.engine.abandon(prepared));
        return None;
    }
    let view = source.engine.look(id).unwrap();
    let blocks = view.blocks.len();
    target.engine.grow(prepared, view.computed).unwrap();
    copy(source, target, prepared, full..blocks.max(full));
    let state = serde_json::to_string(&source.engine.export(id, Time::ZERO).unwrap()).unwrap();
    target.engine.join(prepared, &serde_json::from_str(&state).unwrap(), Time::ZERO).unwrap();
    assert!(source.engine.release(id));
    target.stream = std::mem::take(&mut source.stream);
    Some((blocks.saturating_sub(held), blocks))
}

#[test]
fn a_block_that_is_lent_stays_as_it_was_while_the_sequence_goes_on_with_a_copy() {
    let folder = model(Family::Llama, TensorKind::Q8_0);
    let greedy = SamplingOptions { temperature: 0.0, max_tokens: Some(24), logprobs: Some(3), ..SamplingOptions::default() };
    let [mut lends, mut alone] = [(); 2].map(|()| Replica::new(&folder, &cpu(), 64));
    for replica in [&mut lends, &mut alone] {
        replica.submit(request(&random_prompt(3, 20), greedy.clone()));
    }
    alone.run();
    lends.step();
    let blocks = lends.engine.look(lends.find().unwrap()).unwrap().blocks.to_vec();
    let lent: Vec<_> = blocks.iter().map(|&block| lends.executor.share(block)).collect();
    let before: Vec<Vec<u8>> = lent.iter().map(|block| block.bytes().to_vec()).collect();
    let known: Vec<Option<u64>> = lent.iter().map(|block| block.checksum()).collect();
    let full = |index: usize| Some(xxh3_64(&before[index]));
    assert_eq!(known, [full(0), full(1), None], "blocks that are full have their checksum");
    lends.step();
    let now: Vec<&[u8]> = blocks.iter().map(|&block| lends.executor.block(block)).collect();
    assert_eq!((now[0], now[1]), (&before[0][..], &before[1][..]), "full blocks are not written");
    assert_ne!(now[2], before[2]);
    assert!(lent.iter().zip(&before).all(|(lent, before)| lent.bytes() == before));
    // Nor does memory come back that others read.
    let spare = lends.executor.spare();
    let other = lends.executor.put(blocks[0], spare);
    assert!(!std::ptr::eq(other.bytes(), lent[0].bytes()));
    let mut again = other;
    again.bytes_mut().copy_from_slice(lent[0].bytes());
    lends.executor.put(blocks[0], again);
    lends.run();
    assert_eq!(lends.stream, alone.stream);
}

fn cpu() -> CpuConfig {
    CpuConfig { block_size: BLOCK as usize, blocks: BLOCKS as usize, ..config() }
}

fn model(family: Family, kind: TensorKind) -> Folder {
    let folder = Folder::new();
    folder.file("model.gguf", &Tiny::new(family, kind, 5).to_gguf());
    folder
}

fn random_prompt(seed: u64, len: usize) -> Vec<u32> {
    let mut rng = Rng::with_seed(seed);
    (0..len).map(|_| rng.u32(..VOCAB as u32)).collect()
}

fn request(prompt: &[u32], options: SamplingOptions) -> NewRequest {
    NewRequest { seed: Some(7), ..NewRequest::new(ID, prompt.to_vec(), SamplingParams::new(options).unwrap()) }
}

fn neighbour(id: u64, len: usize) -> NewRequest {
    let options = SamplingOptions { max_tokens: Some(40), ..SamplingOptions::default() };
    NewRequest::new(RequestId(id), random_prompt(id, len), SamplingParams::new(options).unwrap())
}

/// The ways to draw that must not notice a move.
fn ways() -> Vec<SamplingOptions> {
    let greedy = SamplingOptions { temperature: 0.0, max_tokens: Some(24), logprobs: Some(3), ..SamplingOptions::default() };
    let hot = SamplingOptions { temperature: 1.3, top_p: 0.95, top_k: 100, min_p: 0.01, ..greedy.clone() };
    let penalised = SamplingOptions {
        repetition_penalty: 1.3,
        presence_penalty: 0.5,
        frequency_penalty: 0.7,
        logit_bias: vec![(3, 2.0), (200, -100.0)],
        ..hot.clone()
    };
    let greedy_penalised = SamplingOptions { temperature: 0.0, min_tokens: 12, stop_token_ids: (0..60).collect(), ..penalised.clone() };
    vec![greedy, hot, penalised, greedy_penalised]
}

/// The stream of a request that has a replica for itself and computes its prompt in one step.
fn unmoved(folder: &Folder, request: &NewRequest) -> Stream {
    let mut replica = Replica::new(folder, &cpu(), 1_000);
    replica.submit(request.clone());
    replica.run();
    replica.stream
}

#[test]
fn a_stream_that_moves_while_it_decodes_has_the_bits_of_one_that_stays() {
    for (family, kind) in [(Family::Llama, TensorKind::Q4_1), (Family::Qwen3, TensorKind::F16)] {
        let folder = model(family, kind);
        for options in ways() {
            let request = request(&random_prompt(1, 37), options);
            let expected = unmoved(&folder, &request);
            assert!(expected.last().unwrap().3.is_some());
            for after in [1, 4, 9] {
                // The target is another machine: other threads, instructions, budget and load.
                let kernel = kernel_paths().pop();
                let mut source = Replica::new(&folder, &cpu(), 50);
                let mut target = Replica::new(&folder, &CpuConfig { threads: 2, kernel, ..cpu() }, 9);
                source.submit(neighbour(2, 20));
                source.submit(request.clone());
                target.submit(neighbour(3, 30));
                (0..3).for_each(|_| _ = target.step());
                while source.stream.len() < after {
                    assert!(source.step());
                }
                migrate(&mut source, &mut target).unwrap();
                target.run();
                source.run();
                assert_eq!(target.stream, expected, "{:?} after {after} tokens", request.params);
            }
        }
    }
}

#[test]
fn a_stream_that_moves_in_its_prefill_and_back_and_again_has_those_bits_too() {
    let folder = model(Family::Llama, TensorKind::Q4_0);
    for options in ways() {
        let request = request(&random_prompt(2, 45), options);
        let expected = unmoved(&folder, &request);
        // Chunks that end inside a block, at its end, and of one token.
        for budget in [5, 8, 11] {
            let (mut here, mut there) = (Replica::new(&folder, &cpu(), budget), Replica::new(&folder, &cpu(), budget + 2));
            there.submit(neighbour(4, 25));
            here.submit(request.clone());
            here.step();
            let mut phases = Vec::new();
            while let Some(id) = here.find() {
                phases.push(here.engine.look(id).unwrap().phase);
                if migrate(&mut here, &mut there).is_some() {
                    std::mem::swap(&mut here, &mut there);
                    here.step();
                }
            }
            assert!(phases.contains(&Phase::Prefilling) && phases.contains(&Phase::Decoding));
            assert_eq!(here.stream, expected, "budget {budget}, {} moves", phases.len());
        }
    }
}

#[test]
fn a_target_that_holds_the_prefix_gets_only_the_tail() {
    let folder = model(Family::Llama, TensorKind::Q8_0);
    let prompt = random_prompt(3, 44);
    let request = request(&prompt, ways()[1].clone());
    let (mut source, mut target) = (Replica::new(&folder, &cpu(), 100), Replica::new(&folder, &cpu(), 100));
    target.submit(NewRequest { id: RequestId(9), ..request.clone() });
    target.run();
    source.submit(request.clone());
    (0..6).for_each(|_| _ = source.step());
    // With the same seed the target has computed the output too: only the block that is being written travels.
    let (travelled, blocks) = migrate(&mut source, &mut target).unwrap();
    assert_eq!((travelled, blocks), (1, 7));
    target.run();
    assert_eq!(target.stream, unmoved(&folder, &request));
}

#[test]
fn tokens_alone_are_enough_to_go_on() {
    let folder = model(Family::Qwen2, TensorKind::Q4_0);
    for options in ways() {
        let request = request(&random_prompt(6, 30), options);
        let expected = unmoved(&folder, &request);
        let delivered = expected.len() / 2;
        let output = expected[..delivered].iter().map(|token| token.0).collect();
        // Another block size keeps KV from moving and changes no bit.
        let mut target = Replica::new(&folder, &CpuConfig { block_size: 5, ..cpu() }, 7);
        target.engine.resume(&SequenceState::restart(request, output, "tiny"), Time::ZERO).unwrap();
        target.run();
        assert_eq!(target.stream, expected[delivered..]);
    }
}

#[test]
fn replicas_know_whether_kv_can_move_between_them() {
    let folder = model(Family::Llama, TensorKind::Q4_1);
    let numerics = |folder: &Folder, cpu: &CpuConfig| Numerics::of(&Replica::new(folder, cpu, 1).executor);
    let here = numerics(&folder, &cpu());
    let layout = here.kv.clone().unwrap();
    // Two layers of keys, padded to 16 positions, and values, of 2 heads of 48 floats.
    assert_eq!(layout.block_bytes.0, 2 * (16 + 8) * 2 * 48 * 4);
    assert_eq!(layout.format, "baton-cpu-1/f32le/layers=2/kv_heads=2/head_dim=48");
    for kernel in kernel_paths() {
        assert_eq!(here.check_kv(&numerics(&folder, &CpuConfig { kernel: Some(kernel), threads: 2, blocks: 9, ..cpu() })), Ok(()));
    }
    let other_size = numerics(&folder, &CpuConfig { block_size: 16, ..cpu() });
    assert_eq!(here.check(&other_size), Ok(()));
    assert!(matches!(here.check_kv(&other_size), Err(NumericsError::Layout { .. })));
    let other_model = numerics(&model(Family::Llama, TensorKind::Q4_0), &cpu());
    assert!(matches!(here.check(&other_model), Err(NumericsError::Results { .. })));
    let executor = Replica::new(&folder, &cpu(), 1).executor;
    assert_eq!((executor.kv().unwrap().priced_block_bytes(), executor.layout()), (layout.block_bytes, layout));
}
