//! Replicas and gateways that die or stand still in the middle of a move.

use crate::{
    client::{Answer, Ask, Reading},
    common::{Handle, Server, signal, wait_for_stop},
    fleet::{Fleet, Make, Ordered, SOME, counter, report, until_empty},
};

/// Whose point it is of the move from r0 to r1.
const SOURCE: usize = 0;
const TARGET: usize = 1;
const REPLICAS: usize = 3;
const TOKENS: u32 = 500;
/// Fleets at once; they wait more than they compute.
const LANES: usize = 4;

fn timed() -> Make {
    Make::timed().with(&["--blocks", "1024", "--max-model-len", "8192"])
}

/// Of a prompt of many blocks.
fn ask() -> Ask {
    Ask::chat(&"what is told here is long ".repeat(200), TOKENS).sampled(7)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Kill,
    Stop,
}

impl Fault {
    fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Stop => "stop",
        }
    }

    fn signal(self) -> i32 {
        match self {
            Self::Kill => libc::SIGKILL,
            Self::Stop => libc::SIGSTOP,
        }
    }

    /// Waits until it has happened to the process.
    fn await_at(self, replica: &Server) {
        match self {
            Self::Kill => Handle::of(replica.pid()).wait_for_end(),
            Self::Stop => wait_for_stop(replica.pid()),
        }
    }

    fn has_happened_to(self, replica: &Server) -> bool {
        // Its state follows the name in brackets; a child that ended is there until somebody waits for it.
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", replica.pid())).unwrap_or_default();
        let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
        match self {
            Self::Kill => matches!(state, None | Some('Z' | 'X')),
            Self::Stop => state == Some('T'),
        }
    }
}

