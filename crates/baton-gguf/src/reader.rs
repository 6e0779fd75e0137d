use crate::{GgufError, Value};

/// Arrays of arrays deeper than this are refused: no known file nests at all.
const MAX_DEPTH: u32 = 4;

/// A bounds-checked little-endian cursor.
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub(crate) fn position(&self) -> u64 {
        self.at as u64
    }

    pub(crate) fn take(&mut self, len: u64, what: &'static str) -> Result<&'a [u8], GgufError> {
        let have = self.bytes.len() as u64;
        let need = self.position().saturating_add(len);
        if need > have {
            return Err(GgufError::Truncated { what, need, have });
        }
        let taken = &self.bytes[self.at..need as usize];
        self.at = need as usize;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], GgufError> {
        let bytes = self.take(N as u64, what)?;
        Ok(bytes.try_into().expect("take gives the length asked for"))
    }

    pub(crate) fn u32(&mut self, what: &'static str) -> Result<u32, GgufError> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, what: &'static str) -> Result<u64, GgufError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A count of things of at least `min_bytes` each, refused when they cannot fit in what is left.
    pub(crate) fn count(&mut self, what: &'static str, min_bytes: u64) -> Result<u64, GgufError> {
        let count = self.u64(what)?;
        let have = self.bytes.len() as u64;
        let need = self.position().saturating_add(count.saturating_mul(min_bytes));
        if need > have {
            return Err(GgufError::Truncated { what, need, have });
        }
        Ok(count)
    }

    pub(crate) fn string(&mut self, what: &'static str) -> Result<&'a str, GgufError> {
        let len = self.u64(what)?;
        let at = self.position();
        std::str::from_utf8(self.take(len, what)?).map_err(|_| GgufError::NotUtf8 { at })
    }

    pub(crate) fn value(&mut self, key: &str) -> Result<Value, GgufError> {
        let kind = self.u32("a metadata type")?;
        self.value_of(kind, key, MAX_DEPTH)
    }

    fn value_of(&mut self, kind: u32, key: &str, depth: u32) -> Result<Value, GgufError> {
        const WHAT: &str = "a metadata value";
        Ok(match kind {
            0 => Value::U8(u8::from_le_bytes(self.array(WHAT)?)),
            1 => Value::I8(i8::from_le_bytes(self.array(WHAT)?)),
            2 => Value::U16(u16::from_le_bytes(self.array(WHAT)?)),
            3 => Value::I16(i16::from_le_bytes(self.array(WHAT)?)),
            4 => Value::U32(u32::from_le_bytes(self.array(WHAT)?)),
            5 => Value::I32(i32::from_le_bytes(self.array(WHAT)?)),
            6 => Value::F32(f32::from_le_bytes(self.array(WHAT)?)),
            7 => Value::Bool(u8::from_le_bytes(self.array(WHAT)?) != 0),
            8 => Value::String(self.string(WHAT)?.to_owned()),
            9 => self.array_value(key, depth)?,
            10 => Value::U64(u64::from_le_bytes(self.array(WHAT)?)),
            11 => Value::I64(i64::from_le_bytes(self.array(WHAT)?)),
            12 => Value::F64(f64::from_le_bytes(self.array(WHAT)?)),
            _ => return Err(GgufError::ValueKind { key: key.to_owned(), kind }),
        })
    }

    fn array_value(&mut self, key: &str, depth: u32) -> Result<Value, GgufError> {
        let at = self.position();
        if depth == 0 {
            let (value, limit) = (u64::from(MAX_DEPTH) + 1, u64::from(MAX_DEPTH));
            return Err(GgufError::Limit { what: "the nesting of arrays", at, value, limit });
        }
        let kind = self.u32("an array's type")?;
        let min_bytes = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => 12,
            _ => return Err(GgufError::ValueKind { key: key.to_owned(), kind }),
        };
        let count = self.count("an array", min_bytes)?;
        (0..count).map(|_| self.value_of(kind, key, depth - 1)).collect::<Result<_, _>>().map(Value::Array)
    }
}
