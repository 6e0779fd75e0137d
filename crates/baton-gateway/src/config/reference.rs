//! The page and the skeleton that name every option, made from the types that are read.

use std::fmt::Write as _;

use baton_policy::PriceWeights;
use documented::{Documented, DocumentedFields};

use super::{
    ClassConfig, DiscoveryConfig, EngineConfig, EngineTemplate, FrontConfig, GatewayConfig, MovesConfig, PolicyConfig, PublicPrefixConfig,
    TenantConfig, TlsConfig,
};

/// Columns of a comment in the skeleton.
const COLUMNS: usize = 110;

/// Values that are no default, for options without one.
const EXAMPLES: [(&str, &str); 67] = [
    ("gateway.admin_bind", "\"127.0.0.1:8081\""),
    ("gateway.admin_key", "{ env = \"BATON_ADMIN_KEY\" }"),
    ("gateway.salt_secret", "{ env = \"BATON_SALT_SECRET\" }"),
    ("gateway.fleet_key_file", "\"/etc/baton/fleet.key\""),
    ("gateway.tls.cert", "\"/etc/baton/tls.crt\""),
    ("gateway.tls.key", "\"/etc/baton/tls.key\""),
    ("engines.url", "\"http://127.0.0.1:8101\""),
    ("engines.kind", "\"vllm\""),
    ("engines.name", "\"r0\""),
    ("engines.ca", "\"/etc/baton/engines-ca.crt\""),
    ("engines.key", "{ env = \"VLLM_API_KEY\" }"),
    ("engines.models", "[\"my-model\"]"),
    ("engines.max_model_len", "8192"),
    ("engines.block_size", "16"),
    ("engines.kv_blocks", "8192"),
    ("engines.max_running", "256"),
    ("engines.token_budget", "2048"),
    ("engines.data_parallel_size", "2"),
    ("engines.kv_events", "\"tcp://127.0.0.1:5557\""),
    ("engines.kv_replay", "\"tcp://127.0.0.1:5558\""),
    ("engines.slot_path", "\"/var/lib/llama/slots\""),
    ("engines.priorities", "false"),
    ("engines.group", "\"rack-a-h100\""),
    ("engines.numerics", "\"llama-3-8b bf16 h100\""),
    ("policy.quiet_from", "-10"),
    ("policy.index_snapshot", "\"/var/lib/baton/index\""),
    ("policy.classes.slo_ttft", "\"500ms\""),
    ("discovery.type", "\"kubernetes\""),
    ("discovery.name", "\"engines.example.com\""),
    ("discovery.port", "8000"),
    ("discovery.path", "\"/etc/baton/engines.toml\""),
    ("discovery.service", "\"vllm\""),
    ("discovery.selector", "\"app=vllm\""),
    ("discovery.namespace", "\"serving\""),
    ("discovery.kubeconfig", "\"/etc/baton/kubeconfig\""),
    ("discovery.api", "\"https://10.0.0.1:6443\""),
    ("discovery.token_file", "\"/etc/baton/token\""),
    ("discovery.ca_file", "\"/etc/baton/ca.crt\""),
    ("discovery.every", "\"10s\""),
    ("discovery.max_engines", "1024"),
    ("discovery.engine.kind", "\"vllm\""),
    ("discovery.engine.key", "{ env = \"VLLM_API_KEY\" }"),
    ("discovery.engine.models", "[\"my-model\"]"),
    ("discovery.engine.max_model_len", "8192"),
    ("discovery.engine.block_size", "16"),
    ("discovery.engine.kv_blocks", "8192"),
    ("discovery.engine.max_running", "256"),
    ("discovery.engine.token_budget", "2048"),
    ("discovery.engine.data_parallel_size", "2"),
    ("discovery.engine.kv_events", "\"tcp://*:5557\""),
    ("discovery.engine.kv_replay", "\"tcp://*:5558\""),
    ("discovery.engine.slot_path", "\"/var/lib/llama/slots\""),
    ("discovery.engine.priorities", "false"),
    ("discovery.engine.group", "\"rack-a-h100\""),
    ("discovery.engine.numerics", "\"llama-3-8b bf16 h100\""),
    ("tenants.name", "\"team-a\""),
    ("tenants.keys", "[{ env = \"TEAM_A_KEY\" }]"),
    ("tenants.priority_max", "0"),
    ("tenants.classes", "[\"default\"]"),
    ("tenants.isolation", "\"salt\""),
    ("tenants.ttft_padding", "\"50ms\""),
    ("tenants.weight", "1.0"),
    ("tenants.requests_per_minute", "600"),
    ("tenants.tokens_per_minute", "1000000"),
    ("tenants.concurrency", "64"),
    ("public_prefixes.system", "\"You are a helpful assistant.\""),
    ("public_prefixes.text", "\"Answer briefly.\\n\""),
];

