//! One HTTP request in the engine: its prompts, their choices, and what they have given so far.

use std::{collections::VecDeque, sync::Arc};

use baton_engine::{NewRequest, SamplingParams, SubmitError};
use baton_text::Tokenizer;
use baton_units::{Priority, RequestId};
use baton_wire::openai::ErrorBody;
use tokio::sync::mpsc;

use crate::{
    choice::{Choice, Piece, TextOptions},
    driver::{EngineHandle, Submission, Update},
};

/// vLLM's words for an engine that is gone.
const ENGINE_GONE: &str = "EngineCore encountered an issue. See stack trace (above) for the root cause.";

pub(crate) fn engine_gone() -> ErrorBody {
    ErrorBody::internal(ENGINE_GONE)
}

/// One prompt with its own limit on the output.
pub(crate) struct Prepared {
    pub(crate) tokens: Vec<u32>,
    pub(crate) params: SamplingParams,
    /// The engine's id for it, as `/abort_requests` knows it.
    pub(crate) name: String,
}

/// What all prompts of the request share.
pub(crate) struct Common {
    pub(crate) choices: u32,
    /// Drawn when the client gave none.
    pub(crate) seed: u64,
    pub(crate) priority: i32,
    pub(crate) salt: Option<String>,
    pub(crate) text: TextOptions,
}

/// A running request. Dropping it before its end aborts it in the engine.
pub(crate) struct Generation {
    engine: EngineHandle,
    updates: mpsc::Receiver<(usize, Update)>,
    slots: Vec<Slot>,
    choices_per_prompt: u32,
    ready: VecDeque<Step>,
}

struct Slot {
    id: RequestId,
    prompt_tokens: u32,
    cached_tokens: u32,
    choices: Vec<Choice>,
    tokens: Vec<u32>,
}

/// What happened next.
#[derive(Debug)]
pub(crate) enum Step {
    Piece {
        /// Over all prompts: the choices of the first one come first.
        index: u32,
        piece: Piece,
        /// Tokens of this choice so far.
        tokens: u32,
    },
    /// All choices have ended.
    Done,
    /// The engine is gone.
    Failed,
}

/// Token counts over all prompts and choices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) prompt: u32,
    pub(crate) output: u32,
    pub(crate) cached: u32,
}

impl Generation {
    /// Submits all prompts and waits until the engine has taken them.
    pub(crate) async fn start(
        engine: &EngineHandle,
        tokenizer: &Arc<Tokenizer>,
        prompts: Vec<Prepared>,
        common: &Common,
    ) -> Result<Self, ErrorBody> {
        let room = |prompt: &Prepared| 2 + common.choices as usize * prompt.params.max_tokens.unwrap_or(0) as usize;
        let (sender, updates) = mpsc::channel(prompts.iter().map(room).sum::<usize>().max(1));
        engine.begin_generation();
        let mut generation =
            Self { engine: engine.clone(), updates, slots: Vec::new(), choices_per_prompt: common.choices, ready: VecDeque::new() };
        for (slot, prompt) in prompts.into_iter().enumerate() {
            let id = engine.next_id();
            generation.slots.push(Slot {
                id,
                prompt_tokens: prompt.tokens.len() as u32,
                cached_tokens: 0,
                choices: (0..common.choices).map(|_| Choice::new(tokenizer, &common.text)).collect(),
                tokens: vec![0; common.choices as usize],
            });
            let request = NewRequest {
                choices: common.choices,
                seed: Some(common.seed),
                prompt_index: slot as u32,
                priority: Priority(common.priority),
                salt: common.salt.clone(),
                ..NewRequest::new(id, prompt.tokens, prompt.params)
            };
            let submission = Submission { request, name: prompt.name, slot, updates: sender.clone() };
            engine.submit(submission).map_err(|_| engine_gone())?;
        }
        drop(sender);
        generation.wait_until_accepted().await?;
        Ok(generation)
    }

