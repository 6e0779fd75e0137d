//! Server-sent events (WHATWG HTML, section 9.2), as OpenAI servers use them.

use bytes::{Bytes, BytesMut};
use memchr::{memchr2, memmem};
use serde::Serialize;

/// Ends every OpenAI stream.
pub const DONE: &[u8] = b"data: [DONE]\n\n";

/// Default bound on one event: a chunk with logprobs is a few KiB, a first chunk with 100k prompt token ids under 1 MiB.
pub const EVENT_BYTES_MAX: usize = 8 << 20;

/// One event: what stands between two blank lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The bytes as they came, with the blank line that ends them. All events' raw bytes joined are the stream, so a proxy can pass
    /// them on untouched.
    pub raw: Bytes,
    /// Value of the `event` field.
    pub name: Option<Bytes>,
    /// Value of the `data` field, its lines joined by `\n`; `None` for a comment or a keep-alive.
    pub data: Option<Bytes>,
}

impl Event {
    pub fn is_done(&self) -> bool {
        self.data.as_deref() == Some(b"[DONE]")
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SseError {
    /// The decoder gives nothing after this.
    #[error("an event has more than {limit} bytes; the sender does not speak SSE or the limit is too low")]
    EventTooLong { limit: usize },
}

/// Incremental decoder: any split of the same bytes gives the same events. Holds at most one event of the configured size and the
/// last pushed chunk.
#[derive(Debug)]
pub struct Decoder {
    buffer: BytesMut,
    /// Start of the line being read.
    line: usize,
    /// Everything before it is known to end no line.
    scanned: usize,
    limit: usize,
    at_start: bool,
    failed: bool,
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new(EVENT_BYTES_MAX)
    }
}

impl Decoder {
    /// A decoder that takes events of up to `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self { buffer: BytesMut::new(), line: 0, scanned: 0, limit, at_start: true, failed: false }
    }

    /// Takes the next bytes and yields the events that they complete. Events not taken from the iterator come with the next push.
    pub fn push(&mut self, bytes: &[u8]) -> Events<'_> {
        self.buffer.extend_from_slice(bytes);
        Events { decoder: self }
    }

    /// Bytes of an event that is not complete.
    pub fn pending(&self) -> &[u8] {
        &self.buffer
    }

    /// At the end of the stream: an event whose last line ends in a lone `\r`, if there is one. Bytes of a truncated event stay in
    /// [`Self::pending`].
    pub fn finish(&mut self) -> Option<Event> {
        let blank = self.buffer.len() == self.line + 1 && self.buffer.last() == Some(&b'\r');
        blank.then(|| self.take_event(self.buffer.len()))
    }

    fn next_event(&mut self) -> Result<Option<Event>, SseError> {
        if self.failed {
            return Err(SseError::EventTooLong { limit: self.limit });
        }
        while let Some((content, after)) = self.next_line_end() {
            let blank = content == self.line;
            self.line = after;
            self.scanned = after;
            if after > self.limit {
                return self.fail();
            }
            if blank {
                return Ok(Some(self.take_event(after)));
            }
        }
        if self.buffer.len() > self.limit { self.fail() } else { Ok(None) }
    }

    fn fail(&mut self) -> Result<Option<Event>, SseError> {
        self.failed = true;
        self.buffer.clear();
        Err(SseError::EventTooLong { limit: self.limit })
    }

    /// End of the current line's content and start of the next line. A `\r` at the end of the buffer may be half of `\r\n`.
    fn next_line_end(&mut self) -> Option<(usize, usize)> {
        let Some(offset) = memchr2(b'\n', b'\r', &self.buffer[self.scanned..]) else {
            self.scanned = self.buffer.len();
            return None;
        };
        let end = self.scanned + offset;
        match (self.buffer[end], self.buffer.get(end + 1)) {
            (b'\r', None) => {
                self.scanned = end;
                None
            }
            (b'\r', Some(b'\n')) => Some((end, end + 2)),
            _ => Some((end, end + 1)),
        }
    }

    fn take_event(&mut self, length: usize) -> Event {
        let raw = self.buffer.split_to(length).freeze();
        self.line = 0;
        self.scanned = 0;
        let body = if std::mem::take(&mut self.at_start) && raw.starts_with(b"\xef\xbb\xbf") { raw.slice(3..) } else { raw.clone() };
        let (name, data) = fields(&body);
        Event { raw, name, data }
    }
}

