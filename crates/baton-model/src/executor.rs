use std::any::Any;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use baton_cost::ModelShape;
use baton_engine::{Batch, Executor, KvBytes, KvMemory, Sampled, StepResult, sample};
use baton_kv::BlockId;

use crate::checkpoint::Checkpoint;
use crate::forward::{Forward, Scratch, Span};
use crate::kernels::activations::Activations;
use crate::kv::{KvCache, KvLayout};
use crate::model::Model;
use crate::pool::Pool;
use crate::simd::Machine;
use crate::spares::Spare;
use crate::{CpuConfig, KernelPath, ModelError};

/// Tokens computed at once at most: enough to use weights well, few enough that activations stay in the cache. Longer steps are
/// cut, which changes no bit.
const TOKENS_AT_ONCE: usize = 192;
/// Rows of logits held at once at most.
const LOGITS_AT_ONCE: usize = 24;

/// Runs a model on the CPU over paged KV.
///
/// Tokens and log-probabilities are a function of the row's own tokens and sample request: the same to the bit whatever shares
/// the batch, however tokens are cut into steps, and for every number of threads, block size and [`KernelPath`]. Finite weights
/// are assumed.
pub struct CpuExecutor {
    model: Model,
    machine: Machine,
    pool: Pool,
    kv: KvCache,
    scratch: Scratch,
    sampling: Sampling,
    numerics_id: String,
    max_model_len: usize,
}

/// Hidden states of the rows that sample, and space for their logits.
#[derive(Default)]
struct Sampling {
    /// Which row of the batch each is.
    rows: Vec<usize>,
    /// `[row][hidden]`.
    hidden: Vec<f32>,
    input: Activations,
    logits: Vec<f32>,
}

impl CpuExecutor {
    /// Loads a GGUF file or a folder with `config.json` and safetensors.
    pub fn load(path: &Path, config: &CpuConfig) -> Result<Self, ModelError> {
        check(config)?;
        let machine = Machine::choose(config.kernel)?;
        let checkpoint = Checkpoint::open(path)?;
        let context = checkpoint.architecture.context;
        let max_model_len = config.max_model_len.unwrap_or(context);
        if max_model_len > context || max_model_len == 0 {
            let value = max_model_len as u64;
            return Err(ModelError::Setting {
                what: "max_model_len",
                value,
                rule: "at least 1 and at most the model's own context length",
            });
        }
        let positions = max_model_len.min(config.blocks.saturating_mul(config.block_size));
        let model = Model::new(checkpoint, positions)?;
        let layout = KvLayout {
            layers: model.layers.len(),
            block_size: config.block_size,
            kv_heads: model.architecture.kv_heads,
            head_dim: model.architecture.head_dim,
        };
        Ok(Self {
            machine,
            pool: Pool::new(config.threads),
            kv: KvCache::new(layout, config.blocks)?,
            scratch: Scratch::default(),
            sampling: Sampling::default(),
            numerics_id: model.numerics_id(),
            max_model_len,
            model,
        })
    }

    /// Sizes of the model, for the cost model. Counts parameters and bytes as in the file.
    pub fn shape(&self) -> ModelShape {
        self.model.shape()
    }

    /// Tokens that the model knows; a step panics on others.
    pub fn vocab_size(&self) -> u32 {
        self.model.architecture.vocab as u32
    }

    /// Longest sequence in tokens.
    pub fn max_model_len(&self) -> u32 {
        self.max_model_len as u32
    }

    /// Instructions in use.
    pub fn kernel_path(&self) -> KernelPath {
        self.machine.path()
    }

    /// Logits `[sampling row][vocabulary]` after a batch's last tokens, before any sampling; for tests and measurements.
    pub fn logits(&mut self, batch: &Batch<'_>) -> Vec<Vec<f32>> {
        let mut all = Vec::new();
        self.compute(batch);
        self.each_logits(|_, logits| all.push(logits.to_vec()));
        all
    }

    /// Computes the KV of all rows and collects the hidden states of those that sample.
    fn compute(&mut self, batch: &Batch<'_>) {
        self.sampling.rows.clear();
        self.sampling.hidden.clear();
        let tables: Vec<Vec<u32>> = batch.rows.iter().map(|row| row.blocks.iter().map(|block| block.0).collect()).collect();
        let mut spans = Vec::new();
        let mut ends = Vec::new();
        let mut tokens = 0;
        for (index, row) in batch.rows.iter().enumerate() {
            let mut done = 0;
            while done < row.tokens.len() {
                let len = (row.tokens.len() - done).min(TOKENS_AT_ONCE - tokens);
                spans.push(Span { tokens: &row.tokens[done..done + len], start: row.start as usize + done, blocks: &tables[index] });
                tokens += len;
                done += len;
                if done == row.tokens.len() && row.sample.is_some() {
                    ends.push((index, tokens - 1));
                }
                if tokens == TOKENS_AT_ONCE {
                    self.compute_spans(&mut spans, &mut ends);
                    tokens = 0;
                }
            }
        }
        self.compute_spans(&mut spans, &mut ends);
        self.seal(batch, &tables);
    }

