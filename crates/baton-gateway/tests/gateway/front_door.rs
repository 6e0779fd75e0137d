//! What the gateway answers by itself, what it keeps from engines, its end, and its admin API.

use std::time::Duration;

use crate::support::{EventReader, FakeEngine, Front, config, events, read, read_json, recorded};
use http::Method;
use http_body_util::BodyExt;
use serde_json::{Value, json};

const CHAT: &str = include_str!("../fixtures/chat-stream.resp");
const ASK: &str = r#"{"model":"smollm2-135m","messages":[{"role":"user","content":"hi"}],"stream":true}"#;

#[tokio::test]
async fn bad_requests_are_answered_here_in_openais_form() {
    let engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let long = format!(r#"{{"model":"smollm2-135m","prompt":{:?}}}"#, vec![5; 3000]);
    let cases = [
        ("/v1/chat/completions", r#"{"model": "smollm2-135m", "messages": ["#, 400, "JSON decode error"),
        ("/v1/chat/completions", r#"{"model":"smollm2-135m"}"#, 400, "Field required"),
        ("/v1/completions", r#"{"model":"smollm2-135m"}"#, 400, "Field required"),
        ("/v1/chat/completions", r#"{"model":"nope","messages":[]}"#, 404, "The model `nope` does not exist"),
        ("/v1/completions", &long, 400, "maximum context length is 2048 tokens. However, your prompt contains 3000"),
        ("/v1/completions", r#"{"model":"smollm2-135m","prompt":"a","n":1000}"#, 400, "1000 choices"),
    ];
    for (path, body, status, message) in cases {
        let response = front.post(path, body).await;
        assert_eq!(response.status(), status, "{message}");
        assert!(response.headers().contains_key("x-request-id"));
        let error = read_json(response).await;
        assert!(error["error"]["message"].as_str().unwrap().contains(message), "{error}");
        assert_eq!(error["error"]["code"], status);
    }
    let response = front.send(Method::POST, "/v1/completions", &[("content-type", "text/plain")], "{}").await;
    assert!(read_json(response).await["error"]["message"].as_str().unwrap().contains("Unsupported Media Type"));
    let response = front.send(Method::GET, "/v1/completions", &[], "").await;
    assert_eq!(response.status(), 405);
    let response = front.send(Method::GET, "/server_info", &[], "").await;
    assert_eq!(response.status(), 404);
}

#[tokio::test]
async fn a_body_past_the_limit_is_refused() {
    let engine = FakeEngine::start().await;
    let mut config = config(&[&engine]);
    config.gateway.body_limit = 1000;
    let front = Front::with(config).await;
    assert_eq!(front.post("/v1/chat/completions", &"x".repeat(2000)).await.status(), 413);
}

#[tokio::test]
async fn a_request_that_no_replica_can_hold_is_told_what_would_fit() {
    let engine = FakeEngine::start().await;
    // The recorded server says 128 blocks of 32 tokens, and a model length of 2048 fits that; a longer one does not.
    *engine.models.lock().unwrap() = r#"{"object":"list","data":[{"id":"smollm2-135m","max_model_len":100000}]}"#.into();
    let front = Front::over(&[&engine]).await;
    let prompt = format!(r#"{{"model":"smollm2-135m","prompt":{:?},"max_tokens":10}}"#, vec![5; 5000]);
    let response = front.post("/v1/completions", &prompt).await;
    assert_eq!(response.status(), 400);
    let message = read_json(response).await["error"]["message"].to_string();
    assert!(message.contains("4096 tokens"), "{message}");
}

#[tokio::test]
async fn an_engines_own_complaint_reaches_the_client_as_it_is() {
    let mut engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let (status, body) = recorded(include_str!("../fixtures/err-bad-temperature.resp"));
    for ask in [ASK.to_owned(), ASK.replace(",\"stream\":true", "")] {
        let response = front.chat(&ask);
        engine.call().await.reply(status, &body);
        let response = response.await.unwrap();
        assert_eq!(response.status(), 400);
        assert_eq!(read(response).await, body);
    }
}

#[tokio::test]
async fn reserved_fields_and_credentials_do_not_reach_the_engine() {
    let mut engine = FakeEngine::start().await;
    let mut config = config(&[&engine]);
    config.engines[0].key = Some(baton_gateway::Secret::new("engine-key"));
    let front = Front::with(config).await;
    let body = r#"{"model":"smollm2-135m","messages":[],"stream":true,"kv_transfer_params":{"a":1},"request_id":"r","cache_salt":"s","priority":-9,"chat_template":"{{ x }}","custom":{"kept":1.50}}"#;
    let headers = [("authorization", "Bearer client-secret"), ("x-request-id", "mine"), ("x-data-parallel-rank", "1")];
    let response = front.spawn_post("/v1/chat/completions", body, &headers);
    let call = engine.call().await;
    for field in ["kv_transfer_params", "request_id", "priority", "chat_template"] {
        assert!(call.body.get(field).is_none(), "{field}");
    }
    assert_eq!(call.body["custom"], json!({ "kept": 1.5 }));
    assert!(call.body["cache_salt"].as_str().unwrap().starts_with("client-"));
    assert_eq!(call.headers["authorization"], "Bearer engine-key");
    assert!(!call.headers.contains_key("x-data-parallel-rank"));
    assert!(call.headers["x-request-id"].to_str().unwrap().starts_with("baton-"));
    call.play(&recorded(CHAT).1).await;
    read(response.await.unwrap()).await;
}

/// Headers of a client that engines or proxies before them would obey, and one that is meant for all.
#[tokio::test]
async fn an_engine_sees_only_the_headers_that_are_meant_for_it() {
    let mut engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let inner =
        ["x-data-parallel-rank", "x-gateway-destination-endpoint", "x-forwarded-for", "cookie", "x-api-key", "x-session-id", "x-priority"];
    let mut headers: Vec<(&str, &str)> = inner.iter().map(|name| (*name, "1")).collect();
    headers.extend([("traceparent", "00-1-2-01"), ("authorization", "Bearer client")]);
    for (path, body) in [("/v1/chat/completions", ASK), ("/v1/embeddings", r#"{"model":"smollm2-135m","input":"x"}"#)] {
        let response = front.spawn_post(path, body, &headers);
        let call = engine.call().await;
        let seen: Vec<&str> = call.headers.keys().map(http::HeaderName::as_str).collect();
        let known = ["host", "content-type", "content-length", "accept", "traceparent", "x-request-id"];
        assert!(seen.iter().all(|name| known.contains(name)), "{path}: {seen:?}");
        call.reply(400, b"{}");
        assert_eq!(response.await.unwrap().status(), 400);
    }
}

/// By W3C Trace Context: the gateway stands between its client's part of a trace and the engine's.
#[tokio::test]
async fn a_trace_goes_on_at_the_engine_and_is_found_by_its_decision() {
    let mut engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let (trace, parent) = ("4bf92f3577b34da6a3ce929d0e0e4736", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
    let headers = [("traceparent", parent), ("tracestate", "vendor=1"), ("x-request-id", "traced")];
    let response = front.spawn_post("/v1/chat/completions", ASK, &headers);
    let call = engine.call().await;
    let seen = call.headers["traceparent"].to_str().unwrap();
    assert!(seen.len() == parent.len() && seen.starts_with(&format!("00-{trace}-")) && seen.ends_with("-01") && seen != parent, "{seen}");
    assert_eq!(call.headers["tracestate"], "vendor=1");
    assert_eq!(front.get("/baton/v1/requests").await.1["requests"][0]["trace_id"], trace);
    call.play(&recorded(CHAT).1).await;
    read(response.await.unwrap()).await;
    assert_eq!(front.get("/baton/v1/decisions/traced").await.1["trace_id"], trace);
    let response = front.chat(ASK);
    let call = engine.call().await;
    assert!(!call.headers.contains_key("traceparent"), "none is made up");
    call.play(&recorded(CHAT).1).await;
    read(response.await.unwrap()).await;
}

#[tokio::test]
async fn a_request_s_own_objectives_are_on_record_and_bounded() {
    let mut engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let headers = [("x-slo-ttft-ms", "250"), ("x-slo-tpot-ms", "12.5"), ("x-request-id", "hurried")];
    let response = front.spawn_post("/v1/chat/completions", ASK, &headers);
    let call = engine.call().await;
    assert!(!call.headers.contains_key("x-slo-ttft-ms"));
    call.play(&recorded(CHAT).1).await;
    read(response.await.unwrap()).await;
    let (_, decision) = front.get("/baton/v1/decisions/hurried").await;
    assert_eq!((&decision["slo_ttft_ms"], &decision["slo_tpot_ms"]), (&json!(250.0), &json!(12.5)));
    for path in ["/v1/chat/completions", "/v1/messages"] {
        let response = front.spawn_post(path, ASK, &[("x-slo-ttft-ms", "soon")]).await.unwrap();
        assert_eq!(response.status(), 400);
        let error = read_json(response).await;
        let wanted = "x-slo-ttft-ms must be a number of milliseconds from 1 to 3600000, got \"soon\"";
        assert_eq!((&error["error"]["message"], &error["error"]["param"]), (&json!(wanted), &json!("x-slo-ttft-ms")), "{path}");
    }
}

#[tokio::test]
async fn an_answer_names_its_replica_only_where_that_is_wanted() {
    let mut engine = FakeEngine::start().await;
    let mut config = config(&[&engine]);
    config.engines[0].name = Some("rack-7".to_owned());
    let front = Front::with(config.clone()).await;
    for (exposed, named) in [(false, None), (true, Some("rack-7"))] {
        config.gateway.expose_replica = exposed;
        front.gateway.reload(&config).unwrap();
        for (path, body) in [("/v1/chat/completions", ASK), ("/v1/embeddings", r#"{"model":"smollm2-135m","input":"x"}"#)] {
            let response = front.spawn_post(path, body, &[]);
            let call = engine.call().await;
            if path == "/v1/embeddings" {
                call.reply(200, b"{}");
            } else {
                call.play(&recorded(CHAT).1).await;
            }
            let response = response.await.unwrap();
            let told = response.headers().get("x-baton-replica").map(|name| name.to_str().unwrap());
            assert_eq!(told, named, "{path}");
            let anywhere = response.headers().values().any(|value| value.as_bytes().windows(6).any(|part| part == b"rack-7"));
            assert_eq!(anywhere, exposed);
            let answer = read(response).await;
            assert!(!answer.windows(6).any(|part| part == b"rack-7"));
        }
    }
    let refused = front.post("/v1/completions", r#"{"model":"nope"}"#).await;
    assert!(!refused.headers().contains_key("x-baton-replica"), "no replica answers");
}

#[tokio::test]
async fn other_paths_go_to_an_engine_that_has_them() {
    let (mut a, mut b) = (FakeEngine::start().await, FakeEngine::start().await);
    let front = Front::over(&[&a, &b]).await;
    for _ in 0..2 {
        let response = front.spawn_post("/v1/embeddings", r#"{"model":"smollm2-135m","input":"x","kv_transfer_params":1}"#, &[]);
        // Whoever is asked first lacks the path.
        tokio::select! {
            call = a.call() => {
                call.reply(404, b"{}");
                let call = b.call().await;
                assert_eq!((call.path.as_str(), &call.body), ("/v1/embeddings", &json!({ "model": "smollm2-135m", "input": "x" })));
                call.reply(200, b"{\"data\":[]}");
            }
            call = b.call() => {
                call.reply(404, b"{}");
                a.call().await.reply(200, b"{\"data\":[]}");
            }
        }
        assert_eq!(read_json(response.await.unwrap()).await, json!({ "data": [] }));
    }
    let response = front.spawn_post("/tokenize", r#"{"model":"lora-a","prompt":"x"}"#, &[]);
    tokio::select! {
        call = a.call() => call.reply(200, b"{\"count\":1}"),
        call = b.call() => call.reply(200, b"{\"count\":1}"),
    }
    assert_eq!(read_json(response.await.unwrap()).await["count"], 1);
    assert_eq!(front.post("/v1/load_lora_adapter", "{}").await.status(), 404);
    assert_eq!(front.post("/v1/embeddings", r#"{"model":"nope"}"#).await.status(), 404);
}

#[tokio::test]
async fn a_path_that_no_engine_has_is_named_in_openais_form() {
    let mut engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let missing = br#"{"error":{"message":"no response r1","type":"NotFoundError","param":null,"code":404}}"#;
    for (body, message) in [(br#"{"detail":"Not Found"}"#.as_slice(), "has this path"), (missing.as_slice(), "no response r1")] {
        let response = front.spawn_post("/v1/embeddings", r#"{"model":"smollm2-135m","input":"x"}"#, &[("x-request-id", "mine")]);
        engine.call().await.reply(404, body);
        let response = response.await.unwrap();
        assert_eq!((response.status().as_u16(), &response.headers()["x-request-id"]), (404, &"mine".parse().unwrap()));
        let error = read_json(response).await["error"]["message"].to_string();
        assert!(error.contains(message), "{error}");
    }
}

#[tokio::test]
async fn an_engine_that_leaves_another_path_unanswered_is_not_waited_for_for_ever() {
    let mut engine = FakeEngine::start().await;
    let mut config = config(&[&engine]);
    config.gateway.request_timeout = Duration::from_millis(100);
    config.gateway.stall_timeout = Duration::from_millis(100);
    let front = Front::with(config).await;
    let ask = || front.spawn_post("/v1/embeddings", r#"{"model":"smollm2-135m","input":"x"}"#, &[]);
    let response = ask();
    let call = engine.call().await;
    assert_eq!(response.await.unwrap().status(), 504);
    call.given_up().await;
    // One that falls silent within its answer is cut off there.
    let response = ask();
    let sender = engine.call().await.stream();
    sender.send("half").await;
    let body = response.await.unwrap().into_body();
    assert!(body.collect().await.is_err(), "half an answer looks whole");
    sender.closed().await;
}

#[tokio::test]
async fn every_answer_carries_the_clients_request_id() {
    let engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let paths = [
        (Method::GET, "/health", 200),
        (Method::GET, "/v1/models", 200),
        (Method::GET, "/v1/completions", 405),
        (Method::GET, "/nothing/here", 404),
        (Method::DELETE, "/baton/v1/policy", 405),
        (Method::GET, "/baton/v1/decisions?limit=few", 400),
    ];
    for (method, path, status) in paths {
        let response = front.send(method, path, &[("x-request-id", "mine")], "").await;
        assert_eq!((response.status().as_u16(), &response.headers()["x-request-id"]), (status, &"mine".parse().unwrap()), "{path}");
        if status >= 400 {
            assert_eq!(read_json(response).await["error"]["code"], status, "{path}");
        }
    }
}

#[tokio::test]
async fn several_prompts_may_together_be_longer_than_the_context() {
    let mut engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let body = |prompts: &Value| json!({ "model": "smollm2-135m", "prompt": prompts, "max_tokens": 1 }).to_string();
    let response = front.completion(&body(&json!([vec![5; 1500], vec![6; 1500]])));
    engine.call().await.reply(400, b"{}");
    assert_eq!(read(response.await.unwrap()).await, b"{}", "the engine was asked");
    let refused = front.post("/v1/completions", &body(&json!([vec![5; 1500], vec![6; 2500]]))).await;
    assert!(read_json(refused).await["error"]["message"].as_str().unwrap().contains("your prompt contains 2500"));
}

#[tokio::test]
async fn models_health_and_metrics_are_shown() {
    let mut engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let (_, models) = front.get("/v1/models").await;
    let ids: Vec<_> = models["data"].as_array().unwrap().iter().map(|card| card["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["lora-a", "smollm2-135m"]);
    for path in ["/health", "/live", "/ready", "/v1/models/smollm2-135m"] {
        assert_eq!(front.get(path).await.0, 200, "{path}");
    }
    let response = front.chat(ASK);
    engine.call().await.play(&recorded(CHAT).1).await;
    read(response.await.unwrap()).await;
    let page = loop {
        let page = String::from_utf8(read(front.send(Method::GET, "/metrics", &[], "").await).await).unwrap();
        if page.contains("outcome=\"finished\"") {
            break page;
        }
    };
    assert!(page.contains("baton_requests_total{route=\"/v1/chat/completions\",outcome=\"finished\"} 1"));
    assert!(page.contains("baton_cached_tokens_total{replica=\"r0\"} 32") && page.contains("baton_ttft_seconds_count 1"), "{page}");
    engine.kill();
    front.gateway.replica_down(baton_units::ReplicaId(0));
    assert_eq!((front.get("/ready").await.0.as_u16(), front.get("/live").await.0.as_u16()), (503, 200));
    let response = front.post("/v1/chat/completions", ASK).await;
    assert_eq!((response.status().as_u16(), response.headers().contains_key("retry-after")), (503, true));
}

#[tokio::test]
async fn a_shutdown_lets_running_streams_finish_and_takes_no_new_ones() {
    let mut engine = FakeEngine::start().await;
    let mut front = Front::over(&[&engine]).await;
    let response = front.chat(ASK);
    let sender = engine.call().await.stream();
    let sent = events(&recorded(CHAT).1);
    sender.send(sent[1].clone()).await;
    let mut reader = EventReader::new(response.await.unwrap());
    reader.next().await.unwrap();
    front.shut_down();
    while front.get("/ready").await.0 != 503 {}
    assert_eq!(front.get("/live").await.0, 200);
    assert_eq!(front.post("/v1/chat/completions", ASK).await.status(), 503);
    for event in &sent[2..] {
        sender.send(event.clone()).await;
    }
    drop(sender);
    let mut last = None;
    while let Some(event) = reader.next().await {
        last = Some(event);
    }
    assert_eq!(last.as_deref(), Some(b"data: [DONE]\n\n".as_slice()));
    front.served.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_stream_past_the_drain_deadline_ends_with_an_error() {
    let mut engine = FakeEngine::start().await;
    let mut config = config(&[&engine]);
    config.gateway.drain_timeout = Duration::ZERO;
    let mut front = Front::with(config).await;
    let response = front.chat(ASK);
    let sender = engine.call().await.stream();
    sender.send(events(&recorded(CHAT).1)[1].clone()).await;
    let mut reader = EventReader::new(response.await.unwrap());
    reader.next().await.unwrap();
    front.shut_down();
    let error = reader.next().await.unwrap();
    assert!(String::from_utf8_lossy(&error).contains("shutting down"), "{error:?}");
    assert_eq!(reader.next().await, None);
    sender.closed().await;
    front.served.await.unwrap().unwrap();
}

#[tokio::test]
async fn decisions_are_on_record_by_the_clients_id() {
    let mut engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let response = front.spawn_post("/v1/chat/completions", ASK, &[("x-request-id", "mine/1"), ("x-program-id", "p")]);
    let call = engine.call().await;
    let (_, requests) = front.get("/baton/v1/requests").await;
    let request = &requests["requests"][0];
    assert_eq!((&request["x_request_id"], &request["replica"], &request["state"]), (&json!("mine/1"), &json!("r0"), &json!("prefill")));
    call.play(&recorded(CHAT).1).await;
    read(response.await.unwrap()).await;
    let decision = loop {
        let (status, decision) = front.get("/baton/v1/decisions/mine%2F1").await;
        assert_eq!(status, 200);
        if decision["realised"]["outcome"] == "finished" {
            break decision;
        }
    };
    assert_eq!((&decision["x_request_id"], &decision["chosen"], &decision["policy"]), (&json!("mine/1"), &json!(0), &json!("price")));
    assert!(decision["realised"]["ttft_ms"].is_number() && decision["quotes"][0]["terms"]["prefill"].is_number(), "{decision}");
    assert_eq!(front.get("/baton/v1/decisions?limit=0").await.1, json!({ "decisions": [] }));
    assert_eq!(front.get("/baton/v1/decisions/unknown").await.0, 404);
}

#[tokio::test]
async fn an_admin_api_with_an_address_of_its_own_is_nowhere_else() {
    let engine = FakeEngine::start().await;
    let mut config = config(&[&engine]);
    let free = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    config.gateway.admin_bind = Some(free);
    let mut front = Front::with(config).await;
    assert_eq!(front.get("/baton/v1/fleet").await.0, 404);
    assert_eq!(front.get("/v1/models").await.0, 200);
    front.address = free.to_string();
    let (status, fleet) = front.get("/baton/v1/fleet").await;
    assert_eq!((status.as_u16(), &fleet["replicas"][0]["id"]), (200, &json!("r0")));
    assert_eq!(front.get("/v1/models").await.0, 404, "no clients there");
}

#[tokio::test]
async fn operators_are_told_what_cannot_be_moved_or_drained() {
    let mut engines = [FakeEngine::start().await, FakeEngine::start().await];
    let front = {
        let [first, second] = &engines;
        Front::over(&[first, second]).await
    };
    let post = async |path: &str, body: &str| {
        let response = front.post(path, body).await;
        let status = response.status().as_u16();
        let body: Value = serde_json::from_slice(&read(response).await).unwrap();
        (status, body)
    };
    let response = front.spawn_post("/v1/chat/completions", ASK, &[("x-request-id", "mine")]);
    let (at, call) = {
        let [first, second] = &mut engines;
        tokio::select! { call = first.call() => (0, call), call = second.call() => (1, call) }
    };
    let (here, there) = (format!("r{at}"), format!("r{}", 1 - at));
    assert_eq!(post("/baton/v1/requests/other/migrate", &format!(r#"{{"to":"{there}"}}"#)).await.0, 404);
    assert_eq!(post("/baton/v1/requests/mine/migrate", r#"{"to":"r9"}"#).await.0, 404);
    assert_eq!(post("/baton/v1/requests/mine/migrate", "{}").await.0, 400);
    let (status, refused) = post("/baton/v1/requests/mine/migrate", &format!(r#"{{"to":"{there}"}}"#)).await;
    assert!(status == 409 && refused["error"]["message"].as_str().unwrap().contains("plain HTTP"), "{refused}");
    // A replica whose requests cannot move is empty when they have ended; until then nothing new goes there.
    let (status, drains) = post(&format!("/baton/v1/replicas/{here}/drain"), "").await;
    assert_eq!((status, &drains["in_flight"], &drains["drain"]["emptied_ms"]), (200, &json!(1), &Value::Null));
    assert_eq!(post(&format!("/baton/v1/replicas/{there}/drain"), "").await.0, 409, "it is the last one");
    for _ in 0..4 {
        let other = front.chat(ASK);
        engines[1 - at].call().await.play(&recorded(CHAT).1).await;
        read(other.await.unwrap()).await;
    }
    call.play(&recorded(CHAT).1).await;
    read(response.await.unwrap()).await;
    loop {
        let (_, fleet) = front.get("/baton/v1/fleet").await;
        let drain = &fleet["replicas"][at]["drain"];
        if drain["emptied_ms"].is_number() {
            break;
        }
        tokio::task::yield_now().await;
    }
    let (status, back) = post(&format!("/baton/v1/replicas/{here}/undrain"), "").await;
    assert_eq!((status, &back["drain"]), (200, &Value::Null));
    assert_eq!(post("/baton/v1/replicas/r9/undrain", "").await.0, 404);
    assert_eq!(front.get("/baton/v1/moves?limit=5").await.1, json!({ "moves": [] }));
}

#[tokio::test]
async fn the_fleet_and_the_policy_are_seen_and_changed() {
    let mut engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let (_, fleet) = front.get("/baton/v1/fleet").await;
    let replica = &fleet["replicas"][0];
    assert_eq!((&replica["id"], &replica["state"], &replica["engine"]), (&json!("r0"), &json!("ready"), &json!("vllm")));
    assert_eq!((&replica["kv_blocks_total"], &replica["kv_blocks_free"], &replica["queue_ms"]), (&json!(128), &json!(128), &json!(0.0)));
    let put = |name: &str| json!({ "name": name }).to_string();
    let response = front.send(Method::PUT, "/baton/v1/policy", &[], &put("round-robin")).await;
    assert_eq!(read_json(response).await["name"], "round-robin");
    assert_eq!(front.get("/baton/v1/policy").await.1["name"], "round-robin");
    assert_eq!(front.send(Method::PUT, "/baton/v1/policy", &[], &put("best")).await.status(), 400);
    let reset = front.spawn_post("/baton/v1/reset", "", &[]);
    let call = engine.call().await;
    assert_eq!(call.path, "/reset_prefix_cache");
    call.reply(200, b"{}");
    let reset = read_json(reset.await.unwrap()).await;
    assert_eq!(reset["engines"][0], json!({ "id": "r0", "reset": true, "error": null }));
    let (_, page) = front.get("/baton/v1/openapi.json").await;
    assert_eq!(page["openapi"], "3.1.0");
}

#[tokio::test]
async fn an_admin_key_is_asked_for() {
    let engine = FakeEngine::start().await;
    let mut config = config(&[&engine]);
    config.gateway.admin_key = Some(baton_gateway::Secret::new("word"));
    let front = Front::with(config).await;
    assert_eq!(front.get("/baton/v1/fleet").await.0, 401);
    let response = front.send(Method::GET, "/baton/v1/fleet", &[("authorization", "Bearer word")], "").await;
    assert_eq!(response.status(), 200);
    assert_eq!(front.get("/ready").await.0, 200);
}

#[tokio::test]
async fn no_engine_means_no_service_and_says_so() {
    let front = Front::with(baton_gateway::GatewayConfig::default()).await;
    assert_eq!(front.get("/ready").await.0, 503);
    let response = front.post("/v1/chat/completions", ASK).await;
    assert_eq!(response.status(), 503);
    let error: Value = read_json(response).await;
    assert_eq!(error["error"]["type"], "ServiceUnavailableError");
}

/// How many requests are held, and how many are known.
async fn held(front: &Front) -> (usize, usize) {
    let (_, requests) = front.get("/baton/v1/requests").await;
    let requests = requests["requests"].as_array().unwrap().clone();
    (requests.iter().filter(|request| request["state"] == "held").count(), requests.len())
}

#[tokio::test]
async fn requests_beyond_what_replicas_can_start_wait_here_and_go_when_there_is_room() {
    let mut engine = FakeEngine::start().await;
    let mut config = config(&[&engine]);
    config.policy.queue = 3;
    let front = Front::with(config).await;
    let ask = |seed: u32| {
        let prompt: Vec<u32> = (0..2000).map(|index| index * 7 + seed).collect();
        front.completion(&format!(r#"{{"model":"smollm2-135m","prompt":{prompt:?},"stream":true,"max_tokens":1}}"#))
    };
    // The engine says nothing, so its predicted queue grows until requests are held.
    let mut asked = Vec::new();
    let mut calls = Vec::new();
    loop {
        let known = asked.len();
        asked.push(ask(known as u32));
        while held(&front).await.1 <= known {}
        if held(&front).await.0 == 1 {
            break;
        }
        calls.push(engine.call().await);
        assert!(known < 1000, "nothing is ever held");
    }
    // One that wants its first token sooner does not wait.
    let hurried = front.spawn_post("/v1/completions", r#"{"model":"smollm2-135m","prompt":"x"}"#, &[("x-slo-ttft-ms", "1")]).await.unwrap();
    assert_eq!((hurried.status().as_u16(), hurried.headers().contains_key("retry-after")), (429, true));
    for _ in 0..2 {
        asked.push(ask(asked.len() as u32));
    }
    while held(&front).await.0 < 3 {}
    // The queue is full: the next one is turned away at once.
    let refused = ask(9999).await.unwrap();
    assert_eq!((refused.status().as_u16(), refused.headers().contains_key("retry-after")), (429, true));
    // One that waits may leave.
    asked.pop().unwrap().abort();
    while held(&front).await.0 > 2 {}
    // The others go as the engine gets on with its work.
    let body = recorded(include_str!("../fixtures/completion-stream.resp")).1;
    for call in calls {
        call.play(&body).await;
    }
    for _ in 0..2 {
        engine.call().await.play(&body).await;
    }
    for response in asked {
        assert!(String::from_utf8(read(response.await.unwrap()).await).unwrap().ends_with("data: [DONE]\n\n"));
    }
    while held(&front).await.1 > 0 {}
    assert_eq!(front.get("/baton/v1/fleet").await.1["replicas"][0]["in_flight"], 0);
}
