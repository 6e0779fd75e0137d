//! Weights that an operator names: a file is read as its header says or refused, whatever the header says; and the tokenizer in it.
#![no_main]

use baton_gguf::Header;
use baton_text::Tokenizer;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|file: &[u8]| {
    let Ok(header) = Header::parse(file) else { return };
    for tensor in &header.tensors {
        if let Ok(data) = header.tensor_data(file, tensor) {
            assert!(data.len() <= file.len());
        }
    }
    if let Ok(tokenizer) = Tokenizer::from_gguf(&header) {
        let _ = tokenizer.encode("A cat 12 <|im_end|>\n  ", true);
    }
});
