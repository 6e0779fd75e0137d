use std::ops::Deref;

use serde::{Deserialize, Serialize};

use crate::FinishReason;

/// Below this temperature sampling is greedy, as in vLLM.
const GREEDY_BELOW: f32 = 1e-5;
/// Lowest temperature that divides logits without overflow; a smaller one above [`GREEDY_BELOW`] is raised to it, as in vLLM.
const TEMPERATURE_MIN: f32 = 1e-2;
/// Most log-probabilities that can be asked for beside the drawn token's own; vLLM's default.
pub const LOGPROBS_MAX: u32 = 20;

/// How tokens are drawn and when an output ends. Plain data; [`SamplingParams::new`] checks it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SamplingOptions {
    /// Divides the logits; 0 draws the likeliest token.
    pub temperature: f32,
    /// Keep the smallest set of likeliest tokens whose probabilities reach this; in (0, 1], 1 keeps all.
    pub top_p: f32,
    /// Keep this many likeliest tokens; 0 keeps all.
    pub top_k: u32,
    /// Drop tokens less likely than this share of the likeliest one's probability; in [0, 1].
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or output; above 0, 1 does nothing.
    pub repetition_penalty: f32,
    /// Subtracted from logits of tokens in the output; in [-2, 2].
    pub presence_penalty: f32,
    /// Subtracted from logits once per occurrence in the output; in [-2, 2].
    pub frequency_penalty: f32,
    /// Added to the logits of single tokens; clamped to [-100, 100], as in vLLM.
    pub logit_bias: Vec<(u32, f32)>,
    /// Tokens that end the output, beside the model's end-of-sequence ids. Stop strings are matched above the engine, on text.
    pub stop_token_ids: Vec<u32>,
    /// Go on past the model's end-of-sequence ids.
    pub ignore_eos: bool,
    /// End-of-sequence and stop tokens are not drawn before this many output tokens.
    pub min_tokens: u32,
    /// Output tokens at most; `None` leaves it to the model's length.
    pub max_tokens: Option<u32>,
    /// `Some(n)`: report each drawn token's log-probability and those of the `n` likeliest tokens.
    pub logprobs: Option<u32>,
}

impl Default for SamplingOptions {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            min_tokens: 0,
            max_tokens: None,
            logprobs: None,
        }
    }
}

impl SamplingOptions {
    /// Why an output of `tokens` tokens ends with `last`, as far as its request and the model's `eos` decide it; `None` when it goes on,
    /// unless model or pool hold no longer sequence. Takes `stop_token_ids` ascending, as [`SamplingParams`] have them.
    pub fn end_after(&self, last: u32, tokens: u32, eos: &[u32]) -> Option<FinishReason> {
        if !self.ignore_eos && eos.contains(&last) {
            Some(FinishReason::EndOfSequence)
        } else if self.stop_token_ids.binary_search(&last).is_ok() {
            Some(FinishReason::StopToken(last))
        } else {
            self.max_tokens.is_some_and(|max| tokens >= max).then_some(FinishReason::Length)
        }
    }
}

/// [`SamplingOptions`] that were found valid; read them through `Deref`. They are checked again where they are deserialised.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(into = "SamplingOptions", try_from = "SamplingOptions")]
pub struct SamplingParams(SamplingOptions);

impl Deref for SamplingParams {
    type Target = SamplingOptions;
    fn deref(&self) -> &SamplingOptions {
        &self.0
    }
}

impl From<SamplingParams> for SamplingOptions {
    fn from(params: SamplingParams) -> Self {
        params.0
    }
}

impl TryFrom<SamplingOptions> for SamplingParams {
    type Error = SamplingError;
    fn try_from(options: SamplingOptions) -> Result<Self, SamplingError> {
        Self::new(options)
    }
}

impl SamplingParams {
    /// Checks the ranges of the OpenAI API as vLLM reads them (temperature has no upper bound there).
    pub fn new(mut options: SamplingOptions) -> Result<Self, SamplingError> {
        check_ranges(&options)?;
        check_counts(&options)?;
        if options.temperature < GREEDY_BELOW {
            options.temperature = 0.0;
        } else {
            options.temperature = options.temperature.max(TEMPERATURE_MIN);
        }
        for (token, bias) in &mut options.logit_bias {
            if bias.is_nan() {
                return Err(SamplingError::Range { parameter: "logit_bias", rule: "a number", value: f64::from(*token) });
            }
            *bias = bias.clamp(-100.0, 100.0);
        }
        // Ordered, so that a look-up is a binary search and equal params are equal bytes; a later entry for a token wins.
        options.logit_bias.reverse();
        options.logit_bias.sort_by_key(|&(token, _)| token);
        options.logit_bias.dedup_by_key(|&mut (token, _)| token);
        options.stop_token_ids.sort_unstable();
        options.stop_token_ids.dedup();
        Ok(Self(options))
    }

