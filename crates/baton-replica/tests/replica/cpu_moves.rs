//! Moves between replicas that compute: the KV that travels is a model's, and one wrong bit of it would show.

use baton_cost::StepCoefficients;
use baton_engine::{EngineConfig, TokenBudget};
use baton_gguf::TensorKind;
use baton_migration::OwnershipInput;
use baton_model::{CpuConfig, CpuExecutor};
use baton_replica::{MigrationConfig, Pace, ReplicaConfig};
use baton_units::{BlockSize, Blocks, Tokens};
use baton_wire::migration::{RunRequest, RunSampling};

use crate::{
    moves::{Fleet, assert_same},
    support::Replica,
    tiny::{CONTEXT, Family, Folder, Tiny, VOCAB},
};

const BLOCK: u32 = 8;
const BLOCKS: u32 = 64;
const PROMPT: u32 = 60;
/// A stream that ended before it could move is run again.
const TRIES: u64 = 100;

async fn replica(folder: &Folder, id: &str) -> Replica {
    let cpu = CpuConfig { threads: 1, block_size: BLOCK as usize, blocks: BLOCKS as usize, kernel: None, max_model_len: None };
    let executor = CpuExecutor::load(&folder.path().join("model.gguf"), &cpu).unwrap();
    let free = StepCoefficients { fixed_s: 0.0, per_token_s: 0.0, per_attended_s: 0.0, per_kv_token_s: 0.0, weights_s: 0.0 };
    let engine = EngineConfig {
        block_size: BlockSize::new(BLOCK).unwrap(),
        budget: TokenBudget::Fixed(Tokens(16)),
        vocabulary: VOCAB as u32,
        ..EngineConfig::new("tiny", Blocks(BLOCKS), Tokens(CONTEXT as u32), free)
    };
    let migration = Some(MigrationConfig::default());
    Replica::start_with(ReplicaConfig { migration, ..ReplicaConfig::new(id, "tiny", engine, Pace::Measured) }, Box::new(executor)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn moved_streams_have_the_bits_of_one_replica() {
    let folder = Folder::new();
    folder.file("model.gguf", &Tiny::new(Family::Llama, TensorKind::Q8_0, 3).to_gguf());
    let mut fleet = Fleet::of(vec![replica(&folder, "a").await, replica(&folder, "b").await]).await;
    let greedy = RunSampling {
        temperature: 0.0,
        repetition_penalty: 1.2,
        ignore_eos: true,
        max_tokens: Some(CONTEXT as u32 - PROMPT),
        ..RunSampling::default()
    };
    let sampled = RunSampling { temperature: 1.0, logprobs: Some(3), presence_penalty: 0.5, ..greedy.clone() };
    for (index, sampling) in [greedy, sampled].into_iter().enumerate() {
        let prompt = (0..PROMPT).map(|token| (token * 7 + 11) % VOCAB as u32).collect();
        let spec = RunRequest { model: "tiny".to_owned(), prompt, sampling, seed: 5, choice_index: index as u32, ..RunRequest::default() };
        let alone = fleet.alone(&spec).await;
        let mut moved = false;
        for number in (0..TRIES).map(|number| index as u64 * TRIES + number) {
            fleet.gateway.start(number, fleet.places[0], spec.clone()).await;
            fleet.delivered(number, 3).await;
            fleet.gateway.tell(number, OwnershipInput::Move { target: fleet.places[1] }).await;
            let output = fleet.finished(number).await;
            assert_same(&output, &alone);
            moved = fleet.gateway.request(number).committed == 1;
            if moved {
                break;
            }
        }
        assert!(moved, "no stream moved in {TRIES} tries");
    }
    fleet.empty().await;
}
