use baton_units::ReplicaId;

use super::*;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Value {
    Token(u32),
    Finish,
}

impl Entry for Value {
    fn is_finish(&self) -> bool {
        *self == Self::Finish
    }
}

type Input = OwnersInput<Value>;
type Output = OwnersOutput<Value>;

fn place(replica: u32, incarnation: u64) -> Place {
    Place { replica: ReplicaId(replica), incarnation: Incarnation(incarnation) }
}

const fn seconds(seconds: u64) -> Time {
    Time(seconds * 1_000_000_000)
}

/// A gateway that knows two replicas, at one moment.
struct Gateway {
    owners: Owners<Value>,
    now: Time,
}

impl Gateway {
    fn new() -> Self {
        let mut gateway = Self { owners: Owners::new(Timing::default()), now: Time::ZERO };
        for replica in 0..2 {
            assert_eq!(gateway.hears(Input::Connected { place: place(replica, 1) }), []);
        }
        gateway
    }

    /// And what it does.
    fn hears(&mut self, input: Input) -> Vec<Output> {
        self.owners.handle(input, self.now);
        std::iter::from_fn(|| self.owners.poll()).collect()
    }

    /// Beats of the replica and timers until then.
    fn waits(&mut self, until: Time, beats: &[Place]) -> Vec<Output> {
        let (mut outputs, mut sequence) = (Vec::new(), 0);
        while self.now < until {
            let next = self.now + Timing::default().heartbeat;
            while self.owners.poll_timeout() <= next {
                self.now = self.now.max(self.owners.poll_timeout());
                outputs.extend(self.hears(Input::Timeout));
            }
            self.now = next;
            sequence += 1;
            for &place in beats {
                let beat = Beat { sequence, steps: sequence, step_predicted: Duration::ZERO, requests: 0 };
                outputs.extend(self.hears(Input::Beat { place, beat }));
            }
        }
        outputs
    }

    fn says(&mut self, from: Place, message: ToGateway<Value>) -> Vec<Output> {
        self.hears(Input::FromSeat { sequence: 1, from, message })
    }

    fn output(&mut self, from: Place, epoch: u32, index: u32) -> Vec<Output> {
        self.says(from, ToGateway::Output { epoch: Tag(epoch), index, entry: Value::Token(index) })
    }

    /// Request 1, of which the owner has shown that it runs.
    fn starts(&mut self, owner: Place) {
        let start = ToSeat::Start { epoch: Tag(1), delivered: Vec::new() };
        assert_eq!(self.hears(Input::Start { sequence: 1, owner }), [to(owner, start)]);
        let outputs = self.output(owner, 1, 0);
        assert_eq!(
            outputs,
            [Output::Started { sequence: 1, owner, epoch: Tag(1) }, Output::Deliver { sequence: 1, entry: Value::Token(0) }]
        );
    }
}

fn to(to: Place, message: ToSeat<Value>) -> Output {
    Output::ToSeat { sequence: 1, to, message }
}

fn stop(place: Place, upto: Tag) -> Output {
    to(place, ToSeat::Stop { upto })
}

fn ack(place: Place, next: u32) -> Output {
    to(place, ToSeat::Ack { epoch: Tag(1), next })
}

#[test]
fn a_request_is_run_and_forgotten_when_its_replica_has_let_go() {
    let (mut gateway, owner) = (Gateway::new(), place(0, 1));
    gateway.starts(owner);
    assert_eq!(gateway.owners.requests_on(owner).collect::<Vec<_>>(), [1]);
    let outputs = gateway.says(owner, ToGateway::Output { epoch: Tag(1), index: 1, entry: Value::Finish });
    assert_eq!(outputs, [Output::Deliver { sequence: 1, entry: Value::Finish }, stop(owner, Tag::ALL)]);
    assert_eq!(gateway.owners.requests_on(owner).count(), 0);
    assert!(!gateway.owners.is_quiescent());
    assert_eq!(gateway.says(owner, ToGateway::Stopped { upto: Tag::ALL }), [Output::Forgotten { sequence: 1 }]);
    assert!(gateway.owners.is_quiescent() && gateway.owners.ownership(1).is_none());
    assert_eq!(gateway.output(owner, 1, 1), [stop(owner, Tag::ALL)], "what is not known is stopped");
    let holds = Input::Holds { sequence: 1, from: owner, phase: Phase::Running, tag: Tag(1) };
    assert_eq!(gateway.hears(holds), [stop(owner, Tag::ALL)]);
    assert_eq!(gateway.says(owner, ToGateway::Stopped { upto: Tag::ALL }), [], "or it would be answered for ever");
}

