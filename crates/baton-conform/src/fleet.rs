//! A gateway as a real one is: [`Owners`] over two replicas, without clients.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use baton_migration::{Beat, GatewayName, Owners, OwnersInput, OwnersOutput, Place, Tag, Timing, ToSeat};
use baton_units::Time;
use baton_wire::migration::{ControlFrame, Copied, MoveTo, OutputEntry, RunRequest, handshake::Hello};

use crate::{
    gateway::Gateway,
    suite::{Suite, movable, random},
    verdict::{Checked, demand, failed, skipped},
};

/// A stream that ended before it could move is run again.
const TRIES: u64 = 50;

/// Two replicas that compute the same bits, and all requests on them.
pub struct Fleet {
    gateway: Gateway,
    owners: Owners<OutputEntry>,
    origin: Instant,
    patience: Duration,
    /// As in [`Options`](crate::Options).
    pub replica: Place,
    pub peer: Place,
    requests: BTreeMap<u64, Request>,
    nonces: BTreeMap<(u64, Tag), [u8; 16]>,
}

/// What the gateway has of a request.
pub struct Request {
    spec: RunRequest,
    pub delivered: Vec<OutputEntry>,
    /// When each entry came.
    pub times: Vec<Instant>,
    acknowledges: bool,
    /// Moves that were committed.
    pub committed: u32,
    /// Attempts that ended with the source going on.
    pub attempts_ended: u32,
    /// It has ended, and both have let go.
    pub forgotten: bool,
    /// What the moves took, as their sources say.
    pub moved: Vec<Copied>,
    /// Places that told what its prompt found.
    pub(crate) scheduled: Vec<Place>,
    /// Why attempts ended.
    pub reasons: Vec<String>,
}

impl Request {
    pub fn has_finished(&self) -> bool {
        matches!(self.delivered.last(), Some(OutputEntry::Finish(_)))
    }
}

impl Fleet {
    /// Attaches to both.
    ///
    /// # Errors
    /// As a case: skipped where there is no peer, or nothing moves between the two.
    pub async fn attached(suite: &Suite) -> Checked<Self> {
        let Some(address) = &suite.options.peer else { return skipped("no --peer was given") };
        let name = GatewayName { id: random()?, incarnation: 1 };
        let mut gateway = Gateway::new(suite, name);
        // The machine answers heartbeats itself.
        gateway.leases = false;
        let replica = gateway.attach(&suite.options.replica).await?;
        let peer = gateway.attach(address).await?;
        let (here, there) = (gateway.hello(replica), gateway.hello(peer));
        movable(here)?;
        if (&here.numerics_id, &here.kv_layout) != (&there.numerics_id, &there.kv_layout) {
            return skipped(format!("the peer does not compute the same bits: \"{}\" and \"{}\"", here.numerics_id, there.numerics_id));
        }
        let owners = Owners::new(Timing::default());
        let (origin, patience) = (Instant::now(), suite.patience());
        let mut fleet = Self { gateway, owners, origin, patience, replica, peer, requests: BTreeMap::new(), nonces: BTreeMap::new() };
        for place in [replica, peer] {
            fleet.tell(OwnersInput::Connected { place }).await?;
        }
        Ok(fleet)
    }

    /// One that was started.
    pub fn request(&self, sequence: u64) -> &Request {
        &self.requests[&sequence]
    }

    /// A new request, at the replica.
    pub async fn start(&mut self, sequence: u64, spec: &RunRequest) -> Checked {
        self.start_at(sequence, spec, self.replica).await
    }

    /// A new request.
    pub async fn start_at(&mut self, sequence: u64, spec: &RunRequest, owner: Place) -> Checked {
        let request = Request {
            spec: spec.clone(),
            delivered: Vec::new(),
            times: Vec::new(),
            acknowledges: true,
            committed: 0,
            attempts_ended: 0,
            forgotten: false,
            moved: Vec::new(),
            scheduled: Vec::new(),
            reasons: Vec::new(),
        };
        self.requests.insert(sequence, request);
        self.tell(OwnersInput::Start { sequence, owner }).await
    }

    /// # Errors
    /// When a replica is lost or suspected, or a connection broke.
    pub async fn tell(&mut self, input: OwnersInput<OutputEntry>) -> Checked {
        self.owners.handle(input, self.now());
        self.carry_out().await
    }

