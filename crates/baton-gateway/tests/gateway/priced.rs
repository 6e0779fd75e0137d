//! Requests of APIs that the gateway does not speak, which engines compute prompts for.

use serde_json::json;

use crate::support::{Call, EventReader, FakeEngine, Front, read, read_json};

/// Which of the two has the next call.
async fn next(a: &mut FakeEngine, b: &mut FakeEngine) -> (usize, Call) {
    tokio::select! {
        call = a.call() => (0, call),
        call = b.call() => (1, call),
    }
}

async fn in_flight(front: &Front) -> u64 {
    let fleet = front.get("/baton/v1/fleet").await.1;
    fleet["replicas"].as_array().unwrap().iter().map(|replica| replica["in_flight"].as_u64().unwrap()).sum()
}

#[tokio::test]
async fn a_message_is_placed_booked_and_passed_on_as_it_is() {
    let (mut a, mut b) = (FakeEngine::start().await, FakeEngine::start().await);
    let front = Front::over(&[&a, &b]).await;
    let body = json!({ "model": "smollm2-135m", "system": "be brief", "messages": [{ "role": "user", "content": "hi" }], "max_tokens": 8, "stream": true });
    let response = front.spawn_post("/v1/messages", &body.to_string(), &[]);
    let (_, call) = next(&mut a, &mut b).await;
    assert_eq!((call.path.as_str(), &call.body), ("/v1/messages", &body));
    let sender = call.stream();
    let delta = "event: content_block_delta\ndata: {\"type\":\"content_block_delta\"}\n\n";
    sender.send(delta).await;
    let mut reader = EventReader::new(response.await.unwrap());
    assert_eq!(reader.next().await.unwrap(), delta);
    assert_eq!(in_flight(&front).await, 1);
    assert_eq!(front.get("/baton/v1/decisions").await.1["decisions"].as_array().map(Vec::len), Some(1));
    drop(sender);
    assert_eq!(reader.next().await, None);
    drop(reader);
    while in_flight(&front).await > 0 {}
}

#[tokio::test]
async fn a_client_that_leaves_is_not_booked_any_more() {
    let mut engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let response = front.spawn_post("/v1/messages", r#"{"model":"smollm2-135m","messages":[],"stream":true}"#, &[]);
    let sender = engine.call().await.stream();
    sender.send("event: message_start\ndata: {}\n\n").await;
    drop(response.await.unwrap());
    sender.closed().await;
    while in_flight(&front).await > 0 {}
}

#[tokio::test]
async fn a_response_goes_where_the_one_lives_that_it_continues() {
    let (mut a, mut b) = (FakeEngine::start().await, FakeEngine::start().await);
    let front = Front::over(&[&a, &b]).await;
    let mut homes = Vec::new();
    for id in ["resp_1", "resp_2"] {
        let response = front.spawn_post("/v1/responses", r#"{"model":"smollm2-135m","input":"hi"}"#, &[]);
        let (place, call) = next(&mut a, &mut b).await;
        call.reply(200, json!({ "id": id, "object": "response" }).to_string().as_bytes());
        assert_eq!(read_json(response.await.unwrap()).await["id"], id);
        while in_flight(&front).await > 0 {}
        let last = front.get("/baton/v1/decisions?limit=1").await.1["decisions"][0].clone();
        assert_eq!(last["realised"]["outcome"], "finished");
        homes.push((id, place));
    }
    for (id, home) in homes {
        for _ in 0..3 {
            let body = json!({ "model": "smollm2-135m", "input": "and then?", "previous_response_id": id });
            let response = front.spawn_post("/v1/responses", &body.to_string(), &[]);
            let (place, call) = next(&mut a, &mut b).await;
            assert_eq!(place, home);
            call.reply(200, b"{}");
            read(response.await.unwrap()).await;
            let response = front.spawn_post(&format!("/v1/responses/{id}/cancel"), "", &[]);
            let (place, call) = next(&mut a, &mut b).await;
            assert_eq!(place, home);
            call.reply(200, b"{}");
            read(response.await.unwrap()).await;
        }
    }
}
