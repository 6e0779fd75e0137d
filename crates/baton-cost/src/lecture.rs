//! The numbers of the lecture that the system implements, computed by the functions that price everything else.

use baton_units::Tokens;
use serde::Serialize;

use crate::{
    Device, Link, Migration, ModelShape, StepCoefficients, StepLoad, affinity_budget_ms, affinity_gain_ms, agent::AgentTask, copy_share,
    kv_budget_bytes, lora, lora::Adapter, moe, replication_threshold_sessions,
};

/// One number of the lecture.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    pub id: &'static str,
    pub value: f64,
    pub unit: &'static str,
    /// Absent where lecture and formula agree.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<Status>,
    /// Why the value is not what the lecture prints, or what its model leaves out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<&'static str>,
}

/// How a number stands to the lecture's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// The lecture prints another number than its own formula gives.
    Disputed,
    /// The lecture's model leaves out something that a run shows.
    Modelled,
}

/// What the lecture takes as given. Everything else follows.
#[derive(Debug, Clone)]
pub struct Assumptions {
    /// The model with 32 KV heads.
    pub mha: ModelShape,
    /// The same with 8.
    pub gqa8: ModelShape,
    pub device: Device,
    pub nvlink: Link,
    pub pcie: Link,
    pub ethernet: Link,
    /// Sequences that decode together, and the context of each (17.2, 17.5).
    pub batch: f64,
    pub context: Tokens,
    /// Tokens of an answer (17.2).
    pub answer: f64,
    /// Milliseconds by which the warm queue is longer in 17.5's last row.
    pub queue_gap_ms: f64,
    /// Adapters (17.6, exercise 3).
    pub lora_rank: u32,
    pub adapters: u32,
    pub zipf_adapters: u32,
    pub zipf_exponent: f64,
    /// Share of experts that counts as saturated (exercise 4).
    pub saturated: f64,
    pub task: AgentTask,
    pub replicas: u32,
}

impl Default for Assumptions {
    fn default() -> Self {
        let preset = |name| ModelShape::preset(name).expect("the lecture's models are presets");
        let link = |name| Link::preset(name).expect("the lecture's links are presets");
        Self {
            mha: preset("llama-2-7b"),
            gqa8: preset("llama-2-7b-gqa8"),
            device: Device::preset("h100").expect("the lecture's device is a preset"),
            nvlink: link("nvlink"),
            pcie: link("pcie"),
            ethernet: link("ethernet"),
            batch: 164.0,
            context: Tokens(2500),
            answer: 300.0,
            queue_gap_ms: 80.0,
            lora_rank: 16,
            adapters: 1000,
            zipf_adapters: 500,
            zipf_exponent: 1.0,
            saturated: 0.95,
            task: AgentTask::LECTURE,
            replicas: 8,
        }
    }
}

const LENGTH_NOTE: &str = "the formula that gives every other figure gives 2.03 s; the lecture's 8.4 s scales the 4,096-token figure by \
                           the square of the length, but at 4,096 tokens the linear term dominates";
const KV_NOTE: &str = "131,072 bytes a token give 4.29 GB; the lecture's 8.6 GB are 65,536 tokens of GQA-8";
const RANDOM_NOTE: &str = "the lecture's model: a step is warm only on the replica of the step before; a prefix cache that keeps older \
                           steps finds 0.53 under random routing over 8, so a run need not match";

/// Every number of the lecture, under its assumptions.
pub fn rows() -> Vec<Row> {
    rows_under(&Assumptions::default())
}

/// The same under other assumptions.
pub fn rows_under(given: &Assumptions) -> Vec<Row> {
    let step = StepCoefficients::from_profile(&given.gqa8, &given.device);
    [kv_rows(given), prefill_rows(given, &step), migration_rows(given, &step), affinity_rows(given, &step)]
        .into_iter()
        .chain([lora_rows(given), moe_rows(given), agent_rows(given, &step), disputed_rows(given, &step)])
        .flatten()
        .collect()
}

