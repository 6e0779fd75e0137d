//! Kubernetes' objects, and which engines they speak of. No IO.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use k8s_openapi::api::{core::v1::Pod, discovery::v1::EndpointSlice};
use kube::ResourceExt;

use super::Port;
use crate::{Endpoint, Readiness, SourceError};

/// Marks the slices of a service.
pub(super) const SERVICE_LABEL: &str = "kubernetes.io/service-name";

/// What a kind of object says of engines.
pub(super) trait Speaks: ResourceExt {
    /// The engines that the object names.
    fn places(&self, port: Option<&Port>) -> Result<Vec<Place>, SourceError>;
}

/// One engine as one object names it.
pub(super) struct Place {
    uid: Option<String>,
    name: Option<String>,
    address: SocketAddr,
    readiness: Readiness,
}

/// The objects of a watch as they are known.
pub(super) struct Objects<K> {
    by_name: BTreeMap<String, K>,
}

impl<K: Speaks> Objects<K> {
    /// What a list says is so, whatever was known.
    pub(super) fn listed(objects: Vec<K>) -> Self {
        Self { by_name: objects.into_iter().map(|object| (object.name_any(), object)).collect() }
    }

    /// An event says that the object is so. Whether that is news.
    pub(super) fn changed(&mut self, object: K) -> bool {
        let name = object.name_any();
        let news = self.by_name.get(&name).is_none_or(|known| !is_stale(&object, known));
        if news {
            self.by_name.insert(name, object);
        }
        news
    }

    /// An event says that the object, which was so at last, is gone. Whether that is news.
    pub(super) fn deleted(&mut self, object: &K) -> bool {
        let name = object.name_any();
        // Another one may have come under the name meanwhile.
        let is_it = |known: &K| known.uid() == object.uid() && !is_stale(object, known);
        let news = self.by_name.get(&name).is_some_and(is_it);
        if news {
            self.by_name.remove(&name);
        }
        news
    }

    /// The engines that all objects name together, each once.
    pub(super) fn endpoints<T: Default>(&self, port: Option<&Port>) -> Result<Vec<Endpoint<T>>, SourceError> {
        let mut places: BTreeMap<String, Place> = BTreeMap::new();
        for object in self.by_name.values() {
            for place in object.places(port)? {
                let key = place.identity().unwrap_or_else(|| place.address.to_string());
                match places.remove(&key) {
                    Some(known) => _ = places.insert(key, known.merged(place)),
                    None => _ = places.insert(key, place),
                }
            }
        }
        Ok(places.into_values().map(Place::into_endpoint).collect())
    }
}

/// Whether an event tells of the object as it was before what is known of it. Versions are compared within one object only, and only where both
/// are numbers, as those of etcd are; where they are not, the event is believed and the next list puts things right.
fn is_stale<K: ResourceExt>(told: &K, known: &K) -> bool {
    let version = |object: &K| object.resource_version().and_then(|version| version.parse::<u64>().ok());
    told.uid() == known.uid() && version(told).zip(version(known)).is_some_and(|(told, known)| told < known)
}

impl Place {
    /// A pod may run an engine on each of several ports.
    fn identity(&self) -> Option<String> {
        self.uid.as_ref().map(|uid| format!("{uid}:{}", self.address.port()))
    }

    /// The same engine, named twice: by a slice of each address family, or by two slices while it moves between them.
    fn merged(self, other: Self) -> Self {
        let readiness = self.readiness.max(other.readiness);
        // IPv4 first, whichever slice comes first.
        let place = if other.address < self.address { other } else { self };
        Self { readiness, ..place }
    }

    fn into_endpoint<T: Default>(self) -> Endpoint<T> {
        Endpoint {
            address: format!("http://{}", self.address),
            identity: self.identity(),
            label: self.name.unwrap_or_else(|| self.address.to_string()),
            readiness: self.readiness,
            options: T::default(),
        }
    }
}

