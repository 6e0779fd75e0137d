use std::cmp::Ordering;

use crate::{SampleRequest, Sampled, SamplingParams, exp::exp_of_negative, philox::uniform};

/// Draws one token from `logits` (one per vocabulary entry, as the model gave them), which it changes in place.
///
/// The order is vLLM's: log-probabilities of the raw logits, suppressed tokens, logit bias, penalties, temperature, min-p, top-k,
/// top-p, one draw. Equal logits rank by lower token id. The result is a function of the arguments alone, to the bit: every sum
/// runs over token ids in ascending order in one plain `f64` loop (never in vector lanes, whose width would set the rounding), and
/// exponentials and logarithms are not those of the platform's library.
pub fn sample(logits: &mut [f32], request: &SampleRequest<'_>) -> Sampled {
    let Some(count) = request.params.logprobs else {
        return Sampled { token: choose(logits, request), logprob: None, top: Vec::new() };
    };
    let raw = logits.to_vec();
    let norm = LogSoftmax::of(&raw);
    let token = choose(logits, request);
    let top = ranked(&raw, count as usize).into_iter().map(|token| (token, norm.logprob(raw[token as usize]))).collect();
    Sampled { token, logprob: Some(norm.logprob(raw[token as usize])), top }
}

fn choose(logits: &mut [f32], request: &SampleRequest<'_>) -> u32 {
    adjust(logits, request);
    if request.params.is_greedy() {
        return likeliest(logits);
    }
    draw(logits, request.params, uniform(request.seed, request.prompt_index, request.choice_index, request.output_index))
}

/// What turns a logit into a log-probability.
struct LogSoftmax {
    max: f32,
    log_sum: f64,
}

impl LogSoftmax {
    fn of(logits: &[f32]) -> Self {
        let max = maximum(logits);
        let mut sum = 0.0;
        // The exponentials of a chunk in vectors, then their sum in order.
        for chunk in logits.chunks(256) {
            let mut weights = [0.0; 256];
            for (weight, &logit) in weights.iter_mut().zip(chunk) {
                *weight = exp_of_negative(f64::from(logit) - f64::from(max));
            }
            for weight in &weights[..chunk.len()] {
                sum += weight;
            }
        }
        Self { max, log_sum: libm::log(sum) }
    }

    fn logprob(&self, logit: f32) -> f32 {
        (f64::from(logit) - f64::from(self.max) - self.log_sum) as f32
    }
}

fn adjust(logits: &mut [f32], request: &SampleRequest<'_>) {
    for &token in request.suppressed {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
    for &(token, bias) in &request.params.logit_bias {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit += bias;
        }
    }
    if request.params.has_penalties() {
        penalise(logits, request);
    }
}

/// vLLM's penalties: repetition over prompt and output, then frequency and presence over the output.
fn penalise(logits: &mut [f32], request: &SampleRequest<'_>) {
    let params = request.params;
    if params.repetition_penalty != 1.0 {
        let mut seen = [request.prompt, request.output].concat();
        seen.sort_unstable();
        seen.dedup();
        for token in seen {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = if *logit > 0.0 { *logit / params.repetition_penalty } else { *logit * params.repetition_penalty };
            }
        }
    }
    let mut output = request.output.to_vec();
    output.sort_unstable();
    for run in output.chunk_by(|a, b| a == b) {
        if let Some(logit) = logits.get_mut(run[0] as usize) {
            *logit -= params.frequency_penalty * run.len() as f32;
            *logit -= params.presence_penalty;
        }
    }
}

/// Index of the highest logit, the lowest of equals. A NaN never wins.
fn likeliest(logits: &[f32]) -> u32 {
    let max = maximum(logits);
    logits.iter().position(|&logit| logit == max).unwrap_or(0) as u32
}

/// The highest logit, in lanes that the compiler can put into vectors: a maximum, unlike a sum, is the same in any order.
fn maximum(logits: &[f32]) -> f32 {
    let (chunks, rest) = logits.as_chunks::<16>();
    let mut lanes = [f32::NEG_INFINITY; 16];
    for chunk in chunks {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane = lane.max(logit);
        }
    }
    lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max)
}

