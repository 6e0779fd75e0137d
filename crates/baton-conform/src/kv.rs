//! The other side of a move, played by the suite: a target that a source brings KV to, and a source that brings it.

use std::{collections::BTreeMap, time::Duration};

use baton_link::{Connection, FrameReader, FrameWriter, Identity, Raw};
use baton_migration::{Place, RequestName, Tag, ToGateway, ToSeat};
use baton_units::{BlockSize, Tokens};
use baton_wire::migration::{
    BlockHeader, ControlFrame, HeldBlocks, KvFrame, KvPlan, MoveTo, OutputEntry, Refusal, RunRequest,
    handshake::{Hello, KvLayout, Role},
};
use tokio::net::TcpListener;
use xxhash_rust::xxh3::xxh3_64;

use crate::{
    gateway::{Gateway, News, Stream},
    suite::{Suite, movable, random},
    verdict::{Checked, Unmet, demand, failed, skipped},
};

/// A stream that ended before its move began is run again.
const TRIES: u64 = 50;

/// An address to which sources are sent.
pub(crate) struct Target {
    listener: TcpListener,
    address: String,
    identity: Identity,
    pub(crate) place: Place,
    layout: KvLayout,
    patience: Duration,
}

/// A source's connection, with what it opened by.
pub(crate) struct Coming {
    pub(crate) request: RequestName,
    pub(crate) attempt: Tag,
    pub(crate) source: Place,
    pub(crate) target: Place,
    pub(crate) nonce: [u8; 16],
    pub(crate) plan: KvPlan,
    reader: FrameReader,
    writer: FrameWriter,
    layout: KvLayout,
    patience: Duration,
}

/// All that a source brought.
#[derive(Debug, Clone)]
pub(crate) struct Brought {
    pub(crate) plan: KvPlan,
    pub(crate) entries: Vec<OutputEntry>,
    /// By their place in the request's table: tokens with KV, and the bytes.
    pub(crate) blocks: BTreeMap<u32, (u32, Vec<u8>)>,
}

/// A request that runs at the replica under test and was told to move to the suite.
pub(crate) struct Order {
    gateway: Gateway,
    stream: Stream,
    target: Target,
    attempt: Tag,
    to: MoveTo,
}

/// What the replica is told of where to move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Told {
    Rightly,
    /// The target has begun anew since.
    Elsewhere,
    /// A move under an epoch that does not run comes before.
    OtherEpochFirst,
}

/// A request that is on its way to the suite.
pub(crate) struct Departure {
    pub(crate) gateway: Gateway,
    pub(crate) stream: Stream,
    pub(crate) target: Target,
    pub(crate) coming: Coming,
}

impl Target {
    pub(crate) async fn like(suite: &Suite, hello: &Hello) -> Checked<Self> {
        let (layout, _) = movable(hello)?;
        let listener = TcpListener::bind((suite.own_address().await?, 0)).await?;
        let address = listener.local_addr()?.to_string();
        let identity = suite.like(hello, Some(address.clone()));
        let place = identity.hello.place();
        Ok(Self { listener, address, identity, place, layout, patience: suite.patience() })
    }

    pub(crate) fn to(&self) -> Checked<MoveTo> {
        let mut nonce = [0; 16];
        nonce[..8].copy_from_slice(&random()?.to_le_bytes());
        nonce[8..].copy_from_slice(&random()?.to_le_bytes());
        Ok(MoveTo { kv_address: self.address.clone(), nonce })
    }

    /// The next source that connects and says what request it brings.
    pub(crate) async fn accept(&self) -> Checked<Coming> {
        self.accept_with("PREPARE", |frame| if let KvFrame::Prepare(plan) = frame { Ok(plan) } else { Err(frame) }).await
    }

    /// The next holder that connects and says what prefix it brings.
    pub(crate) async fn accept_prefix(&self) -> Checked<Coming> {
        self.accept_with("PREFIX", |frame| if let KvFrame::Prefix(plan) = frame { Ok(plan) } else { Err(frame) }).await
    }

