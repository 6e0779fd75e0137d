use super::*;
use crate::chunk::Reading;

const WISHES: Wishes = Wishes { stream: false, usage: false, continuous_usage: false, token_ids: false };

/// The data of each event in a recorded answer, chunk framing taken off.
fn events(recorded: &str) -> Vec<&str> {
    recorded.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]").collect()
}

fn assemble(api: Api, wishes: Wishes, recorded: &str, id: &str) -> String {
    let mut assembler = Assembler::new(api, wishes, id.into());
    for data in events(recorded) {
        match Reading::of(api, data.as_bytes()).unwrap() {
            Reading::Chunk(chunk) => assembler.push(&chunk).unwrap(),
            Reading::Error(error) => panic!("{error:?}"),
        }
    }
    String::from_utf8(assembler.finish()).unwrap()
}

fn body(recorded: &str) -> &str {
    recorded.split_once("\r\n\r\n").unwrap().1
}

/// `text` with what differs between any two requests made equal.
fn comparable(text: &str, recorded: &str) -> String {
    let created = |text: &str| text.split_once("\"created\":").unwrap().1.split(',').next().unwrap().to_owned();
    text.replace(&created(text), &created(recorded))
}

#[test]
fn a_chat_stream_becomes_the_answer_that_vllm_gives_unstreamed() {
    let stream = include_str!("../../tests/fixtures/chat-stream.resp");
    let whole = body(include_str!("../../tests/fixtures/chat.resp"));
    let assembled = assemble(Api::Chat, WISHES, stream, "chatcmpl-a3e3317ef205287b");
    // The recorded requests met a different cache: 0 and 32 tokens hit, 32 and 0 created.
    let assembled = assembled.replace(r#""cached_tokens":32,"created_cache_tokens":0"#, r#""cached_tokens":0,"created_cache_tokens":32"#);
    assert_eq!(comparable(&assembled, whole), whole);
}

#[test]
fn logprobs_keep_their_bytes() {
    let stream = include_str!("../../tests/fixtures/chat-stream-logprobs.resp");
    let assembled = assemble(Api::Chat, WISHES, stream, "x");
    for data in events(stream) {
        let list = data.split_once("\"logprobs\":{\"content\":[").and_then(|(_, rest)| rest.split_once("]},\"finish_reason\""));
        if let Some((entry, _)) = list {
            assert!(assembled.contains(entry), "{entry}");
        }
    }
    let completion = include_str!("../../tests/fixtures/completion-stream-logprobs.resp");
    let assembled = assemble(Api::Completions, WISHES, completion, "x");
    let offsets = r#""logprobs":{"text_offset":[0,6,7,8],"token_logprobs":[-0.2692539393901825,-0.3885854184627533,-0.9825373888015747,-0.8482307195663452],"tokens":[" Paris",".","\n","\n"]"#;
    assert!(assembled.contains(offsets), "{assembled}");
}

#[test]
fn token_ids_are_collected_for_those_who_asked() {
    let stream = include_str!("../../tests/fixtures/chat-stream-token-ids.resp");
    assert!(assemble(Api::Chat, WISHES, stream, "x").contains(r#""token_ids":null"#));
    let asked = assemble(Api::Chat, Wishes { token_ids: true, ..WISHES }, stream, "x");
    assert!(asked.contains(r#""token_ids":[504,3575,282,4649,314,7042]"#) && asked.contains(r#""prompt_token_ids":[1,9690,"#), "{asked}");
}

#[test]
fn tool_calls_are_joined_from_their_pieces() {
    let assembled = assemble(Api::Chat, WISHES, include_str!("../../tests/fixtures/chat-tool-required-stream.resp"), "x");
    let call = r#""content":null,"refusal":null,"annotations":null,"audio":null,"function_call":null,"tool_calls":[{"id":"chatcmpl-tool-bb46b4511be4d506","type":"function","function":{"name":"get_weather","arguments":"\"gabenwelter\""}}],"reasoning":null},"logprobs":null,"finish_reason":"tool_calls""#;
    assert!(assembled.contains(call), "{assembled}");
}

#[test]
fn choices_come_in_order_each_with_its_own_text() {
    let assembled = assemble(Api::Completions, WISHES, include_str!("../../tests/fixtures/completion-n2-stream.resp"), "cmpl-x");
    let first = r#"{"index":0,"text":" Paris.\n*","logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}"#;
    assert!(assembled.contains(first) && assembled.contains(r#"{"index":1,"text":" Monaco, which""#), "{assembled}");
}
