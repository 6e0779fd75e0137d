//! What cannot be loaded is refused with a message that says what to do, and nothing panics.

use baton_engine::Executor;
use baton_gguf::TensorKind;
use baton_model::{CpuConfig, CpuExecutor, KernelPath, ModelError};
use proptest::prelude::*;

use crate::support::config;
use crate::tiny::{Family, Folder, Tiny, Weights};

fn refusal(path: &std::path::Path) -> String {
    match CpuExecutor::load(path, &config()) {
        Ok(_) => panic!("{} was loaded", path.display()),
        Err(error) => error.to_string(),
    }
}

fn tiny() -> Tiny {
    Tiny::new(Family::Llama, TensorKind::Q4_0, 1)
}

#[test]
fn files_that_are_no_model_are_refused() {
    let folder = Folder::new();
    let gguf = |bytes: &[u8]| refusal(&folder.file("m.gguf", bytes));
    let whole = tiny().to_gguf();
    assert!(refusal(&folder.path().join("absent.gguf")).contains("cannot be read"));
    assert!(gguf(b"hello").contains("give one of these"));
    assert!(gguf(b"").contains("give one of these"));
    assert!(gguf(&whole[..whole.len() / 2]).contains("fetch it again"));
    assert!(gguf(&whole[..100]).contains("fetch it again"));
    assert!(refusal(folder.path()).contains("give one of these"));
}

