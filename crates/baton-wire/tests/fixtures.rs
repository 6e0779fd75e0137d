//! Bytes captured from real servers: every decoder must read them, and our types must write them back unchanged.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic like tests")]

use std::{fs, path::PathBuf};

use baton_kv::{EngineHash, KvEvent};
use baton_wire::{
    kv_events::{self, Message},
    openai::{
        self, ChatChunk, ChatCompletion, ChatRequest, Completion, CompletionChunk, CompletionRequest, DetokenizeResponse, ErrorBody,
        ErrorResponse, ModelList, TokenizeResponse,
    },
    sse,
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

fn fixture(path: &str) -> Vec<u8> {
    fs::read(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(path)).unwrap()
}

/// Body of a captured answer, with the chunk framing taken away.
fn body(path: &str) -> Vec<u8> {
    let bytes = fixture(path);
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").unwrap();
    let head = String::from_utf8_lossy(&bytes[..end]).to_ascii_lowercase();
    let body = &bytes[end + 4..];
    if head.contains("transfer-encoding: chunked") { unchunk(body) } else { body.to_vec() }
}

fn unchunk(mut bytes: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(end) = bytes.windows(2).position(|window| window == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).unwrap(), 16).unwrap();
        let chunk = &bytes[end + 2..];
        body.extend_from_slice(&chunk[..size.min(chunk.len())]);
        bytes = chunk.get(size + 2..).unwrap_or_default();
    }
    body
}

fn names(folder: &str, suffix: &str) -> Vec<String> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(folder);
    let mut names: Vec<String> = fs::read_dir(root).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name.ends_with(suffix));
    names.sort();
    names.into_iter().map(|name| format!("{folder}/{name}")).collect()
}

fn streams() -> Vec<String> {
    let all = ["vllm/http", "vllm/migration", "llamacpp/http"].map(|folder| names(folder, ".resp")).concat();
    let streams: Vec<String> =
        all.into_iter().filter(|name| fixture(name).windows(17).any(|window| window == b"text/event-stream")).collect();
    assert!(streams.len() >= 20, "{streams:?}");
    streams
}

fn decode_all(chunks: &[&[u8]]) -> Vec<sse::Event> {
    let mut decoder = sse::Decoder::default();
    let mut events = Vec::new();
    for chunk in chunks {
        events.extend(decoder.push(chunk).map(Result::unwrap));
    }
    events
}

#[test]
fn every_stream_gives_the_same_events_at_every_split() {
    for name in streams() {
        let body = body(&name);
        let whole = decode_all(&[&body]);
        assert!(whole.len() > 3, "{name}");
        let raw: Vec<u8> = whole.iter().flat_map(|event| event.raw.to_vec()).collect();
        assert!(body.starts_with(&raw), "{name}");
        // Around each split only the events next to it can differ, so a window keeps this linear.
        for split in 0..=body.len() {
            let start = body[..split.saturating_sub(2000)].windows(2).rposition(|window| window == b"\n\n").map_or(0, |at| at + 2);
            let window = &body[start..body.len().min(split + 2000)];
            let (left, right) = window.split_at(split - start);
            assert_eq!(decode_all(&[left, right]), decode_all(&[window]), "{name} split at {split}");
        }
        let bytes: Vec<&[u8]> = body.chunks(1).collect();
        assert_eq!(decode_all(&bytes), whole, "{name} byte by byte");
    }
}

#[test]
fn complete_streams_end_with_done_and_cut_ones_do_not() {
    for name in streams().iter().filter(|name| !name.contains("anthropic") && !name.contains("responses")) {
        let events = decode_all(&[&body(name)]);
        let cut = name.contains("client-abort") || name.contains("chat-stream-client");
        // llama.cpp's own completion API has no end marker.
        let own_api = name.starts_with("llamacpp/http/completion-stream");
        assert_eq!(events.last().unwrap().is_done(), !cut && !own_api, "{name}");
    }
}

