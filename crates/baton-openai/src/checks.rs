//! Fields of the wire checked and turned into what the engine takes. Refusals are worded as vLLM words them.

use baton_engine::{SamplingError, SamplingOptions, SamplingParams};
use baton_wire::openai::{ErrorBody, Sampling};
use serde_json::{Map, Value};

use crate::{Limits, TextOptions};

/// Output tokens where none are named, as in OpenAI's completions and in vLLM's sampling parameters.
const MAX_TOKENS_DEFAULT: u32 = 16;

/// Choices of one HTTP request over all its prompts, at most; each is a sequence in the engine.
const CHOICES_MAX: usize = 1024;

/// The API's own fields on top of [`Sampling`].
#[derive(Debug, Clone, Copy, Default)]
pub struct Asked {
    /// Output tokens, if the client named a number.
    pub max_tokens: Option<u32>,
    /// Candidates to report per token.
    pub logprobs: Option<u32>,
}

/// Checks a prompt's length and the output asked for against the model; returns the most output tokens.
pub fn output_limit(prompt: usize, asked: Option<u32>, limits: Limits) -> Result<u32, ErrorBody> {
    let limit = limits.max_model_len;
    let tokens = u32::try_from(prompt).unwrap_or(u32::MAX);
    if tokens > limit {
        return Err(ErrorBody::prompt_too_long(tokens, limit));
    }
    if let Some(asked) = asked.filter(|&asked| asked > limit) {
        return Err(ErrorBody::max_tokens_too_large(asked, limit));
    }
    let fits = limit - tokens;
    match asked {
        Some(0) => Err(ErrorBody::invalid("max_tokens", 0, "max_tokens must be at least 1, got 0.")),
        Some(asked) if asked > fits => Err(ErrorBody::context_exceeded(tokens, asked, limit)),
        None if fits == 0 => Err(ErrorBody::context_exceeded(tokens, 1, limit)),
        Some(asked) => Ok(asked),
        None => Ok(fits),
    }
}

/// As [`output_limit`] for APIs that make a short output where the client names no limit.
pub fn output_limit_or_short(prompt: usize, asked: Option<u32>, limits: Limits) -> Result<u32, ErrorBody> {
    let fits = limits.max_model_len.saturating_sub(u32::try_from(prompt).unwrap_or(u32::MAX));
    output_limit(prompt, asked.or(Some(MAX_TOKENS_DEFAULT.min(fits)).filter(|&tokens| tokens > 0)), limits)
}

/// Refuses an empty prompt and token ids that the model does not have.
pub fn check_prompt(tokens: &[u32], limits: Limits) -> Result<(), ErrorBody> {
    if tokens.is_empty() {
        return Err(ErrorBody::bad_request("The decoder prompt cannot be empty"));
    }
    match tokens.iter().find(|&&token| u64::from(token) >= limits.vocabulary) {
        Some(&token) => Err(ErrorBody::token_out_of_vocabulary(u64::from(token))),
        None => Ok(()),
    }
}

/// Everything about sampling that does not depend on the prompt; `max_tokens` is set per prompt by [`with_max_tokens`].
pub fn sampling_options(sampling: &Sampling, asked: Asked) -> Result<SamplingOptions, ErrorBody> {
    let defaults = SamplingOptions::default();
    let float = |value: Option<f64>, default: f32| value.map_or(default, |value| value as f32);
    Ok(SamplingOptions {
        temperature: float(sampling.temperature, defaults.temperature),
        top_p: float(sampling.top_p, defaults.top_p),
        top_k: top_k(sampling.top_k)?,
        min_p: float(sampling.min_p, defaults.min_p),
        repetition_penalty: float(sampling.repetition_penalty, defaults.repetition_penalty),
        presence_penalty: float(sampling.presence_penalty, defaults.presence_penalty),
        frequency_penalty: float(sampling.frequency_penalty, defaults.frequency_penalty),
        logit_bias: logit_bias(sampling.logit_bias.as_ref())?,
        stop_token_ids: sampling.stop_token_ids.clone().unwrap_or_default(),
        ignore_eos: sampling.ignore_eos.unwrap_or(false),
        min_tokens: sampling.min_tokens.unwrap_or(0),
        max_tokens: None,
        logprobs: asked.logprobs,
    })
}

/// The options as the engine takes them, for one prompt.
pub fn with_max_tokens(
    options: &SamplingOptions,
    max_tokens: u32,
    sampling: &Sampling,
    limits: Limits,
) -> Result<SamplingParams, ErrorBody> {
    let options = SamplingOptions { max_tokens: Some(max_tokens), ..options.clone() };
    let params = SamplingParams::new(options).map_err(|error| sampling_error(&error, sampling))?;
    let size = u32::try_from(limits.vocabulary).unwrap_or(u32::MAX);
    params.check_vocabulary(size).map_err(|error| sampling_error(&error, sampling))?;
    Ok(params)
}

