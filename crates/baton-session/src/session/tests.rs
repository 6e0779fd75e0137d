use super::*;

const LIMITS: Limits = Limits { attempts: 3, stall: Duration::from_secs(30), total: Duration::from_mins(10) };
const CONFIG: SessionConfig = SessionConfig { limits: LIMITS, choices: Some(1), restartable: false };
const WITHIN: Duration = Duration::from_secs(5);

fn drain(session: &mut Session) -> Vec<Action> {
    std::iter::from_fn(|| session.poll()).collect()
}

fn placed(replica: u32) -> Input {
    Input::Placed { replica: ReplicaId(replica), first_token_within: WITHIN }
}

fn owner(replica: u32, epoch: u32) -> Owner {
    Owner { replica: ReplicaId(replica), epoch: Epoch(epoch) }
}

/// A session that runs on replica 0 under epoch 1, its actions drained.
fn running(config: SessionConfig) -> Session {
    let mut session = Session::new(config, Time::ZERO);
    session.handle(placed(0), Time::ZERO);
    assert_eq!(drain(&mut session), [Action::Place { excluded: vec![] }, Action::Start(owner(0, 1))]);
    session
}

#[test]
fn a_complete_stream_finishes() {
    let mut session = running(CONFIG);
    assert_eq!(session.offer(Epoch(1), 0, 0, 1, Time(1)), Offer::Deliver { skip: 0 });
    session.handle(Input::ChoiceFinished { epoch: Epoch(1), choice: 0 }, Time(2));
    session.handle(Input::Completed { epoch: Epoch(1) }, Time(3));
    assert_eq!(drain(&mut session), [Action::Answer(Answer::Complete), Action::End(End::Finished)]);
    assert_eq!(session.poll_timeout(), None);
}

#[test]
fn an_attempt_that_moved_fails_where_it_is() {
    let mut session = running(CONFIG);
    session.offer(Epoch(1), 0, 0, 3, Time(1));
    session.handle(Input::Moved { epoch: Epoch(1), replica: ReplicaId(2) }, Time(2));
    assert_eq!(session.offer(Epoch(1), 0, 3, 1, Time(3)), Offer::Deliver { skip: 0 });
    session.handle(Input::Moved { epoch: Epoch(7), replica: ReplicaId(9) }, Time(4));
    session.handle(Input::Failed { epoch: Epoch(1), fault: Fault::Unreachable }, Time(5));
    assert_eq!(drain(&mut session)[0], Action::Suspect { replica: ReplicaId(2), fault: Fault::Unreachable });
}

#[test]
fn a_silent_replica_that_is_known_to_work_gets_its_time_again() {
    let mut session = running(CONFIG);
    session.offer(Epoch(1), 0, 0, 1, Time(1));
    let due = session.poll_timeout().unwrap();
    session.handle(Input::ReplicaAlive, due);
    session.handle(Input::Timeout, due);
    assert_eq!((drain(&mut session), session.poll_timeout()), (vec![], Some(due + LIMITS.stall)));
}

#[test]
fn a_failure_before_the_first_token_is_retried_elsewhere() {
    let mut session = running(CONFIG);
    session.handle(Input::Failed { epoch: Epoch(1), fault: Fault::Unreachable }, Time(1));
    let suspect = Action::Suspect { replica: ReplicaId(0), fault: Fault::Unreachable };
    assert_eq!(drain(&mut session), [suspect, Action::Place { excluded: vec![ReplicaId(0)] }]);
    session.handle(placed(1), Time(2));
    assert_eq!(drain(&mut session), [Action::Start(owner(1, 2))]);
}

#[test]
fn a_failure_after_it_is_told_and_never_looks_complete() {
    let mut session = running(CONFIG);
    session.offer(Epoch(1), 0, 0, 1, Time(1));
    session.handle(Input::Failed { epoch: Epoch(1), fault: Fault::InBand }, Time(2));
    let end = End::Failed(Fault::InBand);
    let suspect = Action::Suspect { replica: ReplicaId(0), fault: Fault::InBand };
    assert_eq!(drain(&mut session), [suspect, Action::Answer(Answer::Error(end)), Action::End(end)]);
}

