//! A gateway that says what a case tells it to, right or wrong.

use std::{collections::BTreeMap, time::Duration};

use baton_link::{Connection, ConnectionError, FrameReader, FrameWriter, Identity};
use baton_migration::{GatewayName, LostClass, Phase, Place, RequestName, Tag, ToGateway, ToSeat};
use baton_wire::migration::{
    ControlFrame, Copied, Heartbeat, MoveTo, OutputEntry, RunRequest,
    handshake::{Hello, Role},
};
use tokio::{sync::mpsc, task::JoinSet};

use crate::{
    suite::Suite,
    verdict::{Checked, Unmet, demand, failed},
};

/// Frames that were read and not looked at; more wait on their connection.
const QUEUED: usize = 4096;
/// The stream's taken entries are told every so many.
const ACK_EVERY: u32 = 32;

type Came = (Place, Result<ControlFrame, ConnectionError>);

pub(crate) struct Gateway {
    pub(crate) name: GatewayName,
    identity: Identity,
    patience: Duration,
    lines: BTreeMap<Place, Line>,
    frames: mpsc::Receiver<Came>,
    sender: mpsc::Sender<Came>,
    readers: JoinSet<()>,
    /// Answers heartbeats.
    pub(crate) leases: bool,
    /// The last one of the replica that sent it.
    pub(crate) beats: Vec<(Place, Heartbeat)>,
}

struct Line {
    hello: Hello,
    writer: FrameWriter,
}

/// What a gateway has of a request that one replica runs.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) at: Place,
    pub(crate) sequence: u64,
    pub(crate) epoch: Tag,
    pub(crate) entries: Vec<OutputEntry>,
    /// Tells the replica what was taken.
    pub(crate) acknowledges: bool,
    acked: u32,
    /// Entries before the next one may have been lost with an older connection, and come again when they are asked for.
    pub(crate) was_reattached: bool,
}

/// News of a [`Stream`]'s request.
#[derive(Debug)]
pub(crate) enum News {
    /// The next entry, which the stream has now.
    Entry,
    /// An entry came again, the same as before.
    Again(u32),
    Scheduled {
        cached: u32,
    },
    Moved(Tag, Copied),
    Message(ToGateway<OutputEntry>, String),
}

impl Stream {
    pub(crate) fn new(at: Place, sequence: u64, epoch: Tag) -> Self {
        Self { at, sequence, epoch, entries: Vec::new(), acknowledges: true, acked: 0, was_reattached: false }
    }

    pub(crate) fn has_finished(&self) -> bool {
        self.entries.last().is_some_and(baton_migration::Entry::is_finish)
    }

    pub(crate) fn next(&self) -> u32 {
        self.entries.len() as u32
    }
}

impl Gateway {
    pub(crate) fn new(suite: &Suite, name: GatewayName) -> Self {
        let (sender, frames) = mpsc::channel(QUEUED);
        Self {
            name,
            identity: suite.identity_of(name),
            patience: suite.patience(),
            lines: BTreeMap::new(),
            frames,
            sender,
            readers: JoinSet::new(),
            leases: true,
            beats: Vec::new(),
        }
    }

    pub(crate) async fn attach(&mut self, address: &str) -> Checked<Place> {
        let Connection { hello, reader, writer } = baton_link::dial(address, &self.identity, Role::Gateway, self.patience).await?;
        let place = hello.place();
        self.readers.spawn(read(reader, place, self.sender.clone()));
        self.lines.insert(place, Line { hello, writer });
        Ok(place)
    }

    pub(crate) fn hello(&self, place: Place) -> &Hello {
        &self.lines[&place].hello
    }

    pub(crate) fn request(&self, sequence: u64) -> RequestName {
        RequestName { gateway: self.name, sequence }
    }

    pub(crate) async fn send(&mut self, to: Place, frame: &ControlFrame) -> Checked {
        let line = self.lines.get_mut(&to).expect("a case speaks to whom it is attached to");
        line.writer.control(frame).await?;
        Ok(line.writer.flush().await?)
    }

    pub(crate) async fn tell(&mut self, to: Place, sequence: u64, message: ToSeat<OutputEntry>) -> Checked {
        self.tell_with(to, sequence, message, Vec::new()).await
    }

