//! Engines with several ranks behind one address, each with a cache and a load of its own.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::support::{FakeEngine, Front, METRICS, config, events, read, recorded};

const CHAT: &str = include_str!("../fixtures/chat-stream.resp");
const ASK: &str = r#"{"model":"smollm2-135m","messages":[{"role":"user","content":"hi"}],"stream":true}"#;
const RANK: &str = "x-data-parallel-rank";

/// As vLLM tells it of two ranks, the second one with five running requests.
fn two_ranks() -> String {
    let second: String = METRICS.lines().filter(|line| line.contains(r#"engine="0""#)).fold(String::new(), |page, line| {
        let line = line.replace(r#"engine="0""#, r#"engine="1""#);
        let line = if line.starts_with("vllm:num_requests_running{") { line.replace(" 0.0", " 5.0") } else { line };
        page + &line + "\n"
    });
    METRICS.to_owned() + &second
}

async fn fleet(front: &Front) -> Vec<Value> {
    front.get("/baton/v1/fleet").await.1["replicas"].as_array().unwrap().clone()
}

#[tokio::test]
async fn each_rank_is_a_replica_and_its_requests_are_pinned_to_it() {
    let mut engine = FakeEngine::start().await;
    *engine.metrics.lock().unwrap() = two_ranks();
    let mut config = config(&[&engine]);
    config.engines[0].name = Some("a".to_owned());
    config.engines[0].data_parallel_size = Some(2);
    config.policy.name = "round-robin".parse().unwrap();
    let front = Front::with_ready(config, 2).await;
    let replicas = fleet(&front).await;
    let told = |option: &str| replicas.iter().map(|replica| replica[option].clone()).collect::<Vec<_>>();
    assert_eq!(told("id"), ["a-dp0", "a-dp1"]);
    assert_eq!(told("data_parallel_rank"), [0, 1]);
    assert_eq!(told("url")[0], told("url")[1]);
    let running: Vec<&Value> = replicas.iter().map(|replica| &replica["report"]["running"]).collect();
    assert_eq!(running, [0, 5], "each rank has a load of its own");

    let mut asked: BTreeMap<String, u32> = BTreeMap::new();
    for _ in 0..4 {
        // The client's own word on it counts for nothing.
        let response = front.spawn_post("/v1/chat/completions", ASK, &[(RANK, "7")]);
        let call = engine.call().await;
        let ranks: Vec<_> = call.headers.get_all(RANK).iter().collect();
        assert_eq!(ranks.len(), 1);
        *asked.entry(ranks[0].to_str().unwrap().to_owned()).or_default() += 1;
        call.play(&recorded(CHAT).1).await;
        assert!(!events(&read(response.await.unwrap()).await).is_empty());
    }
    assert_eq!(asked, BTreeMap::from([("0".to_owned(), 2), ("1".to_owned(), 2)]));
}

#[tokio::test]
async fn an_engine_without_ranks_gets_no_header() {
    let mut engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let response = front.spawn_post("/v1/chat/completions", ASK, &[(RANK, "1")]);
    let call = engine.call().await;
    assert!(!call.headers.contains_key(RANK));
    call.play(&recorded(CHAT).1).await;
    read(response.await.unwrap()).await;
}
