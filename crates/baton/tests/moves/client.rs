//! A client of the OpenAI API that reads its stream event by event.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Lines, Read, Write},
    net::TcpStream,
};

use serde_json::{Value, json};

use crate::common::PATIENCE;

/// A request as its client writes it.
#[derive(Debug, Clone)]
pub(crate) struct Ask {
    pub(crate) path: &'static str,
    pub(crate) body: Value,
}

/// What a client has of its request's answer, without what differs between two answers to the same question: ids, times, cache hits.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Answer {
    pub(crate) choices: BTreeMap<u64, Choice>,
    /// Tokens of the prompt, of the output, and together.
    usage: Option<[u64; 3]>,
    error: Option<Value>,
    /// Whether the stream was closed as streams are.
    done: bool,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Choice {
    pub(crate) text: String,
    pub(crate) token_ids: Vec<u64>,
    logprobs: Vec<Value>,
    pub(crate) finish_reason: Option<String>,
    stop_reason: Option<Value>,
}

/// An answer that is under way.
pub(crate) struct Reading {
    lines: Lines<BufReader<Box<dyn Read + Send>>>,
    pub(crate) answer: Answer,
}

impl Ask {
    /// One message, answered greedily with just so many tokens, whose ids are told.
    pub(crate) fn chat(content: &str, tokens: u32) -> Self {
        let body = json!({
            "messages": [{"role": "user", "content": content}],
            "max_tokens": tokens,
            "ignore_eos": true,
            "temperature": 0,
            "stream": true,
            "stream_options": {"include_usage": true},
            "return_token_ids": true,
        });
        Self { path: "/v1/chat/completions", body }
    }

    /// The same over the older API.
    pub(crate) fn completion(prompt: &str, tokens: u32) -> Self {
        let mut ask = Self::chat("", tokens);
        ask.body.as_object_mut().unwrap().remove("messages");
        ask.path = "/v1/completions";
        ask.with(json!({ "prompt": prompt }))
    }

    pub(crate) fn with(mut self, fields: Value) -> Self {
        let Value::Object(fields) = fields else { panic!("{fields} are no fields") };
        self.body.as_object_mut().unwrap().extend(fields);
        self
    }

    pub(crate) fn sampled(self, seed: u64) -> Self {
        self.with(json!({ "temperature": 1.0, "seed": seed }))
    }

    /// Answered in one piece.
    pub(crate) fn whole(mut self) -> Self {
        self.body.as_object_mut().unwrap().remove("stream_options");
        self.with(json!({ "stream": false }))
    }

    pub(crate) fn send(&self, url: &str, request_id: &str) -> Reading {
        Reading::open(url, self, request_id)
    }

    /// The whole answer.
    pub(crate) fn answer(&self, url: &str, request_id: &str) -> Answer {
        self.send(url, request_id).read_to_end()
    }
}

impl Answer {
    /// Output tokens of all choices.
    pub(crate) fn tokens(&self) -> usize {
        self.choices.values().map(|choice| choice.token_ids.len()).sum()
    }

    /// Whether it ended as it should.
    pub(crate) fn is_whole(&self) -> bool {
        let finished = |choice: &Choice| choice.finish_reason.is_some();
        self.done && self.error.is_none() && self.usage.is_some() && !self.choices.is_empty() && self.choices.values().all(finished)
    }

    /// Takes a chunk in, or an answer in one piece.
    fn take(&mut self, chunk: &Value) {
        if !chunk["error"].is_null() {
            self.error = Some(chunk["error"].clone());
        }
        if let Some(usage) = chunk["usage"].as_object() {
            self.usage = Some(["prompt_tokens", "completion_tokens", "total_tokens"].map(|count| usage[count].as_u64().unwrap()));
        }
        for part in chunk["choices"].as_array().into_iter().flatten() {
            self.choices.entry(part["index"].as_u64().unwrap()).or_default().take(part);
        }
    }
}

