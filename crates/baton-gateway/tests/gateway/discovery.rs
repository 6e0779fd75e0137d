//! Engines that a source names while the gateway serves.

use std::{
    collections::HashMap,
    convert::Infallible,
    path::PathBuf,
    sync::{Arc, Mutex},
};

use axum::{
    Router,
    body::Body,
    extract::{Query, State},
    response::{IntoResponse, Response},
    routing::get,
};
use baton_gateway::GatewayConfig;
use bytes::Bytes;
use futures_util::stream;
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::mpsc};

use super::support::{EventReader, FakeEngine, Front, config, read, recorded};

const CHAT: &str = include_str!("../fixtures/chat-stream.resp");
const ASK: &str = r#"{"model":"smollm2-135m","messages":[{"role":"user","content":"hi"}],"stream":true}"#;

/// What the admin API says of the fleet, once it is as wanted.
async fn fleet_once(front: &Front, is_wanted: impl Fn(&Value) -> bool) -> Value {
    loop {
        let (_, fleet) = front.get("/baton/v1/fleet").await;
        if is_wanted(&fleet) {
            return fleet;
        }
    }
}

fn replicas(fleet: &Value) -> Vec<Value> {
    fleet["replicas"].as_array().unwrap().clone()
}

fn at<'a>(replicas: &'a [Value], engine: &FakeEngine) -> Option<&'a Value> {
    replicas.iter().find(|replica| replica["url"] == engine.url.to_string())
}

fn ready_at(fleet: &Value, engine: &FakeEngine) -> bool {
    at(&replicas(fleet), engine).is_some_and(|replica| replica["state"] == "ready")
}

/// A file that lists engines; gone with the test.
struct ListFile {
    path: PathBuf,
}

impl ListFile {
    fn new(name: &str) -> Self {
        Self { path: std::env::temp_dir().join(format!("baton-engines-{name}-{}.toml", std::process::id())) }
    }

    fn write(&self, engines: &[&FakeEngine]) {
        let tables: Vec<String> = engines.iter().map(|engine| format!("{{ url = \"{}\" }}", engine.url)).collect();
        self.write_text(&format!("engines = [{}]\n", tables.join(", ")));
    }

    fn write_text(&self, text: &str) {
        let new = self.path.with_extension("new");
        std::fs::write(&new, text).unwrap();
        std::fs::rename(new, &self.path).unwrap();
    }

    fn label(&self) -> String {
        format!("file:{}", self.path.display())
    }

    /// Options that a test leaves out are the defaults.
    fn config(&self, options: &str) -> GatewayConfig {
        let path = self.path.display();
        let text =
            format!("[[discovery]]\ntype = \"file\"\npath = \"{path}\"\nevery = \"1ms\"\n{options}\n[discovery.engine]\nkind = \"vllm\"\n");
        GatewayConfig::from_toml(&text).unwrap()
    }
}

impl Drop for ListFile {
    fn drop(&mut self) {
        _ = std::fs::remove_file(&self.path);
    }
}

