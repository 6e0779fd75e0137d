use std::{collections::HashMap, hash::BuildHasherDefault};

use baton_kv::{BlockKey, KeyHasher};
use baton_units::{DurationMs, Time};

const RENT_TAU_MS: f64 = 60_000.0;
/// Prefixes with rent; past it the half with the least goes, so that this is done once in as many payments.
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
            self.forget_least(now);
        }
        let (paid, at) = self.paid.entry(key).or_insert((0.0, now));
        *paid = decayed(*paid, *at, now) + rent_ms;
        *at = now;
        *paid
    }

    fn forget_least(&mut self, now: Time) {
        let mut left = Vec::with_capacity(self.paid.len());
        self.paid.retain(|_, (paid, at)| {
            left.push(decayed(*paid, *at, now));
            true
        });
        let middle = left.len() / 2;
        let least = *left.select_nth_unstable_by(middle, f64::total_cmp).1;
        self.paid.retain(|_, (paid, at)| decayed(*paid, *at, now) > least);
    }

    /// A copy was bought.
    pub(crate) fn settle(&mut self, key: BlockKey) {
        self.paid.remove(&key);
    }
}

fn decayed(paid_ms: f64, at: Time, now: Time) -> f64 {
    paid_ms * (-now.since(at).as_ms() / RENT_TAU_MS).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_prefixes_are_forgotten_by_halves_and_the_dearest_last() {
        let mut rents = Rents::default();
        let (mut most, mut shrunk) = (0, 0);
        rents.pay(BlockKey(u64::MAX), 1e6, Time::ZERO);
        for prefix in 0..10 * RENTED_MAX as u64 {
            let before = rents.paid.len();
            rents.pay(BlockKey(prefix), 5.0 + prefix as f64, Time::from_ms(prefix as f64));
            most = most.max(rents.paid.len());
            shrunk += usize::from(rents.paid.len() <= before);
        }
        assert!(most <= RENTED_MAX, "{most}");
        assert!(shrunk <= 20, "looked through {shrunk} times");
        assert!(rents.pay(BlockKey(u64::MAX), 0.0, Time::from_ms(40_960.0)) > 5e5, "half decayed, and kept");
    }
}
