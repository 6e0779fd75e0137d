use proptest::prelude::*;
use serde_json::json;

use super::*;

#[test]
fn a_request_keeps_unknown_fields_and_loses_none() {
    let body = json!({"messages": [{"role": "user", "content": "é"}], "model": "m", "temperature": 0, "seed": -3, "stop": ["a", "b"],
        "top_logprobs": 2, "logit_bias": {"5": -100}, "stream": true, "stream_options": {"include_usage": true},
        "vendor": {"deep": [1, 2.5, null]}, "user": "u"});
    let request: ChatRequest = parse(body.to_string().as_bytes()).unwrap();
    assert!(request.sampling.includes_usage() && request.sampling.is_stream() && !request.sampling.includes_continuous_usage());
    assert_eq!(request.sampling.stop_strings(), ["a", "b"]);
    assert_eq!(request.rest.keys().collect::<Vec<_>>(), ["vendor", "user"]);
    let mut expected = body;
    expected["temperature"] = json!(0.0);
    assert_eq!(serde_json::to_value(&request).unwrap(), expected);
}

#[test]
fn explicit_nulls_are_defaults() {
    let body = br#"{"messages":[],"max_tokens":null,"stop":null,"stream_options":null,"n":null,"logprobs":null,"tools":null}"#;
    let request: ChatRequest = parse(body).unwrap();
    assert_eq!(request, ChatRequest { messages: json!([]), ..ChatRequest::default() });
}

#[test]
fn a_prompt_comes_in_four_kinds() {
    let prompt = |text: &str| parse::<Prompt>(text.as_bytes());
    assert_eq!(prompt(r#""a""#).unwrap(), Prompt::Text("a".into()));
    assert_eq!(prompt("[1, 2]").unwrap(), Prompt::Tokens(vec![1, 2]));
    assert_eq!(prompt(r#"["a", "b"]"#).unwrap(), Prompt::Texts(vec!["a".into(), "b".into()]));
    assert_eq!(prompt("[[1], [], [2, 3]]").unwrap(), Prompt::TokenLists(vec![vec![1], vec![], vec![2, 3]]));
    assert!(prompt("[]").unwrap().is_empty());
    for bad in ["1", "{}", "[1, \"a\"]", "[\"a\", 1]", "[-1]", "[1.5]", "null", "[4294967296]"] {
        assert_eq!(prompt(bad).unwrap_err().code, 400, "{bad}");
    }
}

#[test]
fn errors_of_a_body_name_the_place() {
    let missing = parse::<ChatRequest>(br#"{"model":"m"}"#).unwrap_err();
    assert_eq!((missing.code, missing.param.as_deref(), missing.kind.as_str()), (400, Some("body.messages"), "Bad Request"));
    let cut = parse::<ChatRequest>(br#"{"model": "smollm2-135m", "messages": ["#).unwrap_err();
    assert_eq!(cut.param.as_deref(), Some("body.39"));
    let second_line = parse::<ChatRequest>(b"{\n  x").unwrap_err();
    assert_eq!(second_line.param.as_deref(), Some("body.5"));
    let wrong_type = parse::<ChatRequest>(br#"{"messages":[],"max_tokens":"x"}"#).unwrap_err();
    assert!(wrong_type.message.contains("expected u32"), "{}", wrong_type.message);
}

#[test]
fn usage_says_what_was_cached() {
    assert_eq!(Usage::chat_stream(41, 8, 32, 0).cached_tokens(), Some(32));
    assert_eq!(Usage::counts(41, 8).cached_tokens(), None);
    let of_openai: Usage = serde_json::from_str(
        r#"{"completion_tokens":8,"prompt_tokens":41,"total_tokens":49,"prompt_tokens_details":{"cached_tokens":40}}"#,
    )
    .unwrap();
    assert_eq!(of_openai.cached_tokens(), Some(40));
    let bare: Usage = serde_json::from_str(r#"{"prompt_tokens":1,"total_tokens":1,"prompt_tokens_details":null}"#).unwrap();
    assert_eq!(bare.cached_tokens(), None);
}

#[test]
fn an_error_of_any_server_can_be_read() {
    let of_openai: ErrorResponse =
        serde_json::from_str(r#"{"error":{"message":"m","type":"invalid_request_error","param":null,"code":"context_length_exceeded"}}"#)
            .unwrap();
    assert_eq!((of_openai.error.code, of_openai.error.message.as_str()), (0, "m"));
}

#[test]
fn an_unknown_finish_reason_passes() {
    let reason: FinishReason = serde_json::from_str("\"content_filter\"").unwrap();
    assert_eq!(serde_json::to_string(&reason).unwrap(), "\"content_filter\"");
    assert_eq!(serde_json::from_str::<FinishReason>("\"tool_calls\"").unwrap(), FinishReason::ToolCalls);
}

proptest! {
    #[test]
    fn no_body_makes_the_parser_panic(body in prop::collection::vec(any::<u8>(), 0..200), json in "[\\[\\]{}\",:0-9a-z. -]{0,80}") {
        let _ = (parse::<ChatRequest>(&body), parse::<CompletionRequest>(json.as_bytes()), parse::<Prompt>(json.as_bytes()));
    }
}

#[test]
fn a_field_of_a_wrong_type_is_named() {
    let complaint = |field: &str, value: &str| {
        let body = format!(r#"{{"model":"m","prompt":"p","n":1,"{field}":{value},"user":"u"}}"#);
        let error = parse::<CompletionRequest>(body.as_bytes()).unwrap_err();
        (error.param.unwrap(), error.message)
    };
    for (field, value, words) in [
        ("temperature", r#""hot""#, "invalid type: string \"hot\""),
        ("logprobs", "-1", "invalid value: integer `-1`"),
        ("seed", "1.5", "floating point `1.5`"),
        ("stop", "5", "expected a string or an array of strings"),
        ("stream", "1", "expected a boolean"),
    ] {
        let (param, message) = complaint(field, value);
        assert_eq!(param, format!("body.{field}"), "{message}");
        assert!(message.contains(words) && !message.contains(" at line "), "{message}");
    }
    let error = parse::<CompletionRequest>(br#"{"prompt":[-1]}"#).unwrap_err();
    assert!(error.message.contains("expected token ids from 0"), "{}", error.message);
    let two = parse::<CompletionRequest>(br#"{"prompt":"p","n":"x","seed":"y"}"#).unwrap_err();
    assert!(["body.n", "body.seed"].contains(&two.param.as_deref().unwrap()), "the first of two: {two:?}");
}
