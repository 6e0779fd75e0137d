//! Takes in the KV of a request that comes from another replica.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use baton_engine::{MoveRefusal, SequenceState};
use baton_link::{Connection, ConnectionError, FrameReader, FrameWriter, Identity, Listener, Raw, Stream};
use baton_migration::{Place, RequestName, Tag};
use baton_units::{Blocks, Tokens};
use baton_wire::migration::{
    BlockHeader, HeldBlocks, KvFrame, KvPlan, OutputEntry, Refusal, RunRequest,
    handshake::{Hello, Role},
};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinSet,
};

use super::{
    actor::{FromTarget, Input},
    fault::{self, Point},
    kv_source::ADVANCE_TOLD,
    prefix_target::PrefixTarget,
    travel,
};
use crate::driver::{EngineHandle, MoveCommand, Room, Storage, WINDOW, Written};

/// Sources, and strangers that have not introduced themselves; more wait.
const CONNECTIONS_MAX: usize = 16;
/// Bytes of blocks that the engine is given at a time, at least, while more come: each time wakes its thread, and the source for the bytes that
/// may come then.
const WRITTEN_AT_ONCE: u64 = WINDOW / 4;
/// A source that says nothing of what it brings for so long is not waited for.
const PATIENCE: Duration = Duration::from_secs(10);

/// What the seat wants to be sent. When nothing more can come, the connection ends.
pub(super) enum TargetOrder {
    Prepared { entries: u32 },
}

/// What a source announced.
#[derive(Debug, Clone, Copy)]
pub(super) struct Opening {
    pub(super) request: RequestName,
    pub(super) attempt: Tag,
    pub(super) source: Place,
    pub(super) target: Place,
    pub(super) nonce: [u8; 16],
}

#[derive(Debug, thiserror::Error)]
pub(super) enum TakeError {
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    #[error("refused: {0}")]
    Refused(Refusal),
    #[error("the source said nothing of what it brings within {PATIENCE:?}")]
    Silent,
    #[error("the source gave up: {0}")]
    Aborted(String),
    #[error("{0}")]
    Protocol(String),
    #[error("the replica ends")]
    Gone,
}

impl From<std::io::Error> for TakeError {
    fn from(error: std::io::Error) -> Self {
        Self::Connection(error.into())
    }
}

/// Takes sources in for ever.
pub(super) async fn listen(listener: Listener, identity: Arc<Identity>, engine: EngineHandle, inputs: mpsc::Sender<Input>) {
    let serve_next = |stream| {
        let (identity, engine, inputs) = (Arc::clone(&identity), engine.clone(), inputs.clone());
        async move { serve(stream, &identity, engine, inputs).await }
    };
    baton_link::listen(listener, "KV", CONNECTIONS_MAX, serve_next).await;
}

async fn serve(stream: Stream, identity: &Identity, engine: EngineHandle, inputs: mpsc::Sender<Input>) -> Result<(), TakeError> {
    let Connection { hello, mut reader, mut writer } = identity.accept(stream, Role::Source).await?;
    let announced = tokio::time::timeout(PATIENCE, read_opening(&mut reader));
    let (opening, brings) = announced.await.map_err(|_| TakeError::Silent)??;
    if let Err(refusal) = check(identity, &hello, &opening) {
        return refuse(&mut writer, refusal).await;
    }
    let plan = match brings {
        Brings::Request(plan) => plan,
        Brings::Prefix(plan) => return PrefixTarget { identity, engine, inputs, opening, writer }.serve(reader, plan).await,
    };
    let (sender, answer) = oneshot::channel();
    let _ = inputs.send(Input::Opened { opening, answer: sender }).await;
    if let Err(refusal) = answer.await.map_err(|_| TakeError::Gone)? {
        return refuse(&mut writer, refusal).await;
    }
    let (request, attempt) = (opening.request, opening.attempt);
    let mut target = KvTarget { identity, engine, inputs: inputs.clone(), opening, writer };
    let ended = target.take(reader, plan).await;
    // So that the source can say why.
    let parting = match &ended {
        Err(TakeError::Refused(refusal)) => Some(KvFrame::Refuse(refusal.clone())),
        Err(TakeError::Protocol(why)) => Some(KvFrame::Abort { why: why.clone() }),
        Ok(()) | Err(TakeError::Connection(_) | TakeError::Silent | TakeError::Aborted(_) | TakeError::Gone) => None,
    };
    if let Some(frame) = parting {
        let _ = target.writer.kv(&frame).await;
    }
    let _ = inputs.send(Input::Target { request, attempt, news: FromTarget::Ended }).await;
    ended
}

pub(super) async fn refuse(writer: &mut FrameWriter, refusal: Refusal) -> Result<(), TakeError> {
    writer.kv(&KvFrame::Refuse(refusal.clone())).await?;
    Err(TakeError::Refused(refusal))
}

