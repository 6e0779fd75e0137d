//! The header of a GGUF file (versions 2 and 3, little endian): metadata and where each tensor lies.
//!
//! Pure and bounds-checked: any bytes give a [`Header`] or a [`GgufError`], never a panic, and memory stays proportional to
//! the bytes given. It reads no tensor data and gives no meaning to metadata beyond `general.alignment`; the weights are
//! dequantised elsewhere. Layout: the GGUF specification of the ggml project, `docs/gguf.md`.

mod error;
mod header;
mod reader;
mod tensor;
mod value;

pub use error::GgufError;
pub use header::Header;
pub use tensor::{TensorInfo, TensorKind};
pub use value::Value;
