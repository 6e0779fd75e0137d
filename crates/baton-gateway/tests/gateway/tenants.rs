//! Tenants: whose key opens the door, and what it opens.

use std::{sync::Arc, time::Duration};

use baton_gateway::{GatewayConfig, Isolation, KeyHash, PublicPrefixConfig, Secret, TenantConfig, Text};
use baton_text::Tokenizer;
use baton_wire::openai::PublicTokens;
use http::{Method, Response, StatusCode};
use hyper::body::Incoming;
use serde_json::{Value, json};

use crate::{
    copies::report,
    support::{Call, EventReader, FakeEngine, Front, config, read, read_json, recorded},
};

const CHAT: &str = include_str!("../fixtures/chat-stream.resp");
const ASK: &str = r#"{"model":"smollm2-135m","messages":[{"role":"user","content":"hi"}],"stream":true}"#;
const JSON: (&str, &str) = ("content-type", "application/json");

/// A tenant with this one key, which shares its prefixes.
fn tenant(name: &str, key: &str) -> TenantConfig {
    TenantConfig { keys: vec![KeyHash::of(key.as_bytes())], isolation: Isolation::None, ..TenantConfig::new(name) }
}

fn with_tenants(engine: &FakeEngine, tenants: impl IntoIterator<Item = TenantConfig>) -> GatewayConfig {
    GatewayConfig { tenants: tenants.into_iter().collect(), ..config(&[engine]) }
}

async fn post(front: &Front, key: &str, path: &str, body: &str) -> Response<Incoming> {
    front.send(Method::POST, path, &[JSON, ("authorization", &format!("Bearer {key}"))], body).await
}

async fn metrics(front: &Front) -> String {
    String::from_utf8(read(front.send(Method::GET, "/metrics", &[], "").await).await).unwrap()
}

/// Sends a request that the engine gets and the test answers.
async fn asked(
    front: &Front,
    engine: &mut FakeEngine,
    key: &str,
    path: &str,
    body: &str,
) -> (tokio::task::JoinHandle<Response<Incoming>>, Call) {
    let response = front.spawn_post(path, body, &[("authorization", &format!("Bearer {key}"))]);
    (response, engine.call().await)
}

/// The error's code, and what the client is told to wait.
async fn refused(response: Response<Incoming>) -> (StatusCode, String, u64) {
    let status = response.status();
    let retry_after = response.headers().get("retry-after").map_or(0, |value| value.to_str().unwrap().parse().unwrap());
    let error = read_json(response).await;
    (status, error["error"]["code"].as_str().unwrap().to_owned(), retry_after)
}

