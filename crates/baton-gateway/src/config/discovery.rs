//! Sources of engines, as the file describes them.

use std::{path::PathBuf, time::Duration};

use baton_discovery::{Access, Dns, File, Kubernetes, Named, Pace, Port};
use documented::{Documented, DocumentedFields};
use serde::{Deserialize, Serialize};

use super::{EngineConfig, EngineKind, Secret, values};
use crate::engine::BaseUrl;

/// A source of engines that come and go while the gateway runs; the table comes once for each source. An engine that several name is in the fleet once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Documented, DocumentedFields)]
#[serde(deny_unknown_fields)]
pub struct DiscoveryConfig {
    /// `dns`: every address of a name. `file`: a list of engines. `kubernetes`: the pods behind a service, or with a label.
    pub r#type: DiscoveryType,
    /// Of `dns`: the name to resolve, A and AAAA records, as this machine resolves names.
    #[serde(default)]
    pub name: Option<String>,
    /// The engines' port. Of `dns`: a number. Of `kubernetes`: a number, or a port's name in the service (with `selector`: in the pod); default: the only one there is.
    #[serde(default)]
    pub port: Option<Port>,
    /// Of `file`: a TOML file with `[[engines]]` as here, or, named `.json`, a JSON list of such tables. Write it under another name and rename it; a change is taken when two looks have seen it.
    #[serde(default)]
    pub path: Option<PathBuf>,
    /// Of `kubernetes`: the service whose `EndpointSlices` are watched.
    #[serde(default)]
    pub service: Option<String>,
    /// Of `kubernetes`, in place of a service: labels of the pods that are watched, for example `app=vllm`.
    #[serde(default)]
    pub selector: Option<String>,
    /// Of `kubernetes`. Default: that of the gateway's pod, or of the kubeconfig's context.
    #[serde(default)]
    pub namespace: Option<String>,
    /// Of `kubernetes`: a kubeconfig by which the API server is reached. Default: that of `KUBECONFIG` or the home folder where there is one, else the pod's service account.
    #[serde(default)]
    pub kubeconfig: Option<PathBuf>,
    /// Of `kubernetes`: URL of the API server, in place of a kubeconfig.
    #[serde(default)]
    pub api: Option<String>,
    /// File with the token for `api`, read again for each list. Default: none is sent.
    #[serde(default)]
    pub token_file: Option<PathBuf>,
    /// File with the certificates, in PEM, by which that of `api` is checked. Default: this machine's.
    #[serde(default)]
    pub ca_file: Option<PathBuf>,
    /// Between two looks. Default: `"10s"` for `dns`, `"1s"` for `file`, and for `kubernetes` `"5m"` between full lists, beside which changes are watched. Longer: fewer questions, later answers.
    #[serde(default, with = "values::some_duration")]
    pub every: Option<Duration>,
    /// Engines that are taken from this source; the rest is refused, with a line in the log and a metric. Default 1024.
    #[serde(default = "max_engines")]
    pub max_engines: usize,
    /// What the engines of the source have in common.
    pub engine: EngineTemplate,
}

/// What the engines of a source have in common, as in `[[engines]]`. A file's own word on an engine counts more.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Documented, DocumentedFields)]
#[serde(deny_unknown_fields)]
pub struct EngineTemplate {
    /// What they are: `baton`, `vllm`, `sglang`, `llamacpp` or `openai`.
    pub kind: EngineKind,
    /// Sent to each as `Authorization: Bearer KEY`.
    #[serde(default, skip_serializing)]
    pub key: Option<Secret>,
    /// As in `[[engines]]`.
    #[serde(default)]
    pub models: Vec<String>,
    /// As in `[[engines]]`.
    #[serde(default)]
    pub max_model_len: Option<u32>,
    /// As in `[[engines]]`.
    #[serde(default)]
    pub block_size: Option<u32>,
    /// As in `[[engines]]`.
    #[serde(default)]
    pub kv_blocks: Option<u32>,
    /// As in `[[engines]]`.
    #[serde(default)]
    pub max_running: Option<u32>,
    /// As in `[[engines]]`.
    #[serde(default)]
    pub token_budget: Option<u32>,
    /// As in `[[engines]]`.
    #[serde(default)]
    pub data_parallel_size: Option<u32>,
    /// As in `[[engines]]`; `*` for the host stands for each engine's own.
    #[serde(default)]
    pub kv_events: Option<String>,
    /// As in `[[engines]]`; `*` for the host stands for each engine's own.
    #[serde(default)]
    pub kv_replay: Option<String>,
    /// As in `[[engines]]`.
    #[serde(default)]
    pub slot_path: Option<PathBuf>,
    /// As in `[[engines]]`.
    #[serde(default)]
    pub priorities: Option<bool>,
    /// As in `[[engines]]`.
    #[serde(default)]
    pub group: Option<String>,
    /// As in `[[engines]]`.
    #[serde(default)]
    pub numerics: Option<String>,
}

