//! `baton`: one binary for a fleet of LLM replicas.
//!
//! It reads the command line, finds weights, starts and watches processes, and loads servers; routing, serving and arithmetic live
//! in the crates below it.

mod bench;
mod cli;
mod hash_key;
mod host;
mod model_pull;
mod operate;
mod price;
mod replica;
mod serve;
mod sim;
mod up;

use std::{
    io::{self, IsTerminal as _, Write as _},
    process::ExitCode,
};

use tracing_subscriber::{EnvFilter, filter::LevelFilter};

use crate::cli::{Answer, BadInput, Command, ModelCommand};

/// For what was typed wrongly, as opposed to what went wrong.
const BAD_INPUT: u8 = 2;

/// A request makes and frees many small pieces of memory; this takes a tenth off what a request costs.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let cli = match cli::parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(answer) => return reply(answer),
    };
    log_to_stderr();
    let done = match cli.command {
        Command::Up(args) => up::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::CheckConfig(args) => serve::check(&args),
        Command::HashKey => hash_key::run(&mut io::stdin().lock(), &mut io::stdout().lock()),
        Command::Replica(args) => replica::run(&args),
        Command::Price(args) => price::run(&args, &mut io::stdout().lock()),
        Command::Bench(args) => bench::run(&args),
        Command::Sim { command } => sim::run(&command, &mut io::stdout().lock()),
        Command::Fleet(args) => operate::fleet(&args, &mut io::stdout().lock()),
        Command::Requests(args) => operate::requests(&args, &mut io::stdout().lock()),
        Command::Moves(args) => operate::moves(&args, &mut io::stdout().lock()),
        Command::Migrate(args) => operate::migrate(&args, &mut io::stdout().lock()),
        Command::Drain(args) => operate::drain(&args, &mut io::stdout().lock()),
        Command::Undrain(args) => operate::undrain(&args, &mut io::stdout().lock()),
        Command::Model { command: ModelCommand::Pull(args) } => model_pull::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        // As in `baton price | head`: whoever read has seen enough.
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format!("{error:#}"));
            if error.is::<BadInput>() { ExitCode::from(BAD_INPUT) } else { ExitCode::FAILURE }
        }
    }
}

fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<io::Error>().map(io::Error::kind);
    io.or_else(|| error.downcast_ref::<serde_json::Error>()?.io_error_kind()) == Some(io::ErrorKind::BrokenPipe)
}

fn reply(answer: Answer) -> ExitCode {
    match answer {
        Answer::Text(text) => {
            // Nobody is left to tell when stdout is closed.
            let _ = io::stdout().write_all(text.as_bytes());
            ExitCode::SUCCESS
        }
        Answer::Usage(text) => {
            eprint!("{text}");
            ExitCode::from(BAD_INPUT)
        }
        Answer::BadInput(error) => {
            complain(&error.to_string());
            ExitCode::from(BAD_INPUT)
        }
    }
}

/// One line, whatever the error's own text has.
fn complain(message: &str) {
    let words: Vec<&str> = message.split_whitespace().collect();
    eprintln!("baton: {}", words.join(" "));
}

/// `BATON_LOG` takes filters such as `info` or `baton_gateway=debug`.
fn log_to_stderr() {
    let filter = EnvFilter::builder().with_default_directive(LevelFilter::WARN.into()).with_env_var("BATON_LOG").from_env_lossy();
    // kube tells of each failed call as an error. A source of engines that cannot look says so itself, once.
    let asked_for = std::env::var("BATON_LOG").is_ok_and(|wanted| wanted.contains("kube"));
    let filter = if asked_for { filter } else { filter.add_directive("kube_client=off".parse().expect("it is a directive")) };
    // Colours are for eyes; in a log file they are noise that breaks searches.
    let ansi = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_ansi(ansi).init();
}
