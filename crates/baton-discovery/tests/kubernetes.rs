//! The Kubernetes source against an API server over real HTTP, which says what the test wants and when.
#![allow(clippy::unwrap_used, reason = "tests and their helpers")]

use std::{
    collections::HashMap,
    convert::Infallible,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::{Query, State},
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
    routing::get,
};
use baton_discovery::{Access, Answer, Kubernetes, Named, Pace, Port, Readiness, Reconciler};
use bytes::Bytes;
use futures_util::stream;
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::mpsc, task::JoinHandle};

const SLICES: &str = "/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices";
const PODS: &str = "/api/v1/namespaces/serving/pods";

/// What a body cannot say in words: the connection breaks.
#[derive(Debug, thiserror::Error)]
#[error("broken on purpose")]
struct Broken;

/// What the server answers to lists, and where it hands over what it is asked.
#[derive(Clone)]
struct Api {
    list: Arc<Mutex<(StatusCode, String)>>,
    asked: mpsc::UnboundedSender<Asked>,
}

#[derive(Debug)]
enum Asked {
    List(HashMap<String, String>, HeaderMap),
    Watch(Watch),
}

/// A watch that the test answers.
#[derive(Debug)]
struct Watch {
    parameters: HashMap<String, String>,
    answer: tokio::sync::oneshot::Sender<Response>,
}

/// The server's side of a watch; dropped, it ends as a watch does whose time is over.
struct Events {
    lines: mpsc::UnboundedSender<Result<Bytes, Broken>>,
}

/// A source at work, and its server.
struct Scene {
    api: Api,
    asked: mpsc::UnboundedReceiver<Asked>,
    told: mpsc::UnboundedReceiver<Answer<()>>,
    tasks: Vec<JoinHandle<()>>,
}

async fn handle(State(api): State<Api>, Query(parameters): Query<HashMap<String, String>>, headers: HeaderMap) -> Response {
    if parameters.get("watch").map(String::as_str) == Some("true") {
        let (answer, answered) = tokio::sync::oneshot::channel();
        api.asked.send(Asked::Watch(Watch { parameters, answer })).unwrap();
        // A watch that the test drops is refused.
        return answered.await.unwrap_or_else(|_| StatusCode::INTERNAL_SERVER_ERROR.into_response());
    }
    let (status, body) = api.list.lock().unwrap().clone();
    api.asked.send(Asked::List(parameters, headers)).unwrap();
    (status, body).into_response()
}

impl Watch {
    fn begin(self) -> Events {
        let (lines, receiver) = mpsc::unbounded_channel();
        let body = stream::unfold(receiver, async |mut receiver| receiver.recv().await.map(|line| (line, receiver)));
        _ = self.answer.send(Response::new(Body::from_stream(body)));
        Events { lines }
    }

    fn refuse(self, status: u16, reason: &str) {
        let body = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status, "reason": reason, "message": "as the test wants" });
        _ = self.answer.send((StatusCode::from_u16(status).unwrap(), body.to_string()).into_response());
    }
}

impl Events {
    fn send(&self, kind: &str, object: &Value) {
        let mut line = json!({ "type": kind, "object": object }).to_string();
        line.push('\n');
        self.raw(Ok(line.into()));
    }

    fn raw(&self, part: Result<Bytes, Broken>) {
        self.lines.send(part).unwrap();
    }

    /// Breaks the connection in the middle of an event.
    fn cut(self) {
        self.raw(Ok("{\"type\":\"ADDED\",\"obj".into()));
        self.raw(Err(Broken));
    }
}

impl Scene {
    async fn with(named: Named, list: &Value) -> Self {
        let (asked_sender, asked) = mpsc::unbounded_channel();
        let api = Api { list: Arc::new(Mutex::new((StatusCode::OK, list.to_string()))), asked: asked_sender };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
        let app = Router::new().route(SLICES, get(handle)).route(PODS, get(handle)).with_state(api.clone());
        let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        let source = Kubernetes {
            access: Access::Url { url, token_file: None, ca_file: None },
            namespace: Some("serving".to_owned()),
            named,
            port: Some(Port::Number(8000)),
            pace: Pace { list_every: Duration::from_hours(1), pause: Duration::from_millis(1), pause_max: Duration::from_millis(4) },
        };
        let (tell, told) = mpsc::unbounded_channel();
        let watching = tokio::spawn(async move {
            let never: Infallible = source.watch(move |answer| _ = tell.send(answer)).await;
            match never {}
        });
        Self { api, asked, told, tasks: vec![server, watching] }
    }

