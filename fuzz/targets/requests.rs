//! Requests as Baton's own engine takes them: understood or refused with a body that clients can read.
#![no_main]

use baton_openai::{check_chat, check_supported, sampling_options, text_options};
use baton_wire::openai::{ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, parse};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|body: &[u8]| {
    if let Ok(request) = parse::<ChatRequest>(body) {
        let _ = check_chat(&request);
        let _ = text_options(&request.sampling);
        let _ = check_supported(&request.sampling, &request.rest);
        let _ = sampling_options(&request.sampling, baton_openai::Asked::default());
    }
    if let Ok(request) = parse::<CompletionRequest>(body) {
        let _ = text_options(&request.sampling);
    }
    let _ = parse::<TokenizeRequest>(body);
    let _ = parse::<DetokenizeRequest>(body);
});
