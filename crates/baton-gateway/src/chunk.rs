//! One event of an engine's stream, understood as far as the gateway needs it: whose output it is, how much, and what a client that
//! did not ask for everything may see of it.

use std::{borrow::Cow, collections::BTreeSet};

use baton_session::Fault;
use baton_units::Tokens;
use baton_wire::{
    openai::{ErrorBody, Usage},
    sse,
};
use bytes::Bytes;
use memchr::{memchr, memmem};
use serde_json::{Value, value::RawValue};

use crate::{
    intake::{Api, Wishes},
    json::RawObject,
    plain::Plain,
};

/// What an event says.
#[derive(Debug)]
pub(crate) enum Reading<'a> {
    Chunk(Box<Chunk<'a>>),
    /// An error object; whatever follows it, the stream has failed.
    Error(Option<ErrorBody>),
}

/// A chunk with its choices taken apart.
#[derive(Debug)]
pub(crate) struct Chunk<'a> {
    pub(crate) object: RawObject<'a>,
    pub(crate) choices: Vec<RawObject<'a>>,
    /// One per choice, in their order.
    pub(crate) pieces: Vec<Piece>,
    pub(crate) usage: Option<Usage>,
}

/// What a chunk adds to one choice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) choice: u32,
    /// Tokens: counted where the engine lists them, else one for any text.
    pub(crate) count: u32,
    pub(crate) token_ids: Vec<u32>,
    pub(crate) finish: Option<String>,
}

impl Piece {
    /// The engine dropped the request; nobody here asks it to while still listening.
    pub(crate) fn is_abort(&self) -> bool {
        self.finish.as_deref() == Some("abort")
    }
}

impl Chunk<'_> {
    /// Hides what of the prompt was cached beyond so many tokens.
    pub(crate) fn show_cached(&mut self, most: Tokens) {
        show_cached(&mut self.object, most);
        self.usage = self.object.read("usage").ok().flatten();
    }
}

/// The answer with no more than so many tokens of the prompt shown as cached; `None` where it shows no more.
pub(crate) fn with_cached_at_most(answer: &[u8], most: Tokens) -> Option<Bytes> {
    let mut object: RawObject<'_> = serde_json::from_slice(answer).ok()?;
    show_cached(&mut object, most).then(|| object.to_vec().into())
}

fn show_cached(object: &mut RawObject<'_>, most: Tokens) -> bool {
    let Ok(Some(mut usage)) = object.read::<Value>("usage") else { return false };
    let cached = usage.pointer_mut("/prompt_tokens_details/cached_tokens");
    let Some(cached) = cached.filter(|cached| cached.as_u64() > Some(most.0.into())) else { return false };
    *cached = most.0.into();
    object.set("usage", &usage);
    true
}

impl<'a> Reading<'a> {
    /// Reads the data of one event. An error means that it is no OpenAI stream.
    pub(crate) fn of(api: Api, data: &'a [u8]) -> Result<Self, Fault> {
        let object: RawObject<'a> = serde_json::from_slice(data).map_err(|_| Fault::Garbled)?;
        if object.given("error").is_some() {
            return Ok(Self::Error(object.read("error").ok().flatten()));
        }
        let choices = object.borrowed("choices").map(|choices| serde_json::from_str(choices.get()));
        let choices: Vec<RawObject<'a>> = choices.transpose().map_err(|_| Fault::Garbled)?.unwrap_or_default();
        let pieces = choices.iter().map(|choice| piece(api, choice)).collect::<Result<_, _>>().map_err(|_| Fault::Garbled)?;
        let usage = object.read("usage").ok().flatten();
        Ok(Self::Chunk(Box::new(Chunk { object, choices, pieces, usage })))
    }
}

/// Where the ids of a long prompt begin.
const PROMPT_IDS: &[u8] = br#""prompt_token_ids":["#;
/// Shorter events are read as fast as they are searched.
const SEARCHED_BYTES_MIN: usize = 1 << 10;