    /// A source of a service, after its first list, with its first watch begun.
    async fn watching(endpoints: &[Value]) -> (Self, Events) {
        let mut scene = Self::with(Named::Service("engines".to_owned()), &list("100", &[slice("100", endpoints)])).await;
        scene.listed().await;
        let watch = scene.watch().await;
        assert_eq!(watch.parameters["resourceVersion"], "100");
        (scene, watch.begin())
    }

    fn next_list(&self, list: &Value) {
        *self.api.list.lock().unwrap() = (StatusCode::OK, list.to_string());
    }

    async fn listed(&mut self) -> (HashMap<String, String>, HeaderMap) {
        match self.asked.recv().await.unwrap() {
            Asked::List(parameters, headers) => (parameters, headers),
            Asked::Watch(watch) => panic!("a watch: {:?}", watch.parameters),
        }
    }

    async fn watch(&mut self) -> Watch {
        match self.asked.recv().await.unwrap() {
            Asked::Watch(watch) => watch,
            Asked::List(parameters, _) => panic!("a list: {parameters:?}"),
        }
    }

    async fn answer(&mut self) -> Answer<()> {
        self.told.recv().await.unwrap()
    }

    /// The next set: address, identity and readiness of each.
    async fn set(&mut self) -> Vec<String> {
        let show = |endpoint: &baton_discovery::Endpoint<()>| {
            let address = endpoint.address.trim_start_matches("http://").trim_end_matches(":8000");
            let mark = match endpoint.readiness {
                Readiness::Ready => "",
                Readiness::Terminating => " terminating",
                Readiness::NotReady => " not ready",
            };
            format!("{address} {}{mark}", endpoint.identity.as_deref().unwrap_or("-").trim_end_matches(":8000"))
        };
        self.answer().await.unwrap().iter().map(show).collect()
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

fn list(version: &str, items: &[Value]) -> Value {
    json!({ "kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1", "metadata": { "resourceVersion": version }, "items": items })
}

fn slice(version: &str, endpoints: &[Value]) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": { "name": "engines-abc", "uid": "slice", "resourceVersion": version },
        "ports": [{ "name": "http", "port": 8000 }], "endpoints": endpoints,
    })
}

fn pod(uid: &str, ip: &str) -> Value {
    conditioned(uid, ip, &json!({ "ready": true, "serving": true, "terminating": false }))
}

fn conditioned(uid: &str, ip: &str, conditions: &Value) -> Value {
    json!({ "addresses": [ip], "conditions": conditions, "targetRef": { "kind": "Pod", "name": format!("engine-{uid}"), "uid": uid } })
}

fn bookmark(version: &str) -> Value {
    json!({ "kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "metadata": { "resourceVersion": version } })
}

fn gone() -> Value {
    json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410, "message": "too old resource version" })
}

#[tokio::test]
async fn a_list_says_what_there_is_and_a_watch_what_changes() {
    let (mut scene, events) = Scene::watching(&[pod("a", "10.0.0.1")]).await;
    assert_eq!(scene.set().await, ["10.0.0.1 a"]);
    events.send("MODIFIED", &slice("101", &[pod("a", "10.0.0.1"), pod("b", "10.0.0.2")]));
    assert_eq!(scene.set().await, ["10.0.0.1 a", "10.0.0.2 b"]);
    let not_ready = conditioned("a", "10.0.0.1", &json!({ "ready": false, "serving": false, "terminating": false }));
    events.send("MODIFIED", &slice("102", &[not_ready, pod("b", "10.0.0.2")]));
    assert_eq!(scene.set().await, ["10.0.0.1 a not ready", "10.0.0.2 b"]);
    let leaving = conditioned("b", "10.0.0.2", &json!({ "ready": false, "serving": true, "terminating": true }));
    events.send("MODIFIED", &slice("103", &[pod("a", "10.0.0.1"), leaving]));
    assert_eq!(scene.set().await, ["10.0.0.1 a", "10.0.0.2 b terminating"]);
    events.send("MODIFIED", &slice("104", &[pod("a", "10.0.0.1")]));
    assert_eq!(scene.set().await, ["10.0.0.1 a"]);
    events.send("DELETED", &slice("105", &[pod("a", "10.0.0.1")]));
    assert_eq!(scene.set().await, [""; 0]);
}

