//! A request at an engine that speaks the OpenAI API: its stream, passed on event by event or put together, or its answer in one piece.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use baton_session::{Fault, Input, Owner};
use baton_units::Tokens;
use baton_wire::{openai::Usage, sse::Event};
use bytes::Bytes;
use http::{HeaderValue, StatusCode, header};

use super::{Admitted, Death, Exchange, Running, Way, found_dead, json_response, record::Record};
use crate::{
    assemble::Assembler,
    chunk::{Chunk, Piece, Reading, with_cached_at_most, without_prompt_ids},
    engine::Engine,
    intake::Mode,
    json::RawObject,
    line::Head,
    plain::{Plain, Shape},
    reserved,
    upstream::{Arrived, Attempt, Expect},
};

/// A request at an OpenAI server.
pub(super) struct Wire {
    pub(super) attempt: Attempt,
    assembler: Option<Assembler>,
    /// Next output index of each choice, as this engine counts.
    pub(super) next: BTreeMap<u32, u32>,
    /// Choices that have their end.
    finished: BTreeSet<u32>,
    /// Of the last plain event.
    shape: Option<Shape>,
    /// `None` where it may not have to be gone on with.
    pub(super) record: Option<Record>,
    /// `None` where the answer comes whole: an engine that shows no progress may only be slow to answer probes.
    pub(super) death: Option<Death>,
}

impl Exchange {
    /// Sends the request as its client made it, but for what is reserved.
    pub(super) fn ask(&mut self, engine: Arc<Engine>, owner: Owner) {
        let Admitted { intake, live, .. } = &self.admitted;
        let kind = engine.config.kind;
        let mode = intake.mode(kind, self.fleet.front().assemble);
        let takes_priority = reserved::takes_priority(kind, engine.config.priorities);
        let mut request = intake.upstream_body(kind, takes_priority, &live.model, mode);
        let length = request.iter().map(Bytes::len).sum();
        let request_id = self.fleet.upstream_id(live.id, owner.epoch.0);
        request.push_front(engine.lines.address().head(intake.api.path(), &request_id, live.trace.as_ref(), length));
        let expect = if mode == Mode::Whole { Expect::Whole } else { Expect::Events };
        let assembler = (mode == Mode::Assemble)
            .then(|| Assembler::new(intake.api, intake.wishes, format!("{}{}", intake.api.id_prefix(), live.client_id)));
        let death = (mode != Mode::Whole).then(|| found_dead(engine.deaths()));
        let attempt = self.fleet.upstream.start(&engine, request, expect);
        self.alone = engine.lines.busy() == 1;
        let record = self.records(&engine).then(Record::default);
        if record.is_some() {
            self.hear_orders();
        }
        let wire = Wire { attempt, assembler, next: BTreeMap::new(), finished: BTreeSet::new(), shape: None, record, death };
        self.attempt = Some(Running { engine, epoch: owner.epoch, way: Way::Wire(Box::new(wire)) });
    }

    pub(super) fn wire(&mut self) -> Option<&mut Wire> {
        match &mut self.attempt.as_mut()?.way {
            Way::Wire(wire) => Some(wire),
            Way::Carried(_) | Way::ByTokens(_) => None,
        }
    }

    pub(super) fn arrived(&mut self, arrived: Arrived) {
        let Some(running) = &self.attempt else { return };
        let epoch = running.epoch;
        let outcome = match arrived {
            Arrived::Event(event) => self.event(&event),
            Arrived::Answer { head, body } => self.whole(&head, &body),
            Arrived::End => self.stream_lost(Fault::Truncated),
            Arrived::Failed(fault) => self.stream_lost(fault),
        };
        if let Err(fault) = outcome {
            self.attempt_failed(epoch, fault);
        }
    }

    /// The engine's stream ends without its end.
    pub(super) fn stream_lost(&mut self, fault: Fault) -> Result<(), Fault> {
        if self.ends_as_told() { Ok(()) } else { Err(fault) }
    }