/// What a source comes with.
enum Brings {
    Request(KvPlan),
    Prefix(KvPlan),
}

async fn read_opening(reader: &mut FrameReader) -> Result<(Opening, Brings), TakeError> {
    let KvFrame::Open { request, attempt, source, target, nonce } = decode(&reader.read().await?)? else {
        return Err(TakeError::Protocol("the source did not open an attempt".to_owned()));
    };
    let frame = decode(&reader.read().await?)?;
    let brings = if let KvFrame::Prefix(plan) = frame {
        Brings::Prefix(plan)
    } else if let KvFrame::Prepare(plan) = frame {
        Brings::Request(plan)
    } else {
        return Err(TakeError::Protocol("the source did not say what it brings".to_owned()));
    };
    Ok((Opening { request, attempt, source, target, nonce }, brings))
}

pub(super) fn decode<P>(raw: &Raw<P>) -> Result<KvFrame, TakeError> {
    KvFrame::decode(raw.kind, &raw.body).map_err(|error| ConnectionError::Frame(error).into())
}

/// Whether what the source computes can go on here.
fn check(identity: &Identity, hello: &Hello, opening: &Opening) -> Result<(), Refusal> {
    if hello.place() != opening.source {
        return Err(Refusal::NotExpected);
    }
    let ours = &identity.hello;
    if hello.numerics_id != ours.numerics_id {
        return Err(Refusal::OtherNumerics(format!("\"{}\" there and \"{}\" here", hello.numerics_id, ours.numerics_id)));
    }
    if ours.kv_layout.is_none() || hello.kv_layout != ours.kv_layout {
        return Err(Refusal::OtherNumerics(format!("KV lies as {:?} there and as {:?} here", hello.kv_layout, ours.kv_layout)));
    }
    Ok(())
}

/// Of one block of the KV here.
pub(super) fn block_bytes(identity: &Identity) -> u64 {
    identity.hello.kv_layout.as_ref().map_or(0, |layout| layout.block_bytes)
}

/// One attempt to move one request here.
struct KvTarget<'a> {
    identity: &'a Identity,
    engine: EngineHandle,
    inputs: mpsc::Sender<Input>,
    opening: Opening,
    writer: FrameWriter,
}

/// Blocks that the engine was given, and how many bytes they are.
pub(super) type Writing = (oneshot::Receiver<Result<Written, MoveRefusal>>, u64);

/// What comes from the source, the checksums of blocks looked at.
pub(super) enum Came {
    Block { index: u32, tokens: u32, bytes: Storage },
    Other(KvFrame),
}

/// Where blocks are read to: memory that becomes the engine's.
#[derive(Clone)]
pub(super) struct Landing {
    block_bytes: usize,
    /// As many at most as the engine gave, and takes at a time.
    spares: Arc<Mutex<Vec<Storage>>>,
}

/// The place of one frame's block, if it has one.
pub(super) struct Spot(Option<Storage>);

/// What has come of the blocks.
pub(super) struct Arrival {
    room: Room,
    /// Tokens of each block that came.
    pub(super) tokens: BTreeMap<u32, u32>,
    pending: Vec<(u32, Storage)>,
    /// Bytes that may come, and those that the engine takes now.
    credit: u64,
    pub(super) writing: VecDeque<Writing>,
    /// All blocks came before it.
    state: Option<(Vec<OutputEntry>, RunRequest)>,
}

