//! An output is one answer, however it is told: token by token with its end, as an engine does, or by the migration protocol's entries,
//! cut into calls anyhow.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic like tests")]

use std::{collections::BTreeMap, sync::Arc};

use baton_engine::{FinishReason, SamplingParams};
use baton_openai::{Answer, Checked, Limits, Pushed, Service, Token};
use baton_text::Tokenizer;
use baton_units::BlockSize;
use baton_wire::{
    migration::{FinishReason as WireReason, OutputEntry, TokenLogprobs},
    openai::{Head, parse},
    sse,
};
use proptest::prelude::*;
use serde_json::{Value, json};

/// Text that would be seen if it were shown by mistake.
const EOS: u32 = u32::from_le_bytes(*b"</s>");
const STOP: u32 = u32::from_le_bytes(*b"STOP");

/// Whole characters, parts of some, bytes that are none, and tokens that end an output.
fn vocabulary() -> [u32; 12] {
    let id = |text: &[u8]| {
        let mut bytes = [0; 4];
        bytes[..text.len()].copy_from_slice(text);
        u32::from_le_bytes(bytes)
    };
    let pieces: [&[u8]; 10] = [b"a", b"b", b"ab", b"ba", b" c", "é".as_bytes(), b"\xc3", b"\xa9", b"a\xf0\x9f", b"\xff"];
    let mut all = [EOS; 12];
    for (piece, to) in pieces.iter().zip(&mut all) {
        *to = id(piece);
    }
    all[11] = STOP;
    all
}

/// One request and what is drawn for each of its choices.
#[derive(Debug, Clone)]
struct Case {
    is_chat: bool,
    body: Value,
    /// Tokens that an engine would draw, if nothing ended the output.
    draws: Vec<Vec<u32>>,
    /// Output tokens that the replica holds, whatever the request allows.
    room: u32,
}

/// An output as an engine gives it: what ends it stands with its last token.
type Output = Vec<(Token, Option<FinishReason>)>;

fn service() -> Arc<Service> {
    Arc::new(Service {
        tokenizer: Arc::new(Tokenizer::bytes4()),
        limits: Limits { max_model_len: 64, vocabulary: 1 << 32 },
        eos: vec![EOS],
        block_size: BlockSize::DEFAULT,
        orders_by_priority: false,
    })
}

impl Case {
    fn answer(&self) -> (Answer, SamplingParams) {
        let body = serde_json::to_vec(&self.body).unwrap();
        let service = service();
        let checked = if self.is_chat {
            Checked::chat(&service, &parse(&body).unwrap())
        } else {
            Checked::completion(&service, &parse(&body).unwrap())
        };
        let head = Head { id: "id".into(), created: 5, model: "m".into(), system_fingerprint: Some("f".into()) };
        let mut understood = checked.unwrap().with_prompts(head, vec![vec![97, 98, 99]], 1).unwrap();
        understood.answer.set_cached(0, 2);
        (understood.answer, understood.prompts.remove(0).params)
    }

    fn is_stream(&self) -> bool {
        self.body["stream"] == true
    }

    /// Without what is told of each token.
    fn plain_stream(mut self) -> Self {
        let body = self.body.as_object_mut().unwrap();
        body.insert("stream".into(), json!(true));
        for field in ["logprobs", "top_logprobs", "return_token_ids"] {
            body.remove(field);
        }
        self
    }

    /// What an engine gives of the draws: it draws no token that ends an output before `min_tokens`.
    fn outputs(&self, params: &SamplingParams) -> Vec<Output> {
        let output = |draws: &Vec<u32>| {
            let mut output = Output::new();
            for (count, &drawn) in (1..).zip(draws) {
                let ends = [EOS, STOP].contains(&drawn);
                let id = if ends && count <= params.min_tokens { vocabulary()[0] } else { drawn };
                let length = (count >= self.room).then_some(FinishReason::Length);
                let finish = params.end_after(id, count, &[EOS]).or(length);
                let top = params.logprobs.map(|n| (0..n).map(|rank| (id + rank, -0.5 - rank as f32)).collect());
                let token = Token { id, logprob: params.logprobs.map(|_| -0.5), top: top.unwrap_or_default() };
                output.push((token, finish));
                if finish.is_some() {
                    break;
                }
            }
            output
        };
        self.draws.iter().map(output).collect()
    }
}

