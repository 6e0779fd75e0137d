//! A tokenizer from Hugging Face files: `tokenizer.json` and, beside it, `tokenizer_config.json`, `generation_config.json`
//! and `chat_template.jinja` where they exist.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::{
    ChatTemplate, TextError,
    tokenizer::{Encoder, Parts},
    vocabulary::{Table, Vocabulary, byte_level_piece, sentencepiece_piece},
};

/// How token texts become bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Decoder {
    ByteLevel,
    Sentencepiece { strips_first_space: bool },
}

/// The texts of the files; only the first is required.
#[derive(Default)]
struct Files {
    tokenizer: String,
    tokenizer_config: Option<String>,
    generation_config: Option<String>,
    chat_template: Option<String>,
}

pub(crate) fn parts(path: &Path) -> Result<Parts, TextError> {
    let (folder, file) = if path.is_dir() { (path.to_owned(), path.join("tokenizer.json")) } else { (parent(path), path.to_owned()) };
    let files = Files {
        tokenizer: fs::read_to_string(&file).map_err(|error| TextError::Read { path: file, error })?,
        tokenizer_config: read_optional(folder.join("tokenizer_config.json"))?,
        generation_config: read_optional(folder.join("generation_config.json"))?,
        chat_template: read_optional(folder.join("chat_template.jinja"))?,
    };
    parts_of(&files)
}

fn parent(path: &Path) -> PathBuf {
    path.parent().map_or_else(PathBuf::new, Path::to_owned)
}

fn read_optional(path: PathBuf) -> Result<Option<String>, TextError> {
    match fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(TextError::Read { path, error }),
    }
}

fn parts_of(files: &Files) -> Result<Parts, TextError> {
    let encoder = Encoder::from_bytes(&files.tokenizer).map_err(|error| malformed("tokenizer.json", &error))?;
    let json = parse("tokenizer.json", &files.tokenizer)?;
    let config = files.tokenizer_config.as_deref().map_or(Ok(Value::Null), |text| parse("tokenizer_config.json", text))?;
    let generation = files.generation_config.as_deref().map_or(Ok(Value::Null), |text| parse("generation_config.json", text))?;
    let vocabulary = table(&encoder, decoder(&json["decoder"])?);
    let (bos, eos) = (token_text(&config["bos_token"]), token_text(&config["eos_token"]));
    let template = |source: &str| ChatTemplate::new(source, bos.unwrap_or_default(), eos.unwrap_or_default());
    let named = |name: &str| template_source(&config["chat_template"], name);
    let chat_template = files.chat_template.as_deref().or_else(|| named("default")).map(template).transpose()?;
    let tool_template = named("tool_use").filter(|_| files.chat_template.is_none()).map(template).transpose()?;
    let mut eos_ids: BTreeSet<u32> = eos.and_then(|eos| encoder.token_to_id(eos)).into_iter().collect();
    eos_ids.extend(ids(&generation["eos_token_id"]));
    // `bos` stays empty: the file's own post-processor adds what the model wants in front.
    Ok(Parts {
        encoder,
        vocabulary: Vocabulary::Table(vocabulary),
        bos: None,
        eos_ids: eos_ids.into_iter().collect(),
        chat_template,
        tool_template,
    })
}

fn parse(file: &str, text: &str) -> Result<Value, TextError> {
    serde_json::from_str(text).map_err(|error| malformed(file, &error))
}

fn table(encoder: &Encoder, decoder: Decoder) -> Table {
    let added = encoder.get_added_tokens_decoder();
    let largest = encoder.get_vocab(true).into_values().max();
    let pieces = (0..largest.map_or(0, |id| id + 1)).map(|id| {
        // An added token is matched in the text as it stands, so it decodes to itself.
        let plain = added.get(&id).map(|token| (token.content.clone().into_bytes(), token.special));
        plain.unwrap_or_else(|| {
            let token = encoder.id_to_token(id).unwrap_or_default();
            let piece = if decoder == Decoder::ByteLevel { byte_level_piece(&token) } else { sentencepiece_piece(&token) };
            (piece, false)
        })
    });
    Table::new(pieces, decoder == Decoder::Sentencepiece { strips_first_space: true })
}

fn decoder(json: &Value) -> Result<Decoder, TextError> {
    let name = json["type"].as_str().unwrap_or("none");
    let inner = || json["decoders"].as_array().into_iter().flatten();
    match name {
        "ByteLevel" => Ok(Decoder::ByteLevel),
        "Metaspace" => Ok(Decoder::Sentencepiece { strips_first_space: json["prepend_scheme"] != "never" }),
        "Sequence" if inner().any(|step| step["type"] == "ByteLevel") => Ok(Decoder::ByteLevel),
        "Sequence" if inner().any(|step| step["type"] == "ByteFallback") => {
            let strips_first_space = inner().any(|step| step["type"] == "Strip" && step["start"].as_u64() > Some(0));
            Ok(Decoder::Sentencepiece { strips_first_space })
        }
        _ => Err(TextError::Decoder { decoder: name.to_owned() }),
    }
}

/// A token in the config: its text, or an object that holds it.
fn token_text(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token["content"].as_str())
}

/// The template of that name among several; one alone is the default.
fn template_source<'a>(template: &'a Value, name: &str) -> Option<&'a str> {
    let named = || template.as_array()?.iter().find(|entry| entry["name"] == name)?["template"].as_str();
    template.as_str().filter(|_| name == "default").or_else(named)
}

/// One id or a list of them.
fn ids(value: &Value) -> Vec<u32> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    value.as_array().map_or_else(|| id(value).into_iter().collect(), |list| list.iter().filter_map(id).collect())
}

fn malformed(file: &str, error: &impl ToString) -> TextError {
    TextError::Malformed { file: file.to_owned(), message: error.to_string() }
}

#[cfg(test)]
mod tests;
