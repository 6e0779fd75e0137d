use axum::{body::Body, response::IntoResponse};
use bytes::Bytes;
use http::{HeaderValue, Response, header};

use crate::refusal::Refusal;

/// Events handed to the client's connection at once; when it takes no more, nothing is read from the engine.
const EVENTS_BYTES: usize = 16 << 10;

/// What is on its way to the client: one response, or the events of a stream that nobody has taken yet.
#[derive(Debug)]
pub(super) struct Outlet {
    stage: Stage,
    whole: Option<Response<Body>>,
    events: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Nothing was sent: any status is still possible.
    Open,
    Streaming,
    Answered,
}

impl Outlet {
    pub(super) fn new() -> Self {
        Self { stage: Stage::Open, whole: None, events: Vec::new() }
    }

    /// Nothing was sent yet.
    pub(super) fn is_open(&self) -> bool {
        self.stage == Stage::Open
    }

    /// Something waits to be taken.
    pub(super) fn has_output(&self) -> bool {
        self.whole.is_some() || !self.events.is_empty()
    }

    /// Enough waits to be taken before more is read.
    pub(super) fn is_full(&self) -> bool {
        self.whole.is_some() || self.events.len() >= EVENTS_BYTES
    }

    /// Where events are written to; the first one makes the answer a stream.
    pub(super) fn events(&mut self) -> &mut Vec<u8> {
        if self.is_open() {
            self.stage = Stage::Streaming;
        }
        &mut self.events
    }

    /// The one response of a request that is not streamed.
    pub(super) fn respond(&mut self, response: Response<Body>) {
        if self.is_open() {
            self.stage = Stage::Answered;
            self.whole = Some(response);
        }
    }

    /// An error as status while that is possible, else as the stream's last event.
    pub(super) fn fail(&mut self, refusal: &Refusal) {
        match self.stage {
            Stage::Open => self.respond(refusal.clone().into_response()),
            Stage::Streaming => self.events.extend_from_slice(&refusal.event()),
            Stage::Answered => {}
        }
    }

    pub(super) fn take_whole(&mut self) -> Option<Response<Body>> {
        self.whole.take()
    }

    /// The events that wait, if any do.
    pub(super) fn take_events(&mut self) -> Option<Bytes> {
        (!self.events.is_empty()).then(|| std::mem::take(&mut self.events).into())
    }
}

/// A stream's response; nginx and its kin would hold events back without the last header.
pub(super) fn stream_response(body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}