/// The number of choices for each of so many prompts.
pub fn choices(sampling: &Sampling, prompts: usize) -> Result<u32, ErrorBody> {
    let n = sampling.choices();
    if n == 0 {
        return Err(ErrorBody::invalid("n", n, "n must be at least 1, got 0."));
    }
    let greedy = sampling.temperature.is_some_and(|temperature| temperature < 1e-5);
    if n > 1 && greedy {
        return Err(ErrorBody::invalid("n", n, &format!("n must be 1 when using greedy sampling, got {n}.")));
    }
    let all = prompts.saturating_mul(n as usize);
    if all > CHOICES_MAX {
        return Err(ErrorBody::invalid(
            "n",
            n,
            &format!("{prompts} prompts with {n} choices each are {all}; at most {CHOICES_MAX} can be made in one request."),
        ));
    }
    Ok(n)
}

/// How the output is to be turned into text; refuses empty stop strings.
pub fn text_options(sampling: &Sampling) -> Result<TextOptions, ErrorBody> {
    let stops = sampling.stop_strings().to_vec();
    if stops.iter().any(String::is_empty) {
        return Err(ErrorBody::bad_request("stop cannot contain an empty string."));
    }
    Ok(TextOptions {
        stops,
        include_stop: sampling.include_stop_str_in_output.unwrap_or(false),
        skip_special: sampling.skip_special_tokens.unwrap_or(true),
        min_tokens: sampling.min_tokens.unwrap_or(0),
    })
}

/// Refuses what would change the answer and is not done here; ignoring it would give a wrong answer without a word.
pub fn check_supported(sampling: &Sampling, rest: &Map<String, Value>) -> Result<(), ErrorBody> {
    const REFUSED: [&str; 11] = [
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "structural_tag",
        "use_beam_search",
        "bad_words",
        "truncate_prompt_tokens",
        "prompt_embeds",
        "logits_processors",
    ];
    let asked = |value: &Value| !matches!(value, Value::Null | Value::Bool(false)) && value.as_array().is_none_or(|list| !list.is_empty());
    let refused = REFUSED.into_iter().find(|&field| rest.get(field).is_some_and(asked));
    let typed = [("allowed_token_ids", sampling.allowed_token_ids.is_some()), ("prompt_logprobs", sampling.prompt_logprobs.is_some())];
    if let Some(field) = refused.or_else(|| typed.into_iter().find(|&(_, asked)| asked).map(|(field, _)| field)) {
        return Err(not_supported(field));
    }
    match rest.get("response_format").and_then(|format| format["type"].as_str()) {
        None | Some("text") => {}
        Some(kind) => {
            return Err(ErrorBody::new(
                400,
                "BadRequestError",
                Some("response_format"),
                format!(
                    "response_format of type {kind} is not supported by this server; leave it out and ask for the format in the prompt"
                ),
            ));
        }
    }
    if sampling.stream_options.is_some() && !sampling.is_stream() {
        return Err(ErrorBody::new(
            400,
            "BadRequestError",
            Some("stream_options"),
            "Stream options can only be defined when `stream=True`.",
        ));
    }
    Ok(())
}

pub(crate) fn not_supported(field: &str) -> ErrorBody {
    ErrorBody::new(400, "BadRequestError", Some(field), format!("{field} is not supported by this server; leave it out"))
}

fn top_k(asked: Option<i64>) -> Result<u32, ErrorBody> {
    match asked {
        None | Some(-1) => Ok(0),
        Some(k) => {
            u32::try_from(k).map_err(|_| ErrorBody::invalid("top_k", k, &format!("top_k must be 0 (disable), or at least 1, got {k}.")))
        }
    }
}

fn logit_bias(asked: Option<&Map<String, Value>>) -> Result<Vec<(u32, f32)>, ErrorBody> {
    let entry = |(token, bias): (&String, &Value)| match (token.parse(), bias.as_f64()) {
        (Ok(token), Some(bias)) => Ok((token, bias as f32)),
        _ => Err(ErrorBody::invalid(
            "logit_bias",
            bias,
            &format!("Invalid key or value in logit_bias: {token:?}; keys are token ids, values numbers."),
        )),
    };
    asked.into_iter().flatten().map(entry).collect()
}

