use baton_cost::ModelShape;
use baton_gguf::TensorKind;

use crate::ModelError;
use crate::architecture::{Architecture, Rope};
use crate::checkpoint::{Checkpoint, LayerPart, Part};
use crate::format::REDUCTION_RULE;
use crate::matrix::{Arena, Matrix, Weights};
use crate::quant::dequantise;
use crate::simd::LANES;

/// Weights ready for the kernels.
pub(crate) struct Model {
    pub(crate) architecture: Architecture,
    pub(crate) layers: Vec<Layer>,
    pub(crate) output_norm: Vec<f32>,
    /// Embedding or output matrix, `[vocabulary][hidden]`.
    pub(crate) head: Matrix,
    pub(crate) rope: Rope,
    arena: Arena,
    /// Embeddings are read row by row from the file.
    checkpoint: Checkpoint,
}

pub(crate) struct Layer {
    pub(crate) attention_norm: Vec<f32>,
    pub(crate) query: Projection,
    pub(crate) key: Projection,
    pub(crate) value: Projection,
    pub(crate) attention_output: Matrix,
    pub(crate) ffn_norm: Vec<f32>,
    pub(crate) gate: Matrix,
    pub(crate) up: Matrix,
    pub(crate) down: Matrix,
}

/// A product with what may follow it.
pub(crate) struct Projection {
    pub(crate) weights: Matrix,
    pub(crate) bias: Option<Vec<f32>>,
    /// RMS norm of each head (Qwen3).
    pub(crate) norm: Option<Vec<f32>>,
}

impl Model {
    /// Packs the weights; `positions` is how long a sequence may get.
    pub(crate) fn new(checkpoint: Checkpoint, positions: usize) -> Result<Self, ModelError> {
        let architecture = checkpoint.architecture.clone();
        check(&architecture)?;
        let arena = Arena::new(checkpoint.packed_bytes())?;
        let mut loader = Loader { checkpoint: &checkpoint, architecture: &architecture, arena };
        let layers = (0..architecture.layers).map(|layer| loader.layer(layer)).collect::<Result<_, _>>()?;
        let output_norm = loader.vector(Part::OutputNorm, architecture.hidden)?;
        loader.tensor(Part::Embedding, architecture.vocab, architecture.hidden)?;
        let head = if architecture.tied_embeddings { Part::Embedding } else { Part::Output };
        let head = loader.matrix(head, architecture.vocab, architecture.hidden)?;
        let rope = Rope::new(&architecture, positions);
        let arena = loader.arena;
        Ok(Self { architecture, layers, output_norm, head, rope, arena, checkpoint })
    }

    /// A matrix of this model, ready for kernels.
    pub(crate) fn packed(&self, matrix: &Matrix) -> Weights<'_> {
        self.arena.view(*matrix)
    }

    /// Writes the embedding of `token`, which must be in the vocabulary.
    pub(crate) fn embed(&self, token: u32, out: &mut [f32]) {
        let table = self.checkpoint.find(Part::Embedding).expect("looked up when the model was loaded");
        let row_bytes = table.bytes.len() / table.rows;
        dequantise(table.kind, &table.bytes[token as usize * row_bytes..][..row_bytes], out);
    }

    pub(crate) fn shape(&self) -> ModelShape {
        self.architecture.shape(self.checkpoint.bytes(), self.checkpoint.parameters())
    }

    /// Everything that decides the bits of a result. Kernel path, threads and block size are absent, as they decide none.
    pub(crate) fn numerics_id(&self) -> String {
        let kinds = self.checkpoint.kinds().into_iter().map(TensorKind::name).collect::<Vec<_>>().join("+");
        format!("baton-cpu/rule={REDUCTION_RULE}/model={:032x}/weights={kinds}/kv=f32/activations=f32", self.checkpoint.revision())
    }
}

