//! The gateway over real sockets, between a scripted engine and a client.

mod front_door;
mod streams;
mod support;