#[tokio::test]
async fn it_asks_for_the_slices_of_its_service() {
    let mut scene = Scene::with(Named::Service("engines".to_owned()), &list("7", &[])).await;
    let (parameters, headers) = scene.listed().await;
    assert_eq!(parameters["labelSelector"], "kubernetes.io/service-name=engines");
    assert!(!headers.contains_key("authorization"));
    let watch = scene.watch().await;
    assert_eq!(watch.parameters["labelSelector"], "kubernetes.io/service-name=engines");
    assert_eq!((watch.parameters["resourceVersion"].as_str(), watch.parameters["allowWatchBookmarks"].as_str()), ("7", "true"));
}

#[tokio::test]
async fn a_pod_that_comes_back_with_its_ip_is_another_engine() {
    let (mut scene, events) = Scene::watching(&[pod("a", "10.0.0.1")]).await;
    let mut reconciler = Reconciler::default();
    reconciler.configure([("k".to_owned(), 10)], []);
    reconciler.handle("k", scene.answer().await.unwrap());
    let before = reconciler.members().next().unwrap().clone();
    events.send("MODIFIED", &slice("101", &[pod("z", "10.0.0.1")]));
    reconciler.handle("k", scene.answer().await.unwrap());
    let after = reconciler.members().next().unwrap();
    assert_eq!((after.address.as_str(), after.identity.as_deref()), (before.address.as_str(), Some("z:8000")));
    assert_ne!(after.id, before.id);
    events.send("MODIFIED", &slice("102", &[pod("z", "10.0.0.9")]));
    let (id, set) = (after.id, scene.answer().await.unwrap());
    reconciler.handle("k", set);
    assert_eq!(reconciler.members().next().map(|member| (member.id, member.address.as_str())), Some((id, "http://10.0.0.9:8000")));
}

#[tokio::test]
async fn versions_that_are_gone_make_it_list_again() {
    let (mut scene, events) = Scene::watching(&[pod("a", "10.0.0.1")]).await;
    assert_eq!(scene.set().await, ["10.0.0.1 a"]);
    scene.next_list(&list("200", &[slice("150", &[pod("b", "10.0.0.2")])]));
    events.send("ERROR", &gone());
    assert_eq!(scene.set().await, ["10.0.0.2 b"], "what was deleted meanwhile is known by its absence");
    scene.listed().await;
    let watch = scene.watch().await;
    assert_eq!(watch.parameters["resourceVersion"], "200");
    scene.next_list(&list("300", &[slice("250", &[pod("c", "10.0.0.3")])]));
    watch.refuse(410, "Expired");
    assert_eq!(scene.set().await, ["10.0.0.3 c"], "also when the watch is refused");
}

#[tokio::test]
async fn an_event_from_before_the_list_changes_nothing() {
    let (mut scene, events) = Scene::watching(&[pod("a", "10.0.0.1")]).await;
    assert_eq!(scene.set().await, ["10.0.0.1 a"]);
    scene.next_list(&list("200", &[slice("200", &[pod("b", "10.0.0.2")])]));
    events.send("ERROR", &gone());
    assert_eq!(scene.set().await, ["10.0.0.2 b"]);
    scene.listed().await;
    let events = scene.watch().await.begin();
    events.send("MODIFIED", &slice("120", &[pod("old", "10.0.0.8")]));
    events.send("DELETED", &slice("130", &[pod("old", "10.0.0.8")]));
    events.send("MODIFIED", &slice("201", &[pod("c", "10.0.0.3")]));
    assert_eq!(scene.set().await, ["10.0.0.3 c"], "the stale ones were not told");
}

