//! `baton fleet`, `requests`, `moves`, `migrate`, `drain`, `undrain`: a gateway's admin API for people.

use std::{
    io::Write,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use clap::Args;
use http::Method;
use serde_json::{Value, json};

use crate::{bench::client::Client, cli::BadInput};

/// Between looks at a replica that drains.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// A move may copy gigabytes over a slow link.
const CALL_TIMEOUT: Duration = Duration::from_mins(3);

/// Which gateway.
#[derive(Debug, Args)]
pub(crate) struct GatewayArgs {
    /// The gateway's address
    #[arg(long, default_value = "http://127.0.0.1:8080")]
    url: String,
    /// Its admin key, where it has one
    #[arg(long, value_name = "KEY", env = "BATON_ADMIN_KEY", hide_env_values = true)]
    admin_key: Option<String>,
    /// Print the gateway's own JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct FleetArgs {
    #[command(flatten)]
    gateway: GatewayArgs,
}

#[derive(Debug, Args)]
pub(crate) struct MovesArgs {
    /// So many, newest first
    #[arg(long, default_value_t = 20)]
    limit: usize,
    #[command(flatten)]
    gateway: GatewayArgs,
}

#[derive(Debug, Args)]
pub(crate) struct MigrateArgs {
    /// The request's x-request-id, or the gateway's own number of it
    request: String,
    /// Name of the replica on which it is to go on
    #[arg(long, value_name = "REPLICA")]
    to: String,
    #[command(flatten)]
    gateway: GatewayArgs,
}

#[derive(Debug, Args)]
pub(crate) struct DrainArgs {
    /// Name of the replica
    replica: String,
    /// Come back when it is empty
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    gateway: GatewayArgs,
}

#[derive(Debug, Args)]
pub(crate) struct UndrainArgs {
    /// Name of the replica
    replica: String,
    #[command(flatten)]
    gateway: GatewayArgs,
}

#[tokio::main(flavor = "current_thread")]
pub(crate) async fn fleet(args: &FleetArgs, out: &mut impl Write) -> Result<()> {
    let fleet = args.gateway.call(Method::GET, "/baton/v1/fleet", None).await?;
    if args.gateway.json {
        return print(&fleet, out);
    }
    let rows = list(&fleet["replicas"]).iter().map(|replica| {
        let (drain, migration) = (&replica["drain"], &replica["migration"]);
        let state = if drain.is_null() {
            text(&replica["state"])
        } else if drain["emptied_ms"].is_null() {
            "draining".to_owned()
        } else {
            "drained".to_owned()
        };
        let moves = if migration.is_null() {
            "no"
        } else if migration["connected"] == true {
            "yes"
        } else {
            "unreachable"
        };
        let moves = moves.to_owned();
        let kv = format!("{}/{}", text(&replica["kv_blocks_free"]), text(&replica["kv_blocks_total"]));
        vec![
            text(&replica["id"]),
            text(&replica["engine"]),
            state,
            text(&replica["in_flight"]),
            ms(&replica["queue_ms"]),
            kv,
            moves,
            text(&replica["source"]),
            text(&replica["url"]),
        ]
    });
    table(&["REPLICA", "ENGINE", "STATE", "RUNNING", "QUEUE", "KV FREE", "MOVES", "SOURCE", "ADDRESS"], rows, out)?;
    Ok(writeln!(out, "policy {}, {} held", text(&fleet["policy"]), text(&fleet["held"]))?)
}

#[tokio::main(flavor = "current_thread")]
pub(crate) async fn requests(args: &FleetArgs, out: &mut impl Write) -> Result<()> {
    let requests = args.gateway.call(Method::GET, "/baton/v1/requests", None).await?;
    if args.gateway.json {
        return print(&requests, out);
    }
    let rows = list(&requests["requests"]).iter().map(|request| {
        let fields = ["x_request_id", "model", "replica", "state", "prompt_tokens", "output_tokens"];
        let mut row: Vec<String> = fields.iter().map(|field| text(&request[field])).collect();
        row.push(ms(&request["age_ms"]));
        row.push(if request["movable"] == true { "yes" } else { "no" }.to_owned());
        row
    });
    table(&["REQUEST", "MODEL", "REPLICA", "STATE", "PROMPT", "OUTPUT", "AGE", "MOVABLE"], rows, out)
}

#[tokio::main(flavor = "current_thread")]
pub(crate) async fn moves(args: &MovesArgs, out: &mut impl Write) -> Result<()> {
    let moves = args.gateway.call(Method::GET, &format!("/baton/v1/moves?limit={}", args.limit), None).await?;
    if args.gateway.json {
        return print(&moves, out);
    }
    for one in list(&moves["moves"]) {
        let why = one["why"].as_str().map(|why| format!(" ({why})")).unwrap_or_default();
        let gap = one["gap_ms"].as_f64().map(|gap| format!(", gap {gap:.1} ms")).unwrap_or_default();
        writeln!(
            out,
            "{}{why}, {} bytes sent, {} blocks held{gap}: {}",
            text(&one["outcome"]),
            text(&one["bytes_sent"]),
            text(&one["blocks_already_held"]),
            text(&one["reason"])
        )?;
    }
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
pub(crate) async fn migrate(args: &MigrateArgs, out: &mut impl Write) -> Result<()> {
    let path = format!("/baton/v1/requests/{}/migrate", segment(&args.request)?);
    let moved = args.gateway.call(Method::POST, &path, Some(json!({ "to": args.to }))).await?;
    if args.gateway.json {
        return print(&moved, out);
    }
    let (bytes, held) = (text(&moved["bytes_sent"]), text(&moved["blocks_already_held"]));
    Ok(writeln!(out, "moved to {}: {bytes} bytes sent, {held} blocks were there, gap {}", args.to, ms(&moved["gap_ms"]))?)
}

#[tokio::main(flavor = "current_thread")]
pub(crate) async fn drain(args: &DrainArgs, out: &mut impl Write) -> Result<()> {
    let path = format!("/baton/v1/replicas/{}/drain", segment(&args.replica)?);
    let mut status = args.gateway.call(Method::POST, &path, None).await?;
    if !args.gateway.json {
        let drain = &status["drain"];
        let stays = match drain["forecast_stays"].as_u64() {
            Some(stays) if stays > 0 => match drain["forecast_stays_ms"].as_f64() {
                Some(most) => format!(", {stays} stay until they end, in {most:.0} ms at most"),
                None => format!(", {stays} stay until they end"),
            },
            _ => String::new(),
        };
        match drain["forecast_ms"].as_f64() {
            Some(forecast) => writeln!(
                out,
                "{} drains: {} requests, {} to move; empty in about {forecast:.0} ms{stays}",
                args.replica,
                text(&status["in_flight"]),
                text(&drain["forecast_moves"])
            )?,
            None => writeln!(out, "{} drains: {} requests, which stay until they end", args.replica, text(&status["in_flight"]))?,
        }
        out.flush()?;
    }
    if args.wait {
        let begun = Instant::now();
        status = args.gateway.until_empty(&args.replica).await?;
        if !args.gateway.json {
            return Ok(writeln!(
                out,
                "{} is empty after {} ms",
                args.replica,
                emptied(&status).unwrap_or_else(|| begun.elapsed().as_secs_f64() * 1e3).round()
            )?);
        }
    }
    if args.gateway.json { print(&status, out) } else { Ok(()) }
}

#[tokio::main(flavor = "current_thread")]
pub(crate) async fn undrain(args: &UndrainArgs, out: &mut impl Write) -> Result<()> {
    let path = format!("/baton/v1/replicas/{}/undrain", segment(&args.replica)?);
    let status = args.gateway.call(Method::POST, &path, None).await?;
    if args.gateway.json {
        return print(&status, out);
    }
    Ok(writeln!(out, "{} takes requests again", args.replica)?)
}

fn emptied(replica: &Value) -> Option<f64> {
    replica["drain"]["emptied_ms"].as_f64()
}

impl GatewayArgs {
    async fn call(&self, method: Method, path: &str, body: Option<Value>) -> Result<Value> {
        Client::new(&self.url, self.admin_key.clone(), CALL_TIMEOUT)?.admin(method, path, body).await
    }

    /// The replica's row once nothing runs there any more.
    async fn until_empty(&self, name: &str) -> Result<Value> {
        loop {
            let fleet = self.call(Method::GET, "/baton/v1/fleet", None).await?;
            let replica = list(&fleet["replicas"]).iter().find(|replica| replica["id"] == name).cloned();
            let replica = replica.with_context(|| format!("{name} left the fleet while it drained"))?;
            if replica["drain"].is_null() {
                return Err(BadInput(format!("{name} was undrained meanwhile")).into());
            }
            if emptied(&replica).is_some() {
                return Ok(replica);
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

/// A name as part of a path.
fn segment(name: &str) -> Result<String> {
    if name.is_empty() {
        return Err(BadInput("an empty name; `baton fleet` and `baton requests` list them".into()).into());
    }
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    Ok(name.bytes().map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect())
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn text(value: &Value) -> String {
    if value.is_null() { "-".to_owned() } else { value.as_str().map_or_else(|| value.to_string(), str::to_owned) }
}

fn ms(value: &Value) -> String {
    value.as_f64().map_or_else(|| "-".to_owned(), |ms| format!("{ms:.0} ms"))
}

fn print(value: &Value, out: &mut impl Write) -> Result<()> {
    Ok(writeln!(out, "{}", serde_json::to_string_pretty(value)?)?)
}

fn table(head: &[&str], rows: impl Iterator<Item = Vec<String>>, out: &mut impl Write) -> Result<()> {
    let mut lines = vec![head.iter().map(|&title| title.to_owned()).collect::<Vec<_>>()];
    lines.extend(rows);
    let widths: Vec<usize> =
        (0..head.len()).map(|column| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0)).collect();
    for line in lines {
        let cells: Vec<String> = line.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}")).collect();
        writeln!(out, "{}", cells.join("  ").trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_written_as_parts_of_a_path() {
        assert_eq!(segment("req-1.a_b~").unwrap(), "req-1.a_b~");
        assert_eq!(segment("a/b?c é").unwrap(), "a%2Fb%3Fc%20%C3%A9");
        assert!(segment("").is_err());
    }

    #[test]
    fn columns_stand_under_their_titles() {
        let mut out = Vec::new();
        table(&["A", "LONG"], [vec!["wide".to_owned(), "1".to_owned()]].into_iter(), &mut out).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "A     LONG\nwide  1\n");
    }
}
