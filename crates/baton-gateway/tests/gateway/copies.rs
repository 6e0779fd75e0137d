//! Copies of a shared prefix: bought by the router, carried out by the gateway, seen by no client.

use baton_cost::StepCoefficients;
use baton_gateway::GatewayConfig;
use baton_wire::replica::Report;
use http::Response;
use hyper::body::Incoming;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::support::{Call, FakeEngine, Front, read, recorded};

const ANSWER: &str = include_str!("../fixtures/completion-stream.resp");
/// What the engine says to a copy; nobody may ever read it.
const COPY_ANSWER: &str =
    r#"{"id":"cmpl-copy","object":"text_completion","choices":[{"index":0,"text":"COPIED","finish_reason":"length"}]}"#;
const BLOCK: usize = 16;
const SHARED: u32 = 4096;
const OWN: u32 = 320;
/// Requests that arrive in a burst; a copy is bought before the last.
const REQUESTS_MAX: u32 = 30;

/// A replica that takes 10 µs for each token of a prompt and nothing else: 3 ms for a request's own part, 41 ms for what is shared.
/// The fleet is far from busy even when a test's requests come at once; and since no engine answers, they queue however slowly they come.
pub(crate) fn report(id: usize) -> Report {
    let step = StepCoefficients { fixed_s: 0.0, per_token_s: 1e-5, per_attended_s: 0.0, per_kv_token_s: 0.0, weights_s: 0.0 };
    Report {
        id: format!("replica-{id}"),
        incarnation: 1,
        engine: "timed".into(),
        model: "smollm2-135m".into(),
        numerics_id: "none".into(),
        block_size: BLOCK as u32,
        kv_blocks_total: 20_000,
        kv_blocks_free: 20_000,
        waiting: 0,
        running: 0,
        prefill_backlog_tokens: 0,
        max_model_len: 20_000,
        max_running: 256,
        token_budget: 2048,
        time_scale: 1.0,
        step,
        step_prior: step,
        step_error: 0.0,
        steps: 1,
        kv_events: None,
        migration: None,
    }
}

/// A fleet of three that has just been asked for a copy, and what is under way there.
struct Scene {
    front: Front,
    engines: Vec<FakeEngine>,
    /// Requests of clients that their engines have not answered, with their engine's place.
    calls: Vec<(usize, Call)>,
    responses: Vec<JoinHandle<Response<Incoming>>>,
    /// The copy and its engine's place.
    copy: Option<(usize, Call)>,
    /// Where the prefix was first.
    holder: usize,
}

fn ask(front: &Front, own: u32) -> JoinHandle<Response<Incoming>> {
    let prompt: Vec<u32> = (0..SHARED).chain((0..OWN).map(|place| 10_000 + own * 1000 + place)).collect();
    front.completion(&json!({ "model": "smollm2-135m", "prompt": prompt, "stream": true, "cache_salt": "mine" }).to_string())
}

fn is_copy(call: &Call) -> bool {
    call.body["max_tokens"] == 1
}

async fn next_call(engines: &mut [FakeEngine]) -> (usize, Call) {
    let [a, b, c] = engines else { panic!("three engines") };
    tokio::select! {
        call = a.call() => (0, call),
        call = b.call() => (1, call),
        call = c.call() => (2, call),
    }
}

async fn in_flight(front: &Front) -> Vec<u64> {
    let (_, fleet) = front.get("/baton/v1/fleet").await;
    fleet["replicas"].as_array().unwrap().iter().map(|replica| replica["in_flight"].as_u64().unwrap()).collect()
}

async fn answer(call: Call) {
    call.play(&recorded(ANSWER).1).await;
}

impl Scene {
    async fn set() -> Self {
        let mut engines = vec![FakeEngine::start().await, FakeEngine::start().await, FakeEngine::start().await];
        let configs = engines.iter().enumerate().map(|(place, engine)| engine.baton(&report(place))).collect();
        let front = Front::with(GatewayConfig { engines: configs, ..GatewayConfig::default() }).await;
        // Two requests, one after the other, make the prefix and show that it branches.
        let mut holder = 0;
        for own in 0..2 {
            let response = ask(&front, own);
            let (place, call) = next_call(&mut engines).await;
            holder = place;
            answer(call).await;
            read(response.await.unwrap()).await;
            while in_flight(&front).await.iter().sum::<u64>() > 0 {}
        }
        let mut scene = Self { front, engines, calls: Vec::new(), responses: Vec::new(), copy: None, holder };
        // Then they come faster than the holder takes them.
        while scene.copy.is_none() {
            let own = 2 + scene.responses.len() as u32;
            assert!(own < REQUESTS_MAX, "no copy was bought");
            scene.responses.push(ask(&scene.front, own));
            scene.take_call().await;
            // A copy goes out beside its request, in either order.
            if in_flight(&scene.front).await.iter().sum::<u64>() > scene.calls.len() as u64 {
                scene.take_call().await;
            }
        }
        while scene.calls.len() < scene.responses.len() {
            scene.take_call().await;
        }
        scene
    }

    async fn take_call(&mut self) {
        let (place, call) = next_call(&mut self.engines).await;
        if is_copy(&call) { self.copy = Some((place, call)) } else { self.calls.push((place, call)) }
    }

