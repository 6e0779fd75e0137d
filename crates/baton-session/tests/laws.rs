//! The laws of a session, over arbitrary orders of inputs: late, repeated, of attempts long over, after the end.

use std::{collections::BTreeMap, time::Duration};

use baton_session::{Action, Answer, End, Epoch, Fault, Input, Limits, Offer, Session, SessionConfig};
use baton_units::{ReplicaId, Time};
use proptest::prelude::*;

const REPLICAS: u32 = 4;

#[derive(Debug, Clone)]
enum Event {
    Input(Input),
    Offer {
        epoch: u32,
        choice: u32,
        index: u32,
        count: u32,
    },
    /// As an engine does it: the next tokens of a choice of the current attempt.
    Next {
        choice: u32,
        count: u32,
    },
    Wait(u64),
}

fn fault() -> impl Strategy<Value = Fault> {
    prop::sample::select(vec![
        Fault::Unreachable,
        Fault::Status(503),
        Fault::Status(429),
        Fault::InBand,
        Fault::Truncated,
        Fault::Aborted,
        Fault::Garbled,
    ])
}

fn event() -> impl Strategy<Value = Event> {
    let epoch = || (1u32..5).prop_map(Epoch);
    prop_oneof![
        6 => (0..REPLICAS, 1u64..50).prop_map(|(replica, ms)| Event::Input(Input::Placed {
            replica: ReplicaId(replica),
            first_token_within: Duration::from_millis(ms),
        })),
        1 => Just(Event::Input(Input::Refused)),
        4 => (epoch(), 0u32..2).prop_map(|(epoch, choice)| Event::Input(Input::ChoiceFinished { epoch, choice })),
        3 => epoch().prop_map(|epoch| Event::Input(Input::Completed { epoch })),
        1 => epoch().prop_map(|epoch| Event::Input(Input::Rejected { epoch })),
        4 => (epoch(), fault()).prop_map(|(epoch, fault)| Event::Input(Input::Failed { epoch, fault })),
        1 => Just(Event::Input(Input::ReplicaAlive)),
        2 => epoch().prop_map(|epoch| Event::Input(Input::Leave { epoch })),
        1 => Just(Event::Input(Input::ClientGone)),
        1 => Just(Event::Input(Input::DrainDeadline)),
        3 => (1u32..5, 0u32..2, 0u32..4, 0u32..3)
            .prop_map(|(epoch, choice, index, count)| Event::Offer { epoch, choice, index, count }),
        8 => (0u32..2, 1u32..3).prop_map(|(choice, count)| Event::Next { choice, count }),
        3 => (1u64..40).prop_map(Event::Wait),
    ]
}

/// What a shell would see, with the laws checked at each step.
#[derive(Default)]
struct Shell {
    running: Option<Epoch>,
    started: u32,
    /// Who had it last.
    last: Option<ReplicaId>,
    failed: Vec<ReplicaId>,
    answers: Vec<Answer>,
    ends: Vec<End>,
    /// Delivered count of each choice, as its client counts.
    seen: BTreeMap<u32, u32>,
    finished: BTreeMap<u32, bool>,
}

impl Shell {
    /// Whether the next attempt has to begin where the client's output ends.
    fn goes_on(&self, restartable: bool) -> bool {
        !restartable && self.seen.values().any(|count| *count > 0)
    }

