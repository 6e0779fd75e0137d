//! Whose turn it is among tenants of equal importance: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM '96) over service in tokens,
//! as VTC counts it (Sheng et al., OSDI '24). Of two tenants who always wait, each gets service by its weight, to within one request of each.

use std::collections::BTreeMap;

/// The tenant of a request, and its part of the fleet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Share {
    /// Names it.
    pub tenant: u64,
    /// Of two tenants who always have requests waiting, one gets so many times the other's service. Positive.
    pub weight: f64,
}

/// Tenants on the books beyond which those are forgotten whose next turn is now anyway.
const TENANTS_MAX: usize = 1024;
/// Parts of a token of service by which turns are told apart.
const PARTS: f64 = 1000.0;

/// A place in the order of service. Requests without a tenant are all at the first.
pub(crate) type Turn = u64;

#[derive(Debug, Default)]
pub(crate) struct Turns {
    /// Of the latest request that went to a replica.
    now: Turn,
    /// Of each tenant's next request: where the service of those before it ends.
    next: BTreeMap<u64, Turn>,
}

impl Turns {
    /// That of a request that comes now. Who was away begins where the others are: what is not used is not saved.
    pub(crate) fn of(&self, share: Option<Share>) -> Turn {
        share.map_or(0, |share| self.next.get(&share.tenant).copied().unwrap_or_default().max(self.now))
    }

    /// A request of so much service takes its turn.
    pub(crate) fn take(&mut self, share: Option<Share>, service: f64) -> Turn {
        let turn = self.of(share);
        if let Some(share) = share {
            if self.next.len() >= TENANTS_MAX {
                let now = self.now;
                self.next.retain(|_, next| *next > now);
            }
            self.next.insert(share.tenant, turn);
            self.serve(Some(share), service);
        }
        turn
    }

    /// The tenant gets more service, or less than it was charged for.
    pub(crate) fn serve(&mut self, share: Option<Share>, service: f64) {
        if let Some(share) = share
            && let Some(next) = self.next.get_mut(&share.tenant)
        {
            *next = next.saturating_add_signed((service * PARTS / share.weight) as i64);
        }
    }

    /// The request of that turn went to a replica.
    pub(crate) fn came(&mut self, turn: Turn) {
        self.now = self.now.max(turn);
    }

    /// Nobody has a tenant.
    pub(crate) fn is_plain(&self) -> bool {
        self.next.is_empty()
    }
}
