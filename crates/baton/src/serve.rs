//! `baton serve`: a gateway in front of engines that run already.

use std::{fs, path::PathBuf, sync::Arc};

use anyhow::Result;
use baton_gateway::GatewayConfig;
use clap::Args;
use tokio::net::TcpListener;

use crate::{cli::BadInput, host, replica::read_tokenizer};

/// What `--print-config` prints: every option with its default.
const SKELETON: &str = include_str!("serve/config.toml");

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

pub(crate) fn run(args: &ServeArgs) -> Result<()> {
    let Some(path) = args.config.as_ref().filter(|_| !args.print_config) else {
        print_skeleton();
        return Ok(());
    };
    let text = fs::read_to_string(path)
        .map_err(|error| BadInput(format!("cannot read {}: {error}; `baton serve --print-config` shows what it holds", path.display())))?;
    let config = GatewayConfig::from_toml(&text).map_err(|error| BadInput(format!("{}: {error}", path.display())))?;
    serve(config, args.tokenizer.as_deref())
}

#[allow(clippy::print_stdout, reason = "the text is what was asked for")]
fn print_skeleton() {
    print!("{SKELETON}");
}

#[tokio::main]
async fn serve(config: GatewayConfig, tokenizer: Option<&str>) -> Result<()> {
    let tokenizer = tokenizer.map(read_tokenizer).transpose()?.map(Arc::new);
    let listener = TcpListener::from_std(host::listen(config.gateway.bind, "change [gateway] bind")?)?;
    let mut signals = host::StopSignals::new()?;
    announce(&listener)?;
    Ok(baton_gateway::serve(config, listener, tokenizer, async move { signals.next().await }).await?)
}

#[allow(clippy::print_stdout, reason = "who starts a gateway reads its address here")]
fn announce(listener: &TcpListener) -> Result<()> {
    println!("listening on http://{}", listener.local_addr()?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_configuration_is_valid_and_has_the_defaults() {
        let config = GatewayConfig::from_toml(SKELETON).unwrap();
        assert_eq!(config.engines.len(), 1);
        let default = GatewayConfig::default();
        assert_eq!(format!("{:?}", config.gateway), format!("{:?}", default.gateway));
        assert_eq!(format!("{:?}", config.policy), format!("{:?}", default.policy));
        assert_eq!(config.moves, default.moves);
    }
}