    fn perform(&mut self, session: &mut Session, restartable: bool, resumable: bool) {
        while let Some(action) = session.poll() {
            assert!(self.ends.is_empty(), "{action:?} came after the end");
            match action {
                Action::Place { excluded } => {
                    assert!(self.running.is_none(), "placed again while it runs");
                    if self.goes_on(restartable) {
                        assert!(resumable, "goes on though nobody can");
                        assert_eq!(excluded, self.last.into_iter().collect::<Vec<_>>());
                    } else {
                        assert!(self.failed.iter().all(|replica| excluded.contains(replica)));
                    }
                }
                Action::Start(owner) => {
                    assert!(self.running.is_none(), "two owners");
                    self.running = Some(owner.epoch);
                    self.last = Some(owner.replica);
                    self.started += 1;
                    assert_eq!(owner.epoch, Epoch(self.started));
                    if !self.goes_on(restartable) {
                        self.seen.clear();
                        self.finished.clear();
                    }
                }
                Action::Stop(owner) => {
                    assert_eq!(self.running.take(), Some(owner.epoch), "stopped what does not run");
                    self.failed.push(owner.replica);
                }
                Action::Suspect { replica, .. } => self.failed.push(replica),
                Action::Answer(answer) => self.answers.push(answer),
                Action::End(end) => self.ends.push(end),
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_request_ends_once_has_one_owner_and_delivers_each_index_once(
        events in prop::collection::vec(event(), 1..60),
        attempts in 1u32..4,
        restartable in any::<bool>(),
        resumable in any::<bool>(),
        choices in prop::option::of(1u32..3),
    ) {
        let limits = Limits { attempts, stall: Duration::from_millis(30), total: Duration::from_millis(300) };
        let mut session = Session::new(SessionConfig { limits, choices, restartable }, Time::ZERO);
        let mut shell = Shell::default();
        let mut now = Time::ZERO;
        shell.perform(&mut session, restartable, resumable);
        for event in events {
            let running = shell.running;
            session.set_resumable(resumable);
            match event {
                Event::Wait(ms) => {
                    now += Duration::from_millis(ms);
                    session.handle(Input::Timeout, now);
                }
                Event::Input(Input::Placed { replica, .. }) if shell.failed.contains(&replica) => {}
                Event::Input(input) => {
                    // What ends an attempt from outside closes it at the shell as well.
                    if let Input::Completed { epoch } | Input::Rejected { epoch } | Input::Failed { epoch, .. } = input
                        && running == Some(epoch)
                    {
                        shell.running = None;
                    }
                    if let Input::ChoiceFinished { epoch, choice } = input
                        && running == Some(epoch)
                    {
                        shell.finished.insert(choice, true);
                    }
                    session.handle(input, now);
                }
                Event::Offer { epoch, choice, index, count } => {
                    let offer = session.offer(Epoch(epoch), choice, index, count, now);
                    if let Offer::Deliver { skip } = offer {
                        prop_assert_eq!(running, Some(Epoch(epoch)), "an old attempt spoke");
                        let seen = shell.seen.entry(choice).or_default();
                        prop_assert_eq!(index + skip, *seen, "an index was repeated or left out");
                        *seen += count.saturating_sub(skip);
                    }
                }
                Event::Next { choice, count } => {
                    let Some(epoch) = running else { continue };
                    if shell.finished.contains_key(&choice) {
                        continue;
                    }
                    let index = session.delivered(choice);
                    prop_assert_eq!(session.offer(epoch, choice, index, count, now), Offer::Deliver { skip: 0 });
                    *shell.seen.entry(choice).or_default() += count;
                }
            }
            shell.perform(&mut session, restartable, resumable);
            prop_assert_eq!(session.owner().map(|owner| owner.epoch), shell.running);
            prop_assert!(resumable || session.attempts() <= attempts);
        }
        // Time alone brings every request to its end.
        while let Some(due) = session.poll_timeout() {
            prop_assert!(due <= Time::ZERO + limits.total);
            now = now.max(due);
            session.set_resumable(resumable);
            session.handle(Input::Timeout, now);
            if let Some(replica) = (0..REPLICAS).map(ReplicaId).find(|replica| !shell.failed.contains(replica)) {
                session.handle(Input::Placed { replica, first_token_within: Duration::from_millis(5) }, now);
            }
            shell.perform(&mut session, restartable, resumable);
        }
        prop_assert_eq!(shell.ends.len(), 1);
        prop_assert_eq!(shell.running, None, "something runs after the end");
        prop_assert!(shell.answers.len() <= 1);
        let end = shell.ends[0];
        prop_assert_eq!(shell.answers.contains(&Answer::Complete), end == End::Finished);
        prop_assert_eq!(shell.answers.is_empty(), end == End::Cancelled);
        if end == End::Finished {
            let expected = choices.unwrap_or(1).max(shell.seen.len() as u32);
            prop_assert!(shell.finished.len() as u32 >= expected, "a false end: {:?} of {:?}", shell.finished, shell.seen);
        }
    }
}
