//! Streams of llama.cpp's servers that leave with the KV of their slots, through a file.

use std::{path::PathBuf, sync::Arc};

use baton_gateway::{EngineConfig, GatewayConfig};
use baton_text::Tokenizer;
use serde_json::{Value, json};

use crate::support::{Call, EventReader, EventSender, FakeEngine, Front, read_json};

/// A folder of this test, gone with it.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("baton-slots-{name}-{}-{:x}", std::process::id(), fastrand::u64(..)));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn id(text: &str) -> u32 {
    let mut bytes = [0; 4];
    bytes[..text.len()].copy_from_slice(text.as_bytes());
    u32::from_le_bytes(bytes)
}

fn token(text: &str) -> String {
    format!("data: {}\n\n", json!({ "content": text, "tokens": [id(text)], "stop": false }))
}

fn with_slots(engine: &FakeEngine, folder: &Folder) -> EngineConfig {
    EngineConfig { slot_path: Some(folder.0.clone()), ..engine.llamacpp() }
}

/// Answers what tries a server's slots out: by `computed` where it computes, by `restored` from what it restored.
async fn tried_out(engine: &mut FakeEngine, folder: &Folder, computed: u32, restored: u32) {
    let mut asked = 0;
    for _ in 0..7 {
        let call = engine.call().await;
        match call.path.as_str() {
            "/completion" => {
                let (tokens, prompt) = [(7, 16), (restored, 1), (computed, 17)][asked];
                asked += 1;
                assert_eq!(call.body["id_slot"], 0);
                call.reply(200, json!({ "tokens": [tokens], "timings": { "prompt_n": prompt } }).to_string().as_bytes());
            }
            path => {
                assert_eq!(path, "/slots/0");
                act(call, folder);
            }
        }
    }
    assert_eq!(asked, 3);
}

