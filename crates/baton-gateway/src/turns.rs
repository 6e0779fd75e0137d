//! Tokens of a conversation at the cost of its new messages.
//!
//! Most chat templates write a conversation as its first message, each further one, and the opening of the answer, none of which
//! depends on another. Where that is so, and each part begins with a special token, the tokens of a conversation are those of its parts,
//! and a part that was seen before is found by the hash of its JSON. [`Turns::new`] tries out whether it is so, as
//! [`Segments`] does for special tokens; where a conversation makes an exception the template is asked as a whole.

use std::{borrow::Cow, sync::Arc};

use baton_text::{TemplateError, Tokenizer};
use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use xxhash_rust::xxh3::{Xxh3, xxh3_128_with_seed};

use crate::{intake::ChatPrompt, pieces::Pieces, segments::Segments};

const ROLES: [&str; 4] = ["user", "assistant", "system", "tool"];
/// Contents that templates are known to change: trimmed, stripped of thoughts, taken for something else.
const CONTENTS: [&str; 10] = [
    "no template has this in it",
    "",
    " ",
    "\n\n a \t\n",
    "<think>\nlong\n</think>\n\nshort",
    "{{ a }}{% b %}{# c #}",
    "x-anthropic-billing-header: a\nb",
    "{\"name\": \"f\", \"arguments\": {}}",
    "caf\u{e9} \u{4f60}\u{597d}\r\n<a>&amp;'\"\\",
    "<tool_call>\n{}\n</tool_call>\n<tool_response>\nx\n</tool_response>",
];

/// A tokenizer and chat template by parts.
#[derive(Debug)]
pub(crate) struct Turns {
    text: Arc<Tokenizer>,
    segments: Arc<Segments>,
    pieces: Pieces,
    /// What the first message of [`first`] alone gives, without tools or arguments.
    first_alone: Option<String>,
    /// Roles whose messages are their content between two fixed texts, where there are neither tools nor arguments.
    frames: Vec<Frame>,
}

/// How a role's message is written.
#[derive(Debug)]
struct Frame {
    role: &'static str,
    before: String,
    after: String,
}

/// A message of nothing but text.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PlainMessage<'a> {
    #[serde(borrow)]
    role: Cow<'a, str>,
    #[serde(borrow)]
    content: Cow<'a, str>,
}

/// The parts of one conversation, of which some are known.
#[derive(Debug)]
pub(crate) struct Parts {
    domain: u64,
    keys: Vec<u128>,
    known: Vec<Option<Arc<[u32]>>>,
    /// Bytes of the messages that are not known.
    pub(crate) new_bytes: usize,
}

impl Turns {
    /// `None` for a template whose conversations are more than their messages. Takes at most `cache_bytes` of memory.
    pub(crate) fn new(text: Arc<Tokenizer>, segments: Arc<Segments>, cache_bytes: usize) -> Option<Self> {
        // A date makes a part true for a day only.
        let has_clock = text.chat_template().is_some_and(|template| template.source().contains("strftime_now"));
        let first_alone = text.render_chat(&json!([first()]), None, false, &Map::new()).ok();
        let mut turns = Self { text, segments, pieces: Pieces::new(cache_bytes), first_alone, frames: Vec::new() };
        turns.frames = ROLES.into_iter().filter_map(|role| turns.frame(role)).collect();
        (!has_clock && probes().iter().all(|(conversation, tools)| turns.adds_up(conversation, tools.as_ref()))).then_some(turns)
    }

    /// The texts around a role's content; `None` where the content itself is changed.
    fn frame(&self, role: &'static str) -> Option<Frame> {
        let written = |content: &str| self.message_text(&[json!({ "role": role, "content": content })], 1, None, &Map::new()).ok()?;
        let probe = written(CONTENTS[0])?;
        let (before, after) = probe.split_once(CONTENTS[0])?;
        let frame = Frame { role, before: before.to_owned(), after: after.to_owned() };
        CONTENTS.iter().all(|content| written(content) == Some([before, *content, after].concat())).then_some(frame)
    }

    /// What a plain message adds that is not the first.
    fn framed(&self, message: &[u8]) -> Option<String> {
        let PlainMessage { role, content } = serde_json::from_slice(message).ok()?;
        let frame = self.frames.iter().find(|frame| frame.role == role)?;
        Some([&frame.before, &*content, &frame.after].concat())
    }

    /// Whether a conversation is its parts; one that the template refuses tells nothing.
    fn adds_up(&self, conversation: &[Value], tools: Option<&Value>) -> bool {
        let kwargs = Map::new();
        [false, true].into_iter().all(|opens| {
            let Ok(whole) = self.text.render_chat(&json!(conversation), tools, opens, &kwargs) else { return true };
            let parts = (0..conversation.len()).map(|index| self.message_text(&conversation[..=index], index, tools, &kwargs));
            let parts = parts.chain(opens.then(|| self.opening_text(tools, &kwargs).map(Some)));
            parts.collect::<Result<Option<String>, _>>().is_ok_and(|parts| parts == Some(whole))
        })
    }

