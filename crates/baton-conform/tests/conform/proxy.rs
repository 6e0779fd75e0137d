//! Between the suite and a replica's control address: passes frames on, and makes something of them wrong.

use baton_wire::migration::{ControlFrame, Opener, Sealer};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    task::JoinHandle,
};

/// What becomes of a frame; `None` loses it.
pub(crate) type Change = fn(ControlFrame) -> Option<ControlFrame>;

/// What a replica that is wrong does with what it hears, and with what it says.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mutant {
    pub(crate) hears: Change,
    pub(crate) says: Change,
}

pub(crate) struct Proxy {
    pub(crate) address: String,
    task: JoinHandle<()>,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Proxy {
    pub(crate) async fn before(replica: String, mutant: Mutant) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let task = tokio::spawn(async move {
            loop {
                let (dialer, _) = listener.accept().await.unwrap();
                let there = TcpStream::connect(&replica).await.unwrap();
                tokio::spawn(pass(dialer, there, mutant));
            }
        });
        Self { address, task }
    }
}

/// The end of one side is the end of the other.
async fn pass(dialer: TcpStream, replica: TcpStream, mutant: Mutant) {
    for stream in [&dialer, &replica] {
        stream.set_nodelay(true).unwrap();
    }
    let ((from_dialer, to_dialer), (from_replica, to_replica)) = (dialer.into_split(), replica.into_split());
    tokio::select! {
        _ = frames(from_dialer, to_replica, mutant.hears) => {}
        _ = frames(from_replica, to_dialer, mutant.says) => {}
    }
}

async fn frames(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, change: Change) -> std::io::Result<()> {
    let mut length = [0; 4];
    from.read_exact(&mut length).await?;
    let mut hello = vec![0; u32::from_le_bytes(length) as usize];
    from.read_exact(&mut hello).await?;
    to.write_all(&[&length[..], &hello].concat()).await?;
    let (mut opener, mut sealer) = (Opener::new(None), Sealer::new(None));
    let mut buffer = Vec::new();
    loop {
        while let Some(opened) = opener.open(&buffer).unwrap() {
            let (taken, frame) = (opened.taken, ControlFrame::decode(opened.kind, opened.body).unwrap());
            buffer.drain(..taken);
            if let Some(frame) = change(frame) {
                let mut sealed = Vec::new();
                frame.seal(&mut sealer, &mut sealed);
                to.write_all(&sealed).await?;
            }
        }
        if from.read_buf(&mut buffer).await? == 0 {
            return Ok(());
        }
    }
}
