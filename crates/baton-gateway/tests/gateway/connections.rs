//! Clients' connections, as raw sockets: what a client may take its time for, and how many there may be.

use std::time::Duration;

use http::Method;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::support::{FakeEngine, Front, config};

async fn until_closed(stream: &mut TcpStream) -> String {
    let mut all = Vec::new();
    stream.read_to_end(&mut all).await.unwrap();
    String::from_utf8(all).unwrap()
}

/// A gateway in which a request must arrive in next to no time.
async fn impatient(engine: &FakeEngine) -> Front {
    let mut config = config(&[engine]);
    config.gateway.receive_timeout = Duration::from_millis(100);
    Front::with(config).await
}

#[tokio::test]
async fn a_client_that_does_not_finish_its_head_is_cut() {
    let engine = FakeEngine::start().await;
    let front = impatient(&engine).await;
    for begun in ["", "POST /v1/completions HTTP/1.1\r\nhost: x\r\n"] {
        let mut stream = TcpStream::connect(&front.address).await.unwrap();
        stream.write_all(begun.as_bytes()).await.unwrap();
        assert!(!until_closed(&mut stream).await.contains("200 OK"), "{begun:?}");
    }
    // So is a connection on which nothing more is asked.
    let mut stream = TcpStream::connect(&front.address).await.unwrap();
    stream.write_all(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    assert!(until_closed(&mut stream).await.starts_with("HTTP/1.1 200 OK"));
}

#[tokio::test]
async fn a_body_that_does_not_come_is_waited_for_no_longer_than_allowed() {
    let engine = FakeEngine::start().await;
    let front = impatient(&engine).await;
    for path in ["/v1/chat/completions", "/v1/embeddings"] {
        let mut stream = TcpStream::connect(&front.address).await.unwrap();
        let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{{");
        stream.write_all(head.as_bytes()).await.unwrap();
        let answer = until_closed(&mut stream).await;
        assert!(answer.starts_with("HTTP/1.1 408 ") && answer.contains("RequestTimeoutError"), "{answer}");
    }
}

/// More than the sockets between engine and client hold.
const FLOOD_BYTES: usize = 64 << 20;

#[tokio::test]
async fn a_client_that_does_not_read_stops_its_engine_and_is_taken_for_gone() {
    let mut engine = FakeEngine::start().await;
    let mut config = config(&[&engine]);
    config.gateway.stall_timeout = Duration::from_millis(100);
    let front = Front::with(config).await;
    let mut stream = TcpStream::connect(&front.address).await.unwrap();
    let body = r#"{"model":"smollm2-135m","messages":[],"stream":true}"#;
    let head = format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    let sender = engine.call().await.stream();
    let event = format!(r#"data: {{"id":"x","choices":[{{"index":0,"delta":{{"content":"{}"}}}}]}}"#, "y".repeat(60 << 10)) + "\n\n";
    let mut sent = 0;
    let flood = async {
        while sent < FLOOD_BYTES {
            sender.send(event.clone()).await;
            sent += event.len();
        }
    };
    tokio::select! {
        biased;
        () = sender.closed() => {}
        () = flood => panic!("the gateway takes what nobody reads"),
    }
    stream.readable().await.unwrap();
}

#[tokio::test]
async fn a_head_beyond_its_limit_is_refused() {
    let engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let mut stream = TcpStream::connect(&front.address).await.unwrap();
    // As much as is taken, without an end.
    let begun = "GET /live HTTP/1.1\r\nhost: x\r\nx-much: ";
    stream.write_all((begun.to_owned() + &"y".repeat((64 << 10) - begun.len())).as_bytes()).await.unwrap();
    assert!(until_closed(&mut stream).await.starts_with("HTTP/1.1 431 "));
}

#[tokio::test]
async fn a_body_of_nonsense_chunks_is_no_large_body() {
    let engine = FakeEngine::start().await;
    let front = Front::over(&[&engine]).await;
    let mut stream = TcpStream::connect(&front.address).await.unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    let answer = until_closed(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
}

#[tokio::test]
async fn clients_past_the_bound_wait_until_a_connection_closes() {
    let engine = FakeEngine::start().await;
    let mut config = config(&[&engine]);
    config.gateway.connections = 2;
    let front = Front::with(config).await;
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut stream = TcpStream::connect(&front.address).await.unwrap();
        stream.write_all(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let mut first = [0; 12];
        stream.read_exact(&mut first).await.unwrap();
        assert_eq!(&first, b"HTTP/1.1 200");
        held.push(stream);
    }
    // The kernel takes the third connection; the gateway does not, until there is room.
    let mut third = TcpStream::connect(&front.address).await.unwrap();
    third.write_all(b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
    for _ in 0..50 {
        held[0].write_all(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        assert!(held[0].read(&mut [0; 4096]).await.unwrap() > 0);
    }
    let early = third.try_read(&mut [0]).map_err(|error| error.kind());
    assert_eq!(early, Err(std::io::ErrorKind::WouldBlock), "answered though two are the most");
    drop(held);
    assert!(until_closed(&mut third).await.starts_with("HTTP/1.1 200 OK"));
}

#[tokio::test]
async fn no_connection_outlives_the_gateway() {
    let engine = FakeEngine::start().await;
    let mut front = Front::over(&[&engine]).await;
    let mut idle = TcpStream::connect(&front.address).await.unwrap();
    assert_eq!(front.send(Method::GET, "/live", &[], "").await.status(), 200);
    front.shut_down();
    (&mut front.served).await.unwrap().unwrap();
    assert_eq!(until_closed(&mut idle).await, "");
    assert!(TcpStream::connect(&front.address).await.is_err());
}