    /// Blocks that are full since this step.
    fn seal(&mut self, batch: &Batch<'_>, tables: &[Vec<u32>]) {
        let size = self.kv.layout().block_size;
        for (row, blocks) in batch.rows.iter().zip(tables) {
            let start = row.start as usize;
            for &block in &blocks[start / size..(start + row.tokens.len()) / size] {
                self.kv.seal(block);
            }
        }
    }

    fn compute_spans(&mut self, spans: &mut Vec<Span<'_>>, ends: &mut Vec<(usize, usize)>) {
        if spans.is_empty() {
            return;
        }
        let forward = Forward { model: &self.model, machine: self.machine, pool: &self.pool };
        forward.run(spans, &mut self.kv, &mut self.scratch);
        let hidden = self.model.architecture.hidden;
        for (row, token) in ends.drain(..) {
            self.sampling.rows.push(row);
            self.sampling.hidden.extend_from_slice(&self.scratch.hidden[token * hidden..][..hidden]);
        }
        spans.clear();
    }

    /// Calls `take` with each sampling row's index in the batch and its logits.
    fn each_logits(&mut self, mut take: impl FnMut(usize, &mut [f32])) {
        let forward = Forward { model: &self.model, machine: self.machine, pool: &self.pool };
        let Sampling { rows, hidden, input, logits } = &mut self.sampling;
        let hidden = hidden.chunks(LOGITS_AT_ONCE * self.model.architecture.hidden);
        for (rows, hidden) in rows.chunks(LOGITS_AT_ONCE).zip(hidden) {
            forward.logits(hidden, input, logits);
            for (&row, logits) in rows.iter().zip(logits.chunks_exact_mut(self.model.architecture.vocab)) {
                take(row, logits);
            }
        }
    }
}

impl Executor for CpuExecutor {
    fn step(&mut self, batch: &Batch<'_>) -> StepResult {
        let start = Instant::now();
        let mut samples: Vec<Option<Sampled>> = vec![None; batch.rows.len()];
        self.compute(batch);
        self.each_logits(|row, logits| {
            let request = batch.rows[row].sample.as_ref().expect("only rows that sample were collected");
            samples[row] = Some(sample(logits, request));
        });
        StepResult { samples, elapsed: start.elapsed() }
    }

    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) {
        for &(from, to) in pairs {
            self.kv.copy(from.0, to.0);
        }
    }

    fn numerics_id(&self) -> &str {
        &self.numerics_id
    }

    fn kv(&self) -> Option<&dyn KvMemory> {
        Some(self)
    }

    fn kv_mut(&mut self) -> Option<&mut dyn KvMemory> {
        Some(self)
    }
}

/// A block is `[layer]` of keys `[kv head][group of 16 positions][dimension][16 positions]` and values
/// `[kv head][position][dimension]`, in f32.
impl KvMemory for CpuExecutor {
    fn layout(&self) -> baton_engine::KvLayout {
        self.kv.layout().into()
    }

    fn block(&self, block: BlockId) -> &[u8] {
        self.kv.block(block.0)
    }

    fn block_mut(&mut self, block: BlockId) -> &mut [u8] {
        self.kv.block_mut(block.0)
    }

    fn share(&self, block: BlockId) -> Arc<dyn KvBytes> {
        self.kv.share(block.0)
    }

    fn spare(&self) -> Box<dyn KvBytes> {
        Box::new(self.kv.spare())
    }

    fn put(&mut self, block: BlockId, bytes: Box<dyn KvBytes>) -> Box<dyn KvBytes> {
        let is_ours = (&*bytes as &dyn Any).is::<Spare>();
        if !is_ours {
            self.kv.block_mut(block.0).copy_from_slice(bytes.bytes());
            return bytes;
        }
        let spare = (bytes as Box<dyn Any>).downcast::<Spare>().expect("its type was just seen");
        Box::new(self.kv.put(block.0, *spare))
    }
}

fn check(config: &CpuConfig) -> Result<(), ModelError> {
    let settings =
        [("threads", config.threads, 512), ("block_size", config.block_size, 4096), ("blocks", config.blocks, u32::MAX as usize)];
    for (what, value, limit) in settings {
        if value == 0 || value > limit {
            return Err(ModelError::Setting { what, value: value as u64, rule: "at least 1 (threads up to 512, block_size up to 4096)" });
        }
    }
    Ok(())
}
