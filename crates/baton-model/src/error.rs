use std::io;
use std::path::PathBuf;

use baton_gguf::{GgufError, TensorKind};

use crate::KernelPath;

/// Why weights cannot be loaded or run.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error("{path} cannot be read: {source}", path = path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{path}: {source}", path = path.display())]
    Gguf { path: PathBuf, source: GgufError },
    #[error("{path} is not a usable safetensors file: {reason}; fetch it again", path = path.display())]
    Safetensors { path: PathBuf, reason: String },
    #[error("{path} is not a usable model configuration: {reason}", path = path.display())]
    Config { path: PathBuf, reason: String },
    #[error("{path} is neither a .gguf file nor a folder with config.json and model.safetensors; give one of these", path = path.display())]
    NotAModel { path: PathBuf },
    #[error("the architecture \"{name}\" is not supported; use a Llama, SmolLM2, Qwen2 or Qwen3 model")]
    Architecture { name: String },
    #[error("the model uses {what}, which is not supported; use a Llama, SmolLM2, Qwen2 or Qwen3 model without it")]
    Unsupported { what: String },
    #[error("the model has no tensor \"{name}\"; the file is incomplete or of another architecture")]
    MissingTensor { name: String },
    #[error("tensor \"{name}\" has shape {found:?} (rows, columns), the model needs {needed:?}; the file does not match its configuration")]
    Shape { name: String, found: [usize; 2], needed: [usize; 2] },
    #[error("tensor \"{name}\" has {columns} columns in {kind}, the kernels need a multiple of {multiple}; convert it to F16")]
    Columns { name: String, columns: usize, kind: TensorKind, multiple: usize },
    #[error("tensor \"{name}\" has type {kind}; F32, F16 and BF16 are read from safetensors")]
    Dtype { name: String, kind: String },
    #[error("{what} is {value}, it must be {rule}")]
    Setting { what: &'static str, value: u64, rule: &'static str },
    #[error("the system gives no memory for {blocks} blocks of {block_bytes} bytes of KV; use fewer blocks")]
    KvTooLarge { blocks: usize, block_bytes: usize },
    #[error("the system gives no memory for {bytes} bytes of weights; use a smaller model")]
    WeightsTooLarge { bytes: usize },
    #[error("this machine has no {path} instructions; leave the kernel path unset to take the fastest that it has")]
    NoKernel { path: KernelPath },
}
