//! Whether a replica speaks the migration protocol (`docs/migration-protocol.md`): numbered cases against any implementation, by address.
//!
//! The suite plays the gateway, right and wrong, and, where one replica is enough, the other side of a move as well. It needs nothing but the
//! addresses, and looks into no replica: what is not said on a connection it does not see. It measures no speed; its gateway, [`Fleet`], is
//! also what `bench/migrate` moves requests by.

#![allow(clippy::wildcard_enum_match_arm, reason = "what a case does not wait for it passes over, or fails by")]

mod cases;
mod fleet;
mod gateway;
mod kv;
mod raw;
mod suite;
mod verdict;

use std::pin::Pin;

pub use cases::CASES;
pub use fleet::{Fleet, Request};
pub use suite::{Options, Suite};
pub use verdict::{Checked, Unmet};

/// One demand of the protocol, or some that belong together.
pub struct Case {
    /// Stays when cases are added behind it.
    pub number: u32,
    /// What holds where it is met.
    pub name: &'static str,
    run: Run,
}

/// No case takes longer than so often the suite's patience.
const PATIENCES: u32 = 3;

type Run = for<'a> fn(&'a Suite) -> Pin<Box<dyn Future<Output = Checked> + Send + 'a>>;

impl Case {
    /// # Errors
    /// With why it is not met, or says nothing.
    pub async fn check(&self, suite: &Suite) -> Checked {
        // What comes again and again keeps each single wait alive.
        let limit = suite.patience() * PATIENCES;
        let checked = tokio::time::timeout(limit, (self.run)(suite)).await;
        checked.unwrap_or_else(|_| verdict::failed(format!("it was not done within {limit:?}")))
    }
}

/// What all cases came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Summary {
    pub met: u32,
    pub failed: u32,
    pub skipped: u32,
}

/// Checks the cases whose names contain one of `only`, all where it is empty, one after the other. `told` hears of each when it is done.
pub async fn run(suite: &Suite, only: &[String], mut told: impl FnMut(&Case, &Checked)) -> Summary {
    let mut summary = Summary::default();
    for case in CASES.iter().filter(|case| only.is_empty() || only.iter().any(|part| case.name.contains(part))) {
        let checked = case.check(suite).await;
        match &checked {
            Ok(()) => summary.met += 1,
            Err(Unmet::Failed(_)) => summary.failed += 1,
            Err(Unmet::Skipped(_)) => summary.skipped += 1,
        }
        told(case, &checked);
    }
    summary
}
