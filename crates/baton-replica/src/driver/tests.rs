use baton_cost::StepCoefficients;
use baton_engine::{EngineConfig, FinishReason, Phase, SamplingParams, SequenceState, Timed, TokenBudget, TokenSource};
use baton_units::{BlockSize, Blocks};

use super::*;

/// A driver that nobody runs, so that a test can take its steps.
fn driver(step_ms: f64) -> (Driver, Sender<Stamped>) {
    let (driver, sender, _) = moving_driver(step_ms, TokenBudget::Fixed(Tokens(512)));
    (driver, sender)
}

fn moving_driver(step_ms: f64, budget: TokenBudget) -> (Driver, Sender<Stamped>, mpsc::UnboundedReceiver<MoveEvent>) {
    let step = StepCoefficients { fixed_s: step_ms / 1e3, per_token_s: 0.0, per_attended_s: 0.0, per_kv_token_s: 0.0, weights_s: 0.0 };
    let config = EngineConfig { budget, ..EngineConfig::new("m", Blocks(64), Tokens(512), step) };
    let executor = Timed::new(step, config.blocks, BlockSize::DEFAULT, TokenSource::Vocabulary(100), vec![]);
    let engine = Engine::new(config).unwrap();
    let (sender, commands) = std::sync::mpsc::channel();
    let shared = Shared {
        status: Mutex::new(engine.status()),
        pending_requests: AtomicU32::new(0),
        pending_tokens: AtomicU64::new(0),
        failed: AtomicBool::new(false),
        failure: Notify::new(),
        next_request: AtomicU64::new(0),
        generations: AtomicU32::new(0),
        step_predicted_us: AtomicU64::new(0),
    };
    let parts = Parts {
        engine,
        executor: Box::new(executor),
        // A model second is a microsecond: the clock is always ahead of the engine.
        clock: Clock::start(1e-6),
        modelled: true,
        metrics: Arc::new(Metrics::default()),
        kv_events: None,
        move_events: None,
    };
    let (events, told) = mpsc::unbounded_channel();
    let moves = Moves::new(Some(events));
    (Driver { parts, shared: Arc::new(shared), commands, held: None, live: BTreeMap::new(), moves, now: Time::ZERO }, sender, told)
}

fn submission(id: u64, max_tokens: u32) -> (Command, mpsc::Receiver<(usize, Update)>) {
    let (updates, receiver) = mpsc::channel(2 + max_tokens as usize);
    let request = NewRequest::new(RequestId(id), vec![1, 2, 3], SamplingParams::greedy(max_tokens).unwrap());
    (Command::Submit(Box::new(Submission { request, name: format!("n{id}"), slot: 0, updates })), receiver)
}

/// As [`Driver::run`] does until it would wait.
fn run_until_idle(driver: &mut Driver) {
    while driver.take_commands() && (driver.step() || driver.let_time_pass(|commands| commands.try_recv().ok())) {}
}

fn records(receiver: &mut mpsc::Receiver<(usize, Update)>) -> Option<SequenceRecord> {
    let mut record = None;
    while let Ok((_, update)) = receiver.try_recv() {
        if let Update::Output(output) = update {
            record = output.finish.map(|finish| finish.record).or(record);
        }
    }
    record
}

#[test]
fn an_engine_that_is_behind_the_clock_does_not_see_the_future() {
    let (mut driver, commands) = driver(10.0);
    let ((first, mut first_updates), (second, mut second_updates)) = (submission(0, 3), submission(1, 1));
    commands.send(Stamped { at: Time::from_ms(5.0), command: first }).unwrap();
    commands.send(Stamped { at: Time::from_ms(16.0), command: second }).unwrap();
    run_until_idle(&mut driver);
    // Steps end at 15, 25 and 35 ms: the second request comes in the middle of the second one and is in the third.
    let first = records(&mut first_updates).unwrap();
    assert_eq!((first.arrival, first.first_token, first.finished), (Time::from_ms(5.0), Some(Time::from_ms(15.0)), Time::from_ms(35.0)));
    let second = records(&mut second_updates).unwrap();
    assert_eq!((second.first_scheduled, second.finished), (Some(Time::from_ms(25.0)), Time::from_ms(35.0)));
    assert!(driver.live.is_empty());
}

#[test]
fn an_idle_engine_begins_when_work_comes() {
    let (mut driver, commands) = driver(1.0);
    for (id, at) in [(0, 3.0), (1, 100.0)] {
        let (command, mut updates) = submission(id, 2);
        commands.send(Stamped { at: Time::from_ms(at), command }).unwrap();
        run_until_idle(&mut driver);
        assert_eq!(records(&mut updates).unwrap().finished, Time::from_ms(at + 2.0));
    }
}

