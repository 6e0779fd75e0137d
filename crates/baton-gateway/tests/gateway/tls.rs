//! TLS, with certificates that are made here and vouch for themselves.

use std::{fs, path::PathBuf, sync::Arc};

use baton_gateway::{Authorities, GatewayConfig, TlsConfig};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::mpsc,
};
use tokio_rustls::{
    TlsAcceptor, TlsConnector,
    client::TlsStream,
    rustls::{
        ClientConfig, RootCertStore, ServerConfig,
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    },
};

use crate::support::{FakeEngine, Front, config, read, read_json, recorded};

const CHAT: &str = include_str!("../fixtures/chat-stream.resp");
const ASK: &str = r#"{"model":"smollm2-135m","messages":[{"role":"user","content":"hi"}],"stream":true}"#;

/// A folder for files of one test.
struct Folder(PathBuf);

impl Folder {
    fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("baton-tls-{test}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        _ = fs::remove_dir_all(&self.0);
    }
}

/// Makes a certificate for `localhost` with its key, in place of those that are there.
fn certify(folder: &Folder) -> (TlsConfig, CertificateDer<'static>) {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let files = TlsConfig { cert: folder.0.join("tls.crt"), key: folder.0.join("tls.key") };
    fs::write(&files.cert, made.cert.pem()).unwrap();
    fs::write(&files.key, made.signing_key.serialize_pem()).unwrap();
    (files, made.cert.der().clone())
}

fn with_tls(engine: &FakeEngine, tls: &TlsConfig) -> GatewayConfig {
    let mut config = config(&[engine]);
    config.gateway.tls = Some(tls.clone());
    config
}

/// A connection of a client that trusts this certificate alone.
async fn connect(front: &Front, trusted: &CertificateDer<'static>) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(trusted.clone()).unwrap();
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider())).with_safe_default_protocol_versions().unwrap();
    let client = builder.with_root_certificates(roots).with_no_client_auth();
    let stream = TcpStream::connect(&front.address).await.unwrap();
    TlsConnector::from(Arc::new(client)).connect("localhost".try_into().unwrap(), stream).await
}

async fn is_live(stream: &mut TlsStream<TcpStream>) -> bool {
    stream.write_all(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
    let mut first = [0; 12];
    stream.read_exact(&mut first).await.unwrap();
    &first == b"HTTP/1.1 200"
}

#[tokio::test]
async fn a_stream_goes_to_its_client_over_tls() {
    let (folder, mut engine) = (Folder::new("stream"), FakeEngine::start().await);
    let (files, certificate) = certify(&folder);
    let front = Front::with(with_tls(&engine, &files)).await;
    let mut stream = connect(&front, &certificate).await.unwrap();
    let head =
        format!("POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", ASK.len());
    stream.write_all(format!("{head}{ASK}").as_bytes()).await.unwrap();
    engine.call().await.play(&recorded(CHAT).1).await;
    let mut answer = Vec::new();
    // An end without the TLS close would be an error.
    stream.read_to_end(&mut answer).await.unwrap();
    let answer = String::from_utf8(answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.contains("data: [DONE]\n\n"), "{answer}");
    // Nobody is answered in the clear.
    let mut clear = TcpStream::connect(&front.address).await.unwrap();
    clear.write_all(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    _ = clear.read_to_end(&mut answer).await;
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
}

#[tokio::test]
async fn a_renewed_certificate_is_taken_up_and_a_broken_one_is_not() {
    let (folder, engine) = (Folder::new("renewed"), FakeEngine::start().await);
    let (files, former) = certify(&folder);
    let config = with_tls(&engine, &files);
    let front = Front::with(config.clone()).await;
    let mut kept = connect(&front, &former).await.unwrap();
    assert!(is_live(&mut kept).await);
    let (_, renewed) = certify(&folder);
    assert!(connect(&front, &renewed).await.is_err(), "not before it is read");
    front.gateway.reload(&config).unwrap();
    assert!(connect(&front, &former).await.is_err());
    assert!(is_live(&mut connect(&front, &renewed).await.unwrap()).await);
    fs::write(&files.cert, "no certificate").unwrap();
    let told = front.gateway.reload(&config).unwrap_err().to_string();
    assert!(told.contains("gateway.tls") && told.contains("tls.crt"), "{told}");
    assert!(is_live(&mut connect(&front, &renewed).await.unwrap()).await, "all goes on as before");
    let another = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    fs::write(&files.cert, another.cert.pem()).unwrap();
    let told = front.gateway.reload(&config).unwrap_err().to_string();
    assert!(told.contains("do not go together"), "{told}");
}

#[tokio::test]
async fn a_client_that_does_not_finish_its_handshake_is_cut() {
    let (folder, engine) = (Folder::new("handshake"), FakeEngine::start().await);
    let (files, _) = certify(&folder);
    let mut config = with_tls(&engine, &files);
    config.gateway.receive_timeout = std::time::Duration::from_millis(100);
    let front = Front::with(config).await;
    let mut stream = TcpStream::connect(&front.address).await.unwrap();
    stream.write_all(&[22, 3, 1]).await.unwrap();
    let mut answer = Vec::new();
    _ = stream.read_to_end(&mut answer).await;
    assert!(answer.is_empty(), "{answer:?}");
}

/// Speaks TLS in front of an engine; gives its port, and tells of each handshake whether it came to an end.
async fn tls_before(engine: &FakeEngine, files: &TlsConfig) -> (u16, mpsc::UnboundedReceiver<bool>) {
    let chain = vec![CertificateDer::from_pem_file(&files.cert).unwrap()];
    let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider())).with_safe_default_protocol_versions().unwrap();
    let server = builder.with_no_client_auth().with_single_cert(chain, PrivateKeyDer::from_pem_file(&files.key).unwrap()).unwrap();
    let (acceptor, listener) = (TlsAcceptor::from(Arc::new(server)), TcpListener::bind("127.0.0.1:0").await.unwrap());
    let port = listener.local_addr().unwrap().port();
    let inner = engine.url.to_string().replace("http://", "");
    let (tell, shaken) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((outer, _)) = listener.accept().await {
            let (acceptor, inner, tell) = (acceptor.clone(), inner.clone(), tell.clone());
            tokio::spawn(async move {
                let accepted = acceptor.accept(outer).await;
                // Not every test listens.
                _ = tell.send(accepted.is_ok());
                let Ok(mut outer) = accepted else { return };
                let mut inner = TcpStream::connect(inner).await.unwrap();
                _ = tokio::io::copy_bidirectional(&mut outer, &mut inner).await;
            });
        }
    });
    (port, shaken)
}

