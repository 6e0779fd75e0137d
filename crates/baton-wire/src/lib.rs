//! What crosses the wire: OpenAI requests and answers as a vLLM server writes them, server-sent events, KV events in msgpack, and a
//! replica's report of itself, and the migration protocol's frames.
//!
//! This crate turns bytes into types and types into bytes. It opens no socket, reads no clock, and decides nothing. Parsers take
//! bytes that a stranger may have sent: they give an error, never a panic, and their buffers are bounded.

pub mod kv_events;
pub mod migration;
pub mod openai;
pub mod replica;
pub mod sse;
