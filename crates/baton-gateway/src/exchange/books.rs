//! What an exchange counts, and whom it tells: session, router, engine, tenant, metrics.

use std::time::Duration;

use baton_policy::Outcome;
use baton_session::{End, Offer};
use baton_units::{DurationMs, Time, Tokens};

use super::{Exchange, Running, Way};
use crate::{engine::Engine, live::LiveState};

impl Exchange {
    /// Counts output of a choice under the attempt's epoch; says whether it may pass.
    pub(super) fn offer(&mut self, choice: u32, count: u32, token_ids: impl Iterator<Item = u32>, now: Time) -> bool {
        let Some(running) = &mut self.attempt else { return false };
        let next = match &mut running.way {
            Way::Wire(wire) => &mut wire.next,
            Way::Carried(carrying) => &mut carrying.next,
            Way::ByTokens(by_tokens) => &mut by_tokens.next,
        };
        let index = next.entry(choice).or_default();
        let offer = self.session.offer(running.epoch, choice, *index, count, now);
        *index += count;
        if choice == 0 && self.admitted.exact {
            self.admitted.chain.extend(token_ids);
        }
        matches!(offer, Offer::Deliver { .. })
    }

    /// Books output and tells the router of it.
    pub(super) fn output(&mut self, tokens: u32, now: Time) {
        let live = &self.admitted.live;
        live.add_output(tokens);
        if let Some(Running { engine, way, .. }) = &self.attempt {
            engine.pulse.spoke(now);
            if !self.first_told && tokens > 0 {
                // One that is carried may have come from elsewhere since it was sent.
                if !matches!(way, Way::Carried(_)) {
                    engine.pulse.first_token(now.since(self.sent_at));
                }
                engine.succeeded();
            }
        }
        match self.last_token_at {
            Some(last) => self.fleet.metrics.token_gap(now.since(last)),
            None => self.fleet.metrics.first_token(now.since(live.arrived)),
        }
        if std::mem::replace(&mut self.first_told, true) {
            self.untold += tokens;
        } else {
            if self.first_token_at.is_none() {
                self.hold_back(now);
            }
            self.has_left(now);
            let live = &self.admitted.live;
            self.first_token_at.get_or_insert(now);
            live.set(LiveState::Decode, self.session.owner().map(|owner| owner.replica));
            let cached = self.cached;
            self.fleet.with_router(|router, now| {
                router.first_token(live.id, cached, now);
                router.output_tokens(live.id, tokens, now);
            });
        }
        self.last_token_at = Some(now);
    }

    /// The first token is there: all of the answer is to come later by what others' prefixes may have saved of it.
    pub(super) fn hold_back(&mut self, now: Time) {
        let Some(padding) = &self.admitted.padding else { return };
        let took = now.since(self.admitted.live.arrived);
        let spec = self.attempt.as_ref().and_then(|running| running.engine.facts().spec);
        let saved = spec.map_or(Duration::ZERO, |spec| {
            let price = |hit: Tokens| Duration::from_ms(spec.prefill_ms(self.admitted.live.prompt, hit));
            let cold = price(padding.own);
            if let Some(cached) = self.cached {
                return cold.saturating_sub(price(cached));
            }
            // Who tells only at the end what was cached: as much as is believed, and no less than all where the request did not wait.
            let decision = self.fleet.peek_router(|router, _| router.decision(self.admitted.live.id));
            let quote = decision.and_then(|decision| decision.quotes.iter().find(|quote| quote.replica == spec.id).cloned());
            let (hit, wait_ms) = quote.map_or((Tokens::ZERO, 0.0), |quote| (quote.hit_tokens, quote.terms.wait));
            cold.saturating_sub(price(hit)).max((Duration::from_ms(wait_ms) + cold).saturating_sub(took))
        });
        self.lag.set(padding.delay(took, saved));
    }

