use std::sync::Arc;

use axum::{
    extract::{State, rejection::BytesRejection},
    response::Response,
};
use baton_wire::{
    openai::{
        Completion, CompletionChoice, CompletionChunk, CompletionChunkChoice, CompletionLogprobs, CompletionRequest, ErrorBody, Head,
        Prompt, Usage,
    },
    sse,
};
use bytes::Bytes;
use http::{HeaderMap, StatusCode};

use super::{App, Format, answer, json_response, logprobs::Names, read, seed, stream_response};
use crate::{
    choice::{End, Piece},
    generation::{Common, Generation, Prepared, Step, engine_gone},
    request::{
        Asked, check_prompt, check_supported, choices, not_supported, output_limit, sampling_options, text_options, with_max_tokens,
    },
};

/// Output tokens of a completion that names no limit, as in OpenAI's API and vLLM.
const MAX_TOKENS_DEFAULT: u32 = 16;

/// `POST /v1/completions`.
pub(super) async fn completions(State(app): State<Arc<App>>, headers: HeaderMap, body: Result<Bytes, BytesRejection>) -> Response {
    answer(serve(&app, &headers, body).await)
}

async fn serve(app: &Arc<App>, headers: &HeaderMap, body: Result<Bytes, BytesRejection>) -> Result<Response, ErrorBody> {
    let request: CompletionRequest = read(headers, body)?;
    let head = app.head("cmpl", headers, &request.sampling)?;
    check(&request)?;
    let sampling = &request.sampling;
    let asked = Asked { max_tokens: sampling.max_tokens, logprobs: request.logprobs };
    let options = sampling_options(sampling, asked)?;
    let common = Common {
        choices: choices(sampling, request.prompt.len())?,
        seed: seed(sampling),
        priority: app.priority(sampling.priority)?,
        salt: sampling.cache_salt.clone(),
        text: text_options(sampling)?,
    };
    let prompts = tokens_of(app, request.prompt, sampling.add_special_tokens.unwrap_or(true)).await?;
    let (echo, return_ids) = (request.echo == Some(true), sampling.return_token_ids == Some(true));
    let shape = Shape {
        app: Arc::clone(app),
        head,
        choices: common.choices,
        echoes: if echo { prompts.iter().map(|tokens| app.tokenizer.decode(tokens, true)).collect() } else { Vec::new() },
        prompts: if return_ids { prompts.clone() } else { Vec::new() },
        logprobs: asked.logprobs.is_some(),
        as_ids: sampling.return_tokens_as_token_ids == Some(true),
    };
    let mut prepared = Vec::with_capacity(prompts.len());
    for (index, tokens) in prompts.into_iter().enumerate() {
        check_prompt(&tokens, app.limits)?;
        let fits = app.limits.max_model_len.saturating_sub(tokens.len() as u32);
        let wanted = asked.max_tokens.or(Some(MAX_TOKENS_DEFAULT.min(fits)).filter(|&tokens| tokens > 0));
        let max_tokens = output_limit(tokens.len(), wanted, app.limits)?;
        let params = with_max_tokens(&options, max_tokens, sampling, app.limits)?;
        prepared.push(Prepared { tokens, params, name: format!("{}-{index}", shape.head.id) });
    }
    let generation = Generation::start(&app.engine, &app.tokenizer, prepared, &common).await?;
    if sampling.is_stream() {
        let begun = vec![false; generation.choice_count() as usize];
        let offsets = vec![0; generation.choice_count() as usize];
        let (usage, continuous) = (sampling.includes_usage(), sampling.includes_continuous_usage());
        return Ok(stream_response(generation, CompletionStream { shape, usage, continuous, begun, offsets }));
    }
    shape.whole(generation).await
}