#[test]
fn models_that_do_not_fit_are_refused() {
    let folder = Folder::new();
    let changed = |change: &dyn Fn(&mut Tiny)| {
        let mut tiny = tiny();
        change(&mut tiny);
        refusal(&folder.file("m.gguf", &tiny.to_gguf()))
    };
    let without = |name: &str| changed(&|tiny| drop(tiny.tensors.remove(name)));
    assert!(without("blk.1.ffn_up.weight").contains("no tensor \"blk.1.ffn_up.weight\""));
    assert!(without("token_embd.weight").contains("vocabulary"));
    let message = changed(&|tiny| {
        let odd = Weights { kind: TensorKind::F32, rows: 3, columns: 5, bytes: vec![0; 60] };
        tiny.tensors.insert("blk.0.attn_v.weight".to_owned(), odd);
    });
    assert!(message.contains("[3, 5]") && message.contains("[96, 256]"), "{message}");
    let bytes = String::from_utf8_lossy(&tiny().to_gguf()).into_owned();
    assert!(bytes.contains("llama"), "the next case replaces it");
    let other: Vec<u8> = replace(&tiny().to_gguf(), b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba");
    let message = refusal(&folder.file("m.gguf", &other));
    assert!(message.contains("\"mamba\" is not supported; use a Llama"), "{message}");
}

fn replace(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let at = bytes.windows(from.len()).position(|window| window == from).expect("the bytes are there");
    [&bytes[..at], to, &bytes[at + from.len()..]].concat()
}

#[test]
fn folders_that_are_no_model_are_refused() {
    let folder = Folder::new();
    let tiny = Tiny::new(Family::Qwen3, TensorKind::F32, 1);
    tiny.write_hugging_face(folder.path(), 1);
    assert!(CpuExecutor::load(folder.path(), &config()).is_ok());
    assert!(CpuExecutor::load(&folder.path().join("model.safetensors"), &config()).is_ok());

    let with_config = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut value = tiny.config();
        change(&mut value);
        folder.file("config.json", value.to_string().as_bytes());
        refusal(folder.path())
    };
    assert!(with_config(&|config| config["model_type"] = "gpt2".into()).contains("\"gpt2\" is not supported"));
    assert!(with_config(&|config| config["hidden_act"] = "gelu".into()).contains("\"gelu\""));
    assert!(with_config(&|config| config["hidden_size"] = 128.into()).contains("does not match its configuration"));
    assert!(with_config(&|config| config["num_attention_heads"] = 0.into()).contains("num_attention_heads is 0"));
    assert!(with_config(&|config| config["num_key_value_heads"] = 3.into()).contains("10 heads over 3 KV heads"));
    assert!(with_config(&|config| config["rope_scaling"] = serde_json::json!({ "rope_type": "yarn" })).contains("\"yarn\""));
    assert!(with_config(&|config| drop(config.as_object_mut().unwrap().remove("vocab_size"))).contains("vocab_size"));

    folder.file("config.json", tiny.config().to_string().as_bytes());
    folder.file("model.safetensors", b"not tensors at all");
    assert!(refusal(folder.path()).contains("not a usable safetensors file"));
    folder.file("model.safetensors.index.json", br#"{"weight_map": {"a": "../elsewhere"}}"#);
    assert!(refusal(folder.path()).contains("must name files of the folder"));
}

#[test]
fn settings_out_of_range_are_refused() {
    let folder = Folder::new();
    let path = folder.file("m.gguf", &tiny().to_gguf());
    let load = |change: &dyn Fn(&mut CpuConfig)| {
        let mut config = config();
        change(&mut config);
        CpuExecutor::load(&path, &config).map(|executor| executor.max_model_len())
    };
    assert_eq!(load(&|_| {}).unwrap(), 300);
    assert_eq!(load(&|config| config.max_model_len = Some(100)).unwrap(), 100);
    assert!(matches!(load(&|config| config.max_model_len = Some(301)), Err(ModelError::Setting { what: "max_model_len", .. })));
    assert!(matches!(load(&|config| config.threads = 0), Err(ModelError::Setting { what: "threads", .. })));
    assert!(matches!(load(&|config| config.block_size = 0), Err(ModelError::Setting { what: "block_size", .. })));
    assert!(matches!(load(&|config| config.blocks = 0), Err(ModelError::Setting { what: "blocks", .. })));
    assert!("avx9".parse::<KernelPath>().unwrap_err().contains("use portable, avx2 or avx512"));
    for path in KernelPath::ALL {
        assert_eq!(path.to_string().parse(), Ok(path));
    }
}

#[test]
fn an_executor_says_what_it_runs() {
    let folder = Folder::new();
    let load = |seed| {
        let bytes = Tiny::new(Family::Llama, TensorKind::Q4_1, seed).to_gguf();
        CpuExecutor::load(&folder.file("m.gguf", &bytes), &config()).unwrap()
    };
    let executor = load(1);
    assert_eq!(executor.vocab_size(), 250);
    let shape = executor.shape();
    assert_eq!((shape.layers, shape.hidden, shape.vocab, shape.max_context), (2, 256, 250, 300));
    assert!(shape.bytes_per_weight < 0.9 && shape.tied_embeddings);
    let id = executor.numerics_id();
    assert!(id.contains("weights=Q4_1+F32") && id.contains("kv=f32"), "{id}");
    assert_eq!(id, load(1).numerics_id());
    assert_ne!(id, load(2).numerics_id());
}

/// In a folder the rotary base lies beside the weights, and decides the bits as they do.
#[test]
fn another_configuration_of_the_same_weights_is_another_model() {
    let folder = Folder::new();
    Tiny::new(Family::Llama, TensorKind::F32, 1).write_hugging_face(folder.path(), 1);
    let id = || CpuExecutor::load(folder.path(), &config()).unwrap().numerics_id().to_owned();
    let before = id();
    let text = std::fs::read_to_string(folder.path().join("config.json")).unwrap();
    let changed = folder.file("config.json", text.replace("10000.0", "500000.0").as_bytes());
    assert_ne!(std::fs::read_to_string(changed).unwrap(), text);
    assert_ne!(id(), before);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_damaged_file_never_panics(at in any::<prop::sample::Index>(), value in any::<u8>(), cut in any::<prop::sample::Index>()) {
        let folder = Folder::new();
        let mut bytes = tiny().to_gguf();
        let header = 3000;
        let index = at.index(header);
        bytes[index] = value;
        let path = folder.file("m.gguf", &bytes);
        let _ = CpuExecutor::load(&path, &config());
        let path = folder.file("m.gguf", &bytes[..cut.index(bytes.len())]);
        prop_assert!(CpuExecutor::load(&path, &config()).is_err());
    }
}
