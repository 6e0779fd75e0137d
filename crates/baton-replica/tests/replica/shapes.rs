//! The captured vLLM requests, byte for byte, against a replica: statuses, field names, their order and types are vLLM's.

use crate::support::{Answer, Replica, captured, config, post, read_answer, request};
use serde_json::{Value, json};

/// Body of a captured request.
fn body(name: &str) -> Value {
    let bytes = request(name);
    let split = bytes.windows(4).position(|window| window == b"\r\n\r\n").unwrap();
    serde_json::from_slice(&bytes[split + 4..]).unwrap()
}

/// Names, order and types of a value. Items of a list that look alike count once; a map from token to number has no names.
fn shape(value: &Value) -> Value {
    match value {
        Value::Null => json!("null"),
        Value::Bool(_) => json!("bool"),
        Value::Number(number) => json!(if number.is_f64() { "float" } else { "integer" }),
        Value::String(_) => json!("string"),
        Value::Array(items) => {
            let mut shapes: Vec<Value> = items.iter().map(shape).collect();
            shapes.dedup();
            json!(shapes)
        }
        Value::Object(fields) => {
            let shape = |(name, value): (&String, &Value)| match (name.as_str(), value) {
                ("top_logprobs", Value::Array(items))
                    if items.iter().all(|item| item.get("token").is_none() && item.get("token_id").is_none()) =>
                {
                    json!([name, "maps to float"])
                }
                _ => json!([name, shape(value)]),
            };
            json!({ "fields": fields.iter().map(shape).collect::<Vec<_>>() })
        }
    }
}

/// Shapes of the events of a stream, alike ones that follow each other once.
fn stream_shape(answer: &Answer) -> Vec<Value> {
    let mut shapes: Vec<Value> = answer.events().iter().map(shape).collect();
    shapes.dedup();
    shapes
}

fn assert_same_head(name: &str, ours: &Answer, theirs: &Answer) {
    assert_eq!(ours.status, theirs.status, "{name}: {}", String::from_utf8_lossy(&ours.body));
    assert_eq!(ours.content_type, theirs.content_type, "{name}");
    assert_eq!(ours.chunks.is_empty(), theirs.chunks.is_empty(), "{name}: chunked or not");
}

