//! Adapters that engines load and unload while they run.

use serde_json::{Value, json};

use crate::support::{Call, FakeEngine, Front, events, read, read_json, recorded};

const CHAT: &str = include_str!("../fixtures/chat-stream.resp");
const ASK: &str = r#"{"model":"tales","messages":[{"role":"user","content":"hi"}],"stream":true}"#;

/// As vLLM lists what it serves.
fn serves(engine: &FakeEngine, adapter: bool) {
    let base = json!({ "id": "smollm2-135m", "object": "model", "root": "model", "parent": null, "max_model_len": 2048 });
    let tales = json!({ "id": "tales", "object": "model", "root": "/adapters/tales", "parent": "smollm2-135m", "max_model_len": null });
    let data = if adapter { vec![base, tales] } else { vec![base] };
    *engine.models.lock().unwrap() = json!({ "object": "list", "data": data }).to_string();
}

/// Waits until the gateway sees who serves the adapter.
async fn until_seen(front: &Front, by: [bool; 2]) {
    loop {
        let (_, fleet) = front.get("/baton/v1/fleet").await;
        let has = |place: usize| fleet["replicas"][place]["models"].as_array().unwrap().contains(&Value::from("tales"));
        if [has(0), has(1)] == by {
            return;
        }
    }
}

async fn answered_by(front: &Front, engine: &mut FakeEngine) {
    let response = front.chat(ASK);
    let call = engine.call().await;
    assert_eq!(call.body["model"], "tales");
    call.play(&recorded(CHAT).1).await;
    let body = read(response.await.unwrap()).await;
    assert!(!events(&body).is_empty() && body.ends_with(b"data: [DONE]\n\n"));
}

fn lacks(call: Call) {
    call.reply(404, br#"{"error":{"message":"The model `tales` does not exist.","type":"NotFoundError","param":"model","code":404}}"#);
}

#[tokio::test]
async fn an_adapter_is_found_when_it_is_asked_for_and_served_by_who_has_it() {
    let (a, mut b) = (FakeEngine::start().await, FakeEngine::start().await);
    serves(&a, false);
    serves(&b, false);
    let front = Front::over(&[&a, &b]).await;
    assert_eq!(front.post("/v1/chat/completions", ASK).await.status(), 404);
    until_seen(&front, [false, false]).await;
    serves(&b, true);
    // Its clients' asking makes it known; this one's prompt is too long for any engine.
    let long = json!({ "model": "tales", "prompt": vec![5; 3000] }).to_string();
    while front.post("/v1/completions", &long).await.status() != 400 {}
    for _ in 0..6 {
        answered_by(&front, &mut b).await;
    }
}

#[tokio::test]
async fn an_adapter_that_one_engine_unloads_is_served_by_the_other() {
    let (mut a, mut b) = (FakeEngine::start().await, FakeEngine::start().await);
    serves(&a, true);
    serves(&b, true);
    let front = Front::over(&[&a, &b]).await;
    until_seen(&front, [true, true]).await;
    serves(&a, false);
    // Until the gateway knows, a request may come to who lacks it.
    let response = front.chat(ASK);
    tokio::select! {
        call = a.call() => {
            lacks(call);
            b.call().await.play(&recorded(CHAT).1).await;
            until_seen(&front, [false, true]).await;
        }
        call = b.call() => call.play(&recorded(CHAT).1).await,
    }
    assert!(read(response.await.unwrap()).await.ends_with(b"data: [DONE]\n\n"));
    assert_eq!(front.get("/baton/v1/fleet").await.1["replicas"][0]["state"], "ready", "it is well, and lacks a model");
}

#[tokio::test]
async fn an_adapter_that_is_gone_everywhere_is_told_so_by_the_engine_and_then_here() {
    let mut engine = FakeEngine::start().await;
    serves(&engine, true);
    let front = Front::over(&[&engine]).await;
    serves(&engine, false);
    let response = front.chat(ASK);
    lacks(engine.call().await);
    let response = response.await.unwrap();
    assert_eq!(response.status(), 404);
    assert_eq!(read_json(response).await["error"]["message"], "The model `tales` does not exist.");
    while front.get("/v1/models/tales").await.0 != 404 {}
    assert_eq!(front.post("/v1/chat/completions", ASK).await.status(), 404);
}
