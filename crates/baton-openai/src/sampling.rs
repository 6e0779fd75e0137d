//! Sampling between the engine's words and the migration protocol's. Both sides name every field, so that a new one cannot be left behind.

use baton_engine::{SamplingError, SamplingOptions, SamplingParams};
use baton_wire::migration::RunSampling;

/// As it travels to a replica.
pub fn sampling_to_wire(params: &SamplingParams) -> RunSampling {
    RunSampling {
        temperature: params.temperature,
        top_p: params.top_p,
        top_k: params.top_k,
        min_p: params.min_p,
        repetition_penalty: params.repetition_penalty,
        presence_penalty: params.presence_penalty,
        frequency_penalty: params.frequency_penalty,
        logit_bias: params.logit_bias.clone(),
        stop_token_ids: params.stop_token_ids.clone(),
        ignore_eos: params.ignore_eos,
        min_tokens: params.min_tokens,
        max_tokens: params.max_tokens,
        logprobs: params.logprobs,
    }
}

/// As an engine takes it; the error is of a value that no engine of ours allows.
pub fn sampling_from_wire(sampling: &RunSampling) -> Result<SamplingParams, SamplingError> {
    SamplingParams::new(SamplingOptions {
        temperature: sampling.temperature,
        top_p: sampling.top_p,
        top_k: sampling.top_k,
        min_p: sampling.min_p,
        repetition_penalty: sampling.repetition_penalty,
        presence_penalty: sampling.presence_penalty,
        frequency_penalty: sampling.frequency_penalty,
        logit_bias: sampling.logit_bias.clone(),
        stop_token_ids: sampling.stop_token_ids.clone(),
        ignore_eos: sampling.ignore_eos,
        min_tokens: sampling.min_tokens,
        max_tokens: sampling.max_tokens,
        logprobs: sampling.logprobs,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wire_s_neutral_values_are_the_engine_s() {
        assert_eq!(sampling_from_wire(&RunSampling::default()).unwrap(), SamplingParams::new(SamplingOptions::default()).unwrap());
        assert!(sampling_from_wire(&RunSampling { top_p: 2.0, ..RunSampling::default() }).is_err());
    }
}
