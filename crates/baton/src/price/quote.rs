//! The prices themselves: what is asked, and every number of the answer with its unit.

use baton_cost::{
    Device, Link, Migration, ModelShape, StepCoefficients, StepLoad, affinity_budget_ms, agent::AgentTask, copy_round_ratio,
    kv_budget_bytes, lora, lora::Adapter, moe, replication_threshold_sessions,
};
use baton_units::Tokens;
use serde::{Serialize, Serializer, ser::SerializeMap};

/// What is to be priced.
pub(super) struct Question {
    pub(super) shape: ModelShape,
    pub(super) device: Device,
    pub(super) link: Link,
    /// The prompt, and how much of it is cached.
    pub(super) tokens: Tokens,
    pub(super) cached: Tokens,
    /// Token budget of a step; zero without one.
    pub(super) chunk: Tokens,
    pub(super) batch: u32,
    /// Of each sequence in the batch.
    pub(super) context: Tokens,
    pub(super) zipf: f64,
    pub(super) lora: Option<Lora>,
    /// An agent task and the replicas it may be scattered over.
    pub(super) agent: Option<(AgentTask, u32)>,
}

pub(super) struct Lora {
    pub(super) rank: u32,
    pub(super) adapters: u32,
    pub(super) resident: u32,
}

/// Every price, in sections.
#[derive(Serialize)]
pub(super) struct Quote {
    pub(super) model: String,
    pub(super) device: Device,
    pub(super) link: Link,
    pub(super) step: StepCoefficients,
    #[serde(flatten, serialize_with = "as_object")]
    pub(super) sections: Vec<Section>,
}

pub(super) struct Section {
    pub(super) name: &'static str,
    pub(super) prices: Vec<Price>,
}

/// One number. `key` is its name in JSON and ends with its unit.
pub(super) struct Price {
    pub(super) key: &'static str,
    pub(super) label: String,
    pub(super) value: f64,
    pub(super) unit: Unit,
}

/// What a value counts; the table picks the prefix.
#[derive(Clone, Copy)]
pub(super) enum Unit {
    Bytes,
    BytesPerSecond,
    Ms,
    Seconds,
    Flop,
    Count(&'static str),
    Times,
    Share,
}

impl Quote {
    pub(super) fn new(question: &Question) -> Self {
        let step = StepCoefficients::from_profile(&question.shape, &question.device);
        let mut sections =
            vec![model(question), prefill(question, &step), decode(question, &step), kv(question, &step), affinity(question, &step)];
        sections.extend(experts(question));
        sections.extend(question.lora.as_ref().map(|lora| adapters(question, lora)));
        sections.extend(question.agent.as_ref().map(|(task, replicas)| agent(task, *replicas, &step)));
        Self { model: question.shape.name.clone(), device: question.device.clone(), link: question.link.clone(), step, sections }
    }
}

fn as_object<S: Serializer>(sections: &[Section], serializer: S) -> Result<S::Ok, S::Error> {
    let mut object = serializer.serialize_map(Some(sections.len()))?;
    for section in sections {
        object.serialize_entry(section.name, section)?;
    }
    object.end()
}

impl Serialize for Section {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = serializer.serialize_map(Some(self.prices.len()))?;
        for price in &self.prices {
            object.serialize_entry(price.key, &price.value)?;
        }
        object.end()
    }
}

fn price(key: &'static str, label: impl Into<String>, value: f64, unit: Unit) -> Price {
    Price { key, label: label.into(), value, unit }
}

fn model(question: &Question) -> Section {
    let shape = &question.shape;
    let budget = kv_budget_bytes(shape, &question.device);
    let per_token = shape.kv_bytes(Tokens(1));
    let mut prices = vec![price("params", "parameters", shape.params() as f64, Unit::Count(""))];
    if shape.experts.is_some() {
        prices.push(price("active_params", "of which a token uses", shape.active_params() as f64, Unit::Count("")));
    }
    prices.extend([
        price("weight_bytes", "weights", shape.weight_bytes(), Unit::Bytes),
        price("kv_bytes_per_token", "KV per token", per_token, Unit::Bytes),
        price("kv_budget_bytes", format!("room for KV on one {}", question.device.name), budget, Unit::Bytes),
        price("kv_budget_tokens", "the same", (budget / per_token).floor(), Unit::Count("tokens")),
    ]);
    Section { name: "memory", prices }
}

