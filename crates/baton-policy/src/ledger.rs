use baton_units::{DurationMs, RequestId, Time, Tokens};

/// Below this much work an item counts as done but for its first token.
const DONE_MS: f64 = 1e-9;

/// Prefill work sent to one replica and not yet seen done, dead-reckoned between events.
///
/// Only the passing of time and first tokens take work off. A report never does: its backlog is of another moment, and subtracting
/// work dispatched after it makes every router believe in an idle fleet (the report only adds what this router did not send).
#[derive(Debug, Clone, Default)]
pub(crate) struct Ledger {
    items: Vec<Item>,
    at: Time,
    /// Work that the replica reported and this router did not send.
    foreign_ms: f64,
}

#[derive(Debug, Clone)]
struct Item {
    request: RequestId,
    left_ms: f64,
    tokens: Tokens,
    sent_at: Time,
}

impl Ledger {
    /// Moves to `now`. `long_chunk_ms` is what a long prompt takes of a step where chunks of several prompts interleave.
    pub(crate) fn advance(&mut self, long_chunk_ms: Option<f64>, now: Time) {
        let mut elapsed = now.since(self.at).as_ms();
        self.at = now.max(self.at);
        let foreign = self.foreign_ms.min(elapsed);
        self.foreign_ms -= foreign;
        elapsed -= foreign;
        match long_chunk_ms {
            None => {
                // Never below zero before the first token is seen: what follows has not begun either.
                if let Some(first) = self.items.first_mut() {
                    first.left_ms = (first.left_ms - elapsed).max(0.0);
                }
            }
            Some(chunk) => self.share(elapsed, chunk),
        }
    }

    /// Processor sharing among short prompts and the first long one.
    fn share(&mut self, mut elapsed: f64, long_chunk_ms: f64) {
        while elapsed > DONE_MS {
            let mut longs = 0;
            let active: Vec<usize> = (0..self.items.len())
                .filter(|&place| {
                    let left = self.items[place].left_ms;
                    longs += u32::from(left > long_chunk_ms);
                    left > DONE_MS && (left <= long_chunk_ms || longs == 1)
                })
                .collect();
            if active.is_empty() {
                return;
            }
            let least = active.iter().map(|&place| self.items[place].left_ms).fold(f64::INFINITY, f64::min);
            let each = least.min(elapsed / active.len() as f64);
            for &place in &active {
                self.items[place].left_ms -= each;
            }
            elapsed -= each * active.len() as f64;
        }
    }

    pub(crate) fn add(&mut self, request: RequestId, work_ms: f64, tokens: Tokens, now: Time) {
        self.items.push(Item { request, left_ms: work_ms, tokens, sent_at: now });
    }

    /// Takes a request's work off: its first token came, or it ended without one.
    pub(crate) fn remove(&mut self, request: RequestId) {
        self.items.retain(|item| item.request != request);
    }

    /// Takes in a report's backlog: what exceeds all that this router had sent by then is another's.
    pub(crate) fn reconcile(&mut self, backlog: Tokens, taken_at: Time, ms_per_token: f64, now: Time) {
        let own: u64 = self.items.iter().filter(|item| item.sent_at <= taken_at).map(|item| u64::from(item.tokens.0)).sum();
        let foreign = u64::from(backlog.0).saturating_sub(own) as f64 * ms_per_token;
        self.foreign_ms = (foreign - now.since(taken_at).as_ms()).max(0.0);
    }

    /// Work ahead of a new prompt that takes its turn.
    pub(crate) fn backlog_ms(&self) -> f64 {
        self.foreign_ms + self.items.iter().map(|item| item.left_ms).sum::<f64>()
    }

    /// Work ahead of a short prompt where chunks interleave: the short ones, and 1.5 chunks of a long one if there is one.
    pub(crate) fn short_wait_ms(&self, long_chunk_ms: f64) -> f64 {
        let short: f64 = self.items.iter().map(|item| item.left_ms).filter(|left| *left <= long_chunk_ms).sum();
        short + if self.has_long(long_chunk_ms) { 1.5 * long_chunk_ms } else { 0.0 }
    }

    pub(crate) fn has_long(&self, long_chunk_ms: f64) -> bool {
        self.items.iter().any(|item| item.left_ms > long_chunk_ms)
    }

    pub(crate) fn at(&self) -> Time {
        self.at
    }

    pub(crate) fn prefilling(&self) -> usize {
        self.items.len()
    }
}
