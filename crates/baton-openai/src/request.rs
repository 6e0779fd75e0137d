//! From a request of the wire to what an engine runs.

use std::sync::Arc;

use baton_engine::{SamplingOptions, SamplingParams};
use baton_wire::openai::{ChatRequest, CompletionRequest, ErrorBody, Head, PublicTokens, Sampling};

use crate::{
    Answer, Asked, Format, Service, TextOptions, chat, check_prompt, check_supported,
    checks::{choices, not_supported},
    completion, output_limit, output_limit_or_short, sampling_options, text_options, with_max_tokens,
};

/// A request that was found valid as far as it can be without its prompts' tokens.
#[derive(Debug)]
pub struct Checked {
    service: Arc<Service>,
    sampling: Sampling,
    asked: Asked,
    options: SamplingOptions,
    choices: u32,
    priority: i32,
    text: TextOptions,
    api: Api,
}

#[derive(Debug, Clone, Copy)]
enum Api {
    Chat,
    Completion { echo: bool },
}

/// What to run, and how its output becomes an answer.
pub struct Understood {
    pub prompts: Vec<Prompt>,
    /// Of each prompt.
    pub choices: u32,
    /// The client's, or the caller's where it gave none.
    pub seed: u64,
    pub priority: i32,
    /// Separates prefixes that must not be shared.
    pub salt: Option<String>,
    /// Of each prompt that begins with them.
    pub public: Option<PublicTokens>,
    /// The answer is a stream of events, not one body.
    pub stream: bool,
    pub answer: Answer,
}

/// One prompt with its own limit on the output.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    pub tokens: Vec<u32>,
    pub params: SamplingParams,
}

impl Checked {
    /// Reads no messages: the caller renders and tokenizes them.
    pub fn chat(service: &Arc<Service>, request: &ChatRequest) -> Result<Self, ErrorBody> {
        chat::check_chat(request)?;
        let asked = Asked { max_tokens: request.output_limit(), logprobs: chat::logprobs(request)? };
        Self::new(service, &request.sampling, asked, 1, Api::Chat)
    }

    /// Reads of the prompts how many there are; the caller tokenizes them.
    pub fn completion(service: &Arc<Service>, request: &CompletionRequest) -> Result<Self, ErrorBody> {
        check_completion(request)?;
        let asked = Asked { max_tokens: request.sampling.max_tokens, logprobs: request.logprobs };
        Self::new(service, &request.sampling, asked, request.prompt.len(), Api::Completion { echo: request.echo == Some(true) })
    }

    fn new(service: &Arc<Service>, sampling: &Sampling, asked: Asked, prompts: usize, api: Api) -> Result<Self, ErrorBody> {
        Ok(Self {
            service: Arc::clone(service),
            sampling: sampling.clone(),
            asked,
            options: sampling_options(sampling, asked)?,
            choices: choices(sampling, prompts)?,
            priority: service.priority(sampling.priority)?,
            text: text_options(sampling)?,
            api,
        })
    }

    /// Why the output of another engine cannot go on from its tokens as if nothing had happened; `None` where it can: what comes is then
    /// what would have come (where the engines compute the same bits), or drawn from the same distribution.
    pub fn hinders_resuming(&self) -> Option<&'static str> {
        let options = &self.options;
        if self.asked.logprobs.is_some() {
            Some("log-probabilities")
        } else if options.presence_penalty != 0.0 || options.frequency_penalty != 0.0 {
            // They count output tokens, and those from before are a prompt's by then.
            Some("presence or frequency penalties")
        } else if self.sampling.seed.is_some() && options.temperature > 0.0 {
            // Its draws would begin anew.
            Some("a seed")
        } else if self.choices > 1 {
            Some("several choices")
        } else {
            None
        }
    }

    /// The request with the tokens of its prompts: of a chat one prompt, of a completion as many as it has. `head` begins the answer,
    /// and `seed` is for a client that gave none.
    pub fn with_prompts(self, head: Head, prompts: Vec<Vec<u32>>, seed: u64) -> Result<Understood, ErrorBody> {
        let prompts = prompts.into_iter().map(|tokens| self.prompt(tokens)).collect::<Result<Vec<_>, _>>()?;
        let answer = Answer::new(&self.service, &prompts, self.choices, &self.text, self.format(head, &prompts));
        Ok(Understood {
            prompts,
            choices: self.choices,
            seed: self.sampling.seed.map_or(seed, i64::cast_unsigned),
            priority: self.priority,
            stream: self.sampling.is_stream(),
            salt: self.sampling.cache_salt,
            public: self.sampling.cache_public,
            answer,
        })
    }

    fn prompt(&self, tokens: Vec<u32>) -> Result<Prompt, ErrorBody> {
        let (limits, asked) = (self.service.limits, self.asked.max_tokens);
        check_prompt(&tokens, limits)?;
        let max_tokens = match self.api {
            Api::Chat => output_limit(tokens.len(), asked, limits)?,
            Api::Completion { .. } => output_limit_or_short(tokens.len(), asked, limits)?,
        };
        Ok(Prompt { params: with_max_tokens(&self.options, max_tokens, &self.sampling, limits)?, tokens })
    }

    fn format(&self, head: Head, prompts: &[Prompt]) -> Box<dyn Format> {
        let (sampling, logprobs) = (&self.sampling, self.asked.logprobs.is_some());
        let (service, choices) = (Arc::clone(&self.service), self.choices);
        let return_ids = sampling.return_token_ids == Some(true);
        let as_ids = sampling.return_tokens_as_token_ids == Some(true);
        match self.api {
            Api::Chat => {
                let prompt_token_ids = prompts.first().filter(|_| return_ids).map(|prompt| prompt.tokens.clone());
                chat::format(chat::Shape { service, head, prompt_token_ids, return_ids, logprobs, as_ids }, sampling, choices)
            }
            Api::Completion { echo } => {
                let text = |prompt: &Prompt| self.service.tokenizer.decode(&prompt.tokens, true);
                let echoes = if echo { prompts.iter().map(text).collect() } else { Vec::new() };
                let ids = if return_ids { prompts.iter().map(|prompt| prompt.tokens.clone()).collect() } else { Vec::new() };
                let choice_count = choices as usize * prompts.len();
                let shape = completion::Shape { service, head, choices, echoes, prompts: ids, logprobs, as_ids };
                completion::format(shape, sampling, choice_count)
            }
        }
    }
}

fn check_completion(request: &CompletionRequest) -> Result<(), ErrorBody> {
    check_supported(&request.sampling, &request.rest)?;
    if request.suffix.as_ref().is_some_and(|suffix| !suffix.is_empty()) {
        return Err(ErrorBody::new(400, "BadRequestError", Some("suffix"), "suffix is not currently supported"));
    }
    if request.echo == Some(true) && request.logprobs.is_some() {
        return Err(ErrorBody { param: Some("logprobs".into()), ..not_supported("echo with logprobs") });
    }
    if request.prompt.is_empty() {
        return Err(ErrorBody::bad_request("You must pass at least one prompt"));
    }
    Ok(())
}
