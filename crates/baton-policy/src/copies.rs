use std::{collections::HashMap, hash::BuildHasherDefault};

use baton_kv::{BlockKey, KeyHasher};
use baton_units::{DurationMs, Time};

const RENT_TAU_MS: f64 = 60_000.0;
/// Prefixes with rent; past it the nearly decayed ones go.
const RENTED_MAX: usize = 4096;

/// Ski rental on shared prefixes: requests pay rent for a replica that lacks their prefix; when the rent paid equals a copy's price,
/// a copy is bought. At most twice the cost of the best buying time, without a forecast of the prefix's popularity (Karlin et al.).
#[derive(Debug, Default)]
pub(crate) struct Rents {
    paid: HashMap<BlockKey, (f64, Time), BuildHasherDefault<KeyHasher>>,
}

impl Rents {
    /// Pays `rent_ms` for the prefix that ends in `key` and returns all that was paid, decayed.
    pub(crate) fn pay(&mut self, key: BlockKey, rent_ms: f64, now: Time) -> f64 {
        if self.paid.len() >= RENTED_MAX {
            self.paid.retain(|_, (paid, at)| decayed(*paid, *at, now) > 1.0);
        }
        let (paid, at) = self.paid.entry(key).or_insert((0.0, now));
        *paid = decayed(*paid, *at, now) + rent_ms;
        *at = now;
        *paid
    }

    /// A copy was bought.
    pub(crate) fn settle(&mut self, key: BlockKey) {
        self.paid.remove(&key);
    }
}

fn decayed(paid_ms: f64, at: Time, now: Time) -> f64 {
    paid_ms * (-now.since(at).as_ms() / RENT_TAU_MS).exp()
}