/// Where a source looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiscoveryType {
    Dns,
    File,
    Kubernetes,
}

/// A source that can be started.
#[derive(Debug)]
pub(crate) enum Source {
    Dns(Dns),
    File(File),
    Kubernetes(Box<Kubernetes>),
}

/// An option with which no source can be started.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Wrong {
    pub(crate) option: &'static str,
    pub(crate) value: String,
    pub(crate) want: String,
}

fn max_engines() -> usize {
    1024
}

impl DiscoveryType {
    fn as_str(self) -> &'static str {
        match self {
            Self::Dns => "dns",
            Self::File => "file",
            Self::Kubernetes => "kubernetes",
        }
    }

    /// Options that mean something to it, beside those of every source.
    fn options(self) -> &'static [&'static str] {
        match self {
            Self::Dns => &["name", "port"],
            Self::File => &["path"],
            Self::Kubernetes => &["port", "service", "selector", "namespace", "kubeconfig", "api", "token_file", "ca_file"],
        }
    }
}

impl DiscoveryConfig {
    /// What it is called in logs, metrics and the admin API: what tells it from any other source.
    pub(crate) fn label(&self) -> String {
        let path = self.path.as_ref().map(|path| path.display().to_string());
        let names = [&self.namespace, &self.name, &path, &self.service, &self.selector];
        let place = names.into_iter().flatten().map(String::as_str).collect::<Vec<_>>().join("/");
        let port = match &self.port {
            Some(Port::Number(number)) => format!(":{number}"),
            Some(Port::Name(name)) => format!(":{name}"),
            None => String::new(),
        };
        format!("{}:{place}{port}", self.r#type.as_str())
    }

    /// What is to be started, or all that is wrong.
    pub(crate) fn source(&self) -> Result<Source, Vec<Wrong>> {
        let mut wrong: Vec<Wrong> = self.foreign();
        let source = match self.r#type {
            DiscoveryType::Dns => self.dns().map(Source::Dns),
            DiscoveryType::File => self.file().map(Source::File),
            DiscoveryType::Kubernetes => self.kubernetes().map(|kubernetes| Source::Kubernetes(Box::new(kubernetes))),
        };
        match source {
            Ok(source) if wrong.is_empty() => Ok(source),
            Ok(_) => Err(wrong),
            Err(more) => {
                wrong.push(more);
                Err(wrong)
            }
        }
    }

    /// Options that mean nothing to a source of this type.
    fn foreign(&self) -> Vec<Wrong> {
        let text = |value: &Option<String>| value.clone();
        let path = |value: &Option<PathBuf>| value.as_ref().map(|path| path.display().to_string());
        let port = self.port.as_ref().map(|port| match port {
            Port::Number(number) => number.to_string(),
            Port::Name(name) => name.clone(),
        });
        let given = [
            ("name", text(&self.name)),
            ("port", port),
            ("path", path(&self.path)),
            ("service", text(&self.service)),
            ("selector", text(&self.selector)),
            ("namespace", text(&self.namespace)),
            ("kubeconfig", path(&self.kubeconfig)),
            ("api", text(&self.api)),
            ("token_file", path(&self.token_file)),
            ("ca_file", path(&self.ca_file)),
        ];
        let of = self.r#type;
        let foreign = given.into_iter().filter(|(option, _)| !of.options().contains(option));
        let refused = |value: String, option| Wrong { option, value, want: format!("means nothing to a source of type {}", of.as_str()) };
        foreign.filter_map(|(option, value)| Some(refused(value?, option))).collect()
    }

