//! Shapes from a Hugging Face `config.json`.

use serde::Deserialize;

use super::ShapeError;
use crate::{Attention, Experts, ModelShape};

/// Families whose configuration is understood, by `model_type`.
const FAMILIES: [&str; 8] = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3"];

#[derive(Deserialize)]
struct Config {
    model_type: Option<String>,
    #[serde(rename = "_name_or_path")]
    name: Option<String>,
    num_hidden_layers: Option<u32>,
    hidden_size: Option<u32>,
    vocab_size: Option<u32>,
    intermediate_size: Option<u32>,
    num_attention_heads: Option<u32>,
    num_key_value_heads: Option<u32>,
    head_dim: Option<u32>,
    attention_bias: Option<bool>,
    tie_word_embeddings: Option<bool>,
    max_position_embeddings: Option<u32>,
    torch_dtype: Option<String>,
    /// What newer files call `torch_dtype`.
    dtype: Option<String>,
    #[serde(rename = "quantization_config")]
    quantization: Option<Quantization>,
    num_local_experts: Option<u32>,
    num_experts: Option<u32>,
    n_routed_experts: Option<u32>,
    num_experts_per_tok: Option<u32>,
    moe_intermediate_size: Option<u32>,
    n_shared_experts: Option<u32>,
    first_k_dense_replace: Option<u32>,
    mlp_only_layers: Option<Vec<u32>>,
    q_lora_rank: Option<u32>,
    kv_lora_rank: Option<u32>,
    qk_rope_head_dim: Option<u32>,
    qk_nope_head_dim: Option<u32>,
    v_head_dim: Option<u32>,
}

#[derive(Deserialize)]
struct Quantization {
    quant_method: Option<String>,
    bits: Option<f64>,
}

impl ModelShape {
    /// The shape that a Hugging Face `config.json` describes: Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, Mixtral, DeepSeek-V2 and V3.
    ///
    /// A sliding window is not modelled: KV is priced as if all of it were kept. Layers for multi-token prediction are left out.
    pub fn from_hf_config(json: &str) -> Result<Self, ShapeError> {
        let config: Config = serde_json::from_str(json).map_err(|error| ShapeError::Json { reason: error.to_string() })?;
        let family = config.model_type.clone().unwrap_or_default();
        if !FAMILIES.contains(&family.as_str()) {
            return Err(ShapeError::Family { family, known: FAMILIES.join(", ") });
        }
        let shape = Self {
            name: config.name.clone().filter(|name| !name.is_empty()).unwrap_or_else(|| family.clone()),
            layers: need(config.num_hidden_layers, "num_hidden_layers")?,
            hidden: need(config.hidden_size, "hidden_size")?,
            vocab: need(config.vocab_size, "vocab_size")?,
            ffn_width: need(config.intermediate_size, "intermediate_size")?,
            tied_embeddings: config.tie_word_embeddings.unwrap_or(false),
            attention: config.attention(&family)?,
            experts: config.experts(&family)?,
            max_context: config.max_position_embeddings.unwrap_or(0),
            bytes_per_weight: config.bytes_per_weight(),
            kv_dtype_bytes: config.dtype_bytes().max(2.0),
            counted_params: None,
        };
        shape.checked()
    }
}

impl Config {
    fn attention(&self, family: &str) -> Result<Attention, ShapeError> {
        let heads = need(self.num_attention_heads, "num_attention_heads")?;
        if family.starts_with("deepseek") {
            return Ok(Attention::Latent {
                heads,
                q_rank: self.q_lora_rank,
                kv_rank: need(self.kv_lora_rank, "kv_lora_rank")?,
                rope_dim: need(self.qk_rope_head_dim, "qk_rope_head_dim")?,
                nope_dim: need(self.qk_nope_head_dim, "qk_nope_head_dim")?,
                value_dim: need(self.v_head_dim, "v_head_dim")?,
            });
        }
        Ok(Attention::Grouped {
            heads,
            kv_heads: self.num_key_value_heads.unwrap_or(heads),
            head_dim: self.head_dim.unwrap_or(self.hidden_size.unwrap_or(0) / heads.max(1)),
            // Qwen2 has the bias by construction, without a field for it.
            qkv_bias: family == "qwen2" || self.attention_bias.unwrap_or(false),
            qk_norm: family.starts_with("qwen3"),
        })
    }