#[tokio::test]
async fn an_engine_is_spoken_to_over_tls() {
    let (folder, mut engine) = (Folder::new("engine"), FakeEngine::start().await);
    let (files, _) = certify(&folder);
    let (port, _) = tls_before(&engine, &files).await;
    let mut config = config(&[&engine]);
    config.engines[0].url = format!("https://localhost:{port}").parse().unwrap();
    config.engines[0].ca = Some(Authorities::read(&files.cert).unwrap());
    // It answers probes, or it would not become ready.
    let front = Front::with(config).await;
    // More than the buffers between them hold, so that it is written in parts.
    let long = ASK.replace("hi", &"x".repeat(4 << 20));
    for _ in 0..2 {
        let response = front.chat(&long);
        let call = engine.call().await;
        assert_eq!(call.body["messages"][0]["content"].as_str().unwrap().len(), 4 << 20);
        call.play(&recorded(CHAT).1).await;
        let response = response.await.unwrap();
        assert_eq!(response.status(), 200);
        assert!(read(response).await.ends_with(b"data: [DONE]\n\n"));
    }
    let response = front.spawn_post("/v1/embeddings", r#"{"model":"smollm2-135m","input":"x"}"#, &[]);
    engine.call().await.reply(200, b"{\"data\":[]}");
    assert_eq!(read_json(response.await.unwrap()).await, serde_json::json!({ "data": [] }));
}

#[tokio::test]
async fn an_engine_that_nobody_vouches_for_is_not_used() {
    let (folder, engine) = (Folder::new("stranger"), FakeEngine::start().await);
    let (files, _) = certify(&folder);
    let (port, mut shaken) = tls_before(&engine, &files).await;
    let mut config = config(&[&engine, &engine]);
    config.engines[1].url = format!("https://localhost:{port}").parse().unwrap();
    let front = Front::with_ready(config.clone(), 1).await;
    let state = async |front: &Front| front.get("/baton/v1/fleet").await.1["replicas"][1]["state"].as_str().unwrap().to_owned();
    assert_eq!(shaken.recv().await, Some(false), "browsers trust others");
    assert_eq!(state(&front).await, "unknown");
    certify(&folder);
    config.engines[1].ca = Some(Authorities::read(&files.cert).unwrap());
    assert_eq!(front.gateway.reload(&config).unwrap().engines_started, 1);
    while shaken.try_recv().is_ok() {}
    assert_eq!(shaken.recv().await, Some(false), "the certificate is of another key");
    assert_eq!(state(&front).await, "unknown");
    assert_eq!(front.gateway.ready_replicas(), 1);
}
