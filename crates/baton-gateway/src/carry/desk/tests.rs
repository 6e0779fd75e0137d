use std::time::Duration;

use baton_cost::{Link as Wire, MoveCase, MovePrice, StepCoefficients};
use baton_migration::{LostClass, Tag, ToGateway};
use baton_policy::mover::MoveReason;
use baton_units::{BlockSize, Incarnation};
use baton_wire::migration::{Copied, FinishReason, PrefixCopied, RunRequest};

use super::*;
use crate::carry::PrefixOrder;

const NAME: GatewayName = GatewayName { id: 7, incarnation: 70 };
const REQUEST: RequestId = RequestId(5);

/// A desk with replicas that are played by hand.
struct Bench {
    desk: Desk,
    frames: Vec<mpsc::Receiver<ControlFrame>>,
    events: mpsc::UnboundedReceiver<(u32, RunEvent)>,
    sender: mpsc::UnboundedSender<(u32, RunEvent)>,
    now: Time,
}

fn place(replica: u32) -> Place {
    Place { replica: ReplicaId(100 + replica), incarnation: Incarnation(1) }
}

fn price() -> MovePrice {
    let step = StepCoefficients { fixed_s: 0.01, per_token_s: 1e-3, per_attended_s: 0.0, per_kv_token_s: 0.0, weights_s: 0.0 };
    MovePrice::of(&MoveCase {
        kv_bytes_per_token: 1e4,
        block_size: BlockSize::default(),
        link: &Wire::custom(1.0),
        step: &step,
        step_s: 0.01,
        tokens: Tokens(10),
        held: Tokens::ZERO,
        decodes: true,
        queue_s: 0.0,
    })
}

fn decided(from: u32, to: u32, way: MoveWay) -> Move {
    let (from, to) = (ReplicaId(from), ReplicaId(to));
    Move { request: REQUEST, from, to, tokens: Tokens(10), way, reason: MoveReason::Operator, price: price() }
}

fn token(id: u32) -> OutputEntry {
    OutputEntry::Token { id, logprobs: None }
}

impl Bench {
    fn new(numerics: &[&str]) -> Self {
        let (sender, events) = mpsc::unbounded_channel();
        let mut bench = Self { desk: Desk::new(NAME), frames: Vec::new(), events, sender, now: Time::ZERO };
        for (replica, numerics_id) in (0..).zip(numerics) {
            let (frames, queue) = mpsc::channel(1024);
            bench.frames.push(queue);
            let link = Link {
                replica: ReplicaId(replica),
                numerics_id: (*numerics_id).to_owned(),
                kv_layout: None,
                kv_address: Some(format!("host:{replica}")),
                copies_prefixes: false,
                frames,
            };
            bench.desk.connected(place(replica), link, bench.now);
        }
        bench
    }

    fn start(&mut self, replica: u32, choice: u32) -> u64 {
        let new =
            NewSequence { request: REQUEST, choice, run: Arc::from([1, 2, 3].as_slice()), prompt: Tokens(8), events: self.sender.clone() };
        self.desk.start(ReplicaId(replica), new, self.now).unwrap()
    }

    /// The replica says something of a sequence.
    fn say(&mut self, replica: u32, sequence: u64, message: ToGateway<OutputEntry>, why: &str) {
        self.now += Duration::from_millis(10);
        let request = RequestName { gateway: NAME, sequence };
        self.desk.heard(place(replica), ControlFrame::ToGateway { request, message, why: why.to_owned() }, self.now);
    }

    fn output(&mut self, replica: u32, sequence: u64, epoch: u32, index: u32, entry: OutputEntry) {
        self.say(replica, sequence, ToGateway::Output { epoch: Tag(epoch), index, entry }, "");
    }

    /// What was sent to the replica since the last look.
    fn sent(&mut self, replica: u32) -> Vec<ControlFrame> {
        std::iter::from_fn(|| self.frames[replica as usize].try_recv().ok()).collect()
    }

