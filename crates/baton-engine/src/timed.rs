use std::{ops::Range, time::Duration};

use baton_cost::StepCoefficients;
use baton_kv::BlockId;
use baton_units::{BlockSize, Blocks, Bytes, DurationMs};

use crate::{Batch, BatchRow, Executor, KvLayout, KvMemory, SampleRequest, Sampled, StepResult, philox::uniform};

/// An executor without arithmetic: a step takes the time that the cost model says, in model time.
///
/// Its "KV" is one hash per token slot, of that token and the hash before it, read from and written to the slots that the block
/// tables name. A token is drawn from the hash of the sequence's last slot, and thus from its whole history: whoever reads a wrong
/// block, or splices two streams, gets other tokens. Like a real executor it sees only the tokens to compute, so its output is
/// the same under any batching, chunking, preemption and prefix hit, if the scheduler is right.
///
/// End-of-sequence tokens are never drawn, so outputs have the length that their requests ask for; a logit bias of 100 on a token
/// forces it, and one of -100 or `min_tokens` forbids it. At temperature 0 the history alone decides; above it the request's seed
/// and indices do too.
#[derive(Debug, Clone)]
pub struct Timed {
    coefficients: StepCoefficients,
    block_size: usize,
    tokens: TokenSource,
    /// End-of-sequence ids, which are drawn only when forced.
    eos: Vec<u32>,
    /// Hash of the history up to each slot, in little-endian bytes: `[blocks, block size, 8]`.
    slots: Vec<u8>,
    /// What a token's KV counts as where moving it is priced.
    priced_token_bytes: Bytes,
    numerics_id: String,
}

/// Which tokens a [`Timed`] executor draws.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenSource {
    /// Four bytes of lowercase letters and spaces, as a little-endian number: readable under a tokenizer that counts four bytes as
    /// one token.
    Text,
    /// Any id below this size.
    Vocabulary(u32),
}

/// Bytes of a token's "KV".
const SLOT_BYTES: usize = size_of::<u64>();

/// 32 symbols, so that five bits choose one; words come out about five letters long.
const SYMBOLS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz      ";

impl Timed {
    pub fn new(coefficients: StepCoefficients, blocks: Blocks, block_size: BlockSize, tokens: TokenSource, eos: Vec<u32>) -> Self {
        let block_size = block_size.get() as usize;
        let numerics_id = format!("timed-1 {tokens:?} {eos:?}");
        let slots = vec![0; blocks.0 as usize * block_size * SLOT_BYTES];
        Self { coefficients, block_size, tokens, eos, slots, priced_token_bytes: Bytes(SLOT_BYTES as u64), numerics_id }
    }

    /// Moving its KV costs what that of a model with this much a token does. What travels stays 8 bytes a token.
    #[must_use]
    pub fn with_kv_of(mut self, token_bytes: Bytes) -> Self {
        self.priced_token_bytes = token_bytes;
        self
    }

    /// From now on steps cost this.
    pub fn set_coefficients(&mut self, coefficients: StepCoefficients) {
        self.coefficients = coefficients;
    }

    /// What a slot holds.
    #[cfg(test)]
    pub(crate) fn history_at(&self, blocks: &[BlockId], position: u32) -> u64 {
        self.history(self.slot(blocks, position))
    }

    #[cfg(test)]
    pub(crate) fn block_size(&self) -> u32 {
        self.block_size as u32
    }

    /// What the slot of a token holds.
    #[cfg(test)]
    pub(crate) fn history_after(before: u64, token: u32) -> u64 {
        extend(before, token)
    }

    fn slot(&self, blocks: &[BlockId], position: u32) -> usize {
        let position = position as usize;
        blocks[position / self.block_size].index() * self.block_size + position % self.block_size
    }

    fn history(&self, slot: usize) -> u64 {
        u64::from_le_bytes(self.slots.as_chunks().0[slot])
    }

    fn block_range(&self, block: BlockId) -> Range<usize> {
        let len = self.block_size * SLOT_BYTES;
        block.index() * len..(block.index() + 1) * len
    }

    fn compute(&mut self, row: &BatchRow<'_>) -> Option<Sampled> {
        let mut history = match row.start.checked_sub(1) {
            Some(last) => self.history(self.slot(row.blocks, last)),
            None => 0,
        };
        for (position, &token) in (row.start..).zip(row.tokens) {
            history = extend(history, token);
            let slot = self.slot(row.blocks, position);
            self.slots.as_chunks_mut().0[slot] = history.to_le_bytes();
        }
        row.sample.as_ref().map(|request| self.draw(history, request))
    }

