use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
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
    /// It goes on at another replica from its tokens, those before this event.
    Anew(ReplicaId),
    /// Nobody runs it until [`Run::go_on_at`].
    Lost(Loss),
}

/// The sequences of a request, one for each choice of each prompt: they are numbered over all prompts, those of the first one first. Dropping
/// it ends those that run.
#[derive(Debug)]
pub(crate) struct Run {
    fleet: Arc<Fleet>,
    choices_per_prompt: u32,
    sequences: BTreeMap<u32, Sequence>,
    waiting: VecDeque<NewSequence>,
    /// Prompts of which a choice has output.
    begun: BTreeSet<u32>,
    events: mpsc::UnboundedReceiver<(u32, RunEvent)>,
}

#[derive(Debug)]
struct Sequence {
    number: u64,
    taken: u32,
    told: u32,
}

impl Run {
    /// Starts a request of so many choices of each prompt at the replica; `None` where it is not reached. The first choice of each prompt
    /// begins: the others find its blocks when they are computed, see [`Self::start_rest`].
    pub(crate) fn start(
        fleet: &Arc<Fleet>,
        request: RequestId,
        replica: ReplicaId,
        prompts: &[RunRequest],
        choices_per_prompt: u32,
    ) -> Option<Self> {
        let (sender, events) = mpsc::unbounded_channel();
        let mut run = Self {
            fleet: fleet.clone(),
            choices_per_prompt,
            sequences: BTreeMap::new(),
            waiting: VecDeque::new(),
            begun: BTreeSet::new(),
            events,
        };
        for (prompt, index) in prompts.iter().zip(0..) {
            for choice_index in 0..choices_per_prompt {
                let new = NewSequence {
                    request,
                    choice: index * choices_per_prompt + choice_index,
                    run: RunRequest { choice_index, ..prompt.clone() }.to_bytes().into(),
                    prompt: Tokens(prompt.prompt.len() as u32),
                    events: sender.clone(),
                };
                run.waiting.push_back(new);
            }
        }
        let firsts = |choice: u32| choice.is_multiple_of(choices_per_prompt);
        run.start_those(replica, firsts).then_some(run)
    }

    /// The prompt of which the choice is the first.
    pub(crate) fn first_of(&self, choice: u32) -> Option<u32> {
        choice.is_multiple_of(self.choices_per_prompt).then(|| choice / self.choices_per_prompt)
    }

    /// The choice has output: its prompt is computed.
    pub(crate) fn has_begun(&mut self, choice: u32) {
        self.begun.insert(choice / self.choices_per_prompt);
    }

    /// Starts the choices that wait for a prompt that has begun; false where the replica is not reached, and they go on waiting.
    pub(crate) fn start_rest(&mut self, replica: ReplicaId) -> bool {
        let (begun, choices_per_prompt) = (self.begun.clone(), self.choices_per_prompt);
        self.waiting.is_empty() || self.start_those(replica, |choice| begun.contains(&(choice / choices_per_prompt)))
    }

    fn start_those(&mut self, replica: ReplicaId, wanted: impl Fn(u32) -> bool) -> bool {
        let mut reached = true;
        for sequence in std::mem::take(&mut self.waiting) {
            let choice = sequence.choice;
            let started = if reached && wanted(choice) {
                self.fleet.with_desk(|desk, now| desk.start(replica, sequence, now))
            } else {
                self.waiting.push_back(sequence);
                continue;
            };
            match started {
                Ok(number) => _ = self.sequences.insert(choice, Sequence::new(number)),
                Err(sequence) => {
                    self.waiting.push_back(sequence);
                    reached = false;
                }
            }
        }
        reached
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
        let Some(sequence) = self.sequences.get_mut(&choice) else { return };
        sequence.taken += entries;
        if sequence.taken >= sequence.told + TAKEN_EVERY {
            sequence.told = sequence.taken;
            let (number, next) = (sequence.number, sequence.taken);
            self.fleet.with_desk(|desk, now| desk.taken(number, next, now));
        }
    }

    /// The choice has all that its client wants.
    pub(crate) fn end(&mut self, choice: u32) {
        if let Some(sequence) = self.sequences.get(&choice) {
            let number = sequence.number;
            self.fleet.with_desk(|desk, now| desk.end(number, now));
        }
    }

    /// Runs a lost choice on at `replica`, from what its client has. Tells whether that replica can be told.
    pub(crate) fn go_on_at(&mut self, choice: u32, replica: ReplicaId) -> bool {
        let Some(sequence) = self.sequences.get(&choice) else { return false };
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
        let numbers: Vec<u64> = self.sequences.values().map(|sequence| sequence.number).collect();
        self.fleet.with_desk(|desk, now| {
            for number in numbers {
                desk.end(number, now);
            }
        });
    }
}