fn prefill(question: &Question, step: &StepCoefficients) -> Section {
    let (new, cached) = (question.tokens - question.cached, question.cached);
    let prefill_ms = step.prefill_ms(new, cached);
    let mut prices = vec![
        price("prefill_ms", format!("{new} over {} cached", cached.0), prefill_ms, Unit::Ms),
        price("prefill_flop", "arithmetic", question.shape.flops(new.as_f64(), question.tokens.as_f64()), Unit::Flop),
        price("prefill_cold_ms", "the whole prompt without cache", step.prefill_ms(question.tokens, Tokens(0)), Unit::Ms),
    ];
    let chunk = question.chunk;
    let steps = if chunk.0 == 0 { 1 } else { new.0.div_ceil(chunk.0) };
    let label = format!("in {steps} engine step{}", if steps == 1 { "" } else { "s" });
    prices.push(price("prefill_steps_ms", label, step.prefill_chunked_ms(new, cached, chunk), Unit::Ms));
    Section { name: "prefill", prices }
}

fn decode(question: &Question, step: &StepCoefficients) -> Section {
    let batch = f64::from(question.batch);
    let total = batch * question.context.as_f64();
    let load = StepLoad::decode(batch, total);
    let step_s = moe::decode_step_s(&question.shape, &question.device, batch, total);
    let read_bytes = moe::decode_weight_bytes(&question.shape, batch) + total * question.shape.kv_bytes(Tokens(1));
    let part =
        if question.chunk.0 == 0 { question.tokens - question.cached } else { question.chunk.min(question.tokens - question.cached) };
    let mixed = load.and(StepLoad::prefill(part, question.cached));
    Section {
        name: "decode",
        prices: vec![
            price("decode_step_ms", format!("step of {} at {} each", rows(question.batch), question.context), step_s * 1e3, Unit::Ms),
            price("decode_memory_ms", "reading weights and KV", read_bytes / question.device.bytes_per_s * 1e3, Unit::Ms),
            price("decode_compute_ms", "arithmetic, meanwhile", step.compute_s(&load) * 1e3, Unit::Ms),
            price("decode_tokens_per_s", "output of the batch", batch / step_s, Unit::Count("tokens/s")),
            price("mixed_step_ms", format!("step with {part} of prefill in it"), step.step_s(&mixed) * 1e3, Unit::Ms),
        ],
    }
}

fn kv(question: &Question, step: &StepCoefficients) -> Section {
    let Question { shape, device, link, tokens, .. } = question;
    let migration = Migration::price(shape, step, link, *tokens, Tokens(0));
    let batch = f64::from(question.batch);
    let step_s = moe::decode_step_s(shape, device, batch, batch * question.context.as_f64());
    let share = migration.bytes / kv_budget_bytes(shape, device);
    let mut prices = vec![price("kv_bytes", format!("KV of {tokens}"), migration.bytes, Unit::Bytes)];
    if share.is_finite() {
        prices.push(price("copy_share", "one copy, of the room for KV", share, Unit::Share));
    }
    prices.extend([
        price("migration_ms", format!("moving it over {}", link.name), migration.move_s * 1e3, Unit::Ms),
        price("recompute_ms", "recomputing it", migration.recompute_s * 1e3, Unit::Ms),
        price("recompute_over_migration", "recomputing over moving", migration.advantage(), Unit::Times),
        price("break_even_bytes_per_s", "moving wins above", migration.break_even_bytes_per_s(), Unit::BytesPerSecond),
        price(
            "copy_round_ratio",
            "a live copy's next round, of the last",
            copy_round_ratio(shape.kv_bytes(Tokens(1)), link, step_s),
            Unit::Share,
        ),
    ]);
    Section { name: "migration", prices }
}

fn affinity(question: &Question, step: &StepCoefficients) -> Section {
    let hit = if question.cached.0 == 0 { question.tokens } else { question.cached };
    let budget_ms = affinity_budget_ms(step, question.tokens, hit);
    let batch = f64::from(question.batch);
    let step_s = moe::decode_step_s(&question.shape, &question.device, batch, batch * question.context.as_f64());
    Section {
        name: "affinity",
        prices: vec![
            price("affinity_budget_ms", format!("waiting that a hit of {hit} is worth"), budget_ms, Unit::Ms),
            price(
                "replication_threshold_sessions",
                "sessions on a holder past which a copy pays",
                replication_threshold_sessions(budget_ms / 1e3, step_s),
                Unit::Count("sessions"),
            ),
        ],
    }
}