/// What the client has of the one choice of a stream that may have no end.
fn text_of(stream: &[u8]) -> String {
    let done = if stream.ends_with(sse::DONE) { &[][..] } else { sse::DONE };
    let (choices, _) = gathered(&[stream, done].concat());
    choices.get(&0).and_then(|choice| choice["text"].as_str()).unwrap_or_default().to_owned()
}

fn without_last(text: &str, chars: usize) -> String {
    text.chars().take(text.chars().count().saturating_sub(chars)).collect()
}

/// By a server that waits for whole characters and for no stop string.
fn shown_at_once(ids: &[u32]) -> String {
    let mut detokenizer = service().tokenizer.detokenizer(true).continuing();
    ids.iter().map(|&id| detokenizer.push(id)).collect()
}

fn entries((token, finish): &(Token, Option<FinishReason>)) -> Vec<OutputEntry> {
    let logprobs = token.logprob.map(|chosen| TokenLogprobs { chosen, top: token.top.clone() });
    let finish = finish.map(|reason| match reason {
        FinishReason::EndOfSequence => WireReason::EndOfSequence,
        FinishReason::StopToken(id) => WireReason::StopToken(id),
        FinishReason::Length => WireReason::Length,
    });
    [OutputEntry::Token { id: token.id, logprobs }].into_iter().chain(finish.map(OutputEntry::Finish)).collect()
}

fn ends_by_id(finish: Option<FinishReason>) -> bool {
    matches!(finish, Some(FinishReason::EndOfSequence | FinishReason::StopToken(_)))
}

/// What was told, and how often a sequence had to be stopped.
struct Told {
    answer: Answer,
    out: Vec<u8>,
    stopped: u32,
}

impl Told {
    fn new(answer: Answer) -> Self {
        Self { answer, out: Vec::new(), stopped: 0 }
    }

    fn token(&mut self, index: u32, (token, finish): &(Token, Option<FinishReason>)) {
        let pushed = self.answer.push(index, token.clone(), *finish, &mut self.out);
        self.stopped += u32::from(pushed == Pushed::Stopped);
    }

    fn entries(&mut self, index: u32, entries: &[OutputEntry]) {
        let pushed = self.answer.push_entries(index, entries.iter().cloned(), &mut self.out);
        self.stopped += u32::from(pushed == Pushed::Stopped);
    }

    /// Ends what has not ended; the counts are those of the whole request.
    fn end(mut self, choices: u32) -> (Vec<u8>, u32, baton_openai::Counts) {
        for index in 0..choices {
            self.answer.abort(index, &mut self.out);
        }
        assert!(self.answer.has_ended());
        self.answer.finish(&mut self.out);
        (self.out, self.stopped, self.answer.counts())
    }
}

/// Cuts a list after the places that `cuts` name.
fn cut<T: Clone>(list: &[T], cuts: &[usize]) -> Vec<Vec<T>> {
    let mut at: Vec<usize> = cuts.iter().map(|cut| cut % (list.len() + 1)).chain([0, list.len()]).collect();
    at.sort_unstable();
    at.windows(2).map(|ends| list[ends[0]..ends[1]].to_vec()).collect()
}