fn check_round_trip<T: Serialize + DeserializeOwned>(name: &str, json: &[u8]) -> T {
    let value: T = serde_json::from_slice(json).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_eq!(serde_json::to_string(&value).unwrap(), String::from_utf8_lossy(json), "{name}");
    value
}

#[test]
fn vllm_answers_are_written_back_byte_for_byte() {
    let mut seen = [0; 4];
    for name in names("vllm/http", ".resp").into_iter().chain(names("vllm/migration", ".resp")) {
        let body = body(&name);
        let events = decode_all(&[&body]);
        let pieces: Vec<Vec<u8>> = if events.is_empty() {
            vec![body]
        } else {
            events.iter().filter_map(|event| event.data.as_ref().map(|data| data.to_vec())).collect()
        };
        for piece in pieces {
            let object = serde_json::from_slice::<Value>(&piece).ok().and_then(|value| Some(value.get("object")?.as_str()?.to_owned()));
            match (object.as_deref(), events.is_empty()) {
                (Some("chat.completion"), true) => {
                    seen[0] += usize::from(check_round_trip::<ChatCompletion>(&name, &piece).choices.len() == 1);
                }
                (Some("chat.completion.chunk"), false) => seen[1] += usize::from(check_round_trip::<ChatChunk>(&name, &piece).created > 0),
                (Some("text_completion"), true) => {
                    seen[2] += usize::from(!check_round_trip::<Completion>(&name, &piece).choices.is_empty());
                }
                (Some("text_completion"), false) => seen[3] += usize::from(check_round_trip::<CompletionChunk>(&name, &piece).created > 0),
                _ => {}
            }
        }
    }
    assert!(seen.iter().zip([5, 50, 9, 150]).all(|(seen, least)| *seen >= least), "{seen:?}");
}

#[test]
fn captured_requests_are_read() {
    let (mut chats, mut completions) = (0, 0);
    for name in names("vllm/http", ".req").into_iter().filter(|name| !name.contains("/err-")) {
        let bytes = fixture(&name);
        let is_for = |path: &str| bytes.starts_with(format!("POST {path} ").as_bytes());
        if is_for("/v1/chat/completions") {
            let request: ChatRequest = openai::parse(&body(&name)).unwrap();
            assert!(request.rest.keys().all(|key| key == "response_format"), "{name}: {:?}", request.rest);
            chats += 1;
        } else if is_for("/v1/completions") {
            let request: CompletionRequest = openai::parse(&body(&name)).unwrap();
            assert!(!request.prompt.is_empty() && request.rest.is_empty(), "{name}");
            completions += 1;
        }
    }
    assert!(chats >= 10 && completions >= 15, "{chats} {completions}");
}

#[test]
fn small_vllm_answers_are_written_back_byte_for_byte() {
    for name in ["models", "models-with-lora"] {
        check_round_trip::<ModelList>(name, &body(&format!("vllm/http/{name}.resp")));
    }
    for name in ["tokenize-chat", "tokenize-prompt"] {
        check_round_trip::<TokenizeResponse>(name, &body(&format!("vllm/http/{name}.resp")));
    }
    check_round_trip::<DetokenizeResponse>("detokenize", &body("vllm/http/detokenize.resp"));
    let mut errors = 0;
    for name in names("vllm/http", ".resp").into_iter().filter(|name| name.contains("/err-") || name.contains("/lora-")) {
        let body = body(&name);
        if body.starts_with(b"{\"error\"") {
            check_round_trip::<ErrorResponse>(&name, &body);
            errors += 1;
        }
    }
    assert!(errors >= 12, "{errors}");
}