    pub(super) fn tell_output(&mut self) {
        let tokens = std::mem::take(&mut self.untold);
        if tokens > 0 {
            self.fleet.peek_router(|router, now| router.output_tokens(self.admitted.live.id, tokens, now));
            let (prompt, output) = (self.prompt_tokens(), self.output_tokens());
            if let Some(grant) = &mut self.admitted.grant {
                grant.used(prompt + output);
            }
        }
    }

    /// Of the prompt: as the engine counts them, once it has told.
    pub(super) fn prompt_tokens(&self) -> u64 {
        self.usage.as_ref().map_or(self.admitted.live.prompt.0, |usage| usage.prompt_tokens).into()
    }

    pub(super) fn output_tokens(&self) -> u64 {
        self.admitted.live.output().0.into()
    }

    /// What the finished attempt teaches: the engine's speed, where it does not tell it itself.
    pub(super) fn observe(&mut self, engine: &Engine) {
        let Some(usage) = &self.usage else { return };
        let cached = Tokens(usage.cached_tokens().unwrap_or(0));
        let prompt = Tokens(usage.prompt_tokens);
        self.fleet.metrics.tokens(engine.id, prompt, cached, Tokens(usage.completion_tokens));
        if usage.cached_tokens().is_some() {
            let decision = self.fleet.peek_router(|router, _| {
                router.cached_tokens(self.admitted.live.id, cached);
                router.decision(self.admitted.live.id)
            });
            let quote = decision.as_ref().and_then(|decision| decision.quotes.iter().find(|quote| quote.replica == engine.id));
            if let Some(quote) = quote {
                self.fleet.metrics.hit_predicted(engine.id, quote.hit_tokens, cached);
            }
        }
        let Some(first_token_at) = self.first_token_at.filter(|_| self.alone && !engine.config.kind.reports_steps()) else { return };
        let new = prompt.saturating_sub(cached);
        if new == Tokens::ZERO {
            return;
        }
        engine.observe_prefill(new, cached, first_token_at.since(self.sent_at), first_token_at);
    }

    pub(super) fn book_end(&mut self) {
        let end = self.end.expect("a session ends with an end");
        let live = &self.admitted.live;
        let (outcome, name) = match end {
            End::Finished => (Outcome::Finished, "finished"),
            End::Cancelled => (Outcome::Cancelled, "cancelled"),
            End::Refused => (Outcome::Cancelled, "refused"),
            End::Rejected => (Outcome::Failed, "rejected"),
            End::Failed(_) => (Outcome::Failed, "failed"),
            End::Exhausted(_) => (Outcome::Failed, "exhausted"),
            End::Drained => (Outcome::Cancelled, "drained"),
            End::TimedOut(_) => (Outcome::Failed, "timed-out"),
        };
        let grown = self.admitted.exact && self.admitted.intake.choices == 1;
        let keys = (outcome == Outcome::Finished && grown).then(|| self.admitted.chain.keys());
        if self.admitted.padding.is_some() {
            self.grown.clone_from(&keys);
        }
        self.fleet.finished(live.id, outcome, keys);
        self.fleet.retire(live.id);
        if let Some(grant) = self.admitted.grant.take() {
            // Nothing was computed of a request that no replica had, or that none would do.
            let is_free = self.last_replica.is_none() || matches!(end, End::Refused | End::Rejected | End::Exhausted(_));
            grant.end(if is_free { 0 } else { self.prompt_tokens() }, self.output_tokens());
        }
        let live = &self.admitted.live;
        let took = self.fleet.clock.now().since(live.arrived);
        let route = self.admitted.intake.api.path();
        self.fleet.metrics.request_ended(route, name, took);
        let level_is_warn = matches!(end, End::Failed(_) | End::Exhausted(_) | End::TimedOut(_));
        let replica = self.last_replica.map(|id| id.to_string()).unwrap_or_default();
        if level_is_warn {
            tracing::warn!(request = %live.id, x_request_id = live.client_id, trace_id = live.trace_id(), replica, attempts = self.session.attempts(), %end, "request failed");
        } else {
            tracing::debug!(request = %live.id, x_request_id = live.client_id, trace_id = live.trace_id(), replica, took_ms = took.as_ms(), outcome = name, "request ended");
        }
    }
}
