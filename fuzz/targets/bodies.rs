//! Bodies of clients' requests, which are passed on but for a few fields.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|body: &[u8]| baton_gateway::fuzzing::body(body));