    fn told(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.events.try_recv().ok())
            .map(|(choice, event)| match event {
                RunEvent::Entry(OutputEntry::Token { id, .. }) => format!("{choice}: {id}"),
                RunEvent::Entry(OutputEntry::Finish(_)) => format!("{choice}: finish"),
                RunEvent::Cached(tokens) => format!("{choice}: {tokens} cached"),
                RunEvent::Moved(replica) => format!("{choice}: at {replica}"),
                RunEvent::Anew(replica) => format!("{choice}: anew at {replica}"),
                RunEvent::Lost(loss) => format!(
                    "{choice}: lost, {}{}",
                    loss.why,
                    match loss.class {
                        LostClass::Lost => "",
                        LostClass::Refused => ", refused",
                        LostClass::Busy => ", busy",
                    }
                ),
            })
            .collect()
    }

    fn arrived(&mut self) -> Vec<ReplicaId> {
        let arrived = |effect| if let Effect::Arrived { to, .. } = effect { Some(to) } else { None };
        self.desk.take_effects().into_iter().filter_map(arrived).collect()
    }

    fn open_attempt(&mut self, replica: u32) -> Tag {
        let opened = |frame: &ControlFrame| {
            if let ControlFrame::ToSeat { message: ToSeat::Move { attempt, .. }, .. } = frame { Some(*attempt) } else { None }
        };
        self.sent(replica).iter().find_map(opened).expect("the source is told to move")
    }

    /// Takes the sequence from replica 0 to replica 1, which gives its token number `index`.
    fn move_over(&mut self, sequence: u64, epoch: u32, index: u32) -> u32 {
        let attempt = self.open_attempt(0);
        self.say(0, sequence, ToGateway::CommitTarget { epoch: Tag(epoch), attempt, frozen: index }, "");
        self.output(1, sequence, attempt.0, index, token(50 + index));
        attempt.0
    }
}

#[test]
fn a_request_runs_moves_and_is_told_as_one_stream() {
    let mut bench = Bench::new(&["n", "n"]);
    let sequence = bench.start(0, 0);
    let started = bench.sent(0);
    assert!(matches!(&started[..], [ControlFrame::ToSeat { message: ToSeat::Start { .. }, with, .. }] if with == &[1, 2, 3]));
    assert_eq!(bench.desk.check_departure(REQUEST, ReplicaId(1)), Err(NotMovable::NotStarted));
    bench.desk.heard(
        place(0),
        ControlFrame::Scheduled { request: RequestName { gateway: NAME, sequence }, epoch: Tag(1), cached: 6, waited_us: 1 },
        bench.now,
    );
    bench.output(0, sequence, 1, 0, token(40));
    bench.output(0, sequence, 1, 1, token(41));
    assert_eq!(bench.told(), ["0: 6 cached", "0: 40", "0: 41"]);
    let (tell, mut told) = oneshot::channel();
    bench.desk.depart(decided(0, 1, MoveWay::Kv), Some(tell), bench.now).unwrap();
    assert_eq!(bench.desk.depart(decided(0, 1, MoveWay::Kv), None, bench.now), Err(NotMovable::Moving));
    let expected = bench.sent(1);
    let attempt = bench.open_attempt(0);
    let nonce = |frames: &[ControlFrame]| match frames {
        [ControlFrame::Expect { source, nonce, .. }] if *source == place(0) => *nonce,
        other => panic!("{other:?}"),
    };
    assert_ne!(nonce(&expected), [0; 16]);
    let copied = Copied { bytes: 900, held: 2, rounds: 1, gap_us: 1500 };
    bench.say(0, sequence, ToGateway::CommitTarget { epoch: Tag(1), attempt, frozen: 2 }, "");
    bench.desk.heard(place(0), ControlFrame::Moved { request: RequestName { gateway: NAME, sequence }, attempt, copied }, bench.now);
    assert!(told.try_recv().is_err(), "it is not there before it goes on");
    bench.output(1, sequence, attempt.0, 2, token(42));
    let records = told.try_recv().unwrap();
    let record = &records[0];
    assert_eq!((record.outcome, record.bytes_sent, record.blocks_already_held), (MoveOutcome::Moved, 900, 2));
    assert_eq!((record.compute_gap_ms, record.gap_ms), (Some(1.5), Some(20.0)));
    assert_eq!(bench.arrived(), [ReplicaId(1)]);
    // What the source says after its freeze counts no more, and it is told to let go.
    bench.output(0, sequence, 1, 2, token(99));
    assert!(bench.sent(0).iter().any(|frame| matches!(frame, ControlFrame::ToSeat { message: ToSeat::Stop { .. }, .. })));
    bench.output(1, sequence, attempt.0, 3, OutputEntry::Finish(FinishReason::Length));
    assert_eq!(bench.told(), ["0: at r1", "0: 42", "0: finish"]);
    assert_eq!(bench.desk.moves(9).len(), 1);
    bench.desk.end(sequence, bench.now);
    assert_eq!(bench.desk.check_departure(REQUEST, ReplicaId(0)), Err(NotMovable::NotCarried));
}

