//! Well-known models, by the sizes in the configuration files that their authors publish.

use crate::{Attention, Experts, ModelShape};

pub(super) const NAMES: [&str; 12] = [
    "llama-2-7b",
    "llama-2-7b-gqa8",
    "llama-3-8b",
    "llama-3-70b",
    "qwen3-0.6b",
    "qwen3-8b",
    "qwen3-32b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "mixtral-8x7b",
    "deepseek-v3",
    "smollm2-135m",
];

pub(super) fn find(name: &str) -> Option<ModelShape> {
    let shape = match name {
        "llama-2-7b" => dense(32, 4096, 11008, 32000, llama(32, 32, 128), 4096),
        // Eight KV heads at the parameters of the original: what K and V lose, the feed-forward gains, as in the
        // grouped-query ablation of the Llama 2 paper (A.2.1). 2 x 4096 x 3072 = 3 x 4096 x 2048.
        "llama-2-7b-gqa8" => dense(32, 4096, 11008 + 2048, 32000, llama(32, 8, 128), 4096),
        "llama-3-8b" => dense(32, 4096, 14336, 128_256, llama(32, 8, 128), 8192),
        "llama-3-70b" => dense(80, 8192, 28672, 128_256, llama(64, 8, 128), 8192),
        "qwen3-0.6b" => ModelShape { tied_embeddings: true, ..dense(28, 1024, 3072, 151_936, qwen3(16, 8, 128), 40960) },
        "qwen3-8b" => dense(36, 4096, 12288, 151_936, qwen3(32, 8, 128), 40960),
        "qwen3-32b" => dense(64, 5120, 25600, 151_936, qwen3(64, 8, 128), 40960),
        "qwen3-30b-a3b" => ModelShape { experts: Some(experts(128, 8, 768)), ..dense(48, 2048, 6144, 151_936, qwen3(32, 4, 128), 40960) },
        "qwen3-235b-a22b" => {
            ModelShape { experts: Some(experts(128, 8, 1536)), ..dense(94, 4096, 12288, 151_936, qwen3(64, 4, 128), 40960) }
        }
        "mixtral-8x7b" => ModelShape { experts: Some(experts(8, 2, 14336)), ..dense(32, 4096, 14336, 32000, llama(32, 8, 128), 32768) },
        "deepseek-v3" => ModelShape {
            experts: Some(Experts { shared_width: 2048, dense_layers: 3, ..experts(256, 8, 2048) }),
            ..dense(61, 7168, 18432, 129_280, deepseek_v3(), 163_840)
        },
        "smollm2-135m" => ModelShape { tied_embeddings: true, ..dense(30, 576, 1536, 49152, llama(9, 3, 64), 8192) },
        _ => return None,
    };
    Some(ModelShape { name: name.to_owned(), ..shape })
}

fn dense(layers: u32, hidden: u32, ffn_width: u32, vocab: u32, attention: Attention, max_context: u32) -> ModelShape {
    ModelShape {
        name: String::new(),
        layers,
        hidden,
        vocab,
        ffn_width,
        tied_embeddings: false,
        attention,
        experts: None,
        max_context,
        bytes_per_weight: 2.0,
        kv_dtype_bytes: 2.0,
        counted_params: None,
    }
}

fn llama(heads: u32, kv_heads: u32, head_dim: u32) -> Attention {
    Attention::Grouped { heads, kv_heads, head_dim, qkv_bias: false, qk_norm: false }
}

fn qwen3(heads: u32, kv_heads: u32, head_dim: u32) -> Attention {
    Attention::Grouped { heads, kv_heads, head_dim, qkv_bias: false, qk_norm: true }
}

fn deepseek_v3() -> Attention {
    Attention::Latent { heads: 128, q_rank: Some(1536), kv_rank: 512, rope_dim: 64, nope_dim: 128, value_dim: 128 }
}

fn experts(count: u32, per_token: u32, width: u32) -> Experts {
    Experts { count, per_token, width, shared_width: 0, dense_layers: 0 }
}