    pub(crate) fn cached_bytes(&self) -> usize {
        self.pieces.bytes()
    }

    /// Looks the parts up, among those that were seen in the domain.
    pub(crate) fn find(&self, chat: &ChatPrompt, domain: u64) -> Parts {
        let mut variant = Xxh3::with_seed(domain);
        for part in [&chat.tools, &chat.kwargs] {
            variant.update(&(part.as_ref().map_or(u64::MAX, |part| part.len() as u64)).to_le_bytes());
            variant.update(part.as_deref().unwrap_or_default());
        }
        let variant = variant.digest();
        let mut keys: Vec<u128> = Vec::with_capacity(chat.messages.len() + 1);
        // The first message and the opening have seeds of their own, which differ from the others' in one bit.
        keys.extend(chat.messages.iter().enumerate().map(|(index, message)| xxh3_128_with_seed(message, variant ^ u64::from(index == 0))));
        if chat.add_generation_prompt {
            keys.push(xxh3_128_with_seed(b"", variant));
        }
        let known: Vec<_> = {
            let mut pieces = self.pieces.lock();
            keys.iter().map(|&key| pieces.get(key).cloned()).collect()
        };
        let new_bytes = chat.messages.iter().zip(&known).filter(|(_, known)| known.is_none()).map(|(message, _)| message.len()).sum();
        Parts { domain, keys, known, new_bytes }
    }

    /// The tokens of the whole. `None` where the conversation is not its parts.
    pub(crate) fn encode(&self, chat: &ChatPrompt, mut parts: Parts) -> Option<Vec<u32>> {
        let is_new = parts.known.iter().any(Option::is_none);
        if is_new {
            self.add_new(chat, &mut parts)?;
        }
        let known = || parts.known.iter().flatten();
        let mut tokens = Vec::with_capacity(known().map(|part| part.len()).sum());
        known().for_each(|part| tokens.extend_from_slice(part));
        Some(tokens)
    }

    fn add_new(&self, chat: &ChatPrompt, parts: &mut Parts) -> Option<()> {
        let (tools, kwargs) = (chat.tools(), chat.kwargs());
        for index in 0..parts.known.len() {
            if parts.known[index].is_some() {
                continue;
            }
            let is_plain = index > 0 && tools.is_none() && kwargs.is_empty();
            let framed = chat.messages.get(index).filter(|_| is_plain).and_then(|message| self.framed(message));
            let text = match chat.messages.get(index) {
                _ if framed.is_some() => Ok(framed),
                Some(message) => {
                    let message = [serde_json::from_slice::<Value>(message).ok()?];
                    self.message_text(&message, index, tools.as_ref(), &kwargs)
                }
                None => self.opening_text(tools.as_ref(), &kwargs).map(Some),
            };
            let text = text.ok()??;
            if index > 0 && !self.segments.begins_with_special(&text) {
                return None;
            }
            let tokens: Arc<[u32]> = self.segments.encode(&text, parts.domain).into();
            self.pieces.lock().insert(parts.keys[index], tokens.clone());
            parts.known[index] = Some(tokens);
        }
        Some(())
    }

    /// What the last of these messages adds, by a conversation in which it follows a first one of no other import.
    fn message_text(
        &self,
        messages: &[Value],
        index: usize,
        tools: Option<&Value>,
        kwargs: &Map<String, Value>,
    ) -> Result<Option<String>, TemplateError> {
        let Some(message) = messages.last() else { return Ok(None) };
        if index == 0 {
            return self.text.render_chat(&json!([message]), tools, false, kwargs).map(Some);
        }
        let alone = match &self.first_alone {
            Some(alone) if tools.is_none() && kwargs.is_empty() => Cow::Borrowed(alone),
            _ => Cow::Owned(self.text.render_chat(&json!([first()]), tools, false, kwargs)?),
        };
        let both = self.text.render_chat(&json!([first(), message]), tools, false, kwargs)?;
        Ok(both.strip_prefix(alone.as_str()).map(str::to_owned))
    }

    fn opening_text(&self, tools: Option<&Value>, kwargs: &Map<String, Value>) -> Result<String, TemplateError> {
        let without = self.text.render_chat(&json!([first()]), tools, false, kwargs)?;
        let with = self.text.render_chat(&json!([first()]), tools, true, kwargs)?;
        Ok(with.strip_prefix(&without).unwrap_or_default().to_owned())
    }
}

impl ChatPrompt {
    pub(crate) fn tools(&self) -> Option<Value> {
        self.tools.as_ref().map(read)
    }

    pub(crate) fn kwargs(&self) -> Map<String, Value> {
        self.kwargs.as_ref().map(read).unwrap_or_default()
    }
}

/// A part of a body, which was found to be JSON when the body was read.
fn read<T: serde::de::DeserializeOwned + Default>(json: &Bytes) -> T {
    serde_json::from_slice(json).unwrap_or_default()
}

fn first() -> Value {
    json!({ "role": "user", "content": "a" })
}