#[test]
fn a_move_that_comes_to_nothing_says_why_and_the_source_goes_on() {
    let mut bench = Bench::new(&["n", "n", "other"]);
    let sequence = bench.start(0, 0);
    bench.output(0, sequence, 1, 0, token(40));
    let unlike = NotMovable::OtherNumerics { ours: "n".into(), theirs: "other".into() };
    assert_eq!(bench.desk.check_departure(REQUEST, ReplicaId(2)), Err(unlike));
    assert_eq!(bench.desk.check_departure(REQUEST, ReplicaId(0)), Err(NotMovable::AlreadyThere));
    assert_eq!(bench.desk.check_departure(REQUEST, ReplicaId(9)), Err(NotMovable::NoConnection(ReplicaId(9))));
    let (tell, mut told) = oneshot::channel();
    bench.desk.depart(decided(0, 1, MoveWay::Kv), Some(tell), bench.now).unwrap();
    let attempt = bench.open_attempt(0);
    bench.say(0, sequence, ToGateway::Aborted { epoch: Tag(1), attempt }, "no room");
    let record = &told.try_recv().unwrap()[0];
    assert_eq!((record.outcome, record.why.as_deref()), (MoveOutcome::Stayed, Some("no room")));
    bench.output(0, sequence, 1, 1, token(41));
    assert_eq!(bench.told(), ["0: 40", "0: 41"]);
    assert_eq!(bench.arrived(), []);
    assert!(bench.desk.is_movable(REQUEST), "another time");
}

#[test]
fn a_lost_request_is_told_once_and_goes_on_from_what_was_delivered() {
    let mut bench = Bench::new(&["n", "n"]);
    let sequence = bench.start(0, 0);
    bench.output(0, sequence, 1, 0, token(40));
    bench.desk.disconnected(place(0), bench.now);
    bench.desk.disconnected(place(0), bench.now);
    assert_eq!(bench.told(), ["0: 40", "0: lost, its replica is lost"]);
    let suspected = bench.desk.take_effects();
    assert!(matches!(&suspected[..], [Effect::Suspected { replica: ReplicaId(0), .. }]), "{suspected:?}");
    assert!(!bench.desk.force(sequence, ReplicaId(0), bench.now), "it is not reached");
    assert!(bench.desk.force(sequence, ReplicaId(1), bench.now));
    let started = bench.sent(1);
    let [ControlFrame::ToSeat { message: ToSeat::Start { epoch, delivered }, .. }] = &started[..] else { panic!("{started:?}") };
    assert_eq!(delivered, &[token(40)]);
    let epoch = epoch.0;
    // The lost one comes back and speaks: nobody listens.
    bench.output(0, sequence, 1, 1, token(99));
    bench.output(1, sequence, epoch, 1, token(41));
    assert_eq!(bench.told(), ["0: 41"]);
    let moves = bench.desk.moves(9);
    assert_eq!((moves[0].outcome, moves[0].from, moves[0].to), (MoveOutcome::Continued, ReplicaId(0), ReplicaId(1)));
}

