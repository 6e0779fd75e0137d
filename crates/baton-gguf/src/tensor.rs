use std::fmt;

/// How the values of a tensor are stored: plain floats, or blocks of quantised values with shared scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(non_camel_case_types)] // The names that ggml, file names and papers use.
pub enum TensorKind {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q8_0,
    Q4_K,
    Q6_K,
}

impl TensorKind {
    pub const ALL: [Self; 9] = [Self::F32, Self::F16, Self::BF16, Self::Q4_0, Self::Q4_1, Self::Q5_0, Self::Q8_0, Self::Q4_K, Self::Q6_K];

    /// The `ggml_type` number in the file.
    pub const fn id(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q5_0 => 6,
            Self::Q8_0 => 8,
            Self::Q4_K => 12,
            Self::Q6_K => 14,
            Self::BF16 => 30,
        }
    }

    pub fn from_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.id() == id)
    }

    /// Values in one block.
    pub const fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q8_0 => 32,
            Self::Q4_K | Self::Q6_K => 256,
        }
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F16 | Self::BF16 => 2,
            Self::F32 => 4,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q8_0 => 34,
            Self::Q4_K => 144,
            Self::Q6_K => 210,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q8_0 => "Q8_0",
            Self::Q4_K => "Q4_K",
            Self::Q6_K => "Q6_K",
        }
    }
}

impl fmt::Display for TensorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// ggml's name of a type that we do not read, for the message that says so.
pub(crate) fn foreign_kind_name(id: u32) -> &'static str {
    match id {
        7 => "Q5_1",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        13 => "Q5_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        _ => "unknown",
    }
}

/// One tensor's name, shape and place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    pub name: String,
    /// Fastest dimension first, as in the file: a matrix of `rows` outputs over `columns` inputs is `[columns, rows]`.
    pub shape: Vec<u64>,
    pub kind: TensorKind,
    /// Bytes from [`Header::data_offset`](crate::Header::data_offset).
    pub offset: u64,
}

impl TensorInfo {
    /// Number of values.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Bytes of the data.
    pub fn byte_len(&self) -> u64 {
        self.elements() / self.kind.block_len() as u64 * self.kind.block_bytes() as u64
    }

    /// Whether the shape has whole blocks and a size that fits 63 bits.
    pub(crate) fn shape_is_valid(&self) -> bool {
        let block = self.kind.block_len() as u64;
        let whole_blocks = self.shape.first().is_some_and(|&fastest| fastest % block == 0);
        let elements = self.shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size));
        whole_blocks && elements.is_some_and(|count| (1..1 << 59).contains(&count))
    }
}
