//! The command line: what can be typed, and how a mistake in it is told.

use std::{ffi::OsString, fmt, str::FromStr, time::Duration};

use clap::{Parser, Subcommand, error::ErrorKind};

use crate::{bench::BenchArgs, model_pull::PullArgs};

/// Routes requests for a fleet of LLM replicas to where they are cheapest.
#[derive(Debug, Parser)]
#[command(name = "baton", version, about, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start a fleet on this machine: replicas, and a gateway in front of them
    Up(crate::up::UpArgs),
    /// Run a gateway in front of engines that run already
    Serve(crate::serve::ServeArgs),
    /// Check a gateway's configuration file, and name the line of each mistake
    CheckConfig(crate::serve::CheckArgs),
    /// Read a client's key from stdin and print its hash, as `[[tenants]]` take it
    HashKey,
    /// Run one replica
    Replica(crate::replica::ReplicaArgs),
    /// Print what prefill, decode, KV and migration cost
    Price(crate::price::PriceArgs),
    /// Load an OpenAI address and measure latency and prefix hits
    Bench(BenchArgs),
    /// Answer questions about a fleet without one
    Sim {
        #[command(subcommand)]
        command: crate::sim::SimCommand,
    },
    /// List the replicas of a running gateway
    Fleet(crate::operate::FleetArgs),
    /// List its requests
    Requests(crate::operate::FleetArgs),
    /// List the latest moves of running requests between replicas
    Moves(crate::operate::MovesArgs),
    /// Move a running request to another replica; its client does not notice
    Migrate(crate::operate::MigrateArgs),
    /// Empty a replica: new requests go elsewhere, running ones move away
    Drain(crate::operate::DrainArgs),
    /// Send a drained replica requests again
    Undrain(crate::operate::UndrainArgs),
    /// Fetch model weights
    Model {
        #[command(subcommand)]
        command: ModelCommand,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum ModelCommand {
    /// Fetch a model's weights into the cache and print their path
    Pull(PullArgs),
}

/// A mistake of the person at the keyboard: one line that says what to do, exit code 2.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct BadInput(pub(crate) String);

/// What was typed, or the text to print with its exit code.
pub(crate) fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Cli, Answer> {
    Cli::try_parse_from(args).map_err(|error| {
        let text = error.to_string();
        if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
            return Answer::Text(text);
        }
        // Nothing typed after a command that needs a subcommand: its help is the answer, on stderr.
        if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
            return Answer::Usage(text);
        }
        Answer::BadInput(BadInput(one_line(&text)))
    })
}

/// What `parse` gives when there is no command to run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// For stdout, exit code 0.
    Text(String),
    /// For stderr, exit code 2.
    Usage(String),
    BadInput(BadInput),
}

/// clap's report up to its usage paragraph, as one line that ends with where to look.
fn one_line(report: &str) -> String {
    let (problem, usage) = report.split_once("\nUsage: ").unwrap_or((report, ""));
    let problem = problem.split("\nFor more information").next().unwrap_or_default();
    let problem = problem.replace("\n\n  tip: ", "; ");
    let words: Vec<&str> = problem.split_whitespace().collect();
    let problem = words.join(" ");
    let problem = problem.strip_prefix("error: ").unwrap_or(&problem);
    let command: Vec<&str> = usage.split_whitespace().take_while(|word| !word.starts_with(['[', '<', '-'])).collect();
    let command = if command.is_empty() { "baton".to_owned() } else { command.join(" ") };
    format!("{problem} (see `{command} --help`)")
}

/// Bytes as typed: `512MiB`, `2GiB`, `1.5GB`, or a plain number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size(pub(crate) u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "kib" | "k" => 1 << 10,
            "mib" | "m" => 1 << 20,
            "gib" | "g" => 1 << 30,
            "tib" | "t" => 1 << 40,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            _ => return Err(format!("unknown unit {unit:?}; write for example 512MiB or 2GiB")),
        };
        let bytes = number.parse::<f64>().ok().map(|number| number * factor as f64).filter(|bytes| *bytes >= 1.0 && *bytes < 1e18);
        bytes.map(|bytes| Self(bytes as u64)).ok_or_else(|| format!("{text:?} is not a size; write for example 512MiB or 2GiB"))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0 as f64;
        match self.0 {
            0..0x10_0000 => write!(f, "{:.0} KiB", bytes / 1024.0),
            0x10_0000..0x4000_0000 => write!(f, "{:.0} MiB", bytes / 1024.0 / 1024.0),
            _ => write!(f, "{:.1} GiB", bytes / 1024.0 / 1024.0 / 1024.0),
        }
    }
}

/// A span as typed: `200ms`, `2s`, `1m30s`.
pub(crate) fn span(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|error| format!("{error}; write for example 200ms or 2s"))
}

/// A span as typed, above zero.
pub(crate) fn some_span(text: &str) -> Result<Duration, String> {
    let span = span(text)?;
    if span.is_zero() { Err("must be above 0; write for example 200ms or 2s".to_owned()) } else { Ok(span) }
}

/// A finite number above zero.
pub(crate) fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| number.is_finite() && *number > 0.0);
    number.ok_or_else(|| "must be a number above 0".to_owned())
}

/// A finite number, zero or above.
pub(crate) fn not_negative(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| "must be a number, 0 or above".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bad_input(line: &str) -> String {
        match parse(line.split(' ').map(Into::into)) {
            Err(Answer::BadInput(BadInput(message))) => message,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn a_mistake_is_told_in_one_line() {
        for line in ["baton bench --rate x", "baton bench --wat", "baton nope", "baton bench --workload nope"] {
            let message = bad_input(line);
            assert!(!message.contains('\n') && message.contains("--help"), "{message}");
        }
        assert!(bad_input("baton bench --rate 0").contains("--rate"));
    }

    #[test]
    fn what_belongs_to_migration_is_not_asked_for_without_it() {
        for flag in ["--fleet-key-file k", "--migration-kv-port 1", "--migration-host 127.0.0.1"] {
            assert!(bad_input(&format!("baton replica {flag}")).contains("--migration-port"), "{flag}");
        }
        let parses = |line: &str| parse(line.split(' ').map(Into::into)).is_ok();
        assert!(parses("baton replica") && parses("baton replica --migration-port 0 --fleet-key-file k"));
    }

    #[test]
    fn help_and_version_are_no_mistakes() {
        assert!(matches!(parse(["baton".into(), "--version".into()]), Err(Answer::Text(_))));
        assert!(matches!(parse(["baton".into(), "bench".into(), "--help".into()]), Err(Answer::Text(text)) if text.contains("--workload")));
        assert!(matches!(parse(["baton".into()]), Err(Answer::Usage(_))));
    }

    #[test]
    fn sizes_and_spans_have_units() {
        assert_eq!("512MiB".parse(), Ok(Size(512 << 20)));
        assert_eq!("1.5GB".parse(), Ok(Size(1_500_000_000)));
        assert_eq!("77".parse(), Ok(Size(77)));
        for bad in ["", "MiB", "1XB", "-1", "0", "1e400"] {
            assert!(bad.parse::<Size>().is_err(), "{bad}");
        }
        assert_eq!(Size(3 << 29).to_string(), "1.5 GiB");
        assert_eq!(span("200ms"), Ok(Duration::from_millis(200)));
        assert!(span("0s").is_ok() && some_span("0s").is_err());
        assert!(span("5").is_err() && positive("nan").is_err() && positive("0").is_err());
    }
}
