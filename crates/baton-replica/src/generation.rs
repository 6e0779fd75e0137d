//! One HTTP request in the engine: its prompts run there, and what they give becomes its answer.

use baton_engine::{NewRequest, Output, SubmitError};
use baton_openai::{Answer, Pushed, Token, Understood};
use baton_units::{Priority, RequestId, Tokens};
use baton_wire::openai::ErrorBody;
use bytes::Bytes;
use tokio::sync::mpsc;

use crate::driver::{EngineHandle, Submission, Update};

/// vLLM's words for an engine that is gone.
const ENGINE_GONE: &str = "EngineCore encountered an issue. See stack trace (above) for the root cause.";

pub(crate) fn engine_gone() -> ErrorBody {
    ErrorBody::internal(ENGINE_GONE)
}

/// A running request. Dropping it before its end aborts it in the engine.
pub(crate) struct Generation {
    engine: EngineHandle,
    updates: mpsc::Receiver<(usize, Update)>,
    /// The engine's id of each prompt.
    ids: Vec<RequestId>,
    choices_per_prompt: u32,
    answer: Answer,
    /// For the client, and not taken yet.
    ready: Vec<u8>,
}

/// What happened next.
#[derive(Debug)]
pub(crate) enum Step {
    Events(Bytes),
    /// All choices have ended; these are the last events.
    Done(Bytes),
    /// The engine is gone.
    Failed,
}

impl Generation {
    /// Submits all prompts and waits until the engine has taken them. `name` gives the id by which `/abort_requests` knows a prompt.
    pub(crate) async fn start(engine: &EngineHandle, understood: Understood, name: impl Fn(usize) -> String) -> Result<Self, ErrorBody> {
        let Understood { prompts, choices, seed, priority, salt, public, stream: _, answer } = understood;
        let room = |prompt: &baton_openai::Prompt| 2 + choices as usize * prompt.params.max_tokens.unwrap_or(0) as usize;
        let (sender, updates) = mpsc::channel(prompts.iter().map(room).sum::<usize>().max(1));
        engine.begin_generation();
        let ids = prompts.iter().map(|_| engine.next_id()).collect();
        let mut generation = Self { engine: engine.clone(), updates, ids, choices_per_prompt: choices, answer, ready: Vec::new() };
        for (slot, prompt) in prompts.into_iter().enumerate() {
            let request = NewRequest {
                choices,
                seed: Some(seed),
                prompt_index: slot as u32,
                priority: Priority(priority),
                salt: salt.clone(),
                public: public.map_or(Tokens::ZERO, |public| public.of(&prompt.tokens)),
                ..NewRequest::new(generation.ids[slot], prompt.tokens, prompt.params)
            };
            let submission = Submission { request, name: name(slot), slot, updates: sender.clone() };
            engine.submit(submission).map_err(|_| engine_gone())?;
        }
        drop(sender);
        generation.wait_until_accepted().await?;
        Ok(generation)
    }

    async fn wait_until_accepted(&mut self) -> Result<(), ErrorBody> {
        let mut missing = self.ids.len();
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

    /// Waits for the next events of a stream.
    pub(crate) async fn next(&mut self) -> Step {
        loop {
            if !self.ready.is_empty() {
                return Step::Events(self.take_ready());
            }
            if self.answer.has_ended() {
                self.answer.finish(&mut self.ready);
                return Step::Done(self.take_ready());
            }
            if self.advance().await.is_err() {
                return Step::Failed;
            }
        }
    }

    /// Waits for the answer that is one body.
    pub(crate) async fn whole(mut self) -> Result<Vec<u8>, ErrorBody> {
        while !self.answer.has_ended() {
            self.advance().await?;
        }
        self.answer.finish(&mut self.ready);
        Ok(std::mem::take(&mut self.ready))
    }

    async fn advance(&mut self) -> Result<(), ErrorBody> {
        match self.updates.recv().await {
            Some((slot, Update::Output(output))) => self.take(slot, output),
            Some((slot, Update::Aborted)) => self.take_abort(slot),
            Some((_, Update::Accepted)) => {}
            Some((_, Update::Refused(_) | Update::Failed)) | None => return Err(engine_gone()),
        }
        Ok(())
    }

    /// The next events are about as long.
    fn take_ready(&mut self) -> Bytes {
        let room = Vec::with_capacity(self.ready.len());
        std::mem::replace(&mut self.ready, room).into()
    }

    fn take(&mut self, slot: usize, output: Output) {
        let index = slot as u32 * self.choices_per_prompt + output.choice;
        self.answer.set_cached(slot as u32, output.cached_tokens.0);
        let token = Token { id: output.token, logprob: output.logprob, top: output.top };
        match self.answer.push(index, token, output.finish.map(|finish| finish.reason), &mut self.ready) {
            Pushed::Stopped => self.engine.stop(self.ids[slot], output.choice),
            Pushed::Running | Pushed::Ended => {}
        }
    }

    fn take_abort(&mut self, slot: usize) {
        let first = slot as u32 * self.choices_per_prompt;
        for index in first..first + self.choices_per_prompt {
            self.answer.abort(index, &mut self.ready);
        }
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.engine.end_generation();
        let running = |&(slot, _): &(u32, RequestId)| !self.answer.prompt_has_ended(slot);
        let running: Vec<RequestId> = (0..).zip(self.ids.iter().copied()).filter(running).map(|(_, id)| id).collect();
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
