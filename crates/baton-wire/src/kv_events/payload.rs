use std::fmt;

use baton_kv::{EngineHash, KvEvent, KvEventBatch};
use baton_units::BlockSize;
use rmpv::Value;
use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor},
    ser::{SerializeMap, SerializeSeq},
};

use super::Form;

const STORED: &str = "BlockStored";
const REMOVED: &str = "BlockRemoved";
const CLEARED: &str = "AllBlocksCleared";
const GPU: &str = "GPU";
/// Names a salt that enters a chain behind public blocks. There is none in vLLM, whose keys in such a place are strings and pairs.
const SALT: &str = "salt";

/// `[timestamp, [events], dp_rank]`; old engines leave the rank out, new ones may add fields.
pub(super) struct RawBatch {
    pub(super) timestamp_s: f64,
    pub(super) events: Vec<RawEvent>,
    pub(super) dp_rank: Option<u32>,
}

/// Union of the fields of all events in all versions; what a sender leaves out keeps its default.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct RawFields {
    #[serde(rename = "type")]
    kind: String,
    block_hashes: Vec<Hash>,
    parent_block_hash: Option<Hash>,
    token_ids: Vec<Token>,
    block_size: u32,
    lora_id: Option<i64>,
    medium: Option<String>,
    lora_name: Option<String>,
    /// One entry per block: what besides tokens and parent is in its hash.
    extra_keys: Option<Vec<Option<Vec<Value>>>>,
    group_idx: Option<u32>,
}

pub(super) struct RawEvent(RawFields);

/// An integer of either sign, or a digest whose last 8 bytes are the integer that vLLM sends in its short form.
struct Hash(EngineHash);

/// A token, or the pair of it and its successor where the engine keys its tree on bigrams.
struct Token(u32);

impl RawEvent {
    /// `None` for what [`KvEvent`] cannot say.
    pub(super) fn into_event(self) -> Option<KvEvent> {
        let raw = self.0;
        let on_gpu = raw.medium.as_deref().is_none_or(|medium| medium == GPU);
        if !on_gpu || raw.group_idx.is_some_and(|group| group != 0) {
            return None;
        }
        match raw.kind.as_str() {
            STORED => raw.into_stored(),
            REMOVED => Some(KvEvent::Removed { hashes: hashes(raw.block_hashes) }),
            CLEARED => Some(KvEvent::Cleared),
            _ => None,
        }
    }
}

impl RawFields {
    fn into_stored(self) -> Option<KvEvent> {
        let adapter = self.lora_name.clone().or_else(|| self.lora_id.map(|id| id.to_string()));
        let mut salt = None;
        for (block, keys) in self.extra_keys.iter().flatten().enumerate() {
            // vLLM's order is adapter, multimodal items, salt, embeddings; of these only adapter and salt are plain.
            let mut keys = keys.iter().flatten().peekable();
            keys.next_if(|key| match key.as_str() {
                Some(name) => adapter.as_deref() == Some(name),
                None => key.as_i64().is_some_and(|id| self.lora_id == Some(id)),
            });
            for key in keys {
                if block > 0 || salt.is_some() {
                    return None;
                }
                let text = if self.parent_block_hash.is_none() { key.as_str() } else { named_salt(key) };
                salt = Some(text?.to_owned());
            }
        }
        Some(KvEvent::Stored {
            hashes: hashes(self.block_hashes),
            parent: self.parent_block_hash.map(|hash| hash.0),
            tokens: self.token_ids.into_iter().map(|token| token.0).collect(),
            block_size: BlockSize::new(self.block_size)?,
            adapter,
            salt,
        })
    }
}

/// The salt in `{"salt": "…"}`.
fn named_salt(key: &Value) -> Option<&str> {
    match key.as_map()?.as_slice() {
        [(name, salt)] if name.as_str() == Some(SALT) => salt.as_str(),
        _ => None,
    }
}

fn hashes(raw: Vec<Hash>) -> Vec<EngineHash> {
    raw.into_iter().map(|hash| hash.0).collect()
}

