//! From a prompt to its tokens and block keys, as exactly as the gateway can.

use std::sync::Arc;

use baton_kv::{BlockKey, CacheDomain, KeyDomain};
use baton_text::{TemplateError, Tokenizer};
use baton_units::{BlockSize, Tokens};
use baton_wire::openai::Prompt;
use bytes::Bytes;
use serde_json::{Value, json};

use crate::{
    intake::{ChatPrompt, PromptSource},
    segments::Segments,
    tenants::common,
    turns::{Parts, Turns},
};

/// Prompts above this many bytes are tokenized off the threads that carry streams: HF tokenizers take about 1 ms for 4 KiB.
const INLINE_BYTES_MAX: usize = 8 << 10;
/// The same where bytes are counted and words are not looked up: a chat of 40 messages takes 0.2 ms with 64 KiB and 0.8 ms with 256 KiB.
const INLINE_COUNTED_BYTES_MAX: usize = 256 << 10;

/// The model part of every key domain. One constant serves several models, since a replica's KV is of its own model only and a request
/// is never quoted by replicas of another one.
pub(crate) const KEY_MODEL: &str = "";

/// A prompt as the router sees it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tokenized {
    /// Of the first prompt when there are several.
    pub(crate) tokens: Vec<u32>,
    /// Of the prompts after it.
    pub(crate) further: Vec<Vec<u32>>,
    /// Over all prompts.
    pub(crate) count: Tokens,
    /// Of the longest prompt: what must fit a replica's context.
    pub(crate) longest: Tokens,
    /// The tokens are the engine's; otherwise four bytes of text stand for one, which still finds shared beginnings.
    pub(crate) exact: bool,
}

/// Tokenizes by the model's own tokenizer and template where they are known.
#[derive(Debug, Clone)]
pub(crate) struct Tokenization {
    text: Option<Arc<Tokenizer>>,
    segments: Option<Arc<Segments>>,
    turns: Option<Arc<Turns>>,
    estimate: Arc<Tokenizer>,
}

impl Tokenization {
    /// Remembers tokens in at most `cache_bytes` of memory: a third each for messages, pieces between special tokens, and words.
    pub(crate) fn new(text: Option<Arc<Tokenizer>>, cache_bytes: usize) -> Self {
        let share = cache_bytes / 3;
        let segments = text.clone().and_then(|text| Segments::new(text, 2 * share)).map(Arc::new);
        let turns = text.clone().zip(segments.clone()).and_then(|(text, segments)| Turns::new(text, segments, share)).map(Arc::new);
        Self { text, segments, turns, estimate: Arc::new(Tokenizer::bytes4()) }
    }

    /// Memory of what is remembered.
    pub(crate) fn cached_bytes(&self) -> usize {
        let segments = self.segments.as_ref().map_or(0, |segments| segments.cached_bytes());
        segments + self.turns.as_ref().map_or(0, |turns| turns.cached_bytes())
    }

    /// `domain` names those who may find out that a text was seen before.
    pub(crate) async fn tokenize(&self, source: &PromptSource, domain: u64) -> Tokenized {
        let parts = self.parts(source, domain);
        let new_bytes = parts.as_ref().map_or_else(|| source.bytes(), |parts| parts.new_bytes);
        let has_words = self.text.as_ref().is_some_and(|text| text.has_words());
        if new_bytes <= if has_words { INLINE_BYTES_MAX } else { INLINE_COUNTED_BYTES_MAX } {
            return self.tokenize_now(source, parts, domain);
        }
        let (tokenization, source) = (self.clone(), source.clone());
        tokio::task::spawn_blocking(move || tokenization.tokenize_now(&source, parts, domain)).await.expect("tokenizing does not panic")
    }

    /// What is known of a conversation, where it can be tokenized by its messages.
    fn parts(&self, source: &PromptSource, domain: u64) -> Option<Parts> {
        match (&self.turns, source) {
            (Some(turns), PromptSource::Chat(chat)) if chat.is_by_turns() => Some(turns.find(chat, domain)),
            _ => None,
        }
    }

    fn tokenize_now(&self, source: &PromptSource, parts: Option<Parts>, domain: u64) -> Tokenized {
        match source {
            PromptSource::Chat(chat) => {
                let by_parts = parts.zip(self.turns.as_ref()).and_then(|(parts, turns)| turns.encode(chat, parts));
                by_parts.map_or_else(|| self.tokenize_chat(chat, domain), Tokenized::exact)
            }
            PromptSource::Completion { prompt, add_special } => self.tokenize_completion(prompt, *add_special),
        }
    }