    async fn wait_until_accepted(&mut self) -> Result<(), ErrorBody> {
        let mut missing = self.slots.len();
        while missing > 0 {
            match self.updates.recv().await {
                Some((_, Update::Accepted)) => missing -= 1,
                Some((_, Update::Refused(error))) => return Err(refusal(&error)),
                Some((slot, Update::Output(output))) => self.take(slot, output),
                Some((slot, Update::Aborted)) => self.take_abort(slot),
                Some((_, Update::Failed)) | None => return Err(engine_gone()),
            }
        }
        Ok(())
    }

    pub(crate) async fn next(&mut self) -> Step {
        loop {
            if let Some(step) = self.ready.pop_front() {
                return step;
            }
            if self.has_ended() {
                return Step::Done;
            }
            match self.updates.recv().await {
                Some((slot, Update::Output(output))) => self.take(slot, output),
                Some((slot, Update::Aborted)) => self.take_abort(slot),
                Some((_, Update::Accepted)) => {}
                Some((_, Update::Refused(_) | Update::Failed)) | None => return Step::Failed,
            }
        }
    }

    pub(crate) fn counts(&self) -> Counts {
        self.slots.iter().fold(Counts::default(), |sum, slot| Counts {
            prompt: sum.prompt + slot.prompt_tokens,
            output: sum.output + slot.tokens.iter().sum::<u32>(),
            cached: sum.cached + slot.cached_tokens,
        })
    }

    /// Choices over all prompts.
    pub(crate) fn choice_count(&self) -> u32 {
        self.slots.len() as u32 * self.choices_per_prompt
    }

    pub(crate) fn prompt_tokens_of(&self, index: u32) -> u32 {
        self.slots[(index / self.choices_per_prompt) as usize].prompt_tokens
    }

    fn has_ended(&self) -> bool {
        self.slots.iter().all(Slot::has_ended)
    }

    fn take(&mut self, slot: usize, output: baton_engine::Output) {
        let state = &mut self.slots[slot];
        let choice = output.choice;
        state.cached_tokens = output.cached_tokens.0;
        let Some(piece) = state.choices[choice as usize].push(output) else { return };
        let tokens = &mut state.tokens[choice as usize];
        *tokens += 1;
        if piece.end.as_ref().is_some_and(|end| end.by_text) {
            self.engine.stop(state.id, choice);
        }
        let index = slot as u32 * self.choices_per_prompt + choice;
        self.ready.push_back(Step::Piece { index, piece, tokens: *tokens });
    }

    fn take_abort(&mut self, slot: usize) {
        let first = slot as u32 * self.choices_per_prompt;
        let state = &mut self.slots[slot];
        for (index, (choice, &tokens)) in (first..).zip(state.choices.iter_mut().zip(&state.tokens)) {
            self.ready.extend(choice.abort().map(|piece| Step::Piece { index, piece, tokens }));
        }
    }
}

impl Slot {
    fn has_ended(&self) -> bool {
        self.choices.iter().all(Choice::has_ended)
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.engine.end_generation();
        let running: Vec<RequestId> = self.slots.iter().filter(|slot| !slot.has_ended()).map(|slot| slot.id).collect();
        if !running.is_empty() {
            self.engine.abort(running);
        }
    }
}

/// The engine's refusal as the wire says it. What can be checked before was checked before.
fn refusal(error: &SubmitError) -> ErrorBody {
    match error {
        SubmitError::NeverFits { prompt, fits } => ErrorBody::prompt_too_long(prompt.0, fits.0),
        SubmitError::OutOfVocabulary { token, .. } => ErrorBody::token_out_of_vocabulary(u64::from(*token)),
        SubmitError::QueueFull { .. } => ErrorBody::overloaded(error.to_string()),
        SubmitError::Duplicate(_) => ErrorBody::internal(error.to_string()),
        SubmitError::EmptyPrompt | SubmitError::NoChoices | SubmitError::Sampling(_) => ErrorBody::bad_request(error.to_string()),
    }
}
