use std::path::PathBuf;

use baton_gguf::GgufError;

/// Why a tokenizer cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    #[error("{path} cannot be read ({error}); give a tokenizer.json or the folder that holds one", path = path.display())]
    Read { path: PathBuf, error: std::io::Error },
    #[error("{file} is not what a tokenizer needs: {message}")]
    Malformed { file: String, message: String },
    #[error("the GGUF's tokenizer metadata cannot be used: {0}")]
    Gguf(#[from] GgufError),
    #[error("the GGUF's tokenizer model is \"{model}\"; supported are gpt2 and llama, else give the model's tokenizer.json")]
    Model { model: String },
    #[error("the GGUF's pre-tokenizer is \"{pre}\"; supported are {supported}, else give the model's tokenizer.json")]
    PreTokenizer { pre: String, supported: String },
    #[error("the tokenizer decodes with \"{decoder}\"; supported are ByteLevel, ByteFallback and Metaspace")]
    Decoder { decoder: String },
    #[error("the chat template cannot be used: {0}")]
    Template(#[from] TemplateError),
}

/// Why a chat template gave no prompt.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    #[error("the chat template does not parse: {message}")]
    Syntax { message: String },
    /// The template called `raise_exception`: the conversation is not one that the model takes.
    #[error("{message}")]
    Raised { message: String },
    #[error("the chat template took more than {fuel} steps; the conversation or the template is too large")]
    OutOfFuel { fuel: u64 },
    #[error("the chat template failed: {message}")]
    Failed { message: String },
    #[error("message {index} has a content part of type \"{kind}\"; this model takes text only")]
    ContentPart { index: usize, kind: String },
    #[error("messages must be a list of objects with a role; message {index} is not")]
    Message { index: usize },
    #[error("continue_final_message is set, but the chat template does not end a prompt with the text of the last message")]
    NothingToContinue,
}