/// Of a stream what a client gathers: per choice the text, the lists of ids and of log-probabilities, and the end; and the usage.
fn gathered(stream: &[u8]) -> (BTreeMap<u64, BTreeMap<&'static str, Value>>, Value) {
    let (mut choices, mut usage) = (BTreeMap::<u64, BTreeMap<&'static str, Value>>::new(), Value::Null);
    let mut decoder = sse::Decoder::default();
    let events: Vec<_> = decoder.push(stream).map(Result::unwrap).collect();
    assert!(events.last().unwrap().is_done());
    for event in &events[..events.len() - 1] {
        let event: Value = serde_json::from_slice(event.data.as_deref().unwrap()).unwrap();
        let parts = event["choices"].as_array().unwrap();
        if parts.is_empty() {
            usage = event["usage"].clone();
        }
        for part in parts {
            let choice = choices.entry(part["index"].as_u64().unwrap()).or_default();
            assert!(!choice.contains_key("end"), "nothing comes after the end");
            let text = part["text"].as_str().or(part["delta"]["content"].as_str()).unwrap_or_default();
            let whole = choice.get("text").and_then(Value::as_str).unwrap_or_default().to_owned() + text;
            choice.insert("text", json!(whole));
            let logprobs = [
                ("token_ids", &part["token_ids"]),
                ("content", &part["logprobs"]["content"]),
                ("text_offset", &part["logprobs"]["text_offset"]),
                ("tokens", &part["logprobs"]["tokens"]),
                ("top_logprobs", &part["logprobs"]["top_logprobs"]),
            ];
            for (name, list) in logprobs {
                let so_far = choice.entry(name).or_insert_with(|| json!([])).as_array_mut().unwrap();
                so_far.extend(list.as_array().into_iter().flatten().cloned());
            }
            if !part["finish_reason"].is_null() {
                choice.insert("end", json!([part["finish_reason"], part["stop_reason"], event["system_fingerprint"]]));
            }
        }
    }
    (choices, usage)
}

fn case(choices: std::ops::Range<usize>) -> impl Strategy<Value = Case> {
    let stops = prop::sample::subsequence(vec!["ab", "b", "a\u{fffd}", "a", "\u{fffd}", " c", "é"], 0..6);
    let flags = prop::collection::vec(any::<bool>(), 9);
    let draws = prop::collection::vec(prop::collection::vec(prop::sample::select(vocabulary().to_vec()), 1..12), choices);
    (stops, flags, 1u32..12, 0u32..4, prop::option::of(0u32..3), draws, prop_oneof![Just(u32::MAX), 1u32..12]).prop_map(
        |(stops, flags, max_tokens, min_tokens, logprobs, draws, room)| {
            let is_chat = flags[0];
            let mut body = json!({
                "prompt": "abc", "messages": [], "n": draws.len(), "max_tokens": max_tokens, "min_tokens": min_tokens.min(max_tokens),
                "stop": stops, "stream": flags[1], "include_stop_str_in_output": flags[2], "ignore_eos": flags[3],
                "return_token_ids": flags[4], "return_tokens_as_token_ids": flags[5],
                "stop_token_ids": if flags[6] { vec![STOP] } else { Vec::new() },
            });
            if flags[1] && flags[7] {
                body["stream_options"] = json!({ "include_usage": true, "continuous_usage_stats": flags[8] });
            }
            match (is_chat, logprobs) {
                (true, Some(n)) => (body["logprobs"], body["top_logprobs"]) = (json!(true), json!(n)),
                (false, Some(n)) => body["logprobs"] = json!(n),
                (_, None) => {}
            }
            Case { is_chat, body, draws, room }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    /// Of an end that request and model decide, every byte is the same and comes with the same token, but for the text of a token that
    /// may be no part of the output.
    #[test]
    fn entries_are_shown_as_soon_as_an_engine_s_tokens(
        case in case(1..2).prop_map(|case| Case { room: u32::MAX, ..case }),
        cuts in prop::collection::vec(any::<usize>(), 0..12),
    ) {
        let (answer, params) = case.answer();
        let output = &case.outputs(&params)[0];
        let mut by_engine = Told::new(answer);
        let mut shown = vec![Vec::new()];
        for token in output {
            by_engine.token(0, token);
            shown.push(by_engine.out.clone());
        }
        let mut by_entries = Told::new(case.answer().0);
        let (mut tokens, mut finish_is_told) = (0, false);
        for batch in cut(&output.iter().flat_map(entries).collect::<Vec<_>>(), &cuts) {
            tokens += batch.iter().filter(|entry| matches!(entry, OutputEntry::Token { .. })).count();
            by_entries.entries(0, &batch);
            finish_is_told |= matches!(batch.last(), Some(OutputEntry::Finish(_)));
            let waits = tokens == output.len() && !finish_is_told && ends_by_id(output[tokens - 1].1);
            prop_assert_eq!(&by_entries.out, &shown[tokens - usize::from(waits)]);
        }
        prop_assert_eq!(by_entries.end(1), by_engine.end(1));
    }

    /// Whatever ends them, and however the choices take turns.
    #[test]
    fn both_ways_of_telling_are_one_answer(
        case in case(1..4),
        cuts in prop::collection::vec(any::<usize>(), 0..16),
        turns in prop::collection::vec(any::<prop::sample::Index>(), 0..40),
    ) {
        let (answer, params) = case.answer();
        let outputs = case.outputs(&params);
        let choices = outputs.len() as u32;
        let mut by_engine = Told::new(answer);
        for (index, output) in (0..).zip(&outputs) {
            for token in output {
                by_engine.token(index, token);
            }
        }
        let mut by_entries = Told::new(case.answer().0);
        let mut left: Vec<(u32, std::collections::VecDeque<Vec<OutputEntry>>)> = (0..)
            .zip(&outputs)
            .map(|(index, output)| (index, cut(&output.iter().flat_map(entries).collect::<Vec<_>>(), &cuts).into()))
            .collect();
        let mut turns = turns.into_iter();
        while !left.is_empty() {
            let turn = turns.next().map_or(0, |turn| turn.index(left.len()));
            let (index, batches) = &mut left[turn];
            match batches.pop_front() {
                Some(batch) => by_entries.entries(*index, &batch),
                None => drop(left.remove(turn)),
            }
        }
        let ((engine, engine_stopped, engine_counts), (entries, entries_stopped, entries_counts)) = (by_engine.end(choices), by_entries.end(choices));
        prop_assert_eq!((engine_stopped, engine_counts), (entries_stopped, entries_counts));
        if case.is_stream() {
            prop_assert_eq!(gathered(&engine), gathered(&entries));
        } else {
            prop_assert_eq!(String::from_utf8(engine), String::from_utf8(entries));
        }
    }

    /// Wherever the first server stopped to show text, by rules of its own.
    #[test]
    fn a_resumed_stream_joins_to_the_whole_one(
        case in case(1..2).prop_map(Case::plain_stream),
        at in any::<prop::sample::Index>(),
        held_back in 0usize..4,
        holds_nothing: bool,
    ) {
        let (answer, params) = case.answer();
        let output = &case.outputs(&params)[0];
        let at = at.index(output.len());
        let (mut whole, mut begun) = (Told::new(answer), Told::new(case.answer().0));
        for (place, token) in output.iter().enumerate() {
            whole.token(0, token);
            if place < at {
                begun.token(0, token);
            }
        }
        prop_assume!(!begun.answer.has_ended());
        let ids: Vec<u32> = output[..at].iter().map(|(token, _)| token.id).collect();
        let seen = if holds_nothing { shown_at_once(&ids) } else { without_last(&text_of(&begun.out), held_back) };
        let (whole, _, whole_counts) = whole.end(1);
        let wanted = text_of(&whole);
        prop_assume!(wanted.starts_with(&seen));
        let mut resumed = Told::new(case.answer().0);
        resumed.answer.set_cached(0, 2);
        let pushed = resumed.answer.resume(0, &ids, &seen, &mut resumed.out).unwrap();
        prop_assert_eq!((pushed, resumed.out.len()), (Pushed::Running, 0));
        for token in &output[at..] {
            resumed.token(0, token);
        }
        let (resumed, _, counts) = resumed.end(1);
        prop_assert_eq!(seen + &text_of(&resumed), wanted);
        prop_assert_eq!(counts, whole_counts);
        let of = |stream: &[u8], name| gathered(stream).0.remove(&0).and_then(|mut choice| choice.remove(name));
        prop_assert_eq!(of(&resumed, "end"), of(&whole, "end"));
        prop_assert_eq!(gathered(&resumed).1, gathered(&whole).1);
        prop_assert!(!String::from_utf8_lossy(&resumed).contains("role"), "it has begun");
    }

    /// The client of a stream and that of a body read the same.
    #[test]
    fn a_stream_joins_to_the_body(case in case(1..3).prop_map(|case| Case { is_chat: false, ..case })) {
        let told = |stream: bool| {
            let mut body = case.body.clone();
            body["stream"] = json!(stream);
            for field in ["stream_options", "logprobs", "top_logprobs"] {
                body.as_object_mut().unwrap().remove(field);
            }
            let case = Case { body, ..case.clone() };
            let (answer, params) = case.answer();
            let outputs = case.outputs(&params);
            let mut told = Told::new(answer);
            (0..).zip(&outputs).for_each(|(index, output)| output.iter().for_each(|token| told.token(index, token)));
            told.end(outputs.len() as u32).0
        };
        let body: Value = serde_json::from_slice(&told(false)).unwrap();
        let (streamed, _) = gathered(&told(true));
        for (choice, streamed) in body["choices"].as_array().unwrap().iter().zip(streamed.values()) {
            prop_assert_eq!(&choice["text"], &streamed["text"]);
            prop_assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&streamed["end"][0], &streamed["end"][1]));
        }
    }
}

/// Completion of one choice from entries, each list a call; the text and end after each.
fn texts(options: &Value, calls: &[&[OutputEntry]]) -> Vec<(String, Option<String>)> {
    let mut body = json!({ "prompt": "abc", "stream": true, "max_tokens": 8, "temperature": 0 });
    body.as_object_mut().unwrap().extend(options.as_object().unwrap().clone());
    let case = Case { is_chat: false, body, draws: Vec::new(), room: u32::MAX };
    let mut told = Told::new(case.answer().0);
    let told_so_far = |call: &&[OutputEntry]| {
        told.entries(0, call);
        let stream = [&told.out[..], sse::DONE].concat();
        let (choices, _) = gathered(&stream);
        let choice = choices.get(&0);
        let text = choice.and_then(|choice| choice["text"].as_str()).unwrap_or_default().to_owned();
        (text, choice.and_then(|choice| Some(choice.get("end")?[0].as_str()?.to_owned())))
    };
    calls.iter().map(told_so_far).collect()
}

fn token(text: [u8; 4]) -> OutputEntry {
    OutputEntry::Token { id: u32::from_le_bytes(text), logprobs: None }
}

#[test]
fn a_token_that_may_end_the_output_waits_for_the_next_entry() {
    let eos = || OutputEntry::Token { id: EOS, logprobs: None };
    let end = |reason: &str| Some(reason.to_owned());
    let finish = [OutputEntry::Finish(WireReason::EndOfSequence)];
    let told = texts(&json!({}), &[&[token(*b"once"), eos()], &finish]);
    assert_eq!(told, [("once".into(), None), ("once".into(), end("stop"))]);
    let told = texts(&json!({}), &[&[token(*b"once"), eos()], &[token(*b"more")]]);
    assert_eq!(told, [("once".into(), None), ("once</s>more".into(), None)], "the replica goes on");
    let told = texts(&json!({ "ignore_eos": true }), &[&[token(*b"once"), eos()]]);
    assert_eq!(told, [("once</s>".into(), None)]);
}

#[test]
fn the_last_of_max_tokens_waits_for_nothing() {
    let end = Some("length".to_owned());
    let told = texts(&json!({ "max_tokens": 2 }), &[&[token(*b"once")], &[token(*b"more")], &[OutputEntry::Finish(WireReason::Length)]]);
    assert_eq!(told, [("once".into(), None), ("oncemore".into(), end.clone()), ("oncemore".into(), end)]);
}

#[test]
fn a_finish_that_nothing_foretold_is_an_event_of_its_own() {
    let told = texts(&json!({}), &[&[token(*b"on\0\xc3")], &[OutputEntry::Finish(WireReason::Length)]]);
    assert_eq!(told[1], ("on\0\u{fffd}".into(), Some("length".into())));
}

#[test]
fn an_abort_between_the_last_token_and_its_finish_changes_nothing() {
    let case = Case { is_chat: false, body: json!({ "prompt": "abc", "max_tokens": 8 }), draws: Vec::new(), room: u32::MAX };
    let finish_reason = |calls: &[OutputEntry]| {
        let mut told = Told::new(case.answer().0);
        told.entries(0, calls);
        let body: Value = serde_json::from_slice(&told.end(1).0).unwrap();
        (body["choices"][0]["text"].clone(), body["choices"][0]["finish_reason"].clone())
    };
    let eos = OutputEntry::Token { id: EOS, logprobs: None };
    assert_eq!(finish_reason(&[token(*b"once")]), (json!("once"), json!("abort")));
    assert_eq!(finish_reason(&[token(*b"once"), eos]), (json!("once"), json!("stop")));
}

#[test]
fn tokens_that_end_an_output_end_the_resumed_stream() {
    let case = |options: Value| {
        let mut body = json!({ "messages": [], "stream": true, "max_tokens": 8 });
        body.as_object_mut().unwrap().extend(options.as_object().unwrap().clone());
        Case { is_chat: true, body, draws: Vec::new(), room: u32::MAX }
    };
    let resumed = |options: Value, ids: &[[u8; 4]], seen: &str| {
        let mut told = Told::new(case(options).answer().0);
        let ids: Vec<u32> = ids.iter().map(|id| u32::from_le_bytes(*id)).collect();
        told.answer.resume(0, &ids, seen, &mut told.out).map(|pushed| {
            let text = text_of(&told.out);
            (pushed, text, gathered(&told.end(1).0).0.remove(&0).and_then(|mut choice| choice.remove("end")).map(|end| end[0].clone()))
        })
    };
    let stop = Some(json!("stop"));
    assert_eq!(resumed(json!({}), &[*b"once", *b"</s>"], "on"), Ok((Pushed::Ended, "ce".into(), stop.clone())));
    assert_eq!(resumed(json!({ "stop": "ceEN" }), &[*b"once", *b"ENDE"], "on"), Ok((Pushed::Stopped, String::new(), stop)));
    assert_eq!(resumed(json!({ "max_tokens": 1 }), &[*b"once"], "once"), Ok((Pushed::Ended, String::new(), Some(json!("length")))));
    assert_eq!(resumed(json!({}), &[*b"once"], "twice"), Err(baton_openai::OtherText));
    assert_eq!(resumed(json!({}), &[*b"once"], "once upon"), Err(baton_openai::OtherText));
}

#[test]
fn a_last_token_ends_an_output_whose_end_never_comes() {
    let case = Case { is_chat: true, body: json!({ "messages": [], "stream": true, "max_tokens": 8 }), draws: Vec::new(), room: u32::MAX };
    let settled = |calls: &[OutputEntry]| {
        let mut told = Told::new(case.answer().0);
        told.entries(0, calls);
        let pushed = told.answer.settle(0, &mut told.out);
        (pushed, text_of(&told.out))
    };
    let eos = OutputEntry::Token { id: EOS, logprobs: None };
    assert_eq!(settled(&[token(*b"once")]), (Pushed::Running, "once".into()));
    assert_eq!(settled(&[token(*b"once"), eos]), (Pushed::Ended, "once".into()));
}