impl Choice {
    fn take(&mut self, part: &Value) {
        let text = [&part["delta"]["content"], &part["message"]["content"], &part["text"]];
        self.text.extend(text.into_iter().filter_map(Value::as_str));
        self.token_ids.extend(part["token_ids"].as_array().into_iter().flatten().map(|id| id.as_u64().unwrap()));
        let logprobs = &part["logprobs"];
        if let Some(entries) = logprobs["content"].as_array() {
            // Chat: an entry for each token.
            self.logprobs.extend(entries.iter().cloned());
        } else if let Some(tokens) = logprobs["tokens"].as_array() {
            // Completions: a list for each part of an entry.
            let lists = ["tokens", "token_logprobs", "top_logprobs", "text_offset"];
            self.logprobs.extend((0..tokens.len()).map(|index| json!(lists.map(|list| logprobs[list][index].clone()))));
        }
        if let Some(reason) = part["finish_reason"].as_str() {
            let former = self.finish_reason.replace(reason.to_owned());
            assert_eq!(former, None, "a choice ends once");
            self.stop_reason = Some(part["stop_reason"].clone());
        }
    }
}

impl Reading {
    fn open(url: &str, ask: &Ask, request_id: &str) -> Self {
        let host = url.strip_prefix("http://").unwrap();
        let mut stream = TcpStream::connect(host).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let (path, body) = (ask.path, ask.body.to_string());
        let length = body.len();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-type: application/json\r\nx-request-id: {request_id}\r\n\
             content-length: {length}\r\n\r\n{body}"
        );
        stream.write_all(head.as_bytes()).unwrap();
        let mut reader = BufReader::new(stream);
        let (mut head, mut chunked) = (String::new(), false);
        while reader.read_line(&mut head).unwrap() > "\r\n".len() {
            chunked |= head.to_ascii_lowercase().starts_with("transfer-encoding: chunked");
            head.clear();
        }
        let body: Box<dyn Read + Send> = if chunked { Box::new(Chunked { reader, left: 0 }) } else { Box::new(reader) };
        Self { lines: BufReader::new(body).lines(), answer: Answer::default() }
    }

    /// Takes the next event in, or the whole answer; false at the end.
    pub(crate) fn next(&mut self) -> bool {
        for line in self.lines.by_ref() {
            let line = line.unwrap();
            if line == "data: [DONE]" {
                self.answer.done = true;
            } else if let Some(event) = line.strip_prefix("data: ") {
                self.answer.take(&serde_json::from_str(event).unwrap());
                return true;
            } else if line.starts_with('{') {
                self.answer.take(&serde_json::from_str(&line).unwrap());
                self.answer.done = true;
                return true;
            } else {
                // Comments, and lines between events.
                assert!(line.is_empty() || line.starts_with(':'), "{line:?}");
            }
        }
        false
    }

    /// Goes on until there are so many output tokens.
    pub(crate) fn read_until(&mut self, tokens: usize) {
        while self.answer.tokens() < tokens {
            assert!(self.next(), "{:?}", self.answer);
        }
    }

    pub(crate) fn read_to_end(mut self) -> Answer {
        while self.next() {}
        self.answer
    }
}

/// A body in the chunks of RFC 9112, section 7.1.
struct Chunked<R> {
    reader: R,
    /// Bytes of the chunk that were not read.
    left: usize,
}

impl<R: BufRead> Read for Chunked<R> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        if self.left == 0 {
            let mut line = String::new();
            // The line break that ends the chunk before.
            while line.trim().is_empty() {
                line.clear();
                if self.reader.read_line(&mut line)? == 0 {
                    return Err(std::io::ErrorKind::UnexpectedEof.into());
                }
            }
            self.left = usize::from_str_radix(line.trim(), 16).unwrap();
            if self.left == 0 {
                return Ok(0);
            }
        }
        let most = into.len().min(self.left);
        let read = self.reader.read(&mut into[..most])?;
        self.left -= read;
        Ok(read)
    }
}