/// Conversations with what templates are known to treat apart: who speaks first, who follows whom, thoughts, tools and their results,
/// and the place from the end.
fn probes() -> Vec<(Vec<Value>, Option<Value>)> {
    let say = |role: &str, content: &str| json!({ "role": role, "content": content });
    let (system, user, assistant) = (say("system", "be brief"), say("user", " hi\n"), say("assistant", "hello "));
    let thought = say("assistant", "<think>\nlong\n</think>\n\nshort");
    let reasoned = json!({ "role": "assistant", "content": "so", "reasoning_content": "because", "reasoning": "because" });
    let call = json!({ "role": "assistant", "content": null, "tool_calls": [
        { "id": "c1", "type": "function", "function": { "name": "f", "arguments": "{\"a\": 1}" } },
    ] });
    let result = json!({ "role": "tool", "tool_call_id": "c1", "name": "f", "content": "42" });
    let tools = json!([{ "type": "function", "function": { "name": "f", "description": "d", "parameters": { "type": "object" } } }]);
    let list = |messages: &[&Value]| messages.iter().map(|&message| message.clone()).collect::<Vec<_>>();
    let conversations = [
        list(&[&user]),
        list(&[&system, &user]),
        list(&[&user, &assistant, &user, &assistant, &user]),
        list(&[&system, &user, &assistant, &user, &assistant]),
        list(&[&user, &user, &assistant, &assistant, &system, &user]),
        list(&[&system, &user, &thought, &user, &thought, &user, &thought]),
        list(&[&user, &reasoned, &user, &reasoned]),
        list(&[&system, &user, &call, &result, &assistant, &user, &call, &result, &result]),
        list(&[&user, &call, &result, &result, &user]),
    ];
    conversations.into_iter().flat_map(|conversation| [(conversation.clone(), None), (conversation, Some(tools.clone()))]).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use proptest::prelude::*;

    use super::*;

    static TURNS: LazyLock<Turns> = LazyLock::new(|| {
        let file = std::fs::read(baton_testkit::smollm2()).unwrap();
        let text = Arc::new(Tokenizer::from_gguf(&baton_gguf::Header::parse(&file).unwrap()).unwrap());
        let segments = Arc::new(Segments::new(text.clone(), 2 << 20).unwrap());
        Turns::new(text, segments, 1 << 20).expect("ChatML is written message by message")
    });

    fn chat(messages: &[Value], opens: bool) -> ChatPrompt {
        ChatPrompt {
            messages: messages.iter().map(|message| message.to_string().into()).collect(),
            tools: None,
            kwargs: None,
            add_generation_prompt: opens,
            continues: false,
            add_special: false,
        }
    }

    proptest! {
        #[test]
        fn parts_give_the_tokens_of_the_whole(
            messages in prop::collection::vec(("system|user|assistant|tool", "[a-z <|>\n]{0,60}|<\\|im_end\\|>\n?|\\PC{0,20}"), 1..8),
            opens: bool,
        ) {
            let messages: Vec<Value> = messages.into_iter().map(|(role, content)| json!({ "role": role, "content": content })).collect();
            let prompt = TURNS.text.render_chat(&json!(messages), None, opens, &Map::new()).unwrap();
            let whole = TURNS.text.encode(&prompt, false);
            let chat = chat(&messages, opens);
            // The second time from memory.
            for _ in 0..2 {
                prop_assert_eq!(TURNS.encode(&chat, TURNS.find(&chat, 0)), Some(whole.clone()));
            }
            prop_assert_eq!(TURNS.find(&chat, 0).new_bytes, 0);
        }
    }

    #[test]
    fn plain_messages_are_written_without_the_template() {
        let roles: Vec<&str> = TURNS.frames.iter().map(|frame| frame.role).collect();
        // A line of the system's may be left out.
        assert_eq!(roles, ["user", "assistant", "tool"]);
        assert_eq!(TURNS.framed(br#"{"content":"a\nb","role":"user"}"#).as_deref(), Some("<|im_start|>user\na\nb<|im_end|>\n"));
        for other in
            [r#"{"role":"user","content":null}"#, r#"{"role":"user","content":"a","name":"b"}"#, r#"{"role":"other","content":"a"}"#]
        {
            assert_eq!(TURNS.framed(other.as_bytes()), None);
        }
    }

    #[test]
    fn only_what_is_new_is_new() {
        let message = |number: u32| json!({ "role": "user", "content": format!("only what is new is new {number}") });
        let first = chat(&[message(1), message(2)], true);
        TURNS.encode(&first, TURNS.find(&first, 0)).unwrap();
        let longer = chat(&[message(1), message(2), message(3)], true);
        assert_eq!(TURNS.find(&longer, 0).new_bytes, longer.messages[2].len());
        let all = longer.messages.iter().map(Bytes::len).sum::<usize>();
        assert_eq!(TURNS.find(&longer, 7).new_bytes, all, "whoever is of another domain finds nothing");
        let tools = ChatPrompt { tools: Some(Bytes::from_static(b"[]")), ..first };
        assert!(TURNS.find(&tools, 0).new_bytes > 0, "tools may stand in any part");
    }
}