    async fn accept_with(&self, due: &str, planned: impl FnOnce(KvFrame) -> Result<KvPlan, KvFrame>) -> Checked<Coming> {
        let coming = async {
            let (stream, _) = self.listener.accept().await?;
            let Connection { mut reader, writer, .. } = self.identity.accept(stream, Role::Source).await?;
            let first = decode(&reader.read().await?)?;
            let KvFrame::Open { request, attempt, source, target, nonce } = first else {
                return failed(format!("OPEN was due from the source, and {first:?} came"));
            };
            let plan = match planned(decode(&reader.read().await?)?) {
                Ok(plan) => plan,
                Err(other) => return failed(format!("{due} was due from the source, and {other:?} came")),
            };
            let (layout, patience) = (self.layout.clone(), self.patience);
            Ok(Coming { request, attempt, source, target, nonce, plan, reader, writer, layout, patience })
        };
        let coming = tokio::time::timeout(self.patience, coming).await;
        coming.unwrap_or_else(|_| failed(format!("no source came within {:?}", self.patience)))
    }
}

impl Order {
    /// Nothing is acknowledged, so that the request does not end meanwhile.
    pub(crate) async fn give(suite: &Suite, spec: &RunRequest, told: Told) -> Checked<Self> {
        let (mut gateway, place) = suite.attached().await?;
        let mut target = Target::like(suite, gateway.hello(place)).await?;
        let mut stream = Stream::new(place, 1, Tag(1));
        stream.acknowledges = false;
        gateway.start(&stream, &[], spec).await?;
        gateway.entries(&mut stream, 2).await?;
        let (mut attempt, to) = (Tag(2), target.to()?);
        if told == Told::OtherEpochFirst {
            let other = ToSeat::Move { epoch: Tag(2), attempt, target: target.place };
            gateway.tell_with(place, 1, other, to.to_bytes()).await?;
            attempt = Tag(3);
        }
        gateway.move_to(&stream, attempt, target.place, &to).await?;
        if told == Told::Elsewhere {
            target.identity.hello.incarnation += 1;
        }
        Ok(Self { gateway, stream, target, attempt, to })
    }

    /// The source comes; skipped where the request ended before.
    pub(crate) async fn accept(mut self, spec: &RunRequest) -> Checked<Departure> {
        let (gateway, stream) = (&mut self.gateway, &mut self.stream);
        let ends = async {
            loop {
                match gateway.news(stream).await? {
                    News::Entry if stream.has_finished() => return skipped("it finished first"),
                    News::Message(message, why) => return failed(format!("the source said {message:?} {why} before it came")),
                    News::Entry | News::Again(_) | News::Scheduled { .. } | News::Moved(..) => {}
                }
            }
        };
        let coming = tokio::select! {
            coming = self.target.accept() => coming,
            ended = ends => ended,
        };
        match coming {
            Ok(coming) => {
                coming.check(&self.gateway, &self.stream, (self.attempt, self.target.place, self.to.nonce), spec)?;
                Ok(Departure { gateway: self.gateway, stream: self.stream, target: self.target, coming })
            }
            Err(why) => {
                self.gateway.end(&self.stream).await?;
                Err(why)
            }
        }
    }

    /// What the source says while whoever listens is met and gets nothing.
    pub(crate) async fn answer(&mut self) -> Checked<(ToGateway<OutputEntry>, String)> {
        let (gateway, stream) = (&mut self.gateway, &mut self.stream);
        let answers = async {
            loop {
                if let News::Message(message, why) = gateway.news(stream).await? {
                    return Ok((message, why));
                }
            }
        };
        let opened = async {
            // Whoever leaves before it opens anything has seen that it is somewhere else.
            while self.target.accept().await.is_err() {}
        };
        tokio::select! {
            answer = answers => answer,
            () = opened => failed("an attempt was opened at another place than it was told"),
        }
    }

    pub(crate) async fn goes_on(mut self, suite: &Suite, spec: &RunRequest) -> Checked {
        goes_on(&mut self.gateway, &mut self.stream, suite, spec).await
    }
}