/// As the server saves and restores.
fn act(call: Call, folder: &Folder) {
    match call.body["filename"].as_str() {
        Some(file) if !folder.0.join(file).exists() => {
            std::fs::write(folder.0.join(file), b"kv").unwrap();
            call.reply(200, br#"{"id_slot":0,"n_saved":9,"n_written":2}"#);
        }
        Some(_) => call.reply(200, br#"{"id_slot":0,"n_restored":9,"n_read":2}"#),
        None => call.reply(200, br#"{"id_slot":0,"n_erased":9}"#),
    }
}

struct Pair {
    a: FakeEngine,
    b: FakeEngine,
    front: Front,
    folders: [Folder; 2],
}

/// Two servers, of which the second one keeps its slots elsewhere.
async fn pair(name: &str, restored: u32) -> Pair {
    let folders = [Folder::new(&format!("{name}-a")), Folder::new(&format!("{name}-b"))];
    let (mut a, mut b) = (FakeEngine::start().await, FakeEngine::start().await);
    let mut config = GatewayConfig { engines: vec![with_slots(&a, &folders[0]), with_slots(&b, &folders[1])], ..GatewayConfig::default() };
    config.policy.name = "round-robin".parse().unwrap();
    let (front, (), ()) = tokio::join!(
        Front::with_text(config, Some(Arc::new(Tokenizer::bytes4()))),
        tried_out(&mut a, &folders[0], 8, restored),
        tried_out(&mut b, &folders[1], 8, restored),
    );
    Pair { a, b, front, folders }
}

async fn tokens_are_compared(front: &Front) {
    loop {
        let (_, fleet) = front.get("/baton/v1/fleet").await;
        if fleet["replicas"].as_array().unwrap().iter().all(|replica| replica["tokens"] == "same") {
            return;
        }
    }
}

/// A stream of which the client has one token.
async fn begin(pair: &mut Pair) -> (EventReader, EventSender, Value) {
    let ask = json!({ "model": model(&pair.front).await, "prompt": "once upon a time", "max_tokens": 8, "temperature": 0, "stream": true });
    let response = pair.front.completion(&ask.to_string());
    let call = pair.a.call().await;
    assert_eq!(call.path, "/completion");
    let body = call.body.clone();
    let stream = call.stream();
    stream.send(token("ther")).await;
    let mut reader = EventReader::new(response.await.unwrap());
    reader.next().await.unwrap();
    (reader, stream, body)
}

async fn model(front: &Front) -> String {
    front.get("/v1/models").await.1["data"][0]["id"].as_str().unwrap().to_owned()
}

async fn running(front: &Front) -> String {
    front.get("/baton/v1/requests").await.1["requests"][0]["x_request_id"].as_str().unwrap().to_owned()
}

/// The last event of a stream at llama.cpp's server.
const END: &str = "data: {\"content\":\"\",\"tokens\":[],\"stop\":true,\"stop_type\":\"eos\"}\n\n";

async fn rest(mut reader: EventReader) -> String {
    let mut text = String::new();
    while let Some(event) = reader.next().await {
        text += std::str::from_utf8(&event).unwrap();
    }
    text
}

#[tokio::test]
async fn a_stream_that_is_moved_takes_its_slot_along() {
    let mut pair = pair("moved", 8).await;
    tokens_are_compared(&pair.front).await;
    let (reader, stream, body) = begin(&mut pair).await;
    let slot = body["id_slot"].as_u64().expect("its slot is known");
    let request = running(&pair.front).await;
    let path = format!("/baton/v1/requests/{request}/migrate");
    let moved = pair.front.post(&path, r#"{"to":"r1"}"#);
    let engines = async {
        stream.closed().await;
        let save = pair.a.call().await;
        assert_eq!(save.path, format!("/slots/{slot}"));
        act(save, &pair.folders[0]);
        let restore = pair.b.call().await;
        let (target, file) = (restore.path.clone(), restore.body["filename"].as_str().unwrap().to_owned());
        assert_eq!(std::fs::read(pair.folders[1].0.join(&file)).unwrap(), b"kv", "the file is where the other server looks");
        act(restore, &pair.folders[1]);
        let call = pair.b.call().await;
        assert_eq!(format!("/slots/{}", call.body["id_slot"]), target);
        let sent: Vec<u64> = call.body["prompt"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
        assert_eq!(sent.last(), Some(&u64::from(id("ther"))));
        let stream = call.stream();
        stream.send(token("e wa")).await;
        stream.send(END.to_owned()).await;
    };
    let (moved, ()) = tokio::join!(moved, engines);
    let moved = read_json(moved).await;
    assert_eq!((&moved["outcome"], &moved["bytes_sent"]), (&json!("moved"), &json!(2)), "{moved}");
    let text = rest(reader).await;
    assert!(text.contains("e wa") && text.ends_with("data: [DONE]\n\n"), "{text}");
    for folder in &pair.folders {
        assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 0, "no file is left");
    }
    let moves = pair.front.get("/baton/v1/moves").await.1;
    assert_eq!((&moves["moves"][0]["kind"], &moves["moves"][0]["to"]), (&json!("order"), &json!("r1")));
}

#[tokio::test]
async fn a_draining_server_is_left_by_its_streams() {
    let mut pair = pair("drained", 8).await;
    tokens_are_compared(&pair.front).await;
    let (reader, stream, _) = begin(&mut pair).await;
    assert_eq!(pair.front.post("/baton/v1/replicas/r0/drain", "").await.status(), 200);
    stream.closed().await;
    act(pair.a.call().await, &pair.folders[0]);
    act(pair.b.call().await, &pair.folders[1]);
    pair.b.call().await.play([token("e wa"), END.to_owned()].concat().as_bytes()).await;
    assert!(rest(reader).await.ends_with("data: [DONE]\n\n"));
}

#[tokio::test]
async fn a_build_that_goes_on_otherwise_from_a_slot_moves_by_tokens() {
    let mut pair = pair("broken", 9).await;
    tokens_are_compared(&pair.front).await;
    let (reader, stream, body) = begin(&mut pair).await;
    assert_eq!(body.get("id_slot"), None, "it may choose by itself");
    let request = running(&pair.front).await;
    let path = format!("/baton/v1/requests/{request}/migrate");
    let moved = pair.front.post(&path, r#"{"to":"r1"}"#);
    let engines = async {
        stream.closed().await;
        let call = pair.b.call().await;
        assert_eq!(call.path, "/completion", "nothing is carried");
        call.play([token("e wa"), END.to_owned()].concat().as_bytes()).await;
    };
    let (moved, ()) = tokio::join!(moved, engines);
    assert_eq!(read_json(moved).await["bytes_sent"], 0);
    assert!(rest(reader).await.ends_with("data: [DONE]\n\n"));
}