    /// Ends an answer of which all is told, so that nothing but the stream's end mark can be missing: the client gets one from here. Each
    /// choice has its end, and usage was told where it is wanted.
    pub(super) fn ends_as_told(&mut self) -> bool {
        let Some(Running { way: Way::Wire(wire), .. }) = &self.attempt else { return false };
        let intake = &self.admitted.intake;
        let wants_usage = intake.wishes.usage || wire.assembler.is_some();
        let is_told = wire.finished.len() as u32 == intake.choices && (self.usage.is_some() || !wants_usage);
        is_told && self.done().is_ok()
    }

    pub(super) fn event(&mut self, event: &Event) -> Result<(), Fault> {
        let by_tokens = matches!(&self.attempt, Some(Running { way: Way::ByTokens(_), .. }));
        if event.is_done() {
            return if by_tokens { Err(Fault::Truncated) } else { self.done() };
        }
        let Some(data) = &event.data else { return Ok(()) };
        // Who is sent tokens is read for its output alone.
        let shows_ids = self.admitted.intake.wishes.token_ids && !by_tokens;
        let data = &*if shows_ids { Cow::Borrowed(&**data) } else { without_prompt_ids(data) };
        if by_tokens {
            return self.tokens_event(data);
        }
        if let Some(plain) = self.read_plain(data)
            && self.is_plain(&plain)
        {
            return self.plain(&plain);
        }
        match Reading::of(self.admitted.intake.api, data)? {
            Reading::Chunk(chunk) => self.chunk(*chunk),
            Reading::Error(error) => {
                let code = error.map_or(0, |error| error.code);
                tracing::debug!(code, "the engine reported an error in its stream");
                Err(Fault::InBand)
            }
        }
    }

