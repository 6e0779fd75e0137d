use std::future::poll_fn;

use proptest::prelude::*;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

use super::*;

fn address() -> Address {
    Address::new(&"http://127.0.0.1:1/v2".parse().unwrap(), Some("key"), None, None)
}

/// A line and the engine's end of it.
async fn pair() -> (Line, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    (Line::new(stream, Arc::new(address())), listener.accept().await.unwrap().0)
}

async fn head(line: &mut Line) -> Result<Head, LineError> {
    poll_fn(|context| line.poll_head(context)).await
}

/// The rest of the body.
async fn body(line: &mut Line) -> Result<Vec<u8>, LineError> {
    let mut body = Vec::new();
    while let Some(data) = poll_fn(|context| line.poll_data(context).map_ok(|data| data.map(<[u8]>::to_vec))).await? {
        body.extend(data);
    }
    Ok(body)
}

/// What an answer is read as, written in parts and closed after them; and whether the line could be used again.
async fn read(parts: &[&[u8]]) -> (Result<(u16, Vec<u8>), String>, bool) {
    let (mut line, mut engine) = pair().await;
    let writes = async {
        for part in parts {
            engine.write_all(part).await.unwrap();
            engine.flush().await.unwrap();
            tokio::task::yield_now().await;
        }
        engine.shutdown().await.unwrap();
    };
    let reads = async {
        let head = head(&mut line).await.map_err(|error| error.to_string())?;
        Ok((head.status.as_u16(), body(&mut line).await.map_err(|error| error.to_string())?))
    };
    let (read, ()) = tokio::join!(reads, writes);
    (read, line.is_reusable())
}

const CHUNKED: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n3;x=y\r\nabc\r\n0A\r\n0123456789\r\n0\r\na: b\r\n\r\n";

#[tokio::test]
async fn bodies_end_where_their_framing_says() {
    let whole = |text: &'static [u8]| async move {
        let (read, reusable) = read(&[text]).await;
        let (status, body) = read.unwrap();
        (status, String::from_utf8(body).unwrap(), reusable)
    };
    assert_eq!(whole(CHUNKED).await, (200, "abc0123456789".into(), true));
    assert_eq!(whole(b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nab").await, (404, "ab".into(), true));
    assert_eq!(whole(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\nconnection: x, Close\r\n\r\na").await, (200, "a".into(), false));
    assert_eq!(whole(b"HTTP/1.1 200 OK\r\n\r\nuntil the end").await, (200, "until the end".into(), false));
    assert_eq!(whole(b"HTTP/1.0 200 OK\r\ncontent-length: 1\r\n\r\na").await, (200, "a".into(), false));
    assert_eq!(whole(b"HTTP/1.1 204 No Content\r\n\r\n").await, (204, String::new(), true));
    assert!(!whole(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na, and more").await.2);
}

#[tokio::test]
async fn a_cut_answer_is_no_whole_one() {
    for cut in [
        b"HTTP/1.1 200 OK\r\ncontent-le".as_slice(),
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabcX\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: ten\r\n\r\n",
        b"<html>",
        b"",
    ] {
        assert!(read(&[cut]).await.0.is_err(), "{:?}", String::from_utf8_lossy(cut));
    }
    let endless = [b"HTTP/1.1 200 OK\r\na: ".as_slice(), &[b'x'; INPUT_BYTES]].concat();
    assert!(read(&[&endless]).await.0.is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_split_of_an_answer_is_read_alike(cuts in prop::collection::vec(0..CHUNKED.len(), 0..5)) {
        let mut cuts: Vec<usize> = cuts.into_iter().chain([0, CHUNKED.len()]).collect();
        cuts.sort_unstable();
        let parts: Vec<&[u8]> = cuts.windows(2).map(|cut| &CHUNKED[cut[0]..cut[1]]).collect();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        prop_assert_eq!(runtime.block_on(read(&parts)), (Ok((200, b"abc0123456789".to_vec())), true));
    }
}

#[tokio::test]
async fn a_request_goes_out_whole_and_its_line_serves_the_next_one() {
    let (mut line, mut engine) = pair().await;
    let pieces: Vec<Bytes> = (0..40u8).map(|number| Bytes::from(vec![number; 5000])).collect();
    let lines = Lines::new(address(), 1);
    line.address = lines.address();
    let request = lines.address().head("/v1/x", "id", None, 200_000);
    assert_eq!(
        request,
        "POST /v2/v1/x HTTP/1.1\r\nhost: 127.0.0.1:1\r\ncontent-type: application/json\r\nauthorization: Bearer key\r\nx-request-id: id\r\ncontent-length: 200000\r\n\r\n"
    );
    line.send(std::iter::once(request.clone()).chain(pieces.clone()).collect());
    let takes = async {
        let mut all = vec![0; request.len() + 200_000];
        engine.read_exact(&mut all).await.unwrap();
        engine.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
        all
    };
    let (answer, taken) = tokio::join!(head(&mut line), takes);
    assert_eq!(answer.unwrap().status, StatusCode::OK);
    assert_eq!(taken, [request.to_vec(), pieces.concat()].concat());
    assert_eq!(body(&mut line).await.unwrap(), b"ok");
    lines.put(line);
    assert!(lines.take().is_some() && lines.take().is_none());
}

#[tokio::test]
async fn a_line_that_its_engine_has_closed_is_not_used() {
    let lines = Lines::new(address(), 2);
    let (mut line, engine) = pair().await;
    line.address = lines.address();
    drop(engine);
    // Until the end has arrived here.
    let Transport::Clear(stream) = &line.stream else { panic!("it is not over TLS") };
    stream.readable().await.unwrap();
    lines.put(line);
    assert!(lines.take().is_none());
}

#[tokio::test]
async fn lines_to_a_former_address_and_more_than_are_kept_are_closed() {
    let lines = Lines::new(address(), 1);
    let (mut first, _first_engine) = pair().await;
    let (mut second, _second_engine) = pair().await;
    (first.address, second.address) = (lines.address(), lines.address());
    lines.put(first);
    lines.put(second);
    let line = lines.take().expect("one is kept");
    assert!(lines.take().is_none(), "and one only");
    lines.move_to(address());
    lines.put(line);
    assert!(lines.take().is_none());
}

#[tokio::test]
async fn an_answer_that_comes_before_the_request_was_read_counts() {
    let (mut line, mut engine) = pair().await;
    line.send(VecDeque::from([Bytes::from(vec![0; 64 << 20])]));
    engine.write_all(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n").await.unwrap();
    assert_eq!(head(&mut line).await.unwrap().status, StatusCode::PAYLOAD_TOO_LARGE);
    assert!(!line.is_reusable());
}
