//! The body of a request: read once, passed on as it came but for a few fields. What is passed on is never copied.

use std::{borrow::Cow, collections::VecDeque, fmt, ops::Range};

use bytes::Bytes;
use serde::{
    Deserializer, Serialize,
    de::{DeserializeOwned, DeserializeSeed, MapAccess, Visitor},
};
use serde_json::value::RawValue;

use crate::json::Key;

/// A JSON object whose fields are places in its bytes.
#[derive(Debug, Clone)]
pub(crate) struct JsonBody {
    bytes: Bytes,
    /// In order, repetitions included.
    fields: Vec<Field>,
    /// Elements of the field that was asked for as a list.
    elements: Vec<Range<usize>>,
}

#[derive(Debug, Clone)]
struct Field {
    name: Name,
    /// From the name's quote to the end of the value.
    entry: Range<usize>,
    value: Range<usize>,
}

#[derive(Debug, Clone)]
enum Name {
    /// Between its quotes.
    Plain(Range<usize>),
    /// Written with escapes.
    Escaped(String),
}

/// A change of one field.
#[derive(Debug)]
pub(crate) struct Edit {
    name: &'static str,
    /// `None` removes it.
    value: Option<String>,
}

impl Edit {
    pub(crate) fn remove(name: &'static str) -> Self {
        Self { name, value: None }
    }

    pub(crate) fn set(name: &'static str, value: &impl Serialize) -> Self {
        Self { name, value: Some(serde_json::to_string(value).expect("plain values serialize")) }
    }
}

impl JsonBody {
    /// Reads an object. The elements of the field `list`, which must be a list where it is there, are told apart in the same pass.
    pub(crate) fn parse(bytes: Bytes, list: Option<&'static str>) -> Result<Self, serde_json::Error> {
        let mut deserializer = serde_json::Deserializer::from_slice(&bytes);
        let entries = Fields { list }.deserialize(&mut deserializer)?;
        deserializer.end()?;
        let place = |value: &RawValue| {
            let start = value.get().as_ptr().addr() - bytes.as_ptr().addr();
            start..start + value.get().len()
        };
        let mut elements = Vec::new();
        let mut fields = Vec::with_capacity(entries.len());
        let mut at = 0;
        for (Key(name), value) in entries {
            // The object is valid: between two fields there is space and a comma, between a name and its value space and a colon.
            let start = find(&bytes, at, b'"');
            let name_end = string_end(&bytes, start);
            let value_start = skip_space(&bytes, find(&bytes, name_end, b':') + 1);
            at = match value {
                Entry::Plain(value) => value_start + value.get().len(),
                Entry::List(list) => {
                    elements = list.into_iter().map(place).collect();
                    let last = elements.last().map_or(value_start + 1, |last| last.end);
                    find(&bytes, last, b']') + 1
                }
            };
            let name = match name {
                Cow::Borrowed(_) => Name::Plain(start + 1..name_end - 1),
                Cow::Owned(name) => Name::Escaped(name),
            };
            fields.push(Field { name, entry: start..at, value: value_start..at });
        }
        Ok(Self { bytes, fields, elements })
    }

    /// The value of `name`, unless it is null; with repeated fields the last one, as engines read it.
    pub(crate) fn given(&self, name: &str) -> Option<Bytes> {
        let value = self.value(name)?;
        Some(self.bytes.slice_ref(value))
    }

    /// Reads the value of `name`: `None` when absent or null, an error when of another type.
    pub(crate) fn read<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, serde_json::Error> {
        self.value(name).map(serde_json::from_slice).transpose()
    }

    /// The elements of the list.
    pub(crate) fn elements(&self) -> impl Iterator<Item = Bytes> {
        self.elements.iter().map(|place| self.bytes.slice(place.clone()))
    }

