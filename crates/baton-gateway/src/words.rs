//! Tokens of text by its words.
//!
//! A space between two ASCII letters begins a word in the way that byte-level tokenizers cut text, and where no token of the vocabulary
//! holds such a place inside, nothing on one side of it bears on the tokens of the other. So the words between these places can be
//! looked up one by one, and a run of unknown ones is encoded as it is. [`Words::new`] looks at every token and tries out some text.

use std::sync::Arc;

use baton_text::Tokenizer;
use memchr::memchr_iter;
use xxhash_rust::xxh3::xxh3_128;

use crate::pieces::Pieces;

/// Text with what tokenizers are known to treat apart.
const PROBES: [&str; 6] = [
    "The quick brown fox doesn't jump over 12 lazy dogs, does it? I'll say so; we've seen A B C.",
    "fn main() {\n    let total = items.iter().map(|x| x.price * 2.5e-3).sum::<f64>();\n\treturn total; // e.g. a b\n}\n",
    "  leading and trailing  spaces,\ttabs\nand a b\r\n\r\nbreaks  \n x y ",
    "caf\u{e9} na\u{ef}ve \u{4f60}\u{597d} w \u{4e16}\u{754c} e\u{301}t e\u{301} \u{1f600} ok \u{1f468}\u{200d}\u{1f469} a\u{301} b",
    "<a href=\"x y\">b c</a> {\"k\": [1, \"v w\", null]} a_b c-d E=mc2 3rd 100th x1 y2",
    "WORDS in CAPS and camelCase snake_case s t re ve m ll d 's 't 're word 's word",
];

/// A tokenizer that remembers words.
#[derive(Debug)]
pub(crate) struct Words {
    tokenizer: Arc<Tokenizer>,
    known: Pieces,
}

impl Words {
    /// `None` for a tokenizer whose words do not add up to the text. Takes at most `cache_bytes` of memory.
    pub(crate) fn new(tokenizer: Arc<Tokenizer>, cache_bytes: usize) -> Option<Self> {
        let vocabulary = u32::try_from(tokenizer.vocab_size()).ok()?;
        let mut tokens = (0..vocabulary).filter(|&id| !tokenizer.is_special(id));
        let crosses = tokens.any(|id| tokenizer.token_bytes(id).windows(3).any(|bytes| is_cut(bytes[0], bytes[2]) && bytes[1] == b' '));
        let adds_up = |text: &str| {
            let parts: Vec<u32> = words(text).flat_map(|word| tokenizer.encode(word, false)).collect();
            parts == tokenizer.encode(text, false)
        };
        (!crosses && PROBES.into_iter().all(adds_up)).then(|| Self { tokenizer, known: Pieces::new(cache_bytes) })
    }

    pub(crate) fn cached_bytes(&self) -> usize {
        self.known.bytes()
    }

    /// Appends what `tokenizer.encode(text, false)` gives.
    pub(crate) fn encode(&self, text: &str, tokens: &mut Vec<u32>) {
        let mut unknown = None;
        let mut at = 0;
        let mut known = self.known.lock();
        for word in words(text) {
            let found = known.get(xxh3_128(word.as_bytes()));
            match (found, unknown) {
                (Some(found), None) => tokens.extend_from_slice(found),
                (Some(found), Some(from)) => {
                    let found = found.clone();
                    drop(known);
                    self.encode_unknown(&text[from..at], tokens);
                    tokens.extend_from_slice(&found);
                    unknown = None;
                    known = self.known.lock();
                }
                (None, None) => unknown = Some(at),
                (None, Some(_)) => {}
            }
            at += word.len();
        }
        drop(known);
        if let Some(from) = unknown {
            self.encode_unknown(&text[from..], tokens);
        }
    }

    /// Encodes a run of words and remembers each.
    fn encode_unknown(&self, run: &str, tokens: &mut Vec<u32>) {
        let encoded = self.tokenizer.encode(run, false);
        tokens.extend_from_slice(&encoded);
        let mut rest = encoded.as_slice();
        let mut known = self.known.lock();
        for word in words(run) {
            let mut length = 0;
            let count = rest.iter().take_while(|&&id| {
                let goes_on = length < word.len();
                length += if goes_on { self.tokenizer.token_len(id) } else { 0 };
                goes_on
            });
            let (own, others) = rest.split_at(count.count());
            // A tokenizer that changes its text gives tokens of other lengths; then nothing can be told of the words that follow.
            if length != word.len() {
                return;
            }
            known.insert(xxh3_128(word.as_bytes()), own.into());
            rest = others;
        }
    }
}

/// Whether a space between these begins a word.
fn is_cut(before: u8, after: u8) -> bool {
    before.is_ascii_alphabetic() && after.is_ascii_alphabetic()
}

/// The words of a text, which joined are the text.
fn words(text: &str) -> impl Iterator<Item = &str> {
    let bytes = text.as_bytes();
    let cuts = memchr_iter(b' ', bytes).filter(|&at| at > 0 && at + 1 < bytes.len() && is_cut(bytes[at - 1], bytes[at + 1]));
    let mut from = 0;
    cuts.chain((!text.is_empty()).then_some(text.len())).map(move |to| &text[std::mem::replace(&mut from, to)..to])
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use proptest::prelude::*;

    use super::*;

    static WORDS: LazyLock<Words> = LazyLock::new(|| {
        let file = std::fs::read(baton_testkit::smollm2()).unwrap();
        let tokenizer = Tokenizer::from_gguf(&baton_gguf::Header::parse(&file).unwrap()).unwrap();
        Words::new(Arc::new(tokenizer), 1 << 20).expect("a byte-level tokenizer without tokens of several words")
    });

    proptest! {
        #[test]
        fn words_give_what_the_whole_gives(
            parts in prop::collection::vec("[a-zA-Z]{1,6}|[a-e .,']{1,6}| |  |\n|[0-9]{1,4}|\\PC{1,4}|'s|\u{301}|don't|\t|[(){}=\"]{1,3}", 0..30),
            spaced: bool,
        ) {
            let text = parts.join(if spaced { " " } else { "" });
            prop_assert_eq!(words(&text).collect::<String>(), text.clone());
            let whole = WORDS.tokenizer.encode(&text, false);
            // The second time from memory.
            for _ in 0..2 {
                let mut tokens = Vec::new();
                WORDS.encode(&text, &mut tokens);
                prop_assert_eq!(&tokens, &whole);
            }
        }
    }

    #[test]
    fn a_run_of_unknown_words_teaches_each_of_them() {
        WORDS.encode("memorable elephants remember unforgettably", &mut Vec::new());
        for word in ["memorable", " elephants", " remember", " unforgettably"] {
            let known = WORDS.known.lock().get(xxh3_128(word.as_bytes())).cloned();
            assert_eq!(known.as_deref(), Some(WORDS.tokenizer.encode(word, false).as_slice()), "{word}");
        }
    }
}