    fn tokenize_chat(&self, chat: &ChatPrompt, domain: u64) -> Tokenized {
        let rendered = self.text.as_ref().map(|text| Ok::<_, TemplateError>((text, chat.render(text)?)));
        match rendered {
            Some(Ok((text, prompt))) => Tokenized::exact(match &self.segments {
                Some(segments) if !chat.add_special => segments.encode(&prompt, domain),
                Some(_) | None => text.encode(&prompt, chat.add_special),
            }),
            Some(Err(error)) => {
                // The engine may know better (images), and says itself what it does not take.
                tracing::debug!(%error, "estimated a prompt that the chat template does not render");
                self.estimate(&chat.text())
            }
            None => self.estimate(&chat.text()),
        }
    }

    fn tokenize_completion(&self, prompt: &Prompt, add_special: bool) -> Tokenized {
        let text = |text: &String| match &self.text {
            Some(tokenizer) => Tokenized::exact(tokenizer.encode(text, add_special)),
            None => self.estimate(text),
        };
        match prompt {
            Prompt::Text(one) => text(one),
            Prompt::Tokens(tokens) => Tokenized::exact(tokens.clone()),
            Prompt::Texts(texts) => Tokenized::first_of(texts.iter().map(text)),
            Prompt::TokenLists(lists) => Tokenized::first_of(lists.iter().cloned().map(Tokenized::exact)),
        }
    }

    /// Tokens of a completion that begins with this text. `None` where the model's are not known.
    pub(crate) fn text_prefix(&self, text: &str) -> Option<Vec<u32>> {
        self.text.as_ref().map(|tokenizer| tokenizer.encode(text, true))
    }

    /// Tokens that all chats begin with that begin with this system prompt. `None` where the model's are not known, or its template takes
    /// no system prompt.
    pub(crate) fn system_prefix(&self, system: &str) -> Option<Vec<u32>> {
        // What does not depend on what the user says.
        let [one, other] = ["a", "b"].map(|content| {
            let messages = [json!({ "role": "system", "content": system }), json!({ "role": "user", "content": content })];
            self.tokenize_chat(&ChatPrompt::of(&messages), 0)
        });
        let shared = common(&one.tokens, &other.tokens);
        (one.exact && other.exact).then(|| one.tokens[..shared].to_vec())
    }

    fn estimate(&self, text: &str) -> Tokenized {
        Tokenized { exact: false, ..Tokenized::exact(self.estimate.encode(text, false)) }
    }
}

impl Tokenized {
    fn exact(tokens: Vec<u32>) -> Self {
        let count = Tokens(tokens.len() as u32);
        Self { count, longest: count, tokens, further: Vec::new(), exact: true }
    }

    fn first_of(mut prompts: impl Iterator<Item = Self>) -> Self {
        let Some(first) = prompts.next() else { return Self::default() };
        prompts.fold(first, |mut all, next| {
            all.count += next.count;
            all.longest = all.longest.max(next.longest);
            all.exact &= next.exact;
            all.further.push(next.tokens);
            all
        })
    }
}

impl PromptSource {
    /// About how much text there is to tokenize; ids need no tokenizing.
    fn bytes(&self) -> usize {
        match self {
            Self::Chat(chat) => chat.messages.iter().map(Bytes::len).sum(),
            Self::Completion { prompt: Prompt::Text(text), .. } => text.len(),
            Self::Completion { prompt: Prompt::Texts(texts), .. } => texts.iter().map(String::len).sum(),
            Self::Completion { prompt: Prompt::Tokens(_) | Prompt::TokenLists(_), .. } => 0,
        }
    }
}

impl ChatPrompt {
    /// A chat of these messages that asks for an answer, with nothing else.
    pub(crate) fn of(messages: &[Value]) -> Self {
        let messages = messages.iter().map(|message| message.to_string().into()).collect();
        Self { messages, tools: None, kwargs: None, add_generation_prompt: true, continues: false, add_special: false }
    }

    /// Each message stands for itself: none is to go on, and none is by a developer, which may become a part of the first one.
    fn is_by_turns(&self) -> bool {
        let has_developer = || self.messages.iter().any(|message| memchr::memmem::find(message, b"developer").is_some());
        !self.add_special && !self.continues && !self.messages.is_empty() && !has_developer()
    }