    pub(crate) async fn tell_with(&mut self, to: Place, sequence: u64, message: ToSeat<OutputEntry>, with: Vec<u8>) -> Checked {
        let frame = ControlFrame::ToSeat { request: self.request(sequence), message, with };
        self.send(to, &frame).await
    }

    pub(crate) async fn start(&mut self, stream: &Stream, delivered: &[OutputEntry], spec: &RunRequest) -> Checked {
        let start = ToSeat::Start { epoch: stream.epoch, delivered: delivered.to_vec() };
        self.tell_with(stream.at, stream.sequence, start, spec.to_bytes()).await
    }

    pub(crate) async fn move_to(&mut self, stream: &Stream, attempt: Tag, target: Place, to: &MoveTo) -> Checked {
        let order = ToSeat::Move { epoch: stream.epoch, attempt, target };
        self.tell_with(stream.at, stream.sequence, order, to.to_bytes()).await
    }

    pub(crate) async fn acknowledge(&mut self, stream: &mut Stream) -> Checked {
        stream.acked = stream.next();
        self.tell(stream.at, stream.sequence, ToSeat::Ack { epoch: stream.epoch, next: stream.acked }).await
    }

    /// The next frame that is no heartbeat.
    pub(crate) async fn next(&mut self) -> Checked<(Place, ControlFrame)> {
        loop {
            let (from, frame) = self.next_of_all().await?;
            if !matches!(frame, ControlFrame::Heartbeat(_)) {
                return Ok((from, frame));
            }
        }
    }

    /// The next heartbeat; all else is passed over.
    pub(crate) async fn next_beat(&mut self) -> Checked<Heartbeat> {
        loop {
            if let (_, ControlFrame::Heartbeat(beat)) = self.next_of_all().await? {
                return Ok(beat);
            }
        }
    }

    pub(crate) async fn next_of_all(&mut self) -> Checked<(Place, ControlFrame)> {
        let came = tokio::time::timeout(self.patience, self.receive()).await;
        came.unwrap_or_else(|_| failed(format!("nothing came within {:?}", self.patience)))
    }

    /// The next frame, however long it takes: for who waits for something else beside it.
    pub(crate) async fn receive(&mut self) -> Checked<(Place, ControlFrame)> {
        let (from, frame) = self.frames.recv().await.expect("this end has a sender too");
        let frame = frame.map_err(|error| Unmet::Failed(format!("the replica ended its control connection: {error}")))?;
        if let ControlFrame::Heartbeat(beat) = frame {
            self.beats.push((from, beat));
            if self.leases {
                self.send(from, &ControlFrame::Lease { sequence: beat.sequence }).await?;
            }
        }
        Ok((from, frame))
    }

    /// Waits for a frame; heartbeats, and time, pass meanwhile.
    pub(crate) async fn until<T>(&mut self, what: &str, mut wanted: impl FnMut(Place, ControlFrame) -> Option<T>) -> Checked<T> {
        let patience = self.patience;
        let wait = async {
            loop {
                let (from, frame) = self.next().await?;
                if let Some(found) = wanted(from, frame) {
                    return Ok(found);
                }
            }
        };
        match tokio::time::timeout(patience, wait).await {
            Ok(Ok(found)) => Ok(found),
            Ok(Err(Unmet::Failed(why))) => failed(format!("{what} was due: {why}")),
            Ok(Err(skipped)) => Err(skipped),
            Err(_) => failed(format!("{what} did not come within {patience:?}")),
        }
    }

    /// What is held, up to `ALL_HELD`.
    pub(crate) async fn all_held(&mut self) -> Checked<Vec<(RequestName, Phase, Tag, u32)>> {
        let mut held = Vec::new();
        let all = self.until("ALL_HELD", |_, frame| match frame {
            ControlFrame::Holds { request, phase, tag, entries } => {
                held.push((request, phase, tag, entries));
                None
            }
            frame => matches!(frame, ControlFrame::AllHeld).then_some(()),
        });
        all.await?;
        Ok(held)
    }

    /// The replica closes the connection; what comes before is passed over.
    pub(crate) async fn ended(&mut self) -> Checked {
        let ended = async {
            loop {
                let (_, frame) = self.frames.recv().await.expect("this end has a sender too");
                if frame.is_err() {
                    return;
                }
            }
        };
        let ended = tokio::time::timeout(self.patience, ended).await;
        ended.or_else(|_| failed("the connection stays, and should have ended"))
    }