fn check(request: &CompletionRequest) -> Result<(), ErrorBody> {
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

async fn tokens_of(app: &App, prompt: Prompt, add_special: bool) -> Result<Vec<Vec<u32>>, ErrorBody> {
    let texts = match prompt {
        Prompt::Tokens(tokens) => return Ok(vec![tokens]),
        Prompt::TokenLists(lists) => return Ok(lists),
        Prompt::Text(text) => vec![text],
        Prompt::Texts(texts) => texts,
    };
    let mut prompts = Vec::with_capacity(texts.len());
    for text in texts {
        prompts.push(app.encode(text, add_special).await);
    }
    Ok(prompts)
}

/// What the answer looks like, streamed or whole.
struct Shape {
    app: Arc<App>,
    head: Head,
    /// Per prompt.
    choices: u32,
    /// Text of each prompt, if it is to stand before the output.
    echoes: Vec<String>,
    /// Tokens of each prompt, if ids were asked for.
    prompts: Vec<Vec<u32>>,
    logprobs: bool,
    as_ids: bool,
}

/// A choice that is being gathered.
#[derive(Default)]
struct Gathered {
    text: String,
    /// Characters of the output so far.
    chars: usize,
    tokens: Vec<u32>,
    logprobs: CompletionLogprobs,
    end: Option<End>,
}

impl Shape {
    fn names(&self) -> Names<'_> {
        Names { tokenizer: &self.app.tokenizer, as_ids: self.as_ids }
    }

    fn echo(&self, index: u32) -> &str {
        self.echoes.get((index / self.choices) as usize).map_or("", String::as_str)
    }

    fn prompt_ids(&self, index: u32) -> Option<Vec<u32>> {
        self.prompts.get((index / self.choices) as usize).cloned()
    }

    fn returns_ids(&self) -> bool {
        !self.prompts.is_empty()
    }

    async fn whole(self, mut generation: Generation) -> Result<Response, ErrorBody> {
        let begin = |index| Gathered { text: self.echo(index).to_owned(), ..Gathered::default() };
        let mut gathered: Vec<Gathered> = (0..generation.choice_count()).map(begin).collect();
        loop {
            match generation.next().await {
                Step::Piece { index, piece, .. } => {
                    let choice = &mut gathered[index as usize];
                    if let Some(token) = piece.token.as_ref().filter(|_| self.logprobs) {
                        self.names().add_completion(&mut choice.logprobs, token, choice.chars);
                    }
                    choice.chars += piece.text.chars().count();
                    choice.text += &piece.text;
                    choice.tokens.extend(piece.token.map(|token| token.id));
                    choice.end = piece.end;
                }
                Step::Done => break,
                Step::Failed => return Err(engine_gone()),
            }
        }
        let counts = generation.counts();
        let usage = Usage::completion(counts.prompt, counts.output, counts.cached);
        let choices = (0..).zip(gathered).map(|(index, choice)| self.choice(index, choice)).collect();
        Ok(json_response(StatusCode::OK, &Completion::new(self.head, choices, usage)))
    }

    fn choice(&self, index: u32, gathered: Gathered) -> CompletionChoice {
        let end = gathered.end.expect("a choice ends before its request does");
        CompletionChoice {
            logprobs: self.logprobs.then_some(gathered.logprobs),
            stop_reason: end.stop_reason,
            token_ids: self.returns_ids().then_some(gathered.tokens),
            prompt_token_ids: self.prompt_ids(index),
            ..CompletionChoice::new(index, gathered.text, end.reason)
        }
    }
}

struct CompletionStream {
    shape: Shape,
    /// A last chunk with the usage.
    usage: bool,
    /// Usage in every chunk.
    continuous: bool,
    /// Which choices have sent something.
    begun: Vec<bool>,
    /// Characters that each choice has sent.
    offsets: Vec<usize>,
}

impl Format for CompletionStream {
    fn piece(&mut self, generation: &Generation, index: u32, piece: Piece, tokens: u32) -> Vec<Bytes> {
        let shape = &self.shape;
        let is_first = !std::mem::replace(&mut self.begun[index as usize], true);
        let offset = &mut self.offsets[index as usize];
        let logprobs = piece.token.as_ref().filter(|_| shape.logprobs).map(|token| {
            let mut logprobs = CompletionLogprobs::default();
            shape.names().add_completion(&mut logprobs, token, *offset);
            logprobs
        });
        *offset += piece.text.chars().count();
        let text = if is_first { format!("{}{}", shape.echo(index), piece.text) } else { piece.text };
        let choice = CompletionChunkChoice {
            logprobs,
            prompt_token_ids: is_first.then(|| shape.prompt_ids(index)).flatten(),
            token_ids: shape.returns_ids().then(|| piece.token.iter().map(|token| token.id).collect()),
            ..CompletionChunkChoice::text(index, text)
        };
        let chunk = match piece.end {
            None => CompletionChunk::new(&shape.head, vec![choice]),
            Some(end) => {
                let chunk = CompletionChunk::new(&shape.head, vec![choice.finished(end.reason, end.stop_reason)]);
                if self.usage { chunk } else { chunk.with_fingerprint(&shape.head) }
            }
        };
        let usage = self.continuous.then(|| Usage::counts(generation.prompt_tokens_of(index), tokens));
        vec![sse::encode_json(&CompletionChunk { usage, ..chunk })]
    }

    fn end(&mut self, generation: &Generation) -> Vec<Bytes> {
        let counts = generation.counts();
        let usage = || Usage::completion_stream(counts.prompt, counts.output, counts.cached);
        self.usage.then(|| sse::encode_json(&CompletionChunk::usage(&self.shape.head, usage()))).into_iter().collect()
    }
}
