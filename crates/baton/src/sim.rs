//! `baton sim`: what can be known of a fleet without one.

use std::{
    fs::File,
    io::{BufReader, Read as _, Seek as _, Write},
    path::{Path, PathBuf},
    str::FromStr,
};

use anyhow::Context as _;
use baton_trace::{Trace, TraceError, curve::hit_rate};
use baton_units::Blocks;
use clap::{Args, Subcommand};
use flate2::read::MultiGzDecoder;
use serde::Serialize;

use crate::cli::BadInput;

/// RFC 1952, section 2.3.1.
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

#[derive(Debug, Subcommand)]
pub(crate) enum SimCommand {
    /// Print how much of a trace's prompts one prefix cache would have held, by its size
    CacheCurve(CurveArgs),
}

#[derive(Debug, Args)]
pub(crate) struct CurveArgs {
    /// Trace that names its blocks, as Mooncake's or Bailian's JSON lines; it may be gzipped
    #[arg(long, value_name = "FILE")]
    trace: PathBuf,
    /// Sizes of the cache in blocks of the trace, such as 1000,4000,inf
    #[arg(long, value_delimiter = ',', required = true, value_name = "N,…")]
    blocks: Vec<Capacity>,
    /// Print a JSON array, of each size its blocks and its hit rate
    #[arg(long)]
    json: bool,
}

/// Blocks of a cache; `inf` for as many as there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Capacity(Option<Blocks>);

impl FromStr for Capacity {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "inf" {
            return Ok(Self(None));
        }
        let blocks = text.parse().ok().filter(|blocks| *blocks > 0);
        blocks.map(|blocks| Self(Some(Blocks(blocks)))).ok_or_else(|| "write a number of blocks above 0, or inf".to_owned())
    }
}

/// A number, or `inf` as it was typed.
#[derive(Serialize)]
#[serde(untagged)]
enum Size {
    Blocks(u32),
    All(&'static str),
}

#[derive(Serialize)]
struct Row {
    blocks: Size,
    hit_rate: f64,
}

pub(crate) fn run(command: &SimCommand, out: &mut impl Write) -> anyhow::Result<()> {
    match command {
        SimCommand::CacheCurve(args) => cache_curve(args, out),
    }
}

fn cache_curve(args: &CurveArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let trace = read_trace(&args.trace)?;
    let Some(size) = trace.block_size() else {
        let (path, format) = (args.trace.display(), trace.format());
        return Err(BadInput(format!(
            "{path}: {format}'s traces tell how long prompts are and not what they share; take one that names blocks, as Mooncake's"
        ))
        .into());
    };
    let rows = args.blocks.iter().map(|&Capacity(blocks)| Row {
        blocks: blocks.map_or(Size::All("inf"), |blocks| Size::Blocks(blocks.0)),
        hit_rate: hit_rate(&trace, blocks).expect("the trace names blocks"),
    });
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &rows.collect::<Vec<_>>())?;
        return Ok(writeln!(out)?);
    }
    writeln!(out, "{} requests, {} distinct blocks of {} tokens\n", trace.requests().len(), trace.distinct_blocks(), size.get())?;
    writeln!(out, "{:>12}  {:>8}", "blocks", "hit rate")?;
    for Row { blocks, hit_rate } in rows {
        let blocks = match blocks {
            Size::Blocks(blocks) => blocks.to_string(),
            Size::All(all) => all.to_owned(),
        };
        writeln!(out, "{blocks:>12}  {:>6.1} %", 100.0 * hit_rate)?;
    }
    Ok(())
}

/// A trace from a file, gzipped or not.
fn read_trace(path: &Path) -> anyhow::Result<Trace> {
    let in_file = |what: String| BadInput(format!("{}: {what}", path.display()));
    let mut file = File::open(path).map_err(|error| in_file(error.to_string()))?;
    let mut magic = [0; 2];
    let is_gzip = file.read_exact(&mut magic).is_ok() && magic == GZIP_MAGIC;
    file.rewind().with_context(|| path.display().to_string())?;
    let file = BufReader::new(file);
    let trace = if is_gzip { Trace::read(BufReader::new(MultiGzDecoder::new(file))) } else { Trace::read(file) };
    trace.map_err(|error| match error {
        TraceError::Io(error) => anyhow::Error::new(error).context(path.display().to_string()),
        TraceError::Empty | TraceError::UnknownFormat | TraceError::Line { .. } => in_file(error.to_string()).into(),
    })
}
