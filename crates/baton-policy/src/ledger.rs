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
    /// Of the whole prompt: an engine's report does not take off hits that waiting requests will find.
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

    /// Work left of some of the requests.
    pub(crate) fn left_ms(&self, of: impl Fn(RequestId) -> bool) -> f64 {
        self.items.iter().filter(|item| of(item.request)).map(|item| item.left_ms).sum()
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(ms: f64) -> Time {
        Time::from_ms(ms)
    }

    #[test]
    fn time_takes_off_the_first_item_only_and_never_what_waits_behind_it() {
        let mut ledger = Ledger::default();
        ledger.add(RequestId(1), 100.0, Tokens(1000), at(0.0));
        ledger.add(RequestId(2), 30.0, Tokens(300), at(0.0));
        ledger.advance(None, at(60.0));
        assert!((ledger.backlog_ms() - 70.0).abs() < 1e-9);
        // The first is late: the second has not begun.
        ledger.advance(None, at(500.0));
        assert!((ledger.backlog_ms() - 30.0).abs() < 1e-9);
        ledger.remove(RequestId(1));
        ledger.advance(None, at(510.0));
        assert!((ledger.backlog_ms() - 20.0).abs() < 1e-9);
    }

    #[test]
    fn a_report_adds_only_what_this_router_did_not_send() {
        let mut ledger = Ledger::default();
        ledger.add(RequestId(1), 100.0, Tokens(1000), at(0.0));
        ledger.advance(None, at(10.0));
        ledger.reconcile(Tokens(1000), at(10.0), 0.1, at(10.0));
        assert!((ledger.backlog_ms() - 90.0).abs() < 1e-9, "all of it is ours");
        // Work sent after the report was taken is no reason to believe in less.
        ledger.add(RequestId(2), 50.0, Tokens(500), at(12.0));
        ledger.advance(None, at(14.0));
        ledger.reconcile(Tokens(1400), at(11.0), 0.1, at(14.0));
        assert!((ledger.backlog_ms() - (86.0 + 50.0 + 40.0 - 3.0)).abs() < 1e-9, "{}", ledger.backlog_ms());
    }

    proptest! {
        #[test]
        fn interleaved_work_drains_as_fast_as_time_passes(
            work in prop::collection::vec(0.5f64..300.0, 1..8),
            steps in prop::collection::vec(0.1f64..40.0, 1..20),
        ) {
            let mut ledger = Ledger::default();
            for (place, ms) in work.iter().enumerate() {
                ledger.add(RequestId(place as u64), *ms, Tokens(1), Time::ZERO);
            }
            let mut now = 0.0;
            for step in steps {
                now += step;
                ledger.advance(Some(50.0), at(now));
                let left = (work.iter().sum::<f64>() - now).max(0.0);
                prop_assert!((ledger.backlog_ms() - left).abs() < 1e-3, "{} for {left}", ledger.backlog_ms());
            }
        }
    }
}
