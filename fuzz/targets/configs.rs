//! Configurations and lists of engines: taken, or each mistake named.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| baton_gateway::fuzzing::config(text));
