//! A gateway as small as the migration protocol allows: its registers over real connections, and nothing of HTTP.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use baton_link::{Connection, ConnectionError, FrameReader, FrameWriter, Identity};
use baton_migration::{GatewayName, Ownership, OwnershipInput, Phase, Place, RegisterOutput, RequestName, Tag, Timing, ToSeat};
use baton_units::Time;
use baton_wire::{
    migration::{
        ControlFrame, Copied, MoveTo, OutputEntry, RunRequest,
        handshake::{FleetKey, Role},
    },
    replica::Report,
};
use tokio::{sync::mpsc, task::JoinSet};

const PATIENCE: Duration = Duration::from_mins(1);

pub(crate) struct Gateway {
    name: GatewayName,
    key: Option<Arc<FleetKey>>,
    timing: Timing,
    origin: Instant,
    links: BTreeMap<Place, Link>,
    frames: mpsc::UnboundedReceiver<(Place, Option<ControlFrame>)>,
    sender: mpsc::UnboundedSender<(Place, Option<ControlFrame>)>,
    requests: BTreeMap<u64, Request>,
    readers: JoinSet<()>,
    /// Acknowledges what was delivered; without it a request stops after 256 entries.
    pub(crate) acknowledges: bool,
    /// A request of which nothing is acknowledged whatever `acknowledges` says.
    pub(crate) stalled: Option<u64>,
    /// Answers heartbeats.
    pub(crate) leases: bool,
    /// Where sources are sent to instead of a target's own address.
    pub(crate) kv_address: Option<String>,
    /// Tells sources another nonce than targets.
    pub(crate) wrong_nonce: bool,
    /// What replicas said that they hold, since they were attached.
    pub(crate) holds: Vec<(Place, RequestName, Phase)>,
    pub(crate) heartbeats: u64,
    /// Why attempts ended and requests were lost, where a replica said so.
    pub(crate) reasons: Vec<(u64, String)>,
    pub(crate) scheduled: Vec<Scheduled>,
    /// What moves took.
    pub(crate) moved: Vec<(u64, Tag, Copied)>,
}

/// What a replica told of a request before its first output.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scheduled {
    pub(crate) sequence: u64,
    pub(crate) at: Place,
    pub(crate) epoch: Tag,
    pub(crate) cached: u32,
    pub(crate) waited_us: u64,
    /// Entries that the gateway had then.
    pub(crate) delivered: usize,
}

struct Link {
    kv_address: String,
    writer: FrameWriter,
}

pub(crate) struct Request {
    pub(crate) ownership: Ownership<OutputEntry>,
    spec: RunRequest,
    pub(crate) delivered: Vec<OutputEntry>,
    pub(crate) committed: u32,
    pub(crate) attempts_ended: u32,
    /// Nobody runs it.
    pub(crate) lost: bool,
}

impl Request {
    pub(crate) fn has_finished(&self) -> bool {
        matches!(self.delivered.last(), Some(OutputEntry::Finish(_)))
    }
}

impl Gateway {
    pub(crate) fn new(timing: Timing) -> Self {
        let (sender, frames) = mpsc::unbounded_channel();
        Self {
            name: GatewayName { id: 7, incarnation: 70 },
            key: None,
            timing,
            origin: Instant::now(),
            links: BTreeMap::new(),
            frames,
            sender,
            requests: BTreeMap::new(),
            readers: JoinSet::new(),
            acknowledges: true,
            stalled: None,
            leases: true,
            kv_address: None,
            wrong_nonce: false,
            holds: Vec::new(),
            heartbeats: 0,
            reasons: Vec::new(),
            scheduled: Vec::new(),
            moved: Vec::new(),
        }
    }

    pub(crate) fn with_key(timing: Timing, key: FleetKey) -> Self {
        Self { key: Some(Arc::new(key)), ..Self::new(timing) }
    }