/// The `count` highest logits' indices, highest first, the lower index first among equals.
fn ranked(logits: &[f32], count: usize) -> Vec<u32> {
    let mut best: Vec<u32> = Vec::with_capacity(count + 1);
    for (index, &logit) in logits.iter().enumerate() {
        if best.len() == count && best.last().is_none_or(|&last| logit <= logits[last as usize]) {
            continue;
        }
        let place = best.partition_point(|&other| logits[other as usize] >= logit);
        best.insert(place, index as u32);
        best.truncate(count);
    }
    best
}

/// Draws by inverting the distribution function over the tokens kept, in ascending order of id.
fn draw(logits: &[f32], params: &SamplingParams, uniform: f64) -> u32 {
    let max = maximum(logits);
    if !max.is_finite() {
        return likeliest(logits);
    }
    let (max, temperature) = (f64::from(max), f64::from(params.temperature));
    let mut weights = vec![0.0; logits.len()];
    for (weight, &logit) in weights.iter_mut().zip(logits.iter()) {
        *weight = exp_of_negative((f64::from(logit) - max) / temperature);
    }
    if params.min_p == 0.0 && params.top_k == 0 && params.top_p == 1.0 {
        invert(0..weights.len() as u32, &weights, uniform)
    } else {
        invert(keep(&weights, params).into_iter(), &weights, uniform)
    }
}

/// The first of `tokens` at which the sum of their weights passes the share `uniform` of it.
fn invert(tokens: impl Iterator<Item = u32> + Clone, weights: &[f64], uniform: f64) -> u32 {
    let mut total = 0.0;
    for token in tokens.clone() {
        total += weights[token as usize];
    }
    let target = uniform * total;
    let (mut reached, mut last) = (0.0, 0);
    for token in tokens {
        let weight = weights[token as usize];
        if weight > 0.0 {
            (reached, last) = (reached + weight, token);
            if reached > target {
                return token;
            }
        }
    }
    // The product was rounded up to the total.
    last
}

/// Tokens that min-p, top-k and top-p leave, by ascending id. Weights are relative to the likeliest token, whose weight is 1.
fn keep(weights: &[f64], params: &SamplingParams) -> Vec<u32> {
    let floor = f64::from(params.min_p);
    let possible = |&token: &u32| weights[token as usize] > 0.0 && weights[token as usize] >= floor;
    let mut kept: Vec<u32> = (0..weights.len() as u32).filter(possible).collect();
    let likelier = |a: &u32, b: &u32| weights[*b as usize].total_cmp(&weights[*a as usize]).then(a.cmp(b));
    let top_k = params.top_k as usize;
    if top_k > 0 && top_k < kept.len() {
        kept.select_nth_unstable_by(top_k - 1, likelier);
        kept.truncate(top_k);
        kept.sort_unstable();
    }
    if params.top_p < 1.0 {
        nucleus(&mut kept, weights, f64::from(params.top_p), likelier);
        kept.sort_unstable();
    }
    kept
}