#[test]
fn a_move_says_from_where_to_where_and_none_goes_to_who_is_suspected() {
    let (mut gateway, source, target) = (Gateway::new(), place(0, 1), place(1, 1));
    gateway.starts(source);
    assert_eq!(gateway.hears(Input::Move { sequence: 1, target: place(2, 1) }), [], "never connected");
    let suspected = gateway.hears(Input::Disconnected { place: target });
    assert_eq!(suspected, [Output::Suspected { place: target, suspicion: Suspicion::Disconnected }]);
    assert_eq!(gateway.hears(Input::Move { sequence: 1, target }), []);
    assert_eq!(gateway.hears(Input::Connected { place: target }), [Output::Trusted { place: target }]);
    let (epoch, attempt) = (Tag(1), Tag(2));
    assert_eq!(gateway.hears(Input::Move { sequence: 1, target }), [to(source, ToSeat::Move { epoch, attempt, target })]);
    let outputs = gateway.says(source, ToGateway::CommitTarget { epoch, attempt, frozen: 1 });
    let start = ToSeat::Start { epoch: attempt, delivered: vec![Value::Token(0)] };
    assert_eq!(outputs, [Output::Committed { sequence: 1, attempt, from: source, to: target }, to(target, start)]);
    assert_eq!((gateway.owners.requests_on(source).count(), gateway.owners.requests_on(target).count()), (0, 1));
    let outputs = gateway.output(target, 2, 1);
    let started = Output::Started { sequence: 1, owner: target, epoch: attempt };
    assert_eq!(outputs, [started, stop(source, Tag(1)), Output::Deliver { sequence: 1, entry: Value::Token(1) }]);
}

#[test]
fn a_source_is_told_to_go_on_when_its_target_is_silent_or_gone() {
    let (source, target) = (place(0, 1), place(1, 1));
    for ends in [Input::Disconnected { place: target }, Input::Gone { place: target }, Input::Stay { sequence: 1 }] {
        let mut gateway = Gateway::new();
        gateway.starts(source);
        gateway.hears(Input::Move { sequence: 1, target });
        let (epoch, attempt) = (Tag(1), Tag(2));
        let outputs = gateway.hears(ends.clone());
        assert!(outputs.contains(&to(source, ToSeat::No { epoch, attempt })), "{ends:?} {outputs:?}");
        assert!(outputs.contains(&Output::AttemptEnded { sequence: 1, attempt }));
        // It is told again until it answers, and that is no news.
        let (until, later) = (gateway.now + Timing::default().heartbeat, gateway.now + 4 * Timing::default().heartbeat);
        let again = gateway.waits(until, &[source]);
        assert!(again.contains(&to(source, ToSeat::No { epoch, attempt })), "{again:?}");
        let older = gateway.says(source, ToGateway::Aborted { epoch, attempt: Tag(1) });
        assert_eq!((older, gateway.owners.ownership(1).unwrap().register().given_up()), (vec![], Some(attempt)));
        assert_eq!(gateway.says(source, ToGateway::Aborted { epoch, attempt }), []);
        let later = gateway.waits(later, &[source]);
        assert!(!later.contains(&to(source, ToSeat::No { epoch, attempt })), "{later:?}");
        assert!(gateway.owners.ownership(1).unwrap().can_move());
    }
}

#[test]
fn what_makes_another_owner_or_epoch_answers_that_an_attempt_is_over() {
    let (source, target) = (place(0, 1), place(1, 1));
    let (epoch, attempt) = (Tag(1), Tag(2));
    let answers = [
        Input::FromSeat { sequence: 1, from: source, message: ToGateway::CommitSource { epoch, attempt, frozen: 1 } },
        Input::Force { sequence: 1, owner: target },
        Input::End { sequence: 1 },
    ];
    for answer in answers {
        let mut gateway = Gateway::new();
        gateway.starts(source);
        gateway.hears(Input::Move { sequence: 1, target });
        gateway.hears(Input::Stay { sequence: 1 });
        let given_up = |gateway: &Gateway| gateway.owners.ownership(1).unwrap().register().given_up();
        assert_eq!(given_up(&gateway), Some(attempt));
        let asked = gateway.says(source, ToGateway::CommitTarget { epoch, attempt, frozen: 1 });
        assert_eq!((asked, given_up(&gateway)), (vec![to(source, ToSeat::No { epoch, attempt })], Some(attempt)));
        gateway.hears(answer.clone());
        assert_eq!(given_up(&gateway), None, "{answer:?}");
    }
}

