//! Tokens that are no text by themselves, found again from the bytes that several of them make.

use std::collections::HashMap;

use crate::vocabulary::Vocabulary;

/// Bytes that are taken apart, at most: a token's text and a character.
const BYTES_MAX: usize = 32;
/// Tokens that are tried, at most.
const TRIES_MAX: u32 = 4096;

/// Tokens that together have the bytes that were asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cut {
    pub tokens: Vec<u32>,
    /// No others have.
    pub is_sure: bool,
}

/// All tokens of a vocabulary that are no text by themselves, by their bytes.
#[derive(Debug)]
pub(crate) enum Fragments {
    Table(HashMap<Box<[u8]>, Found>),
    Bytes4,
}

/// A token of some bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found {
    token: u32,
    /// There is another one.
    is_double: bool,
}

/// Goes through all ways to cut.
struct Search<'a> {
    fragments: &'a Fragments,
    bytes: &'a [u8],
    count: usize,
    tokens: Vec<u32>,
    /// Of the tokens so far, one has another of the same bytes.
    doubles: u32,
    /// The first way of as many tokens as are wanted.
    first: Option<Vec<u32>>,
    ways: u32,
    tries: u32,
}

impl Fragments {
    pub(crate) fn of(vocabulary: &Vocabulary) -> Self {
        if matches!(vocabulary, Vocabulary::Bytes4) {
            return Self::Bytes4;
        }
        let mut table = HashMap::<Box<[u8]>, Found>::new();
        for token in 0..u32::try_from(vocabulary.size()).unwrap_or(u32::MAX) {
            let mut bytes = Vec::new();
            vocabulary.append(token, &mut bytes);
            if std::str::from_utf8(&bytes).is_err() && !vocabulary.is_special(token) {
                table.entry(bytes.into()).and_modify(|known| known.is_double = true).or_insert(Found { token, is_double: false });
            }
        }
        Self::Table(table)
    }

    /// See [`crate::Tokenizer::fragments`].
    pub(crate) fn cut(&self, bytes: &[u8], count: usize) -> Option<Cut> {
        if bytes.len() > BYTES_MAX {
            return None;
        }
        let mut search = Search { fragments: self, bytes, count, tokens: Vec::new(), doubles: 0, first: None, ways: 0, tries: 0 };
        search.go_on_from(0);
        let is_sure = search.ways == 1 && search.tries < TRIES_MAX;
        search.first.map(|tokens| Cut { tokens, is_sure })
    }

    fn token(&self, bytes: &[u8]) -> Option<Found> {
        match self {
            Self::Table(table) => table.get(bytes).copied(),
            Self::Bytes4 if bytes.len() <= 4 && !bytes.ends_with(&[0]) => {
                let mut number = [0; 4];
                number[..bytes.len()].copy_from_slice(bytes);
                Some(Found { token: u32::from_le_bytes(number), is_double: false })
            }
            Self::Bytes4 => None,
        }
    }
}

impl Search<'_> {
    /// The tokens so far end at `at`.
    fn go_on_from(&mut self, at: usize) {
        if at == self.bytes.len() {
            self.ways = self.ways.saturating_add(1 + self.doubles);
            if self.tokens.len() == self.count && self.first.is_none() {
                self.first = Some(self.tokens.clone());
            }
            return;
        }
        let known = self.first.is_some() && self.ways > 1;
        if known || self.tokens.len() == self.count {
            return;
        }
        for end in at + 1..=self.bytes.len() {
            self.tries += 1;
            if self.tries >= TRIES_MAX {
                return;
            }
            if !ends_within_a_character(&self.bytes[..end]) {
                continue;
            }
            if let Some(Found { token, is_double }) = self.fragments.token(&self.bytes[at..end]) {
                self.tokens.push(token);
                self.doubles += u32::from(is_double);
                self.go_on_from(end);
                self.doubles -= u32::from(is_double);
                self.tokens.pop();
            }
        }
    }
}

fn ends_within_a_character(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vocabulary::Table;

    fn fragments(pieces: &[&[u8]]) -> Fragments {
        Fragments::of(&Vocabulary::Table(Table::new(pieces.iter().map(|piece| (piece.to_vec(), false)), false)))
    }

    fn sure(tokens: &[u32]) -> Cut {
        Cut { tokens: tokens.to_vec(), is_sure: true }
    }

    #[test]
    fn the_only_way_to_begin_a_character_is_found() {
        let smile = "😀".as_bytes();
        let known = fragments(&[b"a", &smile[..2], &smile[2..3], &smile[3..], b" \xf0\x9f"]);
        assert_eq!(known.cut(&smile[..2], 1), Some(sure(&[1])));
        assert_eq!(known.cut(&smile[..3], 2), Some(sure(&[1, 2])));
        assert_eq!(known.cut(b" \xf0\x9f", 1), Some(sure(&[4])));
        assert_eq!(known.cut(&smile[..3], 1), None, "it takes two");
        assert_eq!(known.cut(smile, 3), None, "whole characters are not cut");
        assert_eq!(known.cut(b"a\xf0\x9f", 2), None, "text by itself is no fragment");
    }

    #[test]
    fn where_there_are_two_ways_one_is_given_for_what_it_is() {
        let smile = "😀".as_bytes();
        let known = fragments(&[&smile[..1], &smile[1..3], &smile[..2], &smile[2..3], &smile[..3]]);
        assert_eq!(known.cut(&smile[..3], 1), Some(sure(&[4])));
        assert_eq!(known.cut(&smile[..3], 2), Some(Cut { tokens: vec![0, 1], is_sure: false }));
        assert_eq!(known.cut(&smile[..2], 2), None);
        let twice = fragments(&[&smile[..2], &smile[..2]]);
        assert_eq!(twice.cut(&smile[..2], 1), Some(Cut { tokens: vec![0], is_sure: false }));
    }

    #[test]
    fn a_search_ends() {
        let text = "\u{10ffff}".repeat(8);
        assert!(Fragments::Bytes4.cut(&text.as_bytes()[..31], 20).is_none_or(|cut| !cut.is_sure));
    }
}
