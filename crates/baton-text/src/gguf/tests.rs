use std::{collections::BTreeMap, fs::File, io::Read, sync::LazyLock};

use proptest::prelude::*;
use serde_json::{Map, Value as Json, json};

use super::*;
use crate::Tokenizer;

static SMOLLM2: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::from_gguf(&smollm2_header()).unwrap());

/// The header is within the first few megabytes.
fn smollm2_header() -> Header {
    let mut bytes = Vec::new();
    File::open(baton_testkit::smollm2()).unwrap().take(8 << 20).read_to_end(&mut bytes).unwrap();
    Header::parse(&bytes).unwrap()
}

#[test]
fn smollm2_chats_in_the_ids_that_vllm_used() {
    let fixture: Json = serde_json::from_str(include_str!("../../tests/fixtures/smollm2.json")).unwrap();
    for case in fixture["chats"].as_array().unwrap() {
        let messages = json!([{ "role": "user", "content": case["user"] }]);
        let prompt = SMOLLM2.render_chat(&messages, None, true, &Map::new()).unwrap();
        assert_eq!(json!(SMOLLM2.encode(&prompt, false)), case["ids"]);
    }
}

#[test]
fn smollm2_reads_text_as_vllm_did_and_writes_it_back() {
    let fixture: Json = serde_json::from_str(include_str!("../../tests/fixtures/smollm2.json")).unwrap();
    for case in fixture["texts"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let ids = SMOLLM2.encode(text, true);
        assert_eq!(json!(ids), case["ids"], "{text}");
        assert_eq!(SMOLLM2.decode(&ids, true), text);
    }
}

#[test]
fn smollm2_knows_its_special_tokens() {
    assert_eq!(SMOLLM2.encode("<|im_start|>", false), [1]);
    assert_eq!(SMOLLM2.decode(&[1, 9690, 2], true), "system");
    assert_eq!(SMOLLM2.decode(&[1, 9690, 2], false), "<|im_start|>system<|im_end|>");
    assert_eq!(SMOLLM2.eos_ids(), [2]);
    assert_eq!(SMOLLM2.vocab_size(), 49152);
    assert_eq!(SMOLLM2.token_str(282).unwrap(), "Ġof");
    assert_eq!(SMOLLM2.token_bytes(282), b" of");
    assert_eq!(SMOLLM2.token_str(49152), None);
    assert!(!SMOLLM2.chat_template().unwrap().supports_tools());
}

proptest! {
    #[test]
    fn any_text_survives_smollm2(text in any::<String>()) {
        let ids = SMOLLM2.encode(&text, false);
        prop_assert_eq!(SMOLLM2.decode(&ids, false), text);
    }

    #[test]
    fn streamed_pieces_join_to_the_decoded_whole(ids in prop::collection::vec(0u32..49_200, 0..60), skip: bool) {
        let mut stream = SMOLLM2.detokenizer(skip);
        let mut text: String = ids.iter().map(|&id| stream.push(id)).collect();
        text.push_str(&stream.finish());
        prop_assert_eq!(text, SMOLLM2.decode(&ids, skip));
    }
}

/// A GGUF header with nothing but a tokenizer.
fn header(entries: &[(&str, Value)]) -> Header {
    let metadata = entries.iter().map(|(key, value)| (format!("tokenizer.{key}"), value.clone()));
    Header { version: 3, metadata: metadata.collect::<BTreeMap<_, _>>(), tensors: Vec::new(), data_offset: 0 }
}

fn text(text: &str) -> Value {
    Value::String(text.to_owned())
}

fn texts(list: &[&str]) -> Value {
    Value::Array(list.iter().copied().map(text).collect())
}

fn llama(extra: &[(&str, Value)]) -> Tokenizer {
    let tokens = ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", "▁", "a", "b", "▁a", "ab", "▁ab", "<|x|>"];
    let types = [2, 3, 3, 6, 6, 1, 1, 1, 1, 1, 1, 4];
    let scores = [0., 0., 0., 0., 0., -9., -8., -7., -2., -1., -3., 0.];
    let mut entries = vec![
        ("ggml.model", text("llama")),
        ("ggml.tokens", texts(&tokens)),
        ("ggml.token_type", Value::Array(types.map(Value::I32).to_vec())),
        ("ggml.scores", Value::Array(scores.map(Value::F32).to_vec())),
        ("ggml.bos_token_id", Value::U32(1)),
        ("ggml.eos_token_id", Value::U32(2)),
        ("ggml.unknown_token_id", Value::U32(0)),
    ];
    entries.extend_from_slice(extra);
    Tokenizer::from_gguf(&header(&entries)).unwrap()
}