    /// Lets time pass until it is so, for the suite's patience at most.
    pub async fn until(&mut self, what: &str, wanted: impl Fn(&Self) -> bool) -> Checked {
        let patience = self.patience;
        let wait = async {
            while !wanted(self) {
                let due = self.owners.poll_timeout().since(self.now()).min(patience);
                tokio::select! {
                    came = self.gateway.receive() => {
                        let (from, frame) = came?;
                        self.heard(from, frame).await?;
                    }
                    () = tokio::time::sleep(due) => self.tell(OwnersInput::Timeout).await?,
                }
            }
            Ok(())
        };
        tokio::time::timeout(patience, wait).await.unwrap_or_else(|_| failed(format!("in vain for {patience:?}: {what}")))
    }

    /// Until so many entries, or all.
    pub async fn delivered(&mut self, sequence: u64, count: usize) -> Checked {
        self.until("entries come", |fleet| {
            let request = fleet.request(sequence);
            request.delivered.len() >= count || request.has_finished()
        })
        .await
    }

    pub(crate) async fn finish(&mut self, sequence: u64) -> Checked {
        self.until("the request ends", |fleet| fleet.request(sequence).has_finished()).await?;
        self.until("all let go", |fleet| fleet.request(sequence).forgotten).await
    }

    /// Without acknowledgement, so that it does not end; false when it ended before it could move.
    pub(crate) async fn moves(&mut self, sequence: u64, target: Place) -> Checked<bool> {
        let before = self.request(sequence).committed;
        self.opens(sequence, target).await?;
        self.until("the move is committed", |fleet| {
            let request = fleet.request(sequence);
            request.committed > before || request.attempts_ended > 0 || request.forgotten
        })
        .await?;
        let request = self.request(sequence);
        if request.committed == before && !request.has_finished() {
            self.until("the request goes on", |fleet| fleet.request(sequence).has_finished()).await?;
            if !self.request(sequence).reasons.iter().any(|why| why.contains("finish")) {
                return failed(format!("the move ended: {:?}", self.request(sequence).reasons));
            }
        }
        let moved = self.request(sequence).committed > before;
        self.acknowledges(sequence, true).await?;
        Ok(moved)
    }

    /// Only as far as the attempt is open.
    pub(crate) async fn opens(&mut self, sequence: u64, target: Place) -> Checked {
        self.until("it can move", |fleet| {
            fleet.owners.ownership(sequence).is_none_or(|ownership| ownership.can_move() || ownership.register().has_ended())
        })
        .await?;
        self.acknowledges(sequence, false).await?;
        self.tell(OwnersInput::Move { sequence, target }).await
    }

    /// Whether entries are acknowledged as they come; without it a request stands after 256.
    pub async fn acknowledges(&mut self, sequence: u64, acknowledges: bool) -> Checked {
        let request = self.requests.get_mut(&sequence).expect("a case moves what it started");
        request.acknowledges = acknowledges;
        let next = request.delivered.len() as u32;
        if acknowledges { self.tell(OwnersInput::Taken { sequence, next }).await } else { Ok(()) }
    }