fn row(id: &'static str, value: f64, unit: &'static str) -> Row {
    Row { id, value, unit, status: None, note: None }
}

fn noted(id: &'static str, value: f64, unit: &'static str, status: Status, note: &'static str) -> Row {
    Row { id, value, unit, status: Some(status), note: Some(note) }
}

fn kv_rows(given: &Assumptions) -> Vec<Row> {
    let gb = |shape: &ModelShape, tokens| shape.kv_bytes(tokens) / 1e9;
    vec![
        row("kv_bytes_per_token_gqa8", given.gqa8.kv_bytes(Tokens(1)), "B"),
        row("kv_bytes_per_token_mha", given.mha.kv_bytes(Tokens(1)), "B"),
        row("kv_4k_gqa8", gb(&given.gqa8, Tokens(4096)), "GB"),
        row("kv_4k_mha", gb(&given.mha, Tokens(4096)), "GB"),
        row("kv_16k_gqa8", gb(&given.gqa8, Tokens(16384)), "GB"),
        row("kv_2500_gqa8", gb(&given.gqa8, given.context), "GB"),
        row("kv_budget", kv_budget_bytes(&given.gqa8, &given.device) / 1e9, "GB"),
    ]
}

fn prefill_rows(given: &Assumptions, step: &StepCoefficients) -> Vec<Row> {
    let prefill_ms = |tokens| step.prefill_ms(Tokens(tokens), Tokens(0));
    let (cold_s, warm_s) = (given.task.step_cold_s(step), given.task.step_warm_s(step));
    vec![
        row("prefill_512", prefill_ms(512), "ms"),
        row("prefill_4k", prefill_ms(4096), "ms"),
        row("prefill_16k", prefill_ms(16384), "ms"),
        row("prefill_16k_flop", given.gqa8.flops(16384.0, 16384.0) / 1e12, "TFLOP"),
        row("agent_step_cold", cold_s * 1e3, "ms"),
        row("agent_step_warm", warm_s * 1e3, "ms"),
        row("agent_step_ratio", cold_s / warm_s, "x"),
        row("decode_step_164", step.memory_s(&decode_load(given)) * 1e3, "ms"),
        row("slot_occupancy_300", given.answer * step.step_s(&decode_load(given)), "s"),
    ]
}

fn decode_load(given: &Assumptions) -> StepLoad {
    StepLoad::decode(given.batch, given.batch * given.context.as_f64())
}

fn migration_rows(given: &Assumptions, step: &StepCoefficients) -> Vec<Row> {
    let migrate = |shape, link, tokens| Migration::price(shape, step, link, Tokens(tokens), Tokens(0));
    let (short, long) = (migrate(&given.gqa8, &given.nvlink, 4096), migrate(&given.gqa8, &given.nvlink, 16384));
    vec![
        row("migrate_4k_nvlink", short.move_s * 1e3, "ms"),
        row("migrate_4k_pcie", migrate(&given.gqa8, &given.pcie, 4096).move_s * 1e3, "ms"),
        row("migrate_4k_ethernet", migrate(&given.gqa8, &given.ethernet, 4096).move_s * 1e3, "ms"),
        row("migrate_16k_nvlink", long.move_s * 1e3, "ms"),
        row("migrate_share_of_step", short.move_s / step.step_s(&decode_load(given)), "fraction"),
        row("recompute_over_migrate_4k", short.advantage(), "x"),
        row("recompute_over_migrate_16k", long.advantage(), "x"),
        row("breakeven_mha", migrate(&given.mha, &given.nvlink, 4096).break_even_bytes_per_s() / 1e9, "GB/s"),
        row("breakeven_gqa8", short.break_even_bytes_per_s() / 1e9, "GB/s"),
    ]
}