impl KvTarget<'_> {
    /// Until the seat lets go, or the source does.
    async fn take(&mut self, reader: FrameReader, plan: KvPlan) -> Result<(), TakeError> {
        let state = self.planned(&plan)?;
        let (sender, answer) = oneshot::channel();
        self.order(MoveCommand::Prepare(Box::new(state), sender))?;
        let prepared = answer.await.map_err(|_| TakeError::Gone)?;
        let (room, spares) = prepared.map_err(|why| TakeError::Refused(refusal(&why)))?;
        let (orders, received) = mpsc::unbounded_channel();
        let (sender, answer) = oneshot::channel();
        self.tell(FromTarget::Arrived { source: self.opening.source, room, orders, answer: sender }).await;
        if !answer.await.unwrap_or(false) {
            let _ = self.engine.move_sequence(MoveCommand::Abandon(room.id));
            return Err(TakeError::Refused(Refusal::NotExpected));
        }
        let taken = self.take_blocks(reader, room, spares, received).await;
        // If it was let go of here this says nothing new.
        self.tell(FromTarget::Lost).await;
        taken
    }

    async fn take_blocks(
        &mut self,
        reader: FrameReader,
        room: Room,
        spares: Vec<Storage>,
        mut orders: mpsc::UnboundedReceiver<TargetOrder>,
    ) -> Result<(), TakeError> {
        let block_bytes = block_bytes(self.identity);
        let mut arrival = Arrival::new(room, block_bytes);
        let landing = Landing::new(block_bytes, spares);
        self.writer.kv(&arrival.have()).await?;
        let (sender, mut frames) = mpsc::channel(16);
        let mut tasks = JoinSet::new();
        tasks.spawn(read(reader, landing.clone(), sender));
        let mut told = Instant::now();
        loop {
            arrival.write(&self.engine, arrival.state.is_some())?;
            // What the engine was given, it takes before the request joins; what finds no room must be known before the gateway is asked.
            if (arrival.writing.is_empty() || arrival.has_room())
                && let Some((entries, run)) = arrival.state.take()
            {
                arrival.check(&run, self.identity)?;
                self.tell(FromTarget::State { entries, run: Box::new(run) }).await;
            }
            tokio::select! {
                frame = frames.recv() => {
                    let ended = || ConnectionError::Io(std::io::ErrorKind::UnexpectedEof.into());
                    arrival.heard(frame.ok_or_else(ended)??)?;
                    while let Ok(frame) = frames.try_recv() {
                        arrival.heard(frame?)?;
                    }
                    if told.elapsed() >= ADVANCE_TOLD {
                        told = Instant::now();
                        self.tell(FromTarget::Advanced).await;
                    }
                }
                written = written(&mut arrival.writing) => {
                    let (Written { spares, room }, bytes) = written.map_err(TakeError::Refused)?;
                    landing.give_back(spares);
                    self.writer.kv(&arrival.taken(room, bytes)).await?;
                }
                order = orders.recv() => match order {
                    Some(TargetOrder::Prepared { entries }) => {
                        self.writer.kv(&KvFrame::Prepared { entries }).await?;
                        fault::reached(Point::TargetPrepared);
                    }
                    None => return Ok(()),
                },
            }
        }
    }

    /// The sequence as the engine prepares for it.
    fn planned(&self, plan: &KvPlan) -> Result<SequenceState, TakeError> {
        let refused = |why: String| TakeError::Refused(Refusal::Other(why));
        let run = RunRequest::from_bytes(&plan.request).map_err(refused)?;
        let output = plan.tokens.strip_prefix(&run.prompt[..]);
        let output = output.ok_or_else(|| refused("the tokens do not begin with the prompt".to_owned()))?;
        travel::from_wire(&run, self.engine.next_id(), output.to_vec()).map_err(|why| refused(why.to_string()))
    }

    fn order(&self, command: MoveCommand) -> Result<(), TakeError> {
        self.engine.move_sequence(command).map_err(|_| TakeError::Gone)
    }

    async fn tell(&self, news: FromTarget) {
        let Opening { request, attempt, .. } = self.opening;
        let _ = self.inputs.send(Input::Target { request, attempt, news }).await;
    }
}

impl Arrival {
    pub(super) fn new(room: Room, block_bytes: u64) -> Self {
        let credit = WINDOW.max(2 * block_bytes);
        Self { room, tokens: BTreeMap::new(), pending: Vec::new(), credit, writing: VecDeque::new(), state: None }
    }

    /// What need not come, and how many bytes may.
    pub(super) fn have(&self) -> KvFrame {
        KvFrame::Have { blocks: HeldBlocks { held: self.room.held.0 }, credit: self.credit }
    }

    /// Gives the engine what came since it took something last, once that is worth waking it for; and all of it when it is the `last`.
    pub(super) fn write(&mut self, engine: &EngineHandle, last: bool) -> Result<(), TakeError> {
        let bytes = self.pending.iter().map(|(_, block)| block.bytes().len() as u64).sum();
        let is_due = last || (self.writing.is_empty() && bytes >= WRITTEN_AT_ONCE);
        if self.pending.is_empty() || !is_due {
            return Ok(());
        }
        let blocks = std::mem::take(&mut self.pending);
        let (sender, answer) = oneshot::channel();
        engine.move_sequence(MoveCommand::Write(self.room.id, blocks, sender)).map_err(|_| TakeError::Gone)?;
        self.writing.push_back((answer, bytes));
        Ok(())
    }

    /// The engine has taken blocks of so many bytes, so that as many may come.
    pub(super) fn taken(&mut self, room: Blocks, bytes: u64) -> KvFrame {
        self.room.blocks = room;
        self.credit += bytes;
        KvFrame::Credit { bytes }
    }

