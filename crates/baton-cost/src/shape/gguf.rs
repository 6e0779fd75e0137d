//! Shapes from the header of a GGUF file.

use baton_gguf::{GgufError, Header};

use super::ShapeError;
use crate::{Attention, Experts, ModelShape};

/// Architectures whose metadata are understood, by `general.architecture`. Mixtral files call themselves `llama`.
const ARCHITECTURES: [&str; 5] = ["llama", "qwen2", "qwen3", "qwen3moe", "deepseek2"];

impl ModelShape {
    /// The shape that a GGUF header describes: architectures llama (with Mistral and Mixtral), qwen2, qwen3, qwen3moe and deepseek2.
    ///
    /// Parameters and bytes per weight are counted from the tensors, so quantised weights are priced at what they take.
    pub fn from_gguf(header: &Header) -> Result<Self, ShapeError> {
        let architecture = header.str("general.architecture")?;
        if !ARCHITECTURES.contains(&architecture) {
            return Err(ShapeError::Family { family: architecture.to_owned(), known: ARCHITECTURES.join(", ") });
        }
        let keys = Keys { header, architecture };
        let params: u64 = header.tensors.iter().map(|tensor| tensor.shape.iter().product::<u64>()).fold(0, u64::saturating_add);
        let bytes: u64 = header.tensors.iter().map(baton_gguf::TensorInfo::byte_len).fold(0, u64::saturating_add);
        if params == 0 {
            return Err(ShapeError::Missing { field: "tensors" });
        }
        let shape = Self {
            name: header.str("general.name").unwrap_or(architecture).to_owned(),
            layers: keys.need("block_count")?,
            hidden: keys.need("embedding_length")?,
            vocab: vocab(header)?,
            ffn_width: keys.need("feed_forward_length")?,
            tied_embeddings: header.tensor("output.weight").is_none(),
            attention: keys.attention()?,
            experts: keys.experts()?,
            max_context: keys.get("context_length")?.unwrap_or(0),
            bytes_per_weight: bytes as f64 / params as f64,
            kv_dtype_bytes: 2.0,
            counted_params: Some(params),
        };
        shape.checked()
    }
}

/// Metadata under `{architecture}.`.
struct Keys<'a> {
    header: &'a Header,
    architecture: &'a str,
}

