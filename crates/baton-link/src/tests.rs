use std::{sync::Arc, time::Duration};

use baton_migration::{GatewayName, Place, RequestName, Tag};
use baton_units::{Incarnation, ReplicaId};
use baton_wire::migration::{
    BlockHeader, ControlFrame, KvFrame,
    handshake::{FleetKey, Freeze, Hello, HelloError, Role, Side, Transcript, VERSION},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::JoinHandle,
};

use super::*;

const GATEWAY: GatewayName = GatewayName { id: 7, incarnation: u64::MAX };
const PLACE: Place = Place { replica: ReplicaId(3), incarnation: Incarnation(9) };
/// A hung handshake fails the test instead of holding it up.
const PATIENCE: Duration = Duration::from_mins(1);

fn key(secret: Option<&str>) -> Option<Arc<FleetKey>> {
    secret.map(|secret| Arc::new(FleetKey::new(secret)))
}

fn replica(secret: Option<&str>) -> Identity {
    let hello = Hello {
        version: VERSION,
        role: Role::Replica,
        id: u64::from(PLACE.replica.0),
        incarnation: PLACE.incarnation.0,
        numerics_id: "bits".to_owned(),
        kv_layout: None,
        freeze: Some(Freeze::Resumable),
        kv_address: Some("127.0.0.1:1".to_owned()),
        nonce: [0; 32],
    };
    Identity { hello, fleet_key: key(secret) }
}

/// Both ends of one connection, as each saw it.
async fn connect(
    dialer: &Identity,
    role: Role,
    listener: Identity,
    wanted: Role,
) -> (Result<Connection, ConnectionError>, Result<Connection, ConnectionError>) {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap().to_string();
    let accepting: JoinHandle<_> = tokio::spawn(async move { listener.accept(socket.accept().await.unwrap().0, wanted).await });
    let dialed = dial(&address, dialer, role, PATIENCE).await;
    (dialed, accepting.await.unwrap())
}

#[tokio::test]
async fn each_side_learns_who_the_other_is_and_frames_go_both_ways() {
    for secret in [None, Some("secret")] {
        let gateway = Identity::of_gateway(GATEWAY, key(secret));
        let (dialed, accepted) = connect(&gateway, Role::Gateway, replica(secret), Role::Gateway).await;
        let (mut dialed, mut accepted) = (dialed.unwrap(), accepted.unwrap());
        assert_eq!((dialed.hello.place(), &*dialed.hello.numerics_id), (PLACE, "bits"));
        assert_eq!(accepted.hello.gateway_name(), GATEWAY);
        assert_ne!(accepted.hello.nonce, dialed.hello.nonce);
        for sequence in 0..3 {
            dialed.writer.control(&ControlFrame::Lease { sequence }).await.unwrap();
        }
        dialed.writer.flush().await.unwrap();
        for sequence in 0..3 {
            assert_eq!(accepted.reader.control().await.unwrap(), ControlFrame::Lease { sequence });
        }
        accepted.writer.control(&ControlFrame::AllHeld).await.unwrap();
        accepted.writer.flush().await.unwrap();
        assert_eq!(dialed.reader.control().await.unwrap(), ControlFrame::AllHeld);
        drop(accepted);
        let ended = dialed.reader.control().await.unwrap_err();
        assert!(matches!(&ended, ConnectionError::Io(error) if error.kind() == std::io::ErrorKind::UnexpectedEof), "{ended}");
    }
}

#[tokio::test]
async fn blocks_come_with_their_bytes_beside_the_header() {
    let source = replica(Some("secret"));
    let (dialed, accepted) = connect(&source, Role::Source, replica(Some("secret")), Role::Source).await;
    let (mut source, mut target) = (dialed.unwrap(), accepted.unwrap());
    assert_eq!(target.hello.role, Role::Source);
    let request = RequestName { gateway: GATEWAY, sequence: 1 };
    let open = KvFrame::Open { request, attempt: Tag(2), source: PLACE, target: PLACE, nonce: [5; 16] };
    // Some fit into no buffer, and together they are more than one write takes.
    let blocks: Vec<(BlockHeader, Vec<u8>)> = (0..700)
        .map(|index| (BlockHeader { index, tokens: 16, checksum: 77 }, vec![index as u8; if index % 100 == 0 { 100_000 } else { 9 }]))
        .collect();
    let sending = async {
        source.writer.kv(&open).await.unwrap();
        let lent: Vec<(BlockHeader, &[u8])> = blocks.iter().map(|(header, bytes)| (*header, &bytes[..])).collect();
        source.writer.blocks(&lent).await.unwrap();
        source.writer.kv(&KvFrame::Prepared { entries: 1 }).await.unwrap();
    };
    let reading = async {
        let first = target.reader.read().await.unwrap();
        assert_eq!(KvFrame::decode(first.kind, &first.body).unwrap(), open);
        let mut place = vec![0; 100_000];
        for (header, bytes) in &blocks {
            let block = target.reader.read_to(|len| &mut place[..len]).await.unwrap();
            assert_eq!(KvFrame::decode(block.kind, &block.body).unwrap(), KvFrame::Block(*header));
            assert_eq!(block.payload, bytes);
        }
        let last = target.reader.read().await.unwrap();
        assert_eq!(KvFrame::decode(last.kind, &last.body).unwrap(), KvFrame::Prepared { entries: 1 });
    };
    tokio::join!(sending, reading);
}