    /// Greedy, up to `max_tokens`.
    pub fn greedy(max_tokens: u32) -> Result<Self, SamplingError> {
        Self::new(SamplingOptions { temperature: 0.0, max_tokens: Some(max_tokens), ..SamplingOptions::default() })
    }

    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Checks the token ids that the options name against the model's vocabulary.
    pub fn check_vocabulary(&self, size: u32) -> Result<(), SamplingError> {
        let biased = self.logit_bias.iter().map(|&(token, _)| ("logit_bias", token));
        let stops = self.stop_token_ids.iter().map(|&token| ("stop_token_ids", token));
        match biased.chain(stops).find(|&(_, token)| token >= size) {
            Some((parameter, token)) => Err(SamplingError::OutOfVocabulary { parameter, token, size }),
            None => Ok(()),
        }
    }
}

fn check_ranges(options: &SamplingOptions) -> Result<(), SamplingError> {
    let finite = |value: f32| value.is_finite();
    let unit = |value: f32| (0.0..=1.0).contains(&value);
    let penalty = |value: f32| (-2.0..=2.0).contains(&value);
    let checks: [(&'static str, f32, bool, &'static str); 6] = [
        ("temperature", options.temperature, finite(options.temperature) && options.temperature >= 0.0, "non-negative"),
        ("top_p", options.top_p, unit(options.top_p) && options.top_p > 0.0, "in (0, 1]"),
        ("min_p", options.min_p, unit(options.min_p), "in [0, 1]"),
        (
            "repetition_penalty",
            options.repetition_penalty,
            finite(options.repetition_penalty) && options.repetition_penalty > 0.0,
            "greater than zero",
        ),
        ("presence_penalty", options.presence_penalty, penalty(options.presence_penalty), "in [-2, 2]"),
        ("frequency_penalty", options.frequency_penalty, penalty(options.frequency_penalty), "in [-2, 2]"),
    ];
    match checks.iter().find(|check| !check.2) {
        Some(&(parameter, value, _, rule)) => Err(SamplingError::Range { parameter, rule, value: f64::from(value) }),
        None => Ok(()),
    }
}

fn check_counts(options: &SamplingOptions) -> Result<(), SamplingError> {
    if let Some(0) = options.max_tokens {
        return Err(SamplingError::Range { parameter: "max_tokens", rule: "at least 1", value: 0.0 });
    }
    if let Some(max) = options.max_tokens
        && options.min_tokens > max
    {
        return Err(SamplingError::MinAboveMax { min: options.min_tokens, max });
    }
    match options.logprobs {
        Some(asked) if asked > LOGPROBS_MAX => Err(SamplingError::TooManyLogprobs { asked }),
        Some(_) | None => Ok(()),
    }
}

/// Why sampling options are not valid. The texts follow vLLM's.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SamplingError {
    #[error("{parameter} must be {rule}, got {value:?}")]
    Range { parameter: &'static str, rule: &'static str, value: f64 },
    #[error("min_tokens must be less than or equal to max_tokens={max}, got {min}")]
    MinAboveMax { min: u32, max: u32 },
    #[error("requested {asked} log-probabilities, which is more than the maximum of {LOGPROBS_MAX}")]
    TooManyLogprobs { asked: u32 },
    #[error("{parameter} names token {token}, which is outside the vocabulary of {size} tokens")]
    OutOfVocabulary { parameter: &'static str, token: u32, size: u32 },
}