/// Refuses shapes that no kernel exists for.
fn check(architecture: &Architecture) -> Result<(), ModelError> {
    let Architecture { hidden, ffn, heads, kv_heads, head_dim, vocab, .. } = *architecture;
    let unsupported = |what: String| Err(ModelError::Unsupported { what });
    if hidden == 0 || !hidden.is_multiple_of(32) || ffn == 0 || !ffn.is_multiple_of(32) {
        return unsupported(format!("a hidden size of {hidden} and a feed-forward of {ffn} (multiples of 32 are)"));
    }
    if head_dim == 0 || !head_dim.is_multiple_of(LANES) || head_dim > 1024 {
        return unsupported(format!("a head size of {head_dim} (multiples of {LANES} up to 1024 are)"));
    }
    if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) || heads > 4096 || !(heads * head_dim).is_multiple_of(32) {
        return unsupported(format!("{heads} heads over {kv_heads} KV heads"));
    }
    if vocab == 0 {
        return unsupported("no vocabulary".to_owned());
    }
    Ok(())
}

struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    architecture: &'a Architecture,
    arena: Arena,
}

impl Loader<'_> {
    fn tensor(&self, part: Part, rows: usize, columns: usize) -> Result<(), ModelError> {
        self.checkpoint.get(part, rows, columns).map(|_| ())
    }

    fn matrix(&mut self, part: Part, rows: usize, columns: usize) -> Result<Matrix, ModelError> {
        let tensor = self.checkpoint.get(part, rows, columns)?;
        Ok(self.arena.pack(tensor.kind, [rows, columns], tensor.bytes, |row| row))
    }

    fn vector(&self, part: Part, len: usize) -> Result<Vec<f32>, ModelError> {
        Ok(self.checkpoint.get(part, 1, len)?.to_floats())
    }

    fn layer(&mut self, layer: usize) -> Result<Layer, ModelError> {
        let Architecture { hidden, ffn, heads, kv_heads, head_dim, .. } = *self.architecture;
        let part = |part| Part::Layer(layer, part);
        Ok(Layer {
            attention_norm: self.vector(part(LayerPart::AttentionNorm), hidden)?,
            query: self.rotary(part(LayerPart::Query), heads, part(LayerPart::QueryBias), part(LayerPart::QueryNorm))?,
            key: self.rotary(part(LayerPart::Key), kv_heads, part(LayerPart::KeyBias), part(LayerPart::KeyNorm))?,
            value: self.value(layer)?,
            attention_output: self.matrix(part(LayerPart::AttentionOutput), hidden, heads * head_dim)?,
            ffn_norm: self.vector(part(LayerPart::FfnNorm), hidden)?,
            gate: self.matrix(part(LayerPart::Gate), ffn, hidden)?,
            up: self.matrix(part(LayerPart::Up), ffn, hidden)?,
            down: self.matrix(part(LayerPart::Down), hidden, ffn)?,
        })
    }

    /// Q or K, in the kernels' order of rows.
    fn rotary(&mut self, weights: Part, heads: usize, bias: Part, norm: Part) -> Result<Projection, ModelError> {
        let Architecture { hidden, head_dim, qkv_bias, qk_norm, .. } = *self.architecture;
        let architecture = self.architecture;
        let order = |row| architecture.rotary_row(row);
        let rows = heads * head_dim;
        let tensor = self.checkpoint.get(weights, rows, hidden)?;
        let in_order = |values: Vec<f32>| (0..values.len()).map(|row| values[order(row)]).collect();
        Ok(Projection {
            weights: self.arena.pack(tensor.kind, [rows, hidden], tensor.bytes, order),
            bias: qkv_bias.then(|| self.vector(bias, rows)).transpose()?.map(in_order),
            norm: qk_norm.then(|| self.vector(norm, head_dim)).transpose()?.map(in_order),
        })
    }

    fn value(&mut self, layer: usize) -> Result<Projection, ModelError> {
        let Architecture { hidden, kv_heads, head_dim, qkv_bias, .. } = *self.architecture;
        let rows = kv_heads * head_dim;
        let bias = qkv_bias.then(|| self.vector(Part::Layer(layer, LayerPart::ValueBias), rows)).transpose()?;
        Ok(Projection { weights: self.matrix(Part::Layer(layer, LayerPart::Value), rows, hidden)?, bias, norm: None })
    }
}
