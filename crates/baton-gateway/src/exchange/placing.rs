//! Where an exchange asks for a place, and what it does with one.

use std::time::Duration;

use baton_policy::{Arrival, Placed, Slo, Verdict};
use baton_session::Input;
use baton_units::{DurationMs, ReplicaId, Tokens};

use super::{Admitted, Exchange, Leaving, copy};
use crate::{fleet::Placing, intake::Mode, live::LiveState, refusal::Refusal};

impl Exchange {
    pub(super) fn place(&mut self, excluded: Vec<ReplicaId>) {
        let arrival = if let Some(rest) = &self.rest {
            let cannot = self.cannot_resume(rest);
            self.tell_output();
            let prompt = Tokens(self.admitted.live.prompt.0 + self.session.delivered(0));
            // One that leaves has said where it goes.
            let to = self.leaving.as_ref().map(Leaving::to);
            let all = to.map(|_| self.fleet.engines()).unwrap_or_default();
            let others = all.into_iter().map(|engine| engine.id).filter(|id| Some(*id) != to);
            self.arrival(prompt, excluded.into_iter().chain(cannot).chain(others).collect())
        } else {
            self.admitted.chain.forget_output();
            self.untold = 0;
            self.arrival(self.admitted.live.prompt, excluded)
        };
        match self.fleet.place(arrival) {
            Placing::Now(verdict) => self.decided(verdict),
            Placing::Later(told) => {
                self.held_since = Some(self.fleet.clock.now());
                self.verdict = Some(told);
            }
        }
    }

    /// The request as the router sees it, with `prompt` tokens to begin with; not for replicas that are `excluded` or lack its model.
    pub(super) fn arrival(&self, prompt: Tokens, mut excluded: Vec<ReplicaId>) -> Arrival {
        let Admitted { intake, live, chain, excluded: lacking, .. } = &self.admitted;
        live.set(LiveState::Held, None);
        excluded.extend_from_slice(lacking);
        Arrival {
            request: live.id,
            keys: chain.keys(),
            prompt,
            max_output: intake.max_output,
            session: intake.identity.session,
            program: intake.identity.program,
            share: intake.share,
            priority: intake.identity.priority,
            // Of one that goes on, the first token was long ago.
            slo: Slo { ttft: intake.slo.ttft.filter(|_| self.rest.is_none() && !self.is_carried()), ..intake.slo },
            excluded,
        }
    }

    pub(super) fn decided(&mut self, verdict: Verdict) {
        let now = self.fleet.clock.now();
        match verdict {
            Verdict::Run(Placed { replica, copy, fetch }) => {
                if let Some(copy) = copy {
                    copy::send(&self.fleet, &self.admitted, replica, copy);
                }
                if self.carry_slot(replica) {
                    return;
                }
                match fetch.map(|fetch| copy::fetch(&self.fleet, &self.admitted, replica, fetch)) {
                    None => self.placed(replica),
                    Some(Some(fetching)) => self.fetching = Some(fetching),
                    Some(None) => self.fetched(replica, false),
                }
            }
            Verdict::Hold => {}
            Verdict::Refuse(_) if self.stays_after_all() => self.place(Vec::new()),
            Verdict::Refuse(refusal) => {
                self.refusal = Some(refusal_of(&refusal, self.fleet.retry_after()));
                self.session.handle(Input::Refused, now);
            }
        }
    }

    /// What was to be brought to the replica is there, or is not waited for.
    pub(super) fn fetched(&mut self, replica: ReplicaId, arrived: bool) {
        self.fetching = None;
        let request = self.admitted.live.id;
        self.fleet.with_router(|router, now| router.fetched(request, arrived, now));
        self.placed(replica);
    }

    pub(super) fn placed(&mut self, replica: ReplicaId) {
        let first_token_within = self.first_token_within(Some(replica));
        self.session.handle(Input::Placed { replica, first_token_within }, self.fleet.clock.now());
    }

    /// How long the replica may take for its first token before it is taken for hung.
    pub(super) fn first_token_within(&self, replica: Option<ReplicaId>) -> Duration {
        let front = self.fleet.front();
        let engine = replica.and_then(|id| self.fleet.engine(id));
        let Some(engine) = engine.filter(|engine| self.admitted.intake.mode(engine.config.kind, front.assemble) != Mode::Whole) else {
            // The first token comes with the last: no silence is too long.
            return front.request_timeout;
        };
        // Without another replica there is nothing to be had by giving this one up.
        let known = engine.pulse.first_token_patience().filter(|_| self.fleet.ready_replicas() > 1);
        let least = known.map_or(front.first_token_timeout, |known| known.min(front.first_token_timeout));
        let decision = self.fleet.peek_router(|router, _| router.decision(self.admitted.live.id));
        let predicted =
            decision.map_or(Duration::ZERO, |decision| Duration::from_ms(decision.predicted_ttft_ms * front.first_token_factor));
        predicted.max(least)
    }
}

/// `back_in`: when a replica may be there again, where there is none.
pub(crate) fn refusal_of(refusal: &baton_policy::Refusal, back_in: Duration) -> Refusal {
    match *refusal {
        baton_policy::Refusal::TooLong { prompt, limit } => Refusal::PromptTooLong { prompt, limit },
        baton_policy::Refusal::NeverFits { needed, limit, fits } => Refusal::NeverFits { needed, limit, fits },
        baton_policy::Refusal::NoReplica => Refusal::NoReplica { retry_after: back_in },
        baton_policy::Refusal::Overloaded { retry_after } => Refusal::Overloaded { retry_after },
    }
}