impl SamplingError {
    /// The parameter at fault, as the API names it.
    pub fn parameter(&self) -> &'static str {
        match self {
            Self::Range { parameter, .. } | Self::OutOfVocabulary { parameter, .. } => parameter,
            Self::MinAboveMax { .. } => "min_tokens",
            Self::TooManyLogprobs { .. } => "logprobs",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(change: impl FnOnce(&mut SamplingOptions)) -> String {
        let mut options = SamplingOptions::default();
        change(&mut options);
        SamplingParams::new(options).unwrap_err().to_string()
    }

    #[test]
    fn an_option_out_of_range_is_named_with_its_value() {
        assert_eq!(error(|options| options.temperature = -1.0), "temperature must be non-negative, got -1.0");
        assert_eq!(error(|options| options.temperature = f32::NAN), "temperature must be non-negative, got NaN");
        assert_eq!(error(|options| options.top_p = 0.0), "top_p must be in (0, 1], got 0.0");
        assert_eq!(error(|options| options.min_p = 1.5), "min_p must be in [0, 1], got 1.5");
        assert_eq!(error(|options| options.repetition_penalty = 0.0), "repetition_penalty must be greater than zero, got 0.0");
        assert_eq!(error(|options| options.presence_penalty = 2.5), "presence_penalty must be in [-2, 2], got 2.5");
        assert_eq!(error(|options| options.frequency_penalty = -3.0), "frequency_penalty must be in [-2, 2], got -3.0");
        assert_eq!(error(|options| options.max_tokens = Some(0)), "max_tokens must be at least 1, got 0.0");
        assert_eq!(
            error(|options| (options.min_tokens, options.max_tokens) = (5, Some(4))),
            "min_tokens must be less than or equal to max_tokens=4, got 5"
        );
        assert_eq!(error(|options| options.logprobs = Some(21)), "requested 21 log-probabilities, which is more than the maximum of 20");
    }

    #[test]
    fn tiny_temperatures_are_greedy_or_raised() {
        let at = |temperature| SamplingParams::new(SamplingOptions { temperature, ..SamplingOptions::default() }).unwrap();
        assert!(at(1e-6).is_greedy());
        assert_eq!(at(1e-3).temperature, TEMPERATURE_MIN);
        assert_eq!(at(0.7).temperature, 0.7);
    }

    #[test]
    fn the_token_decides_before_the_length() {
        let options = SamplingOptions { stop_token_ids: vec![7, 9], max_tokens: Some(3), ..SamplingOptions::default() };
        let end = |last, tokens| options.end_after(last, tokens, &[2, 9]);
        assert_eq!([end(5, 2), end(5, 3)], [None, Some(FinishReason::Length)]);
        assert_eq!([end(7, 3), end(9, 1)], [Some(FinishReason::StopToken(7)), Some(FinishReason::EndOfSequence)]);
        let past_eos = SamplingOptions { ignore_eos: true, ..options.clone() };
        assert_eq!([past_eos.end_after(2, 1, &[2, 9]), past_eos.end_after(9, 1, &[2, 9])], [None, Some(FinishReason::StopToken(9))]);
    }

    #[test]
    fn params_travel_unchanged_and_invalid_ones_are_refused() {
        let options = SamplingOptions {
            temperature: 1e-3,
            top_p: 0.1,
            logit_bias: vec![(9, 0.3), (3, -1.0)],
            stop_token_ids: vec![7, 2],
            max_tokens: Some(5),
            ..SamplingOptions::default()
        };
        let params = SamplingParams::new(options).unwrap();
        let text = serde_json::to_string(&params).unwrap();
        assert_eq!(serde_json::from_str::<SamplingParams>(&text).unwrap(), params);
        let error = serde_json::from_str::<SamplingParams>(&text.replace("\"top_p\":0.1", "\"top_p\":1.5")).unwrap_err();
        assert!(error.to_string().starts_with("top_p must be in (0, 1], got 1.5"), "{error}");
    }

    #[test]
    fn token_ids_are_ordered_once_and_checked_against_the_vocabulary() {
        let params = SamplingParams::new(SamplingOptions {
            logit_bias: vec![(9, 500.0), (3, 1.0), (9, -500.0)],
            stop_token_ids: vec![7, 2, 7],
            ..SamplingOptions::default()
        })
        .unwrap();
        assert_eq!(params.logit_bias, [(3, 1.0), (9, -100.0)]);
        assert_eq!(params.stop_token_ids, [2, 7]);
        assert_eq!(params.check_vocabulary(10), Ok(()));
        assert_eq!(params.check_vocabulary(9), Err(SamplingError::OutOfVocabulary { parameter: "logit_bias", token: 9, size: 9 }));
    }
}
