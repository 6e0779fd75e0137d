//! Streams through the gateway, from recorded bytes of a vLLM server.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use baton_gateway::EngineKind;
use bytes::Bytes;
use serde_json::{Value, json};

use crate::{
    copies::report,
    support::{EventReader, FakeEngine, Front, config, events, read, read_json, recorded},
};

const CHAT: &str = include_str!("../fixtures/chat-stream.resp");
const CHAT_PLAIN: &str = include_str!("../fixtures/chat-stream-no-usage.resp");
const CHAT_IDS: &str = include_str!("../fixtures/chat-stream-token-ids.resp");
const ASK: &str = r#"{"model":"smollm2-135m","messages":[{"role":"user","content":"hi"}],"stream":true}"#;
const ASK_USAGE: &str = r#"{"model":"smollm2-135m","messages":[],"stream":true,"stream_options":{"include_usage":true}}"#;
const ASK_WHOLE: &str = r#"{"model":"smollm2-135m","messages":[{"role":"user","content":"hi"}]}"#;

/// `body` as the client of request `id` sees it.
fn renamed(body: &[u8], id: &str) -> String {
    let text = String::from_utf8(body.to_vec()).unwrap();
    let own = text.split_once("\"id\":\"").and_then(|(_, rest)| rest.split('"').next()?.split_once('-')).map(|(_, own)| own.to_owned());
    own.map_or(text.clone(), |own| text.replace(&own, id))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[tokio::test]
async fn output_of_a_choice_that_nobody_asked_for_is_garbled() {
    let mut engine = FakeEngine::start().await;
    let mut config = config(&[&engine]);
    config.gateway.attempts = 1;
    let front = Front::with(config).await;
    let response = front.chat(ASK);
    let sender = engine.call().await.stream();
    sender.send(r#"data: {"id":"x","choices":[{"index":4294967295,"delta":{"content":"hi"},"finish_reason":null}]}"#).await;
    sender.send("\n\n").await;
    let response = response.await.unwrap();
    assert_eq!(response.status(), 502);
    assert!(read_json(response).await["error"]["message"].as_str().unwrap().contains("could not be understood"));
    sender.closed().await;
}

fn assert_failed(body: &str) {
    assert!(!body.contains("[DONE]"), "a false end: {body}");
    let last = body.trim_end().rsplit("data: ").next().unwrap();
    let error: Value = serde_json::from_str(last).unwrap();
    assert!(error["error"]["message"].is_string() && error["error"]["code"].as_u64() >= Some(500), "{last}");
}

#[tokio::test]
async fn each_event_passes_before_the_next_is_sent() {
    let mut engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let response = front.spawn_post("/v1/chat/completions", ASK_USAGE, &[("x-request-id", "mine")]);
    let sender = engine.call().await.stream();
    let sent = events(&recorded(CHAT).1);
    sender.send(sent[0].clone()).await;
    let response = response.await.unwrap();
    assert_eq!(response.headers()["x-request-id"], "mine");
    let mut reader = EventReader::new(response);
    for (place, event) in sent.iter().enumerate() {
        if place > 0 {
            sender.send(event.clone()).await;
        }
        assert_eq!(text(&reader.next().await.unwrap()), renamed(event, "mine"));
    }
    drop(sender);
    assert_eq!(reader.next().await, None);
}

#[tokio::test]
async fn the_client_sees_what_it_asked_for_and_no_more() {
    let mut engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let response = front.chat(ASK);
    let call = engine.call().await;
    assert_eq!(call.body["return_token_ids"], true);
    assert_eq!(call.body["stream_options"]["include_usage"], true);
    call.play(&recorded(CHAT_IDS).1).await;
    let body = text(&read(response.await.unwrap()).await);
    assert!(!body.contains("usage") && !body.contains("[504]") && !body.contains("9690"), "{body}");
    assert!(body.contains(r#""token_ids":null"#) && body.ends_with("data: [DONE]\n\n"), "{body}");
}

/// Recordings whose client asked for usage in the end; with `all` for everything.
#[tokio::test]
async fn every_recorded_stream_reaches_a_client_that_asked_for_it_unchanged() {
    let recordings = [
        ("chat", include_str!("../fixtures/chat-stream.resp"), false),
        ("chat", include_str!("../fixtures/chat-tool-named-stream.resp"), false),
        ("chat", include_str!("../fixtures/chat-tool-required-stream.resp"), false),
        ("chat", include_str!("../fixtures/chat-stream-logprobs.resp"), false),
        ("chat", include_str!("../fixtures/chat-stream-token-ids.resp"), true),
        ("", include_str!("../fixtures/completion-stream.resp"), false),
        ("", include_str!("../fixtures/completion-stream-logprobs.resp"), false),
        ("", include_str!("../fixtures/completion-stream-continuous-usage.resp"), true),
    ];
    let mut engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    for (api, recording, all) in recordings {
        let (path, prompt) =
            if api == "chat" { ("/v1/chat/completions", "\"messages\":[]") } else { ("/v1/completions", "\"prompt\":\"x\"") };
        let body = format!(
            r#"{{"model":"smollm2-135m",{prompt},"stream":true,"return_token_ids":{all},"stream_options":{{"include_usage":true,"continuous_usage_stats":{all}}}}}"#
        );
        let response = front.spawn_post(path, &body, &[("x-request-id", "same")]);
        let sent = recorded(recording).1;
        engine.call().await.play(&sent).await;
        assert_eq!(text(&read(response.await.unwrap()).await), renamed(&sent, "same"));
    }
}

#[tokio::test]
async fn any_split_of_the_engines_bytes_gives_the_client_the_same_bytes() {
    let mut engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let body = recorded(CHAT_PLAIN).1;
    let mut seen = BTreeSet::new();
    for split in 0..=body.len() {
        let response = front.spawn_post("/v1/chat/completions", ASK, &[("x-request-id", "same")]);
        let sender = engine.call().await.stream();
        sender.send(body[..split].to_vec()).await;
        sender.send(body[split..].to_vec()).await;
        drop(sender);
        seen.insert(text(&read(response.await.unwrap()).await));
    }
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), [renamed(&body, "same")]);
}

#[tokio::test]
async fn an_engine_that_dies_in_its_stream_is_a_failure_though_it_says_done() {
    let mut engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let response = front.completion(r#"{"model":"smollm2-135m","prompt":[1,2,3],"stream":true}"#);
    engine.call().await.play(&recorded(include_str!("../fixtures/stream-engine-died.resp")).1).await;
    let body = text(&read(response.await.unwrap()).await);
    assert!(body.contains(" Fact"));
    assert_failed(&body);
}

#[tokio::test]
async fn a_stream_that_ends_early_and_one_that_is_aborted_are_failures() {
    for recording in [include_str!("../fixtures/chat-stream-client-abort.resp"), include_str!("../fixtures/stream-server-abort.resp")] {
        let mut engine = FakeEngine::start().await;
        let front = Front::over(&[&engine]).await;
        let response = front.completion(r#"{"model":"smollm2-135m","prompt":[1,2,3],"stream":true}"#);
        engine.call().await.play(&recorded(recording).1).await;
        assert_failed(&text(&read(response.await.unwrap()).await));
    }
}

/// As engines of each kind write the end of a stream of the chat API: a finish, usage, and `[DONE]`.
fn chat_of(kind: EngineKind) -> Vec<Bytes> {
    match kind {
        EngineKind::LlamaCpp => events(&recorded(include_str!("../fixtures/llamacpp-chat-stream.resp")).1),
        EngineKind::Baton | EngineKind::Vllm => events(&recorded(CHAT).1),
        // By their sources: a role, text, the finish on its own, usage.
        EngineKind::Sglang | EngineKind::OpenAi => {
            let choice =
                |delta: Value, finish: Option<&str>| json!([{ "index": 0, "delta": delta, "finish_reason": finish, "matched_stop": null }]);
            let chunk = |choices: Value| json!({ "id": "f", "object": "chat.completion.chunk", "created": 5, "model": "smollm2-135m", "choices": choices });
            let mut usage = chunk(json!([]));
            usage["usage"] = json!({ "prompt_tokens": 3, "total_tokens": 4, "completion_tokens": 1 });
            let chunks = [
                chunk(choice(json!({ "role": "assistant", "content": "" }), None)),
                chunk(choice(json!({ "content": "Paris" }), None)),
                chunk(choice(json!({}), Some("stop"))),
                usage,
            ];
            let events = chunks.iter().map(|chunk| format!("data: {chunk}\n\n").into());
            events.chain([Bytes::from_static(b"data: [DONE]\n\n")]).collect()
        }
    }
}

/// Nothing but the end mark is missing, which is written here.
#[tokio::test]
async fn a_stream_of_which_only_the_end_mark_is_lost_is_complete() {
    for kind in [EngineKind::Baton, EngineKind::Vllm, EngineKind::Sglang, EngineKind::LlamaCpp, EngineKind::OpenAi] {
        for (ask, cut, lost) in [(ASK_USAGE, true, 1), (ASK_USAGE, false, 1), (ASK, true, 1), (ASK, true, 2), (ASK_USAGE, true, 2)] {
            let mut engine = FakeEngine::start().await;
            let mut config = config(&[&engine]);
            if kind == EngineKind::Baton {
                config.engines[0] = engine.baton(&report(0));
            }
            config.engines[0].kind = kind;
            let front = Front::with(config).await;
            let response = front.chat(ask);
            let sender = engine.call().await.stream();
            let told = chat_of(kind);
            for event in &told[..told.len() - lost] {
                sender.send(event.clone()).await;
            }
            if cut {
                sender.cut().await;
            } else {
                drop(sender);
            }
            let body = text(&read(response.await.unwrap()).await);
            if ask == ASK_USAGE && lost == 2 {
                assert_failed(&body);
                continue;
            }
            assert!(body.ends_with("data: [DONE]\n\n") && !body.contains("\"error\""), "{kind:?}: {body}");
            assert_eq!(body.contains("\"usage\":{"), ask == ASK_USAGE, "{kind:?}: {body}");
            assert_eq!(front.get("/baton/v1/fleet").await.1["replicas"][0]["state"], "ready");
        }
    }
}

#[tokio::test]
async fn an_engine_that_is_gone_after_the_finish_has_said_all() {
    let mut engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let response = front.chat(ASK_USAGE);
    let sender = engine.call().await.stream();
    let told = events(&recorded(CHAT).1);
    sender.send(told[0].clone()).await;
    let mut reader = EventReader::new(response.await.unwrap());
    reader.next().await.unwrap();
    for event in &told[1..told.len() - 1] {
        sender.send(event.clone()).await;
        reader.next().await.unwrap();
    }
    // No connection breaks.
    front.gateway.replica_down(baton_units::ReplicaId(0));
    assert_eq!(text(&reader.next().await.unwrap()), "data: [DONE]\n\n");
    sender.closed().await;
}

#[tokio::test]
async fn an_answer_that_is_assembled_needs_no_end_mark() {
    let mut engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let response = front.chat(ASK_WHOLE);
    let sender = engine.call().await.stream();
    let told = events(&recorded(CHAT).1);
    for event in &told[..told.len() - 1] {
        sender.send(event.clone()).await;
    }
    sender.cut().await;
    let answer = read_json(response.await.unwrap()).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "The capital of France is Paris.");
    assert_eq!(answer["usage"]["completion_tokens"], 8);
}

/// One of two has no end yet.
#[tokio::test]
async fn a_choice_without_its_finish_is_missed() {
    let mut engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let response = front.completion(r#"{"model":"smollm2-135m","prompt":"x","stream":true,"n":2}"#);
    let sender = engine.call().await.stream();
    for (choice, finish) in [(0, None), (1, None), (0, Some("stop"))] {
        let choice = json!({ "index": choice, "text": "a", "finish_reason": finish, "token_ids": [7] });
        sender.send(format!("data: {}\n\n", json!({ "id": "c", "choices": [choice] }))).await;
    }
    drop(sender);
    assert_failed(&text(&read(response.await.unwrap()).await));
}

#[tokio::test]
async fn a_cut_connection_after_the_first_token_is_told_in_the_stream() {
    let mut engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let response = front.chat(ASK);
    let sender = engine.call().await.stream();
    for event in &events(&recorded(CHAT).1)[..3] {
        sender.send(event.clone()).await;
    }
    sender.cut().await;
    let body = text(&read(response.await.unwrap()).await);
    assert!(body.contains("The") && body.contains(" capital"));
    assert_failed(&body);
}

#[tokio::test]
async fn before_the_first_token_every_kind_of_failure_is_retried_elsewhere() {
    let opening = events(&recorded(CHAT).1)[0].clone();
    for failure in ["status", "hang-up", "in-band", "cut after the opening", "garbage"] {
        let (mut a, mut b) = (FakeEngine::start().await, FakeEngine::start().await);
        let front = Front::over(&[&a, &b]).await;
        let response = front.chat(ASK_USAGE);
        let (call, other) = tokio::select! {
            call = a.call() => (call, &mut b),
            call = b.call() => (call, &mut a),
        };
        let first_id = call.headers["x-request-id"].clone();
        match failure {
            "status" => call.reply(503, b"{}"),
            "hang-up" => call.hang_up(),
            "in-band" => call.play(b"data: {\"error\":{\"message\":\"dead\",\"code\":500}}\n\ndata: [DONE]\n\n").await,
            "garbage" => call.play(b"data: <html>\n\n").await,
            _ => {
                let sender = call.stream();
                sender.send(opening.clone()).await;
                sender.cut().await;
            }
        }
        let call = other.call().await;
        assert_ne!(call.headers["x-request-id"], first_id, "attempts share an id");
        call.play(&recorded(CHAT).1).await;
        let body = text(&read(response.await.unwrap()).await);
        assert_eq!(body.matches("\"role\":\"assistant\"").count(), 1, "{failure}: {body}");
        assert!(body.contains(" Paris") && body.ends_with("data: [DONE]\n\n"), "{failure}: {body}");
    }
}

#[tokio::test]
async fn an_engine_that_hangs_before_its_first_token_loses_the_request_to_another() {
    let (mut a, mut b) = (FakeEngine::start().await, FakeEngine::start().await);
    let mut config = config(&[&a, &b]);
    config.gateway.first_token_timeout = Duration::from_millis(1);
    config.gateway.first_token_factor = 1.0;
    let front = Front::with(config).await;
    let response = front.chat(ASK);
    let (hung, other) = tokio::select! {
        call = a.call() => (call, &mut b),
        call = b.call() => (call, &mut a),
    };
    // The other may be given up as well before it has spoken, and the request with it; what counts is that it was asked.
    let second = other.call().await;
    hung.given_up().await;
    second.play(&recorded(CHAT).1).await;
    response.await.unwrap();
}

/// As when a host freezes or loses its network: no connection breaks, and only probes tell.
#[tokio::test]
async fn a_replica_found_dead_loses_requests_that_wait_for_their_first_token() {
    for ask in [ASK.to_owned(), ASK.replace(",\"stream\":true", "")] {
        let (mut a, mut b) = (FakeEngine::start().await, FakeEngine::start().await);
        let mut config = config(&[&a, &b]);
        config.gateway.first_token_timeout = Duration::from_hours(1);
        let front = Front::with(config).await;
        let response = front.chat(&ask);
        let (silent, id, other) = tokio::select! {
            call = a.call() => (call, 0, &mut b),
            call = b.call() => (call, 1, &mut a),
        };
        front.gateway.replica_down(baton_units::ReplicaId(id));
        let second = other.call().await;
        silent.given_up().await;
        second.play(&recorded(CHAT).1).await;
        assert!(text(&read(response.await.unwrap()).await).contains(" Paris"));
    }
}

#[tokio::test]
async fn when_every_attempt_fails_the_client_gets_a_status() {
    let (mut a, mut b) = (FakeEngine::start().await, FakeEngine::start().await);
    let front = Front::over(&[&a, &b]).await;
    let response = front.chat(ASK);
    for _ in 0..2 {
        tokio::select! {
            call = a.call() => call.reply(503, b"{}"),
            call = b.call() => call.reply(503, b"{}"),
        }
    }
    let response = response.await.unwrap();
    assert_eq!(response.status(), 502);
    assert!(response.headers().contains_key("retry-after"));
    assert_eq!(read_json(response).await["error"]["code"], 502);
}

#[tokio::test]
async fn a_client_that_leaves_stops_the_engine() {
    let mut engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    // In the middle of a stream.
    let response = front.chat(ASK);
    let sender = engine.call().await.stream();
    sender.send(events(&recorded(CHAT).1)[1].clone()).await;
    let mut reader = EventReader::new(response.await.unwrap());
    reader.next().await.unwrap();
    drop(reader);
    sender.closed().await;
    // Before the engine has said anything.
    let response = front.chat(ASK_WHOLE);
    let call = engine.call().await;
    response.abort();
    call.given_up().await;
    // Both are booked: nothing is left in the gateway or in the router's books.
    loop {
        let (_, requests) = front.get("/baton/v1/requests").await;
        let (_, fleet) = front.get("/baton/v1/fleet").await;
        if requests["requests"] == json!([]) && fleet["replicas"][0]["in_flight"] == 0 {
            break;
        }
    }
    let (_, decisions) = front.get("/baton/v1/decisions").await;
    let outcomes: Vec<_> = decisions["decisions"].as_array().unwrap().iter().map(|record| &record["realised"]["outcome"]).collect();
    assert_eq!(outcomes, ["cancelled", "cancelled"]);
}

#[tokio::test]
async fn a_whole_answer_is_assembled_from_a_stream_as_vllm_would_have_given_it() {
    let mut engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let response = front.spawn_post("/v1/chat/completions", ASK_WHOLE, &[("x-request-id", "a3e3317ef205287b")]);
    let call = engine.call().await;
    assert_eq!(call.body["stream"], true);
    call.play(&recorded(CHAT).1).await;
    let response = response.await.unwrap();
    assert_eq!(response.headers()["content-type"], "application/json");
    let whole = text(&recorded(include_str!("../fixtures/chat.resp")).1);
    let expected = whole
        .replace("1795962758", "1795962764")
        .replace(r#""cached_tokens":0,"created_cache_tokens":32"#, r#""cached_tokens":32,"created_cache_tokens":0"#);
    assert_eq!(text(&read(response).await), expected);
}

#[tokio::test]
async fn a_half_assembled_answer_is_started_afresh_on_another_replica() {
    let (mut a, mut b) = (FakeEngine::start().await, FakeEngine::start().await);
    let front = Front::over(&[&a, &b]).await;
    let response = front.chat(ASK_WHOLE);
    let (call, other) = tokio::select! {
        call = a.call() => (call, &mut b),
        call = b.call() => (call, &mut a),
    };
    let sender = call.stream();
    for event in &events(&recorded(CHAT).1)[..5] {
        sender.send(event.clone()).await;
    }
    sender.cut().await;
    other.call().await.play(&recorded(CHAT).1).await;
    let answer = read_json(response.await.unwrap()).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "The capital of France is Paris.");
    assert_eq!(answer["usage"]["completion_tokens"], 8);
}

#[tokio::test]
async fn an_engine_of_another_kind_answers_whole_and_is_passed_on_as_it_is() {
    let mut engine = FakeEngine::start().await;
    let mut config = config(&[&engine]);
    config.engines[0].kind = EngineKind::OpenAi;
    let front = Front::with(config).await;
    let response = front.chat(ASK_WHOLE);
    let call = engine.call().await;
    assert_eq!(call.body, serde_json::from_str::<Value>(ASK_WHOLE).unwrap());
    let answer = recorded(include_str!("../fixtures/chat.resp")).1;
    call.reply(200, &answer);
    assert_eq!(read(response.await.unwrap()).await, answer);
}

#[tokio::test]
async fn an_engine_that_dies_gets_no_more_requests_and_is_used_again_when_it_is_back() {
    let (a, mut b) = (FakeEngine::start().await, FakeEngine::start().await);
    let front = Front::over(&[&a, &b]).await;
    a.kill();
    for _ in 0..4 {
        let response = front.chat(ASK);
        b.call().await.play(&recorded(CHAT).1).await;
        assert!(text(&read(response.await.unwrap()).await).ends_with("data: [DONE]\n\n"));
    }
    let mut back = FakeEngine::start().await;
    front.gateway.replica_down(baton_units::ReplicaId(0));
    front.gateway.replica_up(baton_units::ReplicaId(0), back.url.clone());
    front.gateway.until_ready(2).await;
    front.gateway.replica_down(baton_units::ReplicaId(1));
    let response = front.chat(ASK);
    back.call().await.play(&recorded(CHAT).1).await;
    assert!(text(&read(response.await.unwrap()).await).ends_with("data: [DONE]\n\n"));
}

/// Without back-pressure the gateway would take in all of this while its client reads nothing.
#[tokio::test]
async fn an_engine_is_slowed_by_a_client_that_does_not_read() {
    const EVENTS: usize = 2000;
    const BYTES: usize = 64 << 10;
    let mut engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let response = front.completion(r#"{"model":"smollm2-135m","prompt":[1,2,3],"stream":true}"#);
    let sender = engine.call().await.stream();
    let taken = Arc::new(AtomicUsize::new(0));
    let count = taken.clone();
    let sending = tokio::spawn(async move {
        let text = "x".repeat(BYTES);
        for _ in 0..EVENTS {
            sender.send(format!("data: {{\"choices\":[{{\"index\":0,\"text\":\"{text}\",\"finish_reason\":null}}]}}\n\n")).await;
            count.fetch_add(1, Ordering::Relaxed);
        }
        sender.send("data: {\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":\"length\"}]}\n\ndata: [DONE]\n\n").await;
    });
    let response = response.await.unwrap();
    // Others are served meanwhile.
    for _ in 0..100 {
        let other = front.chat(ASK);
        engine.call().await.play(&recorded(CHAT_PLAIN).1).await;
        read(other.await.unwrap()).await;
    }
    let ahead = taken.load(Ordering::Relaxed);
    assert!(ahead < EVENTS / 2, "{ahead} events of {BYTES} bytes were taken from the engine for a client that read none");
    let mut reader = EventReader::new(response);
    let mut events = 0;
    while let Some(event) = reader.next().await {
        events += usize::from(event.len() > BYTES);
    }
    assert_eq!(events, EVENTS);
    sending.await.unwrap();
}