    fn draw(&self, history: u64, request: &SampleRequest<'_>) -> Sampled {
        let mut random = mix(history);
        if !request.params.is_greedy() {
            let drawn = uniform(request.seed, request.prompt_index, request.choice_index, request.output_index);
            random = mix(random ^ drawn.to_bits());
        }
        let forced = request.params.logit_bias.iter().find(|&&(token, bias)| bias >= 100.0 && !request.suppressed.contains(&token));
        let token = forced.map_or_else(|| self.allowed(random, request), |&(token, _)| token);
        let logprob = -((random >> 32) as f32 / u32::MAX as f32);
        let Some(count) = request.params.logprobs else { return Sampled { token, logprob: None, top: Vec::new() } };
        let mut top = Vec::with_capacity(count as usize);
        let mut other = random;
        while top.len() < count as usize {
            let candidate = if top.is_empty() { token } else { self.token(other) };
            top.push((candidate, logprob - top.len() as f32));
            other = mix(other);
        }
        Sampled { token, logprob: Some(logprob), top }
    }

    /// A token that the request may draw; the first one from `random` on.
    fn allowed(&self, mut random: u64, request: &SampleRequest<'_>) -> u32 {
        // Bounded, in case a request forbids the whole vocabulary.
        for _ in 0..1000 {
            let token = self.token(random);
            let banned = request.params.logit_bias.iter().any(|&(other, bias)| other == token && bias <= -100.0);
            if !banned && !self.eos.contains(&token) && !request.suppressed.contains(&token) {
                break;
            }
            random = mix(random);
        }
        self.token(random)
    }

    fn token(&self, random: u64) -> u32 {
        match self.tokens {
            TokenSource::Vocabulary(size) => (random % u64::from(size)) as u32,
            TokenSource::Text => u32::from_le_bytes(std::array::from_fn(|byte| SYMBOLS[(random >> (5 * byte)) as usize % 32])),
        }
    }
}