fn affinity_rows(given: &Assumptions, step: &StepCoefficients) -> Vec<Row> {
    let budget_ms = |tokens| affinity_budget_ms(step, Tokens(tokens), Tokens(tokens));
    let decode_s = step.memory_s(&decode_load(given));
    vec![
        row("affinity_512", budget_ms(512), "ms"),
        row("affinity_spread", budget_ms(4096) / budget_ms(512), "x"),
        row("affinity_loss_512_at_80ms", -affinity_gain_ms(budget_ms(512), given.queue_gap_ms, 0.0), "ms"),
        row("replica_copy_share", copy_share(&given.gqa8, &given.device, Tokens(4096)), "fraction"),
        row("replicate_threshold", replication_threshold_sessions(budget_ms(4096) / 1e3, decode_s), "sessions"),
    ]
}

fn lora_rows(given: &Assumptions) -> Vec<Row> {
    let adapter = Adapter::on_attention(&given.mha, given.lora_rank);
    let bytes = adapter.bytes(given.mha.bytes_per_weight);
    let all = f64::from(given.adapters) * bytes;
    let miss_s = adapter.load_s(given.mha.bytes_per_weight, &given.pcie);
    let hit = |resident| lora::zipf_hit_rate(resident, given.zipf_adapters, given.zipf_exponent);
    vec![
        row("lora_params_r16", adapter.params as f64, "params"),
        row("lora_bytes_r16", bytes / 1e6, "MB"),
        row("lora_share", adapter.share(&given.mha), "fraction"),
        row("lora_1000", all / 1e9, "GB"),
        row("lora_1000_share", all / kv_budget_bytes(&given.gqa8, &given.device), "fraction"),
        row("lora_miss", miss_s * 1e3, "ms"),
        row("zipf_hit_50", hit(50), "fraction"),
        row("zipf_hit_200", hit(200), "fraction"),
        row("lora_mean_added", lora::mean_added_s(hit(50), miss_s) * 1e3, "ms"),
    ]
}

fn moe_rows(given: &Assumptions) -> Vec<Row> {
    let saturation = |chosen, experts| moe::saturation_batch(chosen, experts, given.saturated);
    vec![
        row("moe_unused_b1", moe::unused_probability(2, 8, 1.0), "probability"),
        row("moe_unused_b30", moe::unused_probability(2, 8, 30.0), "probability"),
        row("moe_saturation_2_8", saturation(2, 8), "sequences"),
        row("moe_saturation_2_64", saturation(2, 64), "sequences"),
        row("moe_saturation_8_256", saturation(8, 256), "sequences"),
    ]
}

fn agent_rows(given: &Assumptions, step: &StepCoefficients) -> Vec<Row> {
    let (task, replicas) = (&given.task, given.replicas);
    let (affinity_s, random_s) = (task.affinity_s(step), task.random_s(step, replicas));
    let modelled = |id, value, unit| noted(id, value, unit, Status::Modelled, RANDOM_NOTE);
    vec![
        row("agent_task_cold", task.cold_s(step), "GPU-s"),
        row("agent_task_affinity", affinity_s, "GPU-s"),
        modelled("agent_hit_random", task.hit_rate_random(replicas), "fraction"),
        modelled("agent_task_random", random_s, "GPU-s"),
        modelled("agent_affinity_gain", random_s / affinity_s, "x"),
        row("scatter_loss", task.scatter_loss_s(step), "s"),
        row("allreduce_per_token", f64::from(given.mha.all_reduces_per_token()), "count"),
    ]
}

fn disputed_rows(given: &Assumptions, step: &StepCoefficients) -> Vec<Row> {
    let tokens = Tokens(32768);
    vec![
        noted("prefill_32k", step.prefill_ms(tokens, Tokens(0)) / 1e3, "s", Status::Disputed, LENGTH_NOTE),
        noted("kv_32k_gqa8", given.gqa8.kv_bytes(tokens) / 1e9, "GB", Status::Disputed, KV_NOTE),
    ]
}
