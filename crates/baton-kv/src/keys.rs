use baton_units::BlockSize;
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

/// Names the content of one full KV block: its tokens, all tokens before it, and the domain in which they were computed.
///
/// 64 bits are enough for a belief (the router's index); whoever serves KV compares tokens, parent and domain as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockKey(pub u64);

/// What besides the tokens decides the KV of a block. Equal tokens of different domains never share a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyDomain<'a> {
    /// Model and revision, as the fleet names it.
    pub model: &'a str,
    /// LoRA adapter with its revision; `None` for the base model.
    pub adapter: Option<&'a str>,
    /// Separates tenants whose prefixes must not be shared, from the first block on; `None` is the public domain.
    pub salt: Option<&'a str>,
}

impl KeyDomain<'_> {
    /// The parent of a chain's first block.
    pub fn root(&self) -> BlockKey {
        let mut hasher = Xxh3::with_seed(0);
        for part in [Some(self.model), self.adapter, self.salt] {
            // The tag and the length keep ("a", "bc") apart from ("ab", "c"), and an absent part from an empty one.
            hasher.update(&[u8::from(part.is_some())]);
            let part = part.unwrap_or_default();
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        BlockKey(hasher.digest())
    }
}

impl BlockKey {
    /// The parent of a block behind this one at which a salt enters the chain: this one is found without it, that one and all that follow
    /// are found with it only.
    #[must_use]
    pub fn salted(self, salt: &str) -> Self {
        // Another seed than that of a child, whose tokens may have the same bytes.
        Self(xxh3_64_with_seed(salt.as_bytes(), !self.0))
    }

    /// Key of the block that follows this one and holds `tokens`.
    #[must_use]
    pub fn child(self, tokens: &[u32]) -> Self {
        let mut bytes = [0u8; 4 * 64];
        if let Some(bytes) = bytes.get_mut(..4 * tokens.len()) {
            for (bytes, token) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(tokens) {
                *bytes = token.to_le_bytes();
            }
            return Self(xxh3_64_with_seed(bytes, self.0));
        }
        let mut hasher = Xxh3::with_seed(self.0);
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        Self(hasher.digest())
    }
}

/// Keys of the full blocks of `tokens`, first block first; a last part that fills no block has no key.
pub fn chain_keys(root: BlockKey, tokens: &[u32], size: BlockSize) -> Vec<BlockKey> {
    tokens
        .chunks_exact(size.get() as usize)
        .scan(root, |parent, tokens| {
            *parent = parent.child(tokens);
            Some(*parent)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PUBLIC: KeyDomain<'static> = KeyDomain { model: "m", adapter: None, salt: None };

    #[test]
    fn domains_do_not_share_keys() {
        let domains = [
            PUBLIC,
            KeyDomain { model: "m2", ..PUBLIC },
            KeyDomain { adapter: Some("a"), ..PUBLIC },
            KeyDomain { salt: Some("a"), ..PUBLIC },
            KeyDomain { salt: Some(""), ..PUBLIC },
            KeyDomain { adapter: Some("a"), salt: Some("a"), ..PUBLIC },
        ];
        let roots: std::collections::BTreeSet<_> = domains.iter().map(KeyDomain::root).collect();
        assert_eq!(roots.len(), domains.len());
    }

    #[test]
    fn a_salt_amid_a_chain_is_no_token_and_no_other_salt() {
        let block = PUBLIC.root().child(&[1, 2]);
        let same_bytes = [u32::from_le_bytes(*b"salt")];
        let parents =
            [block, block.salted("salt"), block.salted("other"), block.salted(""), block.child(&same_bytes), PUBLIC.root().salted("salt")];
        assert_eq!(std::collections::BTreeSet::from(parents).len(), parents.len());
    }

    #[test]
    fn a_block_past_the_stack_buffer_hashes_like_a_small_one() {
        let tokens: Vec<u32> = (0..100).collect();
        let mut hasher = Xxh3::with_seed(7);
        for token in &tokens {
            hasher.update(&token.to_le_bytes());
        }
        assert_eq!(BlockKey(7).child(&tokens), BlockKey(hasher.digest()));
        let mut hasher = Xxh3::with_seed(7);
        tokens[..16].iter().for_each(|token| hasher.update(&token.to_le_bytes()));
        assert_eq!(BlockKey(7).child(&tokens[..16]), BlockKey(hasher.digest()));
    }

    proptest! {
        #[test]
        fn chains_agree_exactly_as_far_as_their_tokens_do(
            common in prop::collection::vec(0u32..50, 0..40),
            left in prop::collection::vec(0u32..50, 0..40),
            right in prop::collection::vec(0u32..50, 0..40),
            size in 1u32..8,
        ) {
            let size = BlockSize::new(size).unwrap();
            let tokens = |tail: &[u32]| [&common, tail].concat();
            let (left, right) = (tokens(&left), tokens(&right));
            let (a, b) = (chain_keys(PUBLIC.root(), &left, size), chain_keys(PUBLIC.root(), &right, size));
            let shared = left.iter().zip(&right).take_while(|(a, b)| a == b).count() / size.get() as usize;
            prop_assert_eq!(a.iter().zip(&b).take_while(|(a, b)| a == b).count(), shared);
            // A chained key never comes back after the first difference.
            prop_assert!(a.iter().skip(shared).all(|key| !b[shared..].contains(key)));
        }
    }
}
