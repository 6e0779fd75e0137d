//! Takes a running request's KV to the replica that it moves to, while it goes on computing.

use std::{
    convert::Infallible,
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use baton_engine::KvBytes;
use baton_link::{Connection, ConnectionError, FrameReader, FrameWriter, Identity};
use baton_migration::{Place, RequestName, Tag};
use baton_units::{BlockSize, Blocks, RequestId, Tokens};
use baton_wire::migration::{BlockHeader, FrameError, HeldBlocks, KvFrame, KvPlan, MoveTo, OutputEntry, Refusal, handshake::Role};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinSet,
};
use xxhash_rust::xxh3::xxh3_64;

use super::{
    actor::{FromSource, Input, Sent},
    travel,
};
use crate::driver::{EngineHandle, Exported, MoveCommand, Progress, Rest, Slice};

/// So few full blocks are left to the time when the request stands still (Llumnix, OSDI'24, section 4.2), and so few bytes, since its client
/// waits for them: below a millisecond of one core and of a fast link.
const LAST_BLOCKS: u64 = 16;
const LAST_BYTES: u64 = 1 << 20;
/// A request that fills blocks as fast as they are copied is frozen after so many rounds.
const ROUNDS_MAX: u32 = 3;
/// Bytes and blocks that are checked, where that was not done when they were filled, which leaves them in the processor's cache, and then
/// written at once.
const BATCH_BYTES: u64 = 1 << 20;
const BATCH_BLOCKS: usize = 128;
/// That the copy goes on is told as often.
pub(super) const ADVANCE_TOLD: Duration = Duration::from_secs(1);
/// A target that is not there, and has not introduced itself, within this is not waited for.
const CONNECT_PATIENCE: Duration = Duration::from_secs(5);

/// One attempt to move one request away.
pub(super) struct KvSource {
    pub(super) identity: Arc<Identity>,
    pub(super) engine: EngineHandle,
    pub(super) inputs: mpsc::Sender<Input>,
    pub(super) request: RequestName,
    pub(super) attempt: Tag,
    pub(super) here: Place,
    pub(super) target: Place,
    pub(super) to: MoveTo,
    pub(super) run: RequestId,
}

/// The request stands still, with these entries.
pub(super) struct Frozen(pub(super) Vec<OutputEntry>);

#[derive(Debug, thiserror::Error)]
pub(super) enum CopyError {
    #[error("there is no connection to the target: {0}")]
    Unreachable(ConnectionError),
    #[error("{0} answered, and {1} was to be reached")]
    Elsewhere(Place, Place),
    #[error("the connection broke: {0}")]
    Connection(#[from] ConnectionError),
    #[error("the target refuses: {0}")]
    Refused(Refusal),
    #[error("the target gave up: {0}")]
    Aborted(String),
    #[error("the target sent {0:?}, which is not its turn")]
    Unexpected(Box<KvFrame>),
    #[error("the request was preempted while it was copied")]
    Preempted,
    #[error("the request has ended")]
    Ended,
}

impl CopyError {
    pub(super) fn unexpected(frame: KvFrame) -> Self {
        Self::Unexpected(Box::new(frame))
    }
}

impl From<std::io::Error> for CopyError {
    fn from(error: std::io::Error) -> Self {
        Self::Connection(error.into())
    }
}

/// The connection to the target.
pub(super) struct Link {
    pub(super) writer: FrameWriter,
    frames: mpsc::Receiver<Result<KvFrame, ConnectionError>>,
    /// Bytes of blocks that the target takes now.
    pub(super) credit: u64,
    /// Bytes of blocks that went out.
    pub(super) sent: u64,
    /// When it was told last that some did.
    told: Instant,
    _reader: JoinSet<()>,
}

impl KvSource {
    /// Copies, and holds the connection until it is dropped: its end would tell the target that the request does not come.
    pub(super) async fn run(self, frozen: oneshot::Receiver<Frozen>) {
        let Err(why) = self.copy(frozen).await;
        tracing::info!(request = %self.request, attempt = %self.attempt, target = %self.target, %why, "a move ends before it is committed");
        self.tell(FromSource::Failed { why: why.to_string() }).await;
    }

