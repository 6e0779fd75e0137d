//! Small models of random weights, written as GGUF or in the layout of Hugging Face.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use baton_gguf::TensorKind;
use fastrand::Rng;
use half::{bf16, f16};
use safetensors::tensor::{Dtype, TensorView};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    Llama,
    Qwen2,
    Qwen3,
}

impl Family {
    pub(crate) const ALL: [Self; 3] = [Self::Llama, Self::Qwen2, Self::Qwen3];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }
}

pub(crate) const HIDDEN: usize = 256;
pub(crate) const FFN: usize = 256;
pub(crate) const LAYERS: usize = 2;
/// Five query heads share a KV head: a tile of four and one.
pub(crate) const HEADS: usize = 10;
pub(crate) const KV_HEADS: usize = 2;
/// Three vectors.
pub(crate) const HEAD_DIM: usize = 48;
pub(crate) const VOCAB: usize = 250;
pub(crate) const CONTEXT: usize = 300;
pub(crate) const ROPE_BASE: f64 = 10_000.0;
pub(crate) const EPS: f64 = 1e-5;

/// `[rows][columns]` as in a file; names are GGUF's, rows of Q and K in the order of Hugging Face.
#[derive(Clone, Debug)]
pub(crate) struct Weights {
    pub(crate) kind: TensorKind,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) bytes: Vec<u8>,
}

pub(crate) struct Tiny {
    pub(crate) family: Family,
    pub(crate) context: usize,
    pub(crate) tensors: BTreeMap<String, Weights>,
}

impl Tiny {
    pub(crate) fn new(family: Family, kind: TensorKind, seed: u64) -> Self {
        let mut tiny = Self { family, context: CONTEXT, tensors: BTreeMap::new() };
        let mut rng = Rng::with_seed(seed);
        tiny.matrix("token_embd.weight", kind, VOCAB, HIDDEN, &mut rng);
        tiny.vector("output_norm.weight", HIDDEN, 1.0, &mut rng);
        if family != Family::Llama {
            tiny.matrix("output.weight", kind, VOCAB, HIDDEN, &mut rng);
        }
        for layer in 0..LAYERS {
            tiny.layer(&format!("blk.{layer}"), kind, &mut rng);
        }
        tiny
    }

    fn layer(&mut self, layer: &str, kind: TensorKind, rng: &mut Rng) {
        for (name, rows, columns) in [
            ("attn_q", HEADS * HEAD_DIM, HIDDEN),
            ("attn_k", KV_HEADS * HEAD_DIM, HIDDEN),
            ("attn_v", KV_HEADS * HEAD_DIM, HIDDEN),
            ("attn_output", HIDDEN, HEADS * HEAD_DIM),
            ("ffn_gate", FFN, HIDDEN),
            ("ffn_up", FFN, HIDDEN),
            ("ffn_down", HIDDEN, FFN),
        ] {
            self.matrix(&format!("{layer}.{name}.weight"), kind, rows, columns, rng);
        }
        for norm in ["attn_norm", "ffn_norm"] {
            self.vector(&format!("{layer}.{norm}.weight"), HIDDEN, 1.0, rng);
        }
        for (name, heads) in [("attn_q", HEADS), ("attn_k", KV_HEADS), ("attn_v", KV_HEADS)] {
            if self.family == Family::Qwen2 {
                self.vector(&format!("{layer}.{name}.bias"), heads * HEAD_DIM, 0.0, rng);
            }
            if self.family == Family::Qwen3 && name != "attn_v" {
                self.vector(&format!("{layer}.{name}_norm.weight"), HEAD_DIM, 1.0, rng);
            }
        }
    }

    fn matrix(&mut self, name: &str, kind: TensorKind, rows: usize, columns: usize, rng: &mut Rng) {
        // As in real files: what does not divide into blocks is kept in a plainer type.
        let kind = if columns.is_multiple_of(kind.block_len()) { kind } else { TensorKind::F16 };
        let bytes = random_blocks(kind, rows * columns, rng);
        self.tensors.insert(name.to_owned(), Weights { kind, rows, columns, bytes });
    }

