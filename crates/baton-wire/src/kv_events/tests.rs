use baton_kv::EngineHash;
use baton_units::BlockSize;
use proptest::prelude::*;

use super::*;

fn event() -> impl Strategy<Value = KvEvent> {
    let hash = any::<u64>().prop_map(EngineHash);
    let hashes = prop::collection::vec(hash.clone(), 1..5);
    let stored = (
        (hashes.clone(), prop::option::of(hash), prop::collection::vec(any::<u32>(), 0..20)),
        (1u32..100, prop::option::of("[ab]{0,3}"), prop::option::of("[ab]{0,3}")),
    )
        .prop_map(|((hashes, parent, tokens), (size, adapter, salt))| KvEvent::Stored {
            hashes,
            parent,
            tokens,
            block_size: BlockSize::new(size).unwrap(),
            adapter,
            salt,
        });
    prop_oneof![3 => stored, 2 => hashes.prop_map(|hashes| KvEvent::Removed { hashes }), 1 => Just(KvEvent::Cleared)]
}

fn batch() -> impl Strategy<Value = KvEventBatch> {
    (any::<u64>(), 0.0..2e9f64, prop::collection::vec(event(), 0..5), prop::option::of(any::<u32>()))
        .prop_map(|(sequence, timestamp_s, events, dp_rank)| KvEventBatch { sequence, timestamp_s, events, dp_rank })
}

proptest! {
    #[test]
    fn what_is_encoded_comes_back(batch in batch(), positional in any::<bool>()) {
        let form = if positional { Form::Positional } else { Form::Map };
        let decoded = decode(batch.sequence, &encode(&batch, form)).unwrap();
        prop_assert_eq!(decoded, Decoded { batch, skipped: 0 });
    }

    #[test]
    fn garbage_is_an_error_and_not_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = decode(0, &bytes);
    }

    #[test]
    fn a_damaged_batch_is_an_error_or_another_batch(batch in batch(), at in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<bool>()) {
        let mut bytes = encode(&batch, Form::Map);
        let at = at.index(bytes.len());
        if cut { bytes.truncate(at) } else { bytes[at] = byte }
        let _ = decode(0, &bytes);
    }
}

/// `[1.0, [events], 0]` from events written as JSON.
fn payload(events: &serde_json::Value) -> Vec<u8> {
    rmp_serde::to_vec(&(1.0, events, 0)).unwrap()
}

fn decode_json(events: &serde_json::Value) -> Decoded {
    decode(0, &payload(events)).unwrap()
}

#[test]
fn short_events_of_old_engines_are_read() {
    // vLLM 0.8: no medium, no adapter name, batch without a rank.
    let bytes = rmp_serde::to_vec(&(1.0, vec![serde_json::json!(["BlockStored", [1], null, [7, 8], 2, 3])])).unwrap();
    let decoded = decode(4, &bytes).unwrap();
    let size = BlockSize::new(2).unwrap();
    let (hashes, adapter) = (vec![EngineHash(1)], Some("3".to_owned()));
    let stored = KvEvent::Stored { hashes, parent: None, tokens: vec![7, 8], block_size: size, adapter, salt: None };
    assert_eq!(decoded.batch, KvEventBatch { sequence: 4, timestamp_s: 1.0, events: vec![stored], dp_rank: None });
}

#[test]
fn what_tokens_do_not_name_is_left_out_and_counted() {
    let stored = |extra: serde_json::Value| {
        let mut event = serde_json::json!({"type": "BlockStored", "block_hashes": [1], "parent_block_hash": null, "token_ids": [1, 2], "block_size": 2});
        event.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        event
    };
    let events = serde_json::json!([
        stored(serde_json::json!({"medium": "CPU_PINNED"})),
        stored(serde_json::json!({"group_idx": 1})),
        stored(serde_json::json!({"extra_keys": [[["image-digest", 0]]]})),
        stored(serde_json::json!({"block_size": 0})),
        stored(serde_json::json!({"parent_block_hash": 5, "extra_keys": [["an image in the middle of a chain"]]})),
        stored(serde_json::json!({"parent_block_hash": 5, "extra_keys": [[{"pepper": "t"}]]})),
        {"type": "BlockMoved", "to": "somewhere"},
        stored(serde_json::json!({"extra_keys": [["t"]], "future_field": {"x": [1]}})),
        stored(serde_json::json!({"parent_block_hash": 5, "extra_keys": [[{"salt": "u"}]]})),
    ]);
    let decoded = decode_json(&events);
    assert_eq!(decoded.skipped, 7);
    let salts = decoded.batch.events.iter().map(|event| match event {
        KvEvent::Stored { salt, .. } => salt.as_deref(),
        KvEvent::Removed { .. } | KvEvent::Cleared => None,
    });
    assert_eq!(salts.collect::<Vec<_>>(), [Some("t"), Some("u")]);
}

#[test]
fn bigram_pages_give_their_first_tokens() {
    let decoded = decode_json(&serde_json::json!([["BlockStored", [1], null, [[5, 6], [6, 7]], 2]]));
    assert!(matches!(&decoded.batch.events[..], [KvEvent::Stored { tokens, .. }] if tokens == &[5, 6]));
}

#[test]
fn deep_nesting_does_not_overflow_the_stack() {
    // `[1.0, [{"type": "…", NAME: [[[[…` with the nesting in a field that is read and in one that is not.
    for name in ["extra_keys", "unknown"] {
        let mut bytes = vec![0x93, 0xcb, 0x3f, 0xf0, 0, 0, 0, 0, 0, 0, 0x91, 0x82];
        bytes.extend(rmp_serde::to_vec(&("type", "BlockStored", name)).unwrap().drain(1..));
        bytes.extend(std::iter::repeat_n(0x91, 1 << 20));
        assert!(decode(0, &bytes).is_err());
    }
}

#[test]
fn an_event_without_a_type_is_refused() {
    assert!(decode(0, &payload(&serde_json::json!([{"block_hashes": [1]}]))).is_err());
    assert!(decode(0, &payload(&serde_json::json!([[]]))).is_err());
    assert!(decode(0, &payload(&serde_json::json!([["BlockRemoved"]]))).is_err());
}

#[test]
fn frames_round_trip() {
    let message = Message { topic: b"kv@m", sequence: 7, payload: b"x" };
    assert_eq!(Message::from_frames(&message.to_frames()).unwrap(), message);
    assert_eq!(Message::from_frames(&message.to_replay_frames()).unwrap(), message);
    assert!(Message::from_frames(&Message::replay_end().to_replay_frames()).unwrap().is_replay_end());
    assert_eq!(parse_replay_request(&replay_request(24)).unwrap(), 24);
    assert!(Message::from_frames(&[b"".as_slice(), b"1234567", b""]).is_err());
    assert!(Message::from_frames::<&[u8]>(&[]).is_err());
    assert!(parse_replay_request(&[b"x".as_slice(), b"12345678"]).is_err());
}
