//! `baton serve`: a gateway in front of engines that run already, and `baton check-config`. SIGHUP makes a gateway read its file again.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::Result;
use baton_gateway::{ConfigError, Gateway, GatewayConfig, Reloaded};
use clap::Args;
use tokio::net::TcpListener;

use crate::{cli::BadInput, host, replica::read_tokenizer};

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Configuration file; --print-config shows one
    #[arg(long, value_name = "FILE", required_unless_present = "print_config")]
    config: Option<PathBuf>,
    /// The served model's tokenizer, as a GGUF or tokenizer.json file or a folder; without it prompt lengths and shared prefixes are
    /// estimated from bytes
    #[arg(long, value_name = "PATH")]
    tokenizer: Option<String>,
    /// Print a configuration with every option and its default
    #[arg(long)]
    print_config: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// Configuration file
    #[arg(value_name = "FILE", required_unless_present = "reference")]
    config: Option<PathBuf>,
    /// Print the page that documents every option
    #[arg(long)]
    reference: bool,
}

pub(crate) fn run(args: &ServeArgs) -> Result<()> {
    let Some(path) = args.config.as_ref().filter(|_| !args.print_config) else {
        print(&baton_gateway::skeleton());
        return Ok(());
    };
    serve(path, load(path)?, args.tokenizer.as_deref())
}

fn load(path: &Path) -> Result<GatewayConfig, BadInput> {
    GatewayConfig::from_toml(&read(path)?).map_err(|error| BadInput(format!("{}: {error}", path.display())))
}

/// Tells every mistake, one a line.
pub(crate) fn check(args: &CheckArgs) -> Result<()> {
    let Some(path) = args.config.as_ref().filter(|_| !args.reference) else {
        print(&baton_gateway::reference());
        return Ok(());
    };
    let name = path.display();
    match GatewayConfig::from_toml(&read(path)?) {
        Ok(config) => {
            let sources = match config.discovery.len() {
                0 => String::new(),
                sources => format!(", {sources} sources of engines"),
            };
            print(&format!("{name}: {} engines{sources}, policy {}\n", config.engines.len(), config.policy.name));
        }
        Err(ConfigError::Faults(faults)) => {
            for fault in &faults {
                print(&format!("{name}: {fault}\n"));
            }
            return Err(BadInput(format!("{name}: mistakes to mend: {}", faults.len())).into());
        }
        Err(error @ (ConfigError::FleetKey(_) | ConfigError::Tls(_))) => return Err(BadInput(format!("{name}: {error}")).into()),
    }
    Ok(())
}

fn read(path: &Path) -> Result<String, BadInput> {
    let hint = "`baton serve --print-config` shows what it holds";
    fs::read_to_string(path).map_err(|error| BadInput(format!("cannot read {}: {error}; {hint}", path.display())))
}

#[allow(clippy::print_stdout, reason = "the text is what was asked for")]
fn print(text: &str) {
    print!("{text}");
}

#[tokio::main]
async fn serve(path: &Path, config: GatewayConfig, tokenizer: Option<&str>) -> Result<()> {
    let tokenizer = tokenizer.map(read_tokenizer).transpose()?.map(Arc::new);
    let listener = TcpListener::from_std(host::listen(config.gateway.bind, "change [gateway] bind")?)?;
    let mut signals = host::StopSignals::new()?;
    let mut hang_ups = host::HangUps::new()?;
    announce(&listener, if config.gateway.tls.is_some() { "https" } else { "http" })?;
    let gateway = Gateway::new(config, tokenizer)?;
    let served = gateway.serve(listener, async move { signals.next().await });
    let reloading = async {
        loop {
            hang_ups.next().await;
            reload(&gateway, path);
        }
    };
    tokio::select! {
        served = served => Ok(served?),
        () = reloading => Ok(()),
    }
}

/// A mistake in the file changes nothing.
fn reload(gateway: &Gateway, path: &Path) {
    match load(path).and_then(|config| gateway.reload(&config).map_err(|error| BadInput(error.to_string()))) {
        Ok(Reloaded { engines_started, engines_gone, at_next_start }) => {
            tracing::info!(engines_started, engines_gone, "the configuration was read again");
            if !at_next_start.is_empty() {
                tracing::warn!(options = at_next_start.join(", "), "these take effect when the gateway starts again");
            }
        }
        Err(error) => tracing::error!(%error, "the configuration is not taken; all goes on as before"),
    }
}

#[allow(clippy::print_stdout, reason = "who starts a gateway reads its address here")]
fn announce(listener: &TcpListener, scheme: &str) -> Result<()> {
    println!("listening on {scheme}://{}", listener.local_addr()?);
    Ok(())
}
