//! The event that nearly all are: output of one choice and nothing else to be understood. It is read where it lies, in one pass and
//! without a tree; whatever is not exactly of this shape is [`crate::chunk`]'s.

use std::ops::Range;

use crate::intake::Api;

/// Output of one choice, as places in the event's data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plain<'a> {
    data: &'a [u8],
    /// Value of `id`, with its quotes.
    id: Range<usize>,
    created: Option<Range<usize>>,
    pub(crate) choice: u32,
    /// Tokens: counted where the engine lists them, else one for any text; never 0.
    pub(crate) count: u32,
    /// The text as a JSON string.
    text: Range<usize>,
    /// The list of token ids, where there is one.
    token_ids: Option<Range<usize>>,
}

impl<'a> Plain<'a> {
    /// `None` for an event of any other shape.
    pub(crate) fn read(api: Api, data: &'a [u8]) -> Option<Self> {
        std::str::from_utf8(data).ok()?;
        let mut scan = Scan { data, at: 0 };
        let mut plain = Self { data, id: 0..0, created: None, choice: 0, count: 0, text: 0..0, token_ids: None };
        let mut has_choice = false;
        scan.object(|scan, key| {
            match key {
                b"id" => plain.id = scan.string()?,
                b"created" => plain.created = Some(scan.digits(18)?),
                b"object" | b"model" => _ = scan.string()?,
                b"choices" => {
                    scan.take(b'[')?;
                    plain.read_choice(api, scan)?;
                    scan.take(b']')?;
                    has_choice = true;
                }
                b"usage" | b"prompt_token_ids" | b"prompt_text" | b"system_fingerprint" | b"service_tier" => scan.null()?,
                _ => return None,
            }
            Some(())
        })?;
        (scan.at == data.len() && has_choice && !plain.id.is_empty() && plain.count > 0).then_some(plain)
    }

    fn read_choice(&mut self, api: Api, scan: &mut Scan<'a>) -> Option<()> {
        scan.object(|scan, key| {
            match (key, api) {
                (b"index", _) => self.choice = scan.number()?,
                (b"delta", Api::Chat) => self.read_delta(scan)?,
                (b"text", Api::Completions) => self.text = scan.string()?,
                (b"token_ids", _) if scan.peek() == Some(b'[') => {
                    let start = scan.at;
                    self.count = scan.token_list()?;
                    self.token_ids = Some(start..scan.at);
                }
                (b"token_ids" | b"logprobs" | b"finish_reason" | b"stop_reason" | b"prompt_token_ids", _) => scan.null()?,
                _ => return None,
            }
            Some(())
        })?;
        if self.text.is_empty() {
            return None;
        }
        if self.count == 0 {
            self.count = u32::from(self.text.len() > 2);
        }
        Some(())
    }

    fn read_delta(&mut self, scan: &mut Scan<'a>) -> Option<()> {
        scan.object(|scan, key| {
            match key {
                b"content" => self.text = scan.string()?,
                b"role" | b"reasoning" | b"reasoning_content" | b"refusal" | b"tool_calls" | b"function_call" => scan.null()?,
                _ => return None,
            }
            Some(())
        })
    }

    /// The text as the JSON string that it is.
    pub(crate) fn text(&self) -> &'a [u8] {
        &self.data[self.text.clone()]
    }

    pub(crate) fn created(&self) -> Option<&'a [u8]> {
        self.created.clone().map(|place| &self.data[place])
    }

    pub(crate) fn token_ids(&self) -> impl Iterator<Item = u32> + use<'a> {
        let list = self.token_ids.clone().map_or(&[][..], |place| &self.data[place.start + 1..place.end - 1]);
        // Digits, as was seen when they were counted; an empty list has no digits.
        list.split(|&byte| byte == b',').filter(|id| !id.is_empty()).map(number_of)
    }

    /// Appends the event for a client: under another id, which is JSON, and without token ids where it has not asked for them.
    pub(crate) fn write(&self, id: &str, with_token_ids: bool, to: &mut Vec<u8>) {
        let hidden = self.token_ids.clone().filter(|_| !with_token_ids);
        let mut changes = [Some((self.id.clone(), id)), hidden.map(|place| (place, "null"))];
        changes.sort_by_key(|change| change.as_ref().map_or(usize::MAX, |(place, _)| place.start));
        to.reserve(self.data.len() + id.len() + 16);
        to.extend_from_slice(b"data: ");
        let mut at = 0;
        for (place, new) in changes.into_iter().flatten() {
            to.extend_from_slice(&self.data[at..place.start]);
            to.extend_from_slice(new.as_bytes());
            at = place.end;
        }
        to.extend_from_slice(&self.data[at..]);
        to.extend_from_slice(b"\n\n");
    }
}

