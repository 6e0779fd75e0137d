use baton_units::Tokens;
use serde::{Deserialize, Serialize};

use crate::UnknownName;

mod gguf;
mod hf_config;
mod presets;

/// How a layer attends, with the sizes that decide parameters, arithmetic and KV.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Attention {
    /// Multi-head or grouped-query attention (Ainslie et al., 2023): `kv_heads` keys and values of `head_dim` per token.
    Grouped { heads: u32, kv_heads: u32, head_dim: u32, qkv_bias: bool, qk_norm: bool },
    /// Multi-head latent attention (DeepSeek-V2, 2.1): one latent of `kv_rank` and one rotary key of `rope_dim` per token.
    Latent { heads: u32, q_rank: Option<u32>, kv_rank: u32, rope_dim: u32, nope_dim: u32, value_dim: u32 },
}

/// The sparse feed-forward of a mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Experts {
    /// Experts of a layer that the router chooses among.
    pub count: u32,
    /// Experts that a token uses, beside the shared ones.
    pub per_token: u32,
    /// Inner width of one expert.
    pub width: u32,
    /// Inner width of the experts that every token uses, all together; 0 without.
    pub shared_width: u32,
    /// First layers that are dense.
    pub dense_layers: u32,
}

/// What of a model decides its costs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelShape {
    pub name: String,
    pub layers: u32,
    pub hidden: u32,
    pub vocab: u32,
    /// Inner width of a dense layer's gated feed-forward.
    pub ffn_width: u32,
    /// The output projection is the embedding.
    pub tied_embeddings: bool,
    pub attention: Attention,
    pub experts: Option<Experts>,
    /// Longest context, in tokens; 0 when unknown.
    pub max_context: u32,
    /// Bytes that one parameter takes in memory, on average.
    pub bytes_per_weight: f64,
    /// Bytes of one number in KV.
    pub kv_dtype_bytes: f64,
    /// Parameters counted in a file, where a file was read; otherwise they are derived.
    pub counted_params: Option<u64>,
}