/// The data of an event with null for the prompt's token ids, as [`ClientView::event`] shows them to clients that did not ask: an engine that is
/// asked for its output's ids tells the prompt's too, in its first chunk, which is longer than all others together.
pub(crate) fn without_prompt_ids(data: &[u8]) -> Cow<'_, [u8]> {
    if data.len() < SEARCHED_BYTES_MIN {
        return data.into();
    }
    let mut kept = Vec::new();
    let (mut rest, mut at) = (data, 0);
    while let Some(offset) = memmem::find(&rest[at..], PROMPT_IDS) {
        let (key, list) = (at + offset, at + offset + PROMPT_IDS.len() - 1);
        // A quote inside a string has a backslash in front of it, so this one begins a field's name.
        let is_field = key > 0 && matches!(rest[key - 1], b',' | b'{');
        let end = memchr(b']', &rest[list..]).map(|length| list + length).filter(|_| is_field);
        match end.filter(|&end| rest[list + 1..end].iter().all(|byte| matches!(byte, b'0'..=b'9' | b',' | b' '))) {
            Some(end) => {
                kept.extend_from_slice(&rest[..list]);
                kept.extend_from_slice(b"null");
                (rest, at) = (&rest[end + 1..], 0);
            }
            None => at = list,
        }
    }
    if rest.len() == data.len() {
        return data.into();
    }
    kept.extend_from_slice(rest);
    kept.into()
}

fn piece(api: Api, choice: &RawObject<'_>) -> Result<Piece, serde_json::Error> {
    let token_ids: Vec<u32> = choice.read("token_ids")?.unwrap_or_default();
    let has_text = match api {
        Api::Completions => is_text(choice.given("text")),
        Api::Chat => choice.read::<RawObject<'_>>("delta")?.is_some_and(|delta| {
            let text = ["content", "reasoning", "reasoning_content", "refusal"].into_iter().any(|field| is_text(delta.given(field)));
            text || delta.given("tool_calls").is_some_and(|calls| calls.get() != "[]")
        }),
    };
    Ok(Piece {
        choice: choice.read("index")?.unwrap_or(0),
        count: if token_ids.is_empty() { u32::from(has_text) } else { token_ids.len() as u32 },
        token_ids,
        finish: choice.read("finish_reason")?,
    })
}

fn is_text(value: Option<&RawValue>) -> bool {
    value.is_some_and(|value| value.get() != "\"\"")
}

/// Turns an engine's chunks into those of one client's stream: one id and one `created` over all attempts, and nothing that was not
/// asked for.
#[derive(Debug)]
pub(crate) struct ClientView {
    wishes: Wishes,
    id: String,
    /// The same as JSON.
    id_json: String,
    created: Option<Box<RawValue>>,
    /// Choices whose opening chunk (role, no output) was sent; a second attempt's is left out.
    opened: BTreeSet<u32>,
}

impl ClientView {
    pub(crate) fn new(wishes: Wishes, id: String) -> Self {
        let id_json = serde_json::to_string(&id).expect("a string is JSON");
        Self { wishes, id, id_json, created: None, opened: BTreeSet::new() }
    }

    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// When the answer began, once that is known, in seconds since 1970.
    pub(crate) fn created(&self) -> Option<u64> {
        serde_json::from_str(self.created.as_ref()?.get()).ok()
    }

    /// Whether a plain chunk needs no change but those that [`Plain::write`] makes: what attempts share is known and the same.
    pub(crate) fn knows(&self, plain: &Plain<'_>) -> bool {
        plain.created().is_none_or(|created| self.created.as_deref().is_some_and(|known| known.get().as_bytes() == created))
    }

    /// Appends a plain chunk that [`Self::knows`] as [`Self::event`] would give it.
    pub(crate) fn write(&mut self, plain: &Plain<'_>, to: &mut Vec<u8>) {
        self.opened.insert(plain.choice);
        plain.write(&self.id_json, self.wishes.token_ids, to);
    }

