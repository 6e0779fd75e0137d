//! Streams of engines that tell no ids in their clients' API: llama.cpp's are computed from tokens all along, SGLang's completions are
//! recorded. Both go on at another engine when theirs fails. What the engines say is made as their sources have it.

use baton_gateway::{Continue, EngineKind, GatewayConfig};
use baton_text::Tokenizer;
use http::Response;
use hyper::body::Incoming;
use serde_json::{Map, Value, json};
use tokio::task::JoinHandle;

use crate::{
    resume::{ask, first, front, gathered, ids, text_of},
    support::{Call, EventSender, FakeEngine, Front, config, read, read_json},
};

fn token(bytes: &[u8]) -> u32 {
    let mut number = [0; 4];
    number[..bytes.len()].copy_from_slice(bytes);
    u32::from_le_bytes(number)
}

/// A token of llama.cpp's `/completion`, `predicted` of this answer with it.
fn told(text: &str, token: u32, predicted: u32) -> String {
    let timings = json!({ "cache_n": 4, "prompt_n": 9, "prompt_ms": 1.5, "predicted_n": predicted, "predicted_ms": 2.5 });
    let event = json!({
        "index": 0, "content": text, "tokens": [token], "stop": false, "id_slot": -1, "tokens_predicted": predicted, "tokens_evaluated": 13, "timings": timings
    });
    format!("data: {event}\n\n")
}

/// All tokens of four bytes each, counted from `predicted`.
fn said(text: &str, predicted: u32) -> String {
    let pieces = text.as_bytes().chunks(4).map(|piece| std::str::from_utf8(piece).unwrap());
    pieces.zip(predicted..).map(|(piece, place)| told(piece, token(piece.as_bytes()), place)).collect()
}

/// Its last event; no `[DONE]` follows.
fn ended(stop_type: &str, predicted: u32) -> String {
    let timings = json!({ "cache_n": 4, "prompt_n": 9 });
    let event = json!({
        "index": 0, "content": "", "tokens": [], "id_slot": 0, "stop": true, "model": "smollm2-135m", "tokens_predicted": predicted, "tokens_evaluated": 13,
        "generation_settings": {}, "prompt": "", "has_new_line": false, "truncated": false, "stop_type": stop_type, "stopping_word": "", "timings": timings
    });
    format!("data: {event}\n\n")
}

fn llamas(engines: &[&FakeEngine]) -> GatewayConfig {
    GatewayConfig { engines: engines.iter().map(|engine| engine.llamacpp()).collect(), ..GatewayConfig::default() }
}

async fn two_llamas() -> (FakeEngine, FakeEngine, Front) {
    let (a, b) = (FakeEngine::start().await, FakeEngine::start().await);
    let front = front(llamas(&[&a, &b])).await;
    (a, b, front)
}

async fn begin(call: Call, events: &str) -> EventSender {
    assert_eq!(call.path, "/completion");
    let sender = call.stream();
    sender.send(events.to_owned()).await;
    sender
}

/// The engine will not do it.
async fn refuse(call: Call, response: JoinHandle<Response<Incoming>>) {
    call.reply(400, b"{}");
    assert_eq!(response.await.unwrap().status(), 400);
}

fn prompt_of(call: &Call) -> Vec<u32> {
    serde_json::from_value(call.body["prompt"].clone()).unwrap()
}

/// What the template makes of the messages of [`ask`].
fn asked() -> Vec<u32> {
    let text = Tokenizer::bytes4();
    let prompt = text.render_chat(&json!([{ "role": "user", "content": "hi" }]), None, true, &Map::new()).unwrap();
    text.encode(&prompt, false)
}