    /// Answers all requests of clients; every one gets its own answer and nothing of a copy.
    async fn finish(self) -> Front {
        for (_, call) in self.calls {
            answer(call).await;
        }
        for response in self.responses {
            let response = response.await.unwrap();
            assert_eq!(response.status(), 200);
            let body = String::from_utf8(read(response).await).unwrap();
            assert!(body.ends_with("data: [DONE]\n\n") && !body.contains("COPIED"), "{body}");
        }
        while in_flight(&self.front).await != [0, 0, 0] {}
        self.front
    }
}

#[tokio::test]
async fn a_copy_is_one_token_on_another_replica_that_no_client_sees() {
    let mut scene = Scene::set().await;
    let (place, copy) = scene.copy.take().unwrap();
    assert_ne!(place, scene.holder);
    assert_eq!(copy.path, "/v1/completions");
    let prefix: Vec<u32> = (0..SHARED).collect();
    assert_eq!((&copy.body["prompt"], &copy.body["max_tokens"], &copy.body["stream"]), (&json!(prefix), &json!(1), &Value::Null));
    // Blocks are the client's only under its own salt.
    assert_eq!(copy.body["cache_salt"], scene.calls[0].1.body["cache_salt"]);
    let id = copy.headers["x-request-id"].clone();
    assert!(scene.calls.iter().all(|(_, call)| call.headers["x-request-id"] != id));
    // It is booked like any other request, and listed among clients' requests nowhere.
    let booked = in_flight(&scene.front).await;
    assert_eq!(booked.iter().sum::<u64>(), scene.calls.len() as u64 + 1);
    let (_, requests) = scene.front.get("/baton/v1/requests").await;
    assert_eq!(requests["requests"].as_array().unwrap().len(), scene.calls.len());
    copy.reply(200, COPY_ANSWER.as_bytes());
    while in_flight(&scene.front).await[place] == booked[place] {}
    assert_eq!(in_flight(&scene.front).await.iter().sum::<u64>(), scene.calls.len() as u64);
    scene.finish().await;
}

#[tokio::test]
async fn a_copy_that_its_engine_refuses_or_drops_is_let_go() {
    for refused in [true, false] {
        let mut scene = Scene::set().await;
        let (_, copy) = scene.copy.take().unwrap();
        if refused {
            copy.reply(400, b"{}");
        } else {
            copy.hang_up();
        }
        while in_flight(&scene.front).await.iter().sum::<u64>() > scene.calls.len() as u64 {}
        let front = scene.finish().await;
        assert_eq!(front.gateway.ready_replicas(), 3, "no replica is blamed for it");
    }
}

#[tokio::test]
async fn a_copy_dies_with_its_replica_and_clients_do_not_notice() {
    let mut scene = Scene::set().await;
    let (place, copy) = scene.copy.take().unwrap();
    let dead = scene.engines.remove(place);
    scene.front.gateway.replica_down(baton_units::ReplicaId(place as u32));
    dead.kill();
    drop(copy);
    // What it had of clients' requests goes to the others.
    let (lost, kept): (Vec<_>, Vec<_>) = std::mem::take(&mut scene.calls).into_iter().partition(|(at, _)| *at == place);
    scene.calls = kept;
    drop(lost);
    scene.engines.insert(place, FakeEngine::start().await);
    while scene.calls.len() < scene.responses.len() {
        let (at, call) = next_call(&mut scene.engines).await;
        if is_copy(&call) { call.hang_up() } else { scene.calls.push((at, call)) }
    }
    scene.finish().await;
}

#[tokio::test]
async fn a_copy_keeps_no_gateway_from_its_end() {
    let mut scene = Scene::set().await;
    let (_, copy) = scene.copy.take().unwrap();
    scene.front.shut_down();
    for (_, call) in scene.calls {
        answer(call).await;
    }
    for response in scene.responses {
        read(response.await.unwrap()).await;
    }
    // With no client left the gateway ends at once, and gives the copy up.
    scene.front.served.await.unwrap().unwrap();
    copy.given_up().await;
}

#[tokio::test]
async fn engines_that_take_no_token_ids_get_no_copy() {
    // As in `Scene::set`, but the gateway cannot say what the prompts' tokens are, so a copy that is bought comes to nothing.
    let mut engines = vec![FakeEngine::start().await, FakeEngine::start().await, FakeEngine::start().await];
    let configs = engines.iter().enumerate().map(|(place, engine)| engine.baton(&report(place))).collect();
    let front = Front::with(GatewayConfig { engines: configs, ..GatewayConfig::default() }).await;
    let shared = "abcd".repeat(SHARED as usize);
    let mut calls = Vec::new();
    let mut responses = Vec::new();
    for own in 0..40 {
        let prompt = format!("{shared}{}", format!("{own:04}").repeat(OWN as usize));
        let response = front.completion(&json!({ "model": "smollm2-135m", "prompt": prompt, "stream": true }).to_string());
        let (_, call) = next_call(&mut engines).await;
        assert!(!is_copy(&call));
        if own < 2 {
            answer(call).await;
            read(response.await.unwrap()).await;
            while in_flight(&front).await.iter().sum::<u64>() > 0 {}
        } else {
            calls.push(call);
            responses.push(response);
        }
    }
    assert_eq!(in_flight(&front).await.iter().sum::<u64>(), calls.len() as u64, "no copy stays booked");
}
