//! A stream whose answer is made here from the ids that its engine tells. One that lost its engine goes on so at another one; and one of an
//! engine that tells no ids in its client's API begins so, that it can.

use std::{collections::BTreeMap, sync::Arc};

use baton_openai::{Answer, Pushed};
use baton_session::{Epoch, Fault, Input, Owner};
use baton_text::ChatTemplate;
use baton_units::Tokens;
use baton_wire::{migration::OutputEntry, openai::Usage};
use bytes::Bytes;

use super::{Death, Exchange, Running, Way, found_dead, record::Record};
use crate::{
    clock::Clock,
    config::Continue,
    engine::{Agreement, Engine},
    intake::Api,
    reserved,
    slots::Slot,
    token_api::{TokenEvent, TokenReader},
    upstream::{Attempt, Expect},
};

/// What is needed to go on with a stream, wherever it does.
pub(super) struct Rest {
    answer: Answer,
    /// Its tokens so far.
    output: Vec<u32>,
    /// They make the text that its client has, and may be others than the engine's.
    is_guessed: bool,
    max_tokens: u32,
    /// Of the engine that it began at.
    numerics: String,
}

/// An engine that computes a stream by tokens.
pub(super) struct ByTokens {
    pub(super) attempt: Attempt,
    pub(super) death: Option<Death>,
    /// Next output index, of the only choice.
    pub(super) next: BTreeMap<u32, u32>,
    reader: TokenReader,
    /// Of an engine whose slots travel.
    pub(super) slot: Option<Slot>,
    /// The stream began here.
    begins: bool,
    rest: Rest,
}

impl Rest {
    pub(super) fn output(&self) -> &[u32] {
        &self.output
    }
}

impl Exchange {
    /// Before an attempt is given up: keeps what another engine needs to go on with what the client has, and tells the session whether one
    /// can. True where nothing is left to do, since only the end of the output was lost.
    pub(super) fn keep_rest(&mut self) -> bool {
        let Some(running) = &mut self.attempt else { return false };
        let (engine, epoch) = (running.engine.clone(), running.epoch);
        let record = match &mut running.way {
            Way::Wire(wire) => wire.record.take(),
            Way::ByTokens(_) => return self.keep_tokens(epoch),
            Way::Carried(_) => None,
        };
        if let Some(record) = record {
            match self.rest_of(&engine, &record) {
                Some((rest, Pushed::Running)) => self.rest = Some(Box::new(rest)),
                Some((rest, Pushed::Ended | Pushed::Stopped)) => {
                    self.session.handle(Input::ChoiceFinished { epoch, choice: 0 }, self.fleet.clock.now());
                    self.answer_written(rest.answer, Vec::new());
                    return true;
                }
                // The attempt may go on after all.
                None => self.keep_recording(record),
            }
        }
        self.session.set_resumable(self.rest.is_some());
        false
    }

    fn keep_tokens(&mut self, epoch: Epoch) -> bool {
        let Some(Running { way: Way::ByTokens(by_tokens), .. }) = &mut self.attempt else { return false };
        let rest = &mut by_tokens.rest;
        if rest.output.is_empty() {
            // It begins anew.
            self.session.set_resumable(false);
            return false;
        }
        let settled = rest.answer.settle(0, self.outlet.events());
        if settled == Pushed::Running && rest.is_guessed {
            self.session.set_resumable(false);
            return false;
        }
        let Some(Running { way: Way::ByTokens(by_tokens), .. }) = self.attempt.take() else { return false };
        if settled == Pushed::Running {
            self.rest = Some(Box::new(by_tokens.rest));
            self.session.set_resumable(true);
            return false;
        }
        self.session.handle(Input::ChoiceFinished { epoch, choice: 0 }, self.fleet.clock.now());
        self.answer_written(by_tokens.rest.answer, Vec::new());
        true
    }

    fn keep_recording(&mut self, record: Record) {
        if let Some(Running { way: Way::Wire(wire), .. }) = &mut self.attempt {
            wire.record = Some(record);
        }
    }

