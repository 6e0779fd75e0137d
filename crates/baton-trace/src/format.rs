use std::fmt;

use baton_units::BlockSize;

/// The forms in which traces are published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// JSON lines of `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one for each 512 tokens (Mooncake, FAST'25).
    Mooncake,
    /// The same with 16 tokens a block, seconds, and `chat_id` and `parent_chat_id`, which make conversations (Qwen-Bailian).
    Bailian,
    /// CSV of `TIMESTAMP`, `ContextTokens` and `GeneratedTokens` (Azure, 2023 and 2024).
    Azure,
}

impl Format {
    /// Tokens of a block; `None` where prompts have lengths alone.
    pub fn block_size(self) -> Option<BlockSize> {
        match self {
            Self::Mooncake => BlockSize::new(512),
            Self::Bailian => BlockSize::new(16),
            Self::Azure => None,
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Mooncake => "Mooncake",
            Self::Bailian => "Bailian",
            Self::Azure => "Azure",
        })
    }
}
