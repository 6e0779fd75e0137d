//! Another configuration while the gateway serves.

use baton_gateway::{ClassConfig, GatewayConfig, Reloaded};
use baton_policy::PolicyName;
use std::time::Duration;

use super::support::{EventReader, FakeEngine, Front, config, read, recorded};

const CHAT: &str = include_str!("../fixtures/chat-stream.resp");
const ASK: &str = r#"{"model":"smollm2-135m","messages":[{"role":"user","content":"hi"}],"stream":true}"#;

fn reloaded(engines_started: usize, engines_gone: usize) -> Reloaded {
    Reloaded { engines_started, engines_gone, at_next_start: Vec::new() }
}

/// The engine in the middle goes, another one comes, and the last keeps its stream, its id and its state.
#[tokio::test]
async fn engines_come_and_go_beside_a_running_stream() {
    let (mut first, gone, mut last) = (FakeEngine::start().await, FakeEngine::start().await, FakeEngine::start().await);
    let front = Front::over(&[&first, &gone, &last]).await;
    front.gateway.reload(&config(&[&last])).unwrap();
    let response = front.chat(ASK);
    let sender = last.call().await.stream();
    let (_, recorded_body) = recorded(CHAT);
    let middle = recorded_body.len() / 2;
    sender.send(recorded_body[..middle].to_vec()).await;
    let mut reader = EventReader::new(response.await.unwrap());
    assert!(reader.next().await.is_some(), "it runs");

    assert_eq!(front.gateway.reload(&config(&[&first, &last])).unwrap(), reloaded(1, 0));
    front.gateway.until_ready(2).await;
    assert_eq!(front.gateway.reload(&config(&[&first])).unwrap(), reloaded(0, 1), "its engine is left out");
    let other = front.chat(ASK);
    first.call().await.play(&recorded_body).await;
    read(other.await.unwrap()).await;
    sender.send(recorded_body[middle..].to_vec()).await;
    drop(sender);
    let mut latest = Vec::new();
    while let Some(event) = reader.next().await {
        latest = event.to_vec();
    }
    assert_eq!(latest, b"data: [DONE]\n\n", "and its stream ends as it would have");
}

#[tokio::test]
async fn an_engine_that_is_as_before_keeps_its_id_wherever_it_stands_in_the_file() {
    let (a, b, c) = (FakeEngine::start().await, FakeEngine::start().await, FakeEngine::start().await);
    let front = Front::over(&[&a, &b]).await;
    let place = async |engine: &FakeEngine| {
        let (_, fleet) = front.get("/baton/v1/fleet").await;
        let replicas = fleet["replicas"].as_array().unwrap().clone();
        let replica = replicas.into_iter().find(|replica| replica["url"] == engine.url.to_string()).unwrap();
        (replica["index"].as_u64().unwrap(), replica["state"].as_str().unwrap().to_owned())
    };
    assert_eq!(front.gateway.reload(&config(&[&c, &b, &a])).unwrap(), reloaded(1, 0));
    assert_eq!(place(&a).await, (0, "ready".to_owned()));
    assert_eq!(place(&b).await, (1, "ready".to_owned()));
    assert_eq!(place(&c).await.0, 2);
    let mut changed = config(&[&c, &b, &a]);
    changed.engines[1].kv_blocks = Some(77);
    assert_eq!(front.gateway.reload(&changed).unwrap(), reloaded(1, 0), "the one that is configured otherwise");
    front.gateway.until_ready(3).await;
}

#[tokio::test]
async fn what_can_change_is_in_force_at_once_and_the_rest_is_named() {
    let engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let mut new = config(&[&engine]);
    new.policy.name = PolicyName::RoundRobin;
    new.gateway.body_limit = 10;
    let class = |name: &str, from| ClassConfig { name: name.to_owned(), from, start_within: Duration::from_secs(1), slo_ttft: None };
    new.policy.classes = vec![class("first", i32::MIN), class("rest", 5)];
    (new.gateway.text_cache_bytes, new.policy.seed) = (1 << 20, 9);
    let reloaded = front.gateway.reload(&new).unwrap();
    assert_eq!(reloaded.at_next_start, ["gateway.text_cache_bytes", "policy.seed"]);
    assert_eq!(front.get("/baton/v1/policy").await.1["name"], "round-robin");
    assert_eq!(front.post("/v1/chat/completions", ASK).await.status(), 413);
    let metrics = String::from_utf8(read(front.send(http::Method::GET, "/metrics", &[], "").await).await).unwrap();
    assert!(metrics.contains("class=\"rest\""), "{metrics}");
}

#[tokio::test]
async fn a_configuration_that_cannot_work_changes_nothing() {
    let engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let mut wrong = GatewayConfig { engines: Vec::new(), ..GatewayConfig::default() };
    wrong.gateway.attempts = 0;
    assert!(front.gateway.reload(&wrong).unwrap_err().to_string().contains("gateway.attempts"));
    assert_eq!(front.gateway.ready_replicas(), 1);
}