    /// The chunk as an event for the client; `None` when there is nothing in it for this client.
    pub(crate) fn event(&mut self, chunk: Chunk<'_>) -> Option<Bytes> {
        let Chunk { mut object, mut choices, pieces, .. } = chunk;
        if choices.is_empty() && !self.wishes.usage {
            return None;
        }
        if self.repeats_an_opening(&pieces) {
            return None;
        }
        object.set("id", &self.id);
        match (&self.created, object.given("created")) {
            (Some(created), Some(_)) => object.set_raw("created", created.clone()),
            (None, Some(created)) => self.created = Some(created.to_owned()),
            (_, None) => {}
        }
        if !choices.is_empty() && !self.wishes.continuous_usage && object.given("usage").is_some() {
            object.remove("usage");
        }
        if !self.wishes.token_ids {
            object.set_null_if_present("prompt_token_ids");
            let mut changed = false;
            for choice in &mut choices {
                changed |= choice.set_null_if_present("token_ids") | choice.set_null_if_present("prompt_token_ids");
            }
            if changed {
                object.set("choices", &choices);
            }
        }
        Some(sse::encode_json(&object))
    }

    fn repeats_an_opening(&mut self, pieces: &[Piece]) -> bool {
        let is_opening = !pieces.is_empty() && pieces.iter().all(|piece| piece.count == 0 && piece.finish.is_none());
        let new = pieces.iter().fold(false, |new, piece| self.opened.insert(piece.choice) | new);
        is_opening && !new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WISHES: Wishes = Wishes { stream: true, usage: false, continuous_usage: false, token_ids: false };

    fn chunk(api: Api, data: &str) -> Chunk<'_> {
        match Reading::of(api, data.as_bytes()).unwrap() {
            Reading::Chunk(chunk) => *chunk,
            Reading::Error(error) => panic!("{error:?}"),
        }
    }

    fn view(wishes: Wishes, api: Api, data: &[&str]) -> Vec<String> {
        let mut view = ClientView::new(wishes, "chatcmpl-x".into());
        let events = data.iter().filter_map(|data| view.event(chunk(api, data)));
        events.map(|event| String::from_utf8(event.to_vec()).unwrap()).collect()
    }

    #[test]
    fn a_client_sees_what_it_would_see_without_a_gateway() {
        let asked = r#"{"id":"a","created":5,"choices":[{"index":0,"delta":{"content":"The"},"logprobs":{"x":-1e-05},"finish_reason":null,"token_ids":[504]}],"usage":{"prompt_tokens":41,"total_tokens":42,"completion_tokens":1}}"#;
        let plain = "data: {\"id\":\"chatcmpl-x\",\"created\":5,\"choices\":[{\"index\":0,\"delta\":{\"content\":\"The\"},\"logprobs\":{\"x\":-1e-05},\"finish_reason\":null,\"token_ids\":null}]}\n\n";
        assert_eq!(view(WISHES, Api::Chat, &[asked]), [plain]);
        let all = Wishes { usage: true, continuous_usage: true, token_ids: true, ..WISHES };
        assert_eq!(view(all, Api::Chat, &[asked]), [format!("data: {}\n\n", asked.replace("\"a\"", "\"chatcmpl-x\""))]);
    }

