//! Tokenizing a growing conversation without doing its beginning again.
//!
//! A tokenizer cuts its text at special tokens before it does anything else, so the pieces between them can be encoded one by one and
//! remembered. That is exact for tokenizers whose special tokens take nothing from their neighbours and whose pieces know nothing of
//! their place, which [`Segments::new`] tries out for every special token.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use baton_text::Tokenizer;
use xxhash_rust::xxh3::xxh3_128;

/// Tokens remembered in either of two generations; 4 bytes each, so at most 32 MiB in all.
const GENERATION_TOKENS: usize = 4 << 20;
/// Shorter pieces are encoded faster than they are looked up.
const PIECE_BYTES_MIN: usize = 48;
/// A vocabulary beyond this names no tokens (four bytes as one token has 2^32).
const VOCABULARY_MAX: u64 = 1 << 20;
/// Text around a special token that shows whether it takes spaces or whether a piece depends on its place.
const PROBES: [(&str, &str); 5] = [("", "b"), ("a", "b"), ("a ", " b"), ("a\n", "\n\nb"), ("é \t", "user\nb")];

/// A tokenizer that remembers pieces.
#[derive(Debug)]
pub(crate) struct Segments {
    tokenizer: Arc<Tokenizer>,
    /// Text and id of each special token, the longest first.
    specials: Vec<(String, u32)>,
    /// Bytes with which a special token begins.
    begins: Box<[bool; 256]>,
    pieces: Mutex<Pieces>,
}

/// Pieces by the 128-bit hash of their text: two equal ones by chance are not to be expected, and would mislead a belief only.
#[derive(Debug, Default)]
struct Pieces {
    young: HashMap<u128, Arc<[u32]>>,
    old: HashMap<u128, Arc<[u32]>>,
    young_tokens: usize,
}

impl Segments {
    /// `None` for a tokenizer whose pieces do not add up to the whole.
    pub(crate) fn new(tokenizer: Arc<Tokenizer>) -> Option<Self> {
        let vocabulary = u32::try_from(tokenizer.vocab_size()).ok().filter(|size| u64::from(*size) <= VOCABULARY_MAX)?;
        let mut specials: Vec<(String, u32)> = (0..vocabulary)
            .filter(|&id| tokenizer.is_special(id))
            .filter_map(|id| Some((tokenizer.token_str(id).filter(|text| !text.is_empty())?, id)))
            .collect();
        specials.sort_by_key(|(text, _)| std::cmp::Reverse(text.len()));
        let adds_up = specials.iter().all(|(special, id)| {
            PROBES.iter().all(|(before, after)| {
                let parts = [tokenizer.encode(before, false), vec![*id], tokenizer.encode(after, false)].concat();
                tokenizer.encode(&format!("{before}{special}{after}"), false) == parts
            })
        });
        if specials.is_empty() || !adds_up {
            return None;
        }
        let mut begins = Box::new([false; 256]);
        for (text, _) in &specials {
            begins[usize::from(text.as_bytes()[0])] = true;
        }
        Some(Self { tokenizer, specials, begins, pieces: Mutex::default() })
    }

    /// What `tokenizer.encode(text, false)` gives.
    pub(crate) fn encode(&self, text: &str) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(text.len() / 3);
        let (mut start, mut at) = (0, 0);
        while at < text.len() {
            match self.special_at(&text.as_bytes()[at..]) {
                Some((length, id)) => {
                    self.encode_piece(&text[start..at], &mut tokens);
                    tokens.push(id);
                    at += length;
                    start = at;
                }
                None => at += 1,
            }
        }
        self.encode_piece(&text[start..], &mut tokens);
        tokens
    }

    fn special_at(&self, text: &[u8]) -> Option<(usize, u32)> {
        if !self.begins[usize::from(text[0])] {
            return None;
        }
        self.specials.iter().find(|(special, _)| text.starts_with(special.as_bytes())).map(|(special, id)| (special.len(), *id))
    }

    fn encode_piece(&self, piece: &str, tokens: &mut Vec<u32>) {
        if piece.len() < PIECE_BYTES_MIN {
            if !piece.is_empty() {
                tokens.extend(self.tokenizer.encode(piece, false));
            }
            return;
        }
        let key = xxh3_128(piece.as_bytes());
        let known = self.pieces().get(key);
        let piece = known.unwrap_or_else(|| {
            let encoded: Arc<[u32]> = self.tokenizer.encode(piece, false).into();
            self.pieces().insert(key, encoded.clone());
            encoded
        });
        tokens.extend_from_slice(&piece);
    }

    fn pieces(&self) -> std::sync::MutexGuard<'_, Pieces> {
        self.pieces.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pieces {
    fn get(&mut self, key: u128) -> Option<Arc<[u32]>> {
        if let Some(piece) = self.young.get(&key) {
            return Some(piece.clone());
        }
        let piece = self.old.remove(&key)?;
        self.insert(key, piece.clone());
        Some(piece)
    }

    /// Bounded by two generations: what was not used during the last one is forgotten.
    fn insert(&mut self, key: u128, piece: Arc<[u32]>) {
        self.young_tokens += piece.len();
        self.young.insert(key, piece);
        if self.young_tokens > GENERATION_TOKENS {
            self.old = std::mem::take(&mut self.young);
            self.young_tokens = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use proptest::prelude::*;

    use super::*;

    static SEGMENTS: LazyLock<Segments> = LazyLock::new(|| {
        let file = std::fs::read(baton_testkit::smollm2()).unwrap();
        let tokenizer = Tokenizer::from_gguf(&baton_gguf::Header::parse(&file).unwrap()).unwrap();
        Segments::new(Arc::new(tokenizer)).expect("a byte-level tokenizer adds up")
    });

    proptest! {
        #[test]
        fn pieces_give_what_the_whole_gives(
            parts in prop::collection::vec(
                prop_oneof![
                    Just("<|im_start|>".to_owned()),
                    Just("<|im_end|>\n".to_owned()),
                    Just("<|im_start".to_owned()),
                    Just("<|endoftext|>".to_owned()),
                    "[a-z \n]{0,80}",
                    "\\PC{0,20}",
                ],
                0..12,
            ),
        ) {
            let text = parts.concat();
            let whole = SEGMENTS.tokenizer.encode(&text, false);
            // The second time from memory.
            prop_assert_eq!(&SEGMENTS.encode(&text), &whole);
            prop_assert_eq!(&SEGMENTS.encode(&text), &whole);
        }
    }

    #[test]
    fn a_piece_is_encoded_once() {
        let piece = "a sentence that is long enough to be worth remembering ".repeat(3);
        let before = SEGMENTS.encode(&piece);
        let key = xxh3_128(piece.as_bytes());
        assert_eq!(SEGMENTS.pieces().get(key).as_deref(), Some(before.as_slice()));
    }

    #[test]
    fn memory_is_bounded_and_keeps_what_is_used() {
        let mut pieces = Pieces::default();
        let piece: Arc<[u32]> = vec![0; GENERATION_TOKENS / 4].into();
        for key in 0..40 {
            pieces.insert(key, piece.clone());
            pieces.get(0).expect("it is used all the time");
            assert!(pieces.young.len() + pieces.old.len() <= 12);
        }
        assert!(pieces.get(20).is_none());
    }

    #[test]
    fn a_tokenizer_without_special_tokens_is_used_as_it_is() {
        assert!(Segments::new(Arc::new(Tokenizer::bytes4())).is_none());
    }
}
