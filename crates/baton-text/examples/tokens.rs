//! Tokens of texts and chats, by the files of a model: a line of JSON for each line of JSON on standard input. `scripts/test-tokens` holds
//! them against those of the library that engines use.
//!
//! `tokens FOLDER < lines`, or with a GGUF file for the folder, with lines like `{"text": "…", "special": true}` or, as a chat request, `{"messages": […], "tools": […],
//! "add_generation_prompt": true, "continue_final_message": false, "kwargs": {…}}`; answers are lists of ids, or `{"error": "…"}`.
#![allow(clippy::disallowed_methods, reason = "a program")]

use std::{
    io::{self, BufRead as _, Write as _},
    path::Path,
    process::ExitCode,
    sync::Arc,
    time::SystemTime,
};

use baton_gguf::Header;
use baton_text::{Clock, TemplateError, Tokenizer};
use serde::Deserialize;
use serde_json::{Map, Value, json};

#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Text { text: String, special: bool },
    Chat(Chat),
}

#[derive(Deserialize)]
struct Chat {
    messages: Value,
    tools: Option<Value>,
    #[serde(default)]
    add_generation_prompt: bool,
    #[serde(default)]
    continue_final_message: bool,
    #[serde(default)]
    kwargs: Map<String, Value>,
}

impl Chat {
    fn tokens(&self, text: &Tokenizer) -> Result<Vec<u32>, TemplateError> {
        let Self { messages, tools, kwargs, .. } = self;
        let prompt = if self.continue_final_message {
            text.render_chat_to_continue(messages, tools.as_ref(), kwargs)
        } else {
            text.render_chat(messages, tools.as_ref(), self.add_generation_prompt, kwargs)
        };
        Ok(text.encode(&prompt?, false))
    }
}

fn main() -> ExitCode {
    let Some(folder) = std::env::args().nth(1) else {
        eprintln!("give the folder of a model's tokenizer.json");
        return ExitCode::from(2);
    };
    match answer(Path::new(&folder)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn answer(folder: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let text = match folder.extension() {
        Some(extension) if extension == "gguf" => Tokenizer::from_gguf(&Header::parse(&std::fs::read(folder)?)?)?,
        _ => Tokenizer::from_hf(folder)?,
    };
    let text =
        text.with_clock(&(Arc::new(|| SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()) as Clock));
    let mut out = io::BufWriter::new(io::stdout().lock());
    for line in io::stdin().lock().lines() {
        let answer = match serde_json::from_str(&line?)? {
            Line::Text { text: given, special } => json!(text.encode(&given, special)),
            Line::Chat(chat) => chat.tokens(&text).map_or_else(|error| json!({ "error": error.to_string() }), |tokens| json!(tokens)),
        };
        writeln!(out, "{answer}")?;
    }
    Ok(out.flush()?)
}
