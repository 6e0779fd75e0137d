use baton_cost::StepCoefficients;
use baton_engine::{EngineConfig, SamplingParams, Timed, TokenSource};
use baton_units::{BlockSize, Blocks};

use super::*;

/// A driver that nobody runs, so that a test can take its steps.
fn driver(step_ms: f64) -> (Driver, Sender<Stamped>) {
    let step = StepCoefficients { fixed_s: step_ms / 1e3, per_token_s: 0.0, per_attended_s: 0.0, per_kv_token_s: 0.0, weights_s: 0.0 };
    let config = EngineConfig::new("m", Blocks(64), Tokens(512), step);
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
    };
    let parts = Parts {
        engine,
        executor: Box::new(executor),
        // A model second is a microsecond: the clock is always ahead of the engine.
        clock: Clock::start(1e-6),
        modelled: true,
        metrics: Arc::new(Metrics::default()),
        kv_events: None,
    };
    (Driver { parts, shared: Arc::new(shared), commands, held: None, live: BTreeMap::new(), now: Time::ZERO }, sender)
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