/// To the end, which is what it gives alone.
async fn goes_on(gateway: &mut Gateway, stream: &mut Stream, suite: &Suite, spec: &RunRequest) -> Checked {
    stream.acknowledges = true;
    gateway.acknowledge(stream).await?;
    gateway.finish(stream).await?;
    gateway.end(stream).await?;
    suite.same(&stream.entries, &suite.alone(spec).await?)
}

impl Departure {
    /// Starts the request and has it moved to the suite. Where it is faster than that, it is tried again.
    pub(crate) async fn begin(suite: &Suite, spec: &RunRequest) -> Checked<Self> {
        for _ in 0..TRIES {
            match Order::give(suite, spec, Told::Rightly).await?.accept(spec).await {
                Err(Unmet::Skipped(_)) => {}
                other => return other,
            }
        }
        skipped(format!("no request was slow enough to be moved in {TRIES} tries; give a longer --output"))
    }

    /// The next source that comes, which does for this attempt.
    pub(crate) async fn comes_as(&mut self, attempt: Tag) -> Checked {
        self.coming = self.target.accept().await?;
        let came = self.coming.attempt;
        demand!(came == attempt, "a source came for {came}, and {attempt} was due");
        Ok(())
    }

    /// What the gateway hears of the request until it is asked to commit; the entries up to there are the stream's.
    pub(crate) async fn asked(&mut self) -> Checked<u32> {
        loop {
            match self.gateway.news(&mut self.stream).await? {
                News::Message(ToGateway::CommitTarget { epoch, attempt, frozen }, _) => {
                    let stream = &self.stream;
                    demand!(
                        (epoch, attempt, frozen) == (stream.epoch, self.coming.attempt, stream.next()),
                        "COMMIT_TARGET({epoch}, {attempt}, {frozen}) came with {} entries under {}",
                        stream.next(),
                        stream.epoch
                    );
                    return Ok(frozen);
                }
                News::Message(message, why) => return failed(format!("COMMIT_TARGET was due, and {message:?} came {why}")),
                News::Entry | News::Again(_) | News::Scheduled { .. } | News::Moved(..) => {}
            }
        }
    }

    /// The next message; entries go to the stream.
    pub(crate) async fn answer(&mut self) -> Checked<(ToGateway<OutputEntry>, String)> {
        loop {
            if let News::Message(message, why) = self.gateway.news(&mut self.stream).await? {
                return Ok((message, why));
            }
        }
    }

    /// The attempt ends with ABORTED, and the request goes on to what it gives alone.
    pub(crate) async fn stays(mut self, suite: &Suite, spec: &RunRequest) -> Checked<String> {
        let attempt = self.coming.attempt;
        let (message, why) = self.answer().await?;
        demand!(
            message == ToGateway::Aborted { epoch: self.stream.epoch, attempt },
            "ABORTED({}, {attempt}) was due, and {message:?} came",
            self.stream.epoch
        );
        demand!(why.len() <= 256, "the reason has {} bytes", why.len());
        self.goes_on(suite, spec).await?;
        Ok(why)
    }

    /// To the end, which is what it gives alone.
    pub(crate) async fn goes_on(mut self, suite: &Suite, spec: &RunRequest) -> Checked {
        goes_on(&mut self.gateway, &mut self.stream, suite, spec).await
    }
}

impl Coming {
    fn check(&self, gateway: &Gateway, stream: &Stream, told: (Tag, Place, [u8; 16]), spec: &RunRequest) -> Checked {
        let opened = (self.request, self.source, (self.attempt, self.target, self.nonce));
        let wanted = (gateway.request(stream.sequence), stream.at, told);
        demand!(opened == wanted, "OPEN says {opened:?}, and the gateway said {wanted:?}");
        let plan = &self.plan;
        demand!(plan.tokens.starts_with(&spec.prompt), "the tokens in PREPARE do not begin with the prompt");
        let run = run_of(plan)?;
        let size = self.block_size();
        let computed = Tokens(run.progress.computed);
        demand!(plan.blocks == computed.to_blocks(size).0, "PREPARE counts {} blocks for {computed}", plan.blocks);
        demand!(plan.keys.len() as u32 == computed.full_blocks(size).0, "PREPARE has {} keys for {computed}", plan.keys.len());
        demand!(
            (&run.model, run.seed, &run.sampling) == (&spec.model, spec.seed, &spec.sampling),
            "PREPARE says to run {run:?}, and the gateway said {spec:?}"
        );
        demand!(run.ends.is_some(), "PREPARE does not say what ends the output");
        Ok(())
    }