impl Keys<'_> {
    fn need(&self, name: &str) -> Result<u32, ShapeError> {
        let key = format!("{}.{name}", self.architecture);
        let value = self.header.u64(&key)?;
        u32::try_from(value).map_err(|_| ShapeError::Number { key, value })
    }

    fn get(&self, name: &str) -> Result<Option<u32>, ShapeError> {
        match self.need(name) {
            Ok(value) => Ok(Some(value)),
            Err(ShapeError::Gguf(GgufError::Missing { .. })) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn attention(&self) -> Result<Attention, ShapeError> {
        let heads = self.need("attention.head_count")?;
        if let Some(kv_rank) = self.get("attention.kv_lora_rank")? {
            return self.latent(heads, kv_rank);
        }
        let kv_heads = self.get("attention.head_count_kv")?.unwrap_or(heads);
        let head_dim = match self.get("attention.key_length")? {
            Some(head_dim) => head_dim,
            None => self.need("embedding_length")? / heads.max(1),
        };
        let has = |name| self.header.tensor(name).is_some();
        Ok(Attention::Grouped { heads, kv_heads, head_dim, qkv_bias: has("blk.0.attn_q.bias"), qk_norm: has("blk.0.attn_q_norm.weight") })
    }

    fn latent(&self, heads: u32, kv_rank: u32) -> Result<Attention, ShapeError> {
        let rope_dim = self.need("rope.dimension_count")?;
        // Files for latent attention put a head's own lengths under `_mla`; older ones have them in the plain keys.
        let length = |name: &str| match self.get(&format!("attention.{name}_mla"))? {
            Some(length) => Ok(length),
            None => self.need(&format!("attention.{name}")),
        };
        let nope_dim = length("key_length")?.saturating_sub(rope_dim);
        let q_rank = self.get("attention.q_lora_rank")?.filter(|&rank| rank > 0);
        Ok(Attention::Latent { heads, q_rank, kv_rank, rope_dim, nope_dim, value_dim: length("value_length")? })
    }

    fn experts(&self) -> Result<Option<Experts>, ShapeError> {
        let count = self.get("expert_count")?.unwrap_or(0);
        if count == 0 {
            return Ok(None);
        }
        let width = match self.get("expert_feed_forward_length")? {
            Some(width) => width,
            None => self.need("feed_forward_length")?,
        };
        let shared = self.get("expert_shared_count")?.unwrap_or(0);
        Ok(Some(Experts {
            count,
            per_token: self.need("expert_used_count")?,
            width,
            shared_width: shared.saturating_mul(width),
            dense_layers: self.get("leading_dense_block_count")?.unwrap_or(0),
        }))
    }
}

fn vocab(header: &Header) -> Result<u32, ShapeError> {
    let embedding = header.tensor("token_embd.weight").ok_or(ShapeError::Missing { field: "token_embd.weight" })?;
    let value = embedding.shape.get(1).copied().unwrap_or(0);
    u32::try_from(value).map_err(|_| ShapeError::Number { key: "rows of token_embd.weight".to_owned(), value })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use baton_gguf::{TensorInfo, TensorKind, Value};

    use super::*;

    /// A header of a dense model with every tensor that llama.cpp writes.
    fn dense(architecture: &str, preset: &str, kind: TensorKind) -> Header {
        let shape = ModelShape::preset(preset).unwrap();
        let Attention::Grouped { heads, kv_heads, head_dim, qk_norm, .. } = shape.attention else { panic!("a dense preset") };
        let (hidden, ffn, vocab) = (u64::from(shape.hidden), u64::from(shape.ffn_width), u64::from(shape.vocab));
        let (q, kv) = (u64::from(heads * head_dim), u64::from(kv_heads * head_dim));
        let mut tensors =
            vec![tensor("token_embd.weight", &[hidden, vocab], kind), tensor("output_norm.weight", &[hidden], TensorKind::F32)];
        if !shape.tied_embeddings {
            tensors.push(tensor("output.weight", &[hidden, vocab], kind));
        }
        for layer in 0..shape.layers {
            let mut add = |name: &str, shape: &[u64], kind| tensors.push(tensor(&format!("blk.{layer}.{name}"), shape, kind));
            add("attn_q.weight", &[hidden, q], kind);
            add("attn_k.weight", &[hidden, kv], kind);
            add("attn_v.weight", &[hidden, kv], kind);
            add("attn_output.weight", &[q, hidden], kind);
            for name in ["ffn_gate.weight", "ffn_up.weight"] {
                add(name, &[hidden, ffn], kind);
            }
            add("ffn_down.weight", &[ffn, hidden], kind);
            for name in ["attn_norm.weight", "ffn_norm.weight"] {
                add(name, &[hidden], TensorKind::F32);
            }
            if qk_norm {
                for name in ["attn_q_norm.weight", "attn_k_norm.weight"] {
                    add(name, &[u64::from(head_dim)], TensorKind::F32);
                }
            }
        }
        let number = |name: &str, value| (format!("{architecture}.{name}"), Value::U32(value));
        let metadata: BTreeMap<String, Value> = [
            ("general.architecture".to_owned(), Value::String(architecture.to_owned())),
            ("general.name".to_owned(), Value::String(preset.to_owned())),
            number("block_count", shape.layers),
            number("embedding_length", shape.hidden),
            number("feed_forward_length", shape.ffn_width),
            number("attention.head_count", heads),
            number("attention.head_count_kv", kv_heads),
            number("attention.key_length", head_dim),
            number("context_length", shape.max_context),
        ]
        .into();
        Header { version: 3, metadata, tensors, data_offset: 0 }
    }

    fn tensor(name: &str, shape: &[u64], kind: TensorKind) -> TensorInfo {
        TensorInfo { name: name.to_owned(), shape: shape.to_vec(), kind, offset: 0 }
    }

    #[test]
    fn a_header_gives_the_preset_and_counts_its_parameters() {
        for (architecture, preset) in [("llama", "llama-3-8b"), ("llama", "smollm2-135m"), ("qwen3", "qwen3-0.6b")] {
            let read = ModelShape::from_gguf(&dense(architecture, preset, TensorKind::BF16)).unwrap();
            let want = ModelShape::preset(preset).unwrap();
            assert_eq!(read.params(), want.derived_params(), "{preset}");
            assert!((read.bytes_per_weight - 2.0).abs() < 0.001, "{preset}: {}", read.bytes_per_weight);
            let normalised = ModelShape { bytes_per_weight: 2.0, counted_params: None, ..read };
            assert_eq!(normalised, want, "{preset}");
        }
    }

    #[test]
    fn quantised_weights_are_priced_at_what_they_take() {
        let read = ModelShape::from_gguf(&dense("llama", "smollm2-135m", TensorKind::Q4_1)).unwrap();
        // 20 bytes for 32 values.
        assert!((read.bytes_per_weight - 0.625).abs() < 0.001, "{}", read.bytes_per_weight);
    }

    #[test]
    fn latent_attention_and_experts_are_read() {
        let mut header = dense("llama", "smollm2-135m", TensorKind::BF16);
        header.metadata = [
            ("block_count", 61),
            ("embedding_length", 7168),
            ("feed_forward_length", 18432),
            ("attention.head_count", 128),
            ("attention.head_count_kv", 1),
            ("attention.key_length", 576),
            ("attention.value_length", 512),
            ("attention.key_length_mla", 192),
            ("attention.value_length_mla", 128),
            ("attention.q_lora_rank", 1536),
            ("attention.kv_lora_rank", 512),
            ("rope.dimension_count", 64),
            ("expert_count", 256),
            ("expert_used_count", 8),
            ("expert_shared_count", 1),
            ("expert_feed_forward_length", 2048),
            ("leading_dense_block_count", 3),
        ]
        .map(|(name, value)| (format!("deepseek2.{name}"), Value::U32(value)))
        .into();
        header.metadata.insert("general.architecture".to_owned(), Value::String("deepseek2".to_owned()));
        let read = ModelShape::from_gguf(&header).unwrap();
        let want = ModelShape::preset("deepseek-v3").unwrap();
        assert_eq!((read.attention, read.experts), (want.attention, want.experts));
    }

    #[test]
    fn what_is_missing_or_unknown_is_named() {
        let mut header = dense("llama", "smollm2-135m", TensorKind::BF16);
        header.metadata.remove("llama.block_count");
        assert_eq!(
            ModelShape::from_gguf(&header).unwrap_err().to_string(),
            "metadata has no \"llama.block_count\"; the file is not a complete model"
        );
        header.metadata.insert("general.architecture".to_owned(), Value::String("rwkv7".to_owned()));
        assert_eq!(
            ModelShape::from_gguf(&header).unwrap_err().to_string(),
            "model type \"rwkv7\" is not supported; supported are llama, qwen2, qwen3, qwen3moe, deepseek2"
        );
    }
}