    async fn copy(&self, frozen: oneshot::Receiver<Frozen>) -> Result<Infallible, CopyError> {
        let mut link = Link::connect(&self.identity, self.target, &self.to).await?;
        let KvSource { request, attempt, here: source, target, .. } = *self;
        link.writer.kv(&KvFrame::Open { request, attempt, source, target, nonce: self.to.nonce }).await?;
        let exported = self.export().await?;
        let preemptions = exported.progress.preemptions;
        link.writer.kv(&KvFrame::Prepare(self.plan(&exported))).await?;
        let answer = link.receive().await?;
        let KvFrame::Have { blocks: HeldBlocks { held }, credit } = answer else { return Err(CopyError::unexpected(answer)) };
        link.credit = credit;
        let (mut next, mut rounds) = (Blocks(held), 0);
        while rounds < ROUNDS_MAX {
            let full = self.progress(preemptions).await?.computed.full_blocks(self.block_size());
            if full <= next + self.last_blocks() {
                break;
            }
            self.send(&mut link, next.0..full.0, preemptions).await?;
            next = full;
            rounds += 1;
        }
        let (rest, left) = oneshot::channel();
        self.tell(FromSource::Ready { next: next.0, rest }).await;
        let Rest { mut exported, at, blocks } = left.await.ok().flatten().ok_or(CopyError::Ended)?;
        if exported.progress.preemptions != preemptions {
            return Err(CopyError::Preempted);
        }
        self.send_blocks(&mut link, next.0, exported.progress.computed, &blocks).await?;
        let Frozen(entries) = frozen.await.map_err(|_| CopyError::Ended)?;
        if exported.state.output != travel::token_ids(&entries) {
            return Err(CopyError::Preempted);
        }
        // Its spans end where it goes out, which is not before the last blocks have.
        exported.state.history = exported.state.history.aged(self.engine.now().since(at));
        link.writer.kv(&KvFrame::State { entries, plan: self.plan(&exported) }).await?;
        let entries = loop {
            let frame = link.receive().await?;
            if let KvFrame::Prepared { entries } = frame {
                break entries;
            }
            if !matches!(frame, KvFrame::Credit { .. }) {
                return Err(CopyError::unexpected(frame));
            }
        };
        self.tell(FromSource::Prepared { entries, sent: Sent { bytes: link.sent, held, rounds } }).await;
        // From here on the gateway decides, whatever becomes of the connection.
        std::future::pending().await
    }

    fn plan(&self, exported: &Exported) -> KvPlan {
        KvPlan {
            tokens: exported.state.tokens(),
            keys: exported.keys.clone(),
            blocks: exported.progress.computed.to_blocks(self.block_size()).0,
            request: travel::to_wire(&exported.state).to_bytes(),
        }
    }

    /// Sends full blocks of the request. While some go out the engine is asked for the next ones.
    async fn send(&self, link: &mut Link, blocks: Range<u32>, preemptions: u32) -> Result<(), CopyError> {
        let mut next = blocks.start;
        let read = |from| if from < blocks.end { self.read(from..blocks.end).map(Some) } else { Ok(None) };
        let mut copied = read(next)?;
        while let Some(answer) = copied {
            let slice = answer.await.ok().flatten().ok_or(CopyError::Ended)?;
            if slice.progress.preemptions != preemptions || slice.blocks.is_empty() {
                return Err(CopyError::Preempted);
            }
            let first = next;
            next += slice.blocks.len() as u32;
            copied = read(next)?;
            self.send_blocks(link, first, slice.progress.computed, &slice.blocks).await?;
        }
        Ok(())
    }

    /// Sends these, from number `first` on, of a request whose first `computed` tokens have KV.
    async fn send_blocks(&self, link: &mut Link, first: u32, computed: Tokens, blocks: &[Arc<dyn KvBytes>]) -> Result<(), CopyError> {
        let mut gone = 0;
        while gone < blocks.len() {
            gone += link.send(first + gone as u32, computed, self.block_size(), &blocks[gone..]).await?;
            if link.told.elapsed() >= ADVANCE_TOLD {
                link.told = Instant::now();
                self.tell(FromSource::Advanced).await;
            }
        }
        Ok(())
    }

    /// The engine hands out what it may of these between two steps.
    fn read(&self, blocks: Range<u32>) -> Result<oneshot::Receiver<Option<Slice>>, CopyError> {
        let (sender, answer) = oneshot::channel();
        self.order(MoveCommand::Read(self.run, blocks, sender))?;
        Ok(answer)
    }

    async fn export(&self) -> Result<Exported, CopyError> {
        let (sender, answer) = oneshot::channel();
        self.order(MoveCommand::Export(self.run, sender))?;
        answer.await.ok().flatten().ok_or(CopyError::Ended)
    }

