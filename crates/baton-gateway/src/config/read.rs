//! Reads the file, and tells each mistake by its line.

use std::fmt;

use serde::{Deserialize, de::IntoDeserializer};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::{GatewayConfig, reference::Section};
use crate::tls::TlsError;

/// Names so alike are taken for a slip of the finger (Jaro-Winkler, of 1).
const ALIKE: f64 = 0.8;

/// Why a configuration does not do.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// At least one, by line.
    #[error("{}", first(.0))]
    Faults(Vec<Fault>),
    #[error("gateway.fleet_key_file: {0}")]
    FleetKey(#[from] baton_link::FleetKeyError),
    #[error("gateway.tls: {0}")]
    Tls(#[from] TlsError),
}

/// One mistake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// From 1; none where the file lacks something, or where there is no file.
    pub line: Option<usize>,
    /// The option with its place, for example `engines[1].url`; empty for the file as a whole.
    pub option: String,
    /// What is wrong, and what to do.
    pub what: String,
}

impl ConfigError {
    pub(super) fn unless(faults: Vec<Fault>) -> Result<(), Self> {
        if faults.is_empty() { Ok(()) } else { Err(Self::of(faults)) }
    }

    fn of(mut faults: Vec<Fault>) -> Self {
        // What the file lacks comes last.
        faults.sort_by_key(|fault| fault.line.unwrap_or(usize::MAX));
        Self::Faults(faults)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        if !self.option.is_empty() {
            write!(f, "{} = ", self.option)?;
        }
        f.write_str(&self.what)
    }
}

fn first(faults: &[Fault]) -> String {
    let Some(fault) = faults.first() else { return String::new() };
    match faults.len() {
        1 => fault.to_string(),
        count => format!("{fault} (and {} more; `baton check-config` lists all)", count - 1),
    }
}

impl GatewayConfig {
    /// Reads and checks a configuration file.
    pub fn from_toml(text: &str) -> Result<Self, ConfigError> {
        let file = File { text };
        let mut table = DeTable::parse(text).map_err(|error| ConfigError::Faults(vec![file.fault(&error, None)]))?;
        let mut faults = Vec::new();
        file.take_unknown(table.get_mut(), "", &mut faults);
        let known = table.clone();
        let read = Self::deserialize(Spanned::new(table.span(), DeValue::Table(table.into_inner())).into_deserializer());
        match read {
            Ok(config) => {
                if let Err(ConfigError::Faults(wrong)) = config.check() {
                    faults.extend(wrong.into_iter().map(|fault| Fault { line: file.line_of(known.get_ref(), &fault.option), ..fault }));
                }
                if config.engines.is_empty() && config.discovery.is_empty() {
                    let what =
                        "no [[engines]] are configured; name at least one url and kind, or a source of engines in [[discovery]]".to_owned();
                    faults.push(Fault { line: None, option: String::new(), what });
                }
                ConfigError::unless(faults).map(|()| config)
            }
            Err(error) => {
                faults.push(file.fault(&error, Some(known.get_ref())));
                Err(ConfigError::of(faults))
            }
        }
    }
}

/// The text that spans are of.
struct File<'a> {
    text: &'a str,
}

