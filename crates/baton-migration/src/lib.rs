//! Who computes a running request, and who may add to its client's stream, while it moves between replicas.
//!
//! Three parties: the gateway owns the [`Register`] of a request, and each replica that has anything of it a [`Seat`]. They are state
//! machines: a message or a fact goes in, messages and work for the engine come out; they hold no socket, no clock and no KV. Both
//! repeat what is unanswered ([`Register::unanswered`], [`Seat::unanswered`]) as often as their shell likes, and any message may be
//! lost, repeated, late or out of order: what is right never depends on a timer or on knowing who is dead, only on tags.
//!
//! [`Owners`] is all requests of one life of a gateway, with their timers and what is thought of the replicas; [`Seats`] all that one life of
//! a replica holds.
//!
//! *Tags.* Epochs and attempts come from one counter of the request at its gateway. An attempt to move that is committed makes the
//! target the owner under an epoch of the attempt's number. Whatever a replica holds has one tag: its epoch when it runs or is frozen,
//! its attempt while it is prepared. A higher tag replaces a lower one, and `Stop { upto }` ends all up to it.
//!
//! *Ranges.* Output indices are shared out among epochs: a superseded epoch still supplies those below the index at which it was
//! closed, the current one any. So each index is delivered once, in order, and was computed from exactly the ones before it.
//! The finish is an entry of its own at the next index, so that a finish that races a move needs no case.
//!
//! *Copies of prefixes.* What a replica has cached can be copied to another one without a request ([`PrefixOutput`]). A copy has a name
//! like a request's, and no owner: it ends at each side by itself, and the same messages stop it.

mod message;
mod owners;
mod ownership;
mod prefixes;
mod register;
mod seat;
mod seats;
mod timing;
mod watch;

#[cfg(test)]
mod checker;

pub use message::{Entry, LostClass, Phase, Place, Tag, ToGateway, ToPeer, ToSeat};
pub use owners::{Owners, OwnersInput, OwnersOutput};
pub use ownership::{Ownership, OwnershipInput};
pub use prefixes::{PREFIX_COPIES_MAX, PrefixOutput};
pub use register::{Register, RegisterOutput};
pub use seat::{Holding, Kv, Seat, SeatOutput, Work};
pub use seats::{GatewayName, RequestName, Seats, SeatsInput, SeatsOutput};
pub use timing::Timing;
pub use watch::{Beat, Suspicion, Watch};