    /// The stream as it would have been written here up to now; `None` where it cannot go on: `docs/gateway.md` has the table.
    fn rest_of(&mut self, engine: &Engine, record: &Record) -> Option<(Rest, Pushed)> {
        let (ids, seen, model) = record.told()?;
        let service = self.fleet.service(engine)?;
        let checked = self.checked(&service).ok()?;
        if let Some(why) = checked.hinders_resuming() {
            tracing::info!(request = %self.admitted.live.id, why, "a stream that lost its engine cannot go on: what its client asks for hinders it");
            return None;
        }
        let mut head = self.head(self.view.created()?);
        if let Some(model) = model {
            model.clone_into(&mut head.model);
        }
        let understood = checked.with_prompts(head, vec![self.admitted.chain.prompt().to_vec()], 0).ok()?;
        let max_tokens = understood.prompts.first()?.params.max_tokens?;
        let mut answer = understood.answer;
        let resumed = answer.resume(0, ids, &seen, self.outlet.events());
        let pushed = resumed.inspect_err(|error| tracing::warn!(request = %self.admitted.live.id, %error, "a stream cannot go on")).ok()?;
        let numerics = engine.numerics(&self.admitted.live.model);
        Some((Rest { answer, output: ids.to_vec(), is_guessed: false, max_tokens, numerics }, pushed))
    }

    /// Whether a stream of this engine may have to go on elsewhere, so that what its client has is recorded.
    pub(super) fn records(&self, engine: &Engine) -> bool {
        let Self { admitted, fleet, .. } = self;
        let intake = &admitted.intake;
        let gives_ids = engine.config.kind.gives_token_ids(intake.api);
        let may = fleet.front().continue_streams != Continue::Never && gives_ids && engine.knows_tokens();
        may && intake.wishes.stream && intake.choices == 1 && admitted.exact
    }

    /// Replicas that cannot go on with what is kept.
    pub(super) fn cannot_resume(&self, rest: &Rest) -> Vec<baton_units::ReplicaId> {
        let only = (self.fleet.front().continue_streams != Continue::Any).then_some(rest.numerics.as_str());
        self.fleet.cannot_resume(&self.admitted.live.model, only)
    }

    /// Begins a stream by tokens, which its engine tells only so; false where the engine is to be asked as its client asked.
    pub(super) fn begin_by_tokens(&mut self, engine: &Arc<Engine>, owner: Owner) -> bool {
        let Some(rest) = self.new_rest(engine) else { return false };
        self.compute(engine.clone(), owner, rest, true);
        true
    }

    /// A stream of which nothing was computed yet. `None` where its answer may not be made here: where that would not be the one that the
    /// engine makes, and where the stream could not go on elsewhere all the same.
    fn new_rest(&self, engine: &Engine) -> Option<Rest> {
        let Self { admitted, fleet, view, .. } = self;
        let (intake, model, kind) = (&admitted.intake, &admitted.live.model, engine.config.kind);
        if fleet.front().continue_streams == Continue::Never || kind.token_api().is_none() || kind.gives_token_ids(intake.api) {
            return None;
        }
        // What was begun in an engine's own words (with a role, say) goes on in such; and the prompt's tokens are the gateway's.
        let is_new = intake.wishes.stream && intake.choices == 1 && view.created().is_none();
        let is_known = admitted.exact && engine.facts().tokens == Agreement::Same;
        if !is_new || !is_known || !intake.is_plain() || engine.model(model).is_some_and(|card| card.parent.is_some()) {
            return None;
        }
        // Such engines take thoughts apart from what is said.
        let template = fleet.tokenizer().and_then(|text| text.chat_template());
        if intake.api == Api::Chat && template.is_some_and(ChatTemplate::knows_thoughts) {
            return None;
        }
        let checked = self.checked(&fleet.service(engine)?).ok().filter(|checked| checked.hinders_resuming().is_none())?;
        let prompt = admitted.chain.prompt().to_vec();
        let understood = checked.with_prompts(self.head(Clock::unix_now_s()), vec![prompt], 0).ok()?;
        let max_tokens = understood.prompts.first()?.params.max_tokens?;
        let numerics = engine.numerics(model);
        Some(Rest { answer: understood.answer, output: Vec::new(), is_guessed: false, max_tokens, numerics })
    }

    /// Goes on at the engine.
    pub(super) fn resume(&mut self, engine: Arc<Engine>, owner: Owner, rest: Rest) {
        let live = &self.admitted.live;
        let exact = engine.numerics(&live.model) == rest.numerics;
        self.fleet.metrics.resumed(exact);
        tracing::info!(request = %live.id, x_request_id = live.client_id, trace_id = live.trace_id(), replica = %engine.name, tokens = rest.output.len(), exact, "a stream goes on at another engine");
        self.compute(engine, owner, rest, false);
    }

