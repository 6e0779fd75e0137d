//! Files of weights, whatever their kind, under one set of names.

mod gguf;
mod hugging_face;

use std::fmt::Display;
use std::fs::File;
use std::path::{Path, PathBuf};

use baton_gguf::TensorKind;
use memmap2::Mmap;
use xxhash_rust::xxh3::Xxh3;

use crate::ModelError;
use crate::architecture::Architecture;
use crate::format::BLOCK;
use crate::matrix::packed_bytes;
use crate::quant::dequantise;

/// The tensors of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Embedding,
    OutputNorm,
    /// Absent where the embedding serves.
    Output,
    Layer(usize, LayerPart),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LayerPart {
    AttentionNorm,
    Query,
    Key,
    Value,
    QueryBias,
    KeyBias,
    ValueBias,
    QueryNorm,
    KeyNorm,
    AttentionOutput,
    FfnNorm,
    Gate,
    Up,
    Down,
}

/// One tensor as it lies in a file: a matrix in row-major order, or a vector as one row.
#[derive(Clone, Copy)]
pub(crate) struct Tensor<'a> {
    pub(crate) kind: TensorKind,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) bytes: &'a [u8],
}

impl Tensor<'_> {
    pub(crate) fn to_floats(self) -> Vec<f32> {
        let mut floats = vec![0.0; self.rows * self.columns];
        dequantise(self.kind, self.bytes, &mut floats);
        floats
    }
}

/// An opened model.
pub(crate) struct Checkpoint {
    pub(crate) architecture: Architecture,
    /// What decides the arithmetic and lies in none of the files.
    config: String,
    files: Vec<Mmap>,
    tensors: Vec<Entry>,
    name_of: fn(Part) -> String,
}

struct Entry {
    name: String,
    kind: TensorKind,
    rows: usize,
    columns: usize,
    file: usize,
    start: usize,
    len: usize,
}

impl Checkpoint {
    /// A GGUF file, or a folder in the layout of Hugging Face (or a safetensors file in it).
    pub(crate) fn open(path: &Path) -> Result<Self, ModelError> {
        if path.is_dir() {
            return hugging_face::open(path);
        }
        let file = map(path)?;
        if file.starts_with(b"GGUF") {
            return gguf::open(path, file);
        }
        match path.parent() {
            Some(folder) if folder.join("config.json").is_file() => hugging_face::open(folder),
            Some(_) | None => Err(ModelError::NotAModel { path: path.to_owned() }),
        }
    }

    /// A tensor that may be absent.
    pub(crate) fn find(&self, part: Part) -> Option<Tensor<'_>> {
        let name = (self.name_of)(part);
        let entry = self.tensors.iter().find(|entry| entry.name == name)?;
        let bytes = &self.files[entry.file][entry.start..][..entry.len];
        Some(Tensor { kind: entry.kind, rows: entry.rows, columns: entry.columns, bytes })
    }

    /// A tensor of a known shape.
    pub(crate) fn get(&self, part: Part, rows: usize, columns: usize) -> Result<Tensor<'_>, ModelError> {
        let name = || (self.name_of)(part);
        let tensor = self.find(part).ok_or_else(|| ModelError::MissingTensor { name: name() })?;
        if (tensor.rows, tensor.columns) != (rows, columns) {
            let found = [tensor.rows, tensor.columns];
            return Err(ModelError::Shape { name: name(), found, needed: [rows, columns] });
        }
        let multiple = tensor.kind.block_len().max(if rows > 1 { 32 } else { 1 });
        if !columns.is_multiple_of(multiple) {
            return Err(ModelError::Columns { name: name(), columns, kind: tensor.kind, multiple });
        }
        Ok(tensor)
    }

    /// Kinds of the tensors, each once, with those of most bytes first.
    pub(crate) fn kinds(&self) -> Vec<TensorKind> {
        let bytes_of = |kind| self.tensors.iter().filter(|entry| entry.kind == kind).map(|entry| entry.len).sum::<usize>();
        let mut kinds: Vec<_> = TensorKind::ALL.into_iter().map(|kind| (bytes_of(kind), kind)).filter(|&(bytes, _)| bytes > 0).collect();
        kinds.sort_by_key(|&(bytes, kind)| (std::cmp::Reverse(bytes), kind));
        kinds.into_iter().map(|(_, kind)| kind).collect()
    }

    /// Values in all tensors.
    pub(crate) fn parameters(&self) -> u64 {
        self.tensors.iter().map(|entry| entry.rows as u64 * entry.columns as u64).sum()
    }

    /// Bytes that the matrices take once packed.
    pub(crate) fn packed_bytes(&self) -> usize {
        let whole = |entry: &&Entry| entry.rows > 1 && entry.columns.is_multiple_of(entry.kind.block_len().max(BLOCK));
        self.tensors.iter().filter(whole).map(|entry| packed_bytes(entry.kind, entry.rows, entry.columns)).sum()
    }

    /// Bytes of all tensors.
    pub(crate) fn bytes(&self) -> u64 {
        self.tensors.iter().map(|entry| entry.len as u64).sum()
    }

    /// Hash of the content of all files and of the configuration beside them: another revision of a model has the same header but
    /// other weights, and another rotary base the same weights.
    pub(crate) fn revision(&self) -> u128 {
        let mut hasher = Xxh3::new();
        self.files.iter().for_each(|file| hasher.update(file));
        hasher.update(self.config.as_bytes());
        hasher.digest128()
    }
}

fn map(path: &Path) -> Result<Mmap, ModelError> {
    let error = |source| ModelError::Io { path: path.to_owned(), source };
    let file = File::open(path).map_err(error)?;
    // SAFETY: the bytes are read as plain numbers only. A file that another process shortens while we run ends this process by a
    // signal, which is all that the system offers; weights are not edited in place.
    unsafe { Mmap::map(&file) }.map_err(error)
}

fn config_error(path: &Path, reason: impl Display) -> ModelError {
    ModelError::Config { path: PathBuf::from(path), reason: reason.to_string() }
}
