/// One metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(Vec<Value>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl Value {
    pub fn as_str(&self) -> Option<&str> {
        if let Self::String(text) = self { Some(text) } else { None }
    }

    pub fn as_bool(&self) -> Option<bool> {
        if let Self::Bool(value) = self { Some(*value) } else { None }
    }

    pub fn as_array(&self) -> Option<&[Value]> {
        if let Self::Array(values) = self { Some(values) } else { None }
    }

    /// Any integer that is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U8(value) => Some(value.into()),
            Self::U16(value) => Some(value.into()),
            Self::U32(value) => Some(value.into()),
            Self::U64(value) => Some(value),
            Self::I8(_) | Self::I16(_) | Self::I32(_) | Self::I64(_) => self.as_i64().and_then(|value| value.try_into().ok()),
            Self::F32(_) | Self::F64(_) | Self::Bool(_) | Self::String(_) | Self::Array(_) => None,
        }
    }

    /// Any integer that fits.
    pub fn as_i64(&self) -> Option<i64> {
        match *self {
            Self::I8(value) => Some(value.into()),
            Self::I16(value) => Some(value.into()),
            Self::I32(value) => Some(value.into()),
            Self::I64(value) => Some(value),
            Self::U8(_) | Self::U16(_) | Self::U32(_) | Self::U64(_) => self.as_u64().and_then(|value| value.try_into().ok()),
            Self::F32(_) | Self::F64(_) | Self::Bool(_) | Self::String(_) | Self::Array(_) => None,
        }
    }

    /// Any number.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Self::F32(value) => Some(value.into()),
            Self::F64(value) => Some(value),
            Self::U8(_) | Self::U16(_) | Self::U32(_) | Self::U64(_) => self.as_u64().map(|value| value as f64),
            Self::I8(_) | Self::I16(_) | Self::I32(_) | Self::I64(_) => self.as_i64().map(|value| value as f64),
            Self::Bool(_) | Self::String(_) | Self::Array(_) => None,
        }
    }
}
