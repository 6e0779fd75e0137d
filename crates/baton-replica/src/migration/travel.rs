//! A sequence between the engine's words and the wire's.

use std::time::Duration;

use baton_engine::{FinishReason, History, NewRequest, Output, OutputEnds, Prefix, SamplingError, SequenceState};
use baton_openai::{sampling_from_wire, sampling_to_wire};
use baton_units::{BlockSize, Priority, RequestId, Tokens};
use baton_wire::migration::{
    self as wire, OutputEntry, RunEnds, RunProgress, RunRequest, TokenLogprobs,
    handshake::{Hello, KvLayout},
};

/// What travels of a sequence besides its output.
pub(super) fn to_wire(state: &SequenceState) -> RunRequest {
    let SequenceState { request, output: _, model, ends, computed, history } = state;
    RunRequest {
        model: model.clone(),
        prompt: request.prompt.clone(),
        sampling: sampling_to_wire(&request.params),
        seed: request.seed.expect("a seed is drawn at admission"),
        prompt_index: request.prompt_index,
        choice_index: request.first_choice,
        priority: request.priority.0,
        adapter: request.adapter.clone(),
        salt: request.salt.clone(),
        public: request.public.0,
        ends: ends.as_ref().map(|ends| RunEnds { eos: ends.eos.clone(), length_limit: ends.length_limit.0 }),
        progress: RunProgress {
            computed: computed.0,
            age_us: micros(history.age),
            since_first_scheduled_us: history.since_first_scheduled.map(micros),
            since_first_token_us: history.since_first_token.map(micros),
            cached: history.cached.map(|tokens| tokens.0),
            preemptions: history.preemptions,
        },
    }
}

/// The sequence as the engine takes it, after `output`, under an id of this engine.
pub(super) fn from_wire(run: &RunRequest, id: RequestId, output: Vec<u32>) -> Result<SequenceState, SamplingError> {
    let request = NewRequest {
        seed: Some(run.seed),
        prompt_index: run.prompt_index,
        first_choice: run.choice_index,
        priority: Priority(run.priority),
        adapter: run.adapter.clone(),
        salt: run.salt.clone(),
        public: Tokens(run.public),
        ..NewRequest::new(id, run.prompt.clone(), sampling_from_wire(&run.sampling)?)
    };
    let progress = run.progress;
    Ok(SequenceState {
        request,
        output,
        model: run.model.clone(),
        ends: run.ends.as_ref().map(|ends| OutputEnds { eos: ends.eos.clone(), length_limit: Tokens(ends.length_limit) }),
        computed: Tokens(progress.computed),
        history: History {
            age: Duration::from_micros(progress.age_us),
            since_first_scheduled: progress.since_first_scheduled_us.map(Duration::from_micros),
            since_first_token: progress.since_first_token_us.map(Duration::from_micros),
            cached: progress.cached.map(Tokens),
            forked: false,
            preemptions: progress.preemptions,
        },
    })
}

/// The prefix whose copy is asked for by what would run after it.
pub(super) fn prefix_of(run: &RunRequest) -> Prefix {
    let RunRequest { model, prompt, adapter, salt, public, .. } = run.clone();
    Prefix { model, tokens: prompt, adapter, salt, public: Tokens(public) }
}

/// As it travels in a plan, which has the tokens beside it.
pub(super) fn prefix_to_wire(prefix: &Prefix) -> RunRequest {
    let Prefix { model, adapter, salt, public, .. } = prefix.clone();
    RunRequest { model, adapter, salt, public: public.0, ..RunRequest::default() }
}

/// Token ids of entries; a finish has none.
pub(super) fn token_ids(entries: &[OutputEntry]) -> Vec<u32> {
    entries
        .iter()
        .filter_map(|entry| match entry {
            OutputEntry::Token { id, .. } => Some(*id),
            OutputEntry::Finish(_) => None,
        })
        .collect()
}

pub(super) fn token_entry(output: Output) -> OutputEntry {
    let logprobs = output.logprob.map(|chosen| TokenLogprobs { chosen, top: output.top });
    OutputEntry::Token { id: output.token, logprobs }
}

pub(super) fn finish_entry(reason: FinishReason) -> OutputEntry {
    OutputEntry::Finish(match reason {
        FinishReason::EndOfSequence => wire::FinishReason::EndOfSequence,
        FinishReason::StopToken(id) => wire::FinishReason::StopToken(id),
        FinishReason::Length => wire::FinishReason::Length,
    })
}

pub(super) fn layout_to_wire(layout: &baton_engine::KvLayout) -> KvLayout {
    KvLayout { format: layout.format.clone(), block_size: layout.block_size.get(), block_bytes: layout.block_bytes.0 }
}

/// Of the engine's KV; where there is none, nothing is counted by it.
pub(super) fn block_size(hello: &Hello) -> BlockSize {
    hello.kv_layout.as_ref().and_then(|layout| BlockSize::new(layout.block_size)).unwrap_or(BlockSize::DEFAULT)
}

pub(super) fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use baton_engine::{SamplingOptions, SamplingParams};

    use super::*;

    #[test]
    fn a_sequence_travels_unchanged() {
        let options = SamplingOptions {
            temperature: 0.7,
            top_p: 0.9,
            top_k: 40,
            min_p: 0.05,
            repetition_penalty: 1.1,
            presence_penalty: 0.5,
            frequency_penalty: -0.5,
            logit_bias: vec![(3, -1.0)],
            stop_token_ids: vec![7],
            ignore_eos: true,
            min_tokens: 2,
            max_tokens: Some(20),
            logprobs: Some(3),
        };
        let request = NewRequest {
            seed: Some(u64::MAX),
            prompt_index: 1,
            first_choice: 2,
            priority: Priority(-3),
            adapter: Some("a".to_owned()),
            salt: Some("s".to_owned()),
            public: Tokens(2),
            ..NewRequest::new(RequestId(9), vec![1, 2, 3], SamplingParams::new(options).unwrap())
        };
        let state = SequenceState {
            request,
            output: vec![4, 5],
            model: "m".to_owned(),
            ends: Some(OutputEnds { eos: vec![2], length_limit: Tokens(23) }),
            computed: Tokens(4),
            history: History {
                age: Duration::from_micros(70),
                since_first_scheduled: Some(Duration::from_micros(60)),
                since_first_token: Some(Duration::from_micros(50)),
                cached: Some(Tokens(1)),
                forked: false,
                preemptions: 1,
            },
        };
        let bytes = to_wire(&state).to_bytes();
        let run = RunRequest::from_bytes(&bytes).unwrap();
        assert_eq!(from_wire(&run, RequestId(9), vec![4, 5]).unwrap(), state);
    }
}