    fn heard(&mut self, came: Came) -> Result<(), TakeError> {
        let frame = match came {
            Came::Block { index, tokens, bytes } => return self.block(index, tokens, bytes),
            Came::Other(frame) => frame,
        };
        if let KvFrame::Abort { why } = &frame {
            return Err(TakeError::Aborted(why.clone()));
        }
        let KvFrame::State { entries, plan } = frame else {
            return Err(TakeError::Protocol("the source sent what only targets send".to_owned()));
        };
        let run = RunRequest::from_bytes(&plan.request).map_err(|why| TakeError::Refused(Refusal::Other(why)))?;
        if plan.tokens != [&run.prompt[..], &travel::token_ids(&entries)].concat() {
            return Err(TakeError::Protocol("the tokens of the state are not those of its entries".to_owned()));
        }
        self.state = Some((entries, run));
        Ok(())
    }

    pub(super) fn block(&mut self, index: u32, tokens: u32, bytes: Storage) -> Result<(), TakeError> {
        let left = self.credit.checked_sub(bytes.bytes().len() as u64);
        self.credit = left.ok_or_else(|| TakeError::Protocol("more came than was asked for".to_owned()))?;
        if index < self.room.held.0 {
            return Err(TakeError::Protocol(format!("block {index} came, which is held")));
        }
        self.tokens.insert(index, tokens);
        self.pending.push((index, bytes));
        Ok(())
    }

    /// Whether none of what came needs more room than there is.
    fn has_room(&self) -> bool {
        self.tokens.last_key_value().is_none_or(|(&last, _)| last < self.room.blocks.0)
    }

    /// Whether all KV that the state counts on is here.
    fn check(&self, run: &RunRequest, identity: &Identity) -> Result<(), TakeError> {
        let (size, computed) = (travel::block_size(&identity.hello), Tokens(run.progress.computed));
        for index in self.room.held.0..computed.to_blocks(size).0 {
            let wanted = (computed - Blocks(index).to_tokens(size)).min(Tokens(size.get()));
            if self.tokens.get(&index).is_none_or(|&tokens| tokens < wanted.0) {
                return Err(TakeError::Protocol(format!("block {index} of {computed} did not come")));
            }
        }
        Ok(())
    }
}

/// What the engine has taken first, and how many bytes; never, where it takes none.
pub(super) async fn written(writing: &mut VecDeque<Writing>) -> Result<(Written, u64), Refusal> {
    let Some((answer, bytes)) = writing.front_mut() else { return std::future::pending().await };
    let (answer, bytes) = (answer.await, *bytes);
    writing.pop_front();
    match answer {
        Ok(Ok(written)) => Ok((written, bytes)),
        Ok(Err(why)) => Err(refusal(&why)),
        Err(_) => Err(Refusal::Other("the engine is gone".to_owned())),
    }
}

pub(super) fn refusal(why: &MoveRefusal) -> Refusal {
    if let MoveRefusal::NoRoom(room) = why {
        return Refusal::NoRoom { needed: room.needed.0, free: room.available.0 };
    }
    Refusal::Other(why.to_string())
}

/// Reads what comes, and compares the checksum of each block.
pub(super) async fn read(mut reader: FrameReader, landing: Landing, frames: mpsc::Sender<Result<Came, TakeError>>) {
    loop {
        let came = match reader.read_to(|bytes| landing.spot(bytes)).await {
            Ok(raw) => landing.check(raw),
            Err(error) => Err(error.into()),
        };
        let ended = came.is_err();
        if frames.send(came).await.is_err() || ended {
            return;
        }
    }
}

impl Landing {
    pub(super) fn new(block_bytes: u64, spares: Vec<Storage>) -> Self {
        Self { block_bytes: block_bytes as usize, spares: Arc::new(Mutex::new(spares)) }
    }

    fn spot(&self, bytes: usize) -> Spot {
        if bytes == 0 {
            return Spot(None);
        }
        let spare = if bytes == self.block_bytes { self.spares.lock().expect("no holder panics").pop() } else { None };
        Spot(Some(spare.unwrap_or_else(|| Box::new(vec![0; bytes]))))
    }

    pub(super) fn give_back(&self, spares: Vec<Storage>) {
        self.spares.lock().expect("no holder panics").extend(spares);
    }

    fn check(&self, raw: Raw<Spot>) -> Result<Came, TakeError> {
        let frame = decode(&raw)?;
        let KvFrame::Block(BlockHeader { index, tokens, checksum }) = frame else { return Ok(Came::Other(frame)) };
        let bytes = raw.payload.0.unwrap_or_else(|| Box::new(Vec::new()));
        let (len, wanted) = (bytes.bytes().len(), self.block_bytes);
        if len != wanted {
            return Err(TakeError::Protocol(format!("block {index} has {len} bytes, a block here {wanted}")));
        }
        if raw.checksum != checksum {
            return Err(TakeError::Protocol(format!("block {index} was altered on its way")));
        }
        Ok(Came::Block { index, tokens, bytes })
    }
}

impl AsMut<[u8]> for Spot {
    fn as_mut(&mut self) -> &mut [u8] {
        self.0.as_mut().map_or(&mut [], |storage| storage.bytes_mut())
    }
}