impl<'de> Deserialize<'de> for RawBatch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BatchVisitor;
        impl<'de> Visitor<'de> for BatchVisitor {
            type Value = RawBatch;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array of timestamp, events and rank")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<RawBatch, A::Error> {
                let timestamp_s = seq.next_element()?.ok_or_else(|| A::Error::invalid_length(0, &self))?;
                let events = seq.next_element()?.ok_or_else(|| A::Error::invalid_length(1, &self))?;
                let dp_rank = seq.next_element::<Option<u32>>()?.flatten();
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(RawBatch { timestamp_s, events, dp_rank })
            }
        }
        deserializer.deserialize_seq(BatchVisitor)
    }
}

impl<'de> Deserialize<'de> for RawEvent {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EventVisitor;
        impl<'de> Visitor<'de> for EventVisitor {
            type Value = RawEvent;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a KV event as a map with a type or an array with its tag first")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<RawEvent, A::Error> {
                let fields = RawFields::deserialize(serde::de::value::MapAccessDeserializer::new(map))?;
                if fields.kind.is_empty() {
                    return Err(A::Error::missing_field("type"));
                }
                Ok(RawEvent(fields))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<RawEvent, A::Error> {
                let mut fields =
                    RawFields { kind: seq.next_element()?.ok_or_else(|| A::Error::invalid_length(0, &self))?, ..RawFields::default() };
                match fields.kind.as_str() {
                    STORED => {
                        fields.block_hashes = required(&mut seq, "block_hashes")?;
                        fields.parent_block_hash = required(&mut seq, "parent_block_hash")?;
                        fields.token_ids = required(&mut seq, "token_ids")?;
                        fields.block_size = required(&mut seq, "block_size")?;
                        fields.lora_id = seq.next_element()?.flatten();
                        fields.medium = seq.next_element()?.flatten();
                        fields.lora_name = seq.next_element()?.flatten();
                        fields.extra_keys = seq.next_element()?.flatten();
                        fields.group_idx = seq.next_element()?.flatten();
                    }
                    REMOVED => {
                        fields.block_hashes = required(&mut seq, "block_hashes")?;
                        fields.medium = seq.next_element()?.flatten();
                        fields.group_idx = seq.next_element()?.flatten();
                    }
                    _ => {}
                }
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(RawEvent(fields))
            }
        }
        deserializer.deserialize_any(EventVisitor)
    }
}

fn required<'de, A: SeqAccess<'de>, T: Deserialize<'de>>(seq: &mut A, name: &'static str) -> Result<T, A::Error> {
    seq.next_element()?.ok_or_else(|| A::Error::missing_field(name))
}

impl<'de> Deserialize<'de> for Hash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HashVisitor;
        impl Visitor<'_> for HashVisitor {
            type Value = Hash;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a 64-bit integer or a digest of at least 8 bytes")
            }

            fn visit_u64<E>(self, hash: u64) -> Result<Hash, E> {
                Ok(Hash(EngineHash(hash)))
            }

            fn visit_i64<E>(self, hash: i64) -> Result<Hash, E> {
                Ok(Hash(EngineHash(hash.cast_unsigned())))
            }

            fn visit_bytes<E: serde::de::Error>(self, digest: &[u8]) -> Result<Hash, E> {
                let last = digest.last_chunk().ok_or_else(|| E::invalid_length(digest.len(), &self))?;
                Ok(Hash(EngineHash(u64::from_be_bytes(*last))))
            }
        }
        deserializer.deserialize_any(HashVisitor)
    }
}

impl<'de> Deserialize<'de> for Token {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TokenVisitor;
        impl<'de> Visitor<'de> for TokenVisitor {
            type Value = Token;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a token id or a pair of them")
            }

            fn visit_u64<E: serde::de::Error>(self, token: u64) -> Result<Token, E> {
                u32::try_from(token).map(Token).map_err(|_| E::custom(format_args!("token id {token} does not fit 32 bits")))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Token, A::Error> {
                let token = required(&mut seq, "token_ids")?;
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Token(token))
            }
        }
        deserializer.deserialize_any(TokenVisitor)
    }
}