#[test]
fn our_errors_are_those_of_vllm() {
    let cases = [
        ("err-prompt-too-long", ErrorBody::prompt_too_long(3000, 2048)),
        ("err-max-tokens-too-large", ErrorBody::max_tokens_too_large(5000, 2048)),
        ("err-wrong-model", ErrorBody::model_not_found("nope", &["smollm2-135m"])),
        ("err-token-out-of-vocab", ErrorBody::token_out_of_vocabulary(99_999_999)),
        ("err-bad-content-type", ErrorBody::unsupported_media_type()),
        ("err-bad-temperature", ErrorBody::invalid("temperature", "-1.0", "temperature must be non-negative, got -1.0.")),
    ];
    for (name, error) in cases {
        assert_eq!(String::from_utf8_lossy(&error.to_json()), String::from_utf8_lossy(&body(&format!("vllm/http/{name}.resp"))));
    }
}

#[test]
fn llama_cpps_list_of_models_is_read() {
    let list: ModelList = serde_json::from_slice(&body("llamacpp/http/models.resp")).unwrap();
    assert_eq!((list.data[0].id.as_str(), list.data[0].max_model_len), ("smollm2-135m", None));
}

#[test]
fn llama_cpp_streams_are_read_as_openai_chunks() {
    let chunks = |name: &str| -> Vec<ChatChunk> {
        let events = decode_all(&[&body(name)]);
        events.iter().filter(|event| !event.is_done()).map(|event| serde_json::from_slice(event.data.as_ref().unwrap()).unwrap()).collect()
    };
    let stream = chunks("llamacpp/http/chat-stream.resp");
    let text: String = stream.iter().flat_map(|chunk| &chunk.choices).filter_map(|choice| choice.delta.content.clone().flatten()).collect();
    assert_eq!(text, "The capital of France is Paris.");
    assert_eq!(stream.last().unwrap().usage.as_ref().unwrap().cached_tokens(), Some(40));
    assert!(!chunks("llamacpp/http/chat-stream-logprobs.resp").is_empty());
}

/// Frames of a `.bin` capture: per message a count, per frame a length, both u32 big-endian.
fn messages(path: &str) -> Vec<Vec<Vec<u8>>> {
    fn take<'a>(bytes: &mut &'a [u8], count: usize) -> &'a [u8] {
        let (taken, rest) = bytes.split_at(count);
        *bytes = rest;
        taken
    }
    fn number(bytes: &mut &[u8]) -> usize {
        u32::from_be_bytes(take(bytes, 4).try_into().unwrap()) as usize
    }
    let bytes = fixture(path);
    let mut rest = bytes.as_slice();
    let mut messages = Vec::new();
    while !rest.is_empty() {
        let count = number(&mut rest);
        let frame = |rest: &mut &[u8]| {
            let length = number(rest);
            take(rest, length).to_vec()
        };
        messages.push((0..count).map(|_| frame(&mut rest)).collect());
    }
    messages
}

/// The event that a line of the `.jsonl` beside the capture describes.
fn event_of_json(json: &Value) -> KvEvent {
    let hash = |value: &Value| match value.as_str() {
        // A digest in hex: vLLM's short form is its last 8 bytes.
        Some(hex) => EngineHash(u64::from_str_radix(&hex[hex.len() - 16..], 16).unwrap()),
        None => EngineHash(value.as_u64().unwrap_or_else(|| value.as_i64().unwrap().cast_unsigned())),
    };
    let hashes = || json["block_hashes"].as_array().unwrap().iter().map(hash).collect();
    match json["type"].as_str().unwrap() {
        "BlockStored" => {
            let adapter = json["lora_name"].as_str().map(str::to_owned);
            let keys = json.get("extra_keys").map(|keys| keys[0].clone()).unwrap_or_default();
            let salt =
                keys.as_array().and_then(|keys| keys.iter().find_map(|key| key.as_str().filter(|key| Some(*key) != adapter.as_deref())));
            KvEvent::Stored {
                hashes: hashes(),
                parent: Some(&json["parent_block_hash"]).filter(|parent| !parent.is_null()).map(hash),
                tokens: json["token_ids"].as_array().unwrap().iter().map(|token| u32::try_from(token.as_u64().unwrap()).unwrap()).collect(),
                block_size: serde_json::from_value(json["block_size"].clone()).unwrap(),
                salt: salt.map(str::to_owned),
                adapter,
            }
        }
        "BlockRemoved" => KvEvent::Removed { hashes: hashes() },
        "AllBlocksCleared" => KvEvent::Cleared,
        other => panic!("{other}"),
    }
}