    fn experts(&self, family: &str) -> Result<Option<Experts>, ShapeError> {
        let (count, width, shared_width, dense_layers) = match family {
            "mixtral" => (need(self.num_local_experts, "num_local_experts")?, need(self.intermediate_size, "intermediate_size")?, 0, 0),
            "qwen3_moe" => {
                let dense = self.mlp_only_layers.as_ref().map_or(0, |layers| layers.len() as u32);
                (need(self.num_experts, "num_experts")?, need(self.moe_intermediate_size, "moe_intermediate_size")?, 0, dense)
            }
            "deepseek_v2" | "deepseek_v3" => {
                let width = need(self.moe_intermediate_size, "moe_intermediate_size")?;
                let shared = self.n_shared_experts.unwrap_or(0).saturating_mul(width);
                (need(self.n_routed_experts, "n_routed_experts")?, width, shared, self.first_k_dense_replace.unwrap_or(0))
            }
            _ => return Ok(None),
        };
        let per_token = need(self.num_experts_per_tok, "num_experts_per_tok")?;
        Ok(Some(Experts { count, per_token, width, shared_width, dense_layers }))
    }

    fn dtype_bytes(&self) -> f64 {
        match self.dtype.as_deref().or(self.torch_dtype.as_deref()) {
            Some("float32" | "torch.float32") => 4.0,
            _ => 2.0,
        }
    }

    fn bytes_per_weight(&self) -> f64 {
        let Some(quantization) = &self.quantization else { return self.dtype_bytes() };
        match (quantization.bits, quantization.quant_method.as_deref()) {
            (Some(bits), _) => bits / 8.0,
            (None, Some("fp8")) => 1.0,
            (None, _) => self.dtype_bytes(),
        }
    }
}

