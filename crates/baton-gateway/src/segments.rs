//! Tokenizing a growing conversation without doing its beginning again.
//!
//! A tokenizer cuts its text at special tokens before it does anything else, so the pieces between them can be encoded one by one and
//! remembered. That is exact for tokenizers whose special tokens take nothing from their neighbours and whose pieces know nothing of
//! their place, which [`Segments::new`] tries out for every special token.

use std::sync::Arc;

use baton_text::Tokenizer;
use xxhash_rust::xxh3::xxh3_128_with_seed;

use crate::{pieces::Pieces, words::Words};

/// Shorter pieces are not worth an entry of their own.
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
    /// Where the tokenizer's words add up.
    words: Option<Words>,
    pieces: Pieces,
}

impl Segments {
    /// `None` for a tokenizer whose pieces do not add up to the whole. Takes at most `cache_bytes` of memory, half of it for words.
    pub(crate) fn new(tokenizer: Arc<Tokenizer>, cache_bytes: usize) -> Option<Self> {
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
        // No end of one is the beginning of another, so a text cut in front of a special token is cut where the whole is.
        let overlaps = |a: &[u8], b: &[u8]| a.len().min(b.len()) > 0 && a.iter().zip(b).all(|(a, b)| a == b);
        let overlapping = specials.iter().flat_map(|(text, _)| (1..text.len()).map(|from| &text.as_bytes()[from..]));
        if overlapping.into_iter().any(|end| specials.iter().any(|(text, _)| overlaps(end, text.as_bytes()))) {
            return None;
        }
        let mut begins = Box::new([false; 256]);
        for (text, _) in &specials {
            begins[usize::from(text.as_bytes()[0])] = true;
        }
        let words = Words::new(tokenizer.clone(), cache_bytes / 2);
        Some(Self { tokenizer, specials, begins, words, pieces: Pieces::new(cache_bytes / 2) })
    }

    pub(crate) fn cached_bytes(&self) -> usize {
        self.pieces.bytes() + self.words.as_ref().map_or(0, Words::cached_bytes)
    }

    /// What `tokenizer.encode(text, false)` gives. Pieces are remembered for the domain alone; words for all, since who tries one has seen
    /// it from then on.
    pub(crate) fn encode(&self, text: &str, domain: u64) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(text.len() / 3);
        let (mut start, mut at) = (0, 0);
        while at < text.len() {
            match self.special_at(&text.as_bytes()[at..]) {
                Some((length, id)) => {
                    self.encode_piece(&text[start..at], domain, &mut tokens);
                    tokens.push(id);
                    at += length;
                    start = at;
                }
                None => at += 1,
            }
        }
        self.encode_piece(&text[start..], domain, &mut tokens);
        tokens
    }

    /// Whether a text before this one ends where this one begins.
    pub(crate) fn begins_with_special(&self, text: &str) -> bool {
        text.is_empty() || self.special_at(text.as_bytes()).is_some()
    }

    fn special_at(&self, text: &[u8]) -> Option<(usize, u32)> {
        if !self.begins[usize::from(text[0])] {
            return None;
        }
        self.specials.iter().find(|(special, _)| text.starts_with(special.as_bytes())).map(|(special, id)| (special.len(), *id))
    }

    fn encode_piece(&self, piece: &str, domain: u64, tokens: &mut Vec<u32>) {
        if piece.len() < PIECE_BYTES_MIN {
            return self.encode_words(piece, tokens);
        }
        let key = xxh3_128_with_seed(piece.as_bytes(), domain);
        let known = self.pieces.lock().get(key).cloned();
        let piece = known.unwrap_or_else(|| {
            let mut encoded = Vec::with_capacity(piece.len() / 3);
            self.encode_words(piece, &mut encoded);
            let encoded: Arc<[u32]> = encoded.into();
            self.pieces.lock().insert(key, encoded.clone());
            encoded
        });
        tokens.extend_from_slice(&piece);
    }

    fn encode_words(&self, text: &str, tokens: &mut Vec<u32>) {
        match &self.words {
            Some(words) => words.encode(text, tokens),
            None => tokens.extend(self.tokenizer.encode(text, false)),
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
        Segments::new(Arc::new(tokenizer), 1 << 20).expect("a byte-level tokenizer adds up")
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
            prop_assert_eq!(&SEGMENTS.encode(&text, 0), &whole);
            prop_assert_eq!(&SEGMENTS.encode(&text, 0), &whole);
        }
    }

    #[test]
    fn a_piece_is_encoded_once() {
        let piece = "a sentence that is long enough to be worth remembering ".repeat(3);
        let before = SEGMENTS.encode(&piece, 5);
        let known = |domain| SEGMENTS.pieces.lock().get(xxh3_128_with_seed(piece.as_bytes(), domain)).map(|piece| piece.to_vec());
        assert_eq!((known(5), known(6)), (Some(before), None));
    }

    #[test]
    fn a_tokenizer_without_special_tokens_is_used_as_it_is() {
        assert!(Segments::new(Arc::new(Tokenizer::bytes4()), 1 << 20).is_none());
    }
}