#[test]
fn an_answer_that_nobody_has_seen_is_restarted_however_far_it_got() {
    let mut session = running(SessionConfig { restartable: true, ..CONFIG });
    session.offer(Epoch(1), 0, 0, 7, Time(1));
    session.handle(Input::Failed { epoch: Epoch(1), fault: Fault::Truncated }, Time(2));
    session.handle(placed(1), Time(3));
    assert!(drain(&mut session).contains(&Action::Start(owner(1, 2))));
    assert_eq!(session.offer(Epoch(2), 0, 0, 1, Time(4)), Offer::Deliver { skip: 0 });
}

#[test]
fn a_proper_end_without_every_finish_is_a_truncation() {
    let mut session = running(SessionConfig { choices: Some(2), ..CONFIG });
    session.offer(Epoch(1), 0, 0, 1, Time(1));
    session.handle(Input::ChoiceFinished { epoch: Epoch(1), choice: 0 }, Time(1));
    session.handle(Input::Completed { epoch: Epoch(1) }, Time(2));
    assert_eq!(drain(&mut session).last(), Some(&Action::End(End::Failed(Fault::Truncated))));
}

#[test]
fn a_client_that_leaves_stops_the_engine() {
    let mut session = running(CONFIG);
    session.handle(Input::ClientGone, Time(1));
    assert_eq!(drain(&mut session), [Action::Stop(owner(0, 1)), Action::End(End::Cancelled)]);
}

#[test]
fn an_attempt_that_leaves_is_stopped_and_goes_on_elsewhere_without_blame() {
    let mut session = running(CONFIG);
    session.offer(Epoch(1), 0, 0, 5, Time(1));
    session.handle(Input::Leave { epoch: Epoch(1) }, Time(2));
    assert_eq!(drain(&mut session), [], "nobody could go on with it");
    session.set_resumable(true);
    session.handle(Input::Leave { epoch: Epoch(7) }, Time(3));
    assert_eq!(drain(&mut session), []);
    session.handle(Input::Leave { epoch: Epoch(1) }, Time(4));
    assert_eq!(drain(&mut session), [Action::Stop(owner(0, 1)), Action::Place { excluded: vec![ReplicaId(0)] }]);
    session.handle(placed(1), Time(5));
    assert_eq!(drain(&mut session), [Action::Start(owner(1, 2))]);
    assert_eq!(session.offer(Epoch(2), 0, 5, 1, Time(6)), Offer::Deliver { skip: 0 });
    assert_eq!(session.offer(Epoch(1), 0, 5, 1, Time(7)), Offer::Drop);
}

#[test]
fn a_retry_that_is_forbidden_ends_the_request() {
    let mut session = running(CONFIG);
    session.forbid_retry();
    session.handle(Input::Failed { epoch: Epoch(1), fault: Fault::Status(429) }, Time(1));
    assert_eq!(drain(&mut session).last(), Some(&Action::End(End::Exhausted(Fault::Status(429)))));
}

#[test]
fn attempts_are_bounded_and_the_last_fault_is_told() {
    let mut session = Session::new(SessionConfig { limits: Limits { attempts: 2, ..LIMITS }, ..CONFIG }, Time::ZERO);
    for replica in 0..2 {
        session.handle(placed(replica), Time::ZERO);
        session.handle(Input::Failed { epoch: Epoch(replica + 1), fault: Fault::Status(503) }, Time::ZERO);
    }
    assert_eq!(drain(&mut session).last(), Some(&Action::End(End::Exhausted(Fault::Status(503)))));
}

#[test]
fn a_hang_before_the_first_token_is_stopped_and_retried() {
    let mut session = running(CONFIG);
    assert_eq!(session.poll_timeout(), Some(Time::ZERO + WITHIN));
    session.handle(Input::Timeout, Time::ZERO + WITHIN);
    let actions = drain(&mut session);
    assert_eq!(actions[0], Action::Stop(owner(0, 1)));
    assert_eq!(actions.last(), Some(&Action::Place { excluded: vec![ReplicaId(0)] }));
}

#[test]
fn a_replica_that_answers_others_is_busy_and_not_hung() {
    let mut session = running(CONFIG);
    let due = Time::ZERO + WITHIN;
    session.handle(Input::ReplicaAlive, due);
    session.handle(Input::Timeout, due);
    assert_eq!((drain(&mut session), session.poll_timeout()), (vec![], Some(due + WITHIN)));
    session.handle(Input::Timeout, due + WITHIN);
    assert_eq!(drain(&mut session)[0], Action::Stop(owner(0, 1)));
}