#[tokio::test]
async fn a_chat_at_llamacpp_is_asked_by_tokens_and_answered_as_a_chat() {
    let mut engine = FakeEngine::start().await;
    let front = front(llamas(&[&engine])).await;
    let response = front.chat(&ask(&json!({ "stream_options": { "include_usage": true }, "top_k": 5, "return_token_ids": true })));
    let call = engine.call().await;
    assert_eq!(prompt_of(&call), asked());
    let wanted =
        json!({ "n_predict": 6, "temperature": 0, "top_k": 5, "stream": true, "model": "smollm2-135m", "timings_per_token": true });
    let mut given = call.body.as_object().unwrap().clone();
    given.remove("prompt");
    assert_eq!(Value::Object(given), wanted);
    begin(call, &[said("once upo", 1), ended("eos", 2)].concat()).await;
    let body = read(response.await.unwrap()).await;
    let all = gathered(&body);
    assert_eq!((all.text.as_str(), &all.finish, all.done), ("once upo", &json!("stop"), true));
    let usage = [&all.usage["prompt_tokens"], &all.usage["completion_tokens"], &all.usage["prompt_tokens_details"]["cached_tokens"]];
    assert_eq!(usage, [&json!(asked().len()), &json!(2), &json!(4)]);
    let body = String::from_utf8(body).unwrap();
    assert!(body.contains(&format!("\"token_ids\":[{}]", token(b"once"))), "{body}");
    let (_, decisions) = front.get("/baton/v1/decisions").await;
    assert_eq!(decisions["decisions"][0]["realised"]["outcome"], "finished", "{decisions}");
}

#[tokio::test]
async fn a_chat_whose_llamacpp_fails_goes_on_as_the_same_chat() {
    for failure in ["cut", "in-band", "end", "garbage", "gone"] {
        let (mut a, mut b, front) = two_llamas().await;
        let response = front.chat(&ask(&json!({ "stream_options": { "include_usage": true } })));
        let (call, engine, other) = first(&mut a, &mut b).await;
        let sender = begin(call, &said("once upo", 1)).await;
        match failure {
            "cut" => sender.cut().await,
            "in-band" => sender.send("data: {\"error\":{\"code\":500,\"message\":\"dead\",\"type\":\"server_error\"}}\n\n").await,
            "end" => drop(sender),
            "garbage" => sender.send("data: <html>\n\n").await,
            _ => engine.kill(),
        }
        let call = other.call().await;
        assert_eq!(prompt_of(&call), [asked(), ids("once upo")].concat(), "{failure}");
        assert_eq!(call.body["n_predict"], 4);
        begin(call, &[said("n a time", 1), ended("eos", 2)].concat()).await;
        let all = gathered(&read(response.await.unwrap()).await);
        assert_eq!((all.text.as_str(), all.finish, all.done), ("once upon a time", json!("stop"), true), "{failure}");
        assert_eq!([&all.usage["prompt_tokens"], &all.usage["completion_tokens"]], [&json!(asked().len()), &json!(4)]);
        let (_, page) = text_of(&front, "/metrics").await;
        assert!(page.contains("baton_streams_resumed_total{numerics=\"same\"} 1"), "{page}");
    }
}

