use std::sync::Arc;

use crate::vocabulary::Vocabulary;

/// Turns tokens into text as they come. The pieces together are exactly what decoding all tokens at once gives.
///
/// Bytes that do not yet make a whole character wait for the next token; bytes that never can become U+FFFD.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    vocabulary: Arc<Vocabulary>,
    skip_special: bool,
    /// The next byte is the text's first and is dropped if it is a space.
    strip_space: bool,
    /// At most three bytes: the beginning of a character.
    pending: Vec<u8>,
}

impl Detokenizer {
    pub(crate) fn new(vocabulary: Arc<Vocabulary>, skip_special: bool) -> Self {
        let strip_space = vocabulary.strips_first_space();
        Self { vocabulary, skip_special, strip_space, pending: Vec::new() }
    }

    /// The text continues another one (a prompt), so that its first space belongs to it.
    #[must_use]
    pub fn continuing(mut self) -> Self {
        self.strip_space = false;
        self
    }

    /// Text that the token completes; empty while a character is incomplete.
    pub fn push(&mut self, token: u32) -> String {
        if self.skip_special && self.vocabulary.is_special(token) {
            return String::new();
        }
        let before = self.pending.len();
        self.vocabulary.append(token, &mut self.pending);
        if self.strip_space && self.pending.len() > before {
            self.strip_space = false;
            if self.pending[0] == b' ' {
                self.pending.remove(0);
            }
        }
        self.take_complete()
    }

    /// What is left when no token follows: one U+FFFD for an incomplete character, else nothing.
    pub fn finish(&mut self) -> String {
        let rest = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        rest
    }

    fn take_complete(&mut self) -> String {
        let mut text = String::with_capacity(self.pending.len());
        let mut taken = 0;
        while taken < self.pending.len() {
            let rest = &self.pending[taken..];
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    taken += valid.len();
                }
                Err(error) => {
                    let valid = error.valid_up_to();
                    text.push_str(std::str::from_utf8(&rest[..valid]).expect("valid up to here"));
                    taken += valid;
                    // No length: the bytes so far may still become a character.
                    let Some(invalid) = error.error_len() else { break };
                    text.push(char::REPLACEMENT_CHARACTER);
                    taken += invalid;
                }
            }
        }
        self.pending.drain(..taken);
        text
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::vocabulary::Table;

    fn detokenizer(pieces: &[Vec<u8>], strips: bool) -> Detokenizer {
        let table = Table::new(pieces.iter().map(|piece| (piece.clone(), false)), strips);
        Detokenizer::new(Arc::new(Vocabulary::Table(table)), false)
    }

    proptest! {
        #[test]
        fn pieces_join_to_the_whole_text_decoded_at_once(
            pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..4), 1..20),
            tokens in prop::collection::vec(0u32..24, 0..40),
            strips: bool,
        ) {
            let mut stream = detokenizer(&pieces, strips);
            let mut text: String = tokens.iter().map(|&token| stream.push(token)).collect();
            text.push_str(&stream.finish());
            let bytes: Vec<u8> = tokens.iter().flat_map(|&token| pieces.get(token as usize).cloned().unwrap_or_default()).collect();
            let bytes = if strips { bytes.strip_prefix(b" ").unwrap_or(&bytes) } else { &bytes };
            prop_assert_eq!(text, String::from_utf8_lossy(bytes));
        }
    }

    #[test]
    fn a_character_comes_out_whole_or_not_at_all() {
        let mut stream = detokenizer(&[vec![0xf0, 0x9f], vec![0x98], vec![0x80, b'!']], false);
        assert_eq!(stream.push(0), "");
        assert_eq!(stream.push(1), "");
        assert_eq!(stream.push(2), "😀!");
        assert_eq!(stream.push(0), "");
        assert_eq!(stream.finish(), "\u{fffd}");
        assert_eq!(stream.finish(), "");
    }

    #[test]
    fn a_continuation_keeps_its_first_space() {
        let pieces = [b" word".to_vec()];
        assert_eq!(detokenizer(&pieces, true).push(0), "word");
        assert_eq!(detokenizer(&pieces, true).continuing().push(0), " word");
    }
}
