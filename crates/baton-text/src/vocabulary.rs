/// The bytes that each token stands for.
#[derive(Debug)]
pub(crate) enum Vocabulary {
    Table(Table),
    /// A token is four bytes of text as a little-endian number; trailing zero bytes are padding.
    Bytes4,
}

/// Pieces of all tokens end to end, which costs a third of one allocation per token.
#[derive(Debug)]
pub(crate) struct Table {
    bytes: Vec<u8>,
    /// Token `i` is `bytes[ends[i - 1]..ends[i]]`.
    ends: Vec<u32>,
    special: Vec<bool>,
    /// Whether text loses its first space when decoded: sentencepiece models put one before the first word.
    pub(crate) strips_first_space: bool,
}

impl Table {
    pub(crate) fn new(pieces: impl IntoIterator<Item = (Vec<u8>, bool)>, strips_first_space: bool) -> Self {
        let mut table = Self { bytes: Vec::new(), ends: Vec::new(), special: Vec::new(), strips_first_space };
        for (piece, special) in pieces {
            table.bytes.extend(piece);
            table.ends.push(table.bytes.len() as u32);
            table.special.push(special);
        }
        table
    }

    fn piece(&self, token: u32) -> Option<&[u8]> {
        let index = token as usize;
        let end = *self.ends.get(index)? as usize;
        let start = if index == 0 { 0 } else { self.ends[index - 1] as usize };
        Some(&self.bytes[start..end])
    }
}

impl Vocabulary {
    /// One more than the largest token id.
    pub(crate) fn size(&self) -> u64 {
        match self {
            Self::Table(table) => table.ends.len() as u64,
            Self::Bytes4 => 1 << 32,
        }
    }

    pub(crate) fn strips_first_space(&self) -> bool {
        matches!(self, Self::Table(Table { strips_first_space: true, .. }))
    }

    pub(crate) fn is_special(&self, token: u32) -> bool {
        matches!(self, Self::Table(table) if table.special.get(token as usize) == Some(&true))
    }

    pub(crate) fn len_of(&self, token: u32) -> usize {
        match self {
            Self::Table(table) => table.piece(token).map_or(0, <[u8]>::len),
            Self::Bytes4 => bytes4_len(token),
        }
    }

    /// Appends the token's bytes; a token outside the vocabulary has none.
    pub(crate) fn append(&self, token: u32, bytes: &mut Vec<u8>) {
        match self {
            Self::Table(table) => bytes.extend(table.piece(token).unwrap_or_default()),
            Self::Bytes4 => bytes.extend(&token.to_le_bytes()[..bytes4_len(token)]),
        }
    }
}

fn bytes4_len(token: u32) -> usize {
    4 - token.leading_zeros() as usize / 8
}

/// Text in groups of four bytes, the last one padded with zeros.
pub(crate) fn encode_bytes4(text: &str) -> Vec<u32> {
    let groups = text.as_bytes().chunks(4);
    groups
        .map(|group| {
            let mut bytes = [0; 4];
            bytes[..group.len()].copy_from_slice(group);
            u32::from_le_bytes(bytes)
        })
        .collect()
}

/// Bytes of a token of a byte-level vocabulary, where each byte is written as one printable character (GPT-2's table).
///
/// A token with any other character (a special token) stands for its own UTF-8.
pub(crate) fn byte_level_piece(token: &str) -> Vec<u8> {
    token.chars().map(byte_of_char).collect::<Option<Vec<u8>>>().unwrap_or_else(|| token.as_bytes().to_vec())
}

fn byte_of_char(char: char) -> Option<u8> {
    let code = u32::from(char);
    match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => Some(code as u8),
        // The 68 bytes without a printable character of their own follow from U+0100 in order.
        0x100..=0x120 => Some((code - 0x100) as u8),
        0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// Bytes of a token of a sentencepiece vocabulary: `▁` is a space, `<0xE5>` one byte.
pub(crate) fn sentencepiece_piece(token: &str) -> Vec<u8> {
    let byte = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>')).filter(|digits| digits.len() == 2);
    match byte.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
        Some(byte) => vec![byte],
        None => token.replace('▁', " ").into_bytes(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_table_gives_each_byte_once() {
        let mut bytes: Vec<u8> = (0..=0x143).filter_map(|code| byte_of_char(char::from_u32(code)?)).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!(byte_level_piece("ĠFrance"), b" France");
        assert_eq!(byte_level_piece("Ċ"), b"\n");
    }

    #[test]
    fn a_byte_token_is_its_byte() {
        assert_eq!(sentencepiece_piece("<0xE5>"), [0xe5]);
        assert_eq!(sentencepiece_piece("▁a▁b"), b" a b");
        assert_eq!(sentencepiece_piece("<0x>"), b"<0x>");
    }

    #[test]
    fn padding_is_no_text() {
        assert_eq!(encode_bytes4("abcde"), [u32::from_le_bytes(*b"abcd"), u32::from(b'e')]);
        assert_eq!(bytes4_len(0), 0);
        assert_eq!(bytes4_len(u32::from(b'e')), 1);
        assert_eq!(bytes4_len(u32::from_le_bytes(*b"abcd")), 4);
    }
}