#[tokio::test(flavor = "multi_thread")]
async fn whole_answers_have_vllms_shape() {
    let replica = Replica::start(config()).await;
    for name in [
        "chat",
        "chat-logprobs",
        "chat-request-id-header",
        "chat-tool-auto",
        "completion-after-reset",
        "completion-batch-prompts",
        "completion-cache-salt",
        "completion-ids",
        "completion-ids-cached",
        "completion-priority",
        "generate-tokens",
        "kv-event-sources",
        "load",
        "version",
        "reset-prefix-cache",
    ] {
        let (ours, theirs) = (replica.raw(&request(name)).await, captured(name));
        assert_same_head(name, &ours, &theirs);
        assert_eq!(shape(&ours.json()), shape(&theirs.json()), "{name}");
        assert_eq!(ours.json()["usage"]["prompt_tokens"], theirs.json()["usage"]["prompt_tokens"], "{name}");
    }
    replica.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_without_chance_are_vllms_own() {
    let replica = Replica::start(config()).await;
    for name in ["health", "ping", "detokenize", "tokenize-chat", "tokenize-prompt", "abort-requests-unknown", "reset-prefix-cache"] {
        let (ours, theirs) = (replica.raw(&request(name)).await, captured(name));
        assert_same_head(name, &ours, &theirs);
        assert_eq!(String::from_utf8_lossy(&ours.body), String::from_utf8_lossy(&theirs.body), "{name}");
    }
    let ours = replica.raw(&request("chat-request-id-header")).await.json();
    assert_eq!(ours["id"], "chatcmpl-router-req-0001");
    // The second card of the capture is an adapter.
    let (ours, theirs) = (replica.raw(&request("models")).await.json(), captured("models").json());
    assert_eq!(shape(&ours["data"][0]), shape(&theirs["data"][0]));
    assert_eq!(
        (&ours["object"], &ours["data"][0]["id"], &ours["data"][0]["max_model_len"]),
        (&theirs["object"], &json!("smollm2-135m"), &json!(2048))
    );
    replica.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rendered_chat_has_vllms_tokens_and_is_a_request_to_generate() {
    let replica = Replica::start(config()).await;
    let (ours, theirs) = (replica.raw(&request("chat-render")).await, captured("chat-render"));
    assert_same_head("chat-render", &ours, &theirs);
    for field in ["token_ids", "model", "stream", "stream_options", "cache_salt", "priority"] {
        assert_eq!(ours.json()[field], theirs.json()[field], "{field}");
    }
    let generated = replica.post("/inference/v1/generate", &ours.json()).await;
    assert_eq!(generated.status, 200);
    assert_eq!(generated.json()["choices"][0]["token_ids"].as_array().unwrap().len(), 4, "the chat asks for so many");
    replica.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_are_vllms_own() {
    let replica = Replica::start(config()).await;
    for name in [
        "err-404-path",
        "err-405",
        "err-bad-content-type",
        "err-bad-temperature",
        "err-empty-prompt",
        "err-max-tokens-too-large",
        "err-prompt-too-long",
        "err-prompt-too-long-stream",
        "err-token-out-of-vocab",
        "err-wrong-model",
    ] {
        let (ours, theirs) = (replica.raw(&request(name)).await, captured(name));
        assert_same_head(name, &ours, &theirs);
        assert_eq!(String::from_utf8_lossy(&ours.body), String::from_utf8_lossy(&theirs.body), "{name}");
    }
    assert!(replica.raw(&request("err-405")).await.headers.contains("\nallow: post"));
    // The parsers word their findings differently; place and kind are the same.
    for name in ["err-bad-json", "err-missing-field"] {
        let (ours, theirs) = (replica.raw(&request(name)).await, captured(name));
        assert_same_head(name, &ours, &theirs);
        let (ours, theirs) = (ours.json(), theirs.json());
        assert_eq!(shape(&ours), shape(&theirs), "{name}");
        for field in ["type", "param", "code"] {
            assert_eq!(ours["error"][field], theirs["error"][field], "{name}");
        }
    }
    replica.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_have_vllms_events_in_vllms_order() {
    let replica = Replica::start(config()).await;
    for name in [
        "chat-stream-logprobs",
        "chat-stream-no-usage",
        "chat-stream-token-ids",
        "completion-stream",
        "completion-stream-continuous-usage",
        "completion-stream-logprobs",
        "generate-tokens-stream",
    ] {
        let (ours, theirs) = (replica.raw(&request(name)).await, captured(name));
        assert_same_head(name, &ours, &theirs);
        assert_eq!(stream_shape(&ours), stream_shape(&theirs), "{name}");
        assert_eq!(ours.events().len(), theirs.events().len(), "{name}: an event a token");
    }
    replica.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn each_choice_of_a_stream_has_vllms_events() {
    let replica = Replica::start(config()).await;
    let (ours, theirs) = (replica.raw(&request("completion-n2-stream")).await, captured("completion-n2-stream"));
    assert_same_head("completion-n2-stream", &ours, &theirs);
    // How the choices interleave is the engine's business.
    for index in 0..2 {
        let of_choice = |answer: &Answer| {
            let events = answer.events();
            events.iter().filter(|event| event["choices"][0]["index"] == index).map(shape).collect::<Vec<_>>()
        };
        assert_eq!(of_choice(&ours), of_choice(&theirs), "choice {index}");
    }
    assert_eq!(ours.events().last(), Some(&Value::Null));
    replica.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_ends_by_itself_says_so_in_an_event_without_text() {
    let replica = Replica::start(config()).await;
    // The emulated engine draws the end only when forced to: seven tokens, then the end, as in the capture.
    let mut body = body("chat-stream");
    body["logit_bias"] = json!({ "2": 100 });
    body["min_tokens"] = json!(7);
    let (ours, theirs) = (replica.post("/v1/chat/completions", &body).await, captured("chat-stream"));
    assert_same_head("chat-stream", &ours, &theirs);
    assert_eq!(stream_shape(&ours), stream_shape(&theirs));
    let usage = |answer: &Answer| answer.events().iter().rev().nth(1).unwrap()["usage"].clone();
    let (ours, theirs) = (usage(&ours), usage(&theirs));
    for field in ["prompt_tokens", "completion_tokens", "total_tokens"] {
        assert_eq!(ours[field], theirs[field], "{field}");
    }
    replica.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn each_event_is_a_chunk_of_its_own() {
    let replica = Replica::start(config()).await;
    let answer = replica.raw(&request("completion-stream")).await;
    assert_eq!(answer.chunks.len(), answer.events().len());
    assert!(answer.chunks.iter().all(|chunk| chunk.starts_with(b"data: ") && chunk.ends_with(b"\n\n")));
    replica.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_abort_by_id_ends_the_stream_as_vllm_ends_it() {
    let replica = Replica::start(config()).await;
    let mut body = body("stream-server-abort");
    body["max_tokens"] = json!(1500);
    let stream = replica.connect(&post("/v1/completions", &body, "X-Request-Id: abort-me\r\n")).await;
    replica.report_when(|report| report.running == 1).await;
    let abort = replica.raw(&request("abort-requests")).await;
    assert_eq!(abort.json(), captured("abort-requests").json());
    let (ours, theirs) = (read_answer(stream).await, captured("stream-server-abort"));
    assert_eq!(stream_shape(&ours), stream_shape(&theirs));
    let events = ours.events();
    assert_eq!(events[events.len() - 3]["choices"][0]["finish_reason"], "abort");
    assert_eq!(events[0]["id"], "cmpl-abort-me");
    replica.stop().await.unwrap();
}
