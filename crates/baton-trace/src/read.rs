use std::{
    collections::HashMap,
    io::{self, BufRead, Read},
};

use baton_units::{BlockSize, Time, Tokens};
use serde::Deserialize;

use crate::{Format, Trace, TraceRequest};

/// First columns of Azure's files.
const AZURE_HEADER: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";

/// Why a trace cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error("the trace cannot be read: {0}")]
    Io(#[from] io::Error),
    #[error("the trace is empty")]
    Empty,
    #[error(
        "the first line is of no known form; traces are Mooncake's or Bailian's JSON lines, or Azure's CSV with the header {AZURE_HEADER}"
    )]
    UnknownFormat,
    #[error("line {line}: {what}")]
    Line { line: u64, what: String },
}

impl Trace {
    /// Reads a trace of any [`Format`], which its first line tells.
    pub fn read(mut source: impl BufRead) -> Result<Self, TraceError> {
        let mut first = String::new();
        while first.trim().is_empty() {
            first.clear();
            if source.read_line(&mut first)? == 0 {
                return Err(TraceError::Empty);
            }
        }
        let whole = first.as_bytes().chain(source);
        if first.trim_start().starts_with('{') {
            return read_json_lines(io::BufReader::new(whole));
        }
        if first.trim_start_matches('\u{feff}').starts_with(AZURE_HEADER) { read_azure(whole) } else { Err(TraceError::UnknownFormat) }
    }
}

/// A line of Mooncake's or Bailian's.
#[derive(Deserialize)]
struct JsonLine {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
    chat_id: Option<i64>,
    parent_chat_id: Option<i64>,
}

/// Small numbers for large names, in order of first use.
#[derive(Default)]
struct Names<T>(HashMap<T, u32>);

impl<T: std::hash::Hash + Eq> Names<T> {
    fn name(&mut self, of: T) -> u32 {
        let next = self.0.len() as u32;
        *self.0.entry(of).or_insert(next)
    }
}

fn read_json_lines(source: impl BufRead) -> Result<Trace, TraceError> {
    let (mut format, mut names, mut roots) = (None, Names::default(), HashMap::new());
    let (mut requests, mut blocks) = (Vec::new(), Vec::new());
    for (place, text) in source.lines().enumerate() {
        let (text, line) = (text?, place as u64 + 1);
        if text.trim().is_empty() {
            continue;
        }
        let bad = |what: String| TraceError::Line { line, what };
        let read: JsonLine = serde_json::from_str(&text).map_err(|error| bad(error.to_string()))?;
        let format = *format.get_or_insert(if read.chat_id.is_some() { Format::Bailian } else { Format::Mooncake });
        let size = format.block_size().expect("both forms name blocks");
        check_blocks(&read, size).map_err(bad)?;
        let start = blocks.len();
        blocks.extend(read.hash_ids.iter().map(|&id| names.name(id)));
        // A conversation is the first of its chats.
        let session = read.chat_id.map(|chat| {
            let root = read.parent_chat_id.and_then(|parent| roots.get(&parent).copied());
            let next = roots.len() as u32;
            *roots.entry(chat).or_insert(root.unwrap_or(next))
        });
        requests.push(TraceRequest {
            at: Time::from_ms(if format == Format::Bailian { read.timestamp * 1e3 } else { read.timestamp }),
            prompt: Tokens(read.input_length),
            output: Tokens(read.output_length),
            session,
            blocks: start..blocks.len(),
        });
    }
    let distinct = names.0.len() as u32;
    Ok(in_order(Trace { format: format.ok_or(TraceError::Empty)?, requests, blocks, distinct }))
}

fn check_blocks(read: &JsonLine, size: BlockSize) -> Result<(), String> {
    let (named, expected) = (read.hash_ids.len(), Tokens(read.input_length).to_blocks(size).0 as usize);
    if named == expected {
        return Ok(());
    }
    Err(format!("{named} hash_ids for {} tokens, which fill {expected} blocks of {}", read.input_length, size.get()))
}

/// A line of Azure's; later years have more columns.
#[derive(Deserialize)]
struct AzureLine {
    #[serde(rename = "TIMESTAMP")]
    at: String,
    #[serde(rename = "ContextTokens")]
    prompt: u32,
    #[serde(rename = "GeneratedTokens")]
    output: u32,
}

fn read_azure(source: impl Read) -> Result<Trace, TraceError> {
    let mut reader = csv::ReaderBuilder::new().flexible(true).from_reader(source);
    let mut requests = Vec::new();
    for read in reader.deserialize() {
        let read: AzureLine = read.map_err(|error| match error.position() {
            Some(place) if !error.is_io_error() => TraceError::Line { line: place.line(), what: error.to_string() },
            _ => TraceError::Io(io::Error::other(error)),
        })?;
        let at = humantime::parse_rfc3339_weak(&read.at).map_err(|error| TraceError::Line {
            // The header is the first.
            line: requests.len() as u64 + 2,
            what: format!("TIMESTAMP {:?}: {error}", read.at),
        })?;
        let since_1970 = at.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        requests.push(TraceRequest {
            at: Time::ZERO + since_1970,
            prompt: Tokens(read.prompt),
            output: Tokens(read.output),
            session: None,
            blocks: 0..0,
        });
    }
    if requests.is_empty() {
        return Err(TraceError::Empty);
    }
    Ok(in_order(Trace { format: Format::Azure, requests, blocks: Vec::new(), distinct: 0 }))
}

/// By time, which counts from the first.
fn in_order(mut trace: Trace) -> Trace {
    trace.requests.sort_by_key(|request| request.at);
    let first = trace.requests.first().map_or(Time::ZERO, |request| request.at);
    for request in &mut trace.requests {
        request.at = Time::ZERO + request.at.since(first);
    }
    trace
}

#[cfg(test)]
mod tests;