    /// Connects to a replica that told where it is.
    pub(crate) async fn attach(&mut self, report: &Report) -> Result<Place, ConnectionError> {
        let source = report.migration.as_ref().expect("the replica takes part in migration");
        let identity = Identity::of_gateway(self.name, self.key.clone());
        let Connection { hello, reader, writer } = baton_link::dial(&source.control_address, &identity, Role::Gateway, PATIENCE).await?;
        let place = hello.place();
        assert_eq!((place.replica.0, hello.incarnation), (source.replica, report.incarnation));
        assert_eq!((&hello.numerics_id, &hello.kv_layout), (&report.numerics_id, &source.kv_layout));
        self.readers.spawn(read_frames(reader, place, self.sender.clone()));
        let link = Link { kv_address: source.kv_address.clone(), writer };
        self.links.insert(place, link);
        Ok(place)
    }

    /// The replica's life has ended.
    pub(crate) async fn gone(&mut self, place: Place) {
        self.links.remove(&place);
        for number in self.requests.keys().copied().collect::<Vec<_>>() {
            self.tell(number, OwnershipInput::Gone { place }).await;
        }
    }

    pub(crate) async fn start(&mut self, number: u64, owner: Place, spec: RunRequest) {
        let ownership = Ownership::new(owner, self.timing, self.now());
        let request = Request { ownership, spec, delivered: Vec::new(), committed: 0, attempts_ended: 0, lost: false };
        self.requests.insert(number, request);
        self.carry_out(number).await;
    }

    pub(crate) async fn tell(&mut self, number: u64, input: OwnershipInput<OutputEntry>) {
        let now = self.now();
        self.requests.get_mut(&number).unwrap().ownership.handle(input, now);
        self.carry_out(number).await;
    }

    pub(crate) fn request(&self, number: u64) -> &Request {
        &self.requests[&number]
    }

    pub(crate) fn request_name(&self, number: u64) -> RequestName {
        RequestName { gateway: self.name, sequence: number }
    }

    pub(crate) fn is_quiescent(&self) -> bool {
        self.requests.values().all(|request| request.ownership.is_quiescent())
    }

