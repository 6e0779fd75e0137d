//! Tenants: whose client a request is of by its key, what it may ask for, what it may use, and what it used.

mod limits;
mod padding;
mod public;
mod salt;

use std::{
    collections::BTreeMap,
    ops::RangeInclusive,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use baton_policy::Share;
use baton_units::{Priority, Time};
use http::{HeaderMap, header};
use xxhash_rust::xxh3::xxh3_64;

pub(crate) use self::{
    limits::Limit,
    padding::Padding,
    public::{PublicPrefixes, common},
};
use self::{
    limits::{Bounds, Exceeded, Limits},
    padding::Sent,
    salt::Salts,
};
use crate::{
    clock::Clock,
    config::{GatewayConfig, Isolation, KeyHash, TenantConfig},
    prompt::KeyChain,
    refusal::Refusal,
};

/// All tenants of the configuration in force; without any the gateway is open.
#[derive(Debug, Default)]
pub(crate) struct Tenants {
    by_key: BTreeMap<KeyHash, Arc<Tenant>>,
    /// As in the file.
    all: Vec<Arc<Tenant>>,
    /// Requests without a key of a tenant.
    strangers: AtomicU64,
}

/// One tenant; it lives as long as its name is in the file, or a request of it runs.
#[derive(Debug)]
pub(crate) struct Tenant {
    name: String,
    terms: ArcSwap<Terms>,
    limits: Mutex<Limits>,
    sent: Arc<Sent>,
    counters: Counters,
}

/// What a tenant's requests may ask for.
#[derive(Debug)]
pub(crate) struct Terms {
    /// Priorities that they may have, in order; at least one.
    priorities: Vec<RangeInclusive<i32>>,
    /// Where its prefixes are kept apart from others'.
    salts: Option<Salts>,
    share: Share,
    /// Span to whose ends first tokens are held back that others may have made early.
    padding: Option<Duration>,
}

/// Since the tenant came.
#[derive(Debug, Default)]
struct Counters {
    requests: AtomicU64,
    prompt_tokens: AtomicU64,
    output_tokens: AtomicU64,
    refused: [AtomicU64; Limit::ALL.len()],
}

/// What metrics show of a tenant.
pub(crate) struct Usage<'a> {
    pub(crate) name: &'a str,
    pub(crate) requests: u64,
    pub(crate) prompt_tokens: u64,
    pub(crate) output_tokens: u64,
    pub(crate) running: u32,
    /// By limit, as in [`Limit::ALL`].
    pub(crate) refused: [u64; Limit::ALL.len()],
}

impl Tenants {
    /// The tenants of another configuration. One of the same name goes on with what it has used.
    pub(crate) fn replaced_by(&self, config: &GatewayConfig, now: Time) -> Self {
        let mut tenants = Self { strangers: AtomicU64::new(self.strangers()), ..Self::default() };
        for tenant_config in &config.tenants {
            let terms = Arc::new(Terms::new(tenant_config, config));
            let known = self.all.iter().find(|tenant| tenant.name == tenant_config.name);
            let tenant = known.cloned().unwrap_or_else(|| Arc::new(Tenant::new(tenant_config.name.clone(), terms.clone(), now)));
            tenant.terms.store(terms);
            tenant.limits().set(bounds(tenant_config), now);
            tenants.by_key.extend(tenant_config.keys.iter().map(|key| (*key, tenant.clone())));
            tenants.all.push(tenant);
        }
        tenants
    }

    /// Whose client sent these headers; `None` where the gateway is open.
    pub(crate) fn of(&self, headers: &HeaderMap) -> Result<Option<&Arc<Tenant>>, Refusal> {
        if self.is_open() {
            return Ok(None);
        }
        let key = client_key(headers);
        // A map of hashes tells whoever measures its time about hashes only, which lead to no key.
        let tenant = key.and_then(|key| self.by_key.get(&KeyHash::of(key)));
        if tenant.is_none() {
            self.strangers.fetch_add(1, Ordering::Relaxed);
        }
        tenant.map(Some).ok_or(Refusal::UnknownKey { given: key.is_some() })
    }

    pub(crate) fn is_open(&self) -> bool {
        self.all.is_empty()
    }

    pub(crate) fn strangers(&self) -> u64 {
        self.strangers.load(Ordering::Relaxed)
    }

    pub(crate) fn usage(&self) -> impl Iterator<Item = Usage<'_>> {
        self.all.iter().map(|tenant| {
            let Counters { requests, prompt_tokens, output_tokens, refused } = &tenant.counters;
            let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
            Usage {
                name: &tenant.name,
                requests: read(requests),
                prompt_tokens: read(prompt_tokens),
                output_tokens: read(output_tokens),
                running: tenant.limits().running(),
                refused: refused.each_ref().map(read),
            }
        })
    }
}