    fn render(&self, text: &Tokenizer) -> Result<String, TemplateError> {
        let messages = self.messages.iter().map(|message| serde_json::from_slice(message).unwrap_or_default()).collect();
        let (messages, tools, kwargs) = (Value::Array(messages), self.tools(), self.kwargs());
        if self.continues {
            return text.render_chat_to_continue(&messages, tools.as_ref(), &kwargs);
        }
        text.render_chat(&messages, tools.as_ref(), self.add_generation_prompt, &kwargs)
    }

    /// The messages' JSON, of which a longer conversation's begins with that of a shorter one.
    fn text(&self) -> String {
        self.messages.iter().map(|message| String::from_utf8_lossy(message)).collect::<Vec<_>>().join(",")
    }
}

/// The chain of a request's block keys, which grows from its prompt to its output.
#[derive(Debug, Clone)]
pub(crate) struct KeyChain {
    domain: CacheDomain,
    size: BlockSize,
    tokens: Vec<u32>,
    prompt: usize,
    public: Tokens,
}

impl KeyChain {
    /// `public` tokens of the prompt are found whatever the salt.
    pub(crate) fn new(adapter: Option<&str>, salt: Option<&str>, public: Tokens, size: BlockSize, tokens: Vec<u32>) -> Self {
        let domain = CacheDomain::with_public(KeyDomain { model: KEY_MODEL, adapter, salt }, public.full_blocks(size));
        Self { domain, size, prompt: tokens.len(), tokens, public }
    }

    /// Keys of the full blocks so far.
    pub(crate) fn keys(&self) -> Arc<[BlockKey]> {
        self.domain.keys(&self.tokens, self.size).into()
    }

    /// Tokens of prompt and output.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens of the prompt alone.
    pub(crate) fn prompt(&self) -> &[u32] {
        &self.tokens[..self.prompt]
    }

    /// Leading tokens of the prompt for which its salt does not count.
    pub(crate) fn public(&self) -> Tokens {
        self.public
    }

    pub(crate) fn block_size(&self) -> BlockSize {
        self.size
    }

    pub(crate) fn extend(&mut self, output: impl Iterator<Item = u32>) {
        self.tokens.extend(output);
    }

    /// Back to the prompt alone, for an attempt that starts afresh.
    pub(crate) fn forget_output(&mut self) {
        self.tokens.truncate(self.prompt);
    }
}

#[cfg(test)]
mod tests {
    use baton_wire::openai::Prompt;
    use http::HeaderMap;

    use super::*;
    use crate::{
        config::FrontConfig,
        intake::{Api, Intake},
    };

    fn chat(body: &str) -> PromptSource {
        Intake::read(Api::Chat, &HeaderMap::new(), &body.to_owned().into(), &FrontConfig::default()).unwrap().prompt
    }

    fn keys(tokenized: &Tokenized) -> Arc<[BlockKey]> {
        KeyChain::new(None, None, Tokens::ZERO, BlockSize::new(4).unwrap(), tokenized.tokens.clone()).keys()
    }

