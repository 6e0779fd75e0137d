//! What a replica does, seen from outside.

use baton_engine::{Batch, Executor, Order, StepResult};
use baton_kv::BlockId;
use baton_replica::{Pace, ReplicaError};
use baton_wire::openai::PublicTokens;

use crate::support::{MODEL, Replica, captured, config, post, read_answer, smollm2, steps_of, timed};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_frees_its_blocks() {
    let replica = Replica::start(config()).await;
    for stream in [true, false] {
        let prompt: Vec<u32> = (0..500).collect();
        let body = json!({ "prompt": prompt, "max_tokens": 1500, "stream": stream, "n": 2 });
        let mut connection = replica.connect(&post("/v1/completions", &body, "")).await;
        let report = replica.report_when(|report| report.running == 2).await;
        assert!(report.kv_blocks_free < report.kv_blocks_total);
        if stream {
            // Some of the answer has been read; the rest is still to come.
            connection.read_exact(&mut [0; 256]).await.unwrap();
        }
        drop(connection);
        let report = replica.report_when(|report| report.running == 0).await;
        assert_eq!(report.kv_blocks_free, report.kv_blocks_total);
    }
    assert_eq!(replica.get("/load").await.json(), json!({ "server_load": 0 }));
    replica.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_seed_repeats_an_answer_and_choices_differ() {
    let replica = Replica::start(config()).await;
    let body = json!({ "prompt": "One two", "max_tokens": 12, "seed": 7, "n": 3, "temperature": 0.9, "return_token_ids": true });
    let (first, second) = (replica.post("/v1/completions", &body).await.json(), replica.post("/v1/completions", &body).await.json());
    assert_eq!(first["choices"], second["choices"]);
    let ids = |index: usize| first["choices"][index]["token_ids"].clone();
    assert!(ids(0) != ids(1) && ids(1) != ids(2) && ids(0) != ids(2));
    let unseeded = json!({ "prompt": "One two", "max_tokens": 12, "temperature": 0.9 });
    let (first, second) =
        (replica.post("/v1/completions", &unseeded).await.json(), replica.post("/v1/completions", &unseeded).await.json());
    assert_ne!(first["choices"][0]["text"], second["choices"][0]["text"]);
    replica.stop().await.unwrap();
}

/// Text and ids of a completion with these fields added.
async fn complete(replica: &Replica, extra: Value) -> Value {
    let mut body = json!({ "prompt": "The capital of France is", "max_tokens": 20, "temperature": 0, "return_token_ids": true });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    replica.post("/v1/completions", &body).await.json()["choices"][0].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_string_cuts_the_text_wherever_tokens_end() {
    let replica = Replica::start(config()).await;
    let whole = complete(&replica, json!({})).await;
    let (text, ids) = (whole["text"].as_str().unwrap().to_owned(), whole["token_ids"].as_array().unwrap().clone());
    assert_eq!(whole["finish_reason"], "length");
    // A stop string that begins inside one token and ends inside the next.
    let first = smollm2().decode(&[ids[4].as_u64().unwrap() as u32], true);
    let before: String = smollm2().decode(&ids[..4].iter().map(|id| id.as_u64().unwrap() as u32).collect::<Vec<_>>(), true);
    let start = before.len() + first.len() - first.chars().last().unwrap().len_utf8();
    let stop: String = text[start..].chars().take(3).collect();
    let at = text.find(&stop).unwrap();
    let stopped = complete(&replica, json!({ "stop": stop })).await;
    assert_eq!(stopped["text"], text[..at]);
    assert_eq!((&stopped["finish_reason"], &stopped["stop_reason"]), (&json!("stop"), &json!(stop)));
    assert!(stopped["token_ids"].as_array().unwrap().len() < ids.len());
    let included = complete(&replica, json!({ "stop": [stop], "include_stop_str_in_output": true })).await;
    assert_eq!(included["text"], text[..at + stop.len()]);
    let by_token = complete(&replica, json!({ "stop_token_ids": [ids[2]] })).await;
    assert_eq!((&by_token["finish_reason"], &by_token["stop_reason"]), (&json!("stop"), &ids[2]));
    assert_eq!(by_token["token_ids"].as_array().unwrap().len(), 3);
    // Streamed, the same text comes in pieces.
    let body = json!({ "prompt": "The capital of France is", "max_tokens": 20, "temperature": 0, "stop": stop, "stream": true });
    assert_eq!(replica.post("/v1/completions", &body).await.streamed_text(0), text[..at]);
    let report = replica.report_when(|report| report.running == 0).await;
    assert_eq!(report.kv_blocks_free, report.kv_blocks_total);
    replica.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn streamed_and_whole_answers_are_the_same() {
    let replica = Replica::start(config()).await;
    let chat = |stream: bool| json!({ "messages": [{ "role": "user", "content": "Hi" }], "max_completion_tokens": 30, "temperature": 0, "stream": stream });
    let whole = replica.post("/v1/chat/completions", &chat(false)).await.json();
    let streamed = replica.post("/v1/chat/completions", &chat(true)).await;
    assert_eq!(whole["choices"][0]["message"]["content"], streamed.streamed_text(0));
    let text = |stream: bool| json!({ "prompt": ["Hi", "Ho"], "max_tokens": 30, "seed": 1, "n": 2, "echo": true, "stream": stream });
    let whole = replica.post("/v1/completions", &text(false)).await.json();
    let streamed = replica.post("/v1/completions", &text(true)).await;
    for index in 0..4u64 {
        let text = whole["choices"][index as usize]["text"].as_str().unwrap();
        assert_eq!(text, streamed.streamed_text(index));
        assert!(text.starts_with(if index < 2 { "Hi" } else { "Ho" }));
    }
    replica.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_is_cached_within_its_salt_and_until_a_reset() {
    let replica = Replica::start(config()).await;
    let cached = async |salt: Option<&str>| {
        let prompt: Vec<u32> = (0..100).collect();
        let mut body = json!({ "prompt": prompt, "max_tokens": 2 });
        if let Some(salt) = salt {
            body["cache_salt"] = json!(salt);
        }
        replica.post("/v1/completions", &body).await.json()["usage"]["prompt_tokens_details"]["cached_tokens"].clone()
    };
    assert_eq!(cached(None).await, 0);
    assert_eq!(cached(None).await, 96);
    assert_eq!(cached(Some("a")).await, 0);
    assert_eq!(cached(Some("a")).await, 96);
    assert_eq!(cached(Some("b")).await, 0);
    assert_eq!(replica.post("/reset_prefix_cache", &json!({})).await.json(), json!({ "success": true }));
    assert_eq!(cached(None).await, 0);
    replica.stop().await.unwrap();
}

/// Salts share what is public, as long as it is the tokens that were meant.
#[tokio::test(flavor = "multi_thread")]
async fn salts_share_public_tokens_and_no_others() {
    let replica = Replica::start(config()).await;
    let prompt: Vec<u32> = (0..200).collect();
    let cached = async |salt: &str, public: PublicTokens| {
        let body = json!({ "prompt": prompt, "max_tokens": 2, "cache_salt": salt, "cache_public": public });
        replica.post("/v1/completions", &body).await.json()["usage"]["prompt_tokens_details"]["cached_tokens"].clone()
    };
    let public = PublicTokens::new(&prompt[..70]);
    assert_eq!(cached("a", public).await, 0);
    assert_eq!(cached("b", public).await, 64);
    assert_eq!(cached("b", public).await, 192);
    assert_eq!(cached("c", PublicTokens::new(&[7; 70])).await, 0, "they are other tokens");
    assert_eq!(cached("d", PublicTokens::new(&[0; 300])).await, 0, "they are more than there are");
    replica.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_done_is_refused_by_name() {
    let replica = Replica::start(config()).await;
    let messages = json!([{ "role": "user", "content": "Hi" }]);
    for (field, value) in [
        ("tool_choice", json!("required")),
        ("tool_choice", json!({ "type": "function", "function": { "name": "f" } })),
        ("response_format", json!({ "type": "json_object" })),
        ("chat_template", json!("{{ messages }}")),
        ("top_logprobs", json!(2)),
        ("n", json!(0)),
        ("stream_options", json!({ "include_usage": true })),
    ] {
        let mut body = json!({ "messages": messages });
        body[field] = value;
        let answer = replica.post("/v1/chat/completions", &body).await;
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!(field)), "{field}");
    }
    let image = json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url", "image_url": { "url": "x" } }] }] });
    assert_eq!(replica.post("/v1/chat/completions", &image).await.status, 400);
    for body in [json!({ "prompt": "a", "echo": true, "logprobs": 1 }), json!({ "prompt": "a", "suffix": "b" }), json!({ "prompt": "" })] {
        assert_eq!(replica.post("/v1/completions", &body).await.status, 400, "{body}");
    }
    replica.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_final_message_can_be_continued() {
    let replica = Replica::start(config()).await;
    let body = json!({ "messages": [{ "role": "user", "content": "Hi" }, { "role": "assistant", "content": "Hello, I" }], "continue_final_message": true });
    let tokens = replica.post("/tokenize", &body).await.json();
    let ids: Vec<u32> = serde_json::from_value(tokens["tokens"].clone()).unwrap();
    assert!(smollm2().decode(&ids, false).ends_with("<|im_start|>assistant\nHello, I"));
    replica.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_does_not_read_holds_up_nobody() {
    let replica = Replica::start(config()).await;
    let body = json!({ "prompt": "Hi", "max_tokens": 1500, "temperature": 0, "stream": true, "return_token_ids": true, "logprobs": 5 });
    let idle = replica.connect(&post("/v1/completions", &body, "")).await;
    replica.report_when(|report| report.running == 1).await;
    assert_eq!(complete(&replica, json!({})).await["finish_reason"], "length");
    replica.report_when(|report| report.running == 0).await;
    // All of it was kept for when the client reads.
    assert_eq!(read_answer(idle).await.events().len(), 1501);
    replica.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_priority_is_refused_where_it_would_mean_nothing() {
    let mut by_arrival = config();
    by_arrival.engine.order = Order::Arrival;
    let replica = Replica::start(by_arrival).await;
    let answer =
        async |priority: i32| replica.post("/v1/completions", &json!({ "prompt": "Hi", "max_tokens": 1, "priority": priority })).await;
    assert_eq!(answer(0).await.status, 200);
    assert_eq!(answer(-1).await.json()["error"]["message"], "Got priority -1 but Priority scheduling is not enabled.");
    replica.stop().await.unwrap();
}

/// An executor that does as the emulated one does, and breaks after some steps with two requests in each.
struct Breaking {
    inner: Box<dyn Executor + Send>,
    steps_left: u32,
}

impl Executor for Breaking {
    fn step(&mut self, batch: &Batch<'_>) -> StepResult {
        if batch.rows.len() == 2 {
            self.steps_left = self.steps_left.checked_sub(1).expect("the executor breaks here, as the test wants");
        }
        self.inner.step(batch)
    }

    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) {
        self.inner.copy_blocks(pairs);
    }

    fn numerics_id(&self) -> &str {
        self.inner.numerics_id()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_engine_ends_streams_with_an_error_and_the_replica_with_it() {
    // Slow enough that the first request still runs when the other one comes.
    let mut config = config();
    config.pace = Pace::Modelled { time_scale: 1.0 };
    let executor = Box::new(Breaking { inner: timed(&config), steps_left: 5 });
    let replica = Replica::start_with(config, executor).await;
    let body = json!({ "prompt": "Hi", "max_tokens": 1900, "stream": true, "stream_options": { "include_usage": true } });
    let whole = json!({ "prompt": "Ho", "max_tokens": 1900 });
    let (stream, answer) = tokio::join!(replica.post("/v1/completions", &body), replica.post("/v1/completions", &whole));
    assert_eq!((answer.status, answer.json()), (500, captured("err-engine-dead").json()));
    let events = stream.events();
    assert!(events.len() > 2, "some tokens came before");
    let theirs = captured("stream-engine-died").events();
    assert_eq!(events[events.len() - 2..], theirs[theirs.len() - 2..]);
    assert!(matches!(replica.served.await.unwrap(), Err(ReplicaError::EngineFailed)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_lets_running_requests_finish() {
    let replica = Replica::start(config()).await;
    let body = json!({ "prompt": "Hi", "max_tokens": 300, "stream": true });
    let connection = replica.connect(&post("/v1/completions", &body, "")).await;
    replica.report_when(|report| report.running == 1).await;
    let (answer, served) = tokio::join!(read_answer(connection), replica.stop());
    served.unwrap();
    let events = answer.events();
    assert_eq!((events.len(), events.last()), (301, Some(&Value::Null)));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_report_tells_what_a_router_needs() {
    let mut config = config();
    config.pace = Pace::Modelled { time_scale: 0.25 };
    let replica = Replica::start(config).await;
    replica.post("/v1/completions", &json!({ "prompt": "Hi", "max_tokens": 40 })).await;
    let report = replica.report_when(|report| report.running == 0).await;
    assert_eq!((report.id.as_str(), report.engine.as_str(), report.model.as_str()), ("r0", "timed", MODEL));
    assert_eq!((report.block_size, report.kv_blocks_total, report.kv_blocks_free, report.max_model_len), (32, 128, 128, 2048));
    assert_eq!((report.waiting, report.running, report.prefill_backlog_tokens, report.token_budget), (0, 0, 0, 2048));
    assert!((report.time_scale - 0.25).abs() < 1e-12 && report.steps == 40 && report.incarnation > 0);
    // A step took what the model said, to the nanosecond.
    assert_eq!(report.step_prior, steps_of(1.0));
    assert!(report.step_error < 1e-6, "{}", report.step_error);
    let source = report.kv_events.unwrap();
    assert!(source.endpoint.starts_with("tcp://127.0.0.1:") && source.replay_endpoint.is_some());
    replica.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_config_that_cannot_work_is_refused() {
    let mut no_time = config();
    no_time.pace = Pace::Modelled { time_scale: 0.0 };
    assert!(matches!(Replica::start(no_time).await.served.await.unwrap(), Err(ReplicaError::TimeScale(_))));
    let mut nameless = config();
    nameless.models.clear();
    assert!(matches!(Replica::start(nameless).await.served.await.unwrap(), Err(ReplicaError::NoModel)));
    let mut stuck = config();
    stuck.engine.max_running = 0;
    assert!(matches!(Replica::start(stuck).await.served.await.unwrap(), Err(ReplicaError::Engine(_))));
}
