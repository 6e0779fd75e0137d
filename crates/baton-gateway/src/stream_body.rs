use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame};
use tokio::sync::mpsc;

/// Events as a response body. Dropped by the server when its client leaves, which closes the channel.
#[derive(Debug)]
pub(crate) struct StreamBody {
    events: mpsc::Receiver<Bytes>,
}

impl StreamBody {
    pub(crate) fn new(events: mpsc::Receiver<Bytes>) -> Self {
        Self { events }
    }
}

impl Body for StreamBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.events.poll_recv(context).map(|event| event.map(|event| Ok(Frame::data(event))))
    }
}
