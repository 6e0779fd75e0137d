//! A stream that lost its engine and goes on at another one from its tokens: the answer is made here from the ids that come.

use std::{collections::BTreeMap, sync::Arc};

use baton_openai::{Answer, Pushed};
use baton_session::{Fault, Input, Owner};
use baton_units::Tokens;
use baton_wire::migration::{FinishReason, OutputEntry};
use bytes::Bytes;

use super::{Death, Exchange, Running, Way, found_dead, record::Record};
use crate::{
    chunk::{Piece, Reading},
    config::Continue,
    engine::Engine,
    intake::Api,
    json::RawObject,
    reserved,
    upstream::{Attempt, Expect},
};

/// What is needed to go on with a stream, wherever it does.
pub(super) struct Rest {
    answer: Answer,
    /// Its tokens so far.
    output: Vec<u32>,
    max_tokens: u32,
    /// Of the engine that it began at.
    numerics: String,
}

/// An engine that goes on with a stream.
pub(super) struct ByTokens {
    pub(super) attempt: Attempt,
    pub(super) death: Option<Death>,
    /// Next output index, of the only choice.
    pub(super) next: BTreeMap<u32, u32>,
    rest: Rest,
}

impl Exchange {
    /// Before an attempt is given up: keeps what another engine needs to go on with what the client has, and tells the session whether one
    /// can. True where nothing is left to do, since only the end of the output was lost.
    pub(super) fn keep_rest(&mut self) -> bool {
        let Some(running) = &mut self.attempt else { return false };
        let (engine, epoch) = (running.engine.clone(), running.epoch);
        let record = match &mut running.way {
            Way::Wire(wire) => wire.record.take(),
            Way::ByTokens(_) | Way::Carried(_) => None,
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
        } else if let Some(Running { way: Way::ByTokens(by_tokens), .. }) =
            self.attempt.take_if(|running| matches!(running.way, Way::ByTokens(_)))
        {
            self.rest = Some(Box::new(by_tokens.rest));
        }
        self.session.set_resumable(self.rest.is_some());
        false
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
        Some((Rest { answer, output: ids.to_vec(), max_tokens, numerics }, pushed))
    }

    /// Whether a stream of this engine may have to go on elsewhere, so that what its client has is recorded.
    pub(super) fn records(&self, engine: &Engine) -> bool {
        let Self { admitted, fleet, .. } = self;
        let intake = &admitted.intake;
        let may = fleet.front().continue_streams != Continue::Never && engine.config.kind.computes_tokens() && engine.knows_tokens();
        may && intake.wishes.stream && intake.choices == 1 && admitted.exact
    }

    /// Replicas that cannot go on with what is kept.
    pub(super) fn cannot_resume(&self, rest: &Rest) -> Vec<baton_units::ReplicaId> {
        let only = (self.fleet.front().continue_streams != Continue::Any).then_some(rest.numerics.as_str());
        self.fleet.cannot_resume(&self.admitted.live.model, only)
    }

    /// Goes on at the engine.
    pub(super) fn resume(&mut self, engine: Arc<Engine>, owner: Owner, rest: Rest) {
        let live = &self.admitted.live;
        let exact = engine.numerics(&live.model) == rest.numerics;
        self.fleet.metrics.resumed(exact);
        tracing::info!(request = %live.id, x_request_id = live.client_id, replica = %engine.name, tokens = rest.output.len(), exact, "a stream goes on at another engine");
        let kind = engine.config.kind;
        let takes_priority = reserved::takes_priority(kind, engine.config.priorities);
        let so_far = (self.admitted.chain.prompt(), &rest.output[..]);
        let mut request = self.admitted.intake.tokens_body((kind, takes_priority), &live.model, so_far, rest.max_tokens);
        let length = request.iter().map(Bytes::len).sum();
        let request_id = self.fleet.upstream_id(live.id, owner.epoch.0);
        request.push_front(engine.lines.address().head(Api::Completions.path(), &request_id, length));
        let death = Some(found_dead(engine.deaths()));
        let attempt = self.fleet.upstream.start(&engine, request, Expect::Events);
        let next = BTreeMap::from([(0, rest.output.len() as u32)]);
        // Its time to the first token says nothing of a prefill that a decision was about.
        self.alone = false;
        let by_tokens = ByTokens { attempt, death, next, rest };
        self.attempt = Some(Running { engine, epoch: owner.epoch, way: Way::ByTokens(Box::new(by_tokens)) });
    }

    /// An event of the engine that goes on.
    pub(super) fn tokens_event(&mut self, data: &[u8]) -> Result<(), Fault> {
        let Reading::Chunk(chunk) = Reading::of(Api::Completions, data)? else { return Err(Fault::InBand) };
        for (choice, piece) in chunk.choices.iter().zip(&chunk.pieces) {
            if piece.is_abort() {
                return Err(Fault::Aborted);
            }
            let unnamed = piece.count as usize != piece.token_ids.len();
            if piece.choice != 0 || unnamed {
                return Err(Fault::Garbled);
            }
            self.tokens_output(piece, finish_of(choice, piece)?);
        }
        Ok(())
    }

    fn tokens_output(&mut self, piece: &Piece, finish: Option<FinishReason>) {
        let now = self.fleet.clock.now();
        if piece.count > 0 && !self.offer(0, piece.count, piece.token_ids.iter().copied(), now) {
            return;
        }
        let Some(Running { epoch, way: Way::ByTokens(by_tokens), .. }) = &mut self.attempt else { return };
        let (epoch, rest) = (*epoch, &mut by_tokens.rest);
        rest.output.extend_from_slice(&piece.token_ids);
        let tokens = piece.token_ids.iter().map(|&id| OutputEntry::Token { id, logprobs: None });
        let mut pushed = rest.answer.push_entries(0, tokens, self.outlet.events());
        if let Some(finish) = finish.filter(|_| pushed == Pushed::Running) {
            // Apart, since it is not told whether the last token ended the output or is part of it: one that does by the model is known.
            pushed = rest.answer.push_entries(0, [OutputEntry::Finish(finish)], self.outlet.events());
        }
        if piece.count > 0 {
            self.output(piece.count, now);
        }
        if pushed == Pushed::Running {
            return;
        }
        self.session.handle(Input::ChoiceFinished { epoch, choice: 0 }, now);
        if let Some(Running { way: Way::ByTokens(by_tokens), .. }) = self.attempt.take() {
            let ByTokens { attempt, rest, .. } = *by_tokens;
            if finish.is_some() {
                attempt.release();
            }
            let counts = rest.answer.counts();
            if let Some(replica) = self.last_replica {
                self.fleet.metrics.tokens(replica, Tokens(counts.prompt), Tokens::ZERO, Tokens(counts.output));
            }
            self.attempt = None;
            self.answer_written(rest.answer, Vec::new());
            self.session.handle(Input::Completed { epoch }, now);
        }
    }
}

/// Why the engine ended the output, if it did.
fn finish_of(choice: &RawObject<'_>, piece: &Piece) -> Result<Option<FinishReason>, Fault> {
    let stop_token = || choice.read::<u32>("stop_reason").map_err(|_| Fault::Garbled);
    Ok(match piece.finish.as_deref() {
        None => None,
        Some("stop") => Some(stop_token()?.map_or(FinishReason::EndOfSequence, FinishReason::StopToken)),
        Some("length") => Some(FinishReason::Length),
        Some(_) => return Err(Fault::Garbled),
    })
}
