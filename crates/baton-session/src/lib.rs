//! One request's life at the gateway, as a state machine.
//!
//! A [`Session`] is placed, runs on one replica at a time, is retried elsewhere while its client has seen nothing of the output,
//! and ends exactly once. It owns the register that says who may add to the client's stream: an owner is a replica under an epoch,
//! and an output index is delivered once, in order, only under the current epoch.
//!
//! The shell carries facts in ([`Session::handle`], [`Session::offer`]) and actions out ([`Session::poll`]), and calls again when
//! [`Session::poll_timeout`] has passed. Pure: no sockets and no clock; bytes of the stream never come here, only their indices.
//! Nothing here chooses a replica (`baton-policy` does) or knows a wire format (`baton-wire` does). An attempt that is lost after the
//! first delivered token is gone on with elsewhere where the shell can do that ([`Session::set_resumable`]); else the request ends, and its
//! client is told.

mod fault;
mod register;
mod session;

pub use fault::Fault;
pub use register::{Epoch, Offer, Owner};
pub use session::{Action, Answer, End, Input, Limits, Session, SessionConfig};