#[tokio::test]
async fn who_is_on_the_same_host_is_reached_over_a_unix_socket_and_others_as_before() {
    let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = tcp.local_addr().unwrap().to_string();
    let listener = Listener::with_local(tcp).unwrap();
    let (served, mut serving) = mpsc::unbounded_channel();
    let serve = move |stream: Stream| {
        served.send(matches!(stream, Stream::Local(_))).unwrap();
        async move { replica(Some("secret")).accept(stream, Role::Source).await.map(drop) }
    };
    let listening = tokio::spawn(listen(listener, "test", 2, serve));
    let source = replica(Some("secret"));
    let dialed = dial(&address, &source, Role::Source, PATIENCE).await.unwrap();
    assert_eq!((dialed.hello.place(), serving.recv().await), (PLACE, Some(cfg!(target_os = "linux"))));
    // Whoever comes from elsewhere finds the address alone.
    let stream = TcpStream::connect(&address).await.unwrap();
    assert_eq!(serving.recv().await, Some(false));
    drop(stream);
    listening.abort();
}

#[tokio::test]
async fn who_has_another_key_or_no_business_here_gets_no_connection() {
    let gateway = |secret| Identity::of_gateway(GATEWAY, key(secret));
    let (dialed, accepted) = connect(&gateway(Some("other")), Role::Gateway, replica(Some("secret")), Role::Gateway).await;
    assert!(dialed.is_err());
    assert!(matches!(accepted, Err(ConnectionError::Hello(HelloError::WrongKey))));
    let (_, accepted) = connect(&gateway(None), Role::Gateway, replica(None), Role::Source).await;
    assert!(matches!(accepted, Err(ConnectionError::Role(Role::Gateway))));
    let unused = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = unused.local_addr().unwrap().to_string();
    drop(unused);
    let dialed = dial(&address, &gateway(None), Role::Gateway, PATIENCE).await;
    assert!(matches!(dialed, Err(ConnectionError::Unreachable { .. })));
}

#[tokio::test]
async fn who_says_nothing_is_not_waited_for() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let dialed = dial(&address, &Identity::of_gateway(GATEWAY, None), Role::Gateway, Duration::from_millis(20)).await;
    assert!(matches!(dialed, Err(ConnectionError::Silent(_))));
}

#[tokio::test]
async fn more_connections_than_may_be_wait_for_one_to_end() {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    let (served, mut serving) = mpsc::unbounded_channel();
    let echo = move |stream: Stream| {
        let served = served.clone();
        async move {
            let Stream::Tcp(mut stream) = stream else { panic!("it listens over TCP alone") };
            let byte = stream.read_u8().await?;
            served.send(byte).unwrap();
            stream.read_u8().await.map(drop)
        }
    };
    let listening = tokio::spawn(listen(socket, "test", 2, echo));
    let mut streams = Vec::new();
    for byte in 0..3 {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_u8(byte).await.unwrap();
        streams.push(stream);
        if byte < 2 {
            assert_eq!(serving.recv().await, Some(byte));
        }
    }
    assert!(serving.try_recv().is_err(), "the third one waits");
    drop(streams.remove(0));
    assert_eq!(serving.recv().await, Some(2));
    listening.abort();
    assert!(listening.await.unwrap_err().is_cancelled());
}

#[test]
fn blanks_around_a_key_do_not_count_and_an_empty_one_is_none() {
    let folder = std::env::temp_dir().join(format!("baton-link-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        std::fs::write(&path, bytes).unwrap();
        read_fleet_key(&path)
    };
    let proof = |key: &FleetKey| {
        let transcript = Transcript { dialer: vec![1], listener: vec![2] };
        key.proof(Side::Dialer, &transcript)
    };
    assert_eq!(proof(&file("key", b" secret\r\n").unwrap()), proof(&FleetKey::new("secret")));
    assert!(matches!(file("empty", b"\n"), Err(FleetKeyError::Empty(_))));
    assert!(matches!(read_fleet_key(&folder.join("none")), Err(FleetKeyError::Unreadable { .. })));
    std::fs::remove_dir_all(folder).unwrap();
}