/// Leaves the likeliest tokens up to the one with which their share reaches `top_p`. Sorts only as far as needed.
fn nucleus(kept: &mut Vec<u32>, weights: &[f64], top_p: f64, likelier: impl Fn(&u32, &u32) -> Ordering + Copy) {
    let mut total = 0.0;
    for &token in kept.iter() {
        total += weights[token as usize];
    }
    // All tokens below this share together have less than half of the probability that may be cut, so none of them is in the set.
    let floor = 0.5 * (1.0 - top_p) * total / kept.len() as f64;
    kept.retain(|&token| weights[token as usize] >= floor);
    let (mut reached, mut ranked) = (0.0, 0);
    while ranked < kept.len() {
        let end = kept.len().min((4 * ranked).max(64));
        if end < kept.len() {
            kept[ranked..].select_nth_unstable_by(end - ranked - 1, likelier);
        }
        kept[ranked..end].sort_unstable_by(likelier);
        for index in ranked..end {
            reached += weights[kept[index] as usize];
            if reached >= top_p * total {
                kept.truncate(index + 1);
                return;
            }
        }
        ranked = end;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::SamplingOptions;

    fn params(change: impl FnOnce(&mut SamplingOptions)) -> SamplingParams {
        let mut options = SamplingOptions::default();
        change(&mut options);
        SamplingParams::new(options).unwrap()
    }

    fn request(params: &SamplingParams, output_index: u32) -> SampleRequest<'_> {
        SampleRequest { params, seed: 7, prompt_index: 0, choice_index: 0, output_index, prompt: &[], output: &[], suppressed: &[] }
    }

    fn draws(logits: &[f32], params: &SamplingParams, count: u32) -> Vec<u32> {
        (0..count).map(|index| sample(&mut logits.to_vec(), &request(params, index)).token).collect()
    }

    #[test]
    fn greedy_takes_the_highest_logit_and_the_lower_id_of_equals() {
        let greedy = params(|options| options.temperature = 0.0);
        assert_eq!(draws(&[0.0, 3.0, 1.0, 3.0], &greedy, 1), [1]);
        assert_eq!(draws(&[f32::NAN, 1.0, 2.0, 2.0], &greedy, 1), [2]);
        assert_eq!(draws(&[f32::NAN, f32::NEG_INFINITY], &greedy, 1), [1]);
        // Past one vector of lanes, with the equal one first in a later lane.
        let mut long = [0.0; 100];
        (long[37], long[48], long[99]) = (5.0, 5.0, 5.0);
        assert_eq!(draws(&long, &greedy, 1), [37]);
    }

    #[test]
    fn draws_follow_the_softmax() {
        let logits = [0.0f32, 1.0, 2.0, -1.0];
        let drawn = draws(&logits, &params(|options| options.temperature = 0.5), 20_000);
        let weights = logits.map(|logit| (f64::from(logit) / 0.5).exp());
        for token in 0..4 {
            let share = drawn.iter().filter(|&&drawn| drawn == token).count() as f64 / 20_000.0;
            let expected = weights[token as usize] / weights.iter().sum::<f64>();
            // Four standard deviations of a share of 20,000 draws.
            assert!((share - expected).abs() < 4.0 * (expected * (1.0 - expected) / 20_000.0).sqrt() + 1e-9, "{token}: {share}");
        }
    }

    #[test]
    fn filters_keep_what_their_definitions_say() {
        // Probabilities 0.4, 0.3, 0.2, 0.1.
        let weights = [1.0, 0.75, 0.5, 0.25];
        let kept = |change: fn(&mut SamplingOptions)| keep(&weights, &params(change));
        assert_eq!(kept(|options| options.top_k = 2), [0, 1]);
        assert_eq!(kept(|options| options.top_p = 0.39), [0]);
        assert_eq!(kept(|options| options.top_p = 0.41), [0, 1]);
        assert_eq!(kept(|options| options.top_p = 0.95), [0, 1, 2, 3]);
        assert_eq!(kept(|options| options.min_p = 0.5), [0, 1, 2]);
        // top-p counts shares of what top-k left: 0.4 / 0.7 of it is already above 0.5.
        assert_eq!(kept(|options| (options.top_k, options.top_p) = (2, 0.5)), [0]);
        // Equal weights rank by id.
        assert_eq!(keep(&[0.5, 1.0, 0.5, 0.5], &params(|options| options.top_k = 2)), [0, 1]);
    }

    #[test]
    fn a_filter_that_keeps_all_changes_no_draw() {
        let logits: Vec<f32> = (0..200).map(|index| (index % 11) as f32 / 3.0).collect();
        let all = draws(&logits, &params(|_| {}), 500);
        assert_eq!(draws(&logits, &params(|options| options.top_k = 200), 500), all);
        assert_eq!(draws(&logits, &params(|options| options.min_p = 1e-9), 500), all);
    }

    #[test]
    fn what_has_no_weight_is_not_drawn_at_either_end() {
        let weights = [0.0, 1.0, 2.0, 0.0];
        assert_eq!(invert(0..4, &weights, 0.0), 1);
        assert_eq!(invert(0..4, &weights, 0.5), 2);
        assert_eq!(invert(0..4, &weights, 1.0), 2);
    }

    #[test]
    fn penalties_are_those_of_vllm() {
        let with = params(|options| {
            options.repetition_penalty = 2.0;
            options.frequency_penalty = 0.5;
            options.presence_penalty = 0.25;
        });
        let mut logits = [4.0, -4.0, 4.0, 4.0];
        adjust(&mut logits, &SampleRequest { prompt: &[0, 1], output: &[2, 2], ..request(&with, 2) });
        // 0 and 1 only in the prompt: repetition alone. 2 twice in the output: 4/2 - 2 x 0.5 - 0.25.
        assert_eq!(logits, [2.0, -8.0, 0.75, 4.0]);
    }

    #[test]
    fn bias_and_suppression_act_on_single_tokens_and_ignore_ids_outside() {
        let biased = params(|options| {
            options.temperature = 0.0;
            options.logit_bias = vec![(2, 10.0), (99, 1.0)];
        });
        assert_eq!(draws(&[0.0, 3.0, 1.0], &biased, 1), [2]);
        let token = sample(&mut [0.0, 3.0, 1.0], &SampleRequest { suppressed: &[2, 99], ..request(&biased, 0) }).token;
        assert_eq!(token, 1);
    }

    #[test]
    fn logprobs_are_of_the_raw_logits_and_rank_equal_ones_by_id() {
        let biased = params(|options| {
            options.temperature = 0.0;
            options.logit_bias = vec![(0, 100.0)];
            options.logprobs = Some(3);
        });
        let sampled = sample(&mut [0.0, 1.0, 2.0, 1.0], &request(&biased, 0));
        let log_sum = (1.0 + 2.0 * 1f64.exp() + 2f64.exp()).ln();
        assert_eq!(sampled.token, 0);
        assert!((f64::from(sampled.logprob.unwrap()) + log_sum).abs() < 1e-6);
        assert_eq!(sampled.top.iter().map(|&(token, _)| token).collect::<Vec<_>>(), [2, 1, 3]);
        assert!((f64::from(sampled.top[0].1) - (2.0 - log_sum)).abs() < 1e-6);
        assert_eq!(sample(&mut [0.0, 1.0], &request(&params(|options| options.logprobs = Some(0)), 0)).top, []);
    }

    #[test]
    fn a_draw_depends_on_its_coordinates_only() {
        let hot = params(|options| options.temperature = 1.5);
        let logits: Vec<f32> = (0..64).map(|index| (index % 7) as f32).collect();
        assert_eq!(draws(&logits, &hot, 50), draws(&logits, &hot, 50));
        assert_ne!(draws(&logits, &hot, 50)[..25], draws(&logits, &hot, 50)[25..]);
    }

    /// The filters written out plainly: sort everything, then cut.
    fn keep_slowly(weights: &[f64], params: &SamplingParams) -> Vec<u32> {
        let mut kept: Vec<u32> = (0..weights.len() as u32).collect();
        kept.retain(|&token| weights[token as usize] > 0.0 && weights[token as usize] >= f64::from(params.min_p));
        kept.sort_by(|&a, &b| weights[b as usize].partial_cmp(&weights[a as usize]).unwrap().then(a.cmp(&b)));
        if params.top_k > 0 {
            kept.truncate(params.top_k as usize);
        }
        let mut ids = kept.clone();
        ids.sort_unstable();
        let total: f64 = ids.iter().map(|&token| weights[token as usize]).sum();
        let mut before = 0.0;
        kept.retain(|&token| {
            let keep = params.top_p >= 1.0 || before < f64::from(params.top_p) * total;
            before += weights[token as usize];
            keep
        });
        kept.sort_unstable();
        kept
    }

    proptest! {
        #[test]
        fn filters_agree_with_a_full_sort(
            logits in prop::collection::vec(-8i32..8, 1..600),
            top_k in 0u32..300,
            top_p in 0.01f32..1.2,
            min_p in -0.1f32..0.5,
        ) {
            let params = params(|options| {
                options.top_k = top_k;
                options.top_p = top_p.min(1.0);
                options.min_p = min_p.max(0.0);
            });
            let max = *logits.iter().max().unwrap();
            let weights: Vec<f64> = logits.iter().map(|&logit| f64::from(logit - max).exp()).collect();
            prop_assert_eq!(keep(&weights, &params), keep_slowly(&weights, &params));
        }

        #[test]
        fn the_ranking_agrees_with_a_full_sort(logits in prop::collection::vec(-9i8..9, 1..200), count in 0usize..21) {
            let logits: Vec<f32> = logits.into_iter().map(f32::from).collect();
            let mut sorted: Vec<u32> = (0..logits.len() as u32).collect();
            sorted.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
            sorted.truncate(count);
            prop_assert_eq!(ranked(&logits, count), sorted);
        }
    }
}