    fn vector(&mut self, name: &str, columns: usize, centre: f32, rng: &mut Rng) {
        let bytes = (0..columns).flat_map(|_| (centre + (rng.f32() - 0.5) * 0.4).to_le_bytes()).collect();
        self.tensors.insert(name.to_owned(), Weights { kind: TensorKind::F32, rows: 1, columns, bytes });
    }

    /// The GGUF file.
    pub(crate) fn to_gguf(&self) -> Vec<u8> {
        let family = self.family.name();
        let mut out = b"GGUF\x03\0\0\0".to_vec();
        let mut metadata: Vec<Vec<u8>> = vec![text("general.architecture", family)];
        for (key, value) in [
            ("block_count", LAYERS),
            ("context_length", self.context),
            ("embedding_length", HIDDEN),
            ("feed_forward_length", FFN),
            ("attention.head_count", HEADS),
            ("attention.head_count_kv", KV_HEADS),
            ("attention.key_length", HEAD_DIM),
            ("attention.value_length", HEAD_DIM),
        ] {
            metadata.push(number(&format!("{family}.{key}"), 4, &(value as u32).to_le_bytes()));
        }
        metadata.push(number(&format!("{family}.attention.layer_norm_rms_epsilon"), 6, &(EPS as f32).to_le_bytes()));
        metadata.push(number(&format!("{family}.rope.freq_base"), 6, &(ROPE_BASE as f32).to_le_bytes()));
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((metadata.len() as u64).to_le_bytes());
        out.extend(metadata.concat());
        let mut data = Vec::new();
        for (name, weights) in &self.tensors {
            string(&mut out, name);
            let shape = if weights.rows == 1 { vec![weights.columns] } else { vec![weights.columns, weights.rows] };
            out.extend((shape.len() as u32).to_le_bytes());
            for size in shape {
                out.extend((size as u64).to_le_bytes());
            }
            out.extend(weights.kind.id().to_le_bytes());
            out.extend((data.len() as u64).to_le_bytes());
            data.extend(self.in_gguf_order(name, weights));
            data.resize(data.len().next_multiple_of(32), 0);
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(data);
        out
    }

    /// What `convert_hf_to_gguf.py` does to the rows of Q and K of Llama: pairs (i, i + half) become (2i, 2i + 1).
    fn in_gguf_order(&self, name: &str, weights: &Weights) -> Vec<u8> {
        let rotary = self.family == Family::Llama && (name.contains("attn_q.") || name.contains("attn_k."));
        if !rotary {
            return weights.bytes.clone();
        }
        let row_bytes = weights.bytes.len() / weights.rows;
        let from = |row: usize| row / HEAD_DIM * HEAD_DIM + row % 2 * (HEAD_DIM / 2) + row % HEAD_DIM / 2;
        (0..weights.rows).flat_map(|row| &weights.bytes[from(row) * row_bytes..][..row_bytes]).copied().collect()
    }

    /// Writes `config.json` and safetensors in `shards` files.
    pub(crate) fn write_hugging_face(&self, folder: &Path, shards: usize) {
        std::fs::create_dir_all(folder).unwrap();
        std::fs::write(folder.join("config.json"), self.config().to_string()).unwrap();
        let mut files: Vec<Vec<(String, &Weights)>> = vec![Vec::new(); shards];
        for (index, (name, weights)) in self.tensors.iter().enumerate() {
            files[index % shards].push((hugging_face_name(name), weights));
        }
        let mut map = serde_json::Map::new();
        for (index, tensors) in files.into_iter().enumerate() {
            let file = if shards == 1 { "model.safetensors".to_owned() } else { format!("model-{index}.safetensors") };
            for (name, _) in &tensors {
                map.insert(name.clone(), file.clone().into());
            }
            let views = tensors.iter().map(|(name, weights)| (name.clone(), view(weights)));
            std::fs::write(folder.join(file), safetensors::serialize(views, None).unwrap()).unwrap();
        }
        if shards > 1 {
            std::fs::write(folder.join("model.safetensors.index.json"), serde_json::json!({ "weight_map": map }).to_string()).unwrap();
        }
    }

    pub(crate) fn config(&self) -> serde_json::Value {
        serde_json::json!({
            "model_type": self.family.name(), "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": VOCAB,
            "max_position_embeddings": self.context, "rms_norm_eps": EPS, "rope_theta": ROPE_BASE, "hidden_act": "silu",
            "tie_word_embeddings": !self.tensors.contains_key("output.weight"),
        })
    }
}

fn view(weights: &Weights) -> TensorView<'_> {
    let plain = [(TensorKind::F32, Dtype::F32), (TensorKind::F16, Dtype::F16), (TensorKind::BF16, Dtype::BF16)];
    let (_, dtype) = plain.into_iter().find(|&(kind, _)| kind == weights.kind).expect("safetensors have no quantised types");
    let shape = if weights.rows == 1 { vec![weights.columns] } else { vec![weights.rows, weights.columns] };
    TensorView::new(dtype, shape, &weights.bytes).unwrap()
}