#[test]
fn a_replica_that_is_silent_hangs_and_one_that_is_cut_off_may_not() {
    let mut bench = Bench::new(&["n", "n"]);
    bench.desk.disconnected(place(1), bench.now);
    let at = bench.desk.poll_timeout();
    bench.desk.timeout(at);
    assert!(bench.desk.hangs(ReplicaId(0)) && bench.desk.numerics_of(ReplicaId(0)).is_none());
    assert!(!bench.desk.hangs(ReplicaId(1)) && bench.desk.numerics_of(ReplicaId(1)).is_none());
    let beat = baton_wire::migration::Heartbeat { sequence: 1, steps: 1, step_predicted_us: 0, waiting: 0, running: 0 };
    bench.desk.heard(place(0), ControlFrame::Heartbeat(beat), at);
    assert!(!bench.desk.hangs(ReplicaId(0)) && bench.desk.numerics_of(ReplicaId(0)).is_some());
    assert!(matches!(&bench.sent(0)[..], [ControlFrame::Lease { sequence: 1 }]));
}

#[test]
fn what_a_replica_refuses_comes_with_its_reason() {
    let said = [
        (LostClass::Lost, "", "0: lost, its replica is lost"),
        (LostClass::Refused, "cannot be run here: no token", "0: lost, cannot be run here: no token, refused"),
        (LostClass::Busy, "cannot be run here: too long", "0: lost, cannot be run here: too long, busy"),
    ];
    for (class, why, told) in said {
        let mut bench = Bench::new(&["n"]);
        let sequence = bench.start(0, 0);
        bench.say(0, sequence, ToGateway::Lost { epoch: Tag(1), class }, why);
        assert_eq!(bench.told(), [told]);
    }
}

#[test]
fn choices_of_a_request_leave_one_after_the_other_and_arrive_together() {
    let mut bench = Bench::new(&["n", "n"]);
    let sequences = [bench.start(0, 0), bench.start(0, 1)];
    for sequence in sequences {
        bench.output(0, sequence, 1, 0, token(40));
    }
    bench.sent(0);
    bench.desk.depart(decided(0, 1, MoveWay::Kv), None, bench.now).unwrap();
    bench.move_over(sequences[0], 1, 1);
    assert_eq!(bench.arrived(), [], "half of it is not there");
    assert!(!bench.desk.is_movable(REQUEST));
    bench.move_over(sequences[1], 1, 1);
    assert_eq!(bench.arrived(), [ReplicaId(1)]);
    assert!(bench.desk.is_movable(REQUEST));
}

/// A choice that has finished is let go of while another one runs on, and so moves.
#[test]
fn a_request_moves_with_those_of_its_choices_that_run() {
    let mut bench = Bench::new(&["n", "n"]);
    let sequences = [bench.start(0, 0), bench.start(0, 1)];
    for sequence in sequences {
        bench.output(0, sequence, 1, 0, token(40));
    }
    bench.output(0, sequences[0], 1, 1, OutputEntry::Finish(FinishReason::Length));
    assert!(bench.desk.is_movable(REQUEST), "the other one is");
    bench.say(0, sequences[0], ToGateway::Stopped { upto: Tag::ALL }, "");
    bench.sent(0);
    bench.desk.depart(decided(0, 1, MoveWay::Kv), None, bench.now).unwrap();
    bench.move_over(sequences[1], 1, 1);
    assert_eq!(bench.arrived(), [ReplicaId(1)]);
    bench.desk.end(sequences[0], bench.now);
    bench.output(1, sequences[1], 2, 2, OutputEntry::Finish(FinishReason::Length));
    assert_eq!(bench.desk.check_departure(REQUEST, ReplicaId(0)), Err(NotMovable::NotCarried));
}

/// One that finishes while it is copied, and another that is to follow it.
#[test]
fn a_choice_that_finishes_on_its_way_does_not_keep_the_others() {
    let mut bench = Bench::new(&["n", "n"]);
    let sequences = [bench.start(0, 0), bench.start(0, 1)];
    for sequence in sequences {
        bench.output(0, sequence, 1, 0, token(40));
    }
    bench.sent(0);
    let (tell, mut told) = oneshot::channel();
    bench.desk.depart(decided(0, 1, MoveWay::Kv), Some(tell), bench.now).unwrap();
    bench.output(0, sequences[0], 1, 1, OutputEntry::Finish(FinishReason::Length));
    bench.say(0, sequences[0], ToGateway::Stopped { upto: Tag::ALL }, "");
    let records = told.try_recv().unwrap();
    assert_eq!(records.iter().map(|record| record.outcome).collect::<Vec<_>>(), [MoveOutcome::Ended]);
    assert!(bench.desk.is_movable(REQUEST), "the other one is, another time");
}

