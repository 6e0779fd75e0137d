//! Whether an engine makes the same tokens as the gateway: of a text that tokenizers disagree about, and of a chat by its template.

use std::{sync::Arc, time::Duration};

use baton_text::Tokenizer;
use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    config::EngineKind,
    engine::{Agreement, Engine},
    intake::{ChatPrompt, PromptSource},
    prompt::Tokenization,
    upstream::{FetchError, Upstream},
};

/// Digits, white space, other scripts, characters of several tokens, code.
const TEXT: &str = "The year 2026, 3.14159 and 1000000.\n\n\tfn main() {    println!(\"na\u{ef}ve\"); }\r\n\u{65e5}\u{672c}\u{8a9e} \u{1f600}\u{1f468}\u{200d}\u{1f4bb} e\u{301}  \u{a0}x";
const CACHE_BYTES: usize = 64 << 10;

#[derive(Debug, Deserialize)]
struct Answer {
    tokens: Vec<u32>,
}

/// Asks the engine. What it does not answer is no disagreement.
pub(super) async fn compare(upstream: &Upstream, engine: &Engine, model: &str, text: &Arc<Tokenizer>, timeout: Duration) -> Agreement {
    let ask = async |path: &str, body: Value| -> Result<Bytes, FetchError> {
        upstream.post(engine, path, body.to_string().into(), timeout).await
    };
    // llama.cpp puts a beginning-of-text token before whatever has none, by its model.
    let adds_special = engine.config.kind == EngineKind::LlamaCpp;
    let messages = [json!({ "role": "system", "content": "Be brief." }), json!({ "role": "user", "content": TEXT })];
    let (theirs, their_chat) = match engine.config.kind {
        EngineKind::Vllm | EngineKind::Baton => (
            ask("/tokenize", json!({ "model": model, "prompt": TEXT, "add_special_tokens": false })).await,
            ask("/tokenize", json!({ "model": model, "messages": messages, "add_generation_prompt": true })).await,
        ),
        EngineKind::LlamaCpp => {
            let theirs = ask("/tokenize", json!({ "content": TEXT, "add_special": true })).await;
            let prompt = ask("/apply-template", json!({ "messages": messages })).await.ok().and_then(|answer| prompt_in(&answer));
            match prompt {
                // The template's own beginning-of-text token is cut from the prompt, and put there again when it becomes tokens.
                Some(prompt) => (theirs, ask("/tokenize", json!({ "content": prompt, "add_special": true, "parse_special": true })).await),
                None => (theirs, Err(FetchError::Unreadable("no template".to_owned()))),
            }
        }
        EngineKind::Sglang | EngineKind::OpenAi => return Agreement::Unchecked,
    };
    let read = |answer: Result<Bytes, FetchError>| serde_json::from_slice::<Answer>(&answer.ok()?).ok().map(|answer| answer.tokens);
    let (theirs, their_chat) = (read(theirs), read(their_chat));
    let chat = ChatPrompt::of(&messages);
    let chat = Tokenization::new(Some(text.clone()), CACHE_BYTES).tokenize(&PromptSource::Chat(chat), 0).await;
    let agreements = [
        theirs.map(|theirs| theirs == text.encode(TEXT, adds_special)),
        their_chat.filter(|_| chat.exact).map(|theirs| theirs == chat.tokens),
    ];
    match agreements {
        [Some(false), _] | [_, Some(false)] => Agreement::Different,
        // What is sent to it as tokens rests on its template, too.
        [_, None] if engine.config.kind == EngineKind::LlamaCpp => Agreement::Unchecked,
        [Some(true), _] | [_, Some(true)] => Agreement::Same,
        [None, None] => Agreement::Unchecked,
    }
}

fn prompt_in(answer: &[u8]) -> Option<String> {
    serde_json::from_slice::<Value>(answer).ok()?.get("prompt")?.as_str().map(str::to_owned)
}
