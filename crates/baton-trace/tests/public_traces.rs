//! Figures that others, or we by other means, have of public traces.

use std::io::BufReader;

use baton_trace::{Format, Trace, curve::hit_rate};
use baton_units::Blocks;
use flate2::read::GzDecoder;

fn conversation() -> Trace {
    let packed = include_bytes!("data/mooncake-conversation.jsonl.gz");
    Trace::read(BufReader::new(GzDecoder::new(&packed[..]))).expect("it was read when it was packed")
}

#[test]
fn the_conversation_trace_is_what_its_authors_say() {
    let trace = conversation();
    assert_eq!((trace.format(), trace.requests().len(), trace.distinct_blocks()), (Format::Mooncake, 12_031, 182_790));
    let mean = |of: fn(&baton_trace::TraceRequest) -> u32| {
        trace.requests().iter().map(|request| f64::from(of(request))).sum::<f64>() / trace.requests().len() as f64
    };
    assert_eq!((mean(|request| request.prompt.0).round(), mean(|request| request.output.0).round()), (12_035.0, 343.0));
}

#[test]
fn its_cache_curve_is_the_known_one_to_a_tenth_of_a_point() {
    let trace = conversation();
    let known = [(1_000, 4.5), (4_000, 8.8), (5_859, 13.9), (10_000, 21.6), (19_531, 29.1), (30_000, 33.2)];
    let sizes = known.map(|(blocks, percent)| (Some(Blocks(blocks)), percent)).into_iter().chain([(None, 37.4)]);
    for (blocks, percent) in sizes {
        let rate = 100.0 * hit_rate(&trace, blocks).unwrap();
        assert!((rate - percent).abs() <= 0.1, "{blocks:?}: {rate:.2} % for {percent} %");
    }
}
