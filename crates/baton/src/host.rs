//! What the binary needs of the machine it runs on: sockets, signals, memory, and dying with a parent.

use std::{
    fs, io,
    net::{SocketAddr, TcpListener},
};

use anyhow::{Context, Result};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::oneshot,
};

use crate::cli::BadInput;

/// Free memory that is assumed where the system does not say.
const MEMORY_BYTES_ASSUMED: u64 = 2 << 30;

/// Listens there; an address that cannot be had is the caller's mistake, and `advice` says what to do about a port in use.
pub(crate) fn listen(address: SocketAddr, advice: &str) -> Result<TcpListener> {
    let listen = || {
        let listener = TcpListener::bind(address)?;
        // As an asynchronous runtime wants it.
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    listen().map_err(|error: io::Error| {
        let reason = if error.kind() == io::ErrorKind::AddrInUse {
            format!("port {} of {} is in use", address.port(), address.ip())
        } else {
            format!("cannot listen on {address}: {error}")
        };
        BadInput(format!("{reason}; {advice}")).into()
    })
}

/// The signals that ask a process to end.
pub(crate) struct StopSignals {
    interrupt: Signal,
    terminate: Signal,
}

impl StopSignals {
    pub(crate) fn new() -> Result<Self> {
        let new = || Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? });
        new().map_err(|error: io::Error| error).context("signals cannot be watched")
    }

    pub(crate) async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// The signal that asks a server to read its configuration again.
pub(crate) struct HangUps(Signal);

impl HangUps {
    pub(crate) fn new() -> Result<Self> {
        signal(SignalKind::hangup()).map(Self).context("signals cannot be watched")
    }

    pub(crate) async fn next(&mut self) {
        if self.0.recv().await.is_none() {
            std::future::pending::<()>().await;
        }
    }
}

/// Bytes that new processes can take without swapping.
pub(crate) fn memory_available() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.map_or(MEMORY_BYTES_ASSUMED, |kib| kib << 10)
}

/// Resolves when stdin ends, as it does when the process that holds its other end is gone, however it went.
pub(crate) fn parent_gone() -> Result<oneshot::Receiver<()>> {
    die_with_parent();
    let (sender, receiver) = oneshot::channel();
    let wait = move || {
        // Whatever the parent writes is ignored; an error counts as its end.
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        // Nobody listens any more when this process ends anyway.
        let _ = sender.send(());
    };
    std::thread::Builder::new().name("parent-watch".into()).spawn(wait).context("no thread to watch the parent with")?;
    Ok(receiver)
}

/// Linux kills this process when the thread that started it ends: sooner than stdin tells, and even in the middle of loading.
#[cfg(target_os = "linux")]
fn die_with_parent() {
    // SAFETY: this call takes its arguments by value and touches no memory of this process.
    let result = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    if result != 0 {
        tracing::debug!("the system does not end this process with its parent; the end of stdin will");
    }
}

#[cfg(not(target_os = "linux"))]
fn die_with_parent() {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_in_use_says_so() {
        let first = listen(([127, 0, 0, 1], 0).into(), "").unwrap();
        let error = listen(first.local_addr().unwrap(), "pass --port 0").unwrap_err();
        assert!(error.is::<BadInput>() && error.to_string().ends_with("is in use; pass --port 0"), "{error}");
    }

    #[test]
    fn some_memory_is_available() {
        assert!(memory_available() > 1 << 20);
    }
}