#[tokio::test]
async fn a_file_names_engines_and_a_broken_one_takes_none_away() {
    let (mut a, b) = (FakeEngine::start().await, FakeEngine::start().await);
    let list = ListFile::new("comes-and-goes");
    list.write(&[&a]);
    let front = Front::with(list.config("")).await;
    front.gateway.until_ready(1).await;
    list.write(&[&a, &b]);
    front.gateway.until_ready(2).await;
    let fleet = front.get("/baton/v1/fleet").await.1;
    let found = replicas(&fleet);
    let (index_a, index_b) = (at(&found, &a).unwrap()["index"].clone(), at(&found, &b).unwrap()["index"].clone());
    assert_eq!((&at(&found, &a).unwrap()["source"], &fleet["sources"][0]["engines"]), (&json!(list.label()), &json!(2)));
    assert_eq!(at(&found, &a).unwrap()["id"], a.url.to_string().trim_start_matches("http://"));

    list.write_text("engines = [");
    let fleet = fleet_once(&front, |fleet| !fleet["sources"][0]["failing"].is_null()).await;
    assert!(replicas(&fleet).len() == 2 && ready_at(&fleet, &a) && ready_at(&fleet, &b));
    let metrics = String::from_utf8(read(front.send(http::Method::GET, "/metrics", &[], "").await).await).unwrap();
    assert!(metrics.contains(&format!("baton_discovery_failing{{source=\"{}\"}} 1\n", list.label())), "{metrics}");

    let response = front.chat(ASK);
    let mut b = b;
    let (sender, is_a) = tokio::select! {
        call = a.call() => (call.stream(), true),
        call = b.call() => (call.stream(), false),
    };
    let (_, body) = recorded(CHAT);
    let middle = body.len() / 2;
    sender.send(body[..middle].to_vec()).await;
    let mut reader = EventReader::new(response.await.unwrap());
    assert!(reader.next().await.is_some(), "it runs");
    let (stays, index) = if is_a { (&b, index_b) } else { (&a, index_a) };
    list.write(&[stays]);
    let fleet = fleet_once(&front, |fleet| replicas(fleet).len() == 1).await;
    assert_eq!((&at(&replicas(&fleet), stays).unwrap()["index"], &fleet["sources"][0]["failing"]), (&index, &Value::Null));
    sender.send(body[middle..].to_vec()).await;
    drop(sender);
    let mut latest = Bytes::new();
    while let Some(event) = reader.next().await {
        latest = event;
    }
    assert_eq!(latest, "data: [DONE]\n\n", "a stream at an engine that is not named any more ends as it would have");
}

#[tokio::test]
async fn an_engine_that_is_configured_and_found_is_there_once() {
    let (a, b) = (FakeEngine::start().await, FakeEngine::start().await);
    let list = ListFile::new("both");
    list.write(&[&a, &b]);
    let found = list.config("");
    let front = Front::with(GatewayConfig { engines: config(&[&a]).engines, ..found.clone() }).await;
    front.gateway.until_ready(2).await;
    let fleet = front.get("/baton/v1/fleet").await.1;
    let replicas_now = replicas(&fleet);
    assert_eq!(replicas_now.len(), 2);
    assert_eq!(
        (&at(&replicas_now, &a).unwrap()["source"], &at(&replicas_now, &b).unwrap()["source"]),
        (&Value::Null, &json!(list.label()))
    );
    let index_b = at(&replicas_now, &b).unwrap()["index"].clone();

    // Another configuration: what the source named stays while it looks anew, and the engine that is not configured any more is found.
    let mut other = found;
    other.discovery[0].max_engines = 7;
    front.gateway.reload(&other).unwrap();
    let fleet = fleet_once(&front, |fleet| ready_at(fleet, &a)).await;
    assert_eq!(at(&replicas(&fleet), &b).unwrap()["index"], index_b);
    assert_eq!(at(&replicas(&fleet), &a).unwrap()["source"], list.label());

    front.gateway.reload(&config(&[&b])).unwrap();
    let fleet = front.get("/baton/v1/fleet").await.1;
    assert_eq!(replicas(&fleet).len(), 1, "a source that is left out takes its engines with it");
    assert_eq!(fleet["sources"], json!([]));
}

#[tokio::test]
async fn no_more_engines_than_are_allowed_are_taken() {
    let (a, b) = (FakeEngine::start().await, FakeEngine::start().await);
    let list = ListFile::new("bounded");
    list.write(&[&a]);
    let front = Front::with(list.config("max_engines = 1")).await;
    front.gateway.until_ready(1).await;
    list.write(&[&b, &a]);
    let fleet = fleet_once(&front, |fleet| fleet["sources"][0]["refused"] == 1).await;
    assert!(replicas(&fleet).len() == 1 && ready_at(&fleet, &a), "who is in stays in");
}

/// An API server with one list and one watch.
#[derive(Clone)]
struct Cluster {
    list: String,
    events: Arc<Mutex<Option<mpsc::UnboundedReceiver<Bytes>>>>,
}