#[test]
fn a_request_that_goes_by_its_tokens_begins_anew_with_what_it_has() {
    let mut bench = Bench::new(&["n", "n"]);
    let sequence = bench.start(0, 0);
    bench.output(0, sequence, 1, 0, token(40));
    bench.sent(0);
    bench.desk.depart(decided(0, 1, MoveWay::Recompute), None, bench.now).unwrap();
    let started = bench.sent(1);
    let [ControlFrame::ToSeat { message: ToSeat::Start { epoch, delivered }, .. }] = &started[..] else { panic!("{started:?}") };
    assert_eq!(delivered.len(), 1);
    let epoch = epoch.0;
    bench.output(1, sequence, epoch, 1, token(41));
    assert_eq!(bench.told(), ["0: 40", "0: anew at r1", "0: 41"]);
    assert_eq!(bench.arrived(), [ReplicaId(1)]);
    assert_eq!(bench.desk.moves(9)[0].outcome, MoveOutcome::Continued);
}

#[test]
fn who_leaves_ends_its_move() {
    let mut bench = Bench::new(&["n", "n"]);
    let sequence = bench.start(0, 0);
    bench.output(0, sequence, 1, 0, token(40));
    let (tell, mut told) = oneshot::channel();
    bench.desk.depart(decided(0, 1, MoveWay::Kv), Some(tell), bench.now).unwrap();
    bench.sent(1);
    bench.desk.end(sequence, bench.now);
    assert_eq!(told.try_recv().unwrap()[0].outcome, MoveOutcome::Ended);
    let stops = |frames: Vec<ControlFrame>| {
        frames.iter().any(|frame| matches!(frame, ControlFrame::ToSeat { message: ToSeat::Stop { upto: Tag::ALL }, .. }))
    };
    assert!(stops(bench.sent(0)) && stops(bench.sent(1)), "both let go");
}

/// Replicas that copy prefixes and read each other's KV, as their numerics say.
fn copying(numerics: &[&str]) -> Bench {
    let mut bench = Bench::new(numerics);
    for link in bench.desk.links.values_mut() {
        link.copies_prefixes = true;
        link.kv_layout = Some(KvLayout { format: "f".to_owned(), block_size: 16, block_bytes: 1024 });
    }
    bench
}

fn order(from: u32, to: u32) -> PrefixOrder {
    PrefixOrder {
        request: REQUEST,
        from: ReplicaId(from),
        to: ReplicaId(to),
        prefix: RunRequest { model: "m".to_owned(), prompt: vec![1; 32], ..RunRequest::default() },
        kind: "fetch",
        reason: String::new(),
        expected_ms: 5.0,
    }
}

fn copied(bench: &mut Bench, replica: u32, number: u64) {
    bench.now += Duration::from_millis(10);
    let request = RequestName { gateway: NAME, sequence: number };
    let copied = PrefixCopied { blocks: 2, held: 1, bytes: 1024, took_us: 9_000 };
    bench.desk.heard(place(replica), ControlFrame::PrefixCopied { request, attempt: Tag(1), copied }, bench.now);
}

fn stops(bench: &mut Bench, replica: u32) -> usize {
    bench.sent(replica).iter().filter(|frame| matches!(frame, ControlFrame::ToSeat { message: ToSeat::Stop { .. }, .. })).count()
}