    async fn progress(&self, preemptions: u32) -> Result<Progress, CopyError> {
        let progress = self.read(0..0)?.await.ok().flatten().ok_or(CopyError::Ended)?.progress;
        if progress.preemptions == preemptions { Ok(progress) } else { Err(CopyError::Preempted) }
    }

    fn order(&self, command: MoveCommand) -> Result<(), CopyError> {
        self.engine.move_sequence(command).map_err(|_| CopyError::Ended)
    }

    async fn tell(&self, news: FromSource) {
        let _ = self.inputs.send(Input::Source { request: self.request, attempt: self.attempt, news }).await;
    }

    fn last_blocks(&self) -> Blocks {
        let block_bytes = self.identity.hello.kv_layout.as_ref().map_or(0, |layout| layout.block_bytes);
        Blocks(LAST_BYTES.checked_div(block_bytes).unwrap_or(0).min(LAST_BLOCKS) as u32)
    }

    fn block_size(&self) -> BlockSize {
        travel::block_size(&self.identity.hello)
    }
}

impl Link {
    pub(super) async fn connect(identity: &Identity, target: Place, to: &MoveTo) -> Result<Self, CopyError> {
        let dialed = baton_link::dial(&to.kv_address, identity, Role::Source, CONNECT_PATIENCE).await;
        let Connection { hello, reader, writer } = dialed.map_err(CopyError::Unreachable)?;
        let place = hello.place();
        if place != target {
            return Err(CopyError::Elsewhere(place, target));
        }
        let (sender, frames) = mpsc::channel(16);
        let mut tasks = JoinSet::new();
        tasks.spawn(read(reader, sender));
        Ok(Self { writer, frames, credit: 0, sent: 0, told: Instant::now(), _reader: tasks })
    }

    /// Sends the first of these in one write, when the target takes them: blocks from number `first` on, of which the first `computed` tokens
    /// of all have KV. Gives back how many went.
    pub(super) async fn send(
        &mut self,
        first: u32,
        computed: Tokens,
        size: BlockSize,
        blocks: &[Arc<dyn KvBytes>],
    ) -> Result<usize, CopyError> {
        let Some(next) = blocks.first() else { return Ok(0) };
        self.wait_for_credit(next.bytes().len() as u64).await?;
        let (mut batch, mut taken) = (Vec::new(), 0);
        for (index, block) in (first..).zip(blocks).take(BATCH_BLOCKS) {
            let (bytes, before) = (block.bytes(), Blocks(index).to_tokens(size));
            let with = taken + bytes.len() as u64;
            if !batch.is_empty() && with > BATCH_BYTES.min(self.credit) {
                break;
            }
            let tokens = (computed - before).min(Tokens(size.get())).0;
            let checksum = block.checksum().unwrap_or_else(|| xxh3_64(bytes));
            batch.push((BlockHeader { index, tokens, checksum }, bytes));
            taken = with;
        }
        self.writer.blocks(&batch).await?;
        self.credit -= taken;
        self.sent += taken;
        Ok(batch.len())
    }

    pub(super) async fn receive(&mut self) -> Result<KvFrame, CopyError> {
        let ended = || ConnectionError::Io(std::io::ErrorKind::UnexpectedEof.into());
        let frame = self.frames.recv().await.ok_or_else(ended)??;
        if let KvFrame::Refuse(refusal) = &frame {
            return Err(CopyError::Refused(refusal.clone()));
        }
        if let KvFrame::Abort { why } = &frame {
            return Err(CopyError::Aborted(why.clone()));
        }
        Ok(frame)
    }

    async fn wait_for_credit(&mut self, bytes: u64) -> Result<(), CopyError> {
        while self.credit < bytes {
            let frame = self.receive().await?;
            let KvFrame::Credit { bytes } = frame else { return Err(CopyError::unexpected(frame)) };
            self.credit = self.credit.saturating_add(bytes);
        }
        Ok(())
    }
}

async fn read(mut reader: FrameReader, frames: mpsc::Sender<Result<KvFrame, ConnectionError>>) {
    loop {
        let frame = match reader.read().await {
            Ok(raw) => KvFrame::decode(raw.kind, &raw.body).map_err(|error: FrameError| error.into()),
            Err(error) => Err(error),
        };
        let ended = frame.is_err();
        if frames.send(frame).await.is_err() || ended {
            return;
        }
    }
}
