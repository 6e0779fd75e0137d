//! The pods behind a Kubernetes service, or those that a label selector names.

mod objects;

use std::{convert::Infallible, fmt::Debug, fs, path::PathBuf, pin::pin, time::Duration};

use futures_util::StreamExt;
use k8s_openapi::{
    NamespaceResourceScope,
    api::{core::v1::Pod, discovery::v1::EndpointSlice},
};
use kube::{
    Api, Client, Config, Resource,
    api::{ListParams, WatchEvent, WatchParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::{
    task::spawn_blocking,
    time::{Instant, sleep, sleep_until, timeout},
};

use self::objects::{Objects, SERVICE_LABEL, Speaks};
use crate::{Answer, Endpoint, SourceError};

/// The API server ends a watch after this time, and it is asked for the next one. A connection on which even the end does not come is dead.
const WATCH_FOR: Duration = Duration::from_mins(1);
const SLACK: Duration = Duration::from_secs(10);
/// For a list, and for the head of a watch.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// Status of a watch that asks for versions which the server does not keep any more.
const GONE: u16 = 410;

/// Engines in a Kubernetes cluster. A full list is the truth; between lists a watch tells what changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kubernetes {
    pub access: Access,
    /// Default: that of the service account, or of the kubeconfig's context.
    pub namespace: Option<String>,
    pub named: Named,
    /// Default: the only one there is.
    pub port: Option<Port>,
    pub pace: Pace,
}

/// How the API server is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// By the kubeconfig of `KUBECONFIG` or the home folder where there is one, else as a pod of the cluster.
    Inferred,
    Kubeconfig(PathBuf),
    Url {
        url: http::Uri,
        /// Read again for each list, as it is replaced before it expires; a watch that it does not allow any more makes a list. Default:
        /// nobody in particular asks.
        token_file: Option<PathBuf>,
        /// Certificates, in PEM, by which the server's is checked. Default: those of this machine.
        ca_file: Option<PathBuf>,
    },
}

/// Which pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Named {
    /// Those of a service's `EndpointSlices`.
    Service(String),
    /// Those with such labels, as in `app=vllm,tier!=test`.
    Labels(String),
}

/// An engine's port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a port is a number up to 65535, or a port's name")]
pub enum Port {
    Number(u16),
    Name(String),
}

/// How often the API server is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// Between full lists.
    pub list_every: Duration,
    /// After a failure: at first, and at most. It doubles with each one in a row, and a random part of it, at least half, is waited.
    pub pause: Duration,
    pub pause_max: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self { list_every: Duration::from_mins(5), pause: Duration::from_millis(500), pause_max: Duration::from_secs(30) }
    }
}

/// Pauses between attempts.
struct Backoff {
    pace: Pace,
    failures: u32,
}

/// How a watch ended.
enum End {
    /// It is time for a list, or what happened since is not known any more.
    List,
    /// The server, or the network, ended it; it goes on where it was.
    Closed,
}

/// One source at work: what is known, and who is told.
struct Follower<'a, K, T, F> {
    source: &'a Kubernetes,
    api: Api<K>,
    selector: String,
    objects: Objects<K>,
    /// What is known is that of this version.
    version: String,
    /// What was told last; none after a failure.
    told: Option<Vec<Endpoint<T>>>,
    tell: &'a mut F,
}

impl Kubernetes {
    /// Lists, watches, and tells every change, until it is dropped.
    pub async fn watch<T: Default + Clone + PartialEq>(self, tell: impl FnMut(Answer<T>)) -> Infallible {
        match &self.named {
            Named::Service(name) => self.follow::<EndpointSlice, T>(&format!("{SERVICE_LABEL}={name}"), tell).await,
            Named::Labels(selector) => self.follow::<Pod, T>(selector, tell).await,
        }
    }

    async fn follow<K, T>(&self, selector: &str, mut tell: impl FnMut(Answer<T>)) -> Infallible
    where
        K: Speaks + Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + Debug + DeserializeOwned,
        T: Default + Clone + PartialEq,
    {
        let mut backoff = Backoff { pace: self.pace, failures: 0 };
        loop {
            if let Err(error) = self.list_and_watch::<K, T>(selector, &mut backoff, &mut tell).await {
                tell(Err(error));
            }
            // Also after a watch that could not go on: a server that says so again and again is not to be asked without a pause.
            backoff.wait().await;
        }
    }

    /// Ends when the next list is due.
    async fn list_and_watch<K, T>(&self, selector: &str, backoff: &mut Backoff, tell: &mut impl FnMut(Answer<T>)) -> Result<(), SourceError>
    where
        K: Speaks + Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + Debug + DeserializeOwned,
        T: Default + Clone + PartialEq,
    {
        // Made anew each time: certificates, tokens and kubeconfigs are replaced while we run.
        let client = self.client().await?;
        let namespace = self.namespace.clone().unwrap_or_else(|| client.default_namespace().to_owned());
        let api: Api<K> = Api::namespaced(client, &namespace);
        let until = Instant::now() + self.pace.list_every;
        let list = answered(api.list(&ListParams::default().labels(selector))).await?;
        let version = list.metadata.resource_version.ok_or_else(|| SourceError::Kubernetes("a list without a version".to_owned()))?;
        let objects = Objects::listed(list.items);
        let mut follower = Follower { source: self, api, selector: selector.to_owned(), objects, version, told: None, tell };
        follower.report();
        loop {
            let (begun, before) = (Instant::now(), follower.version.clone());
            let end = follower.watch(until).await;
            let went_well = follower.version != before || begun.elapsed() >= self.pace.pause_max;
            if went_well {
                backoff.failures = 0;
            }
            match end? {
                End::List => return Ok(()),
                End::Closed if went_well => {}
                End::Closed => backoff.wait().await,
            }
        }
    }