/// Why a model's description gives no shape.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    #[error("the model description is not the JSON of a config.json: {reason}")]
    Json { reason: String },
    #[error("model type {family:?} is not supported; supported are {known}")]
    Family { family: String, known: String },
    #[error("the model description has no \"{field}\"; give the model's own file")]
    Missing { field: &'static str },
    #[error("{key} is {value}, more than any model has; give the model's own file")]
    Number { key: String, value: u64 },
    #[error("{size} is {value}, expected 1 to {limit}; give the model's own file")]
    Size { size: &'static str, value: u64, limit: u64 },
    #[error("{per_token} experts per token of {count}; give the model's own file")]
    Experts { per_token: u32, count: u32 },
    #[error(transparent)]
    Gguf(#[from] baton_gguf::GgufError),
}

impl ModelShape {
    /// A well-known model, whatever the case of its name.
    pub fn preset(name: &str) -> Result<Self, UnknownName> {
        presets::find(&name.to_ascii_lowercase()).ok_or_else(|| UnknownName { kind: "model", name: name.to_owned(), valid: Self::names() })
    }

    /// Names that [`ModelShape::preset`] takes.
    pub fn names() -> Vec<&'static str> {
        presets::NAMES.to_vec()
    }

    /// The same model with weights of `bytes` each, such as 1.0 for FP8.
    #[must_use]
    pub fn with_bytes_per_weight(self, bytes: f64) -> Self {
        Self { bytes_per_weight: bytes, ..self }
    }

    /// The same model with KV numbers of `bytes` each, such as 4.0 for an f32 engine.
    #[must_use]
    pub fn with_kv_dtype_bytes(self, bytes: f64) -> Self {
        Self { kv_dtype_bytes: bytes, ..self }
    }

    /// Parameters, as counted in the file or as derived from the sizes.
    pub fn params(&self) -> u64 {
        self.counted_params.unwrap_or_else(|| self.derived_params())
    }

    /// Parameters that the sizes give.
    pub fn derived_params(&self) -> u64 {
        let sparse = u64::from(self.sparse_layers());
        let dense = u64::from(self.layers) - sparse;
        self.params_outside_feed_forward()
            + dense * self.dense_ffn_params()
            + sparse * (self.router_params() + self.shared_params() + self.all_experts_params())
    }

    /// Parameters that one token computes with: all of a dense model, the chosen experts of a sparse one.
    pub fn active_params(&self) -> u64 {
        self.params().saturating_sub(self.unused_expert_params())
    }

    /// Parameters of one expert of one layer; 0 for a dense model.
    pub fn expert_params(&self) -> u64 {
        self.experts.map_or(0, |experts| 3 * u64::from(self.hidden) * u64::from(experts.width))
    }

    /// Layers with experts.
    pub fn sparse_layers(&self) -> u32 {
        self.experts.map_or(0, |experts| self.layers.saturating_sub(experts.dense_layers))
    }

    /// Bytes of the weights in memory.
    pub fn weight_bytes(&self) -> f64 {
        self.params() as f64 * self.bytes_per_weight
    }

    /// Arithmetic per computed token without attention: `2 P`, `P` being the active parameters (Kaplan et al., 2020, table 1).
    pub fn flops_per_token(&self) -> f64 {
        2.0 * self.active_params() as f64
    }

    /// Arithmetic per pair of new token and context token: `4 L d`, of which half is `Q K^T` and half the weighted values.
    pub fn flops_per_attended(&self) -> f64 {
        let per_layer = match self.attention {
            Attention::Grouped { heads, head_dim, .. } => 4 * u64::from(heads) * u64::from(head_dim),
            Attention::Latent { heads, rope_dim, nope_dim, value_dim, .. } => {
                2 * u64::from(heads) * (u64::from(rope_dim) + u64::from(nope_dim) + u64::from(value_dim))
            }
        };
        (u64::from(self.layers) * per_layer) as f64
    }

    /// Arithmetic of `new` tokens whose context is `context` tokens long at the end, themselves included.
    pub fn flops(&self, new: f64, context: f64) -> f64 {
        self.flops_per_token() * new + self.flops_per_attended() * new * context
    }

    /// Numbers that one token keeps in KV, over all layers.
    pub fn kv_elements_per_token(&self) -> u64 {
        let per_layer = match self.attention {
            Attention::Grouped { kv_heads, head_dim, .. } => 2 * u64::from(kv_heads) * u64::from(head_dim),
            Attention::Latent { kv_rank, rope_dim, .. } => u64::from(kv_rank) + u64::from(rope_dim),
        };
        u64::from(self.layers) * per_layer
    }

    /// Bytes of KV per token, in numbers of `dtype_bytes` each (2 for fp16; may be a fraction for quantised KV).
    pub fn kv_bytes_per_token(&self, dtype_bytes: f64) -> f64 {
        self.kv_elements_per_token() as f64 * dtype_bytes
    }

    /// Bytes of the KV of `tokens`, in the model's own KV numbers.
    pub fn kv_bytes(&self, tokens: Tokens) -> f64 {
        self.kv_bytes_per_token(self.kv_dtype_bytes) * tokens.as_f64()
    }

    /// Small all-reduces per decoded token when layers are split over devices: one after attention, one after the
    /// feed-forward (Shoeybi et al., Megatron-LM, 2019).
    pub fn all_reduces_per_token(&self) -> u32 {
        2 * self.layers
    }

    /// Inputs and outputs of each projection of a layer's attention.
    pub fn attention_projections(&self) -> Vec<(u64, u64)> {
        let hidden = u64::from(self.hidden);
        match self.attention {
            Attention::Grouped { heads, kv_heads, head_dim, .. } => {
                let (q, kv) = (u64::from(heads) * u64::from(head_dim), u64::from(kv_heads) * u64::from(head_dim));
                vec![(hidden, q), (hidden, kv), (hidden, kv), (q, hidden)]
            }
            Attention::Latent { heads, q_rank, kv_rank, rope_dim, nope_dim, value_dim } => {
                let (heads, kv_rank) = (u64::from(heads), u64::from(kv_rank));
                let (rope, nope, value) = (u64::from(rope_dim), u64::from(nope_dim), u64::from(value_dim));
                let q = heads * (rope + nope);
                let queries = q_rank.map_or(vec![(hidden, q)], |rank| vec![(hidden, rank.into()), (rank.into(), q)]);
                let keys_and_values = [(hidden, kv_rank + rope), (kv_rank, heads * (nope + value)), (heads * value, hidden)];
                queries.into_iter().chain(keys_and_values).collect()
            }
        }
    }

    /// Refuses sizes that no model has, so that no product of them overflows.
    fn checked(self) -> Result<Self, ShapeError> {
        let (q, kv, q_rank) = match self.attention {
            Attention::Grouped { heads, kv_heads, head_dim, .. } => ((heads, head_dim), (kv_heads, head_dim), 0),
            Attention::Latent { heads, q_rank, kv_rank, rope_dim, nope_dim, value_dim } => {
                ((heads, rope_dim.saturating_add(nope_dim).saturating_add(value_dim)), (kv_rank, rope_dim), q_rank.unwrap_or(0))
            }
        };
        let product = |(a, b): (u32, u32)| u64::from(a) * u64::from(b);
        let experts = self.experts.unwrap_or(Experts { count: 1, per_token: 1, width: 1, shared_width: 0, dense_layers: 0 });
        for (size, value, limit) in [
            ("the number of layers", self.layers.into(), 1 << 12),
            ("hidden size", self.hidden.into(), 1 << 18),
            ("vocabulary size", self.vocab.into(), 1 << 26),
            ("feed-forward width", self.ffn_width.into(), 1 << 18),
            ("heads times head dimension", product(q), 1 << 22),
            ("KV heads times head dimension", product(kv), 1 << 22),
            ("the number of experts", experts.count.into(), 1 << 13),
            ("shared expert width", experts.shared_width.max(1).into(), 1 << 20),
            ("query rank", q_rank.max(1).into(), 1 << 18),
            ("expert width", experts.width.into(), 1 << 18),
        ] {
            if !(1..=limit).contains(&value) {
                return Err(ShapeError::Size { size, value, limit });
            }
        }
        if !(1..=experts.count).contains(&experts.per_token) {
            return Err(ShapeError::Experts { per_token: experts.per_token, count: experts.count });
        }
        Ok(self)
    }

    fn params_outside_feed_forward(&self) -> u64 {
        let (layers, hidden) = (u64::from(self.layers), u64::from(self.hidden));
        let embeddings = u64::from(self.vocab) * hidden * if self.tied_embeddings { 1 } else { 2 };
        embeddings + hidden + layers * (self.attention_params() + 2 * hidden)
    }

    fn attention_params(&self) -> u64 {
        let projections: u64 = self.attention_projections().iter().map(|(inputs, outputs)| inputs * outputs).sum();
        let vectors = match self.attention {
            Attention::Grouped { heads, kv_heads, head_dim, qkv_bias, qk_norm } => {
                let biases = if qkv_bias { u64::from(heads) + 2 * u64::from(kv_heads) } else { 0 };
                let norms = if qk_norm { 2 } else { 0 };
                (biases + norms) * u64::from(head_dim)
            }
            Attention::Latent { q_rank, kv_rank, .. } => u64::from(q_rank.unwrap_or(0)) + u64::from(kv_rank),
        };
        projections + vectors
    }

    fn dense_ffn_params(&self) -> u64 {
        3 * u64::from(self.hidden) * u64::from(self.ffn_width)
    }

    fn router_params(&self) -> u64 {
        self.experts.map_or(0, |experts| u64::from(self.hidden) * u64::from(experts.count))
    }

    fn shared_params(&self) -> u64 {
        self.experts.map_or(0, |experts| 3 * u64::from(self.hidden) * u64::from(experts.shared_width))
    }

    fn all_experts_params(&self) -> u64 {
        self.experts.map_or(0, |experts| u64::from(experts.count) * self.expert_params())
    }

    fn unused_expert_params(&self) -> u64 {
        let unused = self.experts.map_or(0, |experts| experts.count.saturating_sub(experts.per_token));
        u64::from(self.sparse_layers()) * u64::from(unused) * self.expert_params()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parameters that the authors publish, or that their weight files hold.
    const PUBLISHED: [(&str, u64, u64); 11] = [
        ("llama-2-7b", 6_738_415_616, 6_738_415_616),
        ("llama-2-7b-gqa8", 6_738_415_616, 6_738_415_616),
        ("llama-3-8b", 8_030_261_248, 8_030_261_248),
        ("llama-3-70b", 70_553_706_496, 70_553_706_496),
        ("qwen3-0.6b", 596_049_920, 596_049_920),
        ("qwen3-8b", 8_190_735_360, 8_190_735_360),
        ("qwen3-32b", 32_762_123_264, 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624, 3_350_000_000),
        ("qwen3-235b-a22b", 235_093_634_560, 22_190_000_000),
        ("mixtral-8x7b", 46_702_792_704, 12_880_000_000),
        ("smollm2-135m", 134_515_008, 134_515_008),
    ];

    #[test]
    fn parameters_follow_from_the_sizes() {
        for (name, published, active) in PUBLISHED {
            let shape = ModelShape::preset(name).unwrap();
            let (params, derived_active) = (shape.params(), shape.active_params());
            assert!(close(params, published), "{name}: {params}, published {published}");
            assert!(close(derived_active, active), "{name}: {derived_active} active, published {active}");
        }
    }

    #[test]
    fn deepseek_v3_has_671_billion_parameters_and_uses_37() {
        let shape = ModelShape::preset("deepseek-v3").unwrap();
        assert!(close(shape.params(), 671_000_000_000), "{}", shape.params());
        // The published 37 B leave out the input embedding's 0.93 B.
        assert!(close(shape.active_params(), 37_500_000_000), "{}", shape.active_params());
    }

    #[test]
    fn every_name_listed_is_a_preset_that_keeps_kv() {
        for name in ModelShape::names() {
            assert!(ModelShape::preset(name).unwrap().kv_elements_per_token() > 0, "{name}");
        }
    }

    #[test]
    fn latent_kv_is_one_latent_and_one_rotary_key_per_layer() {
        let shape = ModelShape::preset("deepseek-v3").unwrap();
        assert_eq!(shape.kv_elements_per_token(), 61 * (512 + 64));
    }

    fn close(got: u64, want: u64) -> bool {
        (got as f64 - want as f64).abs() < 0.01 * want as f64
    }
}