/// Events that one push completed.
#[derive(Debug)]
pub struct Events<'a> {
    decoder: &'a mut Decoder,
}

impl Iterator for Events<'_> {
    type Item = Result<Event, SseError>;

    /// Gives the error each time once the decoder has failed, so leave the loop at the first.
    fn next(&mut self) -> Option<Self::Item> {
        self.decoder.next_event().transpose()
    }
}

/// Name and data of an event's lines. One line of data is a view into `raw`; several are copied.
fn fields(raw: &Bytes) -> (Option<Bytes>, Option<Bytes>) {
    // What nearly all events are: one line of data.
    if let Some(data) = raw.strip_prefix(b"data: ").and_then(|rest| rest.strip_suffix(b"\n\n"))
        && memchr2(b'\n', b'\r', data).is_none()
    {
        return (None, Some(raw.slice_ref(data)));
    }
    let (mut name, mut data) = (None, None::<Bytes>);
    let mut joined = BytesMut::new();
    for line in raw.split(|&byte| byte == b'\n' || byte == b'\r').filter(|line| !line.is_empty()) {
        let (field, value) = match line.iter().position(|&byte| byte == b':') {
            Some(colon) => (&line[..colon], line[colon + 1..].strip_prefix(b" ").unwrap_or(&line[colon + 1..])),
            None => (line, &line[line.len()..]),
        };
        match (field, &data) {
            (b"event", _) => name = Some(raw.slice_ref(value)),
            (b"data", None) => data = Some(raw.slice_ref(value)),
            (b"data", Some(first)) => {
                if joined.is_empty() {
                    joined.extend_from_slice(first);
                }
                joined.extend_from_slice(b"\n");
                joined.extend_from_slice(value);
            }
            // Comments have an empty field name; `id` and `retry` mean nothing for these streams.
            _ => {}
        }
    }
    (name, if joined.is_empty() { data } else { Some(joined.freeze()) })
}

/// An event without a name whose data is the JSON of `value`.
pub fn encode_json(value: &impl Serialize) -> Bytes {
    let mut bytes = Vec::new();
    write_json(value, &mut bytes);
    bytes.into()
}

/// Appends what [`encode_json`] gives.
pub fn write_json(value: &impl Serialize, out: &mut Vec<u8>) {
    out.extend_from_slice(b"data: ");
    serde_json::to_writer(&mut *out, value).expect("wire types serialize");
    out.extend_from_slice(b"\n\n");
}

/// Takes the first of events that [`write_json`] wrote, or of [`DONE`], off the front; copies nothing.
pub fn take_written(events: &mut Bytes) -> Bytes {
    let end = memmem::find(events, b"\n\n").map_or(events.len(), |at| at + 2);
    events.split_to(end)
}

