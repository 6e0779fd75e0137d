use std::{
    path::Path,
    sync::{Arc, OnceLock},
};

use baton_gguf::Header;
use serde_json::{Map, Value};

use crate::{
    ChatTemplate, Clock, Cut, Detokenizer, TemplateError, TextError,
    fragments::Fragments,
    gguf, hf,
    vocabulary::{Vocabulary, encode_bytes4},
};

pub(crate) type Encoder = tokenizers::Tokenizer;

/// What a source of metadata gives.
pub(crate) struct Parts {
    pub(crate) encoder: Encoder,
    pub(crate) vocabulary: Vocabulary,
    /// Put in front of a text when special tokens are asked for.
    pub(crate) bos: Option<u32>,
    pub(crate) eos_ids: Vec<u32>,
    pub(crate) chat_template: Option<ChatTemplate>,
    /// For conversations with tools, where it is another one.
    pub(crate) tool_template: Option<ChatTemplate>,
}

/// A model's tokenizer and chat template. Cheap to share behind an `Arc`; encoding takes `&self` and runs in parallel.
pub struct Tokenizer {
    /// `None`: four bytes make a token.
    encoder: Option<Encoder>,
    vocabulary: Arc<Vocabulary>,
    bos: Option<u32>,
    eos_ids: Vec<u32>,
    chat_template: Option<ChatTemplate>,
    tool_template: Option<ChatTemplate>,
    default_template: ChatTemplate,
    /// Made when they are first asked for.
    fragments: OnceLock<Fragments>,
}

impl Tokenizer {
    /// The tokenizer embedded in a GGUF file: byte-level BPE (`gpt2`) or sentencepiece (`llama`).
    pub fn from_gguf(header: &Header) -> Result<Self, TextError> {
        gguf::parts(header).map(Self::from_parts)
    }

    /// A `tokenizer.json`, or the folder that holds it; files of other usual names beside it are read too.
    pub fn from_hf(path: &Path) -> Result<Self, TextError> {
        hf::parts(path).map(Self::from_parts)
    }

    /// Every four bytes of UTF-8 are one token, as emulated engines count; it has no special tokens.
    pub fn bytes4() -> Self {
        Self {
            encoder: None,
            vocabulary: Arc::new(Vocabulary::Bytes4),
            bos: None,
            eos_ids: Vec::new(),
            chat_template: None,
            tool_template: None,
            default_template: ChatTemplate::chatml(),
            fragments: OnceLock::new(),
        }
    }

    /// Whether text is looked up in a vocabulary, which takes time, and not cut after every four bytes.
    pub fn has_words(&self) -> bool {
        self.encoder.is_some()
    }

    fn from_parts(parts: Parts) -> Self {
        Self {
            encoder: Some(parts.encoder),
            vocabulary: Arc::new(parts.vocabulary),
            bos: parts.bos,
            eos_ids: parts.eos_ids,
            chat_template: parts.chat_template,
            tool_template: parts.tool_template,
            default_template: ChatTemplate::chatml(),
            fragments: OnceLock::new(),
        }
    }

    /// Lets templates ask for the date; without it `strftime_now` is undefined, which published templates allow for.
    #[must_use]
    pub fn with_clock(mut self, clock: &Clock) -> Self {
        self.chat_template = self.chat_template.map(|template| template.with_clock(clock));
        self.tool_template = self.tool_template.map(|template| template.with_clock(clock));
        self
    }

    /// Token ids of `text`. Special tokens written in the text become their ids; `add_special` puts in front what the model
    /// wants there (mostly a beginning-of-text token).
    pub fn encode(&self, text: &str, add_special: bool) -> Vec<u32> {
        let Some(encoder) = &self.encoder else { return encode_bytes4(text) };
        let encoding = encoder.encode_fast(text, add_special).expect("a complete vocabulary encodes any text");
        let ids = encoding.get_ids();
        match self.bos.filter(|_| add_special) {
            Some(bos) => std::iter::once(bos).chain(ids.iter().copied()).collect(),
            None => ids.to_vec(),
        }
    }

