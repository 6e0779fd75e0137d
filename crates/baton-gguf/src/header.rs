use std::collections::{BTreeMap, BTreeSet};

use crate::reader::Reader;
use crate::tensor::foreign_kind_name;
use crate::{GgufError, TensorInfo, TensorKind, Value};

/// ggml's `GGML_MAX_DIMS`.
const MAX_DIMENSIONS: u32 = 4;
/// `general.alignment` when the file does not say (GGUF specification).
const DEFAULT_ALIGNMENT: u64 = 32;

/// Everything in a GGUF file but the tensor data.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    pub version: u32,
    pub metadata: BTreeMap<String, Value>,
    /// In file order.
    pub tensors: Vec<TensorInfo>,
    /// Where tensor data begins, in bytes from the start of the file.
    pub data_offset: u64,
}

impl Header {
    /// Reads the header at the start of `bytes`, which may be the whole file or only its beginning.
    pub fn parse(bytes: &[u8]) -> Result<Self, GgufError> {
        let mut reader = Reader::new(bytes);
        let version = read_version(&mut reader)?;
        // A tensor takes at least a name length, a dimension count, one dimension, a type and an offset.
        let tensor_count = reader.count("the tensor count", 8 + 4 + 8 + 4 + 8)?;
        let metadata_count = reader.count("the metadata count", 8 + 4 + 1)?;
        let metadata = read_metadata(&mut reader, metadata_count)?;
        let alignment = read_alignment(&metadata)?;
        let tensors = read_tensors(&mut reader, tensor_count, alignment)?;
        let data_offset = reader.position().next_multiple_of(alignment);
        Ok(Self { version, metadata, tensors, data_offset })
    }

    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// Text under `key`.
    pub fn str(&self, key: &str) -> Result<&str, GgufError> {
        self.typed(key, "text", Value::as_str)
    }

    /// Non-negative integer under `key`.
    pub fn u64(&self, key: &str) -> Result<u64, GgufError> {
        self.typed(key, "a non-negative integer", Value::as_u64)
    }

    /// Number under `key`.
    pub fn f64(&self, key: &str) -> Result<f64, GgufError> {
        self.typed(key, "a number", Value::as_f64)
    }

    /// Truth value under `key`.
    pub fn bool(&self, key: &str) -> Result<bool, GgufError> {
        self.typed(key, "a truth value", Value::as_bool)
    }

    /// Array under `key`.
    pub fn array(&self, key: &str) -> Result<&[Value], GgufError> {
        self.typed(key, "an array", Value::as_array)
    }

    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// The bytes of `tensor` within the whole `file`.
    pub fn tensor_data<'a>(&self, file: &'a [u8], tensor: &TensorInfo) -> Result<&'a [u8], GgufError> {
        let start = self.data_offset.saturating_add(tensor.offset);
        let end = start.saturating_add(tensor.byte_len());
        let have = file.len() as u64;
        if end > have {
            return Err(GgufError::Truncated { what: "tensor data", need: end, have });
        }
        Ok(&file[start as usize..end as usize])
    }

    fn typed<'a, T>(&'a self, key: &str, expected: &'static str, convert: impl FnOnce(&'a Value) -> Option<T>) -> Result<T, GgufError> {
        let value = self.get(key).ok_or_else(|| GgufError::Missing { key: key.to_owned() })?;
        convert(value).ok_or_else(|| GgufError::WrongType { key: key.to_owned(), expected })
    }
}

fn read_version(reader: &mut Reader<'_>) -> Result<u32, GgufError> {
    let magic = reader.take(4, "the magic")?;
    if magic != b"GGUF" {
        return Err(GgufError::NotGguf { found: magic.to_vec() });
    }
    let version = reader.u32("the version")?;
    match version {
        2 | 3 => Ok(version),
        // Version 1 to 65535 of a big-endian file read the wrong way round.
        _ if version.trailing_zeros() >= 16 => Err(GgufError::BigEndian),
        _ => Err(GgufError::Version { version }),
    }
}

fn read_metadata(reader: &mut Reader<'_>, count: u64) -> Result<BTreeMap<String, Value>, GgufError> {
    let mut metadata = BTreeMap::new();
    for _ in 0..count {
        let key = reader.string("a metadata key")?.to_owned();
        let value = reader.value(&key)?;
        if metadata.contains_key(&key) {
            return Err(GgufError::Duplicate { what: "metadata key", name: key });
        }
        metadata.insert(key, value);
    }
    Ok(metadata)
}

fn read_alignment(metadata: &BTreeMap<String, Value>) -> Result<u64, GgufError> {
    const KEY: &str = "general.alignment";
    let Some(value) = metadata.get(KEY) else { return Ok(DEFAULT_ALIGNMENT) };
    let alignment = value.as_u64();
    let alignment = alignment.ok_or_else(|| GgufError::WrongType { key: KEY.to_owned(), expected: "a non-negative integer" })?;
    // 2^32 is far above any page size and keeps `next_multiple_of` from overflowing.
    if !alignment.is_power_of_two() || alignment > 1 << 32 {
        return Err(GgufError::Alignment { alignment });
    }
    Ok(alignment)
}

fn read_tensors(reader: &mut Reader<'_>, count: u64, alignment: u64) -> Result<Vec<TensorInfo>, GgufError> {
    let mut names = BTreeSet::new();
    let mut tensors = Vec::new();
    for _ in 0..count {
        let tensor = read_tensor(reader)?;
        if tensor.offset % alignment != 0 {
            return Err(GgufError::Offset { name: tensor.name, offset: tensor.offset, alignment });
        }
        if !names.insert(tensor.name.clone()) {
            return Err(GgufError::Duplicate { what: "tensor", name: tensor.name });
        }
        tensors.push(tensor);
    }
    Ok(tensors)
}

fn read_tensor(reader: &mut Reader<'_>) -> Result<TensorInfo, GgufError> {
    let name = reader.string("a tensor name")?.to_owned();
    let at = reader.position();
    let dimensions = reader.u32("a tensor's dimension count")?;
    if dimensions > MAX_DIMENSIONS {
        let (value, limit) = (dimensions.into(), MAX_DIMENSIONS.into());
        return Err(GgufError::Limit { what: "a tensor's dimension count", at, value, limit });
    }
    let shape = (0..dimensions).map(|_| reader.u64("a tensor's shape")).collect::<Result<Vec<_>, _>>()?;
    let kind_id = reader.u32("a tensor's type")?;
    let offset = reader.u64("a tensor's offset")?;
    let Some(kind) = TensorKind::from_id(kind_id) else {
        let supported = TensorKind::ALL.map(TensorKind::name).join(", ");
        return Err(GgufError::TensorKind { name, kind: kind_id, kind_name: foreign_kind_name(kind_id), supported });
    };
    let tensor = TensorInfo { name, shape, kind, offset };
    if !tensor.shape_is_valid() {
        return Err(GgufError::Shape { name: tensor.name, shape: tensor.shape, block: kind.block_len() as u64 });
    }
    Ok(tensor)
}
