//! JSON objects of which only a few fields concern the gateway; all others keep their bytes.

use std::{borrow::Cow, fmt};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{MapAccess, Visitor},
    ser::SerializeMap,
};
use serde_json::value::RawValue;

/// An object whose fields keep order, repetition and exact bytes: a number is never parsed and printed again, so none can change.
#[derive(Debug, Clone, Default)]
pub(crate) struct RawObject<'a>(Vec<(Cow<'a, str>, Cow<'a, RawValue>)>);

impl<'a> RawObject<'a> {
    /// The value of `name`; with repeated fields the last one, as engines read it.
    pub(crate) fn raw(&self, name: &str) -> Option<&RawValue> {
        self.0.iter().rev().find(|(field, _)| field == name).map(|(_, value)| &**value)
    }

    /// As [`Self::raw`], but an explicit null counts as absent.
    pub(crate) fn given(&self, name: &str) -> Option<&RawValue> {
        self.raw(name).filter(|value| value.get() != "null")
    }

    /// As [`Self::given`], out of what the object was read from; `None` for a field that was set since.
    pub(crate) fn borrowed(&self, name: &str) -> Option<&'a RawValue> {
        match &self.0.iter().rev().find(|(field, _)| field == name)?.1 {
            Cow::Borrowed(value) => Some(*value).filter(|value| value.get() != "null"),
            Cow::Owned(_) => None,
        }
    }

    /// Reads the value of `name`: `None` when absent or null, an error when of another type.
    pub(crate) fn read<'s, T: Deserialize<'s>>(&'s self, name: &str) -> Result<Option<T>, serde_json::Error> {
        self.given(name).map(|value| serde_json::from_str(value.get())).transpose()
    }

    /// Removes every field of that name and says whether there was one that was not null.
    pub(crate) fn remove(&mut self, name: &str) -> bool {
        let given = self.given(name).is_some();
        self.0.retain(|(field, _)| field != name);
        given
    }

    /// Sets a field at its place, or at the end when it is new.
    pub(crate) fn set(&mut self, name: &str, value: &impl Serialize) {
        let value = serde_json::value::to_raw_value(value).expect("plain values serialize");
        self.set_raw(name, value);
    }

    pub(crate) fn set_raw(&mut self, name: &str, value: Box<RawValue>) {
        let Some(place) = self.0.iter().position(|(field, _)| field == name) else {
            self.0.push((Cow::Owned(name.to_owned()), Cow::Owned(value)));
            return;
        };
        self.0[place].1 = Cow::Owned(value);
        let mut index = 0;
        self.0.retain(|(field, _)| {
            index += 1;
            index - 1 == place || field != name
        });
    }

    /// Sets a field to null where it is present; says whether that changed anything.
    pub(crate) fn set_null_if_present(&mut self, name: &str) -> bool {
        let given = self.given(name).is_some();
        if given {
            self.set(name, &());
        }
        given
    }

    pub(crate) fn to_vec(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("raw values serialize")
    }
}

/// A field's name, borrowed where it is written without escapes.
#[derive(Deserialize)]
pub(crate) struct Key<'a>(#[serde(borrow)] pub(crate) Cow<'a, str>);

impl Serialize for RawObject<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, value) in &self.0 {
            map.serialize_entry(name, &**value)?;
        }
        map.end()
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for RawObject<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = RawObject<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<RawObject<'de>, M::Error> {
                let mut fields = Vec::with_capacity(8);
                while let Some((Key(name), value)) = map.next_entry::<Key<'de>, &'de RawValue>()? {
                    fields.push((name, Cow::Borrowed(value)));
                }
                Ok(RawObject(fields))
            }
        }
        deserializer.deserialize_map(Fields)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(text: &str) -> RawObject<'_> {
        serde_json::from_str(text).unwrap()
    }

    fn text(object: &RawObject<'_>) -> String {
        String::from_utf8(object.to_vec()).unwrap()
    }

    #[test]
    fn untouched_fields_keep_their_bytes() {
        let mut body = object(r#"{"z":0.10000000000000000001,"a":{"n": 1e2},"s":"\u00e9","big":123456789012345678901234567890}"#);
        body.set("a", &1);
        body.set("new", &true);
        assert_eq!(text(&body), r#"{"z":0.10000000000000000001,"a":1,"s":"\u00e9","big":123456789012345678901234567890,"new":true}"#);
    }

    #[test]
    fn a_repeated_field_counts_as_its_last_and_goes_as_a_whole() {
        let mut body = object(r#"{"salt":"a","b":1,"salt":"c"}"#);
        assert_eq!(body.read::<String>("salt").unwrap().as_deref(), Some("c"));
        body.set("salt", &"d");
        assert_eq!(text(&body), r#"{"salt":"d","b":1}"#);
        assert!(body.remove("salt") && !body.remove("salt"));
    }

    #[test]
    fn null_is_absent_to_a_reader() {
        let mut body = object(r#"{"n":null}"#);
        assert_eq!(body.read::<u32>("n").unwrap(), None);
        assert!(!body.set_null_if_present("n"));
        assert!(object(r#"{"n":"x"}"#).read::<u32>("n").is_err());
    }
}