#[test]
fn a_prefix_is_there_when_its_target_says_so() {
    let mut bench = copying(&["n", "n"]);
    let now = bench.now;
    let (number, mut told) = bench.desk.copy_prefix(order(0, 1), now).unwrap();
    let (to_holder, to_target) = (bench.sent(0), bench.sent(1));
    let [ControlFrame::CopyPrefix { request, attempt, target, to, prefix }] = &to_holder[..] else { panic!("{to_holder:?}") };
    let [ControlFrame::Expect { request: expected, attempt: same, source, nonce }] = &to_target[..] else { panic!("{to_target:?}") };
    assert_eq!((request, attempt, *target, *source), (expected, same, place(1), place(0)));
    assert_eq!(MoveTo::from_bytes(to).unwrap(), MoveTo { kv_address: "host:1".to_owned(), nonce: *nonce });
    assert_eq!(RunRequest::from_bytes(prefix).unwrap().prompt.len(), 32);
    copied(&mut bench, 0, number);
    assert!(told.try_recv().is_err(), "the holder has always had it");
    copied(&mut bench, 1, number);
    let record = told.try_recv().unwrap();
    assert_eq!((record.outcome, record.bytes_sent, record.blocks_already_held), (MoveOutcome::Moved, 1024, 1));
    assert_eq!(record.copied_ms, Some(20.0));
    assert!(matches!(&bench.desk.take_effects()[..], [Effect::Ended(ended)] if ended.kind == "fetch"));
    let now = bench.now;
    bench.desk.end_copy(number, now);
    assert_eq!((stops(&mut bench, 0), stops(&mut bench, 1)), (0, 0), "it has ended");
}

#[test]
fn a_copy_ends_with_either_side_or_when_nobody_waits() {
    let outcome = |end: fn(&mut Bench, u64)| {
        let mut bench = copying(&["n", "n"]);
        let now = bench.now;
        let (number, mut told) = bench.desk.copy_prefix(order(0, 1), now).unwrap();
        bench.sent(0);
        bench.sent(1);
        end(&mut bench, number);
        let record = told.try_recv().unwrap();
        // Whatever is said of it later changes nothing.
        copied(&mut bench, 1, number);
        (record.outcome, record.why.unwrap_or_default(), stops(&mut bench, 0), stops(&mut bench, 1))
    };
    let aborted = |bench: &mut Bench, number| bench.say(0, number, ToGateway::Aborted { epoch: Tag(0), attempt: Tag(1) }, "not cached");
    assert_eq!(outcome(aborted), (MoveOutcome::Stayed, "not cached".to_owned(), 0, 0));
    let gone = |bench: &mut Bench, _| {
        let now = bench.now;
        bench.desk.gone(ReplicaId(0), now);
    };
    assert_eq!(outcome(gone), (MoveOutcome::Stayed, "its replica is lost".to_owned(), 0, 0));
    let waits_no_more = |bench: &mut Bench, number| {
        let now = bench.now;
        bench.desk.end_copy(number, now);
    };
    assert_eq!(outcome(waits_no_more), (MoveOutcome::Ended, String::new(), 1, 1));
}

#[test]
fn only_replicas_that_know_how_and_read_each_other_s_kv_are_told_to_copy() {
    let mut bench = copying(&["n", "n", "other"]);
    assert!(bench.desk.can_copy(ReplicaId(0), ReplicaId(1)));
    assert!(!bench.desk.can_copy(ReplicaId(0), ReplicaId(2)), "other bits");
    assert!(!bench.desk.can_copy(ReplicaId(0), ReplicaId(0)), "to itself");
    assert!(!bench.desk.can_copy(ReplicaId(0), ReplicaId(9)), "not reached");
    assert_eq!(bench.desk.peer_group(ReplicaId(0)), bench.desk.peer_group(ReplicaId(1)));
    assert_ne!(bench.desk.peer_group(ReplicaId(0)), bench.desk.peer_group(ReplicaId(2)));
    bench.desk.links.get_mut(&place(1)).unwrap().copies_prefixes = false;
    let now = bench.now;
    assert!(bench.desk.copy_prefix(order(0, 1), now).is_none() && bench.desk.copy_prefix(order(1, 0), now).is_none(), "an older one");
    assert!((0..2).all(|replica| bench.sent(replica).is_empty()), "is told nothing that it does not know");
}