    pub(crate) fn block_size(&self) -> BlockSize {
        BlockSize::new(self.layout.block_size).unwrap_or(BlockSize::DEFAULT)
    }

    pub(crate) async fn say(&mut self, frame: &KvFrame) -> Checked {
        Ok(self.writer.kv(frame).await?)
    }

    /// The next frame with the bytes of a block.
    pub(crate) async fn next(&mut self) -> Checked<(KvFrame, Vec<u8>)> {
        let read = tokio::time::timeout(self.patience, self.reader.read()).await;
        let Ok(raw) = read else { return failed(format!("the source sent nothing within {:?}", self.patience)) };
        let raw = raw?;
        Ok((decode(&raw)?, raw.payload))
    }

    pub(crate) fn block_bytes(&self) -> u64 {
        self.layout.block_bytes
    }

    /// Ends the connection as a target that is gone does.
    pub(crate) async fn hang_up(&mut self) -> Checked {
        Ok(self.writer.shutdown().await?)
    }

    /// The source ends the connection; what it sends before is passed over.
    pub(crate) async fn ended(&mut self) -> Checked {
        let ended = async { while self.reader.read().await.is_ok() {} };
        let ended = tokio::time::timeout(self.patience, ended).await;
        ended.or_else(|_| failed("the source holds its connection, and should have ended it"))
    }

    /// Answers that the first `held` blocks are here, and takes what comes, up to STATE: `ahead` blocks at a time may be under way.
    pub(crate) async fn take(&mut self, held: u32, ahead: u64) -> Checked<Brought> {
        let block_bytes = self.layout.block_bytes;
        let mut credit = ahead * block_bytes;
        self.say(&KvFrame::Have { blocks: HeldBlocks { held }, credit }).await?;
        let mut blocks = BTreeMap::new();
        let (entries, plan) = loop {
            match self.next().await? {
                (KvFrame::Block(BlockHeader { index, tokens, checksum }), bytes) => {
                    demand!(index >= held, "block {index} came, and {held} were said to be held");
                    demand!(bytes.len() as u64 == block_bytes, "block {index} has {} bytes, and {block_bytes} in the hello", bytes.len());
                    demand!(xxh3_64(&bytes) == checksum, "the checksum of block {index} is wrong");
                    demand!(credit >= block_bytes, "block {index} came where no credit was left");
                    credit -= block_bytes;
                    blocks.insert(index, (tokens, bytes));
                    // The next ones only when none may come.
                    if credit < block_bytes {
                        credit += ahead * block_bytes;
                        self.say(&KvFrame::Credit { bytes: ahead * block_bytes }).await?;
                    }
                }
                (KvFrame::State { entries, plan }, _) => break (entries, plan),
                (other, _) => return failed(format!("BLOCK or STATE was due, and {other:?} came")),
            }
        };
        let brought = Brought { plan, entries, blocks };
        self.whole(held, &brought)?;
        Ok(brought)
    }

    fn whole(&self, held: u32, brought: &Brought) -> Checked {
        let run = run_of(&brought.plan)?;
        let wanted: Vec<u32> = run.prompt.iter().copied().chain(ids(&brought.entries)).collect();
        demand!(brought.plan.tokens == wanted, "the tokens of STATE are not prompt and entries");
        let (size, computed) = (self.block_size(), Tokens(run.progress.computed));
        demand!(
            computed.0 as usize + 1 == wanted.len(),
            "STATE has KV of {computed}, and all {} but the last one should have",
            wanted.len()
        );
        for index in held..computed.to_blocks(size).0 {
            let needs = (computed.0 - index * size.get()).min(size.get());
            let came = brought.blocks.get(&index).map_or(0, |(tokens, _)| *tokens);
            demand!(came >= needs, "block {index} came with KV of {came} tokens, and {needs} are counted on");
        }
        Ok(())
    }
}