#[test]
fn sentencepiece_merges_the_best_scored_pair_first() {
    let tokenizer = llama(&[]);
    // "▁ab": "ab" (-1) beats "▁a" (-2), then "▁" + "ab".
    assert_eq!(tokenizer.encode("ab", true), [1, 10]);
    assert_eq!(tokenizer.encode("a b", false), [8, 5, 7]);
    // No such letter, so its two bytes; then a letter without byte tokens.
    assert_eq!(tokenizer.encode("é", false), [5, 3, 4]);
    assert_eq!(tokenizer.encode("z", false), [5, 0]);
    assert_eq!(tokenizer.encode("<s><|x|>", false), [1, 11]);
    assert_eq!(tokenizer.decode(&[1, 10, 5, 3, 4, 11, 2], true), "ab é<|x|>");
    assert_eq!(tokenizer.decode(&[8, 8], true), "a a");
    assert_eq!(tokenizer.decode(&[3], true), "\u{fffd}");
}

#[test]
fn metadata_decides_on_the_first_token_and_the_first_space() {
    let tokenizer = llama(&[("ggml.add_bos_token", Value::Bool(false)), ("ggml.add_space_prefix", Value::Bool(false))]);
    assert_eq!(tokenizer.encode("ab", true), [9]);
    assert_eq!(tokenizer.decode(&[8], true), " a");
}

/// A byte-level tokenizer without merges but for "1 1" and "11 1", which show how digits are cut.
fn gpt2(pre: &str) -> Result<Tokenizer, TextError> {
    let bytes: Vec<String> =
        (0u32..0x144).filter_map(char::from_u32).filter(|c| byte_level_piece(&c.to_string()).len() == 1).map(String::from).collect();
    let tokens: Vec<&str> = bytes.iter().map(String::as_str).chain(["11", "111", "<bos>", "Ġx"]).collect();
    let bos = tokens.len() - 2;
    let entries = [
        ("ggml.model", text("gpt2")),
        ("ggml.pre", text(pre)),
        ("ggml.tokens", texts(&tokens)),
        ("ggml.merges", texts(&["1 1", "11 1"])),
        ("ggml.bos_token_id", Value::U32(bos as u32)),
        ("ggml.eos_token_id", Value::U32(0)),
    ];
    Tokenizer::from_gguf(&header(&entries))
}

fn pieces(pre: &str, text: &str) -> Vec<String> {
    let tokenizer = gpt2(pre).unwrap();
    tokenizer.encode(text, true).into_iter().map(|id| tokenizer.token_str(id).unwrap()).collect()
}

#[test]
fn each_pre_tokenizer_cuts_digits_and_words_its_way() {
    assert_eq!(pieces("smollm", "1111 x"), ["1", "1", "1", "1", "Ġ", "x"]);
    assert_eq!(pieces("qwen2", "1111 x"), ["1", "1", "1", "1", "Ġ", "x"]);
    assert_eq!(pieces("gpt-2", "1111 x"), ["11", "11", "Ġ", "x"]);
    // Llama 3 cuts after three digits, puts its first token in front and takes whole words from the vocabulary.
    assert_eq!(pieces("llama-bpe", "1111 x"), ["<bos>", "111", "1", "Ġx"]);
    assert_eq!(pieces("default", "1111 x"), ["111", "1", "Ġ", "x"]);
    // A letter and its combining accent become one character before Qwen2 sees them.
    assert_eq!(pieces("qwen2", "e\u{301}"), ["Ã", "©"]);
}

#[test]
fn what_is_not_supported_says_what_is() {
    let error = gpt2("tekken").unwrap_err().to_string();
    assert!(error.contains("\"tekken\"") && error.contains("llama-bpe"), "{error}");
    let error = Tokenizer::from_gguf(&header(&[("ggml.model", text("bert")), ("ggml.tokens", texts(&[]))])).unwrap_err();
    assert!(matches!(error, TextError::Model { model } if model == "bert"));
}
