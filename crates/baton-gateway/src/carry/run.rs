use std::{
    collections::VecDeque,
    sync::Arc,
    task::{Context, Poll},
};

use baton_units::{ReplicaId, RequestId, Tokens};
use baton_wire::migration::{OutputEntry, RunRequest};
use tokio::sync::mpsc;

use super::{Loss, NewSequence};
use crate::fleet::Fleet;

/// Entries after which the replica is told how many its client has taken.
const TAKEN_EVERY: u32 = 32;

/// What becomes known of one sequence of a request.
#[derive(Debug)]
pub(crate) enum RunEvent {
    Entry(OutputEntry),
    /// Prompt tokens that the replica found in its cache.
    Cached(u32),
    /// It goes on at another replica, with all that it had.
    Moved(ReplicaId),
    /// Nobody runs it until [`Run::go_on_at`].
    Lost(Loss),
}

/// The sequences of a request, one for each choice. Dropping it ends those that run.
#[derive(Debug)]
pub(crate) struct Run {
    fleet: Arc<Fleet>,
    sequences: Vec<Sequence>,
    waiting: VecDeque<NewSequence>,
    events: mpsc::UnboundedReceiver<(u32, RunEvent)>,
}

#[derive(Debug)]
struct Sequence {
    number: u64,
    taken: u32,
    told: u32,
}

impl Run {
    /// Starts a request of so many choices at the replica; `None` where it is not reached. The first choice begins: the others find its
    /// prompt's blocks when it is computed, see [`Self::start_rest`].
    pub(crate) fn start(fleet: &Arc<Fleet>, request: RequestId, replica: ReplicaId, run: &RunRequest, choices: u32) -> Option<Self> {
        let (sender, events) = mpsc::unbounded_channel();
        let prompt = Tokens(run.prompt.len() as u32);
        let sequence = |choice| {
            let run = RunRequest { choice_index: choice, ..run.clone() }.to_bytes().into();
            NewSequence { request, choice, run, prompt, events: sender.clone() }
        };
        let mut waiting: VecDeque<NewSequence> = (0..choices).map(sequence).collect();
        let first = waiting.pop_front()?;
        let number = fleet.with_desk(|desk, now| desk.start(replica, first, now)).ok()?;
        Some(Self { fleet: fleet.clone(), sequences: vec![Sequence::new(number)], waiting, events })
    }

    /// Starts the choices that wait for the first one's prompt; false where the replica is not reached, and they go on waiting.
    pub(crate) fn start_rest(&mut self, replica: ReplicaId) -> bool {
        while let Some(sequence) = self.waiting.pop_front() {
            match self.fleet.with_desk(|desk, now| desk.start(replica, sequence, now)) {
                Ok(number) => self.sequences.push(Sequence::new(number)),
                Err(sequence) => {
                    self.waiting.push_front(sequence);
                    return false;
                }
            }
        }
        true
    }

    /// The next event and the choice that it is of.
    pub(crate) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<(u32, RunEvent)> {
        // The desk keeps the other end for as long as a sequence is on it; after that nothing comes.
        match self.events.poll_recv(context) {
            Poll::Ready(Some(event)) => Poll::Ready(event),
            Poll::Ready(None) | Poll::Pending => Poll::Pending,
        }
    }

    /// One that has come already.
    pub(crate) fn take_next(&mut self) -> Option<(u32, RunEvent)> {
        self.events.try_recv().ok()
    }

    /// The client is given so many entries more of the choice.
    pub(crate) fn taken(&mut self, choice: u32, entries: u32) {
        let Some(sequence) = self.sequences.get_mut(choice as usize) else { return };
        sequence.taken += entries;
        if sequence.taken >= sequence.told + TAKEN_EVERY {
            sequence.told = sequence.taken;
            let (number, next) = (sequence.number, sequence.taken);
            self.fleet.with_desk(|desk, now| desk.taken(number, next, now));
        }
    }

    /// The choice has all that its client wants.
    pub(crate) fn end(&mut self, choice: u32) {
        if let Some(sequence) = self.sequences.get(choice as usize) {
            let number = sequence.number;
            self.fleet.with_desk(|desk, now| desk.end(number, now));
        }
    }

    /// Runs a lost choice on at `replica`, from what its client has. Tells whether that replica can be told.
    pub(crate) fn go_on_at(&mut self, choice: u32, replica: ReplicaId) -> bool {
        let Some(sequence) = self.sequences.get(choice as usize) else { return false };
        let number = sequence.number;
        self.fleet.with_desk(|desk, now| desk.force(number, replica, now))
    }
}

impl Sequence {
    fn new(number: u64) -> Self {
        Self { number, taken: 0, told: 0 }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let numbers: Vec<u64> = self.sequences.iter().map(|sequence| sequence.number).collect();
        self.fleet.with_desk(|desk, now| {
            for number in numbers {
                desk.end(number, now);
            }
        });
    }
}
