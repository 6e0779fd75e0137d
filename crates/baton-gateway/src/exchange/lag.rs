//! What is ready for the client and may not be seen yet.

use std::{collections::VecDeque, time::Duration};

use axum::body::Body;
use baton_units::Time;
use bytes::Bytes;
use http::Response;

/// Of an answer that is held back; beyond it nothing is read from the engine, and what comes later comes closer together.
const HELD_BYTES: usize = 64 << 10;

/// An answer in the order in which it came, each piece to be seen as much later as its first token.
#[derive(Debug)]
pub(super) struct Lag {
    /// Not known before the first token of an answer that may have to be held back.
    by: Option<Duration>,
    pieces: VecDeque<(Time, Piece)>,
    bytes: usize,
}

#[derive(Debug)]
enum Piece {
    Events(Bytes),
    Whole(Response<Body>),
}

impl Lag {
    pub(super) fn new(by: Option<Duration>) -> Self {
        Self { by, pieces: VecDeque::new(), bytes: 0 }
    }

    pub(super) fn set(&mut self, by: Duration) {
        self.by = Some(by);
    }

    /// No first token will come any more.
    pub(super) fn settle(&mut self) {
        self.by.get_or_insert(Duration::ZERO);
    }

    pub(super) fn push_events(&mut self, events: Bytes, now: Time) {
        self.bytes += events.len();
        self.pieces.push_back((now, Piece::Events(events)));
    }

    pub(super) fn push_whole(&mut self, whole: Response<Body>, now: Time) {
        self.pieces.push_back((now, Piece::Whole(whole)));
    }

    /// When the next piece may be seen; `None` where there is none.
    pub(super) fn due(&self) -> Option<Time> {
        let (came, _) = self.pieces.front()?;
        Some(self.by.map_or(Time::NEVER, |by| *came + by))
    }

    /// Nothing waits behind the next piece.
    pub(super) fn is_last(&self) -> bool {
        self.pieces.len() <= 1
    }

    pub(super) fn has_room(&self) -> bool {
        self.by.is_none() || self.bytes < HELD_BYTES
    }

    /// The next piece, if it is one response.
    pub(super) fn take_whole(&mut self) -> Option<Response<Body>> {
        match self.pieces.pop_front()? {
            (_, Piece::Whole(whole)) => Some(whole),
            (came, events @ Piece::Events(_)) => {
                self.pieces.push_front((came, events));
                None
            }
        }
    }

    /// The next piece of a stream.
    pub(super) fn take_events(&mut self) -> Option<Bytes> {
        match self.pieces.pop_front()? {
            (_, Piece::Events(events)) => {
                self.bytes -= events.len();
                Some(events)
            }
            // A stream has none.
            (_, Piece::Whole(_)) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_keep_their_distance_and_none_is_seen_before_the_first_token_is_judged() {
        let (mut lag, at) = (Lag::new(None), |ms: u64| Time::ZERO + Duration::from_millis(ms));
        assert_eq!(lag.due(), None);
        lag.push_events(Bytes::from_static(b"opening"), at(10));
        assert_eq!(lag.due(), Some(Time::NEVER));
        lag.set(Duration::from_millis(30));
        lag.push_events(Bytes::from_static(b"token"), at(12));
        assert_eq!((lag.take_whole().is_none(), lag.due(), lag.take_events()), (true, Some(at(40)), Some(Bytes::from_static(b"opening"))));
        assert_eq!((lag.due(), lag.take_events(), lag.due()), (Some(at(42)), Some(Bytes::from_static(b"token")), None));
        lag.push_whole(Response::new(Body::empty()), at(50));
        assert!(lag.due() == Some(at(80)) && lag.take_whole().is_some());
    }

    #[test]
    fn what_is_held_back_is_bounded_once_it_is_known_for_how_long() {
        let mut lag = Lag::new(None);
        lag.push_events(vec![0; HELD_BYTES].into(), Time::ZERO);
        assert!(lag.has_room(), "the first token is yet to come");
        lag.settle();
        assert!(!lag.has_room() && lag.due() == Some(Time::ZERO));
        lag.take_events();
        assert!(lag.has_room());
    }
}