/// The engine's refusal with the number as the client wrote it.
fn sampling_error(error: &SamplingError, sampling: &Sampling) -> ErrorBody {
    let SamplingError::Range { parameter, rule, value } = error else {
        return ErrorBody::new(400, "BadRequestError", Some(error.parameter()), format!("{error}."));
    };
    let written = match *parameter {
        "temperature" => sampling.temperature,
        "top_p" => sampling.top_p,
        "min_p" => sampling.min_p,
        "repetition_penalty" => sampling.repetition_penalty,
        "presence_penalty" => sampling.presence_penalty,
        "frequency_penalty" => sampling.frequency_penalty,
        _ => None,
    };
    let value = written.unwrap_or(*value);
    ErrorBody::invalid(parameter, format_args!("{value:?}"), &format!("{parameter} must be {rule}, got {value:?}."))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const LIMITS: Limits = Limits { max_model_len: 2048, vocabulary: 49152 };

    fn sampling(body: Value) -> Sampling {
        serde_json::from_value(body).unwrap()
    }

    #[test]
    fn lengths_are_refused_with_vllms_words() {
        assert_eq!(output_limit(41, None, LIMITS), Ok(2007));
        assert_eq!(output_limit(41, Some(5), LIMITS), Ok(5));
        assert_eq!(output_limit(3000, None, LIMITS).unwrap_err().param.as_deref(), Some("input_tokens"));
        let error = output_limit(10, Some(5000), LIMITS).unwrap_err();
        assert!(error.message.starts_with("max_tokens=5000 cannot be greater than max_model_len=2048."), "{}", error.message);
        assert!(output_limit(2000, Some(100), LIMITS).unwrap_err().message.contains("for a total of 2100"));
        assert!(output_limit(2048, None, LIMITS).unwrap_err().message.contains("for a total of 2049"));
        assert_eq!(output_limit(2047, None, LIMITS), Ok(1));
        assert_eq!([41, 2040].map(|prompt| output_limit_or_short(prompt, None, LIMITS)), [Ok(16), Ok(8)]);
        assert_eq!(output_limit_or_short(2048, None, LIMITS), output_limit(2048, None, LIMITS));
        assert_eq!(output_limit_or_short(41, Some(500), LIMITS), Ok(500));
    }

    #[test]
    fn numbers_out_of_range_are_quoted_as_the_client_wrote_them() {
        let refuse = |body: Value| {
            let sampling = sampling(body);
            let options = sampling_options(&sampling, Asked::default())?;
            with_max_tokens(&options, 5, &sampling, LIMITS).map(|_| ())
        };
        let error = refuse(json!({ "temperature": -1 })).unwrap_err();
        assert_eq!(error.message, "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)");
        assert_eq!(refuse(json!({ "top_p": 1.1 })).unwrap_err().message, "top_p must be in (0, 1], got 1.1. (parameter=top_p, value=1.1)");
        assert_eq!(refuse(json!({ "top_k": -2 })).unwrap_err().param.as_deref(), Some("top_k"));
        assert_eq!(refuse(json!({ "min_tokens": 6 })).unwrap_err().param.as_deref(), Some("min_tokens"));
        assert_eq!(refuse(json!({ "stop_token_ids": [49152] })).unwrap_err().param.as_deref(), Some("stop_token_ids"));
        assert_eq!(refuse(json!({ "logit_bias": { "a": 1 } })).unwrap_err().param.as_deref(), Some("logit_bias"));
        assert_eq!(refuse(json!({ "logit_bias": { "7": -100 }, "top_k": -1, "temperature": 0 })), Ok(()));
    }

    #[test]
    fn what_cannot_be_done_is_refused_and_not_ignored() {
        let refuse = |rest: Value| check_supported(&Sampling::default(), rest.as_object().unwrap()).map_err(|error| error.param.unwrap());
        assert_eq!(refuse(json!({ "guided_json": {} })), Err("guided_json".to_owned()));
        assert_eq!(refuse(json!({ "response_format": { "type": "json_object" } })), Err("response_format".to_owned()));
        assert_eq!(
            refuse(json!({ "response_format": { "type": "text" }, "use_beam_search": false, "bad_words": [], "user": "u" })),
            Ok(())
        );
        let prompt_logprobs = sampling(json!({ "prompt_logprobs": 1 }));
        assert_eq!(check_supported(&prompt_logprobs, &Map::new()).unwrap_err().param.as_deref(), Some("prompt_logprobs"));
        let options = sampling(json!({ "stream_options": { "include_usage": true } }));
        assert_eq!(check_supported(&options, &Map::new()).unwrap_err().param.as_deref(), Some("stream_options"));
    }

    #[test]
    fn choices_have_a_bound_and_greedy_makes_one() {
        assert_eq!(choices(&sampling(json!({ "n": 3 })), 2), Ok(3));
        assert!(choices(&sampling(json!({ "n": 2, "temperature": 0 })), 1).is_err());
        assert!(choices(&sampling(json!({ "n": 0 })), 1).is_err());
        assert!(choices(&sampling(json!({ "n": 513 })), 2).is_err());
        assert!(text_options(&sampling(json!({ "stop": ["a", ""] }))).is_err());
    }

    #[test]
    fn prompts_are_checked_against_the_vocabulary() {
        assert_eq!(check_prompt(&[1, 49151], LIMITS), Ok(()));
        assert_eq!(check_prompt(&[1, 99_999_999], LIMITS).unwrap_err().message, "Token id 99999999 is out of vocabulary");
        assert!(check_prompt(&[], LIMITS).is_err());
    }
}