#[test]
fn a_request_is_lost_when_its_owner_is_or_was_suspected_or_has_a_new_life() {
    let (mut gateway, owner) = (Gateway::new(), place(0, 1));
    let lost = |owner| Output::Lost { sequence: 1, owner, class: LostClass::Lost };
    let outputs = gateway.hears(Input::Start { sequence: 1, owner: place(9, 1) });
    assert_eq!(outputs[1..], [lost(place(9, 1))], "at once: nobody will be suspected anew");
    let start = ToSeat::Start { epoch: Tag(2), delivered: Vec::new() };
    assert_eq!(gateway.hears(Input::Force { sequence: 1, owner })[0], to(owner, start));
    let outputs = gateway.hears(Input::Disconnected { place: owner });
    assert_eq!(outputs, [Output::Suspected { place: owner, suspicion: Suspicion::Disconnected }, lost(owner)]);
    let outputs = gateway.hears(Input::Force { sequence: 1, owner });
    assert_eq!(outputs.last(), Some(&lost(owner)), "a suspected replica is no place");
    gateway.hears(Input::Force { sequence: 1, owner: place(1, 1) });
    assert_eq!(gateway.hears(Input::Connected { place: place(1, 2) }), [lost(place(1, 1))]);
    assert!(gateway.owners.is_suspected(place(1, 1)) && !gateway.owners.is_suspected(place(1, 2)));
}

#[test]
fn silence_makes_a_replica_suspected_and_in_the_end_nothing_waits_for_it() {
    let (mut gateway, owner, other) = (Gateway::new(), place(0, 1), place(1, 1));
    gateway.starts(owner);
    let outputs = gateway.waits(seconds(3), &[other]);
    assert!(outputs.contains(&Output::Lost { sequence: 1, owner, class: LostClass::Lost }) && gateway.owners.is_suspected(owner));
    assert!(outputs.contains(&Output::Lease { to: other, sequence: 6 }) && !gateway.owners.is_suspected(other));
    gateway.hears(Input::End { sequence: 1 });
    let outputs = gateway.waits(seconds(19), &[other]);
    assert!(outputs.contains(&stop(owner, Tag::ALL)), "it is repeated");
    assert!(!gateway.owners.is_quiescent(), "its leases may not have ended");
    assert!(gateway.waits(seconds(21), &[other]).contains(&Output::Forgotten { sequence: 1 }));
    // It was only asleep.
    let outputs = gateway.waits(seconds(22), &[owner, other]);
    assert!(outputs.contains(&Output::Trusted { place: owner }));
    assert_eq!(gateway.output(owner, 1, 1), [stop(owner, Tag::ALL)]);
}

#[test]
fn a_request_that_ends_while_a_replica_is_long_silent_does_not_wait_for_it() {
    let (mut gateway, source, target) = (Gateway::new(), place(0, 1), place(1, 1));
    gateway.starts(source);
    gateway.waits(seconds(30), &[target]);
    gateway.hears(Input::Force { sequence: 1, owner: target });
    let outputs = gateway.hears(Input::End { sequence: 1 });
    assert!(outputs.contains(&stop(target, Tag::ALL)));
    assert_eq!(gateway.says(target, ToGateway::Stopped { upto: Tag::ALL }), [Output::Forgotten { sequence: 1 }]);
}

#[test]
fn what_a_client_takes_is_acknowledged_now_and_then_and_again_when_it_was_not_heard() {
    let (mut gateway, owner) = (Gateway::new(), place(0, 1));
    gateway.starts(owner);
    let mut acked = vec![0];
    for index in 1..300 {
        gateway.output(owner, 1, index);
        for output in gateway.hears(Input::Taken { sequence: 1, next: index + 1 }) {
            let Output::ToSeat { message: ToSeat::Ack { next, .. }, .. } = output else { panic!("{output:?}") };
            acked.push(next);
        }
        assert!(index + 1 - acked.last().unwrap() < 256);
    }
    assert!((4..=8).contains(&acked.len()), "{acked:?}");
    // The replica says again what it thinks was not taken.
    assert_eq!(gateway.output(owner, 1, 256), [ack(owner, 300)]);
    assert_eq!(gateway.output(owner, 1, 257), [], "once for all that come together");
    gateway.now += Timing::default().repeat;
    assert_eq!(gateway.output(owner, 1, 257), [ack(owner, 300)]);
    let keep = to(owner, ToSeat::Keep { epoch: Tag(1), next: 300 });
    assert_eq!(gateway.hears(Input::AllHeld { place: owner }), [keep, ack(owner, 300)]);
    assert_eq!(gateway.hears(Input::Taken { sequence: 1, next: 1_000 }), [], "no more can be taken than was delivered");
}

#[test]
fn what_an_older_life_says_is_not_heard() {
    let (mut gateway, owner) = (Gateway::new(), place(0, 1));
    gateway.starts(owner);
    gateway.hears(Input::Connected { place: place(0, 2) });
    assert_eq!(gateway.output(owner, 1, 1), []);
    let beat = Beat { sequence: 1, steps: 0, step_predicted: Duration::ZERO, requests: 0 };
    assert_eq!(gateway.hears(Input::Beat { place: owner, beat }), []);
    assert_eq!(gateway.hears(Input::AllHeld { place: owner }), []);
}