    /// Runs the request and moves it by `stops`, each after some more entries, to its end.
    pub(crate) async fn travels(&mut self, spec: &RunRequest, stops: &[Place]) -> Checked<u64> {
        let first = self.requests.last_key_value().map_or(1, |(last, _)| last + 1);
        'tries: for sequence in first..first + TRIES {
            self.start(sequence, spec).await?;
            for (index, stop) in stops.iter().enumerate() {
                self.delivered(sequence, 3 + 20 * index).await?;
                if !self.moves(sequence, *stop).await? {
                    self.finish(sequence).await?;
                    continue 'tries;
                }
            }
            self.finish(sequence).await?;
            let committed = self.request(sequence).committed;
            demand!(committed as usize == stops.len(), "{committed} moves were committed, and {} were made", stops.len());
            return Ok(sequence);
        }
        skipped(format!("no request was slow enough to be moved in {TRIES} tries; give a longer --output"))
    }

    async fn heard(&mut self, from: Place, frame: ControlFrame) -> Checked {
        match frame {
            ControlFrame::Heartbeat(beat) => {
                let beat = Beat {
                    sequence: beat.sequence,
                    steps: beat.steps,
                    step_predicted: Duration::from_micros(beat.step_predicted_us),
                    requests: beat.waiting + beat.running,
                };
                self.tell(OwnersInput::Beat { place: from, beat }).await
            }
            ControlFrame::Holds { request, phase, tag, .. } => {
                self.tell(OwnersInput::Holds { sequence: request.sequence, from, phase, tag }).await
            }
            ControlFrame::AllHeld => self.tell(OwnersInput::AllHeld { place: from }).await,
            ControlFrame::ToGateway { request, message, why } => {
                if !why.is_empty()
                    && let Some(known) = self.requests.get_mut(&request.sequence)
                {
                    known.reasons.push(why);
                }
                self.tell(OwnersInput::FromSeat { sequence: request.sequence, from, message }).await
            }
            ControlFrame::Scheduled { request, .. } => {
                self.requests.entry(request.sequence).and_modify(|known| known.scheduled.push(from));
                Ok(())
            }
            ControlFrame::Moved { request, copied, .. } => {
                self.requests.entry(request.sequence).and_modify(|known| known.moved.push(copied));
                Ok(())
            }
            // Of no request.
            ControlFrame::PrefixCopied { .. } => Ok(()),
            other @ (ControlFrame::Lease { .. }
            | ControlFrame::Expect { .. }
            | ControlFrame::ToSeat { .. }
            | ControlFrame::CopyPrefix { .. }) => failed(format!("a replica sent {other:?}, which only gateways send")),
        }
    }

    async fn carry_out(&mut self) -> Checked {
        while let Some(output) = self.owners.poll() {
            match output {
                OwnersOutput::ToSeat { sequence, to, message } => self.pass_on(sequence, to, message).await?,
                OwnersOutput::Lease { to, sequence } => self.gateway.send(to, &ControlFrame::Lease { sequence }).await?,
                OwnersOutput::Deliver { sequence, entry } => {
                    let request = self.requests.get_mut(&sequence).expect("it was started here");
                    request.delivered.push(entry);
                    request.times.push(Instant::now());
                    if request.acknowledges {
                        let next = request.delivered.len() as u32;
                        self.owners.handle(OwnersInput::Taken { sequence, next }, self.now());
                    }
                }
                OwnersOutput::Committed { sequence, .. } => self.known(sequence).committed += 1,
                OwnersOutput::AttemptEnded { sequence, .. } => self.known(sequence).attempts_ended += 1,
                OwnersOutput::Forgotten { sequence } => self.known(sequence).forgotten = true,
                OwnersOutput::Lost { sequence, owner, .. } => {
                    return failed(format!("{owner} lost request {sequence}: {:?}", self.request(sequence).reasons));
                }
                OwnersOutput::Suspected { place, suspicion } => return failed(format!("{place} is suspected: {suspicion}")),
                OwnersOutput::Started { .. } | OwnersOutput::Trusted { .. } => {}
            }
        }
        Ok(())
    }

    fn known(&mut self, sequence: u64) -> &mut Request {
        self.requests.get_mut(&sequence).expect("it was started here")
    }

    async fn pass_on(&mut self, sequence: u64, to: Place, message: ToSeat<OutputEntry>) -> Checked {
        let with = match &message {
            ToSeat::Start { .. } => self.request(sequence).spec.to_bytes(),
            ToSeat::Move { attempt, target, .. } => {
                let nonce = match self.nonces.get(&(sequence, *attempt)) {
                    Some(nonce) => *nonce,
                    None => [random()?.to_le_bytes(), random()?.to_le_bytes()].concat().try_into().expect("twice eight bytes"),
                };
                self.nonces.insert((sequence, *attempt), nonce);
                let (_, kv_address) = movable(self.gateway.hello(*target))?;
                let request = self.gateway.request(sequence);
                self.gateway.send(*target, &ControlFrame::Expect { request, attempt: *attempt, source: to, nonce }).await?;
                MoveTo { kv_address, nonce }.to_bytes()
            }
            ToSeat::Keep { .. } | ToSeat::No { .. } | ToSeat::Resume { .. } | ToSeat::Stop { .. } | ToSeat::Ack { .. } => Vec::new(),
        };
        self.gateway.tell_with(to, sequence, message, with).await
    }

    /// How a replica introduced itself.
    pub fn hello(&self, place: Place) -> &Hello {
        self.gateway.hello(place)
    }

    fn now(&self) -> Time {
        Time::ZERO + self.origin.elapsed()
    }
}
