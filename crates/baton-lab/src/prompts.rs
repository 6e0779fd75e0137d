//! Conversations that grow by a few hundred bytes a turn, as bodies of chat requests.

use crate::engine::MODEL;

/// Bytes that a turn (an answer and the next question) adds at most.
pub(crate) const TURN_BYTES_MAX: usize = 256;
/// Histories that conversations of one size share.
const HISTORIES: usize = 16;
const WORDS: &str = "the of and to in is that it for was on are as with they be at one have this from by hot word but what some can out \
    other were all there when up use your how said an each she which do their time if will way about many then them write would like so \
    these her long make thing see him two has look more day could go come did number sound no most people my over know water than call \
    first who may down side been now find any new work part take get place made live where after back little only round man year came \
    show every good me give our under name very through just form sentence great think say help low line differ turn cause much mean \
    before move right boy old too same tell does set three want air well also play small end put home read hand port large spell add";

/// What one class of requests looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Class {
    pub(crate) name: &'static str,
    /// About the bytes of a prompt.
    bytes: usize,
    pub(crate) tokens: u32,
    pub(crate) stream: bool,
    /// The engine writes each event by itself.
    writes: bool,
    /// Between an engine's writes.
    every_ms: u64,
    /// No prompt shares anything with another one.
    pub(crate) cold: bool,
}

pub(crate) const CLASSES: [Class; 6] = [
    Class { name: "small", bytes: 1 << 10, tokens: 16, stream: false, writes: false, every_ms: 0, cold: false },
    Class { name: "big", bytes: 16 << 10, tokens: 16, stream: false, writes: false, every_ms: 0, cold: false },
    Class { name: "stream", bytes: 1 << 10, tokens: 64, stream: true, writes: true, every_ms: 0, cold: false },
    Class { name: "slow", bytes: 1 << 10, tokens: 16, stream: false, writes: true, every_ms: 0, cold: false },
    Class { name: "steady", bytes: 1 << 10, tokens: 64, stream: true, writes: true, every_ms: 20, cold: false },
    Class { name: "cold", bytes: 16 << 10, tokens: 16, stream: false, writes: false, every_ms: 0, cold: true },
];

impl Class {
    pub(crate) fn named(name: &str) -> Result<Self, String> {
        let names = || CLASSES.map(|class| class.name).join(", ");
        CLASSES.into_iter().find(|class| class.name == name).ok_or_else(|| format!("no class {name}; there are {}", names()))
    }

    /// Its engines write at an even pace.
    pub(crate) fn is_steady(self) -> bool {
        self.every_ms > 0
    }

    /// The same with answers of another length.
    pub(crate) fn with_tokens(self, tokens: u32) -> Self {
        Self { tokens, ..self }
    }
}

/// A client's conversations, one after the other.
#[derive(Debug)]
pub(crate) struct Conversations {
    class: Class,
    words: Vec<&'static str>,
    rng: fastrand::Rng,
    messages: String,
}

impl Conversations {
    pub(crate) fn new(class: Class, seed: u64) -> Self {
        let words = WORDS.split_ascii_whitespace().collect();
        Self { class, words, rng: fastrand::Rng::with_seed(seed), messages: String::new() }
    }

    /// The histories that conversations begin with, each as a request, for a warm start.
    pub(crate) fn histories(class: Class) -> Vec<Vec<u8>> {
        if class.cold {
            return Vec::new();
        }
        (0..HISTORIES)
            .map(|number| {
                let mut one = Self::new(class, 0);
                one.messages = history(class, &one.words, number as u64);
                one.request()
            })
            .collect()
    }

    /// The next turn's request, head and body.
    pub(crate) fn next_request(&mut self) -> Vec<u8> {
        if self.class.cold {
            // A seed that no history has.
            self.messages = history(self.class, &self.words, self.rng.u64(1 << 32..));
        } else {
            if self.messages.is_empty() || self.messages.len() > self.class.bytes * 9 / 8 {
                self.messages = history(self.class, &self.words, self.rng.u64(..HISTORIES as u64));
            }
            turn(&mut self.messages, &self.words, &mut self.rng);
        }
        self.request()
    }

    fn request(&self) -> Vec<u8> {
        let Class { tokens, stream, writes, every_ms, .. } = self.class;
        let body = format!(
            r#"{{"model":"{MODEL}","messages":[{}],"max_tokens":{tokens},"temperature":0.7,"stream":{stream},"lab_writes":{writes},"lab_every_ms":{every_ms}}}"#,
            self.messages
        );
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: lab\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        [head, body].concat().into_bytes()
    }
}

/// Seven eighths of the class's size, in turns of a conversation that has gone on for a while.
fn history(class: Class, words: &[&str], seed: u64) -> String {
    let mut rng = fastrand::Rng::with_seed(seed.wrapping_add(0x5eed));
    let mut messages = format!(r#"{{"role":"system","content":"{}"}}"#, text(words, &mut rng, 200));
    messages += r#",{"role":"user","content":""#;
    messages += &text(words, &mut rng, 100);
    messages += r#""}"#;
    while messages.len() + TURN_BYTES_MAX < class.bytes * 7 / 8 {
        turn(&mut messages, words, &mut rng);
    }
    messages
}

fn turn(messages: &mut String, words: &[&str], rng: &mut fastrand::Rng) {
    let before = messages.len();
    let (answer, question) = (text(words, rng, 80), text(words, rng, 80));
    for part in [r#",{"role":"assistant","content":""#, &answer, r#""},{"role":"user","content":""#, &question, r#""}"#] {
        messages.push_str(part);
    }
    debug_assert!(messages.len() - before <= TURN_BYTES_MAX);
}

/// Words of at most `bytes` bytes in all.
fn text(words: &[&str], rng: &mut fastrand::Rng, bytes: usize) -> String {
    let mut text = String::with_capacity(bytes);
    loop {
        let word = words[rng.usize(..words.len())];
        if text.len() + word.len() + 1 > bytes {
            return text;
        }
        if !text.is_empty() {
            text.push(' ');
        }
        text.push_str(word);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_prompt_is_the_one_before_and_a_turn_until_a_conversation_ends() {
        for class in CLASSES.into_iter().filter(|class| !class.cold) {
            let mut conversations = Conversations::new(class, 1);
            let (mut before, mut grew) = (String::new(), 0);
            for _ in 0..100 {
                conversations.next_request();
                let now = conversations.messages.clone();
                grew += u32::from(!before.is_empty() && now.starts_with(&before));
                assert!(now.len() <= class.bytes * 9 / 8 + TURN_BYTES_MAX && now.len() >= class.bytes * 5 / 8, "{}", now.len());
                before = now;
            }
            assert!(grew >= 40, "{}: {grew}", class.name);
        }
    }
}
