//! The suite against Baton's own replica, which must meet all of it, and against one that a proxy makes wrong, which must not.

#![allow(clippy::unwrap_used, reason = "all of this is test code")]
#![allow(clippy::wildcard_enum_match_arm, reason = "what a test does not change passes")]

mod mutants;
mod proxy;
mod replica;
#[path = "../../../baton-model/tests/suite/tiny.rs"]
#[allow(dead_code, reason = "that crate's own tests use all of it")]
mod tiny;

use std::{sync::Arc, time::Duration};

use baton_conform::{Options, Suite, Summary, Unmet};
use baton_wire::migration::handshake::FleetKey;

use crate::replica::{Fleet, MODEL};

/// Outputs as the emulated engine gives them in a quarter of a second.
const OUTPUT: u32 = 500;

fn options(fleet: &Fleet) -> Options {
    let [replica, peer] = &fleet.replicas;
    Options {
        peer: Some(peer.control.clone()),
        output: OUTPUT,
        http: vec![replica.http.clone(), peer.http.clone()],
        patience: Duration::from_mins(1),
        ..Options::new(&replica.control, MODEL)
    }
}

/// All cases but some, whose names contain one of `skipped`, are met.
async fn meets_all(options: Options, only: &[&str], skipped: &[&str]) -> Summary {
    let suite = Suite::new(options).await.unwrap();
    let only: Vec<String> = only.iter().map(|part| (*part).to_owned()).collect();
    let mut wrong = Vec::new();
    let summary = baton_conform::run(&suite, &only, |case, checked| {
        let may_be_skipped = skipped.iter().any(|part| case.name.contains(part));
        match checked {
            Ok(()) if !may_be_skipped => {}
            Err(Unmet::Skipped(_)) if may_be_skipped => {}
            other => wrong.push(format!("{} {}: {other:?}", case.number, case.name)),
        }
    })
    .await;
    assert!(wrong.is_empty(), "{wrong:#?}");
    summary
}

const WITHOUT_KEY: [&str; 2] = ["another key", "not authentic"];
const LONG: [&str; 2] = ["after 5 s", "after 15 s"];

#[tokio::test(flavor = "multi_thread")]
async fn an_emulated_replica_meets_all_cases() {
    let fleet = Fleet::timed(None).await;
    let summary = meets_all(options(&fleet), &[], &[WITHOUT_KEY, LONG].concat()).await;
    assert_eq!((summary.failed, summary.skipped), (0, 4));
    fleet.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_with_a_fleet_key_meets_what_the_key_adds() {
    let fleet = Fleet::timed(Some("secret")).await;
    let options = Options { fleet_key: Some(Arc::new(FleetKey::new("secret"))), ..options(&fleet) };
    meets_all(options, &["key", "frame", "sequence", "hello", "another nonce", "a moved request has", "pools"], &[]).await;
    fleet.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_computing_replica_meets_what_concerns_its_bits() {
    let fleet = Fleet::computing().await;
    let options = Options { output: replica::COMPUTED_OUTPUT, vocabulary: tiny::VOCAB as u32, ..options(&fleet) };
    let only = ["goes on after them", "brings every block", "asks to stay", "prepared", "prefix", "a moved request has", "pools"];
    meets_all(options, &only, &[]).await;
    fleet.stop().await;
}