    async fn client(&self) -> Result<Client, SourceError> {
        let mut config = self.config().await?;
        // Failures are told and waited for here.
        config.default_retry = false;
        // A kubeconfig may name a program that gives the token.
        let client = spawn_blocking(move || Client::try_from(config)).await;
        client.map_err(|error| SourceError::Kubernetes(error.to_string()))?.map_err(|error| kubernetes(&error))
    }

    async fn config(&self) -> Result<Config, SourceError> {
        let wrong = |error: &dyn std::error::Error| SourceError::Kubernetes(error.to_string());
        match &self.access {
            Access::Inferred => Config::infer().await.map_err(|error| wrong(&error)),
            Access::Kubeconfig(path) => {
                let kubeconfig = Kubeconfig::read_from(path).map_err(|error| wrong(&error))?;
                Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.map_err(|error| wrong(&error))
            }
            Access::Url { url, token_file, ca_file } => {
                let mut config = Config::new(url.clone());
                if let Some(path) = token_file {
                    // kube would send the line break that an editor leaves at the end.
                    let token = fs::read_to_string(path).map_err(|error| SourceError::Unreadable { path: path.clone(), error })?;
                    config.auth_info.token = Some(token.trim_end().into());
                }
                config.root_cert_file.clone_from(ca_file);
                if ca_file.is_some() || url.scheme_str() == Some("http") {
                    // Else kube wants this machine's certificates, which neither needs, and which an image may lack.
                    config.root_cert = Some(Vec::new());
                }
                Ok(config)
            }
        }
    }
}

impl<K, T, F> Follower<'_, K, T, F>
where
    K: Speaks + Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + Debug + DeserializeOwned,
    T: Default + Clone + PartialEq,
    F: FnMut(Answer<T>),
{
    /// Follows changes from the known version on.
    async fn watch(&mut self, until: Instant) -> Result<End, SourceError> {
        let parameters = WatchParams::default().labels(&self.selector).timeout(WATCH_FOR.as_secs() as u32);
        let opened = timeout(ANSWER_WITHIN, self.api.watch(&parameters, &self.version)).await;
        let stream = match opened {
            Ok(Err(kube::Error::Api(status))) if status.code == GONE => return Ok(End::List),
            Ok(stream) => stream.map_err(|error| kubernetes(&error))?,
            Err(_) => return Err(unanswered()),
        };
        let mut stream = pin!(stream);
        loop {
            let event = tokio::select! {
                event = timeout(WATCH_FOR + SLACK, stream.next()) => event,
                () = sleep_until(until) => return Ok(End::List),
            };
            match event {
                Ok(Some(Ok(WatchEvent::Added(object) | WatchEvent::Modified(object)))) => {
                    let version = object.resource_version();
                    if self.objects.changed(object) {
                        self.reached(version);
                    }
                }
                Ok(Some(Ok(WatchEvent::Deleted(object)))) => {
                    if self.objects.deleted(&object) {
                        self.reached(object.resource_version());
                    }
                }
                Ok(Some(Ok(WatchEvent::Bookmark(bookmark)))) => self.reached(Some(bookmark.metadata.resource_version)),
                Ok(Some(Ok(WatchEvent::Error(status)))) if status.code == GONE => return Ok(End::List),
                Ok(Some(Ok(WatchEvent::Error(status)))) => return Err(SourceError::Kubernetes(status.message)),
                Ok(Some(Err(kube::Error::Api(status)))) if status.code == GONE => return Ok(End::List),
                Ok(Some(Err(error))) => {
                    tracing::debug!(%error, "a watch broke off");
                    return Ok(End::Closed);
                }
                Ok(None) => return Ok(End::Closed),
                Err(_) => {
                    tracing::debug!("a watch fell silent");
                    return Ok(End::Closed);
                }
            }
            self.report();
        }
    }

    /// The next watch goes on from here.
    fn reached(&mut self, version: Option<String>) {
        if let Some(version) = version {
            self.version = version;
        }
    }

    /// Tells what is known where it differs from what was told.
    fn report(&mut self) {
        match self.objects.endpoints(self.source.port.as_ref()) {
            Ok(endpoints) if self.told.as_ref() == Some(&endpoints) => {}
            Ok(endpoints) => {
                self.told = Some(endpoints.clone());
                (self.tell)(Ok(endpoints));
            }
            Err(error) => {
                self.told = None;
                (self.tell)(Err(error));
            }
        }
    }
}

impl Backoff {
    async fn wait(&mut self) {
        let longest = self.pace.pause.saturating_mul(1 << self.failures.min(16)).min(self.pace.pause_max);
        self.failures = self.failures.saturating_add(1);
        // Gateways that lost the same server do not come back to it as one.
        sleep(longest.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
    }
}

async fn answered<V>(asked: impl Future<Output = Result<V, kube::Error>>) -> Result<V, SourceError> {
    timeout(ANSWER_WITHIN, asked).await.map_err(|_| unanswered())?.map_err(|error| kubernetes(&error))
}

fn unanswered() -> SourceError {
    SourceError::Kubernetes(format!("no answer within {ANSWER_WITHIN:?}"))
}

/// With the causes, which say what is wrong: kube's own text names the layer only.
fn kubernetes(error: &kube::Error) -> SourceError {
    if let kube::Error::Api(status) = error {
        return SourceError::Kubernetes(format!("status {}: {}", status.code, status.message));
    }
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    SourceError::Kubernetes(text)
}
