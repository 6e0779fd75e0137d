//! Ways in for the fuzz targets, which must not be part of what others build on.

use std::collections::BTreeMap;

use bytes::Bytes;
use http::HeaderMap;
use serde_json::value::RawValue;

use crate::{
    GatewayConfig,
    body::{Edit, JsonBody},
    chunk::Reading,
    config::{EngineKind, FrontConfig},
    control, discovery,
    intake::{Api, Intake, Mode},
    plain::{Plain, Shape},
    snapshot,
};

/// A body that is taken has the fields that any reader sees in it, before and after it was changed.
pub fn body(bytes: &[u8]) {
    let bytes = Bytes::copy_from_slice(bytes);
    if let Ok(body) = JsonBody::parse(bytes.clone(), None) {
        let fields: BTreeMap<String, &RawValue> = serde_json::from_slice(&bytes).expect("it was read as an object");
        for (name, value) in &fields {
            assert_eq!(body.given(name).is_none(), value.get() == "null");
            assert!(body.given(name).is_none_or(|given| given == value.get().as_bytes()), "{name}");
        }
        let edited = Vec::from(body.edited(&[Edit::remove("rid"), Edit::set("model", &"m")])).concat();
        let again: BTreeMap<String, &RawValue> = serde_json::from_slice(&edited).expect("it is an object still");
        let is_kept = |name: &str| name != "rid" && name != "model";
        let kept = |fields: &BTreeMap<String, &RawValue>| -> Vec<(String, String)> {
            fields.iter().filter(|(name, _)| is_kept(name)).map(|(name, value)| (name.clone(), value.get().to_owned())).collect()
        };
        assert_eq!(kept(&fields), kept(&again));
        assert!(!again.contains_key("rid"));
        assert_eq!(again.get("model").map(|model| model.get()), Some("\"m\""));
    }
    for api in [Api::Chat, Api::Completions] {
        if let Ok(intake) = Intake::read(api, &HeaderMap::new(), &bytes, &FrontConfig::default()) {
            for kind in [EngineKind::Vllm, EngineKind::LlamaCpp, EngineKind::OpenAi] {
                for mode in [Mode::Stream, Mode::Whole] {
                    let body = Vec::from(intake.upstream_body(kind, true, "m", mode)).concat();
                    serde_json::from_slice::<BTreeMap<String, &RawValue>>(&body).expect("an engine is sent an object");
                }
            }
        }
    }
}

/// What the fast reader makes of an event the whole one makes of it, too.
pub fn chunk(data: &[u8]) {
    for api in [Api::Chat, Api::Completions] {
        let read = Reading::of(api, data);
        let Some(plain) = Plain::read(api, data) else { continue };
        let Ok(Reading::Chunk(chunk)) = read else { panic!("a plain chunk is a chunk: {read:?}") };
        let [piece] = &chunk.pieces[..] else { panic!("a plain chunk has one choice") };
        assert_eq!((piece.choice, piece.count, &piece.finish), (plain.choice, plain.count, &None));
        if let Some(shape) = Shape::of(&plain) {
            assert_eq!(shape.read(data).as_ref(), Some(&plain));
        }
    }
    if let Ok(page) = std::str::from_utf8(data) {
        control::fuzz_metrics(page);
    }
}

pub fn snapshot(file: &[u8]) {
    snapshot::fuzz(file);
}

pub fn config(text: &str) {
    if let Err(error) = GatewayConfig::from_toml(text) {
        assert!(!error.to_string().is_empty());
    }
    discovery::fuzz_list(text);
}