async fn slices(State(cluster): State<Cluster>, Query(parameters): Query<HashMap<String, String>>) -> Response {
    if !parameters.contains_key("watch") {
        return cluster.list.into_response();
    }
    let receiver = cluster.events.lock().unwrap().take();
    let body = stream::unfold(receiver, async |receiver| match receiver {
        Some(mut receiver) => receiver.recv().await.map(|line| (Ok::<_, Infallible>(line), Some(receiver))),
        None => std::future::pending().await,
    });
    Response::new(Body::from_stream(body))
}

/// A slice of one pod, on the port of an engine of this machine.
fn slice(name: &str, version: &str, engine: &FakeEngine, conditions: &Value) -> Value {
    let port: u16 = engine.url.to_string().rsplit(':').next().unwrap().parse().unwrap();
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": { "name": name, "uid": name, "resourceVersion": version },
        "ports": [{ "name": "http", "port": port }],
        "endpoints": [{ "addresses": ["127.0.0.1"], "conditions": conditions, "targetRef": { "kind": "Pod", "name": format!("vllm-{name}"), "uid": format!("uid-{name}") } }],
    })
}

#[tokio::test]
async fn a_pod_that_terminates_finishes_what_it_has_and_gets_nothing_new() {
    let (mut a, mut b) = (FakeEngine::start().await, FakeEngine::start().await);
    let ready = json!({ "ready": true, "serving": true, "terminating": false });
    let (events, receiver) = mpsc::unbounded_channel();
    let send = |kind: &str, object: &Value| events.send(Bytes::from(format!("{}\n", json!({ "type": kind, "object": object })))).unwrap();
    let items = json!([slice("a", "1", &a, &ready), slice("b", "1", &b, &json!({ "ready": false }))]);
    let list = json!({ "kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1", "metadata": { "resourceVersion": "10" }, "items": items });
    let cluster = Cluster { list: list.to_string(), events: Arc::new(Mutex::new(Some(receiver))) };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let api = listener.local_addr().unwrap();
    let app = Router::new().route("/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices", get(slices)).with_state(cluster);
    let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    let text = format!(
        "[[discovery]]\ntype = \"kubernetes\"\nnamespace = \"serving\"\nservice = \"vllm\"\nport = \"http\"\napi = \"http://{api}\"\nengine.kind = \"vllm\"\n"
    );
    let front = Front::with(GatewayConfig::from_toml(&text).unwrap()).await;
    front.gateway.until_ready(1).await;
    let response = front.chat(ASK);
    let sender = a.call().await.stream();
    let (_, body) = recorded(CHAT);
    let middle = body.len() / 2;
    sender.send(body[..middle].to_vec()).await;
    let mut reader = EventReader::new(response.await.unwrap());
    assert!(reader.next().await.is_some(), "it runs on the pod that is ready");

    send("MODIFIED", &slice("b", "11", &b, &ready));
    front.gateway.until_ready(2).await;
    send("MODIFIED", &slice("a", "12", &a, &json!({ "ready": false, "serving": true, "terminating": true })));
    let drained = |fleet: &Value| at(&replicas(fleet), &a).is_some_and(|replica| replica["drain"]["by"] == "source");
    let fleet = fleet_once(&front, drained).await;
    let found = replicas(&fleet);
    assert_eq!(
        (&at(&found, &a).unwrap()["id"], &at(&found, &a).unwrap()["source"]),
        (&json!("vllm-a"), &json!("kubernetes:serving/vllm:http"))
    );
    for _ in 0..3 {
        let other = front.chat(ASK);
        b.call().await.play(&body).await;
        read(other.await.unwrap()).await;
    }
    sender.send(body[middle..].to_vec()).await;
    drop(sender);
    let mut latest = Bytes::new();
    while let Some(event) = reader.next().await {
        latest = event;
    }
    assert_eq!(latest, "data: [DONE]\n\n", "what ran there ended there");
    send("DELETED", &slice("a", "13", &a, &ready));
    let fleet = fleet_once(&front, |fleet| replicas(fleet).len() == 1).await;
    assert!(ready_at(&fleet, &b));
    server.abort();
}