#[test]
fn the_total_limit_and_the_drain_end_a_request_with_an_error() {
    for (input, now, end) in
        [(Input::Timeout, Time::ZERO + LIMITS.total, End::TimedOut(LIMITS.total)), (Input::DrainDeadline, Time(5), End::Drained)]
    {
        let mut session = running(CONFIG);
        session.handle(input, now);
        assert_eq!(drain(&mut session), [Action::Stop(owner(0, 1)), Action::Answer(Answer::Error(end)), Action::End(end)]);
    }
}

#[test]
fn what_can_be_resumed_goes_on_elsewhere_from_what_was_delivered() {
    let mut session = running(CONFIG);
    session.offer(Epoch(1), 0, 0, 3, Time(1));
    session.set_resumable(true);
    session.handle(Input::Failed { epoch: Epoch(1), fault: Fault::Truncated }, Time(2));
    let suspect = Action::Suspect { replica: ReplicaId(0), fault: Fault::Truncated };
    assert_eq!(drain(&mut session), [suspect, Action::Place { excluded: vec![ReplicaId(0)] }]);
    assert_eq!(session.delivered(0), 3);
    session.handle(placed(1), Time(3));
    assert_eq!(drain(&mut session), [Action::Start(owner(1, 2))]);
    assert_eq!(session.offer(Epoch(1), 0, 3, 1, Time(4)), Offer::Drop, "the lost attempt gives nothing any more");
    assert_eq!(session.offer(Epoch(2), 0, 3, 2, Time(5)), Offer::Deliver { skip: 0 });
    session.handle(Input::ChoiceFinished { epoch: Epoch(2), choice: 0 }, Time(6));
    session.handle(Input::Completed { epoch: Epoch(2) }, Time(6));
    assert_eq!(drain(&mut session), [Action::Answer(Answer::Complete), Action::End(End::Finished)]);
}

#[test]
fn a_stalled_attempt_is_stopped_and_resumed() {
    let mut session = running(CONFIG);
    session.offer(Epoch(1), 0, 0, 1, Time(1));
    session.set_resumable(true);
    let due = session.poll_timeout().unwrap();
    session.handle(Input::Timeout, due);
    let suspect = Action::Suspect { replica: ReplicaId(0), fault: Fault::Stalled(LIMITS.stall) };
    assert_eq!(drain(&mut session), [Action::Stop(owner(0, 1)), suspect, Action::Place { excluded: vec![ReplicaId(0)] }]);
}

#[test]
fn resuming_ends_when_nobody_adds_anything_and_output_begins_the_count_anew() {
    let mut session = running(CONFIG);
    session.offer(Epoch(1), 0, 0, 1, Time(1));
    let mut epoch = 1;
    let mut fail = |session: &mut Session| {
        session.set_resumable(true);
        session.handle(Input::Failed { epoch: Epoch(epoch), fault: Fault::Unreachable }, Time(2));
        session.handle(placed(epoch % 2), Time(3));
        epoch += 1;
        drain(session)
    };
    for _ in 0..LOSSES_MAX {
        assert!(fail(&mut session).iter().any(|action| matches!(action, Action::Start(_))));
    }
    session.offer(Epoch(1 + LOSSES_MAX), 0, 1, 1, Time(4));
    for _ in 0..LOSSES_MAX {
        assert!(fail(&mut session).iter().any(|action| matches!(action, Action::Start(_))));
    }
    let end = End::Failed(Fault::Unreachable);
    assert_eq!(fail(&mut session)[1..], [Action::Answer(Answer::Error(end)), Action::End(end)]);
}

#[test]
fn who_finds_no_place_to_go_on_is_told_what_failed() {
    let mut session = running(CONFIG);
    session.offer(Epoch(1), 0, 0, 1, Time(1));
    session.set_resumable(true);
    session.handle(Input::Failed { epoch: Epoch(1), fault: Fault::InBand }, Time(2));
    session.handle(Input::Refused, Time(3));
    let end = End::Exhausted(Fault::InBand);
    assert_eq!(drain(&mut session)[2..], [Action::Answer(Answer::Error(end)), Action::End(end)]);
}
