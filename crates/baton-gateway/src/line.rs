//! A kept-alive connection to an engine, driven by the task that uses it: no task, channel or lock stands between an engine's bytes
//! and its client. HTTP/1.1 as in RFC 9112; heads and chunk sizes are parsed by `httparse`.

use std::{
    collections::VecDeque,
    fmt::{self, Write as _},
    io::{self, IoSlice},
    ops::Deref,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use bytes::{Buf, Bytes};
use http::{HeaderValue, StatusCode, Uri};
use httparse::Status::{Complete, Partial};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Instant,
};
use tokio_rustls::rustls::ClientConfig;

use crate::{engine::BaseUrl, tls::Transport, trace::Trace};

/// Read from an engine at once, and the bound of a head.
const INPUT_BYTES: usize = 16 << 10;
const HEADERS_MAX: usize = 64;
/// Chooses who of several engines behind one address computes a request (vLLM's `get_data_parallel_rank`, SGLang's `DataParallelController`).
pub(crate) const RANK: &str = "x-data-parallel-rank";
/// Pieces of one write.
const SLICES: usize = 16;
/// How long an idle connection is kept; engines close theirs after 5 s (uvicorn) or more.
const IDLE_TIMEOUT: Duration = Duration::from_secs(4);

/// Why a connection gives no more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LineError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("what came is no HTTP/1.1 answer")]
    Malformed,
}

/// Where an engine is, with what every request to it says.
#[derive(Debug)]
pub(crate) struct Address {
    pub(crate) uri: Uri,
    /// In front of the engine's paths.
    prefix: String,
    /// Host, content type, the engine's own key and its rank.
    fixed_headers: String,
    /// With what it is spoken to over TLS.
    pub(crate) tls: Option<Arc<ClientConfig>>,
}

impl Address {
    pub(crate) fn new(url: &BaseUrl, key: Option<&str>, rank: Option<u32>, tls: Option<Arc<ClientConfig>>) -> Self {
        let mut fixed_headers = format!("host: {}\r\ncontent-type: application/json\r\n", url.authority());
        if let Some(key) = key {
            // The configuration's check let through only what a header may hold.
            write!(fixed_headers, "authorization: Bearer {key}\r\n").expect("a string takes it");
        }
        if let Some(rank) = rank {
            write!(fixed_headers, "{RANK}: {rank}\r\n").expect("a string takes it");
        }
        Self { uri: url.join("/"), prefix: url.prefix().to_owned(), fixed_headers, tls }
    }

    /// The head of a POST, with the lines of `trace`.
    pub(crate) fn head(&self, path: &str, request_id: &str, trace: Option<&Trace>, content_length: usize) -> Bytes {
        let Self { prefix, fixed_headers, .. } = self;
        let trace = trace.map(Trace::headers).unwrap_or_default();
        let mut head = String::with_capacity(fixed_headers.len() + prefix.len() + path.len() + request_id.len() + trace.len() + 80);
        write!(
            head,
            "POST {prefix}{path} HTTP/1.1\r\n{fixed_headers}x-request-id: {request_id}\r\n{trace}content-length: {content_length}\r\n\r\n"
        )
        .expect("a string takes it");
        head.into()
    }
}

/// What the head of an answer says, as far as anybody asks.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) status: StatusCode,
    pub(crate) content_type: Option<HeaderValue>,
    /// When an engine that refuses wants to be asked again.
    pub(crate) retry_after: Option<Duration>,
}

/// How the rest of a body is told from what follows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Framing {
    Length(u64),
    Chunked(Chunk),
    UntilClose,
    Over,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Chunk {
    Size,
    Data(u64),
    DataEnd,
    Trailer,
}

/// One connection. Holds at most [`INPUT_BYTES`] of an answer.
pub(crate) struct Line {
    stream: Transport,
    input: Box<[u8]>,
    /// `input[start..end]` was read and not used.
    start: usize,
    end: usize,
    /// Pieces of the request that are not sent.
    output: VecDeque<Bytes>,
    framing: Framing,
    keep_alive: bool,
    address: Arc<Address>,
    idle_since: Instant,
}

impl Line {
    pub(crate) fn new(stream: impl Into<Transport>, address: Arc<Address>) -> Self {
        Self {
            stream: stream.into(),
            input: vec![0; INPUT_BYTES].into(),
            start: 0,
            end: 0,
            output: VecDeque::new(),
            framing: Framing::Over,
            keep_alive: true,
            address,
            idle_since: Instant::now(),
        }
    }

    /// Takes the head and the pieces of a body to be sent.
    pub(crate) fn send(&mut self, request: VecDeque<Bytes>) {
        self.output = request;
    }

