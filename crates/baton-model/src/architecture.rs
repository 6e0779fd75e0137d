use baton_cost::{Attention, ModelShape};

/// What decides the arithmetic of a forward pass, besides the weights.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::struct_excessive_bools)] // Independent traits of a family; each is read in one place.
pub(crate) struct Architecture {
    pub(crate) name: String,
    pub(crate) layers: usize,
    pub(crate) hidden: usize,
    pub(crate) ffn: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) vocab: usize,
    /// Longest context that the model was made for.
    pub(crate) context: usize,
    pub(crate) rms_eps: f32,
    pub(crate) rope_base: f64,
    pub(crate) rope_scaling: RopeScaling,
    /// Rows of Q and K are stored as pairs (2i, 2i + 1) instead of (i, i + half), as GGUF does for Llama.
    pub(crate) interleaved: bool,
    pub(crate) qkv_bias: bool,
    pub(crate) qk_norm: bool,
    pub(crate) tied_embeddings: bool,
}

/// How rotary frequencies are changed for long contexts.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum RopeScaling {
    None,
    /// All frequencies divided (Chen et al., 2023).
    Linear(f64),
    /// Llama 3.1: low frequencies divided, high ones kept, those between interpolated.
    Llama3 {
        factor: f64,
        low: f64,
        high: f64,
        original_context: f64,
    },
    /// One divisor per pair, as GGUF stores Llama 3.1's.
    Divisors(Vec<f32>),
}

impl Architecture {
    pub(crate) fn shape(&self, weight_bytes: u64, parameters: u64) -> ModelShape {
        ModelShape {
            name: self.name.clone(),
            layers: self.layers as u32,
            hidden: self.hidden as u32,
            vocab: self.vocab as u32,
            ffn_width: self.ffn as u32,
            tied_embeddings: self.tied_embeddings,
            attention: Attention::Grouped {
                heads: self.heads as u32,
                kv_heads: self.kv_heads as u32,
                head_dim: self.head_dim as u32,
                qkv_bias: self.qkv_bias,
                qk_norm: self.qk_norm,
            },
            experts: None,
            max_context: self.context as u32,
            bytes_per_weight: weight_bytes as f64 / parameters as f64,
            kv_dtype_bytes: 4.0,
            counted_params: Some(parameters),
        }
    }

    /// Row of the file for each row of Q or K, so that pairs end up at (i, i + half) in the kernels.
    pub(crate) fn rotary_row(&self, row: usize) -> usize {
        if !self.interleaved {
            return row;
        }
        let (head, within, half) = (row / self.head_dim, row % self.head_dim, self.head_dim / 2);
        head * self.head_dim + within % half * 2 + within / half
    }
}

/// Cosines and sines of every position, computed in f64 with `libm` so that they are the same everywhere.
pub(crate) struct Rope {
    half: usize,
    cosines: Vec<f32>,
    sines: Vec<f32>,
}

impl Rope {
    pub(crate) fn new(architecture: &Architecture, positions: usize) -> Self {
        let half = architecture.head_dim / 2;
        let frequencies: Vec<f64> = (0..half).map(|pair| frequency(architecture, pair)).collect();
        let angles = (0..positions).flat_map(|position| frequencies.iter().map(move |frequency| position as f64 * frequency));
        let (cosines, sines) = angles.map(|angle| (libm::cos(angle) as f32, libm::sin(angle) as f32)).unzip();
        Self { half, cosines, sines }
    }

    /// Cosines and sines of the pairs at one position.
    #[inline(always)]
    pub(crate) fn at(&self, position: usize) -> (&[f32], &[f32]) {
        let range = position * self.half..(position + 1) * self.half;
        (&self.cosines[range.clone()], &self.sines[range])
    }
}

fn frequency(architecture: &Architecture, pair: usize) -> f64 {
    let plain = libm::pow(architecture.rope_base, -2.0 * pair as f64 / architecture.head_dim as f64);
    match &architecture.rope_scaling {
        RopeScaling::None => plain,
        RopeScaling::Linear(factor) => plain / factor,
        RopeScaling::Divisors(divisors) => plain / f64::from(divisors[pair]),
        &RopeScaling::Llama3 { factor, low, high, original_context } => {
            let turns = original_context * plain / std::f64::consts::TAU;
            let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
            plain * kept + plain / factor * (1.0 - kept)
        }
    }
}
