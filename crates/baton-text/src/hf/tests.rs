use std::{fs::File, io::Read, sync::LazyLock};

use baton_gguf::Header;
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::gguf;

/// `SmolLM2`'s tokenizer written out as a `tokenizer.json`.
static SMOLLM2: LazyLock<String> = LazyLock::new(|| {
    let mut bytes = Vec::new();
    File::open(baton_testkit::smollm2()).unwrap().take(8 << 20).read_to_end(&mut bytes).unwrap();
    let mut encoder = gguf::parts(&Header::parse(&bytes).unwrap()).unwrap().encoder;
    encoder.with_decoder(Some(tokenizers::decoders::byte_level::ByteLevel::default()));
    encoder.to_string(false).unwrap()
});

static PARTS: LazyLock<Parts> = LazyLock::new(|| {
    parts_of(&Files {
        tokenizer: SMOLLM2.clone(),
        tokenizer_config: Some(
            json!({ "bos_token": "<|im_start|>", "eos_token": { "content": "<|im_end|>" }, "chat_template": [
                { "name": "tool_use", "template": "tools" }, { "name": "default", "template": "{{ bos_token }}{{ eos_token }}" },
            ] })
            .to_string(),
        ),
        generation_config: Some(json!({ "eos_token_id": [2, 0] }).to_string()),
        chat_template: None,
    })
    .unwrap()
});

proptest! {
    /// The library decodes the same vocabulary its own way; ours must not differ.
    #[test]
    fn decoding_is_what_the_library_gives(ids in prop::collection::vec(0u32..49_152, 0..50), skip: bool) {
        let mut bytes = Vec::new();
        for &id in ids.iter().filter(|&&id| !skip || !PARTS.vocabulary.is_special(id)) {
            PARTS.vocabulary.append(id, &mut bytes);
        }
        prop_assert_eq!(String::from_utf8_lossy(&bytes), PARTS.encoder.decode(&ids, skip).unwrap());
    }
}

#[test]
fn the_files_beside_it_give_ends_and_template() {
    assert_eq!(PARTS.eos_ids, [0, 2]);
    let template = PARTS.chat_template.as_ref().unwrap();
    let prompt = template.render(&json!([]), None, true, &serde_json::Map::new()).unwrap();
    assert_eq!(prompt, "<|im_start|><|im_end|>");
}

#[test]
fn decoders_are_told_apart() {
    let llama = json!({ "type": "Sequence", "decoders": [{ "type": "Replace" }, { "type": "ByteFallback" }, { "type": "Fuse" },
        { "type": "Strip", "content": " ", "start": 1, "stop": 0 }] });
    assert_eq!(decoder(&llama).unwrap(), Decoder::Sentencepiece { strips_first_space: true });
    let gemma = json!({ "type": "Sequence", "decoders": [{ "type": "Replace" }, { "type": "ByteFallback" }, { "type": "Fuse" }] });
    assert_eq!(decoder(&gemma).unwrap(), Decoder::Sentencepiece { strips_first_space: false });
    assert_eq!(decoder(&json!({ "type": "ByteLevel" })).unwrap(), Decoder::ByteLevel);
    let error = decoder(&json!({ "type": "WordPiece" })).unwrap_err();
    assert!(error.to_string().contains("WordPiece"), "{error}");
}

#[test]
fn a_missing_file_is_named() {
    let error = parts(Path::new("no/such/tokenizer.json")).err().unwrap();
    assert!(error.to_string().starts_with("no/such/tokenizer.json cannot be read"), "{error}");
}
