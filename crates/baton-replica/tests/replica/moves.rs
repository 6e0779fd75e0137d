//! Requests that are run and moved by the migration protocol have the output of the same requests left alone, and leave nothing behind.

use std::time::Duration;

use baton_engine::{EngineConfig, Timed, TokenBudget, TokenSource};
use baton_migration::{LostClass, OwnershipInput, Place, Tag, Timing, ToGateway, ToSeat};
use baton_replica::{MigrationConfig, MigrationError, Pace, ReplicaConfig, ReplicaError};
use baton_units::{BlockSize, Blocks, Tokens};
use baton_wire::migration::{ControlFrame, MoveTo, OutputEntry, RunRequest, RunSampling, handshake::FleetKey};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::oneshot,
};

use crate::{
    gateway::{Gateway, nonce},
    support::{MODEL, Replica, config},
};

/// More than a request may compute without acknowledgement, so that one that is not acknowledged is there until it is.
const OUTPUT: u32 = 700;

fn migrating(id: &str) -> ReplicaConfig {
    let base = config();
    let engine = EngineConfig { block_size: BlockSize::new(4).unwrap(), blocks: Blocks(1024), ..base.engine };
    ReplicaConfig { id: id.to_owned(), engine, migration: Some(MigrationConfig::default()), ..base }
}

fn greedy(prompt: u32) -> RunRequest {
    let sampling = RunSampling { temperature: 0.0, max_tokens: Some(OUTPUT), ..RunSampling::default() };
    RunRequest { model: MODEL.to_owned(), prompt: (100..100 + prompt).collect(), sampling, seed: 1, ..RunRequest::default() }
}

fn sampled(prompt: u32) -> RunRequest {
    let sampling =
        RunSampling { presence_penalty: 0.5, logprobs: Some(2), max_tokens: Some(OUTPUT), min_tokens: 5, ..RunSampling::default() };
    RunRequest { sampling, seed: 77, choice_index: 1, salt: Some("a".to_owned()), ..greedy(prompt) }
}

pub(crate) struct Fleet {
    pub(crate) replicas: Vec<Replica>,
    pub(crate) places: Vec<Place>,
    pub(crate) gateway: Gateway,
}

impl Fleet {
    async fn start(configs: Vec<ReplicaConfig>) -> Self {
        let mut replicas = Vec::new();
        for config in configs {
            replicas.push(Replica::start(config).await);
        }
        Self::of(replicas).await
    }

    pub(crate) async fn of(replicas: Vec<Replica>) -> Self {
        let (mut places, mut gateway) = (Vec::new(), Gateway::new(Timing::default()));
        for replica in &replicas {
            places.push(gateway.attach(&replica.report().await).await.unwrap());
        }
        Self { replicas, places, gateway }
    }

    /// What the request gives where nothing moves.
    pub(crate) async fn alone(&mut self, spec: &RunRequest) -> Vec<OutputEntry> {
        let number = 1_000 + u64::from(spec.choice_index);
        self.gateway.start(number, self.places[0], spec.clone()).await;
        self.finished(number).await
    }

    pub(crate) async fn finished(&mut self, number: u64) -> Vec<OutputEntry> {
        self.gateway.until("the request ends", |gateway| gateway.request(number).has_finished()).await;
        self.gateway.request(number).delivered.clone()
    }

    pub(crate) async fn delivered(&mut self, number: u64, count: usize) {
        self.gateway.until("entries come", |gateway| gateway.request(number).delivered.len() >= count).await;
    }

    /// Moves a request, which cannot end meanwhile; it runs at the target then.
    async fn moved(&mut self, number: u64, target: usize) {
        let before = self.gateway.request(number).committed;
        self.gateway.until("it can move", |gateway| gateway.request(number).ownership.can_move()).await;
        self.gateway.acknowledges = false;
        self.gateway.tell(number, OwnershipInput::Move { target: self.places[target] }).await;
        self.gateway.until("the move is committed", |gateway| gateway.request(number).committed > before).await;
        self.gateway.acknowledges = true;
        self.gateway.acknowledge(number).await;
    }

