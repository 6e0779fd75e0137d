//! Payloads of engines' KV events: what is understood says the same when it is written and read again, in either form.
#![no_main]

use baton_wire::kv_events::{Form, decode, encode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|payload: &[u8]| {
    let Ok(first) = decode(7, payload) else { return };
    for form in [Form::Map, Form::Positional] {
        let again = decode(7, &encode(&first.batch, form)).expect("what was written is read");
        assert_eq!(again.skipped, 0);
        assert_eq!(again.batch.events, first.batch.events);
    }
});