#[test]
fn an_abort_by_name_tells_the_client_and_frees_the_request() {
    let (mut driver, commands) = driver(1.0);
    let (command, mut updates) = submission(7, 50);
    commands.send(Stamped { at: Time::ZERO, command }).unwrap();
    assert!(driver.take_commands() && driver.step());
    let (done, mut count) = oneshot::channel();
    commands.send(Stamped { at: Time::ZERO, command: Command::AbortNamed(Some(vec!["n7".into(), "other".into()]), done) }).unwrap();
    assert!(driver.take_commands() && !driver.step());
    assert_eq!(count.try_recv(), Ok(2));
    let last = std::iter::from_fn(|| updates.try_recv().ok()).last();
    assert!(matches!(last, Some((0, Update::Aborted))), "{last:?}");
    assert!(driver.live.is_empty() && driver.parts.engine.is_idle());
}

#[test]
fn a_report_counts_what_the_engine_has_not_seen_yet() {
    let (mut driver, commands) = driver(1.0);
    let handle = EngineHandle { commands, shared: Arc::clone(&driver.shared), clock: driver.parts.clock };
    let (command, _updates) = submission(0, 1);
    let Command::Submit(submission) = command else { unreachable!("made as a submission") };
    handle.submit(*submission).unwrap();
    assert_eq!((handle.status().waiting, handle.status().prefill_backlog), (1, Tokens(3)));
    assert!(driver.let_time_pass(|commands| commands.try_recv().ok()) && driver.take_commands());
    assert_eq!((handle.status().waiting, handle.status().prefill_backlog), (1, Tokens(3)));
    assert!(driver.step());
    assert_eq!((handle.status().waiting, handle.status().prefill_backlog), (0, Tokens(0)));
}

#[test]
fn a_failure_reaches_everyone_who_waits() {
    let (mut driver, commands) = driver(1.0);
    let (command, mut updates) = submission(0, 9);
    commands.send(Stamped { at: Time::ZERO, command }).unwrap();
    assert!(driver.take_commands());
    driver.fail();
    assert!(matches!(updates.try_recv(), Ok((0, Update::Accepted))));
    assert!(matches!(updates.try_recv(), Ok((0, Update::Failed))));
    let handle = EngineHandle { commands, shared: Arc::clone(&driver.shared), clock: driver.parts.clock };
    let (Command::Submit(late), _updates) = submission(1, 1) else { unreachable!("made as a submission") };
    assert_eq!(handle.submit(*late), Err(EngineGone));
}

fn obey(driver: &mut Driver, commands: &Sender<Stamped>, command: MoveCommand) {
    commands.send(Stamped { at: Time::ZERO, command: Command::Move(command) }).unwrap();
    assert!(driver.take_commands());
}

/// Its answer is there when the command was obeyed.
fn ask<T>(driver: &mut Driver, commands: &Sender<Stamped>, question: impl FnOnce(oneshot::Sender<T>) -> MoveCommand) -> T {
    let (sender, mut answer) = oneshot::channel();
    obey(driver, commands, question(sender));
    answer.try_recv().unwrap()
}

/// A run of 100 prompt tokens.
fn run(id: u64) -> SequenceState {
    let request = NewRequest::new(RequestId(id), (0..100).collect(), SamplingParams::greedy(5).unwrap());
    SequenceState::restart(NewRequest { seed: Some(1), ..request }, vec![], "m")
}

fn tokens(told: &mut mpsc::UnboundedReceiver<MoveEvent>) -> Vec<u32> {
    let mut tokens = Vec::new();
    while let Ok(event) = told.try_recv() {
        if let MoveEvent::Output(output) = event {
            tokens.push(output.token);
        }
    }
    tokens
}