fn experts(question: &Question) -> Option<Section> {
    let experts = question.shape.experts?;
    let (chosen, count, batch) = (experts.per_token, experts.count, f64::from(question.batch));
    let popularity = moe::zipf_popularity(chosen, count, question.zipf);
    Some(Section {
        name: "experts",
        prices: vec![
            price(
                "unused_probability",
                format!("an expert is unused by {}", rows(question.batch)),
                moe::unused_probability(chosen, count, batch),
                Unit::Share,
            ),
            price(
                "distinct_experts",
                format!("experts read per layer, of {count}, uniform choice"),
                moe::distinct_experts_uniform(chosen, count, batch),
                Unit::Count("experts"),
            ),
            price(
                "distinct_experts_zipf",
                format!("the same, popularity by Zipf({})", question.zipf),
                moe::distinct_experts(&popularity, batch),
                Unit::Count("experts"),
            ),
            price(
                "saturation_batch",
                "batch that reads 95 % of them",
                moe::saturation_batch(chosen, count, 0.95),
                Unit::Count("sequences"),
            ),
            price("decode_weight_bytes", "weights read per decode step", moe::decode_weight_bytes(&question.shape, batch), Unit::Bytes),
        ],
    })
}

fn adapters(question: &Question, asked: &Lora) -> Section {
    let shape = &question.shape;
    let adapter = Adapter::on_attention(shape, asked.rank);
    let bytes = adapter.bytes(2.0);
    let load_s = adapter.load_s(2.0, &question.link);
    let hit = lora::zipf_hit_rate(asked.resident, asked.adapters, question.zipf);
    Section {
        name: "adapters",
        prices: vec![
            price(
                "adapter_params",
                format!("rank {} on the attention projections", asked.rank),
                adapter.params as f64,
                Unit::Count("parameters"),
            ),
            price("adapter_bytes", "one adapter in 16 bits", bytes, Unit::Bytes),
            price("adapter_share", "of the base model", adapter.share(shape), Unit::Share),
            price("adapter_resident_bytes", format!("{} resident", asked.resident), f64::from(asked.resident) * bytes, Unit::Bytes),
            price("adapter_load_ms", format!("loading one over {}", question.link.name), load_s * 1e3, Unit::Ms),
            price("adapter_hit_rate", format!("hits, {} in use by Zipf({})", asked.adapters, question.zipf), hit, Unit::Share),
            price("adapter_mean_added_ms", "added to a request on average", lora::mean_added_s(hit, load_s) * 1e3, Unit::Ms),
        ],
    }
}

fn agent(task: &AgentTask, replicas: u32, step: &StepCoefficients) -> Section {
    Section {
        name: "agent",
        prices: vec![
            price("prompt_tokens", format!("prompts of {} steps", task.steps), task.prompt_tokens(), Unit::Count("tokens")),
            price("distinct_tokens", "of which are distinct", task.distinct_tokens(), Unit::Count("tokens")),
            price("step_cold_ms", "average step's prefill, cold", task.step_cold_s(step) * 1e3, Unit::Ms),
            price("step_warm_ms", "the same, warm", task.step_warm_s(step) * 1e3, Unit::Ms),
            price("task_cold_s", "prefill of a task without reuse", task.cold_s(step), Unit::Seconds),
            price("task_affinity_s", "with perfect affinity", task.affinity_s(step), Unit::Seconds),
            price("task_random_s", format!("at random over {replicas} replicas"), task.random_s(step, replicas), Unit::Seconds),
            price("hit_rate_affinity", "hits with perfect affinity", task.hit_rate_affinity(), Unit::Share),
            price("hit_rate_random", "at random, only the last step kept", task.hit_rate_random(replicas), Unit::Share),
            price("hit_rate_random_kept", "at random, every step kept", task.hit_rate_random_kept(replicas), Unit::Share),
            price("scatter_loss_s", "lost when every step finds a cold replica", task.scatter_loss_s(step), Unit::Seconds),
        ],
    }
}

fn rows(count: u32) -> String {
    if count == 1 { "1 sequence".to_owned() } else { format!("{count} sequences") }
}