/// Replicas that fail, each at a point of its own.
type Faults = Vec<(usize, &'static str, Fault)>;

fn every_point() -> Vec<Faults> {
    let points = [
        (SOURCE, "source-copying"),
        (SOURCE, "source-frozen"),
        (SOURCE, "source-asked"),
        (TARGET, "target-preparing"),
        (TARGET, "target-prepared"),
        (TARGET, "target-owning"),
    ];
    points.into_iter().flat_map(|(who, point)| [Fault::Kill, Fault::Stop].map(|fault| vec![(who, point, fault)])).collect()
}

/// Points that both sides of one move reach.
fn both_sides() -> Vec<Faults> {
    let pairs = [
        (("source-asked", Fault::Kill), ("target-owning", Fault::Kill)),
        (("source-asked", Fault::Stop), ("target-owning", Fault::Kill)),
        (("source-asked", Fault::Kill), ("target-owning", Fault::Stop)),
        (("source-asked", Fault::Stop), ("target-owning", Fault::Stop)),
        (("source-asked", Fault::Stop), ("target-prepared", Fault::Kill)),
        (("source-asked", Fault::Kill), ("target-prepared", Fault::Stop)),
    ];
    pairs.into_iter().map(|(source, target)| vec![(SOURCE, source.0, source.1), (TARGET, target.0, target.1)]).collect()
}

/// Waits for more output than what was on its way, which is of who goes on with the request.
fn read_from_elsewhere(fleet: &Fleet, request_id: &str, reading: &mut Reading) {
    let row = fleet.request(request_id).expect("it has far to go");
    let before = row["output_tokens"].as_u64().unwrap() as usize;
    reading.read_until(before + SOME);
}

/// Whether neither side of the move has the request.
fn is_elsewhere(fleet: &Fleet, request_id: &str) -> bool {
    let row = fleet.request(request_id).expect("it has far to go");
    row["replica"].as_str().is_some_and(|replica| ![SOURCE, TARGET].iter().any(|side| replica == format!("r{side}")))
}

/// Moves a request whose source or target, or both, fail on the way: its client must not notice, and nothing may be left anywhere.
fn outlives(faults: &Faults) {
    let make = timed();
    let replica = |index: usize| {
        let fault = faults.iter().find(|(who, ..)| *who == index).map(|(_, point, fault)| format!("{point}:{}", fault.name()));
        make.replica(&format!("r{index}"), &fault.as_deref().map(|fault| ("BATON_FAULT", fault)).into_iter().collect::<Vec<_>>())
    };
    let mut fleet = Fleet::of(&make, (0..REPLICAS).map(replica).collect());
    let (ask, id) = (ask(), "moved");
    let mut reading = fleet.begin_at(SOURCE, &ask, id);
    let answer = std::thread::scope(|scope| {
        scope.spawn(|| fleet.migrate(id, TARGET));
        let [(first, _, fault), others @ ..] = &faults[..] else { panic!("a case without a fault") };
        fault.await_at(&fleet.replicas[*first]);
        for (who, _, fault) in others {
            // Who dies right behind its question may take the question with it: then the move ends, and the other side's point is not reached.
            while !(fault.has_happened_to(&fleet.replicas[*who]) || is_elsewhere(&fleet, id)) {
                std::thread::yield_now();
            }
        }
        read_from_elsewhere(&fleet, id, &mut reading);
        for (who, ..) in faults.iter().filter(|(.., fault)| *fault == Fault::Stop) {
            signal(fleet.replicas[*who].pid(), libc::SIGCONT);
        }
        reading.read_to_end()
    });
    let ended: Vec<bool> = fleet.replicas.iter().map(|replica| Fault::Kill.has_happened_to(replica)).collect();
    fleet.keep(|index| !ended[index]);
    check(&fleet, &ask, &answer, &format!("{faults:?}"));
    fleet.until_at_rest();
}

/// Compares with the answer of a replica alone.
fn check(fleet: &Fleet, ask: &Ask, answer: &Answer, what: &str) {
    let alone = ask.answer(&fleet.replicas.last().unwrap().url, "alone");
    assert!(alone.is_whole(), "{alone:?}");
    assert_eq!(*answer, alone, "{what}");
    assert_eq!(answer.tokens(), TOKENS as usize);
}

/// Runs all, some at a time.
fn all_at_once<T: Sync>(cases: &[T], run: impl Fn(&T) + Sync) {
    let run = &run;
    std::thread::scope(|scope| {
        for lane in 0..LANES {
            scope.spawn(move || cases.iter().skip(lane).step_by(LANES).for_each(run));
        }
    });
}

#[test]
fn a_stream_outlives_its_source_or_its_target_at_every_point_of_a_move() {
    all_at_once(&every_point(), outlives);
}

#[test]
fn a_stream_outlives_both_sides_of_a_move() {
    all_at_once(&both_sides(), outlives);
}

/// *One owner*, by what the replicas say that they have computed: who stands still with a request has no part in it when it comes back.
#[test]
fn who_stood_still_with_a_request_computes_nothing_of_it_afterwards() {
    const TOKENS: u32 = 160;
    /// Entries of the steps before it stood still may not have left it; they are computed again elsewhere.
    const UNDER_WAY: u64 = 2;
    for (who, point) in [(SOURCE, "source-frozen"), (SOURCE, "source-asked"), (TARGET, "target-prepared")] {
        let (make, fault) = (Make::cpu(), format!("{point}:stop"));
        let environment = |index: usize| Vec::from_iter((index == who).then_some(("BATON_FAULT", fault.as_str())));
        let fleet = Fleet::of(&make, (0..REPLICAS).map(|index| make.replica(&format!("r{index}"), &environment(index))).collect());
        let (ask, id) = (Ask::chat("The story of a river. Write it long.", TOKENS).sampled(3), "moved");
        let mut reading = fleet.begin_at(SOURCE, &ask, id);
        let answer = std::thread::scope(|scope| {
            scope.spawn(|| fleet.migrate(id, TARGET));
            wait_for_stop(fleet.replicas[who].pid());
            read_from_elsewhere(&fleet, id, &mut reading);
            signal(fleet.replicas[who].pid(), libc::SIGCONT);
            reading.read_to_end()
        });
        fleet.until_at_rest();
        let computed: u64 = fleet.replicas.iter().map(|replica| counter(replica, "vllm:generation_tokens_total")).sum();
        let delivered = answer.tokens() as u64;
        assert!((delivered..=delivered + UNDER_WAY).contains(&computed), "{computed} computed and {delivered} delivered: {point}");
        assert_eq!(answer, ask.answer(&fleet.replicas.last().unwrap().url, "alone"), "{point}");
    }
}

/// The target has begun: what it was is gone at the source.
#[test]
fn a_stream_outlives_the_replica_that_it_came_to() {
    all_at_once(&[Fault::Kill, Fault::Stop], |fault| {
        let make = timed();
        let mut fleet = make.fleet(REPLICAS);
        let (ask, id) = (ask(), "moved");
        let mut reading = fleet.begin_at(SOURCE, &ask, id);
        assert!(matches!(fleet.migrate(id, TARGET), Ordered::Moved));
        signal(fleet.replicas[TARGET].pid(), fault.signal());
        fault.await_at(&fleet.replicas[TARGET]);
        read_from_elsewhere(&fleet, id, &mut reading);
        if *fault == Fault::Stop {
            signal(fleet.replicas[TARGET].pid(), libc::SIGCONT);
        }
        check(&fleet, &ask, &reading.read_to_end(), fault.name());
        fleet.keep(|index| index != TARGET || *fault == Fault::Stop);
        fleet.until_at_rest();
    });
}

/// The owner dies, and then the one that went on.
#[test]
fn a_stream_outlives_two_replicas_in_turn() {
    let make = timed();
    let mut fleet = make.fleet(REPLICAS);
    let (ask, id) = (ask(), "moved");
    let mut reading = fleet.begin_at(SOURCE, &ask, id);
    let owner = || fleet.request(id).unwrap()["replica"].as_str().unwrap()[1..].parse::<usize>().unwrap();
    let mut dead = Vec::new();
    for _ in 0..REPLICAS - 1 {
        let victim = owner();
        signal(fleet.replicas[victim].pid(), libc::SIGKILL);
        Fault::Kill.await_at(&fleet.replicas[victim]);
        read_from_elsewhere(&fleet, id, &mut reading);
        dead.push(victim);
        assert!(!dead.contains(&owner()));
    }
    let answer = reading.read_to_end();
    fleet.keep(|index| !dead.contains(&index));
    check(&fleet, &ask, &answer, "two deaths");
    fleet.until_at_rest();
}

/// Nobody asks any more for what a dead gateway had them run.
#[test]
fn replicas_free_what_a_killed_gateway_left_and_serve_the_next_one() {
    let make = timed();
    let mut fleet = make.fleet(REPLICAS);
    // Too long to end before the lease does.
    let endless = Ask::chat("go on and on", 6000);
    let mut left: Vec<Reading> = (0..2 * REPLICAS).map(|number| endless.send(fleet.url(), &format!("left-{number}"))).collect();
    for reading in &mut left {
        reading.read_until(SOME);
    }
    assert!(fleet.replicas.iter().all(|replica| report(replica)["running"] != 0), "each has some");
    signal(fleet.gateway.pid(), libc::SIGKILL);
    fleet.gateway.wait();
    fleet.replicas.iter().for_each(until_empty);
    fleet.restart_gateway(&make);
    let ask = ask();
    check(&fleet, &ask, &ask.answer(fleet.url(), "next"), "the next gateway");
    fleet.until_at_rest();
}