    /// Whether there is a field of that name, be it null.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.fields.iter().any(|field| self.is_named(field, name))
    }

    /// Whether it has no fields but these, unless they are null.
    pub(crate) fn has_only(&self, names: &[&str]) -> bool {
        let is_one = |field: &Field| names.iter().any(|name| self.is_named(field, name));
        self.fields.iter().all(|field| is_one(field) || &self.bytes[field.value.clone()] == b"null")
    }

    /// The body in pieces, changed: a field stands where it first stood, or at the end when it is new.
    pub(crate) fn edited(&self, edits: &[Edit]) -> VecDeque<Bytes> {
        let mut pieces = Pieces { source: &self.bytes, done: VecDeque::with_capacity(4), own: String::from("{"), run: None, first: true };
        let mut placed = vec![false; edits.len()];
        for field in &self.fields {
            match edits.iter().position(|edit| self.is_named(field, edit.name)) {
                None => pieces.keep(&field.entry),
                Some(place) => {
                    pieces.end_run();
                    let is_repeated = std::mem::replace(&mut placed[place], true);
                    if let (Some(value), false) = (&edits[place].value, is_repeated) {
                        pieces.write(edits[place].name, value);
                    }
                }
            }
        }
        for (edit, placed) in edits.iter().zip(placed) {
            if let (Some(value), false) = (&edit.value, placed) {
                pieces.write(edit.name, value);
            }
        }
        pieces.finish()
    }

    fn value(&self, name: &str) -> Option<&[u8]> {
        let field = self.fields.iter().rev().find(|field| self.is_named(field, name))?;
        Some(&self.bytes[field.value.clone()]).filter(|value| *value != b"null")
    }

    fn is_named(&self, field: &Field, name: &str) -> bool {
        match &field.name {
            Name::Plain(place) => &self.bytes[place.clone()] == name.as_bytes(),
            Name::Escaped(escaped) => escaped == name,
        }
    }
}

/// A body under construction: runs of untouched fields as they stand, own text between them.
struct Pieces<'a> {
    source: &'a Bytes,
    done: VecDeque<Bytes>,
    own: String,
    run: Option<Range<usize>>,
    first: bool,
}

impl Pieces<'_> {
    fn keep(&mut self, entry: &Range<usize>) {
        if let Some(run) = &mut self.run {
            run.end = entry.end;
            return;
        }
        self.separate();
        self.done.push_back(std::mem::take(&mut self.own).into());
        self.run = Some(entry.clone());
    }

    fn write(&mut self, name: &str, value: &str) {
        self.end_run();
        self.separate();
        self.own.extend(["\"", name, "\":", value]);
    }

    fn separate(&mut self) {
        if !std::mem::replace(&mut self.first, false) {
            self.own.push(',');
        }
    }

    fn end_run(&mut self) {
        if let Some(run) = self.run.take() {
            self.done.push_back(self.source.slice(run));
        }
    }

    fn finish(mut self) -> VecDeque<Bytes> {
        self.end_run();
        self.own.push('}');
        self.done.push_back(self.own.into());
        self.done
    }
}

/// Reads the top-level fields in one pass.
struct Fields {
    list: Option<&'static str>,
}

enum Entry<'a> {
    Plain(&'a RawValue),
    List(Vec<&'a RawValue>),
}

impl<'de> DeserializeSeed<'de> for Fields {
    type Value = Vec<(Key<'de>, Entry<'de>)>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Fields {
    type Value = Vec<(Key<'de>, Entry<'de>)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
        let mut entries = Vec::with_capacity(16);
        while let Some(key) = map.next_key::<Key<'de>>()? {
            let value = if Some(&*key.0) == self.list { Entry::List(map.next_value()?) } else { Entry::Plain(map.next_value()?) };
            entries.push((key, value));
        }
        Ok(entries)
    }
}

/// Where `byte` stands next. It does stand there: the text is valid JSON.
fn find(bytes: &[u8], from: usize, byte: u8) -> usize {
    bytes[from..].iter().position(|&other| other == byte).map_or(bytes.len(), |offset| from + offset)
}