/// llama.cpp tells no id of a token that leaves a character incomplete.
#[tokio::test]
async fn a_token_that_was_kept_back_is_gone_on_from_where_it_is_sure() {
    let smile = "ab😀".as_bytes();
    let last = [smile[4], smile[5], b'!'];
    for (shown, before, sure) in [("ab😀!", 1, true), ("ab😀!", 2, false)] {
        let (mut a, mut b, front) = two_llamas().await;
        let response = front.completion(r#"{"model":"smollm2-135m","prompt":[7,8],"stream":true,"max_tokens":5,"temperature":0}"#);
        let (call, _, other) = first(&mut a, &mut b).await;
        begin(call, &told(shown, token(&last), before + 1)).await.cut().await;
        if sure {
            let call = other.call().await;
            assert_eq!(prompt_of(&call), [7, 8, token(&smile[..4]), token(&last)]);
            begin(call, &said("once", 1)).await.send(ended("limit", 1)).await;
        }
        let all = gathered(&read(response.await.unwrap()).await);
        assert_eq!((all.text.as_str(), all.done), (if sure { "ab😀!once" } else { "ab😀!" }, sure), "{before} kept back: {all:?}");
    }
}

#[tokio::test]
async fn a_stop_string_is_found_here_and_ends_the_engine() {
    let (mut a, mut b, front) = two_llamas().await;
    let response = front.chat(&ask(&json!({ "stop": "on a" })));
    let (call, _, other) = first(&mut a, &mut b).await;
    assert!(call.body["stop"].is_null());
    begin(call, &said("once upo", 1)).await.cut().await;
    let sender = begin(other.call().await, &said("n a ", 1)).await;
    sender.closed().await;
    let all = gathered(&read(response.await.unwrap()).await);
    assert_eq!((all.text.as_str(), all.finish, all.done), ("once up", json!("stop"), true));
}

#[tokio::test]
async fn a_bound_ends_an_answer_whose_last_event_is_lost() {
    let mut engine = FakeEngine::start().await;
    let front = front(llamas(&[&engine])).await;
    let response = front.chat(&ask(&json!({ "max_tokens": 2 })));
    begin(engine.call().await, &said("once upo", 1)).await.cut().await;
    let all = gathered(&read(response.await.unwrap()).await);
    assert_eq!((all.text.as_str(), all.finish, all.done), ("once upo", json!("length"), true));
}

#[tokio::test]
async fn before_the_first_token_another_engine_begins_anew() {
    for failure in ["status", "hang-up", "cut", "in-band"] {
        let (mut a, mut b, front) = two_llamas().await;
        let response = front.chat(&ask(&json!({})));
        let (call, _, other) = first(&mut a, &mut b).await;
        match failure {
            "status" => call.reply(503, b"{}"),
            "hang-up" => call.hang_up(),
            "cut" => begin(call, ": ping\n\n").await.cut().await,
            _ => drop(begin(call, "data: {\"error\":{\"code\":500,\"message\":\"dead\"}}\n\n").await),
        }
        let call = other.call().await;
        assert_eq!((prompt_of(&call), &call.body["n_predict"]), (asked(), &json!(6)), "{failure}");
        begin(call, &said("once", 1)).await.send(ended("eos", 1)).await;
        let all = gathered(&read(response.await.unwrap()).await);
        assert_eq!((all.text.as_str(), all.done), ("once", true), "{failure}");
        let (_, page) = text_of(&front, "/metrics").await;
        assert!(!page.contains("baton_streams_resumed_total{"), "nothing was gone on with: {page}");
    }
}

#[tokio::test]
async fn what_the_engine_refuses_is_told_in_its_words() {
    let mut engine = FakeEngine::start().await;
    let front = front(llamas(&[&engine])).await;
    let response = front.chat(&ask(&json!({})));
    engine.call().await.reply(400, br#"{"error":{"code":400,"message":"no","type":"invalid_request_error"}}"#);
    let response = response.await.unwrap();
    assert_eq!((response.status().as_u16(), read_json(response).await["error"]["message"].clone()), (400, json!("no")));
}

/// The table in docs/gateway.md.
#[tokio::test]
async fn what_only_the_engine_can_answer_is_asked_as_its_client_asked() {
    let mut engine = FakeEngine::start().await;
    let front = front(llamas(&[&engine])).await;
    let tool = json!({ "type": "function", "function": { "name": "f", "parameters": {} } });
    for more in [
        json!({ "tools": [tool] }),
        json!({ "response_format": { "type": "json_object" } }),
        json!({ "grammar": "root ::= \"a\"" }),
        json!({ "logprobs": true }),
        json!({ "seed": 5, "temperature": 0.7 }),
        json!({ "presence_penalty": 0.5 }),
        json!({ "n": 2, "temperature": 0.7 }),
        json!({ "stream": false }),
        json!({ "messages": [{ "role": "user", "content": "hi" }, { "role": "assistant", "content": "It" }] }),
        json!({ "mirostat": 2 }),
    ] {
        let response = front.chat(&ask(&more));
        let call = engine.call().await;
        assert_eq!(call.path, "/v1/chat/completions", "{more}");
        refuse(call, response).await;
    }
    let response = front.completion(r#"{"model":"smollm2-135m","prompt":"once","stream":true}"#);
    let call = engine.call().await;
    assert_eq!(call.path, "/v1/completions", "llama.cpp has no bound of its own");
    refuse(call, response).await;
}

#[tokio::test]
async fn without_the_engine_s_tokens_or_where_nothing_goes_on_it_is_asked_as_ever() {
    for goes_on in [Continue::Never, Continue::Exact] {
        let mut engine = FakeEngine::start().await;
        let mut config = llamas(&[&engine]);
        config.gateway.continue_streams = goes_on;
        if goes_on != Continue::Never {
            engine.keep_text_to_itself();
        }
        let front = front(config).await;
        let response = front.chat(&ask(&json!({})));
        let call = engine.call().await;
        assert_eq!(call.path, "/v1/chat/completions", "{goes_on:?}");
        refuse(call, response).await;
    }
}

/// Of SGLang's completions API, with ids as its stream has them.
fn sglang(text: &str, tokens: &str, finish: Option<&str>) -> String {
    let choice = json!({
        "index": 0, "text": text, "logprobs": null, "finish_reason": finish, "matched_stop": null, "token_ids": ids(tokens)
    });
    let event =
        json!({ "id": "f00", "object": "text_completion", "created": 5, "model": "smollm2-135m", "choices": [choice], "usage": null });
    format!("data: {event}\n\n")
}

#[tokio::test]
async fn a_completion_at_sglang_goes_on_at_another() {
    let (mut a, mut b) = (FakeEngine::start().await, FakeEngine::start().await);
    let mut config = config(&[&a, &b]);
    for engine in &mut config.engines {
        engine.kind = EngineKind::Sglang;
    }
    let front = front(config).await;
    let response =
        front.completion(r#"{"model":"smollm2-135m","prompt":[7,8],"stream":true,"max_tokens":6,"temperature":0,"cache_salt":"mine"}"#);
    let (call, _, other) = first(&mut a, &mut b).await;
    assert_eq!(call.body["return_token_ids"], true);
    let salt = call.body["cache_salt"].clone();
    let sender = call.stream();
    sender.send(sglang("once", "once", None)).await;
    // Its text may come after its ids.
    sender.send(sglang(" u", " upo", None)).await;
    sender.cut().await;
    let call = other.call().await;
    assert_eq!((call.path.as_str(), prompt_of(&call)), ("/v1/completions", [vec![7, 8], ids("once upo")].concat()));
    assert_eq!((&call.body["max_tokens"], &call.body["return_token_ids"], &call.body["cache_salt"]), (&json!(4), &json!(true), &salt));
    call.stream().send([sglang("n a ", "n a ", None), sglang("", "time", Some("stop"))].concat()).await;
    let all = gathered(&read(response.await.unwrap()).await);
    assert_eq!((all.text.as_str(), all.finish, all.done), ("once upon a time", json!("stop"), true));
}

/// Its chunks of a chat have no place for ids.
#[tokio::test]
async fn a_chat_at_sglang_does_not() {
    let (mut a, mut b) = (FakeEngine::start().await, FakeEngine::start().await);
    let mut config = config(&[&a, &b]);
    for engine in &mut config.engines {
        engine.kind = EngineKind::Sglang;
    }
    let front = front(config).await;
    let response = front.chat(&ask(&json!({})));
    let (call, ..) = first(&mut a, &mut b).await;
    assert!(call.path == "/v1/chat/completions" && call.body["return_token_ids"].is_null());
    let sender = call.stream();
    let choice = json!({ "index": 0, "delta": { "content": "once" }, "logprobs": null, "finish_reason": null, "matched_stop": null });
    let event = json!({ "id": "f00", "object": "chat.completion.chunk", "created": 5, "model": "smollm2-135m", "choices": [choice] });
    sender.send(format!("data: {event}\n\n")).await;
    sender.cut().await;
    let all = gathered(&read(response.await.unwrap()).await);
    assert!(all.text == "once" && all.finish.is_string() && !all.done, "{all:?}");
}
