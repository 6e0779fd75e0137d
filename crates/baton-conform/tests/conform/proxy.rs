//! Between the suite and a replica's control and KV addresses: passes frames on, and makes something of them wrong.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use baton_wire::migration::{ControlFrame, KvFrame, Opener, Sealer, handshake::Hello};
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

/// What becomes of what a target says to its source, the first of its kind on the connection or one behind so many of them.
pub(crate) type KvChange = fn(KvFrame, u32) -> Option<KvFrame>;

/// What a replica that is wrong does with what it hears, and with what it says.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mutant {
    pub(crate) hears: Change,
    pub(crate) says: Change,
    pub(crate) says_to_sources: KvChange,
}

/// Where sources are sent, and where the replica takes them.
#[derive(Clone)]
struct Kv {
    address: String,
    replica: Arc<Mutex<Option<String>>>,
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
        let (listener, sources) = (TcpListener::bind("127.0.0.1:0").await.unwrap(), TcpListener::bind("127.0.0.1:0").await.unwrap());
        let address = listener.local_addr().unwrap().to_string();
        let kv = Kv { address: sources.local_addr().unwrap().to_string(), replica: Arc::default() };
        let task = tokio::spawn(async move {
            loop {
                tokio::select! {
                    accepted = listener.accept() => {
                        let there = TcpStream::connect(&replica).await.unwrap();
                        tokio::spawn(pass(accepted.unwrap().0, there, kv.clone(), mutant));
                    }
                    accepted = sources.accept() => {
                        let there = kv.replica.lock().unwrap().clone().expect("a source was told of it by a hello");
                        let there = TcpStream::connect(there).await.unwrap();
                        tokio::spawn(pass_source(accepted.unwrap().0, there, mutant.says_to_sources));
                    }
                }
            }
        });
        Self { address, task }
    }
}

/// The end of one side is the end of the other.
async fn pass(dialer: TcpStream, replica: TcpStream, kv: Kv, mutant: Mutant) -> std::io::Result<()> {
    for stream in [&dialer, &replica] {
        stream.set_nodelay(true).unwrap();
    }
    let ((mut from_dialer, mut to_dialer), (mut from_replica, mut to_replica)) = (dialer.into_split(), replica.into_split());
    to_replica.write_all(&hello(&mut from_dialer).await?).await?;
    let theirs = Hello::from_body(&hello(&mut from_replica).await?[4..]).unwrap();
    kv.replica.lock().unwrap().clone_from(&theirs.kv_address);
    to_dialer.write_all(&Hello { kv_address: Some(kv.address), ..theirs }.to_bytes()).await?;
    tokio::select! {
        ended = frames(from_dialer, to_replica, mutant.hears) => ended,
        ended = frames(from_replica, to_dialer, mutant.says) => ended,
    }
}

async fn pass_source(source: TcpStream, replica: TcpStream, change: KvChange) -> std::io::Result<()> {
    for stream in [&source, &replica] {
        stream.set_nodelay(true).unwrap();
    }
    let ((mut from_source, mut to_source), (mut from_replica, mut to_replica)) = (source.into_split(), replica.into_split());
    let brings = async { tokio::io::copy(&mut from_source, &mut to_replica).await.map(drop) };
    let answers = async {
        to_source.write_all(&hello(&mut from_replica).await?).await?;
        let mut said = BTreeMap::new();
        pass_frames(from_replica, to_source, |kind, body, sealer, out| {
            let before: &mut u32 = said.entry(kind).or_default();
            if let Some(frame) = change(KvFrame::decode(kind, body).unwrap(), *before) {
                frame.seal(sealer, out);
            }
            *before += 1;
        })
        .await
    };
    tokio::select! {
        ended = brings => ended,
        ended = answers => ended,
    }
}

/// With its length.
async fn hello(from: &mut OwnedReadHalf) -> std::io::Result<Vec<u8>> {
    let mut length = [0; 4];
    from.read_exact(&mut length).await?;
    let mut hello = length.to_vec();
    hello.resize(4 + u32::from_le_bytes(length) as usize, 0);
    from.read_exact(&mut hello[4..]).await?;
    Ok(hello)
}

async fn frames(from: OwnedReadHalf, to: OwnedWriteHalf, change: Change) -> std::io::Result<()> {
    pass_frames(from, to, |kind, body, sealer, out| {
        if let Some(frame) = change(ControlFrame::decode(kind, body).unwrap()) {
            frame.seal(sealer, out);
        }
    })
    .await
}

/// `pass` seals what is to become of a frame.
async fn pass_frames(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut pass: impl FnMut(u16, &[u8], &mut Sealer, &mut Vec<u8>),
) -> std::io::Result<()> {
    let (mut opener, mut sealer) = (Opener::new(None), Sealer::new(None));
    let mut buffer = Vec::new();
    loop {
        let mut sealed = Vec::new();
        while let Some(opened) = opener.open(&buffer).unwrap() {
            pass(opened.kind, opened.body, &mut sealer, &mut sealed);
            let taken = opened.taken;
            buffer.drain(..taken);
        }
        to.write_all(&sealed).await?;
        if from.read_buf(&mut buffer).await? == 0 {
            return Ok(());
        }
    }
}