/// A source that the suite plays, for one attempt.
pub(crate) struct Going {
    reader: FrameReader,
    writer: FrameWriter,
    patience: Duration,
    block_bytes: u64,
    /// Bytes that may be sent.
    pub(crate) credit: u64,
}

impl Going {
    /// Connects to the replica's KV address as `identity`.
    pub(crate) async fn dial(suite: &Suite, hello: &Hello, identity: &Identity) -> Checked<Self> {
        let (layout, address) = movable(hello)?;
        let Connection { reader, writer, hello: answered } = baton_link::dial(&address, identity, Role::Source, suite.patience()).await?;
        demand!(answered.place() == hello.place(), "{} answered at the KV address of {}", answered.place(), hello.place());
        let (patience, block_bytes) = (suite.patience(), layout.block_bytes);
        Ok(Self { reader, writer, patience, block_bytes, credit: 0 })
    }

    pub(crate) async fn say(&mut self, frame: &KvFrame) -> Checked {
        Ok(self.writer.kv(frame).await?)
    }

    /// What the target says but of credit, which is counted.
    pub(crate) async fn next(&mut self) -> Checked<KvFrame> {
        loop {
            let frame = self.frame().await?;
            if let KvFrame::Credit { bytes } = frame {
                self.credit += bytes;
                continue;
            }
            return Ok(frame);
        }
    }

    async fn frame(&mut self) -> Checked<KvFrame> {
        let read = tokio::time::timeout(self.patience, self.reader.read()).await;
        let Ok(raw) = read else { return failed(format!("the target sent nothing within {:?}", self.patience)) };
        decode(&raw?)
    }

    /// How many blocks the target holds.
    pub(crate) async fn have(&mut self) -> Checked<u32> {
        match self.next().await? {
            KvFrame::Have { blocks, credit } => {
                self.credit += credit;
                Ok(blocks.held)
            }
            other => failed(format!("HAVE was due, and {other:?} came")),
        }
    }

    pub(crate) async fn refused(&mut self) -> Checked<Refusal> {
        match self.next().await? {
            KvFrame::Refuse(refusal) => Ok(refusal),
            other => failed(format!("REFUSE was due, and {other:?} came")),
        }
    }

    /// Sends a block when it may.
    pub(crate) async fn block(&mut self, index: u32, tokens: u32, bytes: &[u8]) -> Checked {
        self.block_with(BlockHeader { index, tokens, checksum: xxh3_64(bytes) }, bytes).await
    }

    pub(crate) async fn block_with(&mut self, header: BlockHeader, bytes: &[u8]) -> Checked {
        while self.credit < self.block_bytes {
            match self.frame().await? {
                KvFrame::Credit { bytes } => self.credit += bytes,
                other => return failed(format!("CREDIT was due, and {other:?} came")),
            }
        }
        self.credit -= self.block_bytes;
        Ok(self.writer.blocks(&[(header, bytes)]).await?)
    }

    pub(crate) fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Sends a block again and again, whatever it may. False where the target ends the connection meanwhile.
    pub(crate) async fn heedless(&mut self, index: u32, tokens: u32, bytes: &[u8], times: u64) -> bool {
        let header = BlockHeader { index, tokens, checksum: xxh3_64(bytes) };
        for _ in 0..times {
            if self.writer.blocks(&[(header, bytes)]).await.is_err() {
                return false;
            }
        }
        true
    }

    pub(crate) async fn blocks(&mut self, brought: &Brought, from: u32) -> Checked {
        for (&index, (tokens, bytes)) in brought.blocks.range(from..) {
            self.block(index, *tokens, bytes).await?;
        }
        Ok(())
    }

