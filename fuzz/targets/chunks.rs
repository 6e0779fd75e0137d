//! Events of engines' streams, by the fast way and the whole one; pages of metrics.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| baton_gateway::fuzzing::chunk(data));