    /// A message of one request, with its reason; hints are passed over.
    pub(crate) async fn message(&mut self, what: &str, sequence: u64) -> Checked<(ToGateway<OutputEntry>, String)> {
        let wanted = self.request(sequence);
        let message = |_, frame| match frame {
            ControlFrame::ToGateway { request, message, why } if request == wanted => Some((message, why)),
            _ => None,
        };
        self.until(what, message).await
    }

    /// As [`Self::message`], of those that are no output.
    pub(crate) async fn answer(&mut self, what: &str, sequence: u64) -> Checked<(ToGateway<OutputEntry>, String)> {
        let wanted = self.request(sequence);
        let answer = |_, frame| match frame {
            ControlFrame::ToGateway { message: ToGateway::Output { .. }, .. } => None,
            ControlFrame::ToGateway { request, message, why } if request == wanted => Some((message, why)),
            _ => None,
        };
        self.until(what, answer).await
    }

    /// A STOPPED before it, of what it forgot by itself, is as good as one that comes again.
    pub(crate) async fn lost(&mut self, sequence: u64, epoch: Tag) -> Checked<(LostClass, String)> {
        loop {
            match self.answer("LOST", sequence).await? {
                (ToGateway::Lost { epoch: told, class }, why) if told == epoch => return Ok((class, why)),
                (ToGateway::Stopped { upto }, _) if upto == epoch => {}
                (other, _) => return failed(format!("LOST({epoch}) was due, and {other:?} came")),
            }
        }
    }

    pub(crate) async fn stopped(&mut self, place: Place, sequence: u64) -> Checked<Tag> {
        let wanted = self.request(sequence);
        let stopped = |from, frame| match frame {
            ControlFrame::ToGateway { request, message: ToGateway::Stopped { upto }, .. } if request == wanted && from == place => {
                Some(upto)
            }
            _ => None,
        };
        self.until("STOPPED", stopped).await
    }

    /// What comes next of a request. Entries that come again must be the same; those of epochs that were superseded are passed over.
    pub(crate) async fn news(&mut self, stream: &mut Stream) -> Checked<News> {
        let wanted = self.request(stream.sequence);
        loop {
            let (from, frame) = self.next().await?;
            if let Some(news) = stream.hear(wanted, from, frame)? {
                if stream.acknowledges && (stream.next() >= stream.acked + ACK_EVERY || stream.has_finished()) {
                    self.acknowledge(stream).await?;
                }
                return Ok(news);
            }
        }
    }

    /// Acknowledges all, and waits until the replica has heard it: from then on nothing below comes again unasked.
    pub(crate) async fn settle(&mut self, stream: &mut Stream) -> Checked {
        /// No case has so many requests.
        const PROBE: u64 = 1 << 40;
        self.acknowledge(stream).await?;
        self.tell(stream.at, PROBE, ToSeat::Stop { upto: Tag(1) }).await?;
        let (wanted, probe) = (self.request(stream.sequence), self.request(PROBE));
        loop {
            let (from, frame) = self.next().await?;
            if matches!(&frame, ControlFrame::ToGateway { request, message: ToGateway::Stopped { .. }, .. } if *request == probe) {
                return Ok(());
            }
            if let Some(News::Message(message, why)) = stream.hear(wanted, from, frame)? {
                return failed(format!("an entry was due, and {message:?} came {why}"));
            }
        }
    }

    /// So many entries, or all.
    pub(crate) async fn entries(&mut self, stream: &mut Stream, count: u32) -> Checked {
        while stream.next() < count && !stream.has_finished() {
            if let News::Message(message, why) = self.news(stream).await? {
                return failed(format!("entry {} was due, and {message:?} came {why}", stream.next()));
            }
        }
        Ok(())
    }

    pub(crate) async fn finish(&mut self, stream: &mut Stream) -> Checked {
        self.entries(stream, u32::MAX).await
    }

    /// STOP(all), and its answer.
    pub(crate) async fn end(&mut self, stream: &Stream) -> Checked {
        self.tell(stream.at, stream.sequence, ToSeat::Stop { upto: Tag::ALL }).await?;
        let upto = self.stopped(stream.at, stream.sequence).await?;
        demand!(upto == Tag::ALL, "STOP(all) was answered by STOPPED({upto})");
        Ok(())
    }
}

