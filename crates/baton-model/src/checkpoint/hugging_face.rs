use std::collections::BTreeSet;
use std::path::Path;

use baton_gguf::TensorKind;
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use serde_json::Value;

use super::{Checkpoint, Entry, LayerPart, Part, config_error, map};
use crate::ModelError;
use crate::architecture::{Architecture, RopeScaling};

/// The fields of `config.json` that decide the arithmetic (transformers' names).
#[derive(Deserialize)]
struct Config {
    model_type: String,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    vocab_size: usize,
    max_position_embeddings: usize,
    rms_norm_eps: f64,
    rope_theta: Option<f64>,
    rope_scaling: Option<Value>,
    /// The newer place of both fields above.
    rope_parameters: Option<Value>,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default)]
    tie_word_embeddings: bool,
    sliding_window: Option<usize>,
    use_sliding_window: Option<bool>,
    hidden_act: Option<String>,
}

pub(super) fn open(folder: &Path) -> Result<Checkpoint, ModelError> {
    let path = folder.join("config.json");
    if !path.is_file() {
        return Err(ModelError::NotAModel { path: folder.to_owned() });
    }
    let text = std::fs::read_to_string(&path).map_err(|source| ModelError::Io { path: path.clone(), source })?;
    let config: Config = serde_json::from_str(&text).map_err(|error| config_error(&path, error))?;
    let architecture = architecture(&config, &path)?;
    let (mut files, mut tensors) = (Vec::new(), Vec::new());
    for name in shards(folder)? {
        let path = folder.join(name);
        let file = map(&path)?;
        tensors.extend(entries(&path, &file, files.len())?);
        files.push(file);
    }
    Ok(Checkpoint { architecture, config: text, files, tensors, name_of: name })
}

/// The files that `model.safetensors.index.json` names, or the only one.
fn shards(folder: &Path) -> Result<BTreeSet<String>, ModelError> {
    let path = folder.join("model.safetensors.index.json");
    if !path.is_file() {
        return Ok(BTreeSet::from(["model.safetensors".to_owned()]));
    }
    let text = std::fs::read_to_string(&path).map_err(|source| ModelError::Io { path: path.clone(), source })?;
    let index: Value = serde_json::from_str(&text).map_err(|error| config_error(&path, error))?;
    let map = index["weight_map"].as_object().ok_or_else(|| config_error(&path, "there is no \"weight_map\""))?;
    let shard = |file: &Value| file.as_str().filter(|name| is_plain_name(name)).map(str::to_owned);
    map.values().map(shard).collect::<Option<_>>().ok_or_else(|| config_error(&path, "\"weight_map\" must name files of the folder"))
}

/// A downloaded index must not make us read files elsewhere.
fn is_plain_name(name: &str) -> bool {
    Path::new(name).file_name().is_some_and(|file| file == name)
}

fn entries(path: &Path, file: &Mmap, index: usize) -> Result<Vec<Entry>, ModelError> {
    let parsed =
        SafeTensors::deserialize(file).map_err(|error| ModelError::Safetensors { path: path.to_owned(), reason: error.to_string() })?;
    let entry = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        let start = view.data().as_ptr().addr() - file.as_ptr().addr();
        let columns = view.shape().last().copied().unwrap_or(1).max(1);
        let rows = view.shape().iter().product::<usize>() / columns;
        let kind = kind(view.dtype()).ok_or_else(|| ModelError::Dtype { name: name.clone(), kind: format!("{:?}", view.dtype()) })?;
        Ok(Entry { name, kind, rows, columns, file: index, start, len: view.data().len() })
    };
    // Some checkpoints carry rotary tables and the like as other types; only what the model uses has to be readable.
    parsed.tensors().into_iter().filter(|(name, _)| !name.ends_with("rotary_emb.inv_freq")).map(entry).collect()
}

#[allow(clippy::wildcard_enum_match_arm)] // The list of types grows with the library; all others are refused by name.
fn kind(dtype: Dtype) -> Option<TensorKind> {
    match dtype {
        Dtype::F32 => Some(TensorKind::F32),
        Dtype::F16 => Some(TensorKind::F16),
        Dtype::BF16 => Some(TensorKind::BF16),
        _ => None,
    }
}