impl File<'_> {
    fn line(&self, at: usize) -> usize {
        1 + self.text.bytes().take(at).filter(|byte| *byte == b'\n').count()
    }

    fn fault(&self, error: &toml::de::Error, table: Option<&DeTable<'_>>) -> Fault {
        let at = error.span().map(|span| span.start);
        let option = at.zip(table).and_then(|(at, table)| path_at(table, at));
        let what = error.message().lines().collect::<Vec<_>>().join(" ");
        match option {
            // A fault's text begins with the value.
            Some(option) => {
                let value = error.span().and_then(|span| self.text.get(span)).filter(|value| value.len() <= 60 && !value.contains('\n'));
                let last = option.rsplit('.').next().unwrap_or_default();
                let is_secret = |name: &str| ["key", "keys", "secret"].iter().any(|word| name.ends_with(word));
                let shown = if last.split('[').next().is_some_and(is_secret) { "(not shown)" } else { value.unwrap_or("…") };
                Fault { line: at.map(|at| self.line(at)), option, what: format!("{shown}: {what}") }
            }
            None => Fault { line: at.map(|at| self.line(at)), option: String::new(), what },
        }
    }

    /// Takes what nobody knows out of the table, so that the rest can be read.
    fn take_unknown(&self, table: &mut DeTable<'_>, path: &str, faults: &mut Vec<Fault>) {
        let known = Section::names(path);
        for (key, mut value) in std::mem::replace(table, DeTable::new()) {
            let name = key.get_ref().as_ref();
            let inner = if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
            if !known.contains(&name) {
                let (line, what) = (Some(self.line(key.span().start)), format!("unknown; {}", advice(path, name, &known)));
                faults.push(Fault { line, option: inner, what });
                continue;
            }
            if Section::exists(&inner) {
                match value.get_mut() {
                    DeValue::Table(table) => self.take_unknown(table, &inner, faults),
                    DeValue::Array(array) => {
                        for element in array.iter_mut() {
                            if let DeValue::Table(table) = element.get_mut() {
                                self.take_unknown(table, &inner, faults);
                            }
                        }
                    }
                    DeValue::String(_) | DeValue::Integer(_) | DeValue::Float(_) | DeValue::Boolean(_) | DeValue::Datetime(_) => {}
                }
            }
            table.insert(key, value);
        }
    }

    /// Line of an option, or of the innermost table around it that the file has.
    fn line_of(&self, table: &DeTable<'_>, option: &str) -> Option<usize> {
        let (mut table, mut found) = (table, None);
        for step in option.split('.') {
            let (name, place) = step.split_once('[').map_or((step, None), |(name, place)| (name, place.trim_end_matches(']').parse().ok()));
            let Some((key, value)) = table.iter().find(|(key, _)| key.get_ref().as_ref() == name) else { break };
            found = Some(key.span().start);
            let mut value = value;
            if let (Some(place), DeValue::Array(array)) = (place, value.get_ref()) {
                let Some(element) = array.get::<usize>(place) else { break };
                value = element;
                found = Some(value.span().start);
            }
            let DeValue::Table(inner) = value.get_ref() else { break };
            table = inner;
        }
        found.map(|at| self.line(at))
    }
}

/// The option whose value begins at, or is around, a place of the text.
fn path_at(table: &DeTable<'_>, at: usize) -> Option<String> {
    for (key, value) in table {
        let name = key.get_ref().as_ref();
        let inner = match value.get_ref() {
            DeValue::Table(table) => path_at(table, at).map(|inner| format!("{name}.{inner}")),
            DeValue::Array(array) => array.iter().enumerate().find_map(|(place, element)| match element.get_ref() {
                DeValue::Table(table) => path_at(table, at).map(|inner| format!("{name}[{place}].{inner}")),
                DeValue::String(_)
                | DeValue::Integer(_)
                | DeValue::Float(_)
                | DeValue::Boolean(_)
                | DeValue::Datetime(_)
                | DeValue::Array(_) => element.span().contains(&at).then(|| format!("{name}[{place}]")),
            }),
            DeValue::String(_) | DeValue::Integer(_) | DeValue::Float(_) | DeValue::Boolean(_) | DeValue::Datetime(_) => None,
        };
        if inner.is_some() {
            return inner;
        }
        if value.span().contains(&at) && !matches!(value.get_ref(), DeValue::Table(_)) {
            return Some(name.to_owned());
        }
    }
    None
}

/// What the writer may have meant.
fn advice(path: &str, name: &str, known: &[&str]) -> String {
    let alike = |known: &&str| strsim::jaro_winkler(known, name);
    let nearest = known.iter().copied().max_by(|a, b| alike(a).total_cmp(&alike(b))).filter(|known| alike(known) >= ALIKE);
    if let Some(nearest) = nearest {
        return format!("did you mean {nearest}?");
    }
    if let Some(section) = Section::with(name) {
        return format!("it belongs in {section}");
    }
    let place = if path.is_empty() { "a configuration".to_owned() } else { format!("[{path}]") };
    format!("{place} has {}", known.join(", "))
}