    fn dns(&self) -> Result<Dns, Wrong> {
        let host = self.name.clone().filter(|name| !name.is_empty()).ok_or_else(|| missing("name", "say which name is to be resolved"))?;
        let port = match &self.port {
            Some(Port::Number(number)) => *number,
            Some(Port::Name(name)) => return Err(Wrong { option: "port", value: name.clone(), want: "must be a number".to_owned() }),
            None => return Err(missing("port", "say on which port the engines listen")),
        };
        Ok(Dns { host, port, every: self.every.unwrap_or(Duration::from_secs(10)) })
    }

    fn file(&self) -> Result<File, Wrong> {
        let path = self.path.clone().ok_or_else(|| missing("path", "say which file lists the engines"))?;
        Ok(File { path, every: self.every.unwrap_or(Duration::from_secs(1)) })
    }

    fn kubernetes(&self) -> Result<Kubernetes, Wrong> {
        let named = match (&self.service, &self.selector) {
            (Some(service), None) => Named::Service(service.clone()),
            (None, Some(selector)) => Named::Labels(selector.clone()),
            (None, None) => return Err(missing("service", "say which service's pods are engines, or give a selector of pods")),
            (Some(_), Some(selector)) => {
                return Err(Wrong {
                    option: "selector",
                    value: selector.clone(),
                    want: "give a service or a selector, not both".to_owned(),
                });
            }
        };
        let pace = Pace::default();
        Ok(Kubernetes {
            access: self.access()?,
            namespace: self.namespace.clone(),
            named,
            port: self.port.clone(),
            pace: Pace { list_every: self.every.unwrap_or(pace.list_every), ..pace },
        })
    }

    fn access(&self) -> Result<Access, Wrong> {
        let path =
            |option: &'static str, path: &PathBuf, want: &str| Wrong { option, value: path.display().to_string(), want: want.to_owned() };
        let Some(api) = &self.api else {
            for (option, given) in [("token_file", &self.token_file), ("ca_file", &self.ca_file)] {
                if let Some(given) = given {
                    return Err(path(option, given, "goes with `api`; a kubeconfig and a service account have their own"));
                }
            }
            return Ok(self.kubeconfig.clone().map_or(Access::Inferred, Access::Kubeconfig));
        };
        if let Some(kubeconfig) = &self.kubeconfig {
            return Err(path("kubeconfig", kubeconfig, "give a kubeconfig or `api`, not both"));
        }
        let url: Option<http::Uri> = api.parse().ok();
        let url = url.filter(|url| matches!(url.scheme_str(), Some("http" | "https")) && url.authority().is_some());
        let want = || Wrong { option: "api", value: api.clone(), want: "give https://HOST:PORT".to_owned() };
        Ok(Access::Url { url: url.ok_or_else(want)?, token_file: self.token_file.clone(), ca_file: self.ca_file.clone() })
    }
}

fn missing(option: &'static str, want: &str) -> Wrong {
    Wrong { option, value: "(missing)".to_owned(), want: want.to_owned() }
}

impl EngineTemplate {
    /// An engine at this address.
    pub(crate) fn at(&self, url: BaseUrl) -> EngineConfig {
        self.complete(EngineConfig::new(url, self.kind))
    }

    /// The engine with what it does not say itself.
    pub(crate) fn complete(&self, own: EngineConfig) -> EngineConfig {
        EngineConfig {
            url: own.url,
            kind: own.kind,
            name: own.name,
            key: own.key.or_else(|| self.key.clone()),
            ca: own.ca,
            models: if own.models.is_empty() { self.models.clone() } else { own.models },
            max_model_len: own.max_model_len.or(self.max_model_len),
            block_size: own.block_size.or(self.block_size),
            kv_blocks: own.kv_blocks.or(self.kv_blocks),
            max_running: own.max_running.or(self.max_running),
            token_budget: own.token_budget.or(self.token_budget),
            data_parallel_size: own.data_parallel_size.or(self.data_parallel_size),
            kv_events: own.kv_events.or_else(|| self.kv_events.clone()),
            kv_replay: own.kv_replay.or_else(|| self.kv_replay.clone()),
            slot_path: own.slot_path.or_else(|| self.slot_path.clone()),
            priorities: own.priorities.or(self.priorities),
            group: own.group.or_else(|| self.group.clone()),
            numerics: own.numerics.or_else(|| self.numerics.clone()),
        }
    }
}
