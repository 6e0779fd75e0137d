//! A request that its replica runs over the control connection: the answer is made here from tokens, whichever replica they are of.

use std::{collections::BTreeMap, sync::Arc};

use axum::response::IntoResponse;
use baton_migration::LostClass;
use baton_openai::{Answer, Checked, Pushed, Understood};
use baton_policy::{Outcome, Placed, Verdict};
use baton_session::{Epoch, Fault, Input, Owner};
use baton_units::{ReplicaId, Tokens};
use baton_wire::{
    migration::{OutputEntry, RunRequest},
    openai::{ErrorBody, Head, Usage, parse},
};
use bytes::Bytes;
use http::StatusCode;

use super::{Exchange, Running, Way, json_response};
use crate::{
    carry::{Loss, Run, RunEvent},
    clock::Clock,
    config::EngineKind,
    engine::Engine,
    fleet::Placing,
    intake::Api,
    live::LiveState,
    refusal::Refusal,
    reserved,
};

/// Replicas that may lose a request one after another without having added anything to it.
const LOSSES_MAX: u32 = 5;

/// A request that is carried.
pub(super) struct Carrying {
    pub(super) run: Run,
    answer: Answer,
    /// Next output index of each choice.
    pub(super) next: BTreeMap<u32, u32>,
    /// Names what decides the bits: who goes on with it must have the same.
    numerics: String,
    /// Choices that nobody runs, and who lost the first of them.
    lost: Vec<u32>,
    lost_by: Option<ReplicaId>,
    /// Since the last token.
    losses: u32,
    /// A body in the making, of an answer that is not streamed.
    body: Vec<u8>,
}

impl Exchange {
    pub(super) fn is_carried(&self) -> bool {
        matches!(&self.attempt, Some(Running { way: Way::Carried(_), .. }))
    }

    /// Starts the request over the replica's control connection; false where that cannot be.
    pub(super) fn carry(&mut self, engine: &Arc<Engine>, owner: Owner) -> bool {
        let Some((service, numerics)) = self.carrier(engine) else { return false };
        let understood = match self.understand(&service) {
            Ok(understood) => understood,
            // Such an engine does more over HTTP than can be said of tokens.
            Err(_) if engine.config.kind == EngineKind::Vllm => return false,
            Err(error) => {
                self.answer = Some(Refusal::Body(error).into_response());
                self.session.handle(Input::Rejected { epoch: owner.epoch }, self.fleet.clock.now());
                return true;
            }
        };
        let Understood { prompts, choices, seed, priority, salt, public, answer, .. } = understood;
        let live = &self.admitted.live;
        let each = prompts.into_iter().zip(0..).map(|(prompt, prompt_index)| RunRequest {
            model: live.model.clone(),
            sampling: baton_openai::sampling_to_wire(&prompt.params),
            public: public.map_or(0, |public| public.of(&prompt.tokens).0),
            prompt: prompt.tokens,
            seed,
            prompt_index,
            priority,
            salt: salt.clone(),
            ..RunRequest::default()
        });
        let Some(run) = Run::start(&self.fleet, live.id, owner.replica, &each.collect::<Vec<_>>(), choices) else { return false };
        let carrying =
            Carrying { run, answer, next: BTreeMap::new(), numerics, lost: Vec::new(), lost_by: None, losses: 0, body: Vec::new() };
        self.attempt = Some(Running { engine: engine.clone(), epoch: owner.epoch, way: Way::Carried(Box::new(carrying)) });
        true
    }

    /// By what the engine's answers are made here, and what its bits are called, if the request can be carried at all.
    fn carrier(&self, engine: &Engine) -> Option<(Arc<baton_openai::Service>, String)> {
        let admitted = &self.admitted;
        if !admitted.exact || !engine.takes_tokens() {
            return None;
        }
        if engine.model(&admitted.live.model).is_some_and(|card| card.parent.is_some()) {
            return None;
        }
        let service = self.fleet.service(engine)?;
        let numerics = self.fleet.with_desk(|desk, _| desk.numerics_of(engine.id).map(str::to_owned))?;
        Some((service, numerics))
    }

    /// The request as far as it is understood without its prompts, for an answer that is made here.
    pub(super) fn checked(&self, service: &Arc<baton_openai::Service>) -> Result<Checked, ErrorBody> {
        let (intake, live) = (&self.admitted.intake, &self.admitted.live);
        let body = intake.carried_body(reserved::takes_priority(EngineKind::Baton, None), &live.model);
        match intake.api {
            Api::Chat => Checked::chat(service, &parse(&body)?),
            Api::Completions => Checked::completion(service, &parse(&body)?),
        }
    }

    /// What an answer begins with that is made here.
    pub(super) fn head(&self, created: u64) -> Head {
        Head {
            id: self.view.id().to_owned(),
            created,
            model: self.admitted.live.model.clone(),
            system_fingerprint: Some(concat!("baton-", env!("CARGO_PKG_VERSION")).to_owned()),
        }
    }