/// A table of the file.
pub(super) struct Section {
    path: &'static str,
    presence: Presence,
    about: &'static str,
    names: &'static [&'static str],
    docs: &'static [&'static str],
}

/// How often a table comes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Presence {
    Once,
    /// At least once.
    Often,
    /// Once or never; the defaults are without it.
    MaybeOnce,
    /// As often as wanted, or never, as by default.
    MaybeOften,
}

impl Presence {
    fn is_certain(self) -> bool {
        matches!(self, Self::Once | Self::Often)
    }

    fn is_list(self) -> bool {
        matches!(self, Self::Often | Self::MaybeOften)
    }
}

const fn section<T: Documented + DocumentedFields>(path: &'static str, presence: Presence) -> Section {
    Section { path, presence, about: T::DOCS, names: T::FIELD_NAMES, docs: T::FIELD_DOCS }
}

const SECTIONS: [Section; 11] = [
    section::<FrontConfig>("gateway", Presence::Once),
    section::<TlsConfig>("gateway.tls", Presence::MaybeOnce),
    section::<EngineConfig>("engines", Presence::Often),
    section::<PolicyConfig>("policy", Presence::Once),
    section::<ClassConfig>("policy.classes", Presence::Often),
    section::<PriceWeights>("policy.weights", Presence::Once),
    section::<MovesConfig>("moves", Presence::Once),
    section::<TenantConfig>("tenants", Presence::MaybeOften),
    section::<PublicPrefixConfig>("public_prefixes", Presence::MaybeOften),
    section::<DiscoveryConfig>("discovery", Presence::MaybeOften),
    section::<EngineTemplate>("discovery.engine", Presence::MaybeOnce),
];

impl Section {
    pub(super) fn exists(path: &str) -> bool {
        SECTIONS.iter().any(|section| section.path == path)
    }

    /// What a table may hold; the file itself has an empty path.
    pub(super) fn names(path: &str) -> Vec<&'static str> {
        match SECTIONS.iter().find(|section| section.path == path) {
            Some(section) => section.names.iter().copied().map(written).collect(),
            None => SECTIONS.iter().map(|section| section.path).filter(|path| !path.contains('.')).collect(),
        }
    }

    /// Header of the table that has an option of this name.
    pub(super) fn with(name: &str) -> Option<String> {
        SECTIONS.iter().find(|section| section.names.iter().any(|known| written(known) == name)).map(Self::header)
    }

    fn header(&self) -> String {
        if self.presence.is_list() { format!("[[{}]]", self.path) } else { format!("[{}]", self.path) }
    }

    /// Options with their docs, without the tables inside, which are sections of their own.
    fn options(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let options = self.names.iter().copied().map(written).zip(self.docs.iter().copied());
        options.filter(|(name, _)| !Self::exists(&format!("{}.{name}", self.path)))
    }

    /// As the file would say it.
    fn default_of(&self, defaults: &toml::Table, name: &str) -> Option<String> {
        let mut table = defaults;
        for step in self.path.split('.') {
            let value = table.get(step)?;
            table = value.as_array().and_then(|elements| elements.first()).unwrap_or(value).as_table()?;
        }
        table.get(name).map(ToString::to_string)
    }
}

