//! As little HTTP/1.1 as two ends need that are both ours, or nginx or Baton between them.

use std::{io, time::Instant};

use anyhow::{Context as _, Result, bail};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

const HEADERS_MAX: usize = 32;
const READ_BYTES: usize = 64 << 10;

/// A connection with what was read of it and not used yet.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

/// What stands in a message's head, as far as it matters here.
#[derive(Debug)]
struct Head {
    bytes: usize,
    content_length: usize,
    chunked: bool,
    /// Of a response.
    status: u16,
    /// Of a request.
    path: String,
}

/// A request that an engine got.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) path: String,
    pub(crate) body: Vec<u8>,
}

/// A whole response.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
    /// When bytes of the body came, read by read.
    pub(crate) read_at: Vec<Instant>,
}

impl Connection {
    pub(crate) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Self { stream, buffer: Vec::with_capacity(READ_BYTES) })
    }

    pub(crate) async fn open(address: &str) -> Result<Self> {
        let stream = TcpStream::connect(address).await.with_context(|| format!("no connection to {address}"))?;
        Ok(Self::new(stream)?)
    }

    /// The next request; `None` when the peer has closed.
    pub(crate) async fn request(&mut self) -> Result<Option<Request>> {
        let Some(head) = self.head(parse_request).await? else { return Ok(None) };
        if head.chunked {
            bail!("a request came in chunks: {}", head.path);
        }
        while self.buffer.len() < head.bytes + head.content_length {
            if self.read().await? == 0 {
                bail!("a request broke off");
            }
        }
        let rest = self.buffer.split_off(head.bytes + head.content_length);
        let mut body = std::mem::replace(&mut self.buffer, rest);
        body.drain(..head.bytes);
        Ok(Some(Request { path: head.path, body }))
    }

    pub(crate) async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes).await
    }

    /// Sends a request and reads the whole answer.
    pub(crate) async fn exchange(&mut self, request: &[u8]) -> Result<Response> {
        self.stream.write_all(request).await?;
        let head = self.head(parse_response).await?.context("the connection was closed before an answer")?;
        let mut read_at = Vec::new();
        loop {
            let body = &self.buffer[head.bytes..];
            if !body.is_empty() {
                read_at.push(Instant::now());
            }
            // Bodies here have no line end of two bytes in them, so this is the last chunk and nothing else.
            let whole = if head.chunked { body.ends_with(b"\r\n0\r\n\r\n") } else { body.len() >= head.content_length };
            if whole {
                let body = if head.chunked { dechunked(body)? } else { body.to_vec() };
                self.buffer.clear();
                return Ok(Response { status: head.status, body, read_at });
            }
            if self.read().await? == 0 {
                bail!("an answer broke off after {} bytes", self.buffer.len());
            }
        }
    }

    /// Sends a request and reads no more of the answer than its first bytes.
    pub(crate) async fn begin(&mut self, request: &[u8]) -> Result<()> {
        self.stream.write_all(request).await?;
        let mut first = [0; 64];
        if self.stream.read(&mut first).await? == 0 {
            bail!("the connection was closed before an answer");
        }
        Ok(())
    }

    async fn head(&mut self, parse: fn(&[u8]) -> Result<Option<Head>>) -> Result<Option<Head>> {
        loop {
            if let Some(head) = parse(&self.buffer)? {
                return Ok(Some(head));
            }
            if self.read().await? == 0 {
                return if self.buffer.is_empty() { Ok(None) } else { bail!("a head broke off") };
            }
        }
    }

    async fn read(&mut self) -> io::Result<usize> {
        self.buffer.reserve(READ_BYTES);
        self.stream.read_buf(&mut self.buffer).await
    }
}

/// What chunks hold.
fn dechunked(mut bytes: &[u8]) -> Result<Vec<u8>> {
    let mut body = Vec::with_capacity(bytes.len());
    loop {
        match httparse::parse_chunk_size(bytes) {
            Ok(httparse::Status::Complete((_, 0))) => return Ok(body),
            Ok(httparse::Status::Complete((start, size))) => {
                let end = start + size as usize;
                body.extend_from_slice(bytes.get(start..end).context("a chunk broke off")?);
                bytes = bytes.get(end + 2..).context("a chunk broke off")?;
            }
            Ok(httparse::Status::Partial) | Err(_) => bail!("no chunk where one should be"),
        }
    }
}

fn parse_request(bytes: &[u8]) -> Result<Option<Head>> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut request = httparse::Request::new(&mut headers);
    let httparse::Status::Complete(length) = request.parse(bytes)? else { return Ok(None) };
    let path = request.path.unwrap_or("/").to_owned();
    Ok(Some(head_of(length, 0, path, request.headers)))
}

fn parse_response(bytes: &[u8]) -> Result<Option<Head>> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut response = httparse::Response::new(&mut headers);
    let httparse::Status::Complete(length) = response.parse(bytes)? else { return Ok(None) };
    let status = response.code.unwrap_or(0);
    Ok(Some(head_of(length, status, String::new(), response.headers)))
}

fn head_of(bytes: usize, status: u16, path: String, headers: &[httparse::Header<'_>]) -> Head {
    let value = |name: &str| headers.iter().find(|header| header.name.eq_ignore_ascii_case(name)).map(|header| header.value);
    let content_length = value("content-length").and_then(|value| std::str::from_utf8(value).ok()?.trim().parse().ok()).unwrap_or(0);
    let chunked = value("transfer-encoding").is_some_and(|value| value.eq_ignore_ascii_case(b"chunked"));
    Head { bytes, content_length, chunked, status, path }
}