    fn understand(&self, service: &Arc<baton_openai::Service>) -> Result<Understood, ErrorBody> {
        let admitted = &self.admitted;
        let checked = self.checked(service)?;
        let head = self.head(Clock::unix_now_s());
        let prompts = std::iter::once(admitted.chain.tokens()).chain(admitted.further.iter().map(Vec::as_slice));
        checked.with_prompts(head, prompts.map(<[u32]>::to_vec).collect(), fastrand::u64(..))
    }

    /// Takes what became known, and all that came with it.
    pub(super) fn carried(&mut self, choice: u32, event: RunEvent) {
        let mut next = Some((choice, event));
        let mut batch: Vec<OutputEntry> = Vec::new();
        while let Some((choice, event)) = next {
            next = self.carrying().and_then(|carrying| carrying.run.take_next());
            match event {
                RunEvent::Entry(entry) => {
                    batch.push(entry);
                    let goes_on = matches!(&next, Some((other, RunEvent::Entry(_))) if *other == choice);
                    if !goes_on {
                        self.entries(choice, std::mem::take(&mut batch));
                    }
                }
                RunEvent::Cached(tokens) => {
                    let own = self.admitted.padding.as_ref().map(|padding| padding.own);
                    let before = self.cached.unwrap_or_default();
                    if let Some(carrying) = self.carrying()
                        && let Some(prompt) = carrying.run.first_of(choice)
                    {
                        let shown = own.map_or(tokens, |own| tokens.min(own.0));
                        carrying.answer.set_cached(prompt, shown);
                        let all = own.map_or(Tokens(carrying.answer.counts().cached), |_| before + Tokens(tokens));
                        self.cached = Some(all);
                    }
                }
                RunEvent::Moved(replica) => self.moved(replica),
                RunEvent::Anew(replica) => self.moved_anew(replica),
                RunEvent::Lost(loss) => self.lost(choice, &loss),
            }
        }
    }

    fn carrying(&mut self) -> Option<&mut Carrying> {
        match &mut self.attempt.as_mut()?.way {
            Way::Carried(carrying) => Some(carrying),
            Way::Wire(_) | Way::ByTokens(_) => None,
        }
    }

    fn entries(&mut self, choice: u32, entries: Vec<OutputEntry>) {
        let now = self.fleet.clock.now();
        let ids: Vec<u32> = entries
            .iter()
            .filter_map(|entry| match entry {
                OutputEntry::Token { id, .. } => Some(*id),
                OutputEntry::Finish(_) => None,
            })
            .collect();
        let tokens = ids.len() as u32;
        if tokens > 0 && !self.offer(choice, tokens, ids.into_iter(), now) {
            return;
        }
        let stream = self.admitted.intake.wishes.stream;
        let Some(Running { epoch, engine, way: Way::Carried(carrying) }) = &mut self.attempt else { return };
        let (epoch, replica) = (*epoch, engine.id);
        carrying.losses = 0;
        carrying.run.taken(choice, entries.len() as u32);
        let out = if stream { self.outlet.events() } else { &mut carrying.body };
        let pushed = carrying.answer.push_entries(choice, entries, out);
        // The prompt's blocks are there now: its other choices find them.
        carrying.run.has_begun(choice);
        let all_began = carrying.run.start_rest(replica);
        if pushed != Pushed::Running {
            carrying.run.end(choice);
            self.session.handle(Input::ChoiceFinished { epoch, choice }, now);
        }
        if tokens > 0 {
            self.output(tokens, now);
        }
        self.finish_if_complete();
        if !all_began && self.is_carried() && self.verdict.is_none() {
            self.place_again();
        }
    }

    fn finish_if_complete(&mut self) {
        if self.carrying().is_none_or(|carrying| !carrying.answer.has_ended()) {
            return;
        }
        let Some(Running { epoch, engine, way: Way::Carried(carrying) }) = self.attempt.take() else { return };
        let Carrying { answer, body, .. } = *carrying;
        let (chat, counts) = (self.admitted.intake.api == Api::Chat, answer.counts());
        self.answer_written(answer, body);
        // The client may have been shown less.
        let cached = self.cached.map_or(counts.cached, |cached| cached.0);
        self.usage = Some(if chat {
            Usage::chat(counts.prompt, counts.output, cached, 0)
        } else {
            Usage::completion(counts.prompt, counts.output, cached)
        });
        self.observe(&engine);
        self.session.handle(Input::Completed { epoch }, self.fleet.clock.now());
    }

    /// All choices of an answer that is made here have ended. `body` is what it has so far, of one that is not streamed.
    pub(super) fn answer_written(&mut self, mut answer: Answer, mut body: Vec<u8>) {
        if self.admitted.intake.wishes.stream {
            answer.finish(self.outlet.events());
            self.answered = true;
        } else {
            answer.finish(&mut body);
            self.answer = Some(json_response(StatusCode::OK, Bytes::from(body)));
        }
    }

