//! Engines that compute nothing: what an answer costs here is what its bytes cost.

use std::{fmt::Write as _, time::Duration};

use anyhow::Result;
use clap::Args;
use serde::Deserialize;
use tokio::net::TcpListener;

use crate::wire::Connection;

/// The model that they serve.
pub(crate) const MODEL: &str = "lab-model";
const KV_BLOCKS: u32 = 32_768;

#[derive(Debug, Args)]
pub(crate) struct EngineArgs {
    /// Port of the first engine; the others follow
    #[arg(long, default_value_t = 9001)]
    port: u16,
    #[arg(long, default_value_t = 4)]
    count: u16,
}

pub(crate) async fn run(args: &EngineArgs) -> Result<()> {
    let mut engines = tokio::task::JoinSet::new();
    for port in args.port..args.port + args.count {
        let listener = TcpListener::bind(("127.0.0.1", port)).await?;
        engines.spawn(serve(listener));
    }
    engines.join_all().await;
    Ok(())
}

async fn serve(listener: TcpListener) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(async move {
            let Ok(mut connection) = Connection::new(stream) else { return };
            if let Err(error) = answer_all(&mut connection).await {
                eprintln!("lab engine: {error:#}");
            }
        });
    }
}

async fn answer_all(connection: &mut Connection) -> Result<()> {
    while let Some(request) = connection.request().await? {
        match request.path.as_str() {
            "/v1/chat/completions" => {
                let asked: Asked = serde_json::from_slice(&request.body)?;
                let every = Duration::from_millis(asked.lab_every_ms);
                let mut ticks = (!every.is_zero()).then(|| tokio::time::interval(every));
                for part in answer(&asked, request.body.len()) {
                    if let Some(ticks) = &mut ticks {
                        ticks.tick().await;
                    }
                    // A peer that leaves in the middle of its answer ends the connection, as it does at an engine.
                    if connection.write(part.as_bytes()).await.is_err() {
                        return Ok(());
                    }
                }
            }
            "/health" => connection.write(whole("text/plain", "").as_bytes()).await?,
            "/metrics" => connection.write(whole("text/plain", &metrics()).as_bytes()).await?,
            "/v1/models" => connection.write(whole("application/json", &models()).as_bytes()).await?,
            _ => connection.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}").await?,
        }
    }
    Ok(())
}

/// What of a request decides its answer.
#[derive(Debug, Deserialize)]
struct Asked {
    #[serde(default)]
    stream: bool,
    max_tokens: u32,
    #[serde(default)]
    stream_options: StreamOptions,
    #[serde(default)]
    return_token_ids: bool,
    /// An unknown field to all between the load and here: each event is written by itself.
    #[serde(default)]
    lab_writes: bool,
    /// Between these.
    #[serde(default)]
    lab_every_ms: u64,
}

#[derive(Debug, Default, Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

/// The parts of an answer, each to be written by itself.
fn answer(asked: &Asked, prompt_bytes: usize) -> Vec<String> {
    let prompt = prompt_bytes / 4;
    let usage = format!(
        r#"{{"prompt_tokens":{prompt},"total_tokens":{},"completion_tokens":{},"prompt_tokens_details":null}}"#,
        prompt + asked.max_tokens as usize,
        asked.max_tokens
    );
    if !asked.stream {
        let text = " token".repeat(asked.max_tokens as usize);
        let body = format!(
            r#"{{"id":"chatcmpl-lab","object":"chat.completion","created":1795962766,"model":"{MODEL}","choices":[{{"index":0,"message":{{"role":"assistant","content":"{text}"}},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null}}],"usage":{usage}}}"#
        );
        return vec![whole("application/json", &body)];
    }
    let mut parts = stream(asked, &usage);
    parts[0].insert_str(0, "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n");
    if asked.lab_writes { parts } else { vec![parts.concat()] }
}

/// As vLLM streams: an opening, one event a token, the usage, the end. The opening goes with the first token and the end with the last.
fn stream(asked: &Asked, usage: &str) -> Vec<String> {
    let mut parts = Vec::with_capacity(asked.max_tokens as usize);
    let mut part = String::new();
    push_event(&mut part, &chunk(r#""role":"assistant","content":"""#, "null", asked.return_token_ids.then_some("null")));
    for token in 0..asked.max_tokens {
        let last = token + 1 == asked.max_tokens;
        let ids = format!("[{}]", 1000 + token);
        let finish = if last { r#""length""# } else { "null" };
        push_event(&mut part, &chunk(r#""content":" token""#, finish, asked.return_token_ids.then_some(&ids)));
        if last {
            if asked.stream_options.include_usage {
                let head = event_head();
                push_event(&mut part, &format!(r#"{head}"choices":[],"usage":{usage}}}"#));
            }
            push_event(&mut part, "[DONE]");
            part.push_str("0\r\n\r\n");
        }
        parts.push(std::mem::take(&mut part));
    }
    parts
}

fn event_head() -> String {
    format!(r#"{{"id":"chatcmpl-lab","object":"chat.completion.chunk","created":1795962766,"model":"{MODEL}","#)
}

fn chunk(delta: &str, finish: &str, token_ids: Option<&str>) -> String {
    let mut text = event_head();
    write!(text, r#""choices":[{{"index":0,"delta":{{{delta}}},"logprobs":null,"finish_reason":{finish}"#).expect("a string takes it");
    if let Some(ids) = token_ids {
        write!(text, r#","token_ids":{ids}"#).expect("a string takes it");
    }
    text.push_str("}]}");
    text
}

/// An event in a chunk of its own.
fn push_event(part: &mut String, data: &str) {
    write!(part, "{:x}\r\ndata: {data}\n\n\r\n", data.len() + 8).expect("a string takes it");
}

fn whole(kind: &str, body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

fn models() -> String {
    format!(
        r#"{{"object":"list","data":[{{"id":"{MODEL}","object":"model","created":1,"owned_by":"lab","root":"{MODEL}","parent":null,"max_model_len":131072,"permission":[]}}]}}"#
    )
}

fn metrics() -> String {
    format!(
        "process_start_time_seconds 1.0\nvllm:num_requests_waiting 0\nvllm:num_requests_running 0\nvllm:kv_cache_usage_perc 0\n\
         vllm:cache_config_info{{block_size=\"16\",num_gpu_blocks=\"{KV_BLOCKS}\"}} 1\n"
    )
}