    /// Asks the engine for what the stream lacks.
    fn compute(&mut self, engine: Arc<Engine>, owner: Owner, rest: Rest, begins: bool) {
        let kind = engine.config.kind;
        let (Some(api), Some(text)) = (kind.token_api(), self.fleet.tokenizer().cloned()) else {
            return self.session.handle(Input::Failed { epoch: owner.epoch, fault: Fault::Unreachable }, self.fleet.clock.now());
        };
        let live = &self.admitted.live;
        let takes_priority = reserved::takes_priority(kind, engine.config.priorities);
        let so_far = (self.admitted.chain.prompt(), &rest.output[..]);
        let carried = self.leaving.as_mut().and_then(|leaving| leaving.target.take());
        let slot = carried.or_else(|| Slot::take(&engine, so_far));
        let number = slot.as_ref().map(|slot| slot.number);
        let mut request = self.admitted.intake.tokens_body(api, (kind, takes_priority), &live.model, so_far, (rest.max_tokens, number));
        let length = request.iter().map(Bytes::len).sum();
        let request_id = self.fleet.upstream_id(live.id, owner.epoch.0);
        request.push_front(engine.lines.address().head(api.path(), &request_id, live.trace.as_ref(), length));
        let death = Some(found_dead(engine.deaths()));
        let attempt = self.fleet.upstream.start(&engine, request, Expect::Events);
        let next = BTreeMap::from([(0, rest.output.len() as u32)]);
        // Of one that goes on, the time to the first token says nothing of a prefill that a decision was about.
        self.alone = begins && engine.lines.busy() == 1;
        let by_tokens = ByTokens { attempt, death, next, reader: api.reader(text), slot, begins, rest };
        self.attempt = Some(Running { engine, epoch: owner.epoch, way: Way::ByTokens(Box::new(by_tokens)) });
        self.hear_orders();
    }

    /// An event of an engine that computes by tokens.
    pub(super) fn tokens_event(&mut self, data: &[u8]) -> Result<(), Fault> {
        let Some(Running { engine, way: Way::ByTokens(by_tokens), .. }) = &mut self.attempt else { return Ok(()) };
        let event = by_tokens.reader.read(data)?;
        if event.guessed {
            by_tokens.rest.is_guessed = true;
            self.admitted.exact = false;
        }
        if let Some(cached) = event.cached.filter(|_| by_tokens.begins) {
            by_tokens.rest.answer.set_cached(0, cached.0);
            self.cached = Some(cached);
        }
        if event.ids.is_empty() && event.finish.is_none() {
            engine.pulse.spoke(self.fleet.clock.now());
        } else {
            self.tokens_output(event);
        }
        Ok(())
    }

    fn tokens_output(&mut self, event: TokenEvent) {
        let TokenEvent { ids, finish, .. } = event;
        let (now, count) = (self.fleet.clock.now(), ids.len() as u32);
        if count > 0 && !self.offer(0, count, ids.iter().copied(), now) {
            return;
        }
        let Some(Running { epoch, way: Way::ByTokens(by_tokens), .. }) = &mut self.attempt else { return };
        if let Some(slot) = &mut by_tokens.slot {
            slot.extend(&ids);
        }
        let (epoch, rest) = (*epoch, &mut by_tokens.rest);
        rest.output.extend_from_slice(&ids);
        let tokens = ids.into_iter().map(|id| OutputEntry::Token { id, logprobs: None });
        let mut pushed = rest.answer.push_entries(0, tokens, self.outlet.events());
        if let Some(finish) = finish.filter(|_| pushed == Pushed::Running) {
            // Apart, since it is not told whether the last token ended the output or is part of it: one that does by the model is known.
            pushed = rest.answer.push_entries(0, [OutputEntry::Finish(finish)], self.outlet.events());
        }
        if count > 0 {
            self.output(count, now);
        }
        if pushed == Pushed::Running {
            return;
        }
        self.session.handle(Input::ChoiceFinished { epoch, choice: 0 }, now);
        let Some(Running { engine, way: Way::ByTokens(by_tokens), .. }) = self.attempt.take() else { return };
        let ByTokens { attempt, begins, rest, .. } = *by_tokens;
        // Of a stop string the engine knows nothing, so that it must be cut off.
        if finish.is_some() || pushed == Pushed::Ended {
            attempt.release();
        }
        let counts = rest.answer.counts();
        self.answer_written(rest.answer, Vec::new());
        if begins {
            let usage = |cached: Tokens| Usage::completion(counts.prompt, counts.output, cached.0);
            self.usage = Some(self.cached.map_or_else(|| Usage::counts(counts.prompt, counts.output), usage));
            self.observe(&engine);
        } else {
            self.fleet.metrics.tokens(engine.id, Tokens(counts.prompt), Tokens::ZERO, Tokens(counts.output));
        }
        self.session.handle(Input::Completed { epoch }, now);
    }
}