/// What the events of a stream have in common: all but the text and the token ids, mostly.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    /// Up to the text.
    before: Vec<u8>,
    /// From the text to the token ids, or to the end.
    between: Vec<u8>,
    /// After the token ids, where there are any.
    after: Option<Vec<u8>>,
    id: Range<usize>,
    created: Option<Range<usize>>,
    choice: u32,
}

impl Shape {
    /// `None` for an event whose id is not told before its text.
    pub(crate) fn of(plain: &Plain<'_>) -> Option<Self> {
        let Plain { data, text, id, created, token_ids, choice, .. } = plain;
        let is_before = |place: &Range<usize>| place.end <= text.start;
        let ids_follow = token_ids.as_ref().is_none_or(|ids| text.end <= ids.start);
        let between = text.end..token_ids.as_ref().map_or(data.len(), |ids| ids.start);
        (is_before(id) && created.as_ref().is_none_or(is_before) && ids_follow).then(|| Self {
            before: data[..text.start].to_vec(),
            between: data[between].to_vec(),
            after: token_ids.as_ref().map(|ids| data[ids.end..].to_vec()),
            id: id.clone(),
            created: created.clone(),
            choice: *choice,
        })
    }

    /// What [`Plain::read`] gives for an event of this shape; `None` for any other.
    pub(crate) fn read<'a>(&self, data: &'a [u8]) -> Option<Plain<'a>> {
        let mut scan = Scan { data, at: self.before.len() };
        data.starts_with(&self.before).then_some(())?;
        let text = scan.string()?;
        std::str::from_utf8(&data[text.clone()]).ok()?;
        data[scan.at..].starts_with(&self.between).then(|| scan.at += self.between.len())?;
        let (mut token_ids, mut count) = (None, 0);
        if let Some(after) = &self.after {
            let start = scan.at;
            count = scan.token_list()?;
            token_ids = Some(start..scan.at);
            data[scan.at..].starts_with(after).then(|| scan.at += after.len())?;
        }
        if count == 0 {
            count = u32::from(text.len() > 2);
        }
        let Self { id, created, choice, .. } = self;
        let plain = Plain { data, id: id.clone(), created: created.clone(), choice: *choice, count, text, token_ids };
        (scan.at == data.len() && count > 0).then_some(plain)
    }
}

fn number_of(digits: &[u8]) -> u32 {
    digits.iter().fold(0, |number, digit| number * 10 + u32::from(digit - b'0'))
}

/// JSON without spaces, as engines write it. Every method gives `None` where something else stands.
struct Scan<'a> {
    data: &'a [u8],
    at: usize,
}

impl<'a> Scan<'a> {
    fn peek(&self) -> Option<u8> {
        self.data.get(self.at).copied()
    }

    fn take(&mut self, byte: u8) -> Option<()> {
        (self.peek()? == byte).then(|| self.at += 1)
    }

    /// An object with at least one field, each field once; `value` reads the value of a key.
    fn object(&mut self, mut value: impl FnMut(&mut Self, &'a [u8]) -> Option<()>) -> Option<()> {
        let mut seen = Seen::default();
        self.take(b'{')?;
        loop {
            let key = self.string()?;
            let key = &self.data[key.start + 1..key.end - 1];
            seen.add(key)?;
            self.take(b':')?;
            value(self, key)?;
            match self.peek()? {
                b',' => self.at += 1,
                _ => return self.take(b'}'),
            }
        }
    }

    /// A string; the place includes its quotes.
    fn string(&mut self) -> Option<Range<usize>> {
        let start = self.at;
        self.take(b'"')?;
        loop {
            match self.peek()? {
                b'"' => {
                    self.at += 1;
                    return Some(start..self.at);
                }
                b'\\' => self.escape()?,
                0..0x20 => return None,
                _ => self.at += 1,
            }
        }
    }

    fn escape(&mut self) -> Option<()> {
        let rest = &self.data[self.at + 1..];
        self.at += match rest.first()? {
            b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => 2,
            b'u' if rest.get(1..5)?.iter().all(u8::is_ascii_hexdigit) => 6,
            _ => return None,
        };
        Some(())
    }

    fn null(&mut self) -> Option<()> {
        self.data[self.at..].starts_with(b"null").then(|| self.at += 4)
    }

    /// A whole number of at most `max` digits.
    fn digits(&mut self, max: usize) -> Option<Range<usize>> {
        let digits = self.data[self.at..].iter().take(max + 1).take_while(|byte| byte.is_ascii_digit()).count();
        let has_leading_zero = digits > 1 && self.peek() == Some(b'0');
        // A fraction or an exponent would follow at once.
        let start = self.at;
        self.at += digits;
        let ends = matches!(self.peek(), Some(b',' | b'}' | b']'));
        (digits > 0 && digits <= max && !has_leading_zero && ends).then_some(start..self.at)
    }

    /// A whole number below 10^9.
    fn number(&mut self) -> Option<u32> {
        let digits = self.digits(9)?;
        Some(number_of(&self.data[digits]))
    }

    /// A list of token ids, which may be empty; how many there are.
    fn token_list(&mut self) -> Option<u32> {
        self.take(b'[')?;
        if self.take(b']').is_some() {
            return Some(0);
        }
        let mut count = 0;
        loop {
            self.digits(9)?;
            count += 1;
            match self.peek()? {
                b',' => self.at += 1,
                _ => return self.take(b']').map(|()| count),
            }
        }
    }
}

/// Keys of one object, of which none may come twice. More than there are known ones is nothing known.
#[derive(Default)]
struct Seen<'a> {
    keys: [&'a [u8]; 12],
    count: usize,
}

impl<'a> Seen<'a> {
    fn add(&mut self, key: &'a [u8]) -> Option<()> {
        if self.keys[..self.count].contains(&key) {
            return None;
        }
        *self.keys.get_mut(self.count)? = key;
        self.count += 1;
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use baton_wire::sse::Decoder;
    use proptest::prelude::*;

    use super::*;
    use crate::{
        chunk::{Chunk, ClientView, Reading},
        intake::Wishes,
    };

    fn chunk(api: Api, data: &[u8]) -> Option<Chunk<'_>> {
        match Reading::of(api, data) {
            Ok(Reading::Chunk(chunk)) => Some(*chunk),
            Ok(Reading::Error(_)) | Err(_) => None,
        }
    }

