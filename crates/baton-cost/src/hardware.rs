use serde::{Deserialize, Serialize};

/// A name that no preset has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no {kind} is named {name:?}; the names are {}", .valid.join(", "))]
pub struct UnknownName {
    /// What was looked for: `model`, `device`, `link`.
    pub kind: &'static str,
    pub name: String,
    pub valid: Vec<&'static str>,
}

/// A machine that runs a model: arithmetic, memory bandwidth, memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Device {
    pub name: String,
    /// Peak dense 16-bit FLOP/s by the data sheet, or measured.
    pub flops: f64,
    /// Share of the peak that a prefill reaches.
    pub mfu: f64,
    /// Bytes per second from memory.
    pub bytes_per_s: f64,
    pub memory_bytes: f64,
    /// Share of the memory that weights and KV may use.
    pub usable_fraction: f64,
    /// Seconds of a step that no token explains.
    pub step_overhead_s: f64,
}

/// Dense BF16 FLOP/s, bytes/s and memory of the vendor's data sheets (SXM parts where there are several).
const DEVICES: [(&str, f64, f64, f64); 6] = [
    ("a100", 312e12, 2.039e12, 80e9),
    ("h100", 989e12, 3.35e12, 80e9),
    ("h200", 989e12, 4.8e12, 141e9),
    ("b200", 2250e12, 8.0e12, 180e9),
    ("l40s", 362e12, 0.864e12, 48e9),
    ("a10", 125e12, 0.6e12, 24e9),
];

impl Device {
    /// Share of the peak that the lecture takes for prefill.
    pub const MFU: f64 = 0.5;
    /// Share of device memory left to weights and KV (lecture 17.5).
    pub const USABLE: f64 = 0.95;
    /// Launch and scheduling of one step on a GPU.
    pub const GPU_STEP_OVERHEAD_S: f64 = 2.5e-3;

    /// A data-sheet device, whatever the case of its name.
    pub fn preset(name: &str) -> Result<Self, UnknownName> {
        let lower = name.to_ascii_lowercase();
        let found = DEVICES.iter().find(|(known, ..)| *known == lower);
        let &(name, flops, bytes_per_s, memory_bytes) =
            found.ok_or_else(|| UnknownName { kind: "device", name: name.to_owned(), valid: Self::names() })?;
        Ok(Self {
            name: name.to_owned(),
            flops,
            mfu: Self::MFU,
            bytes_per_s,
            memory_bytes,
            usable_fraction: Self::USABLE,
            step_overhead_s: Self::GPU_STEP_OVERHEAD_S,
        })
    }

    /// A device by numbers measured on it: FLOP/s that an arithmetic loop reached, of which a prefill is taken to reach
    /// [`Device::MFU`] like elsewhere, and bytes/s that a sweep through memory reached. What a step costs beyond is unknown.
    #[must_use]
    pub fn measured(name: &str, flops: f64, bytes_per_s: f64, memory_bytes: f64) -> Self {
        Self {
            name: name.to_owned(),
            flops,
            mfu: Self::MFU,
            bytes_per_s,
            memory_bytes,
            usable_fraction: Self::USABLE,
            step_overhead_s: 0.0,
        }
    }

    /// Names that [`Device::preset`] takes.
    pub fn names() -> Vec<&'static str> {
        DEVICES.iter().map(|(name, ..)| *name).collect()
    }

    /// FLOP/s that a prefill reaches.
    pub fn effective_flops(&self) -> f64 {
        self.flops * self.mfu
    }

    /// Bytes that weights and KV may use together.
    pub fn usable_bytes(&self) -> f64 {
        self.memory_bytes * self.usable_fraction
    }
}

/// A way for bytes between machines.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Link {
    pub name: String,
    pub bytes_per_s: f64,
    /// Seconds until the first byte arrives, one way; zero of the lecture's links.
    pub latency_s: f64,
}

/// The lecture's three links (17.4).
const LINKS: [(&str, f64); 3] = [("nvlink", 400e9), ("pcie", 64e9), ("ethernet", 25e9)];

impl Link {
    /// One of the lecture's links, whatever the case of its name.
    pub fn preset(name: &str) -> Result<Self, UnknownName> {
        let lower = name.to_ascii_lowercase();
        let found = LINKS.iter().find(|(known, _)| *known == lower);
        let &(name, bytes_per_s) = found.ok_or_else(|| UnknownName { kind: "link", name: name.to_owned(), valid: Self::names() })?;
        Ok(Self { name: name.to_owned(), bytes_per_s, latency_s: 0.0 })
    }

    /// A link of `gb_per_s` times 1e9 bytes per second.
    #[must_use]
    pub fn custom(gb_per_s: f64) -> Self {
        Self { name: format!("{gb_per_s} GB/s"), bytes_per_s: gb_per_s * 1e9, latency_s: 0.0 }
    }

    /// The same with another latency, such as a measured one.
    #[must_use]
    pub fn with_latency(self, latency_s: f64) -> Self {
        Self { latency_s, ..self }
    }

    /// Names that [`Link::preset`] takes.
    pub fn names() -> Vec<&'static str> {
        LINKS.iter().map(|(name, _)| *name).collect()
    }

    /// Seconds until the last of `bytes` has arrived, alone on the link.
    pub fn seconds(&self, bytes: f64) -> f64 {
        self.latency_s + bytes / self.bytes_per_s
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones() {
        let error = Device::preset("h900").unwrap_err();
        assert_eq!(error.to_string(), "no device is named \"h900\"; the names are a100, h100, h200, b200, l40s, a10");
        assert_eq!(Link::preset("").unwrap_err().to_string(), "no link is named \"\"; the names are nvlink, pcie, ethernet");
    }

    #[test]
    fn names_are_found_in_any_case() {
        assert_eq!(Device::preset("H100").unwrap(), Device::preset("h100").unwrap());
        assert_eq!(Link::preset("NVLink").unwrap().bytes_per_s, 400e9);
    }
}