    /// Lets time pass until it is so.
    pub(crate) async fn until(&mut self, what: &str, wanted: impl Fn(&Self) -> bool) {
        let wait = async {
            while !wanted(self) {
                let due = self.requests.values().map(|request| request.ownership.poll_timeout()).min().unwrap_or(Time::NEVER);
                let due = due.since(self.now()).min(PATIENCE);
                tokio::select! {
                    // The end of a connection says nothing here: a newer one may have ended it.
                    Some((from, frame)) = self.frames.recv() => if let Some(frame) = frame {
                        self.heard(from, frame).await;
                    },
                    () = tokio::time::sleep(due) => {
                        for number in self.requests.keys().copied().collect::<Vec<_>>() {
                            self.tell(number, OwnershipInput::Timeout).await;
                        }
                    }
                }
            }
        };
        tokio::time::timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("in vain: {what}"));
    }

    /// For tests that speak the protocol themselves.
    pub(crate) async fn next_frame(&mut self) -> (Place, ControlFrame) {
        loop {
            let (from, frame) = tokio::time::timeout(PATIENCE, self.frames.recv()).await.expect("a frame comes").unwrap();
            match frame.expect("the connection stays") {
                ControlFrame::Heartbeat(beat) => self.send(from, ControlFrame::Lease { sequence: beat.sequence }).await,
                frame => return (from, frame),
            }
        }
    }

    pub(crate) async fn send(&mut self, to: Place, frame: ControlFrame) {
        let Some(link) = self.links.get_mut(&to) else { return };
        if link.writer.control(&frame).await.is_err() || link.writer.flush().await.is_err() {
            self.links.remove(&to);
        }
    }

    /// Tells that all that was delivered was.
    pub(crate) async fn acknowledge(&mut self, number: u64) {
        let request = &self.requests[&number];
        let next = request.delivered.len() as u32;
        if let Some((to, epoch)) = request.ownership.register().owner() {
            let frame = self.to_seat(number, ToSeat::Ack { epoch, next }, Vec::new());
            self.send(to, frame).await;
        }
    }

    pub(crate) fn kv_address(&self, place: Place) -> String {
        self.kv_address.clone().unwrap_or_else(|| self.links[&place].kv_address.clone())
    }

    pub(crate) fn to_seat(&self, number: u64, message: ToSeat<OutputEntry>, with: Vec<u8>) -> ControlFrame {
        ControlFrame::ToSeat { request: self.request_name(number), message, with }
    }

    async fn heard(&mut self, from: Place, frame: ControlFrame) {
        match frame {
            ControlFrame::Heartbeat(beat) => {
                self.heartbeats += 1;
                if self.leases {
                    self.send(from, ControlFrame::Lease { sequence: beat.sequence }).await;
                }
            }
            ControlFrame::Holds { request, phase, tag, .. } => {
                self.holds.push((from, request, phase));
                if self.requests.contains_key(&request.sequence) {
                    self.tell(request.sequence, OwnershipInput::Holds { from, phase, tag }).await;
                }
            }
            ControlFrame::AllHeld => {
                for number in self.requests.keys().copied().collect::<Vec<_>>() {
                    self.tell(number, OwnershipInput::Attached { place: from }).await;
                }
            }
            // Of requests that a test runs by itself it knows nothing.
            ControlFrame::ToGateway { request, .. } if !self.requests.contains_key(&request.sequence) => {}
            ControlFrame::ToGateway { request, message, why } => {
                if !why.is_empty() {
                    self.reasons.push((request.sequence, why));
                }
                self.tell(request.sequence, OwnershipInput::FromSeat { from, message }).await;
            }
            ControlFrame::Scheduled { request, epoch, cached, waited_us } => {
                let known = self.requests.get(&request.sequence);
                let delivered = known.map_or(0, |request| request.delivered.len());
                self.scheduled.push(Scheduled { sequence: request.sequence, at: from, epoch, cached, waited_us, delivered });
            }
            ControlFrame::Moved { request, attempt, copied } => self.moved.push((request.sequence, attempt, copied)),
            other => panic!("{other:?} is not for a gateway"),
        }
    }

    async fn carry_out(&mut self, number: u64) {
        let mut delivered = false;
        while let Some(output) = self.requests.get_mut(&number).unwrap().ownership.poll() {
            let request = self.requests.get_mut(&number).unwrap();
            match output {
                RegisterOutput::ToSeat { to, message } => self.to(number, to, message).await,
                RegisterOutput::Deliver(entry) => {
                    request.delivered.push(entry);
                    delivered = true;
                }
                RegisterOutput::Committed { .. } => request.committed += 1,
                RegisterOutput::AttemptEnded { .. } => request.attempts_ended += 1,
                RegisterOutput::Started { .. } => {}
                RegisterOutput::Lost(_) => request.lost = true,
            }
        }
        if delivered && self.acknowledges && self.stalled != Some(number) {
            self.acknowledge(number).await;
        }
    }

    async fn to(&mut self, number: u64, to: Place, message: ToSeat<OutputEntry>) {
        let with = match &message {
            ToSeat::Start { .. } => self.requests[&number].spec.to_bytes(),
            ToSeat::Move { attempt, target, .. } => {
                if !self.links.contains_key(target) {
                    return;
                }
                let nonce = nonce(*attempt);
                let expect = ControlFrame::Expect { request: self.request_name(number), attempt: *attempt, source: to, nonce };
                let (kv_address, target) = (self.kv_address(*target), *target);
                self.send(target, expect).await;
                MoveTo { kv_address, nonce: if self.wrong_nonce { [0; 16] } else { nonce } }.to_bytes()
            }
            _ => Vec::new(),
        };
        let frame = self.to_seat(number, message, with);
        self.send(to, frame).await;
    }

    fn now(&self) -> Time {
        Time::ZERO + self.origin.elapsed()
    }
}

pub(crate) fn nonce(attempt: Tag) -> [u8; 16] {
    [attempt.0 as u8; 16]
}

async fn read_frames(mut reader: FrameReader, place: Place, frames: mpsc::UnboundedSender<(Place, Option<ControlFrame>)>) {
    loop {
        let frame = match reader.control().await {
            Ok(frame) => Some(frame),
            Err(ConnectionError::Io(_)) => None,
            Err(error) => panic!("{error}"),
        };
        let ended = frame.is_none();
        if frames.send((place, frame)).is_err() || ended {
            return;
        }
    }
}
