//! How values are written in the file.

use std::{env, fmt, fs, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize};
use sha2::{Digest as _, Sha256};

/// A key. In the file it is the text itself, `{ env = "NAME" }` or `{ file = "PATH" }`: read from there when the file is, so that the file
/// itself holds no secret. It is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The key itself: for the wire only.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = resolve(&toml::Value::deserialize(deserializer)?).map_err(serde::de::Error::custom)?;
        if text.is_empty() {
            return Err(serde::de::Error::custom("a key has at least one character"));
        }
        Ok(Self(text))
    }
}

/// A text that is no secret. In the file it is the text itself or `{ file = "PATH" }`, which is read when the file is, to its last byte.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Text(String);

impl Text {
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a text is text or { file = \"PATH\" }")]
        enum Written {
            Text(String),
            File(Place),
        }
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Place {
            file: String,
        }
        let text = match Written::deserialize(deserializer)? {
            Written::Text(text) => text,
            Written::File(Place { file }) => fs::read_to_string(&file)
                .map_err(|error| serde::de::Error::custom(format!("the text's file {file} cannot be read: {error}")))?,
        };
        if text.is_empty() {
            return Err(serde::de::Error::custom("a text has at least one character"));
        }
        Ok(Self(text))
    }
}

/// The key that a value of the file names; what is wrong never tells the value.
fn resolve(value: &toml::Value) -> Result<String, String> {
    if let Some(text) = value.as_str() {
        return Ok(text.to_owned());
    }
    let source = value.as_table().filter(|table| table.len() == 1).and_then(|table| table.iter().next());
    match source.and_then(|(kind, place)| Some((kind.as_str(), place.as_str()?))) {
        Some(("env", name)) => env::var(name).map_err(|_| format!("the environment variable {name} is not set, or no text; set it")),
        Some(("file", path)) => {
            let text = fs::read_to_string(path).map_err(|error| format!("the key's file {path} cannot be read: {error}"))?;
            // Editors end a file with a line break.
            Ok(text.trim_end_matches(['\r', '\n']).to_owned())
        }
        Some(_) | None => Err("a key is text, { env = \"NAME\" } or { file = \"PATH\" }".to_owned()),
    }
}

/// SHA-256 of a client's key. In the file it is `"sha256:"` with 64 hexadecimal digits, `{ env = "NAME" }` or `{ file = "PATH" }`, where the
/// latter two may hold the key itself. No salt slows down who guesses keys by their hashes: only long random keys are safe from that.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeyHash([u8; 32]);

/// The text is no hash of a key; the text is not told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a key is written as its hash, \"sha256:\" and 64 hexadecimal digits; `baton hash-key` makes it")]
pub struct NotAHash;

impl KeyHash {
    pub fn of(key: &[u8]) -> Self {
        Self(Sha256::digest(key).into())
    }
}

impl FromStr for KeyHash {
    type Err = NotAHash;

    fn from_str(text: &str) -> Result<Self, NotAHash> {
        let digits = text.strip_prefix(HASH_PREFIX).filter(|digits| digits.len() == 64 && digits.is_ascii()).ok_or(NotAHash)?;
        let mut hash = [0; 32];
        for (byte, place) in hash.iter_mut().zip((0..64).step_by(2)) {
            // A sign would pass as a digit.
            let digits = digits.get(place..place + 2).filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()));
            *byte = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()).ok_or(NotAHash)?;
        }
        Ok(Self(hash))
    }
}

impl fmt::Display for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HASH_PREFIX)?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// As little as of the key.
impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(hash)")
    }
}

impl<'de> Deserialize<'de> for KeyHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = toml::Value::deserialize(deserializer)?;
        let text = resolve(&value).map_err(serde::de::Error::custom)?;
        // A file that many may read names no key in the clear.
        if value.is_str() || text.starts_with(HASH_PREFIX) {
            return text.parse().map_err(serde::de::Error::custom);
        }
        if text.is_empty() {
            return Err(serde::de::Error::custom("a key has at least one character"));
        }
        Ok(Self::of(text.as_bytes()))
    }
}

const HASH_PREFIX: &str = "sha256:";

/// `"250ms"`, `"1m 30s"`.
pub(super) mod duration {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(in super::super) fn serialize<S: Serializer>(span: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&humantime::format_duration(*span))
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        let text = String::deserialize(deserializer)?;
        humantime::parse_duration(&text)
            .map_err(|error| serde::de::Error::custom(format!("{text:?} is no duration like \"250ms\": {error}")))
    }
}

pub(super) mod some_duration {
    use std::time::Duration;

    use serde::{Deserializer, Serializer};

    #[allow(clippy::ref_option, reason = "serde hands fields over so")]
    pub(in super::super) fn serialize<S: Serializer>(span: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
        match span {
            Some(span) => super::duration::serialize(span, serializer),
            None => serializer.serialize_none(),
        }
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
        super::duration::deserialize(deserializer).map(Some)
    }
}

/// What has a text form of its own.
pub(super) mod text {
    use std::{fmt::Display, str::FromStr};

    use serde::{Deserialize, Deserializer, Serializer};

    pub(in super::super) fn serialize<S: Serializer>(value: &impl Display, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(deserializer: D) -> Result<T, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// `"64MiB"`, `"512KiB"`, or a plain number of bytes.
pub(super) mod size {
    use serde::{Deserialize, Deserializer, Serializer};

    const UNITS: [(&str, usize); 4] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

    #[derive(Deserialize)]
    #[serde(untagged, expecting = "a size is text like \"64MiB\", or a number of bytes")]
    enum Size {
        Bytes(usize),
        Text(String),
    }

    #[allow(clippy::trivially_copy_pass_by_ref, reason = "serde hands fields over so")]
    pub(in super::super) fn serialize<S: Serializer>(bytes: &usize, serializer: S) -> Result<S::Ok, S::Error> {
        let (unit, factor) = UNITS.into_iter().find(|(_, factor)| bytes.is_multiple_of(*factor) && *bytes >= *factor).unwrap_or(("B", 1));
        serializer.collect_str(&format_args!("{}{unit}", bytes / factor))
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
        let text = match Size::deserialize(deserializer)? {
            Size::Bytes(bytes) => return Ok(bytes),
            Size::Text(text) => text,
        };
        let digits = text.find(|character: char| !character.is_ascii_digit()).unwrap_or(text.len());
        let unit = text[digits..].trim();
        let factor = UNITS.into_iter().find_map(|(name, factor)| (name == unit).then_some(factor)).or(unit.is_empty().then_some(1));
        let factor = factor.ok_or_else(|| serde::de::Error::custom(format!("{unit:?} is no unit of bytes; use B, KiB, MiB or GiB")))?;
        let count = text[..digits].parse::<usize>().ok().and_then(|count| count.checked_mul(factor));
        count.ok_or_else(|| serde::de::Error::custom(format!("{text:?} is no size like \"64MiB\"")))
    }
}