    /// What is read here must mean and give the same as what is read there.
    fn agrees(api: Api, data: &[u8]) -> bool {
        let Some(plain) = Plain::read(api, data) else { return false };
        if let Some(shape) = Shape::of(&plain) {
            assert_eq!(shape.read(data).as_ref(), Some(&plain));
        }
        let text = String::from_utf8_lossy(data);
        let slow = chunk(api, data).unwrap_or_else(|| panic!("no chunk: {text}"));
        assert!(slow.usage.is_none() && slow.pieces.len() == 1, "{text}");
        let piece = &slow.pieces[0];
        assert_eq!((plain.choice, plain.count, &None), (piece.choice, piece.count, &piece.finish), "{text}");
        assert_eq!(plain.token_ids().collect::<Vec<_>>(), piece.token_ids, "{text}");
        for token_ids in [false, true] {
            let wishes = Wishes { stream: true, token_ids, ..Wishes::default() };
            let mut view = ClientView::new(wishes, "chatcmpl-\"x\"".into());
            // The first chunk tells the view what attempts share.
            let first = view.event(chunk(api, data).unwrap()).unwrap();
            assert!(view.knows(&plain));
            let mut written = Vec::new();
            view.write(&plain, &mut written);
            assert_eq!(String::from_utf8_lossy(&written), String::from_utf8_lossy(&first));
        }
        true
    }

    fn recorded(text: &str) -> Vec<Vec<u8>> {
        let body = text.split_once("\r\n\r\n").unwrap().1;
        // Chunk sizes stand alone on their lines, so the decoder takes them for fields that it does not know.
        let events = Decoder::default().push(body.as_bytes()).map(|event| event.unwrap().data).collect::<Vec<_>>();
        events.into_iter().flatten().map(|data| data.to_vec()).collect()
    }

    #[test]
    fn recorded_events_are_read_alike_and_most_are_plain() {
        let recordings = [
            (Api::Chat, include_str!("../tests/fixtures/chat-stream.resp")),
            (Api::Chat, include_str!("../tests/fixtures/chat-stream-no-usage.resp")),
            (Api::Chat, include_str!("../tests/fixtures/chat-stream-logprobs.resp")),
            (Api::Chat, include_str!("../tests/fixtures/chat-tool-named-stream.resp")),
            (Api::Chat, include_str!("../tests/fixtures/chat-tool-required-stream.resp")),
            (Api::Completions, include_str!("../tests/fixtures/completion-stream.resp")),
            (Api::Completions, include_str!("../tests/fixtures/completion-n2-stream.resp")),
            (Api::Completions, include_str!("../tests/fixtures/completion-stream-logprobs.resp")),
        ];
        let mut plain = Vec::new();
        for (api, recording) in recordings {
            let events = recorded(recording);
            assert!(!events.is_empty());
            plain.push(events.iter().filter(|event| agrees(api, event)).count() * 2 > events.len());
        }
        assert_eq!(plain, [true, true, false, false, false, true, true, false], "logprobs and tool calls are not plain");
    }