impl Speaks for EndpointSlice {
    fn places(&self, port: Option<&Port>) -> Result<Vec<Place>, SourceError> {
        let listed: Vec<(Option<&str>, u16)> = self
            .ports
            .iter()
            .flatten()
            .filter(|port| port.protocol.as_deref().unwrap_or("TCP") == "TCP")
            .filter_map(|port| Some((port.name.as_deref(), u16::try_from(port.port?).ok()?)))
            .collect();
        let Some(port) = chosen(port, &listed, || format!("EndpointSlice {}", self.name_any()))? else { return Ok(Vec::new()) };
        let endpoints = self.endpoints.iter().flatten();
        let place = |endpoint: &k8s_openapi::api::discovery::v1::Endpoint| {
            // All addresses of an endpoint are alike, and consumers use the first; a name instead of one (`FQDN`) is deprecated.
            let ip: IpAddr = endpoint.addresses.first()?.parse().ok()?;
            let pod = endpoint.target_ref.as_ref().filter(|target| target.kind.as_deref() == Some("Pod"));
            let conditions = endpoint.conditions.clone().unwrap_or_default();
            // Unknown readiness counts as ready. A service that publishes who is not ready says `ready` of all; `serving` is still the truth.
            let serves = conditions.ready.unwrap_or(true) && conditions.serving.unwrap_or(true);
            let readiness = match (conditions.terminating.unwrap_or(false), serves) {
                (true, _) => Readiness::Terminating,
                (false, true) => Readiness::Ready,
                (false, false) => Readiness::NotReady,
            };
            Some(Place {
                uid: pod.and_then(|pod| pod.uid.clone()),
                name: pod.and_then(|pod| pod.name.clone()),
                address: SocketAddr::new(ip, port),
                readiness,
            })
        };
        Ok(endpoints.filter_map(place).collect())
    }
}

impl Speaks for Pod {
    fn places(&self, port: Option<&Port>) -> Result<Vec<Place>, SourceError> {
        let status = self.status.as_ref();
        let ended = matches!(status.and_then(|status| status.phase.as_deref()), Some("Succeeded" | "Failed"));
        // A pod has no address before it is placed.
        let Some(ip) = status.and_then(|status| status.pod_ip.as_ref()?.parse::<IpAddr>().ok()).filter(|_| !ended) else {
            return Ok(Vec::new());
        };
        let listed: Vec<(Option<&str>, u16)> = self
            .spec
            .iter()
            .flat_map(|spec| spec.containers.iter().flat_map(|container| container.ports.iter().flatten()))
            .filter(|port| port.protocol.as_deref().unwrap_or("TCP") == "TCP")
            .filter_map(|port| Some((port.name.as_deref(), u16::try_from(port.container_port).ok()?)))
            .collect();
        let Some(port) = chosen(port, &listed, || format!("pod {}", self.name_any()))? else { return Ok(Vec::new()) };
        let conditions = status.and_then(|status| status.conditions.as_ref());
        let ready = conditions.into_iter().flatten().any(|condition| condition.type_ == "Ready" && condition.status == "True");
        let readiness = match (self.metadata.deletion_timestamp.is_some(), ready) {
            (true, _) => Readiness::Terminating,
            (false, true) => Readiness::Ready,
            (false, false) => Readiness::NotReady,
        };
        Ok(vec![Place { uid: self.uid(), name: Some(self.name_any()), address: SocketAddr::new(ip, port), readiness }])
    }
}