impl Stream {
    fn hear(&mut self, wanted: RequestName, from: Place, frame: ControlFrame) -> Checked<Option<News>> {
        Ok(match frame {
            ControlFrame::Scheduled { request, cached, .. } if request == wanted => Some(News::Scheduled { cached }),
            ControlFrame::Moved { request, attempt, copied } if request == wanted => Some(News::Moved(attempt, copied)),
            ControlFrame::ToGateway { request, message, why } if request == wanted => match message {
                ToGateway::Output { index, .. } if self.was_reattached && index > self.next() => None,
                ToGateway::Output { epoch, index, entry } if from == self.at && epoch >= self.epoch => {
                    self.was_reattached = false;
                    Some(self.output(epoch, index, entry)?)
                }
                ToGateway::Output { .. } => None,
                message => Some(News::Message(message, why)),
            },
            _ => None,
        })
    }

    fn output(&mut self, epoch: Tag, index: u32, entry: OutputEntry) -> Checked<News> {
        demand!(epoch == self.epoch, "OUTPUT came under {epoch}, and the request runs under {}", self.epoch);
        let next = self.next();
        if let Some(known) = self.entries.get(index as usize) {
            demand!(identical(known, &entry), "entry {index} was {known:?}, and came again as {entry:?}");
            return Ok(News::Again(index));
        }
        demand!(index == next, "entry {index} came where {next} was due");
        demand!(!self.has_finished(), "entry {index} came after the finish");
        self.entries.push(entry);
        Ok(News::Entry)
    }
}

/// To the bit of its log-probabilities.
pub(crate) fn identical(a: &OutputEntry, b: &OutputEntry) -> bool {
    match (a, b) {
        (OutputEntry::Token { id, logprobs }, OutputEntry::Token { id: other, logprobs: others }) => id == other && logprobs == others,
        (a, b) => a == b,
    }
}

/// The same tokens, log-probabilities and finish: what a move must not change.
pub(crate) fn same(moved: &[OutputEntry], alone: &[OutputEntry]) -> Checked {
    same_within(moved, alone, 0.0)
}

/// As [`same`], for an engine whose log-probabilities depend by so much on what shares a step.
pub(crate) fn same_within(moved: &[OutputEntry], alone: &[OutputEntry], tolerance: f32) -> Checked {
    let differs = moved.iter().zip(alone).position(|(a, b)| !identical(a, b) && !alike(a, b, tolerance));
    if let Some(index) = differs {
        return failed(format!("entry {index} is {:?}, and {:?} where the request was left alone", moved[index], alone[index]));
    }
    demand!(moved.len() == alone.len(), "{} entries, and {} where the request was left alone", moved.len(), alone.len());
    Ok(())
}

/// Likely tokens whose log-probabilities are nearly equal may change places.
fn alike(a: &OutputEntry, b: &OutputEntry, tolerance: f32) -> bool {
    let near = |a: f32, b: f32| (a - b).abs() <= tolerance;
    match (a, b) {
        (OutputEntry::Token { id, logprobs: Some(ours) }, OutputEntry::Token { id: other, logprobs: Some(theirs) }) => {
            let mut pairs = ours.top.iter().zip(&theirs.top);
            id == other
                && near(ours.chosen, theirs.chosen)
                && ours.top.len() == theirs.top.len()
                && pairs.all(|(ours, theirs)| near(ours.1, theirs.1))
        }
        _ => false,
    }
}

/// The same tokens and finish: log-probabilities of a token that is computed in a prompt need not have the bits of one that was decoded.
pub(crate) fn same_tokens(run: &[OutputEntry], alone: &[OutputEntry]) -> Checked {
    let differs = run.iter().zip(alone).position(|(a, b)| a != b);
    demand!(differs.is_none(), "entry {differs:?} is not that of the request that was left alone");
    demand!(run.len() == alone.len(), "{} entries, and {} where the request was left alone", run.len(), alone.len());
    Ok(())
}

async fn read(mut reader: FrameReader, place: Place, frames: mpsc::Sender<Came>) {
    loop {
        let frame = reader.control().await;
        let ended = frame.is_err();
        if frames.send((place, frame)).await.is_err() || ended {
            return;
        }
    }
}
