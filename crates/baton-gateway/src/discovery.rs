//! Engines that are found while the gateway runs: the sources' tasks, and what the fleet is by their words and the configuration's.

mod list;

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
};

use baton_discovery::{Answer, Change, Endpoint, Member, Reconciler};

use crate::{
    config::{DiscoveryConfig, EngineConfig, Source},
    control::TaskGuard,
    fleet::{Found, Wanted},
    gateway::Shared,
};

/// What a source says of an engine beside where it is: all of it, or nothing, where the template says it.
type Own = Option<Box<EngineConfig>>;

/// Which engines there are to be.
#[derive(Debug, Default)]
pub(crate) struct Discovery {
    /// Those of the configuration.
    statics: Vec<EngineConfig>,
    reconciler: Reconciler<Own>,
    /// By label.
    sources: BTreeMap<String, Running>,
    generation: u64,
}

#[derive(Debug)]
struct Running {
    config: DiscoveryConfig,
    label: Arc<str>,
    /// What a task of before says comes too late.
    generation: u64,
    _task: TaskGuard,
}

impl Discovery {
    /// Other engines in the configuration, and other sources where these are given. A source that stays keeps the engines that it has named,
    /// also while it looks anew since its options are others.
    pub(crate) fn configure(&mut self, shared: &Arc<Shared>, statics: Vec<EngineConfig>, sources: Option<&[DiscoveryConfig]>) {
        self.statics = statics;
        if let Some(configs) = sources {
            let mut former = std::mem::take(&mut self.sources);
            for config in configs {
                let label = config.label();
                let same = former.remove(&label).filter(|running| running.config == *config);
                let running = same.unwrap_or_else(|| self.start(shared, &label, config));
                self.sources.insert(label, running);
            }
            shared.fleet.metrics.set_sources(self.sources.keys().cloned());
        }
        let bounds: Vec<(String, usize)> =
            self.sources.iter().map(|(label, running)| (label.clone(), running.config.max_engines)).collect();
        let statics: Vec<_> = self.statics.iter().map(|engine| (engine.url.to_string(), engine.name.clone())).collect();
        let changes = self.reconciler.configure(bounds, statics);
        self.note(shared, &changes);
    }

    fn start(&mut self, shared: &Arc<Shared>, label: &str, config: &DiscoveryConfig) -> Running {
        self.generation += 1;
        let (generation, label) = (self.generation, Arc::<str>::from(label));
        // The gateway holds its tasks, so these must not hold the gateway.
        let told = Told { shared: Arc::downgrade(shared), label: label.clone(), generation };
        Running { config: config.clone(), label, generation, _task: TaskGuard::spawn(run(config.clone(), told)) }
    }

    /// A source says something. Whether the fleet is another one by it.
    fn told(&mut self, shared: &Shared, label: &str, generation: u64, answer: Answer<Own>) -> bool {
        if self.sources.get(label).is_none_or(|running| running.generation != generation) {
            return false;
        }
        let metrics = &shared.fleet.metrics;
        match answer {
            Err(error) => {
                let text = error.to_string();
                let before = metrics.source(label, |said| {
                    said.failures += 1;
                    said.failing = Some(text.clone());
                });
                if before.is_none_or(|before| before.failing.as_ref() != Some(&text)) {
                    let engines = self.reconciler.count(label);
                    tracing::warn!(source = label, %error, engines, "a source of engines cannot look; what it said last holds");
                }
                false
            }
            Ok(endpoints) => {
                let before = metrics.source(label, |said| said.failing = None);
                if before.is_some_and(|before| before.failing.is_some()) {
                    tracing::info!(source = label, "a source of engines looks again");
                }
                let changes = self.reconciler.handle(label, endpoints);
                self.note(shared, &changes);
                !changes.is_empty()
            }
        }
    }

    /// Logs what changed, and counts what is.
    fn note(&self, shared: &Shared, changes: &[Change<Own>]) {
        for change in changes {
            let (what, member) = match change {
                Change::Added(id) => ("found an engine", self.reconciler.member(*id)),
                Change::Altered(id) => ("an engine is another one by its source's word", self.reconciler.member(*id)),
                Change::Drained(id) => ("an engine terminates", self.reconciler.member(*id)),
                Change::Undrained(id) => ("an engine does not terminate after all", self.reconciler.member(*id)),
                Change::Removed(member) => ("an engine is not named any more", Some(member)),
            };
            if let Some(Member { name, source, address, identity, .. }) = member {
                tracing::info!(replica = name, source, address, identity, "{what}");
            }
        }
        for (label, running) in &self.sources {
            let (engines, refused) = (self.reconciler.count(label), self.reconciler.refused(label));
            let before = shared.fleet.metrics.source(label, |said| (said.engines, said.refused) = (engines, refused));
            if refused > 0 && before.is_none_or(|before| before.refused == 0) {
                tracing::warn!(
                    source = label,
                    refused,
                    max_engines = running.config.max_engines,
                    "a source names more engines than are taken"
                );
            }
        }
    }

    /// All engines that there are to be, those of the configuration first.
    pub(crate) fn wanted(&self) -> Vec<Wanted> {
        let found = self.reconciler.members().filter_map(|member| self.engine(member));
        self.statics.iter().cloned().map(Wanted::from).chain(found).collect()
    }

    fn engine(&self, member: &Member<Own>) -> Option<Wanted> {
        let source = self.sources.get(&member.source)?;
        let config = match &member.options {
            Some(own) => EngineConfig::clone(own),
            None => source.config.engine.at(member.address.parse().expect("a source makes URLs of addresses")),
        };
        Some(Wanted {
            config: EngineConfig { name: Some(member.name.clone()), ..config },
            found: Some(Found { member: member.id, source: source.label.clone(), draining: member.draining }),
            rank: None,
        })
    }
}

/// Where a source's task leaves what it found.
struct Told {
    shared: Weak<Shared>,
    label: Arc<str>,
    generation: u64,
}

impl Told {
    fn take(&self, answer: Answer<Own>) {
        // Without a gateway the task ends with it.
        let Some(shared) = self.shared.upgrade() else { return };
        shared.rearrange(|discovery| discovery.told(&shared, &self.label, self.generation, answer));
    }
}

/// Watches a source for as long as it is configured.
async fn run(config: DiscoveryConfig, told: Told) {
    let source = config.source().expect("a configuration is checked before it is in force");
    let tell = |answer| told.take(answer);
    match source {
        Source::Dns(dns) => _ = dns.watch(tell).await,
        Source::Kubernetes(kubernetes) => _ = kubernetes.watch(tell).await,
        Source::File(file) => {
            let is_json = file.path.extension().is_some_and(|extension| extension == "json");
            let parse = |text: &str| -> Result<Vec<Endpoint<Own>>, String> { list::parse(text, is_json, &config.engine) };
            _ = file.watch(parse, tell).await;
        }
    }
}

/// Reads a list of engines.
#[cfg(fuzzing)]
pub(crate) fn fuzz_list(text: &str) {
    let template = toml::from_str("kind = \"vllm\"").expect("all else may be left out");
    for is_json in [false, true] {
        let _ = list::parse(text, is_json, &template);
    }
}
