//! One replica process: started, watched, started again.

use std::{process::Stdio, time::Duration};

use anyhow::{Context, Result, bail};
use baton_gateway::BaseUrl;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, ChildStdin, Command},
    sync::watch,
    time::{Instant, sleep, timeout},
};

use crate::{cli::BadInput, replica::EngineKind};

/// Loading weights from a slow disk, with room.
const START_TIMEOUT: Duration = Duration::from_mins(5);
/// For a replica whose stdin was closed; it has nothing left to do.
const STOP_TIMEOUT: Duration = Duration::from_secs(3);
/// A replica that lived this long died of something new.
const LONG_LIFE: Duration = Duration::from_secs(10);
const BACK_OFF: Duration = Duration::from_millis(100);
const BACK_OFF_MAX: Duration = Duration::from_secs(5);

/// How to start a replica.
#[derive(Debug, Clone)]
pub(super) struct Recipe {
    executable: std::path::PathBuf,
    args: Vec<String>,
}

impl Recipe {
    pub(super) fn new(engine: EngineKind, flags: &[&str]) -> Result<Self> {
        let executable = std::env::current_exe().context("this program cannot find itself to start replicas")?;
        let fixed = ["replica", "--with-parent", "--port", "0", "--migration-port", "0", "--engine", engine.as_str()];
        Ok(Self { executable, args: fixed.iter().chain(flags).map(|&arg| arg.to_owned()).collect() })
    }

    fn command(&self, name: &str) -> Command {
        let mut command = Command::new(&self.executable);
        command.args(&self.args).args(["--id", name]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        // Ctrl-C reaches a whole process group; replicas must outlive it to finish what runs.
        command.process_group(0);
        command
    }
}

/// A process that answers at `url`. Dropping it kills it.
#[derive(Debug)]
struct Process {
    child: Child,
    /// Its end is what tells the replica that its parent is gone.
    stdin: Option<ChildStdin>,
    url: BaseUrl,
    started: Instant,
}

/// A replica that is kept up.
#[derive(Debug)]
pub(super) struct Supervised {
    recipe: Recipe,
    name: String,
    process: Process,
}

impl Supervised {
    /// Starts the replica and waits until it listens.
    pub(super) async fn start(recipe: &Recipe, index: u32) -> Result<Self> {
        let name = format!("r{index}");
        let process = Process::start(recipe, &name).await?;
        Ok(Self { recipe: recipe.clone(), name, process })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn url(&self) -> &BaseUrl {
        &self.process.url
    }

    /// Starts the replica again whenever it ends, at once the first time and with growing pauses when it keeps dying, until `stopped`
    /// says so; then ends it.
    pub(super) async fn keep_up(mut self, up: impl Fn(BaseUrl), down: impl Fn(), mut stopped: watch::Receiver<bool>) {
        let mut deaths = 0;
        loop {
            let ended = tokio::select! {
                ended = self.process.child.wait() => ended,
                _ = stopped.wait_for(|stopped| *stopped) => return self.process.stop().await,
            };
            down();
            let how = ended.map_or_else(|error| error.to_string(), |status| status.to_string());
            eprintln!("replica {} ended ({how}); starting it again", self.name);
            if self.process.started.elapsed() >= LONG_LIFE {
                deaths = 0;
            }
            let restarted = tokio::select! {
                restarted = self.restart(&mut deaths) => restarted,
                _ = stopped.wait_for(|stopped| *stopped) => return,
            };
            up(restarted);
        }
    }

    async fn restart(&mut self, deaths: &mut u32) -> BaseUrl {
        loop {
            sleep(back_off(*deaths)).await;
            *deaths += 1;
            match Process::start(&self.recipe, &self.name).await {
                Ok(process) => {
                    self.process = process;
                    return self.process.url.clone();
                }
                Err(error) => eprintln!("{error:#}; trying again in {}", humantime::format_duration(back_off(*deaths))),
            }
        }
    }
}

impl Process {
    async fn start(recipe: &Recipe, name: &str) -> Result<Self> {
        let mut child = recipe.command(name).spawn().with_context(|| format!("cannot start {}", recipe.executable.display()))?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().context("a child without stdout")?;
        let mut lines = BufReader::new(stdout).lines();
        let line = match timeout(START_TIMEOUT, lines.next_line()).await {
            Ok(line) => line.ok().flatten(),
            Err(_) => bail!("replica {name} was not ready after {}", humantime::format_duration(START_TIMEOUT)),
        };
        let Some(url) = line.as_deref().and_then(|line| line.strip_prefix("listening on ")) else {
            let status = child.wait().await;
            let bad_input = status.as_ref().is_ok_and(|status| status.code() == Some(crate::BAD_INPUT.into()));
            let how = status.map_or_else(|error| error.to_string(), |status| status.to_string());
            let message = format!("replica {name} did not start ({how}); its own message stands above");
            // What a replica was started with is what was typed here.
            if bad_input {
                return Err(BadInput(message).into());
            }
            bail!(message);
        };
        Ok(Self { child, stdin, url: url.parse()?, started: Instant::now() })
    }

    async fn stop(mut self) {
        drop(self.stdin.take());
        if timeout(STOP_TIMEOUT, self.child.wait()).await.is_err() {
            // Dropping the child kills it.
            tracing::warn!("a replica did not end by itself");
        }
    }
}

/// Pause before the start after so many deaths in a row: none at first.
fn back_off(deaths: u32) -> Duration {
    match deaths.checked_sub(1) {
        None => Duration::ZERO,
        Some(more) => BACK_OFF.saturating_mul(1 << more.min(16)).min(BACK_OFF_MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replica_that_keeps_dying_is_started_ever_less_often() {
        let pauses: Vec<u128> = [0, 1, 2, 3, 6, 7, u32::MAX].map(|deaths| back_off(deaths).as_millis()).to_vec();
        assert_eq!(pauses, [0, 100, 200, 400, 3200, 5000, 5000]);
    }
}
