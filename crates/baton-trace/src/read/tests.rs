use baton_units::{Time, Tokens};
use proptest::prelude::*;

use super::*;

fn read(text: &str) -> Trace {
    Trace::read(text.as_bytes()).unwrap()
}

fn complaint(text: &str) -> String {
    Trace::read(text.as_bytes()).unwrap_err().to_string()
}

#[test]
fn mooncake_names_blocks_of_512_tokens() {
    let trace = read(
        r#"
{"timestamp": 27482, "input_length": 600, "output_length": 5, "hash_ids": [90, 7]}
{"timestamp": 27000.5, "input_length": 512, "output_length": 1, "hash_ids": [90]}"#,
    );
    assert_eq!((trace.format(), trace.block_size(), trace.distinct_blocks()), (Format::Mooncake, BlockSize::new(512), 2));
    let seen: Vec<_> = trace.requests().iter().map(|one| (one.at, one.prompt, one.output, one.session, trace.blocks(one))).collect();
    assert_eq!(
        seen,
        [(Time::ZERO, Tokens(512), Tokens(1), None, &[0][..]), (Time::from_ms(481.5), Tokens(600), Tokens(5), None, &[0, 1][..])]
    );
}

#[test]
fn bailian_s_chats_make_conversations() {
    let line = |chat: i64, parent: i64, at: f64| {
        format!(
            r#"{{"chat_id":{chat},"parent_chat_id":{parent},"timestamp":{at},"input_length":17,"output_length":3,"type":"text","turn":1,"hash_ids":[1,{chat}]}}"#
        )
    };
    let trace = read(&[line(5, -1, 0.25), line(6, -1, 0.5), line(9, 5, 1.5), line(11, 9, 2.0), line(12, 99, 2.5)].join("\n"));
    assert_eq!((trace.format(), trace.block_size()), (Format::Bailian, BlockSize::new(16)));
    let sessions: Vec<_> = trace.requests().iter().map(|one| one.session.unwrap()).collect();
    assert_eq!(sessions[0], sessions[2]);
    assert_eq!(sessions[0], sessions[3]);
    assert!(sessions[1] != sessions[0] && sessions[4] != sessions[0] && sessions[4] != sessions[1], "{sessions:?}");
    assert_eq!(trace.requests()[2].at, Time::from_ms(1250.0));
}

#[test]
fn azure_has_lengths_alone() {
    let trace =
        read("\nTIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n");
    assert_eq!((trace.format(), trace.block_size(), trace.distinct_blocks(), trace.prompt_tokens()), (Format::Azure, None, 0, 7988));
    assert_eq!(trace.requests()[1].at, Time(52_000_000));
    assert!(trace.blocks(&trace.requests()[1]).is_empty());
}

#[test]
fn a_mistake_is_told_with_its_line() {
    let good = r#"{"timestamp":0,"input_length":512,"output_length":1,"hash_ids":[1]}"#;
    for (text, words) in [
        ("", "the trace is empty"),
        (" \n\n", "the trace is empty"),
        ("a,b\n1,2\n", "no known form"),
        (&format!("{good}\n{{\"timestamp\":1}}"), "line 2: missing field `input_length`"),
        (&format!("{good}\n\n{}", good.replace("[1]", "[1,2]")), "line 3: 2 hash_ids for 512 tokens, which fill 1 blocks of 512"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "the trace is empty"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,4808,10\nyesterday,1,2\n", "line 3: TIMESTAMP \"yesterday\""),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,many,10\n", "line 2: "),
    ] {
        let complaint = complaint(text);
        assert!(complaint.contains(words), "{complaint}");
    }
}

proptest! {
    /// Whatever a file has, it is a trace or a complaint.
    #[test]
    fn no_file_is_too_odd(
        lines in prop::collection::vec(
            prop_oneof![
                Just(r#"{"timestamp":1e300,"input_length":4294967295,"output_length":0,"hash_ids":[]}"#.to_owned()),
                Just(r#"{"timestamp":-5,"input_length":512,"output_length":4294967295,"hash_ids":[18446744073709551615]}"#.to_owned()),
                Just(r#"{"timestamp":3,"input_length":0,"output_length":1,"hash_ids":[],"chat_id":1,"parent_chat_id":1}"#.to_owned()),
                Just(AZURE_HEADER.to_owned()),
                Just("2023-11-16 18:17:03.9799600,4808,10".to_owned()),
                Just("1969-11-16 18:17:03,4808,4294967296".to_owned()),
                "\\PC{0,40}",
            ],
            0..6,
        ),
    ) {
        if let Ok(trace) = Trace::read(lines.join("\n").as_bytes()) {
            prop_assert!(trace.requests().is_sorted_by_key(|request| request.at));
            prop_assert!(trace.requests().iter().all(|request| trace.blocks(request).iter().all(|name| *name < trace.distinct_blocks())));
        }
    }
}