    /// Text of the tokens, special ones left out if asked; bytes that are no text become U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut stream = self.detokenizer(skip_special);
        let mut text = ids.iter().fold(String::new(), |text, &id| text + &stream.push(id));
        text.push_str(&stream.finish());
        text
    }

    /// A stream whose pieces join to what [`Self::decode`] gives.
    pub fn detokenizer(&self, skip_special: bool) -> Detokenizer {
        Detokenizer::new(Arc::clone(&self.vocabulary), skip_special)
    }

    /// The bytes that a token stands for; empty outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.vocabulary.append(id, &mut bytes);
        bytes
    }

    /// How many bytes a token stands for; none outside the vocabulary.
    pub fn token_len(&self, id: u32) -> usize {
        self.vocabulary.len_of(id)
    }

    /// `count` tokens that together are `bytes`, after each of which a character is incomplete; whether they are sure to be the ones counts
    /// ways of fewer tokens, too. So tokens are known again that a server kept back until their character was complete.
    pub fn fragments(&self, bytes: &[u8], count: usize) -> Option<Cut> {
        self.fragments.get_or_init(|| Fragments::of(&self.vocabulary)).cut(bytes, count)
    }

    /// The token as its vocabulary writes it (`Ġof`), `None` outside it.
    pub fn token_str(&self, id: u32) -> Option<String> {
        match &self.encoder {
            Some(encoder) => encoder.id_to_token(id),
            None => Some(String::from_utf8_lossy(&self.token_bytes(id)).into_owned()),
        }
    }

    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.encoder.as_ref().and_then(|encoder| encoder.token_to_id(token))
    }

    pub fn is_special(&self, id: u32) -> bool {
        self.vocabulary.is_special(id)
    }

    /// Tokens that end a generation, in ascending order.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
    }

    /// One more than the largest token id; 2^32 for [`Self::bytes4`].
    pub fn vocab_size(&self) -> u64 {
        self.vocabulary.size()
    }

    /// The template of the model's metadata, if it has one.
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.chat_template.as_ref()
    }

    /// The prompt for a conversation, by the model's template or by `ChatML` where it has none.
    pub fn render_chat(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        add_generation_prompt: bool,
        kwargs: &Map<String, Value>,
    ) -> Result<String, TemplateError> {
        self.template(tools).render(messages, tools, add_generation_prompt, kwargs)
    }

    /// The prompt for a conversation whose last message is to go on.
    pub fn render_chat_to_continue(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        kwargs: &Map<String, Value>,
    ) -> Result<String, TemplateError> {
        self.template(tools).render_to_continue(messages, tools, kwargs)
    }

    fn template(&self, tools: Option<&Value>) -> &ChatTemplate {
        let with_tools = self.tool_template.as_ref().filter(|_| tools.is_some());
        with_tools.or(self.chat_template.as_ref()).unwrap_or(&self.default_template)
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut debug = f.debug_struct("Tokenizer");
        debug.field("vocab_size", &self.vocab_size()).field("bos", &self.bos).field("eos_ids", &self.eos_ids).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn bytes4_gives_back_any_text_without_zero_characters(text in "[^\0]*") {
            let tokenizer = Tokenizer::bytes4();
            let ids = tokenizer.encode(&text, true);
            prop_assert_eq!(ids.len(), text.len().div_ceil(4));
            prop_assert_eq!(tokenizer.decode(&ids, true), text);
        }
    }

    #[test]
    fn bytes4_chats_in_chatml() {
        let messages = serde_json::json!([{ "role": "user", "content": "hi" }]);
        let prompt = Tokenizer::bytes4().render_chat(&messages, None, true, &Map::new()).unwrap();
        assert_eq!(prompt, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
    }
}
