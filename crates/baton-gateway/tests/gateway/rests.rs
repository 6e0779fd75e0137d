//! Engines that ask not to be asked for a while.

use crate::support::{FakeEngine, Front, events, read, read_json, recorded};

const CHAT: &str = include_str!("../fixtures/chat-stream.resp");
const ASK: &str = r#"{"model":"smollm2-135m","messages":[{"role":"user","content":"hi"}],"stream":true}"#;

async fn served_by(front: &Front, engine: &mut FakeEngine) {
    let response = front.chat(ASK);
    engine.call().await.play(&recorded(CHAT).1).await;
    assert!(!events(&read(response.await.unwrap()).await).is_empty());
}

#[tokio::test]
async fn one_that_asks_for_rest_gets_nothing_while_another_serves() {
    let (mut a, mut b) = (FakeEngine::start().await, FakeEngine::start().await);
    let front = Front::over(&[&a, &b]).await;
    let response = front.chat(ASK);
    let (first, resting, other) = tokio::select! {
        call = a.call() => (call, 0, &mut b),
        call = b.call() => (call, 1, &mut a),
    };
    first.ask_for_rest(429, 3600);
    other.call().await.play(&recorded(CHAT).1).await;
    assert!(!events(&read(response.await.unwrap()).await).is_empty(), "its client knows nothing of it");
    for _ in 0..6 {
        served_by(&front, other).await;
    }
    let fleet = front.get("/baton/v1/fleet").await.1;
    let replica = &fleet["replicas"][resting];
    assert_eq!(replica["state"], "suspect");
    let rests = replica["rests_ms"].as_f64().unwrap();
    assert!(rests > 200_000.0 && rests <= 300_000.0, "an hour is not believed: {rests}");
}

#[tokio::test]
async fn where_all_rest_clients_are_told_for_how_long() {
    let mut engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let response = front.chat(ASK);
    engine.call().await.ask_for_rest(429, 20);
    let response = response.await.unwrap();
    assert_eq!((response.status().as_u16(), response.headers()["retry-after"].to_str().unwrap()), (429, "20"), "in the engine's words");
    assert_eq!(read_json(response).await["error"]["message"], "slow down");
    let response = front.chat(ASK).await.unwrap();
    assert_eq!(response.status(), 503);
    let seconds: u64 = response.headers()["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((2..=20).contains(&seconds), "{seconds}");
}

#[tokio::test]
async fn a_busy_engine_that_names_no_time_is_asked_again() {
    let mut engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let response = front.chat(ASK);
    engine.call().await.reply(429, b"{}");
    assert_eq!(response.await.unwrap().status(), 429);
    served_by(&front, &mut engine).await;
}