    /// The attempt ends, and the source goes on.
    async fn stays(&mut self, number: u64, target: usize) {
        let before = self.gateway.request(number).attempts_ended;
        self.gateway.until("it can move", |gateway| gateway.request(number).ownership.can_move()).await;
        self.gateway.acknowledges = false;
        self.gateway.tell(number, OwnershipInput::Move { target: self.places[target] }).await;
        self.gateway.until("the attempt ends", |gateway| gateway.request(number).attempts_ended > before).await;
        self.gateway.acknowledges = true;
        self.gateway.acknowledge(number).await;
        assert_eq!(self.gateway.request(number).committed, 0);
    }

    /// Everybody has let go, and all pools are as they were.
    pub(crate) async fn empty(mut self) {
        self.gateway.until("all let go", Gateway::is_quiescent).await;
        for replica in self.replicas {
            is_empty(&replica).await;
            replica.stop().await.unwrap();
        }
    }
}

async fn is_empty(replica: &Replica) {
    let free =
        |report: &baton_wire::replica::Report| report.kv_blocks_free == report.kv_blocks_total && report.running + report.waiting == 0;
    replica.report_when(free).await;
}

/// The same tokens, log-probabilities and finish.
#[track_caller]
pub(crate) fn assert_same(moved: &[OutputEntry], alone: &[OutputEntry]) {
    assert_eq!(moved.len(), alone.len());
    for (index, pair) in moved.iter().zip(alone).enumerate() {
        match pair {
            (OutputEntry::Token { id, logprobs }, OutputEntry::Token { id: wanted, logprobs: wanted_logprobs }) => {
                assert_eq!((id, logprobs), (wanted, wanted_logprobs), "at index {index}");
            }
            (moved, alone) => assert_eq!(moved, alone, "at index {index}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_run_from_start_to_finish() {
    let mut fleet = Fleet::start(vec![migrating("a")]).await;
    fleet.gateway.start(1, fleet.places[0], sampled(10)).await;
    let output = fleet.finished(1).await;
    assert_eq!(output.len() as u32, OUTPUT + 1);
    fleet.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_that_move_and_move_back_are_those_of_one_replica() {
    let mut fleet = Fleet::start(vec![migrating("a"), migrating("b")]).await;
    let alone = [fleet.alone(&greedy(200)).await, fleet.alone(&sampled(37)).await];
    for (number, spec) in [(1, greedy(200)), (2, sampled(37))] {
        fleet.gateway.start(number, fleet.places[0], spec).await;
        fleet.delivered(number, 20).await;
        fleet.moved(number, 1).await;
        fleet.delivered(number, 300).await;
        fleet.moved(number, 0).await;
        let output = fleet.finished(number).await;
        assert_same(&output, &alone[number as usize - 1]);
    }
    fleet.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_moves_while_its_prompt_is_computed() {
    let mut slow = [migrating("a"), migrating("b")];
    for config in &mut slow {
        config.engine.budget = TokenBudget::Fixed(Tokens(8));
        config.pace = Pace::Modelled { time_scale: 1.0 };
    }
    let spec = greedy(1_200);
    let mut fleet = Fleet::start(slow.to_vec()).await;
    let [a, b] = fleet.places[..] else { unreachable!("there are two") };
    let (epoch, attempt) = (Tag(1), Tag(2));
    let gateway = &mut fleet.gateway;
    // A gateway moves what has started; nothing in the protocol demands it.
    gateway.send(a, gateway.to_seat(1, ToSeat::Start { epoch, delivered: vec![] }, spec.to_bytes())).await;
    let expect = ControlFrame::Expect { request: gateway.request_name(1), attempt, source: a, nonce: nonce(attempt) };
    gateway.send(b, expect).await;
    let to = MoveTo { kv_address: gateway.kv_address(b), nonce: nonce(attempt) };
    gateway.send(a, gateway.to_seat(1, ToSeat::Move { epoch, attempt, target: b }, to.to_bytes())).await;
    let (mut output, mut moved) = (Vec::new(), false);
    while !matches!(output.last(), Some(OutputEntry::Finish(_))) {
        let (from, frame) = gateway.next_frame().await;
        let ControlFrame::ToGateway { message, .. } = frame else { continue };
        match message {
            ToGateway::Output { epoch, index, entry } if index as usize == output.len() => {
                assert_eq!((from, epoch), if moved { (b, attempt) } else { (a, Tag(1)) });
                output.push(entry);
                let next = output.len() as u32;
                gateway.send(from, gateway.to_seat(1, ToSeat::Ack { epoch, next }, vec![])).await;
            }
            ToGateway::CommitTarget { frozen, .. } if !moved => {
                assert_eq!(frozen as usize, output.len());
                moved = true;
                gateway.send(b, gateway.to_seat(1, ToSeat::Start { epoch: attempt, delivered: output.clone() }, spec.to_bytes())).await;
            }
            ToGateway::Output { .. } | ToGateway::CommitTarget { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    assert!(moved);
    for place in [a, b] {
        gateway.send(place, gateway.to_seat(1, ToSeat::Stop { upto: Tag::ALL }, vec![])).await;
    }
    let alone = fleet.alone(&spec).await;
    assert_same(&output, &alone);
    fleet.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_move_stays_and_goes_on() {
    let mut small = migrating("small");
    small.engine.blocks = Blocks(256);
    let mut fleet = Fleet::start(vec![migrating("a"), small, migrating("b")]).await;
    let other = migrating("other");
    let engine = &other.engine;
    let executor = Timed::new(engine.step_prior, engine.blocks, engine.block_size, TokenSource::Vocabulary(40_000), vec![2]);
    let replica = Replica::start_with(other, Box::new(executor)).await;
    fleet.places.push(fleet.gateway.attach(&replica.report().await).await.unwrap());
    fleet.replicas.push(replica);
    let alone = fleet.alone(&greedy(200)).await;

    fleet.gateway.stalled = Some(2);
    fleet.gateway.acknowledges = false;
    // It has 214 of the small one's 256 blocks, and stands there as nobody acknowledges what it gives.
    fleet.gateway.start(2, fleet.places[1], RunRequest { salt: Some("other".to_owned()), ..greedy(600) }).await;
    fleet.delivered(2, 257).await;
    fleet.gateway.start(1, fleet.places[0], greedy(200)).await;
    fleet.delivered(1, 20).await;
    fleet.stays(1, 1).await;
    fleet.stays(1, 3).await;
    fleet.gateway.wrong_nonce = true;
    fleet.stays(1, 2).await;
    fleet.gateway.wrong_nonce = false;
    fleet.gateway.kv_address = Some("127.0.0.1:1".to_owned());
    fleet.stays(1, 2).await;
    let reasons: Vec<&str> = fleet
        .gateway
        .reasons
        .iter()
        .map(|(number, why)| {
            assert_eq!(*number, 1);
            &**why
        })
        .collect();
    let wanted = ["blocks, and", "do not compute the same bits", "nobody announced", "no connection to the target"];
    assert_eq!(reasons.len(), wanted.len(), "{reasons:?}");
    for (why, wanted) in reasons.iter().zip(wanted) {
        assert!(why.contains(wanted), "{why}");
    }
    let output = fleet.finished(1).await;
    assert_same(&output, &alone);
    fleet.gateway.stalled = None;
    fleet.gateway.acknowledge(2).await;
    fleet.finished(2).await;
    fleet.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_request_leaves_a_replica_and_one_comes_to_it_at_a_time() {
    let mut fleet = Fleet::start(vec![migrating("a"), migrating("b"), migrating("c")]).await;
    let alone = fleet.alone(&greedy(200)).await;
    let (address, prepared) = hold_back_what_the_target_says(fleet.gateway.kv_address(fleet.places[1])).await;
    fleet.gateway.acknowledges = false;
    for (number, owner) in [(1, 0), (2, 0), (3, 2)] {
        fleet.gateway.start(number, fleet.places[owner], greedy(200)).await;
        fleet.delivered(number, 20).await;
    }
    fleet.gateway.kv_address = Some(address);
    fleet.gateway.tell(1, OwnershipInput::Move { target: fleet.places[1] }).await;
    prepared.await.unwrap();
    fleet.gateway.kv_address = None;
    fleet.stays(2, 2).await;
    fleet.stays(3, 1).await;
    assert_eq!(fleet.gateway.request(1).attempts_ended, 0);
    let reasons: Vec<&str> = fleet.gateway.reasons.iter().map(|(_, why)| &**why).collect();
    assert_eq!(reasons.len(), 2);
    assert!(reasons[0].contains("leaves") || reasons[0].contains("taken in"), "{reasons:?}");
    assert!(reasons[1].contains("one at a time"), "{reasons:?}");
    // The gateway gives it up, and it goes on where it was.
    fleet.gateway.tell(1, OwnershipInput::Stay).await;
    fleet.gateway.acknowledge(1).await;
    for number in [1, 2, 3] {
        let output = fleet.finished(number).await;
        assert_same(&output, &alone);
    }
    fleet.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_that_dies_after_it_prepared_costs_nothing() {
    let mut fleet = Fleet::start(vec![migrating("a"), migrating("b")]).await;
    let alone = fleet.alone(&sampled(200)).await;
    let (address, prepared) = hold_back_what_the_target_says(fleet.gateway.kv_address(fleet.places[1])).await;
    fleet.gateway.kv_address = Some(address);
    fleet.gateway.acknowledges = false;
    fleet.gateway.start(1, fleet.places[0], sampled(200)).await;
    fleet.delivered(1, 20).await;
    fleet.gateway.tell(1, OwnershipInput::Move { target: fleet.places[1] }).await;
    prepared.await.unwrap();
    let target = fleet.replicas.pop().unwrap();
    target.report_when(|report| report.kv_blocks_free < report.kv_blocks_total).await;
    target.kill().await;
    fleet.gateway.gone(fleet.places[1]).await;
    fleet.gateway.until("the attempt ends", |gateway| gateway.request(1).attempts_ended == 1).await;
    fleet.gateway.acknowledges = true;
    fleet.gateway.acknowledge(1).await;
    let output = fleet.finished(1).await;
    assert_same(&output, &alone);
    fleet.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_dies_after_the_commit_is_not_missed() {
    let mut fleet = Fleet::start(vec![migrating("a"), migrating("b")]).await;
    let alone = fleet.alone(&sampled(200)).await;
    fleet.gateway.start(1, fleet.places[0], sampled(200)).await;
    fleet.delivered(1, 20).await;
    fleet.moved(1, 1).await;
    fleet.replicas.remove(0).kill().await;
    fleet.gateway.gone(fleet.places[0]).await;
    let output = fleet.finished(1).await;
    assert_same(&output, &alone);
    fleet.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_whose_replica_dies_goes_on_elsewhere_after_what_its_client_has() {
    let mut fleet = Fleet::start(vec![migrating("a"), migrating("b")]).await;
    let alone = fleet.alone(&sampled(200)).await;
    fleet.gateway.acknowledges = false;
    fleet.gateway.start(1, fleet.places[0], sampled(200)).await;
    fleet.delivered(1, 100).await;
    fleet.replicas.remove(0).kill().await;
    fleet.gateway.gone(fleet.places[0]).await;
    assert!(fleet.gateway.request(1).lost);
    fleet.gateway.acknowledges = true;
    fleet.gateway.tell(1, OwnershipInput::Force { owner: fleet.places[1] }).await;
    let output = fleet.finished(1).await;
    assert_same(&output, &alone);
    fleet.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_gateway_left_behind_is_freed_when_its_leases_end() {
    let ms = Duration::from_millis;
    let timing = Timing { heartbeat: ms(50), stop_after: ms(1_000), free_after: ms(2_000), ..Timing::default() };
    let short = |id| ReplicaConfig { migration: Some(MigrationConfig { timing, ..MigrationConfig::default() }), ..migrating(id) };
    let mut fleet = Fleet::start(vec![short("a"), short("b")]).await;
    let (address, prepared) = hold_back_what_the_target_says(fleet.gateway.kv_address(fleet.places[1])).await;
    fleet.gateway.kv_address = Some(address);
    fleet.gateway.acknowledges = false;
    for (number, owner) in [(1, 0), (2, 0), (3, 1)] {
        fleet.gateway.start(number, fleet.places[owner], sampled(200)).await;
        fleet.delivered(number, 20).await;
    }
    fleet.gateway.tell(1, OwnershipInput::Move { target: fleet.places[1] }).await;
    prepared.await.unwrap();
    let Fleet { replicas, gateway, .. } = fleet;
    drop(gateway);
    for replica in replicas {
        is_empty(&replica).await;
        replica.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_comes_back_finds_its_requests() {
    let ms = Duration::from_millis;
    let timing = Timing { heartbeat: ms(50), stop_after: ms(300), free_after: Duration::from_mins(1), ..Timing::default() };
    let config = ReplicaConfig { migration: Some(MigrationConfig { timing, ..MigrationConfig::default() }), ..migrating("a") };
    let mut fleet = Fleet::start(vec![config]).await;
    let alone = fleet.alone(&sampled(50)).await;
    fleet.gateway.acknowledges = false;
    fleet.gateway.start(1, fleet.places[0], sampled(50)).await;
    fleet.delivered(1, 20).await;
    // A newer connection ends the older one.
    let report = fleet.replicas[0].report().await;
    assert_eq!(fleet.gateway.attach(&report).await.unwrap(), fleet.places[0]);
    fleet.gateway.until("it is told what is held", |gateway| !gateway.holds.is_empty()).await;
    fleet.delivered(1, 100).await;
    // A gateway that does not answer for longer than requests compute for it.
    fleet.gateway.holds.clear();
    fleet.gateway.leases = false;
    let beats = fleet.gateway.heartbeats;
    fleet.gateway.until("heartbeats go unanswered", |gateway| gateway.heartbeats >= beats + 10).await;
    fleet.gateway.leases = true;
    fleet.gateway.until("it is told what is held", |gateway| !gateway.holds.is_empty()).await;
    fleet.gateway.acknowledges = true;
    fleet.gateway.acknowledge(1).await;
    let output = fleet.finished(1).await;
    assert_same(&output, &alone);
    fleet.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_gateway_pauses_its_request_and_no_other() {
    let mut fleet = Fleet::start(vec![migrating("a")]).await;
    fleet.gateway.stalled = Some(1);
    fleet.gateway.start(1, fleet.places[0], greedy(20)).await;
    fleet.delivered(1, 257).await;
    fleet.gateway.start(2, fleet.places[0], sampled(20)).await;
    fleet.finished(2).await;
    let delivered = fleet.gateway.request(1).delivered.len();
    assert!(delivered < OUTPUT as usize, "{delivered} entries");
    fleet.gateway.stalled = None;
    fleet.gateway.acknowledge(1).await;
    assert_eq!(fleet.finished(1).await.len(), OUTPUT as usize + 1);
    fleet.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_whose_entries_are_complete_computes_nothing() {
    let mut fleet = Fleet::start(vec![migrating("a")]).await;
    let spec = greedy(20);
    let alone = fleet.alone(&spec).await;
    let steps = fleet.replicas[0].report().await.steps;
    let (place, tokens) = (fleet.places[0], alone.len() - 1);
    let gateway = &mut fleet.gateway;
    for (number, delivered) in [(1, tokens), (2, tokens + 1)] {
        let start = ToSeat::Start { epoch: Tag(3), delivered: alone[..delivered].to_vec() };
        gateway.send(place, gateway.to_seat(number, start, spec.to_bytes())).await;
        gateway.send(place, gateway.to_seat(number, ToSeat::Start { epoch: Tag(3), delivered: vec![] }, spec.to_bytes())).await;
        let mut next = 0;
        while next < alone.len() {
            let (_, frame) = gateway.next_frame().await;
            let ControlFrame::ToGateway { message: ToGateway::Output { index, entry, .. }, .. } = frame else { continue };
            if index as usize == next {
                assert_eq!(entry, alone[next]);
                next += 1;
            }
        }
        gateway.send(place, gateway.to_seat(number, ToSeat::Stop { upto: Tag::ALL }, vec![])).await;
    }
    assert_eq!(fleet.replicas[0].report().await.steps, steps);
    fleet.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_run_is_told_to_be_lost() {
    let mut fleet = Fleet::start(vec![migrating("a")]).await;
    let place = fleet.places[0];
    let gateway = &mut fleet.gateway;
    let other_model = RunRequest { model: "other".to_owned(), ..greedy(5) };
    let never_fits = greedy(60_000);
    let adapted = RunRequest { adapter: Some("tone".to_owned()), ..greedy(5) };
    let outside = RunRequest { prompt: vec![u32::MAX], ..greedy(5) };
    let requests = [
        (1, other_model.to_bytes(), LostClass::Busy, "model"),
        (2, b"nothing".to_vec(), LostClass::Refused, "nothing was said"),
        (3, never_fits.to_bytes(), LostClass::Busy, "at most 2048"),
        (4, adapted.to_bytes(), LostClass::Refused, "the adapter \"tone\""),
        (5, outside.to_bytes(), LostClass::Refused, "outside the vocabulary"),
    ];
    for (number, with, class, wanted) in requests {
        gateway.send(place, gateway.to_seat(number, ToSeat::Start { epoch: Tag(1), delivered: vec![] }, with)).await;
        let (lost, why) = loop {
            if let (_, ControlFrame::ToGateway { request, message: ToGateway::Lost { epoch, class }, why }) = gateway.next_frame().await {
                break ((request.sequence, epoch, class), why);
            }
        };
        assert_eq!(lost, (number, Tag(1), class));
        assert!(why.starts_with("cannot be run here: ") && why.contains(wanted), "{why}");
    }
    fleet.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_held_is_lost_for_no_reason_of_its_own() {
    let mut fleet = Fleet::start(vec![migrating("a")]).await;
    let (place, gateway) = (fleet.places[0], &mut fleet.gateway);
    gateway.send(place, gateway.to_seat(1, ToSeat::Keep { epoch: Tag(1), next: 0 }, vec![])).await;
    let lost = loop {
        if let (_, ControlFrame::ToGateway { message: ToGateway::Lost { class, .. }, why, .. }) = gateway.next_frame().await {
            break (class, why);
        }
    };
    assert_eq!(lost, (LostClass::Lost, String::new()));
    fleet.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_is_told_what_a_request_found_and_what_its_move_took() {
    let mut fleet = Fleet::start(vec![migrating("a"), migrating("b")]).await;
    let started = std::time::Instant::now();
    fleet.alone(&greedy(200)).await;
    fleet.gateway.start(1, fleet.places[0], greedy(200)).await;
    fleet.delivered(1, 20).await;
    fleet.moved(1, 1).await;
    fleet.finished(1).await;
    let real_us = started.elapsed().as_micros() as u64;
    // Once each, before the first entry and by who computed the prompt; not by where it moved to.
    let told: Vec<_> = fleet.gateway.scheduled.iter().map(|told| (told.sequence, told.at, told.epoch, told.delivered)).collect();
    assert_eq!(told, [(1_000, fleet.places[0], Tag(1), 0), (1, fleet.places[0], Tag(1), 0)]);
    let cached: Vec<u32> = fleet.gateway.scheduled.iter().map(|told| told.cached).collect();
    assert_eq!(cached[0], 0);
    assert!((100..200).contains(&cached[1]), "of the 200 tokens that ran before: {cached:?}");
    assert!(fleet.gateway.scheduled.iter().all(|told| told.waited_us <= real_us));
    let [(1, attempt, copied)] = fleet.gateway.moved[..] else { panic!("{:?}", fleet.gateway.moved) };
    assert_eq!(attempt, Tag(2));
    assert!(copied.bytes > 0 && copied.held == 0 && copied.rounds <= 3 && copied.gap_us <= real_us, "{copied:?}");
    fleet.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_who_knows_the_fleet_key_attaches() {
    let keyed = |id| {
        let migration = MigrationConfig { fleet_key: Some(FleetKey::new("right")), ..MigrationConfig::default() };
        ReplicaConfig { migration: Some(migration), ..migrating(id) }
    };
    let replicas = [Replica::start(keyed("a")).await, Replica::start(keyed("b")).await];
    let mut places = Vec::new();
    let mut gateway = Gateway::with_key(Timing::default(), FleetKey::new("right"));
    for replica in &replicas {
        let report = replica.report().await;
        assert!(report.migration.as_ref().unwrap().fleet_key);
        assert!(Gateway::with_key(Timing::default(), FleetKey::new("wrong")).attach(&report).await.is_err());
        places.push(gateway.attach(&report).await.unwrap());
    }
    let mut fleet = Fleet { replicas: replicas.into(), places, gateway };
    let alone = fleet.alone(&greedy(200)).await;
    fleet.gateway.start(1, fleet.places[0], greedy(200)).await;
    fleet.delivered(1, 20).await;
    fleet.moved(1, 1).await;
    let output = fleet.finished(1).await;
    assert_same(&output, &alone);
    fleet.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_that_others_reach_needs_a_key() {
    for (host, wanted) in [("192.0.2.1", true), ("0.0.0.0", false)] {
        let migration = MigrationConfig { host: host.parse().unwrap(), ..MigrationConfig::default() };
        let replica = Replica::start(ReplicaConfig { migration: Some(migration), ..migrating("a") }).await;
        let error = replica.served.await.unwrap().unwrap_err();
        let ReplicaError::Migration(error) = error else { panic!("{error}") };
        assert_eq!(matches!(error, MigrationError::NoKey(_)), wanted, "{error}");
    }
}

/// An address that leads to a target's, and passes on nothing of what the target says after its hello; resolves when it said something.
async fn hold_back_what_the_target_says(to: String) -> (String, oneshot::Receiver<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (said, says) = oneshot::channel();
    tokio::spawn(async move {
        let (source, _) = listener.accept().await.unwrap();
        let (mut from_source, mut to_source) = source.into_split();
        let (mut from_target, mut to_target) = TcpStream::connect(to).await.unwrap().into_split();
        let there = async { tokio::io::copy(&mut from_source, &mut to_target).await };
        let back = async {
            let mut length = [0; 4];
            from_target.read_exact(&mut length).await?;
            let mut hello = vec![0; u32::from_le_bytes(length) as usize];
            from_target.read_exact(&mut hello).await?;
            to_source.write_all(&length).await?;
            to_source.write_all(&hello).await?;
            from_target.read_exact(&mut length).await?;
            let _ = said.send(());
            tokio::io::copy(&mut from_target, &mut tokio::io::sink()).await
        };
        // The end of one side is the end of the other.
        tokio::select! {
            _ = there => {}
            _ = back => {}
        }
    });
    (address, says)
}
