use std::path::Path;

use baton_gguf::{GgufError, Header, TensorInfo, Value};
use memmap2::Mmap;

use super::{Checkpoint, Entry, LayerPart, Part};
use crate::ModelError;
use crate::architecture::{Architecture, RopeScaling};
use crate::quant::dequantise;

pub(super) fn open(path: &Path, file: Mmap) -> Result<Checkpoint, ModelError> {
    let error = |source| ModelError::Gguf { path: path.to_owned(), source };
    let header = Header::parse(&file).map_err(error)?;
    let architecture = architecture(&header, &file).map_err(|problem| match problem {
        Problem::Gguf(source) => error(source),
        Problem::Model(problem) => problem,
    })?;
    let tensors = header.tensors.iter().map(|tensor| entry(&header, tensor, &file)).collect::<Result<_, _>>().map_err(error)?;
    Ok(Checkpoint { architecture, config: String::new(), files: vec![file], tensors, name_of: name })
}

enum Problem {
    Gguf(GgufError),
    Model(ModelError),
}

impl From<GgufError> for Problem {
    fn from(error: GgufError) -> Self {
        Self::Gguf(error)
    }
}

fn unsupported(what: String) -> Problem {
    Problem::Model(ModelError::Unsupported { what })
}

fn entry(header: &Header, tensor: &TensorInfo, file: &[u8]) -> Result<Entry, GgufError> {
    let len = header.tensor_data(file, tensor)?.len();
    let columns = tensor.shape[0] as usize;
    let start = (header.data_offset + tensor.offset) as usize;
    let rows = tensor.elements() as usize / columns;
    Ok(Entry { name: tensor.name.clone(), kind: tensor.kind, rows, columns, file: 0, start, len })
}

fn architecture(header: &Header, file: &[u8]) -> Result<Architecture, Problem> {
    let family = header.str("general.architecture")?;
    if !["llama", "qwen2", "qwen3"].contains(&family) {
        return Err(Problem::Model(ModelError::Architecture { name: family.to_owned() }));
    }
    let key = |name: &str| format!("{family}.{name}");
    let number = |name: &str| header.u64(&key(name)).map(|value| value as usize);
    let optional = |name: &str, default: usize| if header.get(&key(name)).is_some() { number(name) } else { Ok(default) };
    if optional("expert_count", 0)? > 0 {
        return Err(unsupported("a mixture of experts".to_owned()));
    }
    let (hidden, heads) = (number("embedding_length")?, number("attention.head_count")?);
    let head_dim = optional("attention.key_length", hidden / heads.max(1))?;
    for (name, value) in [
        ("attention.value_length", optional("attention.value_length", head_dim)?),
        ("rope.dimension_count", optional("rope.dimension_count", head_dim)?),
    ] {
        if value != head_dim {
            return Err(unsupported(format!("{name} = {value} with a head of {head_dim}")));
        }
    }
    let embedding = header.tensor("token_embd.weight");
    let rope_base = key("rope.freq_base");
    Ok(Architecture {
        name: header.str("general.name").unwrap_or(family).to_owned(),
        layers: number("block_count")?,
        hidden,
        ffn: number("feed_forward_length")?,
        heads,
        kv_heads: optional("attention.head_count_kv", heads)?,
        head_dim,
        vocab: embedding.and_then(|tensor| tensor.shape.get(1)).map_or(0, |&rows| rows as usize),
        context: number("context_length")?,
        rms_eps: header.f64(&key("attention.layer_norm_rms_epsilon"))? as f32,
        rope_base: if header.get(&rope_base).is_some() { header.f64(&rope_base)? } else { 10_000.0 },
        rope_scaling: rope_scaling(header, family, head_dim, file)?,
        interleaved: family == "llama",
        qkv_bias: header.tensor("blk.0.attn_q.bias").is_some(),
        qk_norm: header.tensor("blk.0.attn_q_norm.weight").is_some(),
        tied_embeddings: header.tensor("output.weight").is_none(),
    })
}

fn rope_scaling(header: &Header, family: &str, head_dim: usize, file: &[u8]) -> Result<RopeScaling, Problem> {
    if let Some(tensor) = header.tensor("rope_freqs.weight") {
        let mut divisors = vec![0.0; tensor.elements() as usize];
        dequantise(tensor.kind, header.tensor_data(file, tensor)?, &mut divisors);
        if divisors.len() != head_dim / 2 {
            return Err(unsupported(format!("{} rotary divisors for {} pairs", divisors.len(), head_dim / 2)));
        }
        return Ok(RopeScaling::Divisors(divisors));
    }
    let kind = header.get(&format!("{family}.rope.scaling.type")).and_then(Value::as_str).unwrap_or("none");
    match kind {
        "none" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear(header.f64(&format!("{family}.rope.scaling.factor"))?)),
        _ => Err(unsupported(format!("rotary scaling of type \"{kind}\""))),
    }
}

fn name(part: Part) -> String {
    match part {
        Part::Embedding => "token_embd.weight".to_owned(),
        Part::OutputNorm => "output_norm.weight".to_owned(),
        Part::Output => "output.weight".to_owned(),
        Part::Layer(layer, part) => format!("blk.{layer}.{}", layer_name(part)),
    }
}

fn layer_name(part: LayerPart) -> &'static str {
    match part {
        LayerPart::AttentionNorm => "attn_norm.weight",
        LayerPart::Query => "attn_q.weight",
        LayerPart::Key => "attn_k.weight",
        LayerPart::Value => "attn_v.weight",
        LayerPart::QueryBias => "attn_q.bias",
        LayerPart::KeyBias => "attn_k.bias",
        LayerPart::ValueBias => "attn_v.bias",
        LayerPart::QueryNorm => "attn_q_norm.weight",
        LayerPart::KeyNorm => "attn_k_norm.weight",
        LayerPart::AttentionOutput => "attn_output.weight",
        LayerPart::FfnNorm => "ffn_norm.weight",
        LayerPart::Gate => "ffn_gate.weight",
        LayerPart::Up => "ffn_up.weight",
        LayerPart::Down => "ffn_down.weight",
    }
}