impl Executor for Timed {
    fn step(&mut self, batch: &Batch<'_>) -> StepResult {
        let samples = batch.rows.iter().map(|row| self.compute(row)).collect();
        StepResult { samples, elapsed: Duration::from_ms(self.coefficients.step_s(&batch.load()) * 1e3) }
    }

    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) {
        for (from, to) in pairs {
            let (from, to) = (self.block_range(*from), self.block_range(*to));
            self.slots.copy_within(from, to.start);
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

/// A block is the hashes of its slots, in order of position.
impl KvMemory for Timed {
    fn layout(&self) -> KvLayout {
        let block_size = BlockSize::new(self.block_size as u32).expect("made from a block size");
        KvLayout { format: "timed-1/u64le".to_owned(), block_size, block_bytes: Bytes((self.block_size * SLOT_BYTES) as u64) }
    }

    fn block(&self, block: BlockId) -> &[u8] {
        &self.slots[self.block_range(block)]
    }

    fn block_mut(&mut self, block: BlockId) -> &mut [u8] {
        let range = self.block_range(block);
        &mut self.slots[range]
    }

    fn priced_block_bytes(&self) -> Bytes {
        Bytes(self.priced_token_bytes.0 * self.block_size as u64)
    }
}

fn extend(history: u64, token: u32) -> u64 {
    mix(history.rotate_left(23) ^ u64::from(token).wrapping_add(0x9E37_79B9_7F4A_7C15))
}

/// The finaliser of `SplitMix64` (Steele, Lea and Flood, OOPSLA'14): every bit of the input reaches every bit of the output.
fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SamplingOptions, SamplingParams, SequenceId};

    const FREE: StepCoefficients =
        StepCoefficients { fixed_s: 1.0, per_token_s: 0.0, per_attended_s: 0.0, per_kv_token_s: 0.0, weights_s: 0.0 };

    fn timed(tokens: TokenSource) -> Timed {
        Timed::new(FREE, Blocks(8), BlockSize::new(2).unwrap(), tokens, vec![3])
    }

    fn sampled(timed: &mut Timed, options: SamplingOptions, seed: u64, prompt: &[u32], suppressed: &[u32]) -> Sampled {
        let params = SamplingParams::new(options).unwrap();
        let blocks: Vec<BlockId> = (0..8).map(BlockId).collect();
        let sample =
            SampleRequest { params: &params, seed, prompt_index: 0, choice_index: 0, output_index: 0, prompt, output: &[], suppressed };
        let row = BatchRow { sequence: SequenceId(0), tokens: prompt, start: 0, blocks: &blocks, sample: Some(sample) };
        timed.step(&Batch { rows: vec![row] }).samples.pop().unwrap().unwrap()
    }

    fn greedy() -> SamplingOptions {
        SamplingOptions { temperature: 0.0, ..SamplingOptions::default() }
    }

    #[test]
    fn text_tokens_are_four_readable_bytes() {
        let mut timed = timed(TokenSource::Text);
        for prompt in 0..100 {
            let token = sampled(&mut timed, greedy(), 0, &[prompt], &[]).token;
            assert!(token.to_le_bytes().iter().all(|byte| byte.is_ascii_lowercase() || *byte == b' '));
        }
    }

    #[test]
    fn the_history_decides_and_the_seed_only_above_temperature_zero() {
        let mut timed = timed(TokenSource::Vocabulary(1 << 20));
        let mut draw = |options, seed, prompt: &[u32]| sampled(&mut timed, options, seed, prompt, &[]).token;
        assert_eq!(draw(greedy(), 1, &[1, 2, 3]), draw(greedy(), 2, &[1, 2, 3]));
        assert_ne!(draw(greedy(), 1, &[1, 2, 3]), draw(greedy(), 1, &[2, 1, 3]));
        assert_ne!(draw(SamplingOptions::default(), 1, &[1, 2, 3]), draw(SamplingOptions::default(), 2, &[1, 2, 3]));
    }

    /// Whoever changes what is drawn must change the id.
    #[test]
    fn the_numerics_id_stands_for_these_tokens() {
        let mut timed = timed(TokenSource::Text);
        assert_eq!(timed.numerics_id(), "timed-1 Text [3]");
        let text = |token: u32| String::from_utf8(token.to_le_bytes().to_vec()).unwrap();
        assert_eq!(text(sampled(&mut timed, greedy(), 0, &[1, 2, 3], &[]).token), "aqs ");
        assert_eq!(text(sampled(&mut timed, SamplingOptions::default(), 7, &[1, 2, 3], &[]).token), "e  z");
    }

    /// What a replica writes, another reads: the tokens drawn after copied blocks are those of the one that computed them.
    #[test]
    fn blocks_travel_as_bytes_and_are_priced_as_the_emulated_model_s() {
        let mut source = timed(TokenSource::Text);
        let prompt: Vec<u32> = (1..8).collect();
        let drawn = sampled(&mut source, greedy(), 0, &prompt, &[]).token;
        let mut target = timed(TokenSource::Text).with_kv_of(Bytes(1 << 17));
        assert_eq!(target.layout(), source.layout());
        assert_eq!((target.layout().block_bytes, target.priced_block_bytes()), (Bytes(16), Bytes(2 << 17)));
        for block in (0..3).map(BlockId) {
            target.block_mut(block).copy_from_slice(source.block(block));
        }
        let params = SamplingParams::new(greedy()).unwrap();
        let blocks: Vec<BlockId> = (0..4).map(BlockId).collect();
        let sample = SampleRequest {
            params: &params,
            seed: 0,
            prompt_index: 0,
            choice_index: 0,
            output_index: 0,
            prompt: &prompt,
            output: &[],
            suppressed: &[],
        };
        let last = BatchRow { sequence: SequenceId(0), tokens: &prompt[6..], start: 6, blocks: &blocks, sample: Some(sample) };
        assert_eq!(target.step(&Batch { rows: vec![last] }).samples[0].as_ref().unwrap().token, drawn);
    }

    #[test]
    fn end_of_sequence_comes_only_when_forced() {
        let mut timed = timed(TokenSource::Vocabulary(5));
        let banned = SamplingOptions { logit_bias: vec![(4, -100.0)], ..greedy() };
        let forced = SamplingOptions { logit_bias: vec![(3, 100.0)], ..greedy() };
        for prompt in 0..50 {
            assert!([1, 2].contains(&sampled(&mut timed, banned.clone(), 0, &[prompt], &[0]).token));
            assert_eq!(sampled(&mut timed, forced.clone(), 0, &[prompt], &[]).token, 3);
            assert_ne!(sampled(&mut timed, forced.clone(), 0, &[prompt], &[3]).token, 3);
        }
    }

    #[test]
    fn logprobs_come_in_the_number_asked_for_and_begin_with_the_token() {
        let mut timed = timed(TokenSource::Vocabulary(1000));
        let sampled = sampled(&mut timed, SamplingOptions { logprobs: Some(3), ..greedy() }, 0, &[1], &[]);
        assert_eq!(sampled.top.len(), 3);
        assert_eq!(Some(sampled.top[0]), sampled.logprob.map(|logprob| (sampled.token, logprob)));
        assert!(sampled.top.windows(2).all(|pair| pair[0].1 > pair[1].1));
    }
}
