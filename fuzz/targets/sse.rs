//! Streams of engines: any split gives the same events, and their raw bytes joined are the stream.
#![no_main]

use baton_wire::sse::{Decoder, Event};
use libfuzzer_sys::fuzz_target;

const LIMIT: usize = 256;

fuzz_target!(|input: (Vec<u8>, Vec<u8>)| {
    let (cuts, stream) = input;
    let whole = events([&stream[..]]);
    let mut pieces = Vec::new();
    let mut rest = &stream[..];
    for cut in cuts {
        let (piece, after) = rest.split_at(usize::from(cut).min(rest.len()));
        pieces.push(piece);
        rest = after;
    }
    pieces.push(rest);
    // A limit is seen earlier or later, with the events before it.
    let cut = events(pieces);
    assert_eq!(whole.failed, cut.failed);
    if !whole.failed {
        assert_eq!(whole.events, cut.events);
        assert_eq!([whole.events.iter().flat_map(|event| event.raw.to_vec()).collect(), whole.left].concat(), stream);
    }
});

struct Told {
    events: Vec<Event>,
    left: Vec<u8>,
    failed: bool,
}

fn events<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Told {
    let mut decoder = Decoder::new(LIMIT);
    let mut told = Told { events: Vec::new(), left: Vec::new(), failed: false };
    for piece in pieces {
        for event in decoder.push(piece) {
            match event {
                Ok(event) => told.events.push(event),
                Err(_) => {
                    told.failed = true;
                    return told;
                }
            }
        }
    }
    told.events.extend(decoder.finish());
    told.left = decoder.pending().to_vec();
    told
}