/// The engine's port among those that the object lists; `None` where it has no such one.
fn chosen(wanted: Option<&Port>, listed: &[(Option<&str>, u16)], object: impl Fn() -> String) -> Result<Option<u16>, SourceError> {
    match wanted {
        // Listing a port is no more than information, in pods and in slices.
        Some(Port::Number(number)) => Ok(Some(*number)),
        Some(Port::Name(name)) => Ok(listed.iter().find(|(listed, _)| *listed == Some(name)).map(|(_, number)| *number)),
        None => match listed {
            [] => Ok(None),
            [(_, only)] => Ok(Some(*only)),
            several => Err(SourceError::Ports { object: object(), count: several.len() }),
        },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn slice(name: &str, version: &str, endpoints: &Value) -> EndpointSlice {
        serde_json::from_value(json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": { "name": name, "uid": format!("uid-of-{name}"), "resourceVersion": version },
            "ports": [{ "name": "http", "port": 8000, "protocol": "TCP" }],
            "endpoints": endpoints,
        }))
        .unwrap()
    }

    fn endpoint(ip: &str, uid: &str, conditions: &Value) -> Value {
        json!({ "addresses": [ip], "conditions": conditions, "targetRef": { "kind": "Pod", "name": format!("pod-{uid}"), "uid": uid } })
    }

    fn shown(objects: &Objects<impl Speaks>, port: Option<&Port>) -> Vec<String> {
        let endpoints: Vec<Endpoint<()>> = objects.endpoints(port).unwrap();
        let show = |endpoint: Endpoint<()>| {
            let identity = endpoint.identity.unwrap_or_else(|| "-".to_owned());
            format!("{} {identity} {} {:?}", endpoint.address, endpoint.label, endpoint.readiness)
        };
        endpoints.into_iter().map(show).collect()
    }

    #[test]
    fn conditions_say_who_may_be_used() {
        let endpoints = json!([
            endpoint("10.0.0.1", "a", &json!({ "ready": true, "serving": true, "terminating": false })),
            endpoint("10.0.0.2", "b", &json!({})),
            endpoint("10.0.0.3", "c", &json!({ "ready": false })),
            endpoint("10.0.0.4", "d", &json!({ "ready": false, "serving": true, "terminating": true })),
            endpoint("10.0.0.5", "e", &json!({ "ready": true, "serving": false })),
            { "addresses": ["10.0.0.6"] },
            { "addresses": ["engine.example"] },
        ]);
        let objects = Objects::listed(vec![slice("s", "1", &endpoints)]);
        assert_eq!(
            shown(&objects, None),
            [
                "http://10.0.0.6:8000 - 10.0.0.6:8000 Ready",
                "http://10.0.0.1:8000 a:8000 pod-a Ready",
                "http://10.0.0.2:8000 b:8000 pod-b Ready",
                "http://10.0.0.3:8000 c:8000 pod-c NotReady",
                "http://10.0.0.4:8000 d:8000 pod-d Terminating",
                "http://10.0.0.5:8000 e:8000 pod-e NotReady",
            ]
        );
    }

    #[test]
    fn a_pod_of_several_slices_is_one_engine() {
        let one = slice("one", "1", &json!([endpoint("10.0.0.1", "a", &json!({ "ready": true }))]));
        let mut six = slice("six", "1", &json!([endpoint("fd00::1", "a", &json!({ "ready": true }))]));
        six.address_type = "IPv6".to_owned();
        let leaving = json!([endpoint("10.0.0.1", "a", &json!({ "ready": false, "terminating": true }))]);
        let two = slice("two", "1", &leaving);
        assert_eq!(shown(&Objects::listed(vec![six.clone(), one.clone()]), None), ["http://10.0.0.1:8000 a:8000 pod-a Ready"]);
        assert_eq!(shown(&Objects::listed(vec![one, two, six.clone()]), None), ["http://10.0.0.1:8000 a:8000 pod-a Terminating"]);
        assert_eq!(shown(&Objects::listed(vec![six]), None), ["http://[fd00::1]:8000 a:8000 pod-a Ready"]);
    }

    #[test]
    fn the_port_is_named_or_the_only_one() {
        let mut two = slice("s", "1", &json!([endpoint("10.0.0.1", "a", &json!({}))]));
        let other = json!([{ "name": "http", "port": 8000 }, { "name": "metrics", "port": 9000 }, { "name": "dns", "port": 53, "protocol": "UDP" }]);
        two.ports = serde_json::from_value(other).unwrap();
        let objects = Objects::listed(vec![two]);
        let of = |port: Port| shown(&objects, Some(&port));
        assert_eq!(of(Port::Name("metrics".to_owned())), ["http://10.0.0.1:9000 a:9000 pod-a Ready"]);
        assert_eq!(of(Port::Number(7000)), ["http://10.0.0.1:7000 a:7000 pod-a Ready"]);
        assert!(of(Port::Name("dns".to_owned())).is_empty(), "UDP is none");
        let error = objects.endpoints::<()>(None).unwrap_err().to_string();
        assert_eq!(error, "EndpointSlice s has 2 ports; name one with `port`");
    }

    #[test]
    fn an_event_from_before_what_is_known_changes_nothing() {
        let at = |ip: &str| json!([endpoint(ip, "a", &json!({}))]);
        let mut objects = Objects::listed(vec![slice("s", "100", &at("10.0.0.1"))]);
        assert!(!objects.changed(slice("s", "99", &at("10.0.0.9"))) && !objects.deleted(&slice("s", "99", &at("10.0.0.9"))));
        assert_eq!(shown(&objects, None), ["http://10.0.0.1:8000 a:8000 pod-a Ready"], "stale");
        assert!(objects.changed(slice("s", "101", &at("10.0.0.2"))));
        assert_eq!(shown(&objects, None), ["http://10.0.0.2:8000 a:8000 pod-a Ready"]);
        assert!(objects.changed(slice("s", "opaque", &at("10.0.0.3"))));
        assert_eq!(shown(&objects, None), ["http://10.0.0.3:8000 a:8000 pod-a Ready"], "what cannot be compared is believed");
        let mut reborn = slice("s", "7", &at("10.0.0.4"));
        reborn.metadata.uid = Some("another".to_owned());
        assert!(objects.changed(reborn.clone()));
        assert_eq!(shown(&objects, None), ["http://10.0.0.4:8000 a:8000 pod-a Ready"], "another object under the name");
        assert!(!objects.deleted(&slice("s", "200", &at("10.0.0.3"))), "the one before it is gone, not this one");
        assert!(objects.deleted(&reborn) && objects.by_name.is_empty());
    }

    #[test]
    fn pods_speak_for_themselves() {
        let pod = |name: &str, status: Value, deleted: Option<&str>| -> Pod {
            serde_json::from_value(json!({
                "apiVersion": "v1", "kind": "Pod",
                "metadata": { "name": name, "uid": format!("uid-{name}"), "resourceVersion": "1", "deletionTimestamp": deleted },
                "spec": { "containers": [{ "name": "engine", "ports": [{ "name": "http", "containerPort": 8000 }] }, { "name": "sidecar" }] },
                "status": status,
            }))
            .unwrap()
        };
        let running =
            |ip: &str, ready: &str| json!({ "phase": "Running", "podIP": ip, "conditions": [{ "type": "Ready", "status": ready }] });
        let objects = Objects::listed(vec![
            pod("a", running("10.0.0.1", "True"), None),
            pod("b", running("10.0.0.2", "False"), None),
            pod("c", running("10.0.0.3", "False"), Some("2026-01-01T00:00:00Z")),
            pod("d", json!({ "phase": "Pending" }), None),
            pod("e", json!({ "phase": "Failed", "podIP": "10.0.0.5" }), None),
        ]);
        let expected = [
            "http://10.0.0.1:8000 uid-a:8000 a Ready",
            "http://10.0.0.2:8000 uid-b:8000 b NotReady",
            "http://10.0.0.3:8000 uid-c:8000 c Terminating",
        ];
        assert_eq!(shown(&objects, None), expected);
        assert_eq!(shown(&objects, Some(&Port::Name("http".to_owned()))), expected);
        assert_eq!(shown(&objects, Some(&Port::Name("other".to_owned()))), [""; 0]);
    }
}