    #[test]
    fn ids_of_a_long_prompt_are_left_out_before_the_event_is_read() {
        let ids: Vec<String> = (0..2_000).map(|id| (id * 7).to_string()).collect();
        let text = r#"said: \"prompt_token_ids\":[1,2], {\"prompt_token_ids\":[3]}"#;
        for (ids, separator) in [(&ids[..], ","), (&ids, ", "), (&ids[..400], ",")] {
            let ids = ids.join(separator);
            for (api, data) in [
                (Api::Chat, format!(r#"{{"id":"a","choices":[{{"index":0,"delta":{{"content":"{text}"}}}}],"prompt_token_ids":[{ids}]}}"#)),
                (
                    Api::Completions,
                    format!(
                        r#"{{"choices":[{{"prompt_token_ids":[{ids}],"index":0,"text":"{text}"}},{{"index":1,"text":"","prompt_token_ids":[{ids}]}}]}}"#
                    ),
                ),
            ] {
                let short = without_prompt_ids(data.as_bytes());
                let short = std::str::from_utf8(&short).unwrap();
                assert!(short.len() < 300 && short.contains(text), "{short}");
                assert_eq!(view(WISHES, api, &[short]), view(WISHES, api, &[&data]));
            }
        }
        for odd in [r#"["x"]"#, "[1.5]", "[[7]]", "[1,2", "null"] {
            let odd = format!(r#"{{"a":"{}","prompt_token_ids":{odd}}}"#, "x".repeat(2_000));
            assert_eq!(without_prompt_ids(odd.as_bytes()), odd.as_bytes());
        }
    }

    #[test]
    fn the_usage_chunk_is_for_those_who_asked() {
        let usage = r#"{"id":"a","choices":[],"usage":{"prompt_tokens":1,"total_tokens":2,"completion_tokens":1}}"#;
        assert_eq!(view(WISHES, Api::Chat, &[usage]).len(), 0);
        assert_eq!(view(Wishes { usage: true, ..WISHES }, Api::Chat, &[usage]).len(), 1);
    }

    #[test]
    fn a_second_attempt_does_not_open_again_and_keeps_the_time_of_the_first() {
        let opening =
            |created: u32| format!(r#"{{"created":{created},"choices":[{{"index":0,"delta":{{"role":"assistant","content":""}}}}]}}"#);
        let text = r#"{"created":9,"choices":[{"index":0,"delta":{"content":"a"}}]}"#;
        let events = view(WISHES, Api::Chat, &[&opening(5), &opening(9), text]);
        assert_eq!(events.len(), 2);
        assert!(events[1].contains("\"created\":5"));
    }

    #[test]
    fn output_is_counted_by_ids_or_by_text() {
        let piece = |api, data| chunk(api, data).pieces.remove(0);
        let counted = |api, data| piece(api, data).count;
        assert_eq!(counted(Api::Completions, r#"{"choices":[{"index":0,"text":"","token_ids":[1,2]}]}"#), 2);
        assert_eq!(counted(Api::Completions, r#"{"choices":[{"index":0,"text":"abc"}]}"#), 1);
        assert_eq!(counted(Api::Chat, r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}"#), 0);
        assert_eq!(counted(Api::Chat, r#"{"choices":[{"index":1,"delta":{"content":null,"tool_calls":[{"index":0}]}}]}"#), 1);
        assert!(piece(Api::Completions, r#"{"choices":[{"index":0,"text":"","finish_reason":"abort"}]}"#).is_abort());
    }

    #[test]
    fn what_was_cached_is_shown_up_to_a_bound() {
        let usage = |cached: u32| {
            format!(
                r#"{{"usage":{{"completion_tokens":1,"prompt_tokens":90,"prompt_tokens_details":{{"cached_tokens":{cached}}},"total_tokens":91}}}}"#
            )
        };
        let (much, little) = (usage(80), usage(16));
        let mut seen = chunk(Api::Chat, &much);
        seen.show_cached(Tokens(16));
        assert_eq!((seen.usage.unwrap().cached_tokens(), seen.object.to_vec()), (Some(16), little.clone().into_bytes()));
        assert_eq!(with_cached_at_most(much.as_bytes(), Tokens(16)).unwrap(), little);
        assert_eq!(with_cached_at_most(little.as_bytes(), Tokens(16)), None);
        assert_eq!(with_cached_at_most(br#"{"usage":null}"#, Tokens(0)), None);
    }

    #[test]
    fn an_error_object_is_no_chunk() {
        let error =
            r#"{"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "param": null, "code": 500}}"#;
        assert!(matches!(Reading::of(Api::Chat, error.as_bytes()), Ok(Reading::Error(Some(body))) if body.code == 500));
        assert!(matches!(Reading::of(Api::Chat, br#"{"error":"text"}"#), Ok(Reading::Error(None))));
        assert_eq!(Reading::of(Api::Chat, b"<html>").unwrap_err(), Fault::Garbled);
    }
}
