//! A tokenizer from the metadata of a GGUF file. Rules per pre-tokenizer name are llama.cpp's (`llama-vocab.cpp`).

use std::collections::BTreeSet;

use baton_gguf::{Header, Value};
use tokenizers::{
    AddedToken, NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior,
    models::bpe::{BPE, Vocab},
    normalizers::{NFC, Prepend, Replace, Sequence as Normalizers},
    pre_tokenizers::{byte_level::ByteLevel, digits::Digits, sequence::Sequence, split::Split, split::SplitPattern},
};

use crate::{
    ChatTemplate, TextError,
    tokenizer::{Encoder, Parts},
    vocabulary::{Table, Vocabulary, byte_level_piece, sentencepiece_piece},
};

/// Words, runs of digits up to three, punctuation and white space, as Llama 3 and GPT-4 split.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same with single digits.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// What one pre-tokenizer name means.
struct Rules {
    split: Vec<PreTokenizerWrapper>,
    /// A word that is a token is that token, whatever the merges say.
    ignore_merges: bool,
    normalize_nfc: bool,
    add_bos: bool,
}

/// ggml's token types, `enum llama_token_type`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TokenType {
    Normal,
    Control,
    UserDefined,
    Byte,
}

pub(crate) fn parts(header: &Header) -> Result<Parts, TextError> {
    let tokens = tokens(header)?;
    let types = token_types(header, tokens.len())?;
    let (encoder, vocabulary, adds_bos) = match header.str("tokenizer.ggml.model")? {
        "gpt2" => byte_level(header, &tokens, &types)?,
        "llama" => sentencepiece(header, &tokens, &types)?,
        model => return Err(TextError::Model { model: model.to_owned() }),
    };
    let add_bos = header.bool("tokenizer.ggml.add_bos_token").unwrap_or(adds_bos);
    let bos = token_id(header, "bos_token_id");
    let text_of = |id: Option<u32>| id.and_then(|id| tokens.get(id as usize)).copied().unwrap_or_default();
    let template = header.str("tokenizer.chat_template").ok();
    let eos_text = text_of(token_id(header, "eos_token_id"));
    let chat_template = template.map(|source| ChatTemplate::new(source, text_of(bos), eos_text)).transpose()?;
    let eos_ids = ["eos_token_id", "eot_token_id", "eom_token_id"].iter().filter_map(|key| token_id(header, key));
    Ok(Parts {
        encoder,
        vocabulary: Vocabulary::Table(vocabulary),
        bos: bos.filter(|_| add_bos),
        eos_ids: eos_ids.collect::<BTreeSet<_>>().into_iter().collect(),
        chat_template,
        tool_template: None,
    })
}

fn tokens(header: &Header) -> Result<Vec<&str>, TextError> {
    let tokens = header.array("tokenizer.ggml.tokens")?;
    tokens.iter().map(|token| token.as_str().ok_or_else(|| malformed("tokens", "has an entry that is not text"))).collect()
}

fn token_types(header: &Header, count: usize) -> Result<Vec<TokenType>, TextError> {
    let Ok(types) = header.array("tokenizer.ggml.token_type") else { return Ok(vec![TokenType::Normal; count]) };
    if types.len() != count {
        return Err(malformed("token_type", &format!("has {} entries for {count} tokens", types.len())));
    }
    Ok(types.iter().map(token_type).collect())
}

fn token_type(value: &Value) -> TokenType {
    match value.as_f64() {
        Some(3.0) => TokenType::Control,
        Some(4.0) => TokenType::UserDefined,
        Some(6.0) => TokenType::Byte,
        _ => TokenType::Normal,
    }
}

fn token_id(header: &Header, key: &str) -> Option<u32> {
    header.u64(&format!("tokenizer.ggml.{key}")).ok().and_then(|id| u32::try_from(id).ok())
}

fn byte_level(header: &Header, tokens: &[&str], types: &[TokenType]) -> Result<(Encoder, Table, bool), TextError> {
    let rules = rules(header.str("tokenizer.ggml.pre").unwrap_or("default"))?;
    let merges = header.array("tokenizer.ggml.merges")?.iter().map(split_merge).collect::<Result<Vec<_>, _>>()?;
    let model = BPE::builder().vocab_and_merges(vocabulary(tokens), merges).ignore_merges(rules.ignore_merges);
    let mut encoder = Encoder::new(model.build().map_err(|error| malformed("merges", &error.to_string()))?);
    encoder.with_pre_tokenizer(Some(Sequence::new(rules.split)));
    if rules.normalize_nfc {
        encoder.with_normalizer(Some(NFC));
    }
    add_special_tokens(&mut encoder, tokens, types);
    let pieces = tokens.iter().zip(types).map(|(token, kind)| match kind {
        TokenType::Control => (token.as_bytes().to_vec(), true),
        TokenType::UserDefined => (token.as_bytes().to_vec(), false),
        TokenType::Normal | TokenType::Byte => (byte_level_piece(token), false),
    });
    Ok((encoder, Table::new(pieces, false), rules.add_bos))
}

