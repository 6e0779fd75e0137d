//! The file that a gateway's index is kept in.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|file: &[u8]| baton_gateway::fuzzing::snapshot(file));