    pub(super) fn read_plain<'a>(&mut self, data: &'a [u8]) -> Option<Plain<'a>> {
        let api = self.admitted.intake.api;
        let shape = &mut self.wire()?.shape;
        shape.as_ref().and_then(|shape| shape.read(data)).or_else(|| {
            let plain = Plain::read(api, data)?;
            *shape = Shape::of(&plain);
            Some(plain)
        })
    }

    /// Whether what came before lets the event be passed on as it is.
    pub(super) fn is_plain(&mut self, plain: &Plain<'_>) -> bool {
        let (knows, choices) = (self.view.knows(plain), self.admitted.intake.choices);
        let assembler = self.wire().and_then(|wire| wire.assembler.as_ref());
        plain.choice < choices && assembler.map_or(knows, Assembler::has_begun)
    }

    pub(super) fn plain(&mut self, plain: &Plain<'_>) -> Result<(), Fault> {
        let now = self.fleet.clock.now();
        if !self.offer(plain.choice, plain.count, plain.token_ids(), now) {
            return Ok(());
        }
        if let Some(wire) = self.wire() {
            if let Some(assembler) = &mut wire.assembler {
                assembler.push_plain(plain)?;
            }
            if let Some(record) = &mut wire.record {
                record.plain(plain);
            }
        }
        self.output(plain.count, now);
        if self.admitted.intake.wishes.stream {
            self.view.write(plain, self.outlet.events());
        }
        Ok(())
    }

    pub(super) fn chunk(&mut self, mut chunk: Chunk<'_>) -> Result<(), Fault> {
        if chunk.pieces.iter().any(Piece::is_abort) {
            return Err(Fault::Aborted);
        }
        // The books keep a place for each choice up to the highest.
        if chunk.pieces.iter().any(|piece| piece.choice >= self.admitted.intake.choices) {
            return Err(Fault::Garbled);
        }
        let now = self.fleet.clock.now();
        let mut passes = true;
        for piece in &chunk.pieces {
            passes &= self.offer(piece.choice, piece.count, piece.token_ids.iter().copied(), now);
            if piece.finish.is_some()
                && let Some(running) = &mut self.attempt
            {
                self.session.handle(Input::ChoiceFinished { epoch: running.epoch, choice: piece.choice }, now);
                if let Way::Wire(wire) = &mut running.way {
                    wire.finished.insert(piece.choice);
                }
            }
        }
        if !passes || self.attempt.is_none() {
            return Ok(());
        }
        if let Some(usage) = &chunk.usage {
            self.cached = usage.cached_tokens().map(Tokens);
            self.usage = Some(usage.clone());
            if let Some(padding) = &self.admitted.padding {
                chunk.show_cached(padding.own);
            }
        }
        let api = self.admitted.intake.api;
        if let Some(wire) = self.wire() {
            if let Some(assembler) = &mut wire.assembler {
                assembler.push(&chunk)?;
            }
            if let Some(record) = &mut wire.record {
                record.chunk(api, &chunk);
            }
        }
        let tokens = chunk.pieces.iter().map(|piece| piece.count).sum();
        if tokens > 0 || chunk.pieces.iter().any(|piece| piece.finish.is_some()) {
            self.output(tokens, now);
        } else if let Some(running) = &self.attempt {
            running.engine.pulse.spoke(now);
        }
        if self.admitted.intake.wishes.stream
            && let Some(event) = self.view.event(chunk)
        {
            self.outlet.events().extend_from_slice(&event);
        }
        Ok(())
    }

    /// `[DONE]`: the engine says that this is all.
    pub(super) fn done(&mut self) -> Result<(), Fault> {
        let now = self.fleet.clock.now();
        let choices = self.admitted.intake.choices;
        let Some(Running { engine, epoch, way: Way::Wire(wire) }) = self.attempt.take() else { return Ok(()) };
        if engine.config.kind.finishes_every_choice() && (wire.next.len() as u32) < choices {
            self.attempt = Some(Running { engine, epoch, way: Way::Wire(wire) });
            return Err(Fault::Truncated);
        }
        let Wire { attempt, assembler, .. } = *wire;
        if let Some(assembler) = assembler {
            self.answer = Some(json_response(StatusCode::OK, assembler.finish().into()));
        }
        self.observe(&engine);
        attempt.release();
        self.session.handle(Input::Completed { epoch }, now);
        Ok(())
    }

    /// An answer in one piece.
    pub(super) fn whole(&mut self, head: &Head, body: &Bytes) -> Result<(), Fault> {
        let status = head.status;
        let now = self.fleet.clock.now();
        let Some(running) = &self.attempt else { return Ok(()) };
        let epoch = running.epoch;
        let shown = self.admitted.padding.as_ref().and_then(|padding| with_cached_at_most(body, padding.own));
        let mut response = json_response(status, shown.unwrap_or_else(|| body.clone()));
        if let Some(kind) = &head.content_type {
            response.headers_mut().insert(header::CONTENT_TYPE, kind.clone());
        }
        if let Some(span) = head.retry_after {
            self.fleet.rest(&running.engine, span);
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(span.as_secs()));
        }
        if status == StatusCode::NOT_FOUND {
            // It had the model when it was asked last: an adapter, say, that was unloaded since. Others may have it.
            running.engine.expect_models();
            self.answer = Some(response);
            return Err(Fault::Status(status.as_u16()));
        }
        if !status.is_success() && !is_clients_fault(status) {
            if status == StatusCode::TOO_MANY_REQUESTS {
                self.answer = Some(response);
            }
            if !self.fleet.may_retry() {
                self.session.forbid_retry();
            }
            return Err(Fault::Status(status.as_u16()));
        }
        self.answer = Some(response);
        if !status.is_success() {
            self.attempt = None;
            self.session.handle(Input::Rejected { epoch }, now);
            return Ok(());
        }
        let engine = running.engine.clone();
        engine.pulse.spoke(now);
        engine.succeeded();
        self.attempt = None;
        self.usage = serde_json::from_slice::<RawObject<'_>>(body).ok().and_then(|answer| answer.read("usage").ok().flatten());
        self.cached = self.usage.as_ref().and_then(Usage::cached_tokens).map(Tokens);
        let tokens = self.usage.as_ref().map_or(1, |usage| usage.completion_tokens.max(1));
        self.session.offer(epoch, 0, 0, tokens, now);
        self.output(tokens, now);
        self.alone = false;
        self.observe(&engine);
        self.session.handle(Input::ChoiceFinished { epoch, choice: 0 }, now);
        self.session.handle(Input::Completed { epoch }, now);
        Ok(())
    }
}

/// Whether another replica would say the same. A refused key is the gateway's own trouble with this one engine.
fn is_clients_fault(status: StatusCode) -> bool {
    let own = [StatusCode::UNAUTHORIZED, StatusCode::FORBIDDEN, StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_MANY_REQUESTS];
    status.is_client_error() && !own.contains(&status)
}