    /// Sends, and waits for the head of the answer. What an engine answers before it has read everything counts; the rest is not sent.
    pub(crate) fn poll_head(&mut self, context: &mut Context<'_>) -> Poll<Result<Head, LineError>> {
        let mut broken = match self.poll_output(context) {
            Poll::Ready(Err(error)) => Some(error),
            Poll::Ready(Ok(())) | Poll::Pending => None,
        };
        loop {
            match self.take_head()? {
                Some(head) if head.status.is_informational() => {}
                Some(head) => {
                    self.keep_alive &= self.output.is_empty();
                    return Poll::Ready(Ok(head));
                }
                None => match (self.poll_input(context), broken.take()) {
                    (Poll::Ready(Ok(0)) | Poll::Pending, Some(error)) | (Poll::Ready(Err(error)), _) => {
                        return Poll::Ready(Err(error.into()));
                    }
                    (Poll::Ready(Ok(0)), None) => return Poll::Ready(Err(io::Error::from(io::ErrorKind::UnexpectedEof).into())),
                    (Poll::Ready(Ok(_)), error) => broken = error,
                    (Poll::Pending, None) => return Poll::Pending,
                },
            }
        }
    }

    /// The next part of the answer's body, `None` after the last.
    pub(crate) fn poll_data(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<&[u8]>, LineError>> {
        loop {
            if let Some(length) = self.next_data()? {
                let start = self.start;
                self.start += length;
                return Poll::Ready(Ok(Some(&self.input[start..start + length])));
            }
            if self.framing == Framing::Over {
                return Poll::Ready(Ok(None));
            }
            if ready!(self.poll_input(context))? == 0 {
                if self.framing != Framing::UntilClose {
                    return Poll::Ready(Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()));
                }
                self.framing = Framing::Over;
                self.keep_alive = false;
            }
        }
    }

    /// Bytes of data at the start of the input, after what frames them; `None` when there are none.
    fn next_data(&mut self) -> Result<Option<usize>, LineError> {
        loop {
            let input = &self.input[self.start..self.end];
            let available = input.len() as u64;
            let (used, framing) = match self.framing {
                Framing::Length(0) => (0, Framing::Over),
                Framing::Chunked(Chunk::Data(0)) => (0, Framing::Chunked(Chunk::DataEnd)),
                Framing::Over => return Ok(None),
                _ if input.is_empty() => return Ok(None),
                Framing::UntilClose => return Ok(Some(input.len())),
                Framing::Length(left) => {
                    let taken = left.min(available);
                    self.framing = Framing::Length(left - taken);
                    return Ok(Some(taken as usize));
                }
                Framing::Chunked(Chunk::Data(left)) => {
                    let taken = left.min(available);
                    self.framing = Framing::Chunked(Chunk::Data(left - taken));
                    return Ok(Some(taken as usize));
                }
                Framing::Chunked(Chunk::DataEnd) => match input {
                    [b'\r', b'\n', ..] => (2, Framing::Chunked(Chunk::Size)),
                    [b'\r'] => return Ok(None),
                    _ => return Err(LineError::Malformed),
                },
                Framing::Chunked(Chunk::Size) => match httparse::parse_chunk_size(input).map_err(|_| LineError::Malformed)? {
                    Complete((used, 0)) => (used, Framing::Chunked(Chunk::Trailer)),
                    Complete((used, size)) => (used, Framing::Chunked(Chunk::Data(size))),
                    Partial => return Ok(None),
                },
                Framing::Chunked(Chunk::Trailer) => match input.iter().position(|&byte| byte == b'\n') {
                    Some(end) if input[..end].trim_ascii().is_empty() => (end + 1, Framing::Over),
                    Some(end) => (end + 1, Framing::Chunked(Chunk::Trailer)),
                    None => return Ok(None),
                },
            };
            self.start += used;
            self.framing = framing;
        }
    }

