//! Streams whose engine fails after their first token: they go on at another engine, as one stream.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use baton_gateway::{Continue, GatewayConfig};
use baton_text::Tokenizer;
use serde_json::{Value, json};

use crate::support::{Call, EventSender, FakeEngine, Front, config, events, read};

/// Tokens are four bytes each.
pub(crate) fn ids(text: &str) -> Vec<u32> {
    assert_eq!(text.len() % 4, 0);
    text.as_bytes().chunks_exact(4).map(|bytes| u32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

/// Of the chat API, as the engine that the stream begins at sends it. `shown` may lag behind what the tokens say.
fn chat(shown: &str, tokens: &str) -> String {
    let choice = json!({ "index": 0, "delta": { "content": shown }, "logprobs": null, "finish_reason": null, "token_ids": ids(tokens) });
    format!(
        "data: {}\n\n",
        json!({ "id": "chatcmpl-a", "object": "chat.completion.chunk", "created": 5, "model": "smollm2-135m", "choices": [choice] })
    )
}

fn opening() -> String {
    let choice = json!({ "index": 0, "delta": { "role": "assistant", "content": "" }, "finish_reason": null });
    format!(
        "data: {}\n\n",
        json!({ "id": "chatcmpl-a", "object": "chat.completion.chunk", "created": 5, "model": "smollm2-135m", "choices": [choice] })
    )
}

/// Of the completions API.
fn completion(tokens: &str, finish: Option<&str>) -> String {
    let choice =
        json!({ "index": 0, "text": tokens, "logprobs": null, "finish_reason": finish, "stop_reason": null, "token_ids": ids(tokens) });
    format!(
        "data: {}\n\n",
        json!({ "id": "cmpl-b", "object": "text_completion", "created": 9, "model": "smollm2-135m", "choices": [choice] })
    )
}

pub(crate) fn ask(more: &Value) -> String {
    let mut body = json!({ "model": "smollm2-135m", "messages": [{ "role": "user", "content": "hi" }], "stream": true, "max_tokens": 6, "temperature": 0 });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body.to_string()
}

pub(crate) async fn front(config: GatewayConfig) -> Front {
    Front::with_text(config, Some(Arc::new(Tokenizer::bytes4()))).await
}

/// What a client has of a stream.
#[derive(Debug, PartialEq)]
pub(crate) struct Gathered {
    pub(crate) text: String,
    pub(crate) finish: Value,
    pub(crate) usage: Value,
    /// The stream ended as streams do.
    pub(crate) done: bool,
}

/// The events of one stream: they have one identity, and open once.
pub(crate) fn gathered(body: &[u8]) -> Gathered {
    let mut all = Gathered { text: String::new(), finish: Value::Null, usage: Value::Null, done: false };
    let (mut heads, mut roles) = (Vec::new(), 0);
    for event in events(body) {
        assert!(!all.done, "nothing comes after the end");
        let data = std::str::from_utf8(&event).unwrap().trim().strip_prefix("data: ").unwrap().to_owned();
        if data == "[DONE]" {
            all.done = true;
            continue;
        }
        let event: Value = serde_json::from_str(&data).unwrap();
        if !event["error"].is_null() {
            all.finish = event["error"]["message"].clone();
            continue;
        }
        heads.push((event["id"].clone(), event["created"].clone(), event["model"].clone(), event["object"].clone()));
        if event["choices"].as_array().unwrap().is_empty() {
            all.usage = event["usage"].clone();
            continue;
        }
        let choice = &event["choices"][0];
        assert_eq!(choice["index"], 0);
        roles += u32::from(!choice["delta"]["role"].is_null());
        all.text += choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
        if !choice["finish_reason"].is_null() {
            all.finish = choice["finish_reason"].clone();
        }
    }
    heads.dedup();
    assert!(heads.len() == 1 && roles <= 1, "{heads:?}, {roles} openings");
    all
}

/// The engine that has the call, and the other one.
pub(crate) async fn first<'a>(a: &'a mut FakeEngine, b: &'a mut FakeEngine) -> (Call, &'a mut FakeEngine, &'a mut FakeEngine) {
    let from_a = tokio::select! {
        call = a.call() => Ok(call),
        call = b.call() => Err(call),
    };
    match from_a {
        Ok(call) => (call, a, b),
        Err(call) => (call, b, a),
    }
}

async fn begin(call: Call, shown: &[(&str, &str)]) -> EventSender {
    let sender = call.stream();
    sender.send(opening()).await;
    for (text, tokens) in shown {
        sender.send(chat(text, tokens)).await;
    }
    sender
}

#[tokio::test]
async fn a_chat_whose_engine_fails_goes_on_as_the_same_chat() {
    for failure in ["cut", "in-band", "abort", "garbage", "gone"] {
        let (mut a, mut b) = (FakeEngine::start().await, FakeEngine::start().await);
        let front = front(config(&[&a, &b])).await;
        let response = front.chat(&ask(&json!({ "stream_options": { "include_usage": true } })));
        let (call, engine, other) = first(&mut a, &mut b).await;
        let sender = begin(call, &[("once", "once"), (" upo", " upo")]).await;
        match failure {
            "cut" => sender.cut().await,
            "in-band" => sender.send("data: {\"error\":{\"message\":\"dead\",\"code\":500}}\n\ndata: [DONE]\n\n").await,
            "abort" => {
                sender.send(chat("", "").replace("\"finish_reason\":null", "\"finish_reason\":\"abort\"")).await;
                sender.send("data: [DONE]\n\n").await;
            }
            "garbage" => sender.send("data: <html>\n\n").await,
            _ => engine.kill(),
        }
        let call = other.call().await;
        assert_eq!(call.path, "/v1/completions");
        let prompt: Vec<u32> = serde_json::from_value(call.body["prompt"].clone()).unwrap();
        assert!(prompt.len() > 2 && prompt.ends_with(&ids("once upo")), "{failure}: {prompt:?}");
        assert_eq!((&call.body["max_tokens"], &call.body["temperature"], &call.body["stream"]), (&json!(4), &json!(0), &json!(true)));
        assert!(call.body["messages"].is_null());
        let sender = call.stream();
        for event in [completion("n a ", None), completion("time", Some("stop"))] {
            sender.send(event).await;
        }
        let all = gathered(&read(response.await.unwrap()).await);
        assert_eq!((all.text.as_str(), all.finish, all.done), ("once upon a time", json!("stop"), true), "{failure}");
        let counts = [&all.usage["prompt_tokens"], &all.usage["completion_tokens"]];
        assert_eq!(counts, [&json!(prompt.len() - 2), &json!(4)], "usage is of the whole answer");
    }
}

#[tokio::test]
async fn a_completion_goes_on_and_a_second_failure_is_no_end_either() {
    let (mut a, mut b) = (FakeEngine::start().await, FakeEngine::start().await);
    let mut config = config(&[&a, &b]);
    config.gateway.attempts = 1;
    let front = front(config).await;
    let response = front.completion(r#"{"model":"smollm2-135m","prompt":[7,8,9],"stream":true,"max_tokens":5}"#);
    let (call, engine, other) = first(&mut a, &mut b).await;
    let sender = call.stream();
    sender.send(completion("once", None)).await;
    sender.cut().await;
    let call = other.call().await;
    assert_eq!(call.body["prompt"], json!([&[7, 8, 9][..], &ids("once")].concat()));
    let sender = call.stream();
    sender.send(completion(" upo", None)).await;
    sender.cut().await;
    let call = engine.call().await;
    assert_eq!((&call.body["prompt"], &call.body["max_tokens"]), (&json!([&[7, 8, 9][..], &ids("once upo")].concat()), &json!(3)));
    call.stream().send(completion("n a ", Some("length"))).await;
    let all = gathered(&read(response.await.unwrap()).await);
    assert_eq!((all.text.as_str(), all.finish, all.done), ("once upon a ", json!("length"), true));
    let (_, page) = text_of(&front, "/metrics").await;
    assert!(page.contains("baton_streams_resumed_total{numerics=\"same\"} 2"), "{page}");
}

pub(crate) async fn text_of(front: &Front, path: &str) -> (http::StatusCode, String) {
    let response = front.send(http::Method::GET, path, &[], "").await;
    (response.status(), String::from_utf8(read(response).await).unwrap())
}

/// The first engine holds back what the stop string may begin with; the second one knows of no stop string.
#[tokio::test]
async fn a_stop_string_across_the_cut_ends_the_answer_and_the_engine() {
    let (mut a, mut b) = (FakeEngine::start().await, FakeEngine::start().await);
    let front = front(config(&[&a, &b])).await;
    let response = front.chat(&ask(&json!({ "stop": ["on a"] })));
    let (call, _, other) = first(&mut a, &mut b).await;
    begin(call, &[("o", "once"), ("nce ", " upo")]).await.cut().await;
    let call = other.call().await;
    assert!(call.body["stop"].is_null());
    let sender = call.stream();
    sender.send(completion("n a ", None)).await;
    sender.closed().await;
    let all = gathered(&read(response.await.unwrap()).await);
    assert_eq!((all.text.as_str(), all.finish, all.done), ("once up", json!("stop"), true));
}

#[tokio::test]
async fn half_a_character_before_the_cut_is_a_whole_one_after_it() {
    let (mut a, mut b) = (FakeEngine::start().await, FakeEngine::start().await);
    let front = front(config(&[&a, &b])).await;
    let response = front.completion(r#"{"model":"smollm2-135m","prompt":"abcd","stream":true,"max_tokens":5}"#);
    let (call, _, other) = first(&mut a, &mut b).await;
    let whole = "ab😀cd".as_bytes();
    let token = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
    let (head, tail) = (token(&whole[..4]), token(&whole[4..]));
    let event = |text: &str, id: u32, finish: Option<&str>| {
        let choice = json!({ "index": 0, "text": text, "finish_reason": finish, "token_ids": [id] });
        format!(
            "data: {}\n\n",
            json!({ "id": "cmpl-a", "object": "text_completion", "created": 5, "model": "smollm2-135m", "choices": [choice] })
        )
    };
    let sender = call.stream();
    sender.send(event("ab", head, None)).await;
    sender.cut().await;
    other.call().await.stream().send(event("\u{fffd}cd", tail, Some("length"))).await;
    assert_eq!(gathered(&read(response.await.unwrap()).await).text, "ab😀cd");
}

#[tokio::test]
async fn a_hung_engine_s_stream_goes_on_elsewhere() {
    let (mut a, mut b) = (FakeEngine::start().await, FakeEngine::start().await);
    let mut config = config(&[&a, &b]);
    config.gateway.stall_timeout = Duration::from_millis(100);
    let front = front(config).await;
    let response = front.chat(&ask(&json!({})));
    let (call, _, other) = first(&mut a, &mut b).await;
    let hung = begin(call, &[("once", "once")]).await;
    let call = other.call().await;
    hung.closed().await;
    call.stream().send(completion(" upo", Some("length"))).await;
    assert_eq!(gathered(&read(response.await.unwrap()).await).text, "once upo");
}

#[tokio::test]
async fn an_output_of_which_only_the_end_was_lost_needs_no_engine() {
    let mut a = FakeEngine::start().await;
    let front = front(config(&[&a])).await;
    let response = front.chat(&ask(&json!({ "max_tokens": 2 })));
    begin(a.call().await, &[("once", "once"), (" up", " upo")]).await.cut().await;
    let all = gathered(&read(response.await.unwrap()).await);
    assert_eq!((all.text.as_str(), all.finish, all.done), ("once upo", json!("length"), true));
}

#[tokio::test]
async fn only_engines_of_the_same_bits_go_on_unless_the_operator_lets_others() {
    for (other_numerics, allowed, goes_on) in [
        (None, Continue::Exact, true),
        (None, Continue::Never, false),
        (Some("other"), Continue::Exact, false),
        (Some("other"), Continue::Any, true),
    ] {
        let (mut a, mut b) = (FakeEngine::start().await, FakeEngine::start().await);
        let mut config = config(&[&a, &b]);
        config.engines[1].numerics = other_numerics.map(str::to_owned);
        config.gateway.continue_streams = allowed;
        let front = front(config).await;
        let response = front.chat(&ask(&json!({})));
        let (call, _, other) = first(&mut a, &mut b).await;
        begin(call, &[("once", "once")]).await.cut().await;
        if goes_on {
            other.call().await.stream().send(completion(" upo", Some("length"))).await;
        }
        let all = gathered(&read(response.await.unwrap()).await);
        assert_eq!((all.text.as_str(), all.done), (if goes_on { "once upo" } else { "once" }, goes_on), "{allowed:?} {other_numerics:?}");
    }
}

/// The table in docs/gateway.md.
#[tokio::test]
async fn what_cannot_go_on_as_if_nothing_had_happened_is_told() {
    for more in [
        json!({ "logprobs": true }),
        json!({ "presence_penalty": 0.5 }),
        json!({ "frequency_penalty": 0.5 }),
        json!({ "seed": 5, "temperature": 0.7 }),
        json!({ "n": 2, "temperature": 0.7 }),
        json!({ "response_format": { "type": "json_object" } }),
    ] {
        let (mut a, mut b) = (FakeEngine::start().await, FakeEngine::start().await);
        let front = front(config(&[&a, &b])).await;
        let response = front.chat(&ask(&more));
        let (call, ..) = first(&mut a, &mut b).await;
        begin(call, &[("once", "once")]).await.cut().await;
        let all = gathered(&read(response.await.unwrap()).await);
        assert!(all.text == "once" && all.finish.is_string() && !all.done, "{more}: {all:?}");
    }
}

#[tokio::test]
async fn an_engine_that_failed_again_and_again_is_used_again_when_it_computes() {
    let mut engine = FakeEngine::start().await;
    let mut config = config(&[&engine]);
    config.gateway.attempts = 1;
    let front = front(config).await;
    engine.computes.store(false, Ordering::Relaxed);
    for _ in 0..3 {
        front.gateway.until_ready(1).await;
        let response = front.chat(&ask(&json!({})));
        engine.call().await.reply(503, b"{}");
        assert!(response.await.unwrap().status().is_server_error());
    }
    for _ in 0..2 {
        engine.asked.notified().await;
        assert_eq!(front.get("/baton/v1/fleet").await.1["replicas"][0]["state"], "suspect", "though it answers probes");
    }
    engine.computes.store(true, Ordering::Relaxed);
    front.gateway.until_ready(1).await;
    let response = front.chat(&ask(&json!({})));
    begin(engine.call().await, &[("once", "once")]).await.cut().await;
    assert_eq!(response.await.unwrap().status(), 200);
}