fn sentencepiece(header: &Header, tokens: &[&str], types: &[TokenType]) -> Result<(Encoder, Table, bool), TextError> {
    let scores = header.array("tokenizer.ggml.scores")?;
    if scores.len() != tokens.len() {
        return Err(malformed("scores", &format!("has {} entries for {} tokens", scores.len(), tokens.len())));
    }
    let scores: Vec<f64> = scores.iter().map(|score| score.as_f64().unwrap_or(f64::MIN)).collect();
    let adds_space = header.bool("tokenizer.ggml.add_space_prefix").unwrap_or(true);
    let unknown = token_id(header, "unknown_token_id").and_then(|id| tokens.get(id as usize));
    let vocab = vocabulary(tokens);
    let merges = merges_from_scores(tokens, types, &scores, &vocab);
    let mut model = BPE::builder().vocab_and_merges(vocab, merges).byte_fallback(true).fuse_unk(true);
    if let Some(unknown) = unknown {
        model = model.unk_token((*unknown).to_owned());
    }
    let mut encoder = Encoder::new(model.build().map_err(|error| malformed("tokens", &error.to_string()))?);
    let to_mark = Replace::new(" ", "▁").expect("the pattern is plain text");
    let mut normalizers = vec![NormalizerWrapper::Replace(to_mark)];
    if adds_space {
        normalizers.insert(0, NormalizerWrapper::Prepend(Prepend::new("▁".to_owned())));
    }
    encoder.with_normalizer(Some(Normalizers::new(normalizers)));
    add_special_tokens(&mut encoder, tokens, types);
    let pieces = tokens.iter().zip(types).map(|(token, kind)| match kind {
        TokenType::Control => (token.as_bytes().to_vec(), true),
        TokenType::UserDefined => (token.as_bytes().to_vec(), false),
        TokenType::Normal | TokenType::Byte => (sentencepiece_piece(token), false),
    });
    Ok((encoder, Table::new(pieces, adds_space), true))
}

/// Sentencepiece merges the pair whose joint token scores best; as ranked merges that is every way to cut every token in two.
fn merges_from_scores(tokens: &[&str], types: &[TokenType], scores: &[f64], vocab: &Vocab) -> Vec<(String, String)> {
    let mut ranked = Vec::new();
    for (id, token) in tokens.iter().enumerate().filter(|&(id, _)| types[id] == TokenType::Normal) {
        for (cut, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(cut);
            if let (Some(&left_id), Some(&right_id)) = (vocab.get(left), vocab.get(right)) {
                ranked.push((id, left_id, right_id));
            }
        }
    }
    // Equal scores do not occur in trained vocabularies; the ids only make the order certain.
    ranked.sort_by(|a, b| scores[b.0].total_cmp(&scores[a.0]).then(a.cmp(b)));
    let text = |id: u32| tokens[id as usize].to_owned();
    ranked.into_iter().map(|(_, left, right)| (text(left), text(right))).collect()
}

fn vocabulary(tokens: &[&str]) -> Vocab {
    tokens.iter().enumerate().map(|(id, token)| ((*token).to_owned(), id as u32)).collect()
}

/// Marks the tokens that text must match whole, before it is split into words.
fn add_special_tokens(encoder: &mut Encoder, tokens: &[&str], types: &[TokenType]) {
    let special = tokens.iter().zip(types).filter_map(|(token, kind)| {
        let control = *kind == TokenType::Control;
        (control || *kind == TokenType::UserDefined).then(|| AddedToken::from(*token, control).normalized(false))
    });
    encoder.add_tokens(&special.collect::<Vec<_>>());
}

fn split_merge(merge: &Value) -> Result<(String, String), TextError> {
    let pair = merge.as_str().and_then(|merge| merge.split_once(' '));
    let (left, right) = pair.ok_or_else(|| malformed("merges", "has an entry that is not two tokens"))?;
    Ok((left.to_owned(), right.to_owned()))
}

fn rules(pre: &str) -> Result<Rules, TextError> {
    let bytes = |use_regex| PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, use_regex));
    let plain = |split| Rules { split, ignore_merges: false, normalize_nfc: false, add_bos: false };
    Ok(match pre {
        "smollm" => plain(vec![PreTokenizerWrapper::Digits(Digits::new(true)), bytes(true)]),
        "gpt-2" | "phi-2" | "olmo" => plain(vec![bytes(true)]),
        "llama-bpe" | "llama3" | "llama-v3" => Rules { ignore_merges: true, add_bos: true, ..plain(vec![split(LLAMA3), bytes(false)]) },
        // The published Qwen2 tokenizers normalise to NFC first.
        "qwen2" | "deepseek-r1-qwen" => Rules { normalize_nfc: true, ..plain(vec![split(QWEN2), bytes(false)]) },
        "default" => plain(vec![split(r"[\p{P}\$\+<=>\^~\|]+"), split(r"\p{N}+"), split("[0-9][0-9][0-9]"), bytes(true)]),
        _ => {
            let supported = "default, gpt-2, smollm, llama-bpe, qwen2".to_owned();
            return Err(TextError::PreTokenizer { pre: pre.to_owned(), supported });
        }
    })
}

fn split(pattern: &str) -> PreTokenizerWrapper {
    let split = Split::new(SplitPattern::Regex(pattern.to_owned()), SplitDelimiterBehavior::Isolated, false);
    PreTokenizerWrapper::Split(split.expect("the pattern is a constant that compiles"))
}

fn malformed(key: &str, message: &str) -> TextError {
    TextError::Malformed { file: format!("GGUF metadata tokenizer.ggml.{key}"), message: message.to_owned() }
}

#[cfg(test)]
mod tests;