fn need(value: Option<u32>, field: &'static str) -> Result<u32, ShapeError> {
    value.ok_or(ShapeError::Missing { field })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The parts of published `config.json` files that decide the shape.
    const CONFIGS: [(&str, &str); 8] = [
        (
            "llama-2-7b",
            r#"{"model_type":"llama","hidden_size":4096,"intermediate_size":11008,"num_hidden_layers":32,"num_attention_heads":32,
                "num_key_value_heads":32,"vocab_size":32000,"max_position_embeddings":4096,"tie_word_embeddings":false,"torch_dtype":"float16"}"#,
        ),
        (
            "llama-3-8b",
            r#"{"model_type":"llama","hidden_size":4096,"intermediate_size":14336,"num_hidden_layers":32,"num_attention_heads":32,
                "num_key_value_heads":8,"vocab_size":128256,"max_position_embeddings":8192,"attention_bias":false,"torch_dtype":"bfloat16"}"#,
        ),
        (
            "smollm2-135m",
            r#"{"model_type":"llama","hidden_size":576,"intermediate_size":1536,"num_hidden_layers":30,"num_attention_heads":9,
                "num_key_value_heads":3,"vocab_size":49152,"max_position_embeddings":8192,"tie_word_embeddings":true,"torch_dtype":"bfloat16"}"#,
        ),
        (
            "qwen3-0.6b",
            r#"{"model_type":"qwen3","hidden_size":1024,"intermediate_size":3072,"num_hidden_layers":28,"num_attention_heads":16,
                "num_key_value_heads":8,"head_dim":128,"vocab_size":151936,"max_position_embeddings":40960,"tie_word_embeddings":true,
                "attention_bias":false,"dtype":"bfloat16"}"#,
        ),
        (
            "qwen3-30b-a3b",
            r#"{"model_type":"qwen3_moe","hidden_size":2048,"intermediate_size":6144,"moe_intermediate_size":768,"num_hidden_layers":48,
                "num_attention_heads":32,"num_key_value_heads":4,"head_dim":128,"num_experts":128,"num_experts_per_tok":8,
                "mlp_only_layers":[],"decoder_sparse_step":1,"vocab_size":151936,"max_position_embeddings":40960}"#,
        ),
        (
            "mixtral-8x7b",
            r#"{"model_type":"mixtral","hidden_size":4096,"intermediate_size":14336,"num_hidden_layers":32,"num_attention_heads":32,
                "num_key_value_heads":8,"num_local_experts":8,"num_experts_per_tok":2,"vocab_size":32000,"max_position_embeddings":32768,
                "sliding_window":null,"torch_dtype":"bfloat16"}"#,
        ),
        (
            "deepseek-v3",
            r#"{"model_type":"deepseek_v3","hidden_size":7168,"intermediate_size":18432,"moe_intermediate_size":2048,"num_hidden_layers":61,
                "num_attention_heads":128,"num_key_value_heads":128,"n_routed_experts":256,"n_shared_experts":1,"num_experts_per_tok":8,
                "first_k_dense_replace":3,"q_lora_rank":1536,"kv_lora_rank":512,"qk_rope_head_dim":64,"qk_nope_head_dim":128,"v_head_dim":128,
                "vocab_size":129280,"max_position_embeddings":163840,"torch_dtype":"bfloat16",
                "quantization_config":{"quant_method":"fp8","weight_block_size":[128,128]}}"#,
        ),
        (
            "qwen3-8b",
            r#"{"model_type":"qwen3","hidden_size":4096,"intermediate_size":12288,"num_hidden_layers":36,"num_attention_heads":32,
                "num_key_value_heads":8,"head_dim":128,"vocab_size":151936,"max_position_embeddings":40960,"tie_word_embeddings":false}"#,
        ),
    ];

    #[test]
    fn published_configurations_give_the_presets() {
        for (name, json) in CONFIGS {
            let preset = ModelShape::preset(name).unwrap();
            let bytes_per_weight = if name == "deepseek-v3" { 1.0 } else { 2.0 };
            let read = ModelShape { name: name.to_owned(), ..ModelShape::from_hf_config(json).unwrap() };
            assert_eq!(read, preset.with_bytes_per_weight(bytes_per_weight), "{name}");
        }
    }

    #[test]
    fn qwen2_has_biases_that_its_configuration_does_not_mention() {
        let json = r#"{"model_type":"qwen2","hidden_size":896,"intermediate_size":4864,"num_hidden_layers":24,"num_attention_heads":14,
            "num_key_value_heads":2,"vocab_size":151936,"tie_word_embeddings":true}"#;
        // Qwen2.5-0.5B as published.
        assert_eq!(ModelShape::from_hf_config(json).unwrap().params(), 494_032_768);
    }

    #[test]
    fn what_is_missing_unknown_or_absurd_is_named() {
        let error = |json: &str| ModelShape::from_hf_config(json).unwrap_err().to_string();
        assert_eq!(
            error(r#"{"model_type":"mamba"}"#),
            "model type \"mamba\" is not supported; supported are llama, mistral, qwen2, qwen3, qwen3_moe, mixtral, deepseek_v2, deepseek_v3"
        );
        assert_eq!(error(r#"{"model_type":"llama"}"#), "the model description has no \"num_hidden_layers\"; give the model's own file");
        let absurd = CONFIGS[0].1.replace("11008", "4000000000");
        assert_eq!(error(&absurd), "feed-forward width is 4000000000, expected 1 to 262144; give the model's own file");
        assert!(error("[").starts_with("the model description is not the JSON of a config.json: "));
    }
}