pub(super) fn encode(batch: &KvEventBatch, form: Form) -> Vec<u8> {
    let events: Vec<EventOut<'_>> = batch.events.iter().map(|event| EventOut { event, form }).collect();
    rmp_serde::to_vec(&(batch.timestamp_s, events, batch.dp_rank)).expect("a batch of plain values serializes")
}

struct EventOut<'a> {
    event: &'a KvEvent,
    form: Form,
}

impl Serialize for EventOut<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.event {
            KvEvent::Stored { hashes, parent, tokens, block_size, adapter, salt } => {
                let mut fields = Fields::new(serializer, self.form, 11)?;
                fields.put("type", STORED)?;
                fields.put("block_hashes", &hash_values(hashes))?;
                fields.put("parent_block_hash", &parent.map(|hash| hash.0))?;
                fields.put("token_ids", tokens)?;
                fields.put("block_size", block_size)?;
                fields.put("lora_id", &None::<i64>)?;
                fields.put("medium", GPU)?;
                fields.put("lora_name", adapter)?;
                let salt = salt.as_deref().map(|salt| match parent {
                    None => ExtraKey::Plain(salt),
                    Some(_) => ExtraKey::Salt(salt),
                });
                fields.put("extra_keys", &extra_keys(hashes.len(), adapter.as_deref(), salt))?;
                fields.put("group_idx", &0)?;
                fields.put("kv_cache_spec_kind", "full_attention")?;
                fields.end()
            }
            KvEvent::Removed { hashes } => {
                let mut fields = Fields::new(serializer, self.form, 4)?;
                fields.put("type", REMOVED)?;
                fields.put("block_hashes", &hash_values(hashes))?;
                fields.put("medium", GPU)?;
                fields.put("group_idx", &0)?;
                fields.end()
            }
            KvEvent::Cleared => {
                let mut fields = Fields::new(serializer, self.form, 1)?;
                fields.put("type", CLEARED)?;
                fields.end()
            }
        }
    }
}

fn hash_values(hashes: &[EngineHash]) -> Vec<u64> {
    hashes.iter().map(|hash| hash.0).collect()
}

/// What besides tokens and parent is in a block's hash.
#[derive(Clone, Copy)]
enum ExtraKey<'a> {
    /// As in vLLM.
    Plain(&'a str),
    /// One that enters behind public blocks.
    Salt(&'a str),
}

impl Serialize for ExtraKey<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Plain(text) => serializer.serialize_str(text),
            Self::Salt(salt) => serializer.collect_map([(SALT, salt)]),
        }
    }
}

/// Per block the adapter, and for the first block the salt; null where there is neither.
fn extra_keys<'a>(blocks: usize, adapter: Option<&'a str>, salt: Option<ExtraKey<'a>>) -> Vec<Option<Vec<ExtraKey<'a>>>> {
    let keys = |block| adapter.map(ExtraKey::Plain).into_iter().chain(salt.filter(|_| block == 0)).collect::<Vec<_>>();
    (0..blocks).map(|block| Some(keys(block)).filter(|keys| !keys.is_empty())).collect()
}

/// Writes named fields as a map or, in the same order, as an array.
enum Fields<S: Serializer> {
    Map(S::SerializeMap),
    Positional(S::SerializeSeq),
}

impl<S: Serializer> Fields<S> {
    fn new(serializer: S, form: Form, count: usize) -> Result<Self, S::Error> {
        match form {
            Form::Map => serializer.serialize_map(Some(count)).map(Self::Map),
            Form::Positional => serializer.serialize_seq(Some(count)).map(Self::Positional),
        }
    }

    fn put(&mut self, name: &'static str, value: &(impl Serialize + ?Sized)) -> Result<(), S::Error> {
        match self {
            Self::Map(map) => map.serialize_entry(name, value),
            Self::Positional(seq) => seq.serialize_element(value),
        }
    }

    fn end(self) -> Result<S::Ok, S::Error> {
        match self {
            Self::Map(map) => map.end(),
            Self::Positional(seq) => seq.end(),
        }
    }
}
