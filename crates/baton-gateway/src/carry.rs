//! Requests that replicas run over control connections: the gateway's side of the migration protocol (`docs/migration-protocol.md`).
//!
//! The [`Desk`] owns who runs what; each [`link`] carries its messages to and from one life of one replica, and each exchange holds a
//! [`Run`] of its request's sequences. What moves, and why, is decided elsewhere.

mod copies;
mod desk;
pub(crate) mod link;
mod link_fit;
mod moves;
mod rounds;
mod run;

pub(crate) use copies::PrefixOrder;
pub(crate) use desk::{Desk, Effect, Link, Loss, NewSequence, NotMovable};
pub(crate) use moves::{MoveOutcome, MoveRecord};
pub(crate) use rounds::Rounds;
pub(crate) use run::{Run, RunEvent};