#[tokio::test]
async fn a_watch_that_is_cut_goes_on_where_it_was() {
    let (mut scene, events) = Scene::watching(&[pod("a", "10.0.0.1")]).await;
    assert_eq!(scene.set().await, ["10.0.0.1 a"]);
    events.send("MODIFIED", &slice("140", &[pod("b", "10.0.0.2")]));
    assert_eq!(scene.set().await, ["10.0.0.2 b"]);
    events.cut();
    let watch = scene.watch().await;
    assert_eq!(watch.parameters["resourceVersion"], "140", "without a list");
    let events = watch.begin();
    events.send("BOOKMARK", &bookmark("160"));
    drop(events);
    let watch = scene.watch().await;
    assert_eq!(watch.parameters["resourceVersion"], "160", "of the bookmark");
    let events = watch.begin();
    events.send("MODIFIED", &slice("161", &[pod("c", "10.0.0.3")]));
    assert_eq!(scene.set().await, ["10.0.0.3 c"], "and nothing was told between");
}

#[tokio::test]
async fn a_server_that_fails_is_told_of_and_asked_again() {
    let (mut scene, events) = Scene::watching(&[pod("a", "10.0.0.1")]).await;
    assert_eq!(scene.set().await, ["10.0.0.1 a"]);
    *scene.api.list.lock().unwrap() = (
        StatusCode::FORBIDDEN,
        json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 403, "message": "no such right" }).to_string(),
    );
    drop(events);
    // Without a step forward the watch is made anew after a pause, and its refusal makes the source list.
    scene.watch().await.refuse(500, "InternalError");
    let errors = [scene.answer().await.unwrap_err().to_string(), scene.answer().await.unwrap_err().to_string()];
    assert_eq!(errors, ["the Kubernetes API: status 500: as the test wants", "the Kubernetes API: status 403: no such right"]);
    scene.next_list(&list("300", &[slice("250", &[pod("a", "10.0.0.1")])]));
    let answer = loop {
        // Some more refusals may be on their way.
        if let Ok(endpoints) = scene.answer().await {
            break endpoints;
        }
    };
    assert_eq!(answer.len(), 1, "it tells that it is well again, though nothing changed");
}

#[tokio::test]
async fn pods_are_found_by_their_labels() {
    let pod = |uid: &str, ip: &str, deleted: Option<&str>| {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": format!("engine-{uid}"), "uid": uid, "resourceVersion": "5", "deletionTimestamp": deleted },
            "spec": { "containers": [] },
            "status": { "phase": "Running", "podIP": ip, "conditions": [{ "type": "Ready", "status": "True" }] },
        })
    };
    let pods = json!({
        "kind": "PodList", "apiVersion": "v1", "metadata": { "resourceVersion": "9" },
        "items": [pod("a", "10.0.0.1", None), pod("b", "10.0.0.2", Some("2026-01-01T00:00:00Z"))],
    });
    let mut scene = Scene::with(Named::Labels("app=vllm".to_owned()), &pods).await;
    assert_eq!(scene.listed().await.0["labelSelector"], "app=vllm");
    assert_eq!(scene.set().await, ["10.0.0.1 a", "10.0.0.2 b terminating"]);
    let events = scene.watch().await.begin();
    events.send("DELETED", &pod("b", "10.0.0.2", Some("2026-01-01T00:00:00Z")));
    assert_eq!(scene.set().await, ["10.0.0.1 a"]);
}

#[tokio::test]
async fn its_token_is_that_of_the_file() {
    let path = std::env::temp_dir().join(format!("baton-discovery-token-{}", std::process::id()));
    std::fs::write(&path, "letmein\n").unwrap();
    let (asked, mut questions) = mpsc::unbounded_channel();
    let api = Api { list: Arc::new(Mutex::new((StatusCode::OK, list("1", &[]).to_string()))), asked };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    let app = Router::new().route(SLICES, get(handle)).with_state(api);
    let source = Kubernetes {
        access: Access::Url { url, token_file: Some(path.clone()), ca_file: None },
        namespace: Some("serving".to_owned()),
        named: Named::Service("engines".to_owned()),
        port: None,
        pace: Pace::default(),
    };
    let serving = async { axum::serve(listener, app).await.unwrap() };
    let question = tokio::select! {
        never = source.watch(|_: Answer<()>| {}) => match never {},
        () = serving => unreachable!("a server serves for ever"),
        question = questions.recv() => question.unwrap(),
    };
    assert!(matches!(question, Asked::List(_, headers) if headers["authorization"] == "Bearer letmein"));
    std::fs::remove_file(&path).unwrap();
}