    fn take_head(&mut self) -> Result<Option<Head>, LineError> {
        let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
        let mut response = httparse::Response::new(&mut headers);
        let input = &self.input[self.start..self.end];
        let Complete(length) = response.parse(input).map_err(|_| LineError::Malformed)? else { return Ok(None) };
        let status = response.code.and_then(|code| StatusCode::from_u16(code).ok()).ok_or(LineError::Malformed)?;
        let value = |name: &str| response.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name)).map(|header| header.value);
        let has = |name, word: &str| value(name).is_some_and(|value| contains_word(value, word));
        self.keep_alive = response.version == Some(1) && !has("connection", "close");
        self.framing = if status.is_informational() || status == StatusCode::NO_CONTENT || status == StatusCode::NOT_MODIFIED {
            Framing::Over
        } else if has("transfer-encoding", "chunked") {
            Framing::Chunked(Chunk::Size)
        } else if let Some(length) = value("content-length") {
            let length = std::str::from_utf8(length).ok().and_then(|length| length.trim().parse().ok());
            Framing::Length(length.ok_or(LineError::Malformed)?)
        } else {
            Framing::UntilClose
        };
        let content_type = value("content-type").and_then(|value| HeaderValue::from_bytes(value).ok());
        let retry_after = if status.is_success() { None } else { value("retry-after").and_then(seconds) };
        self.start += length;
        Ok(Some(Head { status, content_type, retry_after }))
    }

    /// Reads once; 0 at the end of the stream.
    fn poll_input(&mut self, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.end == self.input.len() {
            if self.start == 0 {
                // A head or a chunk's size line without an end.
                return Poll::Ready(Err(io::ErrorKind::InvalidData.into()));
            }
            self.input.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let mut buffer = ReadBuf::new(&mut self.input[self.end..]);
        ready!(Pin::new(&mut self.stream).poll_read(context, &mut buffer))?;
        let read = buffer.filled().len();
        self.end += read;
        Poll::Ready(Ok(read))
    }

    fn poll_output(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.output.is_empty() {
            let mut slices = [IoSlice::new(&[]); SLICES];
            let count = slices.iter_mut().zip(&self.output).map(|(slice, piece)| *slice = IoSlice::new(piece)).count();
            let mut written = ready!(Pin::new(&mut self.stream).poll_write_vectored(context, &slices[..count]))?;
            while let Some(piece) = self.output.front_mut() {
                let taken = written.min(piece.len());
                piece.advance(taken);
                written -= taken;
                if !piece.is_empty() {
                    break;
                }
                self.output.pop_front();
            }
        }
        // TLS holds back what it has encrypted until it is asked.
        Pin::new(&mut self.stream).poll_flush(context)
    }

    /// Whether another request can follow.
    fn is_reusable(&self) -> bool {
        self.keep_alive && self.framing == Framing::Over && self.output.is_empty() && self.start == self.end
    }

    /// Whether the engine has neither closed it nor said something that nobody asked for.
    fn is_quiet(&mut self) -> bool {
        self.poll_input(&mut Context::from_waker(Waker::noop())).is_pending()
    }
}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Line").field("framing", &self.framing).field("keep_alive", &self.keep_alive).finish_non_exhaustive()
    }
}

/// `Retry-After` in seconds; a date says nothing here, since engines' clocks are their own.
fn seconds(value: &[u8]) -> Option<Duration> {
    std::str::from_utf8(value).ok()?.trim().parse().ok().map(Duration::from_secs)
}

fn contains_word(value: &[u8], word: &str) -> bool {
    value.split(|&byte| byte == b',').any(|part| part.trim_ascii().eq_ignore_ascii_case(word.as_bytes()))
}

/// The idle connections to one engine: at most `limit`, none idle for longer than [`IDLE_TIMEOUT`] as long as somebody looks.
#[derive(Debug)]
pub(crate) struct Lines {
    limit: usize,
    busy: AtomicU32,
    pool: Mutex<Pool>,
}

#[derive(Debug)]
struct Pool {
    address: Arc<Address>,
    /// The latest last.
    idle: VecDeque<Line>,
}

impl Lines {
    pub(crate) fn new(address: Address, limit: usize) -> Self {
        Self { limit, busy: AtomicU32::new(0), pool: Mutex::new(Pool { address: Arc::new(address), idle: VecDeque::new() }) }
    }

    /// The engine is elsewhere from now on.
    pub(crate) fn move_to(&self, address: Address) {
        *self.pool() = Pool { address: Arc::new(address), idle: VecDeque::new() };
    }

    pub(crate) fn address(&self) -> Arc<Address> {
        self.pool().address.clone()
    }

    /// Counts whoever talks to the engine until the guard is dropped.
    pub(crate) fn enter(self: &Arc<Self>) -> Busy {
        self.busy.fetch_add(1, Ordering::Relaxed);
        Busy(self.clone())
    }

    /// Attempts under way.
    pub(crate) fn busy(&self) -> u32 {
        self.busy.load(Ordering::Relaxed)
    }

    /// The connection used last, which is the least likely to be closed.
    pub(crate) fn take(&self) -> Option<Line> {
        let mut pool = self.pool();
        drop_expired(&mut pool.idle);
        while let Some(mut line) = pool.idle.pop_back() {
            if line.is_quiet() {
                return Some(line);
            }
        }
        None
    }

    /// Takes back a connection for the next request, where it can carry one.
    pub(crate) fn put(&self, mut line: Line) {
        let mut pool = self.pool();
        drop_expired(&mut pool.idle);
        if line.is_reusable() && Arc::ptr_eq(&line.address, &pool.address) && pool.idle.len() < self.limit {
            line.idle_since = Instant::now();
            pool.idle.push_back(line);
        }
    }

    /// Closes what has been idle for too long.
    pub(crate) fn prune(&self) {
        drop_expired(&mut self.pool().idle);
    }

    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An attempt under way at an engine.
#[derive(Debug)]
pub(crate) struct Busy(Arc<Lines>);

impl Deref for Busy {
    type Target = Arc<Lines>;

    fn deref(&self) -> &Arc<Lines> {
        &self.0
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.busy.fetch_sub(1, Ordering::Relaxed);
    }
}

fn drop_expired(idle: &mut VecDeque<Line>) {
    while idle.front().is_some_and(|line| line.idle_since.elapsed() >= IDLE_TIMEOUT) {
        idle.pop_front();
    }
}

#[cfg(test)]
mod tests;
