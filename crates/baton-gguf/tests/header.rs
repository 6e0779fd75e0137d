//! The parser through its public interface: what a writer wrote comes back, and no bytes make it panic.

use baton_gguf::{GgufError, Header, TensorKind, Value};
use proptest::prelude::*;

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn kind(value: &Value) -> u32 {
    match value {
        Value::U8(_) => 0,
        Value::I8(_) => 1,
        Value::U16(_) => 2,
        Value::I16(_) => 3,
        Value::U32(_) => 4,
        Value::I32(_) => 5,
        Value::F32(_) => 6,
        Value::Bool(_) => 7,
        Value::String(_) => 8,
        Value::Array(_) => 9,
        Value::U64(_) => 10,
        Value::I64(_) => 11,
        Value::F64(_) => 12,
    }
}

fn body(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(v) => out.extend(v.to_le_bytes()),
        Value::I8(v) => out.extend(v.to_le_bytes()),
        Value::U16(v) => out.extend(v.to_le_bytes()),
        Value::I16(v) => out.extend(v.to_le_bytes()),
        Value::U32(v) => out.extend(v.to_le_bytes()),
        Value::I32(v) => out.extend(v.to_le_bytes()),
        Value::F32(v) => out.extend(v.to_le_bytes()),
        Value::Bool(v) => out.push(u8::from(*v)),
        Value::String(v) => string(out, v),
        Value::U64(v) => out.extend(v.to_le_bytes()),
        Value::I64(v) => out.extend(v.to_le_bytes()),
        Value::F64(v) => out.extend(v.to_le_bytes()),
        Value::Array(values) => {
            out.extend(values.first().map_or(4, kind).to_le_bytes());
            out.extend((values.len() as u64).to_le_bytes());
            for value in values {
                body(out, value);
            }
        }
    }
}

struct Tensor {
    name: &'static str,
    shape: Vec<u64>,
    kind: u32,
    offset: u64,
}

fn file(version: u32, metadata: &[(String, Value)], tensors: &[Tensor]) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(version.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        string(&mut out, key);
        out.extend(kind(value).to_le_bytes());
        body(&mut out, value);
    }
    for tensor in tensors {
        string(&mut out, tensor.name);
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        for size in &tensor.shape {
            out.extend(size.to_le_bytes());
        }
        out.extend(tensor.kind.to_le_bytes());
        out.extend(tensor.offset.to_le_bytes());
    }
    out
}

fn model() -> Vec<u8> {
    let metadata = [
        ("general.architecture".to_owned(), Value::String("llama".to_owned())),
        ("llama.block_count".to_owned(), Value::U32(30)),
        ("tokens".to_owned(), Value::Array(vec![Value::String("a".to_owned()), Value::String("é".to_owned())])),
    ];
    let tensors = [
        Tensor { name: "token_embd.weight", shape: vec![64, 3], kind: 3, offset: 0 },
        Tensor { name: "output_norm.weight", shape: vec![64], kind: 0, offset: 128 },
    ];
    file(3, &metadata, &tensors)
}

#[test]
fn metadata_and_tensors_come_back() {
    let mut bytes = model();
    let header = Header::parse(&bytes).unwrap();
    assert_eq!(header.str("general.architecture"), Ok("llama"));
    assert_eq!(header.u64("llama.block_count"), Ok(30));
    assert_eq!(header.array("tokens").unwrap()[1].as_str(), Some("é"));
    assert_eq!(header.data_offset % 32, 0);
    let embedding = header.tensor("token_embd.weight").unwrap();
    assert_eq!((embedding.kind, embedding.elements(), embedding.byte_len()), (TensorKind::Q4_1, 192, 120));

    bytes.resize(header.data_offset as usize + 120, 7);
    assert_eq!(header.tensor_data(&bytes, embedding).unwrap().len(), 120);
    let norm = header.tensor("output_norm.weight").unwrap();
    assert!(matches!(header.tensor_data(&bytes, norm), Err(GgufError::Truncated { .. })));
}

#[test]
fn each_error_says_what_to_do() {
    let check = |bytes: &[u8], words: &str| {
        let message = Header::parse(bytes).unwrap_err().to_string();
        assert!(message.contains(words), "{message}");
    };
    check(b"", "incomplete");
    check(b"PK\x03\x04....", "give a .gguf file");
    check(&file(1, &[], &[]), "convert the model again");
    check(&file(3u32.swap_bytes(), &[], &[]), "big endian");
    check(&file(3, &[], &[Tensor { name: "t", shape: vec![256], kind: 10, offset: 0 }]), "Q2_K (10)");
    check(&file(3, &[], &[Tensor { name: "t", shape: vec![33], kind: 2, offset: 0 }]), "32 values a block");
    check(&file(3, &[], &[Tensor { name: "t", shape: vec![1; 5], kind: 0, offset: 0 }]), "limit is 4");
    check(&file(3, &[], &[Tensor { name: "t", shape: vec![u64::MAX, 2], kind: 0, offset: 0 }]), "damaged");
    check(&file(3, &[], &[Tensor { name: "t", shape: vec![1], kind: 0, offset: 3 }]), "alignment");
    let twice = || Tensor { name: "t", shape: vec![1], kind: 0, offset: 0 };
    check(&file(3, &[], &[twice(), twice()]), "appears twice");
    let nested = (0..8).fold(Value::U8(1), |inner, _| Value::Array(vec![inner]));
    check(&file(3, &[("deep".to_owned(), nested)], &[]), "nesting");
    check(&file(3, &[("general.alignment".to_owned(), Value::U32(3))], &[]), "power of two");
}

fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        any::<u8>().prop_map(Value::U8),
        any::<i16>().prop_map(Value::I16),
        any::<u32>().prop_map(Value::U32),
        any::<i64>().prop_map(Value::I64),
        any::<bool>().prop_map(Value::Bool),
        (-1e30f64..1e30).prop_map(Value::F64),
        ".{0,12}".prop_map(Value::String),
    ];
    leaf.prop_flat_map(|value| prop_oneof![Just(value.clone()), (1usize..6).prop_map(move |n| Value::Array(vec![value.clone(); n]))])
}

proptest! {
    #[test]
    fn what_is_written_is_read(metadata in prop::collection::btree_map("[a-z.]{1,10}", any_value(), 0..8), version in 2u32..4) {
        let pairs: Vec<_> = metadata.clone().into_iter().filter(|(key, _)| key != "general.alignment").collect();
        let header = Header::parse(&file(version, &pairs, &[])).unwrap();
        prop_assert_eq!(header.metadata.into_iter().collect::<Vec<_>>(), pairs);
    }

    #[test]
    fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = Header::parse(&bytes);
        let mut with_magic = b"GGUF\x03\0\0\0".to_vec();
        with_magic.extend(bytes);
        let _ = Header::parse(&with_magic);
    }

    #[test]
    fn a_damaged_file_never_panics(at in any::<prop::sample::Index>(), byte in any::<u8>(), end in any::<prop::sample::Index>()) {
        let mut bytes = model();
        let index = at.index(bytes.len());
        bytes[index] = byte;
        if let Ok(header) = Header::parse(&bytes) {
            for tensor in &header.tensors {
                let _ = header.tensor_data(&bytes, tensor);
            }
        }
        let end = end.index(model().len());
        prop_assert!(Header::parse(&model()[..end]).is_err());
    }
}