fn hugging_face_name(name: &str) -> String {
    let parts: Vec<&str> = name.split('.').collect();
    match parts.as_slice() {
        ["token_embd", _] => "model.embed_tokens.weight".to_owned(),
        ["output_norm", _] => "model.norm.weight".to_owned(),
        ["output", _] => "lm_head.weight".to_owned(),
        [_, layer, part, end] => {
            let part = match *part {
                "attn_norm" => "input_layernorm",
                "ffn_norm" => "post_attention_layernorm",
                "attn_q" => "self_attn.q_proj",
                "attn_k" => "self_attn.k_proj",
                "attn_v" => "self_attn.v_proj",
                "attn_q_norm" => "self_attn.q_norm",
                "attn_k_norm" => "self_attn.k_norm",
                "attn_output" => "self_attn.o_proj",
                "ffn_gate" => "mlp.gate_proj",
                "ffn_up" => "mlp.up_proj",
                "ffn_down" => "mlp.down_proj",
                other => panic!("{other} is no part of a layer"),
            };
            format!("model.layers.{layer}.{part}.{end}")
        }
        _ => panic!("{name} is no tensor"),
    }
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn number(key: &str, kind: u32, bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    string(&mut out, key);
    out.extend(kind.to_le_bytes());
    out.extend(bytes);
    out
}

fn text(key: &str, value: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    string(&mut bytes, value);
    number(key, 8, &bytes)
}

/// Random values of a sensible size, as blocks of `kind`.
pub(crate) fn random_blocks(kind: TensorKind, count: usize, rng: &mut Rng) -> Vec<u8> {
    let size = 0.1;
    let mut float = || (rng.f32() * 2.0 - 1.0) * size;
    // Half floats of each block and how large they make the values: a quant, or a quant times a scale.
    let halves: &[(usize, f32)] = match kind {
        TensorKind::F32 => return (0..count).flat_map(|_| float().to_le_bytes()).collect(),
        TensorKind::F16 => return (0..count).flat_map(|_| f16::from_f32(float()).to_le_bytes()).collect(),
        TensorKind::BF16 => return (0..count).flat_map(|_| bf16::from_f32(float()).to_le_bytes()).collect(),
        TensorKind::Q4_0 | TensorKind::Q4_1 => &[(0, 8.0)],
        TensorKind::Q5_0 => &[(0, 16.0)],
        TensorKind::Q8_0 => &[(0, 128.0)],
        TensorKind::Q4_K => &[(0, 15.0 * 32.0), (2, 64.0)],
        TensorKind::Q6_K => &[(208, 32.0 * 64.0)],
    };
    let mut bytes = vec![0; count / kind.block_len() * kind.block_bytes()];
    rng.fill(&mut bytes);
    for block in bytes.chunks_exact_mut(kind.block_bytes()) {
        let mut put = |at: usize, value: f32| block[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
        let mut scale = 0.0;
        for &(at, largest) in halves {
            scale = size / largest * (0.5 + rng.f32());
            put(at, scale);
        }
        if kind == TensorKind::Q4_1 {
            put(2, -7.5 * scale);
        }
    }
    bytes
}

/// A folder that is removed at the end.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("baton-model-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file and gives its path.
    pub(crate) fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // A left-over folder in the system's temporary place harms nobody.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
