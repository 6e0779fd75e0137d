use std::{
    fmt,
    iter::Sum,
    num::NonZeroU32,
    ops::{Add, AddAssign, Sub, SubAssign},
};

use serde::{Deserialize, Serialize};

/// Implements what a plain count needs: order, sums, and subtraction that panics below zero in debug builds.
macro_rules! count {
    ($(#[$doc:meta])* $name:ident($inner:ty), $unit:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl $name {
            pub const ZERO: Self = Self(0);

            /// The difference, or zero when `other` is larger.
            #[must_use]
            pub fn saturating_sub(self, other: Self) -> Self {
                Self(self.0.saturating_sub(other.0))
            }

            // `f64::from` would do for a `u32` but not for a `u64`.
            #[allow(clippy::cast_lossless)]
            pub fn as_f64(self) -> f64 {
                self.0 as f64
            }
        }

        impl Add for $name {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0 + other.0)
            }
        }

        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                self.0 += other.0;
            }
        }

        impl Sub for $name {
            type Output = Self;
            fn sub(self, other: Self) -> Self {
                Self(self.0 - other.0)
            }
        }

        impl SubAssign for $name {
            fn sub_assign(&mut self, other: Self) {
                self.0 -= other.0;
            }
        }

        impl Sum for $name {
            fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
                counts.fold(Self::ZERO, Add::add)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!("{} ", $unit), self.0)
            }
        }
    };
}

count!(
    /// Count of tokens.
    Tokens(u32),
    "tokens"
);
count!(
    /// Count of KV blocks.
    Blocks(u32),
    "blocks"
);
count!(
    /// Count of bytes.
    Bytes(u64),
    "bytes"
);

impl Tokens {
    /// Blocks needed to hold these tokens; a partly filled block counts as one.
    pub fn to_blocks(self, size: BlockSize) -> Blocks {
        Blocks(self.0.div_ceil(size.get()))
    }

    /// Blocks that these tokens fill; a partly filled block counts as none.
    pub fn full_blocks(self, size: BlockSize) -> Blocks {
        Blocks(self.0 / size.get())
    }
}

impl Blocks {
    /// Tokens that these blocks hold when full.
    pub fn to_tokens(self, size: BlockSize) -> Tokens {
        Tokens(self.0 * size.get())
    }
}

/// Tokens per KV block; never zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlockSize(NonZeroU32);

impl BlockSize {
    /// vLLM's default on GPUs.
    pub const DEFAULT: Self = Self(NonZeroU32::new(16).unwrap());
    pub const ONE: Self = Self(NonZeroU32::MIN);

    pub const fn new(tokens: u32) -> Option<Self> {
        match NonZeroU32::new(tokens) {
            Some(tokens) => Some(Self(tokens)),
            None => None,
        }
    }

    pub const fn get(self) -> u32 {
        self.0.get()
    }
}

impl Default for BlockSize {
    fn default() -> Self {
        Self::DEFAULT
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn blocks_hold_their_tokens_and_waste_less_than_one_block(tokens in 0u32..1 << 24, size in 1u32..1024) {
            let size = BlockSize::new(size).unwrap();
            let held = Tokens(tokens).to_blocks(size).to_tokens(size);
            prop_assert!(held.0 >= tokens && held.0 - tokens < size.get());
            prop_assert!(Tokens(tokens).full_blocks(size).to_tokens(size) <= Tokens(tokens));
        }
    }

    #[test]
    fn a_count_prints_its_unit() {
        assert_eq!(Tokens(1200).to_string(), "1200 tokens");
    }
}