/// An event with any data; each line of it becomes one `data` field. A lone `\r` counts as a line end, as it does for every reader.
pub fn encode(name: Option<&str>, data: &str) -> Bytes {
    let mut bytes = String::with_capacity(data.len() + 16);
    if let Some(name) = name {
        bytes.extend(["event: ", name, "\n"]);
    }
    for line in data.replace("\r\n", "\n").split(['\n', '\r']) {
        bytes.extend(["data: ", line, "\n"]);
    }
    bytes.push('\n');
    bytes.into()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode_whole(bytes: &[u8]) -> Vec<Event> {
        decode_chunks([bytes])
    }

    fn decode_chunks<'a>(chunks: impl IntoIterator<Item = &'a [u8]>) -> Vec<Event> {
        let mut decoder = Decoder::default();
        let mut events = Vec::new();
        for chunk in chunks {
            events.extend(decoder.push(chunk).map(Result::unwrap));
        }
        events.extend(decoder.finish());
        events
    }

    fn data(events: &[Event]) -> Vec<Option<&str>> {
        events.iter().map(|event| event.data.as_deref().map(|data| std::str::from_utf8(data).unwrap())).collect()
    }

    #[test]
    fn fields_follow_the_standard() {
        let events =
            decode_whole(b"\xef\xbb\xbfdata: a\n\n: keep-alive\n\nevent: x\ndata:b\ndata\ndata:  c\r\n\r\nid: 1\n\ndata\n\ndata: cut");
        assert_eq!(data(&events), [Some("a"), None, Some("b\n\n c"), None, Some("")]);
        assert_eq!(events[2].name.as_deref(), Some(b"x".as_slice()));
    }

    #[test]
    fn a_lone_carriage_return_ends_a_line_too() {
        assert_eq!(data(&decode_whole(b"data: a\r\rdata: b\rdata: c\r\r")), [Some("a"), Some("b\nc")]);
    }

    #[test]
    fn an_event_past_the_bound_is_an_error_that_lasts() {
        let mut decoder = Decoder::new(16);
        assert_eq!(decoder.push(b"data: 12345678\n\n").next().unwrap().unwrap().data.as_deref(), Some(b"12345678".as_slice()));
        let error = Err(SseError::EventTooLong { limit: 16 });
        assert_eq!(decoder.push(b"data: 123456789\n\n").next(), Some(error.clone()));
        assert_eq!(decoder.push(b"data: 1\n\n").next(), Some(error));
        assert!(Decoder::new(16).push(&[b'x'; 17]).next().unwrap().is_err());
    }

    #[test]
    fn events_left_in_the_iterator_come_with_the_next_push() {
        let mut decoder = Decoder::default();
        assert!(decoder.push(b"data: a\n\ndata: b\n\n").next().is_some());
        let rest: Vec<_> = decoder.push(b"").map(Result::unwrap).collect();
        assert_eq!(data(&rest), [Some("b")]);
    }

    #[test]
    fn written_events_are_taken_one_by_one() {
        let mut out = Vec::new();
        write_json(&"a\n\nb", &mut out);
        write_json(&serde_json::json!({ "c": "\n\n" }), &mut out);
        out.extend_from_slice(DONE);
        let mut events = Bytes::from(out);
        let taken: Vec<Bytes> = std::iter::from_fn(|| (!events.is_empty()).then(|| take_written(&mut events))).collect();
        assert_eq!(taken, [encode_json(&"a\n\nb"), encode_json(&serde_json::json!({ "c": "\n\n" })), Bytes::from_static(DONE)]);
    }

    proptest! {
        #[test]
        fn any_split_gives_the_same_events(stream in "(data|event|: |:|x|é|\r|\n|\r\n|\n\n){0,40}", cuts in prop::collection::vec(0usize..200, 0..6)) {
            let bytes = stream.as_bytes();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(bytes.len())).chain([0, bytes.len()]).collect();
            cuts.sort_unstable();
            let chunks = cuts.windows(2).map(|cut| &bytes[cut[0]..cut[1]]);
            let whole = decode_whole(bytes);
            prop_assert_eq!(&decode_chunks(chunks), &whole);
            // Raw bytes joined are the stream, up to what no blank line has ended.
            let raw: Vec<u8> = whole.iter().flat_map(|event| event.raw.to_vec()).collect();
            prop_assert!(bytes.starts_with(&raw));
        }

        #[test]
        fn what_is_encoded_comes_back(text in "[a-z :\u{e9}\n]{0,40}", name in prop::option::of("[a-z]{1,8}")) {
            let events = decode_whole(&encode(name.as_deref(), &text));
            prop_assert_eq!(events.len(), 1);
            prop_assert_eq!(events[0].data.as_deref(), Some(text.as_bytes()));
            prop_assert_eq!(events[0].name.as_deref(), name.as_deref().map(str::as_bytes));
        }
    }
}