    /// The request is at another replica.
    fn moved(&mut self, replica: ReplicaId) {
        let Some(engine) = self.fleet.engine(replica) else { return };
        let Some(running) = &mut self.attempt else { return };
        running.engine = engine;
        let epoch = running.epoch;
        self.session.handle(Input::Moved { epoch, replica }, self.fleet.clock.now());
        self.admitted.live.set(LiveState::Decode, Some(replica));
        self.last_replica = Some(replica);
    }

    /// The request is computed again at another replica. What came before is booked before the move, since the next token ends its prefill.
    fn moved_anew(&mut self, replica: ReplicaId) {
        self.tell_output();
        let request = self.admitted.live.id;
        self.fleet.with_router(|router, now| router.moved_anew(request, replica, now));
        self.moved(replica);
    }

    /// Nobody runs a choice any more.
    fn lost(&mut self, choice: u32, loss: &Loss) {
        let epoch = match &self.attempt {
            Some(running) => running.epoch,
            None => return,
        };
        let began = self.last_token_at.is_some();
        let Some(carrying) = self.carrying() else { return };
        if !began {
            // As good as not begun: the usual retry elsewhere.
            tracing::info!(why = loss.why, class = ?loss.class, "a replica did not take a request");
            return match loss.class {
                LostClass::Refused => self.refused(epoch, &loss.why),
                LostClass::Busy => self.attempt_failed(epoch, Fault::Aborted),
                LostClass::Lost => self.attempt_failed(epoch, Fault::Unreachable),
            };
        }
        if loss.class == LostClass::Refused {
            return self.attempt_failed(epoch, Fault::Aborted);
        }
        if !carrying.lost.contains(&choice) {
            carrying.lost.push(choice);
        }
        let is_placing = self.verdict.is_some();
        let here = self.attempt.as_ref().map(|running| running.engine.id);
        let Some(carrying) = self.carrying() else { return };
        if is_placing {
            return;
        }
        if loss.replica.is_some() && loss.replica != here {
            // The request has a new place already; this choice follows.
            if let Some(replica) = here
                && carrying.run.go_on_at(choice, replica)
            {
                carrying.lost.retain(|other| *other != choice);
                return;
            }
        }
        carrying.losses += 1;
        carrying.lost_by = loss.replica.or(here);
        if carrying.losses > LOSSES_MAX {
            return self.attempt_failed(epoch, Fault::Unreachable);
        }
        tracing::warn!(request = %self.admitted.live.id, x_request_id = self.admitted.live.client_id, why = loss.why, "a running request lost its replica");
        self.place_again();
    }

    /// Nobody will run it, which is what an engine says by HTTP with status 400.
    fn refused(&mut self, epoch: Epoch, why: &str) {
        self.attempt = None;
        self.answer = Some(Refusal::Body(ErrorBody::bad_request(why)).into_response());
        self.session.handle(Input::Rejected { epoch }, self.fleet.clock.now());
    }

    /// Looks for a replica that goes on with what is lost.
    fn place_again(&mut self) {
        self.tell_output();
        self.first_told = false;
        let Some(carrying) = self.carrying() else { return };
        let (numerics, lost_by) = (carrying.numerics.clone(), carrying.lost_by);
        let mut excluded = self.fleet.cannot_go_on(&numerics);
        excluded.extend(lost_by);
        let prompt = Tokens(self.admitted.live.prompt.0 + self.session.delivered(0));
        let arrival = self.arrival(prompt, excluded);
        match self.fleet.place(arrival) {
            Placing::Now(verdict) => self.goes_on(verdict),
            Placing::Later(told) => {
                self.held_since = Some(self.fleet.clock.now());
                self.verdict = Some(told);
            }
        }
        self.fleet.keep_books();
    }

    /// What the router says to a request that lost its replica.
    pub(super) fn goes_on(&mut self, verdict: Verdict) {
        let Some(Running { epoch, .. }) = &self.attempt else { return };
        let epoch = *epoch;
        let replica = match verdict {
            Verdict::Run(Placed { replica, copy, fetch }) => {
                if let Some(copy) = copy {
                    self.fleet.finished(copy.request, Outcome::Cancelled, None);
                }
                if fetch.is_some() {
                    // Its client waits for the next token as it is.
                    let request = self.admitted.live.id;
                    self.fleet.with_router(|router, now| router.fetched(request, false, now));
                }
                replica
            }
            Verdict::Hold => return,
            Verdict::Refuse(refusal) => {
                tracing::warn!(request = %self.admitted.live.id, ?refusal, "no replica can go on with a request that lost its own");
                return self.attempt_failed(epoch, Fault::Unreachable);
            }
        };
        self.moved(replica);
        let Some(carrying) = self.carrying() else { return };
        carrying.lost_by = None;
        for choice in std::mem::take(&mut carrying.lost) {
            if !carrying.run.go_on_at(choice, replica) {
                // It was lost, too, while the request was placed.
                carrying.lost.push(choice);
            }
        }
        if !carrying.run.start_rest(replica) || !carrying.lost.is_empty() {
            carrying.lost_by = Some(replica);
            carrying.losses += 1;
            if carrying.losses > LOSSES_MAX {
                return self.attempt_failed(epoch, Fault::Unreachable);
            }
            self.place_again();
        }
    }
}