    pub(crate) async fn state(&mut self, brought: &Brought) -> Checked {
        self.say(&KvFrame::State { entries: brought.entries.clone(), plan: brought.plan.clone() }).await
    }

    pub(crate) async fn prepared(&mut self) -> Checked<u32> {
        match self.next().await? {
            KvFrame::Prepared { entries } => Ok(entries),
            other => failed(format!("PREPARED was due, and {other:?} came")),
        }
    }

    /// The target lets go: by ABORT or REFUSE, or by the end of the connection.
    pub(crate) async fn given_up(&mut self) -> Checked {
        let ended = async {
            loop {
                match self.reader.read().await.map_err(Unmet::from).and_then(|raw| decode(&raw)) {
                    Err(_) | Ok(KvFrame::Abort { .. } | KvFrame::Refuse(_)) => return Ok(()),
                    Ok(KvFrame::Prepared { .. }) => return failed("PREPARED came, and something was wrong with what was brought"),
                    Ok(_) => {}
                }
            }
        };
        let ended = tokio::time::timeout(self.patience, ended).await;
        ended.unwrap_or_else(|_| failed("the target waits on, and should have given up"))
    }

    /// Ends the connection as a source that is gone does.
    pub(crate) async fn hang_up(&mut self) -> Checked {
        Ok(self.writer.shutdown().await?)
    }
}

/// Tells the replica that a request will come from `source`.
pub(crate) async fn announce(gateway: &mut Gateway, to: Place, sequence: u64, attempt: Tag, source: Place, nonce: [u8; 16]) -> Checked {
    let request = gateway.request(sequence);
    gateway.send(to, &ControlFrame::Expect { request, attempt, source, nonce }).await
}

/// What a request has at the replica after some output, with all of its KV; it is stopped there.
pub(crate) async fn brought(suite: &Suite, spec: &RunRequest) -> Checked<Brought> {
    let mut departure = Departure::begin(suite, spec).await?;
    let brought = departure.coming.take(0, 4).await?;
    let Departure { mut gateway, stream, .. } = departure;
    gateway.tell(stream.at, stream.sequence, ToSeat::Stop { upto: Tag::ALL }).await?;
    gateway.stopped(stream.at, stream.sequence).await?;
    Ok(brought)
}

impl Brought {
    /// As of a request under another salt, which shares no cached prefix with the one that it was of.
    pub(crate) fn salted(mut self, salt: &str) -> Checked<Self> {
        let run = run_of(&self.plan)?;
        self.plan.request = RunRequest { salt: Some(salt.to_owned()), ..run }.to_bytes();
        Ok(self)
    }

    pub(crate) fn next(&self) -> u32 {
        self.entries.len() as u32
    }

    /// Of a full one.
    pub(crate) fn tokens_of_block(&self) -> usize {
        self.blocks.values().map(|(tokens, _)| *tokens as usize).max().unwrap_or(1)
    }

    /// Another token stands at this place of the prompt; the keys stay.
    pub(crate) fn change_prompt(&mut self, at: usize) -> Checked {
        let mut run = run_of(&self.plan)?;
        for tokens in [&mut run.prompt, &mut self.plan.tokens] {
            tokens[at] ^= 1;
        }
        self.plan.request = run.to_bytes();
        Ok(())
    }
}

fn run_of(plan: &KvPlan) -> Checked<RunRequest> {
    RunRequest::from_bytes(&plan.request).map_err(|why| Unmet::Failed(format!("what to run cannot be read in a plan: {why}")))
}

pub(crate) fn ids(entries: &[OutputEntry]) -> impl Iterator<Item = u32> {
    entries.iter().filter_map(|entry| match entry {
        OutputEntry::Token { id, .. } => Some(*id),
        OutputEntry::Finish(_) => None,
    })
}

pub(crate) fn decode(raw: &Raw) -> Checked<KvFrame> {
    KvFrame::decode(raw.kind, &raw.body).map_err(|error| Unmet::Failed(error.to_string()))
}