fn check_batch(message: &Message<'_>, expected: &Value) {
    let decoded = kv_events::decode(message.sequence, message.payload).unwrap();
    assert_eq!(decoded.skipped, 0);
    assert_eq!(decoded.batch.timestamp_s.to_bits(), expected[0].as_f64().unwrap().to_bits());
    assert_eq!(decoded.batch.dp_rank.map(u64::from), expected[2].as_u64());
    let events: Vec<KvEvent> = expected[1].as_array().unwrap().iter().map(event_of_json).collect();
    assert_eq!(decoded.batch.events, events);
    for form in [kv_events::Form::Map, kv_events::Form::Positional] {
        assert_eq!(kv_events::decode(message.sequence, &kv_events::encode(&decoded.batch, form)).unwrap(), decoded);
    }
}

#[test]
fn captured_kv_events_say_what_their_decoding_says() {
    for (name, count) in [("pub-int-hashes", 28), ("pub-sha256-pickle-bytes", 34)] {
        let lines = fixture(&format!("vllm/kv-events/{name}.jsonl"));
        let lines: Vec<Value> = std::str::from_utf8(&lines).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let messages = messages(&format!("vllm/kv-events/{name}.bin"));
        assert_eq!(messages.len(), lines.len());
        assert!(lines.len() >= count, "{name} has {}", lines.len());
        for (frames, line) in messages.iter().zip(&lines) {
            let message = Message::from_frames(frames).unwrap();
            assert_eq!(message.topic, line["topic"].as_str().unwrap().as_bytes());
            assert_eq!(message.sequence, line["seq"].as_u64().unwrap());
            check_batch(&message, &line["batch"]);
        }
    }
}

#[test]
fn our_map_form_is_vllms_byte_for_byte() {
    for frames in messages("vllm/kv-events/pub-int-hashes.bin") {
        let message = Message::from_frames(&frames).unwrap();
        let decoded = kv_events::decode(message.sequence, message.payload).unwrap();
        // With an adapter vLLM sends its number too, which nothing on our side knows.
        if decoded.batch.events.iter().any(|event| matches!(event, KvEvent::Stored { adapter: Some(_), .. })) {
            continue;
        }
        assert_eq!(kv_events::encode(&decoded.batch, kv_events::Form::Map), message.payload, "sequence {}", message.sequence);
    }
}

#[test]
fn sglangs_signed_hashes_and_left_out_fields_are_read() {
    let payload = fixture("sglang/synthetic-batch.msgpack");
    let expected: Value = serde_json::from_slice(&fixture("sglang/synthetic-batch.json")).unwrap();
    check_batch(&Message { topic: b"", sequence: 0, payload: &payload }, &expected);
}

#[test]
fn a_replay_ends_with_its_marker() {
    let replay = messages("vllm/kv-events/replay-dealer-from-24.bin");
    let (end, batches) = replay.split_last().unwrap();
    assert!(Message::from_frames(end).unwrap().is_replay_end());
    let sequences: Vec<u64> = batches.iter().map(|frames| Message::from_frames(frames).unwrap().sequence).collect();
    assert_eq!(sequences, [24, 25, 26, 27]);
    let past_end = messages("vllm/kv-events/replay-dealer-past-end.bin");
    assert!(Message::from_frames(&past_end[0]).unwrap().is_replay_end());
    assert_eq!(end, &Message::replay_end().to_replay_frames());
}