/// As OpenAI's clients send it, or Anthropic's.
fn client_key(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
    bearer.or_else(|| headers.get("x-api-key").map(http::HeaderValue::as_bytes)).map(<[u8]>::trim_ascii)
}

fn bounds(config: &TenantConfig) -> Bounds {
    Bounds { requests_per_minute: config.requests_per_minute, tokens_per_minute: config.tokens_per_minute, concurrency: config.concurrency }
}

impl Tenant {
    fn new(name: String, terms: Arc<Terms>, now: Time) -> Self {
        let limits = Mutex::new(Limits::new(Bounds::default(), now));
        Self { name, terms: ArcSwap::new(terms), limits, sent: Arc::new(Sent::new()), counters: Counters::default() }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn terms(&self) -> Arc<Terms> {
        self.terms.load_full()
    }

    /// Lets a request in, if the tenant has room for it.
    pub(crate) fn enter(self: &Arc<Self>, clock: Clock) -> Result<Grant, Refusal> {
        self.limits().enter(clock.now()).map_err(|exceeded| self.refuse(exceeded))?;
        self.counters.requests.fetch_add(1, Ordering::Relaxed);
        Ok(Grant { tenant: self.clone(), clock, tokens: 0, ran: false })
    }

    /// How the first token of a prompt is held back, where that is wanted.
    pub(crate) fn padding(&self, chain: &KeyChain, now: Time) -> Option<Padding> {
        let cell = self.terms().padding?;
        Some(Padding::new(cell, &self.sent, chain.keys(), chain.block_size(), now))
    }

    fn refuse(&self, Exceeded { limit, retry_after }: Exceeded) -> Refusal {
        self.counters.refused[limit as usize].fetch_add(1, Ordering::Relaxed);
        Refusal::TenantLimit { limit, retry_after }
    }

    fn limits(&self) -> MutexGuard<'_, Limits> {
        // Each call leaves plain numbers behind, none of them half written.
        self.limits.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Terms {
    fn new(tenant: &TenantConfig, config: &GatewayConfig) -> Self {
        let share = Share { tenant: xxh3_64(tenant.name.as_bytes()), weight: tenant.weight };
        let secret = config.gateway.salt_secret.as_ref().filter(|_| tenant.isolation == Isolation::Salt);
        let salts = secret.map(|secret| Salts::new(secret, &tenant.name));
        Self { priorities: tenant.priorities(&config.policy.classes), salts, share, padding: tenant.ttft_padding }
    }

    /// Its part of the fleet.
    pub(crate) fn share(&self) -> Share {
        self.share
    }

    /// The salt of a request whose client sent `salt`; `None` where the tenant shares its prefixes.
    pub(crate) fn salt(&self, salt: Option<&str>) -> Option<String> {
        self.salts.as_ref().map(|salts| salts.of(salt))
    }

    /// Whose text is remembered together: its own where its prefixes are.
    pub(crate) fn text_domain(&self) -> u64 {
        if self.salts.is_some() { self.share.tenant } else { 0 }
    }

    /// The priority that a request gets: the one asked for, else the next less important one that the tenant may use, else its least
    /// important one.
    pub(crate) fn priority(&self, asked: Priority) -> Priority {
        let next = self.priorities.iter().find(|range| asked.0 <= *range.end());
        let least = self.priorities.last().map_or(asked.0, |range| *range.end());
        Priority(next.map_or(least, |range| asked.0.max(*range.start())))
    }
}

/// A request's claim on its tenant, given up when it is dropped.
#[derive(Debug)]
pub(crate) struct Grant {
    tenant: Arc<Tenant>,
    clock: Clock,
    /// Set aside, or used beyond that.
    tokens: u64,
    ran: bool,
}

impl Grant {
    pub(crate) fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    /// Sets aside what the request may use at most, as far as that is known.
    pub(crate) fn reserve(&mut self, tokens: u64) -> Result<(), Refusal> {
        self.tenant.limits().reserve(tokens, self.clock.now()).map_err(|exceeded| self.tenant.refuse(exceeded))?;
        self.tokens = tokens;
        Ok(())
    }

    /// It has used `tokens` in all so far.
    pub(crate) fn used(&mut self, tokens: u64) {
        if tokens > self.tokens {
            self.tenant.limits().charge(tokens - self.tokens, self.clock.now());
            self.tokens = tokens;
        }
    }

    /// It is over and has used so much. What was set aside beyond it goes back.
    pub(crate) fn end(mut self, prompt: u64, output: u64) {
        self.used(prompt + output);
        self.tenant.counters.prompt_tokens.fetch_add(prompt, Ordering::Relaxed);
        self.tenant.counters.output_tokens.fetch_add(output, Ordering::Relaxed);
        self.tokens -= prompt + output;
        self.ran = true;
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        let now = self.clock.now();
        let mut limits = self.tenant.limits();
        limits.give_back(self.tokens, now);
        limits.leave(self.ran, now);
    }
}

#[cfg(test)]
mod tests;
