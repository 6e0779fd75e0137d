//! Beginnings of prompts that are no secret: caches and the index hold them once for all tenants, whose salts count from behind them.

/// Known by their tokens, in order.
#[derive(Debug, Default)]
pub(crate) struct PublicPrefixes {
    prefixes: Vec<Vec<u32>>,
}

impl PublicPrefixes {
    pub(crate) fn new(mut prefixes: Vec<Vec<u32>>) -> Self {
        prefixes.sort_unstable();
        Self { prefixes }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.prefixes.is_empty()
    }

    /// The part of the prompt that is public: as far as it goes along with any of the prefixes.
    pub(crate) fn of<'a>(&self, prompt: &'a [u32]) -> &'a [u32] {
        // Those that share most with it stand beside its own place.
        let place = self.prefixes.partition_point(|prefix| prefix.as_slice() <= prompt);
        let nearest = self.prefixes[place.saturating_sub(1)..].iter().take(2);
        &prompt[..nearest.map(|prefix| common(prefix, prompt)).max().unwrap_or(0)]
    }
}

/// Leading tokens that both have.
pub(crate) fn common(one: &[u32], other: &[u32]) -> usize {
    one.iter().zip(other).take_while(|(one, other)| one == other).count()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_public_is_the_most_that_any_prefix_shares(
            prefixes in prop::collection::vec(prop::collection::vec(0u32..3, 0..6), 0..12),
            prompt in prop::collection::vec(0u32..3, 0..8),
        ) {
            let most = prefixes.iter().map(|prefix| common(prefix, &prompt)).max().unwrap_or(0);
            prop_assert_eq!(PublicPrefixes::new(prefixes).of(&prompt), &prompt[..most]);
        }
    }
}