fn architecture(config: &Config, path: &Path) -> Result<Architecture, ModelError> {
    let family = config.model_type.as_str();
    if !["llama", "mistral", "qwen2", "qwen3"].contains(&family) {
        return Err(ModelError::Architecture { name: family.to_owned() });
    }
    if config.mlp_bias || config.attention_bias {
        return Err(ModelError::Unsupported { what: "biases in the feed-forward or the attention's output".to_owned() });
    }
    if let Some(activation) = config.hidden_act.as_deref().filter(|&activation| activation != "silu") {
        return Err(ModelError::Unsupported { what: format!("the activation \"{activation}\"") });
    }
    if config.num_attention_heads == 0 {
        return Err(config_error(path, "num_attention_heads is 0"));
    }
    // Inside the window a sliding window is plain attention.
    let window = config.sliding_window.filter(|_| config.use_sliding_window.unwrap_or(family == "mistral"));
    Ok(Architecture {
        name: path.parent().and_then(Path::file_name).map_or_else(|| family.to_owned(), |name| name.to_string_lossy().into_owned()),
        layers: config.num_hidden_layers,
        hidden: config.hidden_size,
        ffn: config.intermediate_size,
        heads: config.num_attention_heads,
        kv_heads: config.num_key_value_heads.unwrap_or(config.num_attention_heads),
        head_dim: config.head_dim.unwrap_or(config.hidden_size / config.num_attention_heads),
        vocab: config.vocab_size,
        context: window.unwrap_or(usize::MAX).min(config.max_position_embeddings),
        rms_eps: config.rms_norm_eps as f32,
        rope_base: rope_base(config),
        rope_scaling: rope_scaling(config.rope_parameters.as_ref().or(config.rope_scaling.as_ref()), path)?,
        interleaved: false,
        qkv_bias: family == "qwen2",
        qk_norm: family == "qwen3",
        tied_embeddings: config.tie_word_embeddings,
    })
}

fn rope_base(config: &Config) -> f64 {
    let newer = config.rope_parameters.as_ref().and_then(|parameters| parameters["rope_theta"].as_f64());
    newer.or(config.rope_theta).unwrap_or(10_000.0)
}

fn rope_scaling(scaling: Option<&Value>, path: &Path) -> Result<RopeScaling, ModelError> {
    let Some(scaling) = scaling else { return Ok(RopeScaling::None) };
    let number = |name: &str| scaling[name].as_f64().ok_or_else(|| config_error(path, format!("the rotary scaling has no \"{name}\"")));
    match scaling["rope_type"].as_str().or(scaling["type"].as_str()).unwrap_or("default") {
        "default" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear(number("factor")?)),
        "llama3" => Ok(RopeScaling::Llama3 {
            factor: number("factor")?,
            low: number("low_freq_factor")?,
            high: number("high_freq_factor")?,
            original_context: number("original_max_position_embeddings")?,
        }),
        other => Err(ModelError::Unsupported { what: format!("rotary scaling of type \"{other}\"") }),
    }
}

fn name(part: Part) -> String {
    match part {
        Part::Embedding => "model.embed_tokens.weight".to_owned(),
        Part::OutputNorm => "model.norm.weight".to_owned(),
        Part::Output => "lm_head.weight".to_owned(),
        Part::Layer(layer, part) => format!("model.layers.{layer}.{}", layer_name(part)),
    }
}

fn layer_name(part: LayerPart) -> &'static str {
    match part {
        LayerPart::AttentionNorm => "input_layernorm.weight",
        LayerPart::Query => "self_attn.q_proj.weight",
        LayerPart::Key => "self_attn.k_proj.weight",
        LayerPart::Value => "self_attn.v_proj.weight",
        LayerPart::QueryBias => "self_attn.q_proj.bias",
        LayerPart::KeyBias => "self_attn.k_proj.bias",
        LayerPart::ValueBias => "self_attn.v_proj.bias",
        LayerPart::QueryNorm => "self_attn.q_norm.weight",
        LayerPart::KeyNorm => "self_attn.k_norm.weight",
        LayerPart::AttentionOutput => "self_attn.o_proj.weight",
        LayerPart::FfnNorm => "post_attention_layernorm.weight",
        LayerPart::Gate => "mlp.gate_proj.weight",
        LayerPart::Up => "mlp.up_proj.weight",
        LayerPart::Down => "mlp.down_proj.weight",
    }
}