/// The place after the string that begins at `start`.
fn string_end(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while at < bytes.len() && bytes[at] != b'"' {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    at + 1
}

fn skip_space(bytes: &[u8], from: usize) -> usize {
    bytes[from..].iter().position(|byte| !byte.is_ascii_whitespace()).map_or(bytes.len(), |offset| from + offset)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::json::RawObject;

    fn parse(text: &str) -> JsonBody {
        JsonBody::parse(Bytes::from(text.to_owned()), Some("messages")).unwrap()
    }

    fn joined(pieces: VecDeque<Bytes>) -> String {
        String::from_utf8(Vec::from(pieces).concat()).unwrap()
    }

    #[test]
    fn untouched_fields_keep_their_bytes_and_stay_where_they_are() {
        let body = parse(r#"{ "z":0.10000000000000000001, "a":{"n": 1e2} ,"s":"\u00e9","big":123456789012345678901234567890}"#);
        let edited = body.edited(&[Edit::set("a", &1), Edit::set("new", &true), Edit::remove("none")]);
        assert_eq!(joined(edited), r#"{"z":0.10000000000000000001,"a":1,"s":"\u00e9","big":123456789012345678901234567890,"new":true}"#);
        // Two pieces of the client's own memory.
        let edited = body.edited(&[Edit::set("a", &1)]);
        assert!(edited.iter().filter(|piece| piece.len() > 20).all(|piece| body.bytes.as_ptr_range().contains(&piece.as_ptr())));
    }

    #[test]
    fn a_repeated_field_counts_as_its_last_and_goes_as_a_whole() {
        let body = parse(r#"{"salt":"a","b":1,"s\u0061lt":"c"}"#);
        assert_eq!(body.read::<String>("salt").unwrap().as_deref(), Some("c"));
        assert_eq!(joined(body.edited(&[Edit::set("salt", &"d")])), r#"{"salt":"d","b":1}"#);
        assert_eq!(joined(body.edited(&[Edit::remove("salt")])), r#"{"b":1}"#);
    }

    #[test]
    fn elements_are_told_apart_whatever_stands_between_them() {
        let body = parse("{\"x\": [1], \"messages\" :\t[ {\"a\":\"]\"} ,\n2,[3] ] , \"y\":null}");
        let elements: Vec<Bytes> = body.elements().collect();
        assert_eq!(elements, [r#"{"a":"]"}"#, "2", "[3]"]);
        assert_eq!(body.given("messages").unwrap(), "[ {\"a\":\"]\"} ,\n2,[3] ]");
        assert!(body.has("y") && body.given("y").is_none());
        assert!(body.has_only(&["x", "messages"]) && !body.has_only(&["messages", "y"]));
        assert!(parse(r#"{"messages":[]}"#).elements().next().is_none());
        assert!(JsonBody::parse(Bytes::from_static(b"{\"messages\":{}}"), Some("messages")).is_err());
        assert!(JsonBody::parse(Bytes::from_static(b"{\"messages\":{}}"), None).is_ok());
    }

    proptest! {
        /// Against the plain way: read all fields, change the list, write it anew.
        #[test]
        fn edits_are_those_of_an_object_written_anew(
            entries in prop::collection::vec(("[abm\\\\]{1,2}", "1|null|\"x\"|\\{\"a\": \\[\\]\\}|\\[ 1, 2\\]"), 0..6),
            set in prop::option::of(0u8..9),
            space in "[ \n]{0,2}",
        ) {
            let fields = entries.iter().map(|(name, value)| format!("{space}{}{space}:{space}{value}{space}", serde_json::to_string(name).unwrap()));
            let text = format!("{space}{{{space}{}}}{space}", fields.collect::<Vec<_>>().join(","));
            let body = JsonBody::parse(Bytes::from(text.clone()), None).unwrap();
            let mut object: RawObject = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(body.given("a").map(|value| value.to_vec()), object.given("a").map(|value| value.get().as_bytes().to_vec()));
            let mut edits = vec![Edit::remove("b")];
            object.remove("b");
            if let Some(value) = set {
                edits.push(Edit::set("a", &value));
                object.set("a", &value);
            }
            let edited: serde_json::Value = serde_json::from_str(&joined(body.edited(&edits))).unwrap();
            let anew: serde_json::Value = serde_json::from_slice(&object.to_vec()).unwrap();
            prop_assert_eq!(edited.to_string(), anew.to_string());
        }
    }
}