    #[test]
    fn what_is_out_of_the_ordinary_is_left_to_the_other_reader() {
        let plain =
            r#"{"id":"a","created":5,"model":"m","choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null,"token_ids":[7,8]}]}"#;
        assert!(agrees(Api::Chat, plain.as_bytes()));
        for (from, to) in [
            ("\"x\"", "\"\u{1}\""),
            ("\"x\"", r#""\q""#),
            ("\"x\"", r#""\u12g4""#),
            ("null", "\"stop\""),
            ("[7,8]", "[07]"),
            ("[7,8]", "[7,]"),
            ("[7,8]", "[7.0]"),
            ("[7,8]", "[4294967296]"),
            ("\"created\":5", "\"created\":5e1"),
            ("\"created\":5", "\"error\":null"),
            ("\"index\":0", "\"index\":0,\"index\":1"),
            ("\"model\":\"m\"", "\"usage\":{}"),
            ("{\"content\":\"x\"}", "{\"content\":\"x\",\"new\":1}"),
            ("{\"id\"", "{ \"id\""),
            ("]}]}", "]}]}x"),
            ("]}]}", "]},{\"index\":1}]}"),
            ("]}]}", "]}"),
        ] {
            let odd = plain.replacen(from, to, 1);
            assert!(odd != plain && Plain::read(Api::Chat, odd.as_bytes()).is_none(), "{odd}");
        }
        assert!(Plain::read(Api::Completions, plain.as_bytes()).is_none());
        assert!(Plain::read(Api::Chat, &[plain.as_bytes(), b"\xff"].concat()).is_none());
    }

    #[test]
    fn an_event_of_another_shape_is_not_taken_for_one_of_this() {
        let event =
            |text: &str, ids: &str, end: &str| format!(r#"{{"id":"a","choices":[{{"delta":{{"content":{text}}},"token_ids":{ids}{end}"#);
        let first = event("\"x\"", "[7]", "}]}");
        let shape = Shape::of(&Plain::read(Api::Chat, first.as_bytes()).unwrap()).unwrap();
        for (text, ids, end) in [
            ("\"y\\n\u{e9}\"", "[1,2]", "}]}"),
            ("\"\"", "[]", "}]}"),
            ("\"\"", "[5]", "}]}"),
            ("null", "[7]", "}]}"),
            ("\"x\"", "null", "}]}"),
            ("\"x\"", "[7]", "}]"),
            ("\"x\"", "[7]", "}],\"usage\":{}}"),
            ("\"x", "[7]", "}]}"),
        ] {
            let other = event(text, ids, end);
            let alike = shape.read(other.as_bytes());
            assert!(alike.is_none() || alike == Plain::read(Api::Chat, other.as_bytes()), "{other}");
            assert_eq!(
                alike.is_some(),
                ids.starts_with('[') && ids != "[]" && text.ends_with('"') && text != "\"x" && end == "}]}",
                "{other}"
            );
        }
        assert_eq!(shape.read(b"{"), None);
        let garbled = [&first.as_bytes()[..shape.before.len()], b"\"\xff\"", &first.as_bytes()[shape.before.len() + 3..]].concat();
        assert_eq!(shape.read(&garbled), None);
    }

    /// JSON values, most of them such as stand in events.
    fn value() -> impl Strategy<Value = String> {
        prop_oneof![
            4 => "null|0|7|1795962766|\"x\"|\"\"|\\[\\]|\\[7\\]|\\[7,89\\]",
            1 => "-1|1\\.5|true|\\{\\}|\\[null\\]|\"\\\\u00e9\"|\"\\\\ud800\"|\"\\\\n\u{e9}\"|\" |nul|01",
        ]
    }

    fn object(names: &'static [&'static str]) -> impl Strategy<Value = Vec<(&'static str, String)>> {
        prop::collection::vec((prop::sample::select(names), value()), 0..4)
    }

    fn write(fields: &[(&str, String)]) -> String {
        let fields: Vec<String> = fields.iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
        format!("{{{}}}", fields.join(","))
    }

    proptest! {
        #[test]
        fn whatever_is_read_is_read_alike(
            mut top in object(&["id", "object", "created", "model", "usage", "prompt_token_ids", "system_fingerprint", "error", "x"]),
            mut choice in object(&["index", "token_ids", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "x"]),
            mut delta in object(&["role", "content", "reasoning", "tool_calls", "x"]),
            content in value(),
            completions: bool,
            garble in prop::option::of((0usize..200, "[\\[\\]{}\",:0 \\\\]")),
        ) {
            top.push(("id", "\"a\"".into()));
            delta.push(("content", content.clone()));
            choice.push(if completions { ("text", content) } else { ("delta", write(&delta)) });
            top.push(("choices", format!("[{}]", write(&choice))));
            let mut data = write(&top);
            if let Some((at, by)) = garble && at <= data.len() && data.is_char_boundary(at) {
                data.insert_str(at, &by);
            }
            agrees(if completions { Api::Completions } else { Api::Chat }, data.as_bytes());
        }
    }
}