#[tokio::test]
async fn without_a_tenants_key_every_path_of_clients_is_closed() {
    let mut engine = FakeEngine::start().await;
    let front = Front::with(with_tenants(&engine, [tenant("a", "key-a")])).await;
    let chat = (Method::POST, "/v1/chat/completions", ASK);
    let completion = (Method::POST, "/v1/completions", r#"{"prompt":"x"}"#);
    let embedding = (Method::POST, "/v1/embeddings", r#"{"model":"smollm2-135m","input":"x"}"#);
    let lists = [(Method::GET, "/v1/models", ""), (Method::GET, "/v1/models/smollm2-135m", ""), (Method::POST, "/tokenize", "{}")];
    for (method, path, body) in [chat, completion, embedding].into_iter().chain(lists) {
        for headers in [vec![JSON], vec![JSON, ("authorization", "Bearer key-b")], vec![JSON, ("authorization", "key-a")]] {
            let response = front.send(method.clone(), path, &headers, body).await;
            assert_eq!(response.headers()["www-authenticate"], "Bearer");
            assert_eq!(refused(response).await, (StatusCode::UNAUTHORIZED, "invalid_api_key".to_owned(), 0), "{path}");
        }
    }
    assert!(metrics(&front).await.contains("baton_strangers_total 18\n"));
    for path in ["/health", "/live", "/ready"] {
        assert_eq!(front.get(path).await.0, 200);
    }
    assert_eq!(front.send(Method::GET, "/v1/models", &[("x-api-key", "key-a")], "").await.status(), 200);
    let (response, call) = asked(&front, &mut engine, "key-a", "/v1/chat/completions", ASK).await;
    assert!(!call.headers.contains_key("authorization"));
    call.play(&recorded(CHAT).1).await;
    assert_eq!(response.await.unwrap().status(), 200);
}

#[tokio::test]
async fn a_tenant_has_as_many_requests_at_once_as_it_may() {
    let mut engine = FakeEngine::start().await;
    let limited = TenantConfig { concurrency: Some(1), ..tenant("a", "key-a") };
    let front = Front::with(with_tenants(&engine, [limited, tenant("b", "key-b")])).await;
    let (first, call) = asked(&front, &mut engine, "key-a", "/v1/chat/completions", ASK).await;
    for (path, body) in [("/v1/chat/completions", ASK), ("/v1/embeddings", r#"{"model":"smollm2-135m","input":"x"}"#)] {
        let response = post(&front, "key-a", path, body).await;
        assert_eq!(refused(response).await, (StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded".to_owned(), 1));
    }
    let (other, others_call) = asked(&front, &mut engine, "key-b", "/v1/chat/completions", ASK).await;
    for (response, call) in [(first, call), (other, others_call)] {
        call.play(&recorded(CHAT).1).await;
        read(response.await.unwrap()).await;
    }
    let (third, call) = asked(&front, &mut engine, "key-a", "/v1/chat/completions", ASK).await;
    // A client that leaves gives its place up as well.
    let sender = call.stream();
    third.abort();
    sender.closed().await;
    let (fourth, call) = asked(&front, &mut engine, "key-a", "/v1/chat/completions", ASK).await;
    call.play(&recorded(CHAT).1).await;
    read(fourth.await.unwrap()).await;
    let page = metrics(&front).await;
    for line in [
        r#"baton_tenant_refused_total{tenant="a",limit="concurrency"} 2"#,
        r#"baton_tenant_requests_total{tenant="a"} 3"#,
        r#"baton_tenant_requests_total{tenant="b"} 1"#,
        r#"baton_tenant_running{tenant="a"} 0"#,
    ] {
        assert!(page.lines().any(|found| found == line), "{line} is not in\n{page}");
    }
}

#[tokio::test]
async fn a_tenant_begins_as_many_requests_in_a_minute_as_it_may() {
    let engine = FakeEngine::start().await;
    let limited = TenantConfig { requests_per_minute: Some(2), ..tenant("a", "key-a") };
    let front = Front::with(with_tenants(&engine, [limited])).await;
    for _ in 0..2 {
        assert_eq!(post(&front, "key-a", "/v1/chat/completions", "{}").await.status(), 400, "one that is refused counts as well");
    }
    let (status, code, retry_after) = refused(post(&front, "key-a", "/v1/chat/completions", ASK).await).await;
    assert_eq!((status.as_u16(), code.as_str()), (429, "rate_limit_exceeded"));
    assert!((1..=30).contains(&retry_after), "the next one comes within half a minute: {retry_after}");
    let lists = front.send(Method::GET, "/v1/models", &[("authorization", "Bearer key-a")], "").await;
    assert_eq!(lists.status(), 200, "a look at the models is no request");
}

/// What a prompt of ten tokens with five of output costs is what is counted, not what was set aside for it.
#[tokio::test]
async fn tokens_are_counted_as_they_were_used() {
    let mut engine = FakeEngine::start().await;
    let limited = TenantConfig { tokens_per_minute: Some(40), ..tenant("a", "key-a") };
    let front = Front::with(with_tenants(&engine, [limited])).await;
    let completion = json!({ "model": "smollm2-135m", "prompt": vec![7; 10], "max_tokens": 20, "echo": true }).to_string();
    let usage = json!({ "prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15 });
    let answer = json!({ "object": "text_completion", "choices": [], "usage": usage }).to_string();
    // 40, less 15.
    let (response, call) = asked(&front, &mut engine, "key-a", "/v1/completions", &completion).await;
    call.reply(200, answer.as_bytes());
    assert_eq!(read_json(response.await.unwrap()).await["usage"]["total_tokens"], 15);
    // 25 left; 30 are asked for, and there are so many in 8 seconds at the latest.
    let (status, _, retry_after) = refused(post(&front, "key-a", "/v1/completions", &completion).await).await;
    assert!(status == 429 && (1..=8).contains(&retry_after), "{retry_after}");
    // Other paths count by the engine's usage as well.
    let embedding = r#"{"model":"smollm2-135m","input":"four words are there"}"#;
    let (response, call) = asked(&front, &mut engine, "key-a", "/v1/embeddings", embedding).await;
    call.reply(200, br#"{"data":[],"usage":{"prompt_tokens":4,"total_tokens":4}}"#);
    read(response.await.unwrap()).await;
    let page = metrics(&front).await;
    for (kind, tokens) in [("prompt", 14), ("output", 5)] {
        let line = format!("baton_tenant_tokens_total{{tenant=\"a\",kind=\"{kind}\"}} {tokens}");
        assert!(page.lines().any(|found| found == line), "{line} is not in\n{page}");
    }
}

#[tokio::test]
async fn a_priority_is_no_more_important_than_its_tenant_may_be() {
    let mut engine = FakeEngine::start().await;
    let mut config = with_tenants(&engine, [TenantConfig { priority_max: Some(2), ..tenant("a", "key-a") }, tenant("b", "key-b")]);
    config.engines[0].priorities = Some(true);
    let front = Front::with(config).await;
    for (key, asked_for, got) in [("key-a", -5, json!(2)), ("key-a", 9, json!(9)), ("key-b", -5, json!(-5)), ("key-b", 0, Value::Null)] {
        let body = ASK.replace(r#""stream":true"#, &format!(r#""stream":true,"priority":{asked_for}"#));
        let (response, call) = asked(&front, &mut engine, key, "/v1/chat/completions", &body).await;
        assert_eq!(call.body.get("priority").cloned().unwrap_or_default(), got, "{key} asks for {asked_for}");
        call.play(&recorded(CHAT).1).await;
        read(response.await.unwrap()).await;
    }
}

#[tokio::test]
async fn keys_come_and_go_while_streams_run() {
    let mut engine = FakeEngine::start().await;
    let front = Front::with(with_tenants(&engine, [tenant("a", "key-a")])).await;
    let (response, call) = asked(&front, &mut engine, "key-a", "/v1/chat/completions", ASK).await;
    let (_, body) = recorded(CHAT);
    let (sender, middle) = (call.stream(), body.len() / 2);
    sender.send(body[..middle].to_vec()).await;
    let mut reader = EventReader::new(response.await.unwrap());
    assert!(reader.next().await.is_some(), "it runs");
    front.gateway.reload(&with_tenants(&engine, [tenant("a", "new-a"), tenant("b", "key-b")])).unwrap();
    let list = async |key: &str| front.send(Method::GET, "/v1/models", &[("authorization", &format!("Bearer {key}"))], "").await.status();
    assert_eq!([list("key-a").await, list("new-a").await, list("key-b").await].map(|status| status.as_u16()), [401, 200, 200]);
    sender.send(body[middle..].to_vec()).await;
    drop(sender);
    let mut latest = Vec::new();
    while let Some(event) = reader.next().await {
        latest = event.to_vec();
    }
    assert_eq!(latest, b"data: [DONE]\n\n");
    assert!(metrics(&front).await.contains("baton_tenant_requests_total{tenant=\"a\"} 1\n"), "it is the same tenant");
    front.gateway.reload(&config(&[&engine])).unwrap();
    assert_eq!(front.get("/v1/models").await.0, 200, "without tenants it is open");
}

/// Salts as engines see them, by client and by the salt that it sends.
#[tokio::test]
async fn a_tenant_has_salts_that_no_other_has_and_no_client_can_name() {
    let mut engine = FakeEngine::start().await;
    let apart = |name: &str, key: &str| TenantConfig { isolation: Isolation::Salt, ..tenant(name, key) };
    let mut config = with_tenants(&engine, [apart("a", "key-a"), apart("b", "key-b"), tenant("c", "key-c")]);
    config.tenants[0].keys.push(KeyHash::of(b"other-a"));
    config.gateway.salt_secret = Some(Secret::new("a secret of the test's own"));
    let front = Front::with(config).await;
    let mut salt = async |key: &str, path: &str, own: Option<&str>| {
        let mut body: Value = serde_json::from_str(ASK).unwrap();
        if path == "/v1/embeddings" {
            body = json!({ "model": "smollm2-135m", "input": "x" });
        }
        if let Some(own) = own {
            body["cache_salt"] = own.into();
        }
        let (response, call) = asked(&front, &mut engine, key, path, &body.to_string()).await;
        let salt = call.body.get("cache_salt").map(|salt| salt.as_str().unwrap().to_owned());
        call.reply(400, b"{}");
        assert_eq!(response.await.unwrap().status(), 400);
        salt
    };
    let chat = "/v1/chat/completions";
    let a = salt("key-a", chat, None).await.unwrap();
    assert_eq!(a.len(), 64);
    assert_eq!(salt("other-a", chat, None).await.unwrap(), a, "one tenant's clients share");
    assert_eq!(salt("key-a", "/v1/embeddings", None).await.unwrap(), a);
    let mut salts = vec![a.clone(), salt("key-b", chat, None).await.unwrap()];
    for own in ["mine", a.as_str()] {
        for key in ["key-a", "key-b", "key-c"] {
            salts.push(salt(key, chat, Some(own)).await.unwrap());
        }
    }
    assert!(!salts.contains(&"mine".to_owned()));
    let count = salts.len();
    salts.sort_unstable();
    salts.dedup();
    assert_eq!(salts.len(), count, "{salts:?}");
    assert_eq!(salt("key-a", chat, Some("mine")).await, salt("other-a", chat, Some("mine")).await);
    assert_eq!(salt("key-c", chat, None).await, None);
    assert_eq!(salt("key-c", "/v1/embeddings", Some("mine")).await, None);
}

/// A prefix that one tenant has sent draws its own requests to where it is, and nobody else's.
#[tokio::test]
async fn no_tenant_is_routed_by_anothers_prefix() {
    let (mut first, mut second) = (FakeEngine::start().await, FakeEngine::start().await);
    let apart = |name: &str, key: &str| TenantConfig { isolation: Isolation::Salt, ..tenant(name, key) };
    let mut config = GatewayConfig { tenants: vec![apart("a", "key-a"), apart("b", "key-b")], ..config(&[&first, &second]) };
    config.gateway.salt_secret = Some(Secret::new("a secret of the test's own"));
    let front = Front::with(config).await;
    let prompt: Vec<u32> = (0..1024).collect();
    let body = json!({ "model": "smollm2-135m", "prompt": prompt, "max_tokens": 1, "echo": true }).to_string();
    let mut believed = async |key: &str| {
        let id = format!("{key}-asks");
        let headers = [("authorization", format!("Bearer {key}")), ("x-request-id", id.clone())];
        let headers: Vec<(&str, &str)> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let response = front.spawn_post("/v1/completions", &body, &headers);
        let usage = json!({ "prompt_tokens": 1024, "completion_tokens": 1, "total_tokens": 1025 });
        let answer = json!({ "object": "text_completion", "choices": [], "usage": usage }).to_string();
        tokio::select! {
            call = first.call() => call.reply(200, answer.as_bytes()),
            call = second.call() => call.reply(200, answer.as_bytes()),
        }
        read(response.await.unwrap()).await;
        let (_, decision) = front.get(&format!("/baton/v1/decisions/{id}")).await;
        decision["quotes"].as_array().unwrap().iter().map(|quote| quote["hit_tokens"].as_u64().unwrap()).max().unwrap()
    };
    assert_eq!(believed("key-a").await, 0);
    assert!(believed("key-a").await >= 992, "its own is known");
    assert_eq!(believed("key-b").await, 0);
}

/// The next request of a client; what the gateway asks for itself is not answered.
async fn generation(engine: &mut FakeEngine) -> Call {
    loop {
        let call = engine.call().await;
        if call.path != "/tokenize" {
            return call;
        }
        call.reply(404, b"{}");
    }
}

/// What is said of the salt to a Baton engine, alone or beside an engine of another kind.
async fn told_of_salt(prompt: &str, beside_another: bool) -> (Option<String>, Value) {
    let (mut engine, mut other) = (FakeEngine::start().await, FakeEngine::start().await);
    let mut config = GatewayConfig { engines: vec![engine.baton(&report(0))], ..config(&[]) };
    if beside_another {
        config.engines.push(other.config());
    }
    config.tenants = vec![TenantConfig { isolation: Isolation::Salt, ..tenant("a", "key-a") }];
    config.gateway.salt_secret = Some(Secret::new("a secret of the test's own"));
    config.public_prefixes = vec![PublicPrefixConfig { system: None, text: Some(Text::new("public ".repeat(100))) }];
    let front = Front::with_text(config, Some(Arc::new(Tokenizer::bytes4()))).await;
    let forged = PublicTokens::new(&Tokenizer::bytes4().encode(prompt, true));
    let body = json!({ "model": "smollm2-135m", "prompt": prompt, "max_tokens": 1, "cache_public": forged }).to_string();
    let response = front.spawn_post("/v1/completions", &body, &[("authorization", "Bearer key-a")]);
    let call = tokio::select! { call = generation(&mut engine) => call, call = generation(&mut other) => call };
    let salt = call.body.get("cache_salt").map(|salt| salt.as_str().unwrap().to_owned());
    let public = call.body.get("cache_public").cloned().unwrap_or_default();
    call.reply(400, b"{}");
    read(response.await.unwrap()).await;
    (salt, public)
}

#[tokio::test]
async fn a_salt_counts_from_behind_what_the_operator_said_is_public_and_no_client_says_so() {
    let prompt = format!("{}and what is mine", "public ".repeat(100));
    let (salt, public) = told_of_salt(&prompt, false).await;
    assert_eq!(salt.unwrap().len(), 64);
    let shared = PublicTokens::new(&Tokenizer::bytes4().encode(&"public ".repeat(100), true));
    assert_eq!(public, json!(shared));
    assert_eq!(told_of_salt("what is mine alone", false).await.1, Value::Null);
    // Another engine would not share it, and one key names a prompt's blocks at all engines.
    assert_eq!(told_of_salt(&prompt, true).await.1, Value::Null);
}

/// Whether tenants see each other's numbers.
#[tokio::test]
async fn where_there_are_tenants_metrics_are_their_operators() {
    let engine = FakeEngine::start().await;
    let mut config = with_tenants(&engine, [tenant("a", "key-a")]);
    config.gateway.admin_key = Some(Secret::new("operator"));
    let front = Front::with(config.clone()).await;
    let status = async |key: &str| front.send(Method::GET, "/metrics", &[("authorization", &format!("Bearer {key}"))], "").await.status();
    assert_eq!([status("key-a").await, status("operator").await].map(|status| status.as_u16()), [401, 200]);
    front.gateway.reload(&GatewayConfig { tenants: Vec::new(), ..config }).unwrap();
    assert_eq!(status("").await, 200, "without tenants they are open");
}

/// What others may have made early is held back, for an hour here; an own prompt is not, nor one of a tenant that does not want it.
#[tokio::test]
async fn a_first_token_that_others_may_have_made_early_is_held_back() {
    let mut engine = FakeEngine::start().await;
    let padded = |cell| TenantConfig { ttft_padding: Some(cell), ..tenant("a", "key-a") };
    let tenants = |cell| with_tenants(&engine, [padded(cell), tenant("b", "key-b")]);
    let (at_once, in_an_hour) = (tenants(Duration::from_nanos(1)), tenants(Duration::from_hours(1)));
    let front = Front::with(at_once).await;
    let usage =
        json!({ "prompt_tokens": 320, "completion_tokens": 1, "total_tokens": 321, "prompt_tokens_details": { "cached_tokens": 304 } });
    let answer = json!({ "object": "text_completion", "choices": [], "usage": usage }).to_string();
    #[allow(clippy::async_yields_async, reason = "an answer that is held back is waited for later, or never")]
    let ask = async |engine: &mut FakeEngine, key: &str, first: u32| {
        let prompt: Vec<u32> = (first..first + 320).collect();
        let body = json!({ "model": "smollm2-135m", "prompt": prompt, "max_tokens": 1, "echo": true }).to_string();
        let (response, call) = asked(&front, engine, key, "/v1/completions", &body).await;
        call.reply(200, answer.as_bytes());
        response
    };
    let cached = async |response: tokio::task::JoinHandle<Response<Incoming>>| {
        read_json(response.await.unwrap()).await["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    assert_eq!(cached(ask(&mut engine, "key-a", 0).await).await, 0, "whoever sent it, it was not this tenant");
    front.gateway.reload(&in_an_hour).unwrap();
    let held = ask(&mut engine, "key-a", 1000).await;
    // It has ended as far as the gateway's books go.
    let booked = async { while front.get("/baton/v1/requests").await.1["requests"] != json!([]) {} };
    tokio::time::timeout(Duration::from_mins(1), booked).await.unwrap();
    assert_eq!(cached(ask(&mut engine, "key-a", 0).await).await, 304, "it is the tenant's own");
    assert_eq!(cached(ask(&mut engine, "key-b", 1000).await).await, 304);
    assert!(!held.is_finished());
    held.abort();
}

/// Without a noticeable delay the usage says no more than the times.
#[tokio::test]
async fn the_usage_shows_no_hits_on_what_others_sent() {
    let mut engine = FakeEngine::start().await;
    let padded = TenantConfig { ttft_padding: Some(Duration::from_nanos(1)), ..tenant("a", "key-a") };
    let front = Front::with(with_tenants(&engine, [padded])).await;
    for (stream, shown) in [(true, 0), (true, 304), (false, 304)] {
        let body = json!({
            "model": "smollm2-135m", "prompt": (0..320).collect::<Vec<u32>>(), "max_tokens": 1, "stream": stream, "stream_options": { "include_usage": true },
        });
        let (response, call) = asked(&front, &mut engine, "key-a", "/v1/completions", &body.to_string()).await;
        let chunk = |choices: Value, usage: Value| {
            let chunk = json!({ "id": "c", "object": "text_completion", "created": 1, "model": "smollm2-135m", "choices": choices, "usage": usage });
            format!("data: {chunk}\n\n")
        };
        let choice =
            json!([{ "index": 0, "text": "a", "logprobs": null, "finish_reason": "length", "stop_reason": null, "token_ids": [5] }]);
        let usage =
            json!({ "prompt_tokens": 320, "completion_tokens": 1, "total_tokens": 321, "prompt_tokens_details": { "cached_tokens": 304 } });
        let events = [chunk(choice, Value::Null), chunk(json!([]), usage), "data: [DONE]\n\n".to_owned()].concat();
        call.play(events.as_bytes()).await;
        let text = String::from_utf8(read(response.await.unwrap()).await).unwrap();
        assert!(text.contains(&format!("\"cached_tokens\":{shown}")), "{text}");
    }
}
