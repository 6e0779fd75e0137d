use std::{collections::VecDeque, time::Duration};

use axum::{body::Body, response::IntoResponse};
use bytes::Bytes;
use http::{HeaderValue, Response, header};
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};

use crate::{refusal::Refusal, stream_body::StreamBody};

/// Events on their way to a client before the engine's stream is left unread.
const EVENTS_AHEAD: usize = 16;

/// Where the answer goes: a response that is still open, or a stream and what its client has not taken yet.
#[derive(Debug)]
pub(super) struct Outlet {
    client: Client,
    /// Holds one event and the last ones while the client is behind, since nothing is read from the engine then.
    outbox: VecDeque<Bytes>,
}

#[derive(Debug)]
enum Client {
    /// Nothing was sent: any status is still possible.
    Waiting(oneshot::Sender<Response<Body>>),
    Streaming(mpsc::Sender<Bytes>),
    Done,
}

/// What a client does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stirring {
    Left,
    /// It has taken the oldest waiting event.
    Took,
}

impl Outlet {
    pub(super) fn new(tell: oneshot::Sender<Response<Body>>) -> Self {
        Self { client: Client::Waiting(tell), outbox: VecDeque::new() }
    }

    /// Nothing was sent yet.
    pub(super) fn is_open(&self) -> bool {
        matches!(self.client, Client::Waiting(_))
    }

    /// Events wait for the client.
    pub(super) fn is_blocked(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Waits until the client leaves, or takes an event that waits. Cancel-safe.
    pub(super) async fn stirring(&mut self) -> Stirring {
        match &mut self.client {
            Client::Waiting(tell) => tell.closed().await,
            Client::Streaming(events) if self.outbox.is_empty() => events.closed().await,
            Client::Streaming(events) => {
                if let Ok(permit) = events.reserve().await {
                    if let Some(event) = self.outbox.pop_front() {
                        permit.send(event);
                    }
                    return Stirring::Took;
                }
            }
            Client::Done => std::future::pending().await,
        }
        Stirring::Left
    }

    /// Sends an event, or keeps it while the client is behind; says whether it is.
    pub(super) fn send(&mut self, event: Bytes) -> bool {
        if self.is_open() {
            let (events, body) = mpsc::channel(EVENTS_AHEAD);
            self.respond(stream_response(StreamBody::new(body)));
            self.client = Client::Streaming(events);
        }
        let Client::Streaming(events) = &self.client else { return false };
        let behind = if self.outbox.is_empty() { events.try_send(event) } else { Err(mpsc::error::TrySendError::Full(event)) };
        // A closed channel is a client that left; whoever waits for it sees that next.
        if let Err(mpsc::error::TrySendError::Full(event)) = behind {
            self.outbox.push_back(event);
        }
        self.is_blocked()
    }

    /// The one response of a request that is not streamed.
    pub(super) fn respond(&mut self, response: Response<Body>) {
        if let Client::Waiting(tell) = std::mem::replace(&mut self.client, Client::Done) {
            // A client that has left takes no answer; its request is booked all the same.
            _ = tell.send(response);
        }
    }

    /// An error as status while that is possible, else as the stream's last event.
    pub(super) fn fail(&mut self, refusal: &Refusal) {
        match &self.client {
            Client::Waiting(_) => self.respond(refusal.clone().into_response()),
            Client::Streaming(_) => self.outbox.push_back(refusal.event()),
            Client::Done => {}
        }
    }

    /// The last events, each for as long as the client may take.
    pub(super) async fn flush(self, patience: Duration) {
        let Client::Streaming(events) = self.client else { return };
        for event in self.outbox {
            let sent = timeout(patience, events.send(event)).await;
            if !matches!(sent, Ok(Ok(()))) {
                return;
            }
        }
    }
}

fn stream_response(body: StreamBody) -> Response<Body> {
    let mut response = Response::new(Body::new(body));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // nginx and its kin would otherwise hold events back.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    #[tokio::test]
    async fn events_wait_in_order_for_a_client_that_is_behind() {
        let (tell, told) = oneshot::channel();
        let mut outlet = Outlet::new(tell);
        let events: Vec<Bytes> = (0u8..20).map(|number| Bytes::from(vec![number])).collect();
        let blocked: Vec<bool> = events.iter().map(|event| outlet.send(event.clone())).collect();
        assert_eq!(blocked.iter().filter(|blocked| !**blocked).count(), EVENTS_AHEAD);
        let body = told.await.unwrap().into_body();
        let reader = tokio::spawn(body.collect());
        while outlet.is_blocked() {
            assert_eq!(outlet.stirring().await, Stirring::Took);
        }
        outlet.fail(&Refusal::Draining);
        outlet.flush(Duration::from_mins(1)).await;
        let seen = reader.await.unwrap().unwrap().to_bytes();
        assert_eq!(seen[..20], events.concat());
        assert!(seen[20..].starts_with(b"data: {\"error\""));
    }

    #[tokio::test]
    async fn a_client_that_leaves_is_noticed_before_and_after_the_first_event() {
        let (tell, told) = oneshot::channel();
        let mut outlet = Outlet::new(tell);
        drop(told);
        assert_eq!(outlet.stirring().await, Stirring::Left);
        let (tell, told) = oneshot::channel();
        let mut outlet = Outlet::new(tell);
        outlet.send(Bytes::from_static(b"x"));
        drop(told.await.unwrap());
        assert_eq!(outlet.stirring().await, Stirring::Left);
    }
}
