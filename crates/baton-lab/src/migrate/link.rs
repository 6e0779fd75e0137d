use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};

/// So many bytes over loopback in pieces of a block, by two threads and plain sockets, until the last one is there.
pub(super) async fn copy(bytes: u64, block: u64) -> Result<Duration> {
    tokio::task::spawn_blocking(move || copy_blocking(bytes, block)).await?
}

fn copy_blocking(bytes: u64, block: u64) -> Result<Duration> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut sender = TcpStream::connect(listener.local_addr()?)?;
    sender.set_nodelay(true)?;
    let (mut receiver, _) = listener.accept()?;
    let (blocks, size) = (bytes / block, usize::try_from(block)?);
    let began = Instant::now();
    let sending = thread::spawn(move || -> std::io::Result<()> {
        let piece = vec![7; size];
        for _ in 0..blocks {
            sender.write_all(&piece)?;
        }
        Ok(())
    });
    let mut piece = vec![0; size];
    for _ in 0..blocks {
        receiver.read_exact(&mut piece)?;
    }
    let took = began.elapsed();
    sending.join().ok().context("the sender panicked")??;
    Ok(took)
}