#[test]
fn a_run_moves_in_the_middle_of_its_prefill_with_the_kv_that_it_has() {
    let chunks = TokenBudget::Fixed(Tokens(20));
    let [mut source, mut target, mut alone] = [(); 3].map(|()| moving_driver(1.0, chunks));
    obey(&mut alone.0, &alone.1, MoveCommand::Run(Box::new(run(9))));
    run_until_idle(&mut alone.0);

    let (driver, commands, told) = (&mut source.0, &source.1, &mut source.2);
    let id = RequestId(1);
    obey(driver, commands, MoveCommand::Run(Box::new(run(1))));
    assert!(driver.step() && driver.step());
    let slice = ask(driver, commands, |answer| MoveCommand::Read(id, 0..9, answer)).unwrap();
    assert_eq!((slice.blocks.len(), slice.progress.computed), (2, Tokens(40)), "the third block is not full");
    let rest = ask(driver, commands, |answer| MoveCommand::Freeze(id, 2, answer)).unwrap();
    assert!(matches!(told.try_recv(), Ok(MoveEvent::Frozen { run, .. }) if run == id));
    assert!(!driver.step(), "nothing else runs");
    let exported = rest.exported;
    assert_eq!((rest.blocks.len(), exported.progress), (1, slice.progress));
    let gone = ask(driver, commands, |answer| MoveCommand::Freeze(RequestId(77), 0, answer));
    assert!(gone.is_none());

    let (driver, commands) = (&mut target.0, &target.1);
    let state = SequenceState { request: NewRequest { id: RequestId(5), ..exported.state.request.clone() }, ..exported.state };
    let (room, spares) = ask(driver, commands, |answer| MoveCommand::Prepare(Box::new(state.clone()), answer)).unwrap();
    assert_eq!((room.held, room.blocks, spares.len()), (Blocks(0), Blocks(5), 5), "two beyond what it has");
    let filled = spares.into_iter().zip(slice.blocks.iter().chain(&rest.blocks)).map(|(mut spare, block)| {
        spare.bytes_mut().copy_from_slice(block.bytes());
        spare
    });
    let blocks = (0..).zip(filled).collect();
    // A neighbour computes, so that a block waits for the next boundary; whoever joins does not go without it.
    let (sender, mut written) = oneshot::channel();
    driver.moves.spend();
    let Driver { parts, moves, now, .. } = driver;
    let mut bench = Bench { engine: &mut parts.engine, executor: parts.executor.as_mut(), now: *now };
    moves.obey(MoveCommand::Write(room.id, blocks, sender), &mut bench);
    assert!(written.try_recv().is_err());
    moves.obey(MoveCommand::Join(room.id, Box::new(state)), &mut bench);
    let written = written.try_recv().unwrap().unwrap();
    assert_eq!((written.spares.len(), written.room), (3, Blocks(5)), "memory for others comes back");
    let joined = driver.parts.engine.sequences().next().unwrap();
    assert_eq!((joined.phase, joined.computed), (Phase::Prefilling, Tokens(40)));
    run_until_idle(driver);
    assert_eq!(tokens(&mut target.2), tokens(&mut alone.2));

    let (driver, commands) = (&mut source.0, &source.1);
    obey(driver, commands, MoveCommand::Release(id));
    for driver in [driver, &mut target.0] {
        let status = driver.parts.engine.status();
        assert_eq!(status.blocks_free + status.blocks_reclaimable, status.blocks_total);
    }
}

#[test]
fn what_cannot_be_written_leaves_nothing_prepared() {
    let (mut driver, commands, _told) = moving_driver(1.0, TokenBudget::Fixed(Tokens(20)));
    let state = SequenceState { computed: Tokens(40), ..run(1) };
    let wrong = |spare: Storage| [vec![(0, Box::new(vec![0_u8]) as Storage)], vec![(512, spare)]];
    for which in 0..2 {
        let (room, mut spares) = ask(&mut driver, &commands, |answer| MoveCommand::Prepare(Box::new(state.clone()), answer)).unwrap();
        let blocks = wrong(spares.pop().unwrap()).into_iter().nth(which).unwrap();
        assert!(ask(&mut driver, &commands, |answer| MoveCommand::Write(room.id, blocks, answer)).is_err());
        assert!(driver.parts.engine.prepared(room.id).is_none());
        let status = driver.parts.engine.status();
        assert_eq!(status.blocks_free, status.blocks_total);
    }
}

#[test]
fn what_is_complete_or_cannot_be_run_is_told() {
    let (mut driver, commands, mut told) = moving_driver(1.0, TokenBudget::Fixed(Tokens(20)));
    let complete = SequenceState { output: vec![1; 5], ..run(1) };
    obey(&mut driver, &commands, MoveCommand::Run(Box::new(complete)));
    assert!(matches!(told.try_recv(), Ok(MoveEvent::Complete { run: RequestId(1), tokens: 5, reason: FinishReason::Length })));
    let other = SequenceState { model: "other".to_owned(), ..run(2) };
    obey(&mut driver, &commands, MoveCommand::Run(Box::new(other)));
    assert!(matches!(told.try_recv(), Ok(MoveEvent::Refused { run: RequestId(2), .. })));
    // Without the blocks that were prepared it computes again.
    let state = SequenceState { computed: Tokens(40), ..run(3) };
    let (room, _) = ask(&mut driver, &commands, |answer| MoveCommand::Prepare(Box::new(state.clone()), answer)).unwrap();
    obey(&mut driver, &commands, MoveCommand::Abandon(room.id));
    obey(&mut driver, &commands, MoveCommand::Join(room.id, Box::new(state)));
    run_until_idle(&mut driver);
    assert_eq!(tokens(&mut told).len(), 5);
}
