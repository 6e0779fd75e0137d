use std::fmt;
use std::str::FromStr;

/// How a [`CpuExecutor`](crate::CpuExecutor) uses the machine. No field changes a bit of any result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuConfig {
    /// Threads that compute, the caller's included. More help long prompts most; threads beyond free cores only slow a step.
    pub threads: usize,
    /// Tokens per KV block; multiples of 16 waste no memory.
    pub block_size: usize,
    /// KV blocks. Memory is taken when a block is first written.
    pub blocks: usize,
    /// `None` takes the fastest path of the machine.
    pub kernel: Option<KernelPath>,
    /// Longest sequence in tokens; `None` takes what the model was trained for.
    pub max_model_len: Option<usize>,
}

/// Instructions that kernels are compiled for. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelPath {
    Portable,
    Avx2,
    Avx512,
}

impl KernelPath {
    pub const ALL: [Self; 3] = [Self::Portable, Self::Avx2, Self::Avx512];

    const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }
}

impl fmt::Display for KernelPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for KernelPath {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|path| path.name() == text);
        found.ok_or_else(|| format!("\"{text}\" is no kernel path; use portable, avx2 or avx512"))
    }
}
