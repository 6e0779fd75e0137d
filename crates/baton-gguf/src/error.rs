/// Why bytes are not a GGUF header that we can use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GgufError {
    #[error("the file starts with {found:02x?}, not with \"GGUF\"; give a .gguf file")]
    NotGguf { found: Vec<u8> },
    #[error("GGUF version {version} is not supported (2 and 3 are); convert the model again with a current llama.cpp")]
    Version { version: u32 },
    #[error("the file is big endian; convert the model for little-endian machines")]
    BigEndian,
    #[error("the file ends at byte {have} but {what} needs bytes up to {need}; the download is probably incomplete, fetch it again")]
    Truncated { what: &'static str, need: u64, have: u64 },
    #[error("{what} at byte {at} is {value}, the limit is {limit}; the file is damaged")]
    Limit { what: &'static str, at: u64, value: u64, limit: u64 },
    #[error("the text at byte {at} is not UTF-8; the file is damaged")]
    NotUtf8 { at: u64 },
    #[error("metadata value type {kind} of \"{key}\" is unknown; the file is damaged or newer than this program")]
    ValueKind { key: String, kind: u32 },
    #[error("the {what} \"{name}\" appears twice; the file is damaged")]
    Duplicate { what: &'static str, name: String },
    #[error("tensor \"{name}\" has type {kind_name} ({kind}), which is not supported; use a file with one of {supported}")]
    TensorKind { name: String, kind: u32, kind_name: &'static str, supported: String },
    #[error("tensor \"{name}\" has shape {shape:?}, which does not fit its type ({block} values a block); the file is damaged")]
    Shape { name: String, shape: Vec<u64>, block: u64 },
    #[error("general.alignment is {alignment}, which is not a power of two; the file is damaged")]
    Alignment { alignment: u64 },
    #[error(
        "tensor \"{name}\" starts at {offset} from the data, which is not a multiple of the alignment {alignment}; the file is damaged"
    )]
    Offset { name: String, offset: u64, alignment: u64 },
    #[error("metadata has no \"{key}\"; the file is not a complete model")]
    Missing { key: String },
    #[error("metadata \"{key}\" is not {expected}; the file is damaged")]
    WrongType { key: String, expected: &'static str },
}