    #[test]
    fn a_known_template_gives_the_engines_tokens() {
        let tokenization = Tokenization::new(Some(Arc::new(Tokenizer::bytes4())), 1 << 20);
        let tokenized = tokenization.tokenize_now(&chat(r#"{"messages":[{"role":"user","content":"hi"}]}"#), None, 0);
        assert!(tokenized.exact);
        let prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";
        assert_eq!(tokenized.tokens, Tokenizer::bytes4().encode(prompt, false));
    }

    #[test]
    fn without_a_tokenizer_a_growing_conversation_still_shares_its_beginning() {
        let tokenization = Tokenization::new(None, 1 << 20);
        let long = "x".repeat(200);
        let turn = format!(r#"{{"role":"user","content":"{long}"}}"#);
        let first = tokenization.tokenize_now(&chat(&format!(r#"{{"messages":[{turn}]}}"#)), None, 0);
        let second =
            tokenization.tokenize_now(&chat(&format!(r#"{{"messages":[{turn},{{"role":"assistant","content":"ok"}}]}}"#)), None, 0);
        assert!(!first.exact && second.count > first.count);
        let (first, second) = (keys(&first), keys(&second));
        let shared = first.iter().zip(&*second).take_while(|(a, b)| a == b).count();
        assert!(shared + 1 >= first.len() && shared > 8, "{shared} of {}", first.len());
    }

    #[test]
    fn what_is_remembered_of_many_prompts_keeps_its_bound() {
        let file = std::fs::read(baton_testkit::smollm2()).unwrap();
        let text = Arc::new(Tokenizer::from_gguf(&baton_gguf::Header::parse(&file).unwrap()).unwrap());
        let bytes = 192 << 10;
        let tokenization = Tokenization::new(Some(text.clone()), bytes);
        let mut most = 0;
        for number in 0..400 {
            let words: Vec<String> = ('a'..='z').map(|letter| format!("w{}", letter.to_string().repeat(1 + number % 60))).collect();
            let body = json!({ "messages": [{ "role": "user", "content": format!("{number} {}", words.join(" ")) }] });
            let source = chat(&body.to_string());
            let tokenized = tokenization.tokenize_now(&source, tokenization.parts(&source, 0), 0);
            let PromptSource::Chat(prompt) = &source else { unreachable!("it is a chat") };
            assert_eq!(tokenized.tokens, text.encode(&prompt.render(&text).unwrap(), false));
            most = most.max(tokenization.cached_bytes());
            assert!(most <= bytes, "{most} after {number} prompts");
        }
        assert!(most > bytes * 3 / 4, "{most}: more was seen than can be remembered");
    }

    #[test]
    fn a_public_prefix_is_what_every_prompt_begins_with_that_has_it() {
        let file = std::fs::read(baton_testkit::smollm2()).unwrap();
        let text = Arc::new(Tokenizer::from_gguf(&baton_gguf::Header::parse(&file).unwrap()).unwrap());
        let tokenization = Tokenization::new(Some(text.clone()), 1 << 20);
        let system = tokenization.system_prefix("You are kind, and answer briefly.").unwrap();
        let written = "<|im_start|>system\nYou are kind, and answer briefly.<|im_end|>\n<|im_start|>user\n";
        assert_eq!(system, text.encode(written, false));
        let asks = |system: &str, user: &str| {
            let messages = json!([{ "role": "system", "content": system }, { "role": "user", "content": user }]);
            tokenization.tokenize_now(&chat(&json!({ "messages": messages }).to_string()), None, 0).tokens
        };
        for user in ["a", "b", "\n", " and so on", "What is it?"] {
            let tokens = asks("You are kind, and answer briefly.", user);
            assert!(tokens.len() > system.len() && common(&tokens, &system) + 1 >= system.len(), "{user:?}");
        }
        assert!(common(&asks("You are kind, and answer briefly. My name is Ada.", "a"), &system) < 14);
        assert_eq!(tokenization.text_prefix("once upon"), Some(text.encode("once upon", true)));
        let unknown = Tokenization::new(None, 1 << 20);
        assert_eq!((unknown.text_prefix("x"), unknown.system_prefix("x")), (None, None));
    }

    #[test]
    fn what_the_template_refuses_is_estimated() {
        let tokenization = Tokenization::new(Some(Arc::new(Tokenizer::bytes4())), 1 << 20);
        let image = r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:"}}]}]}"#;
        assert!(!tokenization.tokenize_now(&chat(image), None, 0).exact);
    }

    #[test]
    fn several_prompts_count_together_and_the_first_names_the_blocks() {
        let tokenization = Tokenization::new(None, 1 << 20);
        let lists = Prompt::TokenLists(vec![vec![1, 2, 3], vec![4, 5]]);
        let tokenized = tokenization.tokenize_completion(&lists, true);
        assert_eq!((tokenized.tokens.as_slice(), tokenized.count, tokenized.exact), ([1, 2, 3].as_slice(), Tokens(5), true));
        assert_eq!(tokenized.longest, Tokens(3));
    }

    #[test]
    fn adapters_and_salts_have_chains_of_their_own() {
        let chain = |adapter, salt| KeyChain::new(adapter, salt, Tokens::ZERO, BlockSize::new(2).unwrap(), vec![1, 2]).keys();
        let chains = [chain(None, None), chain(Some("a"), None), chain(None, Some("a"))];
        assert!(chains[0] != chains[1] && chains[0] != chains[2] && chains[1] != chains[2]);
    }
}