/// An option's name in the file; Rust marks one that is a word of its own.
fn written(name: &'static str) -> &'static str {
    name.trim_start_matches("r#")
}

fn defaults() -> toml::Table {
    toml::Table::try_from(GatewayConfig::default()).expect("a configuration is a table")
}

fn example(path: &str, name: &str) -> &'static str {
    let wanted = format!("{path}.{name}");
    EXAMPLES.iter().find(|(option, _)| *option == wanted).map_or("\"…\"", |(_, example)| example)
}

/// A configuration with every option: its default, or a comment with an example where there is none.
pub fn skeleton() -> String {
    let defaults = defaults();
    let mut text =
        "# Configuration of `baton serve --config FILE`. Every value is the default; an option in a comment has none.\n".to_owned();
    for section in &SECTIONS {
        text.push('\n');
        comment(&mut text, section.about);
        let is_there = section.presence.is_certain();
        writeln!(text, "{}{}", if is_there { "" } else { "# " }, section.header()).expect("a string takes it");
        for (name, docs) in section.options() {
            comment(&mut text, docs);
            match section.default_of(&defaults, name) {
                Some(default) => writeln!(text, "{name} = {default}"),
                None if is_there && REQUIRED.contains(&(section.path, name)) => writeln!(text, "{name} = {}", example(section.path, name)),
                None => writeln!(text, "# {name} = {}", example(section.path, name)),
            }
            .expect("a string takes it");
        }
    }
    text
}

const REQUIRED: [(&str, &str); 8] = [
    ("gateway.tls", "cert"),
    ("gateway.tls", "key"),
    ("engines", "url"),
    ("engines", "kind"),
    ("tenants", "name"),
    ("tenants", "keys"),
    ("discovery", "type"),
    ("discovery.engine", "kind"),
];

/// Docs as comment lines. What links mean in a page of Rust says nothing here.
fn comment(text: &mut String, docs: &str) {
    for paragraph in plain(docs).split("\n\n") {
        let mut line = String::from("#");
        for word in paragraph.split_whitespace() {
            if line.len() + 1 + word.len() > COLUMNS {
                writeln!(text, "{line}").expect("a string takes it");
                line = String::from("#");
            }
            write!(line, " {word}").expect("a string takes it");
        }
        writeln!(text, "{line}").expect("a string takes it");
    }
}

/// The first paragraph, which is for who writes the file; what follows is for who reads the code.
fn plain(docs: &str) -> &str {
    docs.split("\n\n").next().unwrap_or_default()
}

/// The reference page, in Markdown.
pub fn reference() -> String {
    let defaults = defaults();
    let mut page = "# Configuration\n\n\
        What `baton serve --config FILE` reads, in TOML. `baton serve --print-config` prints a file with every option and its default;\n\
        `baton check-config FILE` names the line of each mistake. Durations are like `\"250ms\"` or `\"1m 30s\"`, sizes like `\"64MiB\"`. A key is text,\n\
        `{ env = \"NAME\" }` or `{ file = \"PATH\" }`.\n\n\
        This page is made from the types that are read: `baton check-config --reference` prints it.\n"
        .to_owned();
    for section in &SECTIONS {
        write!(page, "\n## `{}`\n\n{}\n\n| option | default | |\n| --- | --- | --- |\n", section.header(), joined(plain(section.about)))
            .expect("a string takes it");
        for (name, docs) in section.options() {
            let default = match section.default_of(&defaults, name) {
                Some(default) => format!("`{default}`"),
                None if REQUIRED.contains(&(section.path, name)) => "required".to_owned(),
                None => String::new(),
            };
            writeln!(page, "| `{name}` | {default} | {} |", joined(plain(docs)).replace('|', "\\|")).expect("a string takes it");
        }
    }
    page
}

fn joined(docs: &str) -> String {
    docs.split_whitespace().collect::<Vec<_>>().join(" ")
}
