use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const SOURCES: [&str; 3] = ["dns:a", "file:b", "kubernetes:c"];

fn at(address: &str) -> Endpoint<u8> {
    Endpoint { address: address.to_owned(), identity: None, label: address.to_owned(), readiness: Readiness::Ready, options: 0 }
}

fn pod(uid: &str, address: &str) -> Endpoint<u8> {
    Endpoint { identity: Some(uid.to_owned()), label: format!("pod-{uid}"), ..at(address) }
}

fn terminating(endpoint: Endpoint<u8>) -> Endpoint<u8> {
    Endpoint { readiness: Readiness::Terminating, ..endpoint }
}

fn not_ready(endpoint: Endpoint<u8>) -> Endpoint<u8> {
    Endpoint { readiness: Readiness::NotReady, ..endpoint }
}

fn over(sources: &[&str]) -> Reconciler<u8> {
    let mut reconciler = Reconciler::default();
    assert!(reconciler.configure(sources.iter().map(|source| ((*source).to_owned(), 100)), []).is_empty());
    reconciler
}

/// Address and name of each member; `-` before who is drained.
fn shown(reconciler: &Reconciler<u8>) -> Vec<String> {
    let drained = |member: &Member<u8>| if member.draining { "-" } else { "" };
    reconciler.members().map(|member| format!("{}{} {}", drained(member), member.address, member.name)).collect()
}

fn none() -> Vec<Change<u8>> {
    Vec::new()
}

fn added(change: &Change<u8>) -> Option<MemberId> {
    if let Change::Added(id) = change { Some(*id) } else { None }
}

fn removed(change: &Change<u8>) -> Option<MemberId> {
    if let Change::Removed(member) = change { Some(member.id) } else { None }
}

fn id_at(reconciler: &Reconciler<u8>, address: &str) -> Option<MemberId> {
    reconciler.members().find(|member| member.address == address).map(|member| member.id)
}

#[test]
fn what_a_source_names_comes_and_what_it_names_no_longer_goes() {
    let mut reconciler = over(&["dns"]);
    let changes = reconciler.handle("dns", vec![at("h:1"), at("h:2")]);
    assert_eq!(changes, [Change::Added(MemberId(1)), Change::Added(MemberId(2))]);
    assert_eq!(reconciler.handle("dns", vec![at("h:2"), at("h:1")]), none(), "the order says nothing");
    let gone = reconciler.handle("dns", vec![at("h:2")]);
    assert!(matches!(&gone[..], [Change::Removed(member)] if member.address == "h:1"), "{gone:?}");
    reconciler.handle("dns", vec![at("h:1"), at("h:2")]);
    assert_eq!(id_at(&reconciler, "h:1"), Some(MemberId(3)), "it left, so it is a new one");
    assert_eq!(reconciler.handle("other", vec![at("h:9")]), none(), "no such source");
}

#[test]
fn an_engine_stays_while_another_source_names_it() {
    let mut reconciler = over(&["dns", "file"]);
    reconciler.handle("dns", vec![at("h:1")]);
    assert_eq!(reconciler.handle("file", vec![at("h:1")]), none());
    let changes = reconciler.handle("dns", vec![]);
    assert_eq!(changes, [Change::Altered(MemberId(1))], "only its source is another one");
    assert_eq!(reconciler.member(MemberId(1)).unwrap().source, "file");
}

#[test]
fn a_pod_is_known_by_its_uid() {
    let mut reconciler = over(&["k"]);
    reconciler.handle("k", vec![pod("x", "10.0.0.1:80")]);
    let reborn = reconciler.handle("k", vec![pod("y", "10.0.0.1:80")]);
    assert!(matches!(&reborn[..], [Change::Added(MemberId(2)), Change::Removed(old)] if old.id == MemberId(1)), "same IP: {reborn:?}");
    assert_eq!(reconciler.handle("k", vec![pod("y", "10.0.0.7:80")]), [Change::Altered(MemberId(2))], "it is at another address");
    reconciler.handle("k", vec![pod("y", "10.0.0.7:80"), pod("z", "10.0.0.8:80")]);
    let swapped = reconciler.handle("k", vec![pod("y", "10.0.0.8:80"), pod("z", "10.0.0.7:80")]);
    assert_eq!(swapped, [Change::Altered(MemberId(3)), Change::Altered(MemberId(2))], "IPs that move between pods");
}

#[test]
fn an_address_gets_an_identity_once_somebody_knows_it_and_keeps_it() {
    let mut reconciler = over(&["dns", "k"]);
    reconciler.handle("dns", vec![at("h:1")]);
    assert_eq!(reconciler.handle("k", vec![pod("x", "h:1")]), [Change::Altered(MemberId(1))]);
    assert_eq!(shown(&reconciler), ["h:1 h:1"], "the name stays");
    assert_eq!(reconciler.handle("k", vec![]), [Change::Altered(MemberId(1))], "DNS names it still");
    assert_eq!(reconciler.handle("k", vec![pod("x", "h:1")]), [Change::Altered(MemberId(1))], "and it comes back as the same");
    let other = reconciler.handle("k", vec![pod("y", "h:1")]);
    assert!(matches!(other[..], [Change::Added(MemberId(2)), Change::Removed(_)]), "{other:?}");
}

#[test]
fn who_terminates_is_drained_until_it_is_gone() {
    let mut reconciler = over(&["k"]);
    reconciler.handle("k", vec![pod("x", "h:1"), pod("y", "h:2")]);
    assert_eq!(reconciler.handle("k", vec![terminating(pod("x", "h:1")), pod("y", "h:2")]), [Change::Drained(MemberId(1))]);
    assert_eq!(shown(&reconciler), ["-h:1 pod-x", "h:2 pod-y"]);
    let gone = reconciler.handle("k", vec![pod("y", "h:2")]);
    assert!(matches!(gone[..], [Change::Removed(_)]), "{gone:?}");
    let late = reconciler.handle("k", vec![terminating(pod("z", "h:3")), pod("y", "h:2")]);
    assert_eq!(late, [Change::Added(MemberId(3)), Change::Drained(MemberId(3))], "it may have work that came by another gateway");
}

#[test]
fn of_two_pods_at_one_address_that_serves_which_is_not_on_its_way_out() {
    let mut reconciler = over(&["k"]);
    reconciler.handle("k", vec![pod("x", "h:1")]);
    let changes = reconciler.handle("k", vec![terminating(pod("x", "h:1")), pod("y", "h:1")]);
    assert!(matches!(&changes[..], [Change::Added(_), Change::Removed(old)] if old.identity.as_deref() == Some("x")), "{changes:?}");
    assert_eq!(shown(&reconciler), ["h:1 pod-y"]);
}

#[test]
fn who_is_not_ready_is_no_part_of_the_fleet() {
    let mut reconciler = over(&["k", "l"]);
    assert_eq!(reconciler.handle("k", vec![not_ready(pod("x", "h:1"))]), none());
    reconciler.handle("k", vec![pod("x", "h:1")]);
    let changes = reconciler.handle("k", vec![not_ready(pod("x", "h:1"))]);
    assert!(matches!(changes[..], [Change::Removed(_)]), "{changes:?}");
    reconciler.handle("l", vec![pod("x", "h:1")]);
    assert_eq!(shown(&reconciler), ["h:1 pod-x"], "ready is who is ready for anybody");
}

#[test]
fn configured_engines_are_left_alone() {
    let mut reconciler = over(&["dns"]);
    reconciler.handle("dns", vec![at("h:1"), at("h:2"), pod("x", "h:3"), pod("x", "h:4")]);
    assert_eq!(shown(&reconciler).len(), 3);
    let statics = [("h:1".to_owned(), None), ("h:4".to_owned(), Some("h:2".to_owned()))];
    reconciler.configure([("dns".to_owned(), 100)], statics);
    assert_eq!(shown(&reconciler), ["h:2 h:2~2"], "two are configured, and one of the names is taken");
    reconciler.configure([("dns".to_owned(), 100)], []);
    assert_eq!(shown(&reconciler), ["h:2 h:2~2", "h:1 h:1", "h:3 pod-x"]);
    assert_eq!(reconciler.configure([], []).len(), 3, "a source that is left out takes its engines with it");
}

#[test]
fn names_are_plain_and_unlike() {
    let mut reconciler = over(&["k"]);
    let label = |label: &str, address: &str| Endpoint { label: label.to_owned(), ..at(address) };
    let odd = "a/../b?x=\u{e9}\n";
    reconciler.handle("k", vec![label("a", "h:1"), label("a", "h:2"), label("r7", "h:3"), label(odd, "h:4"), label("", "http://h:5")]);
    assert_eq!(shown(&reconciler), ["h:1 a", "h:2 a~2", "h:3 r7~2", "h:4 a-..-b-x----", "http://h:5 http:--h:5"]);
}

#[test]
fn a_source_has_so_many_engines_and_those_that_are_in_stay_in() {
    let mut reconciler = over(&[]);
    reconciler.configure([("k".to_owned(), 2)], []);
    reconciler.handle("k", vec![at("h:2"), at("h:3"), not_ready(at("h:9"))]);
    assert_eq!(reconciler.refused("k"), 0);
    assert_eq!(reconciler.handle("k", vec![at("h:1"), at("h:2"), at("h:3")]), none());
    assert_eq!((reconciler.refused("k"), reconciler.count("k")), (1, 2));
    reconciler.handle("k", vec![at("h:1"), at("h:3")]);
    assert_eq!((shown(&reconciler), reconciler.refused("k")), (vec!["h:3 h:3".to_owned(), "h:1 h:1".to_owned()], 0));
    reconciler.configure([("k".to_owned(), 1)], []);
    assert_eq!((reconciler.count("k"), reconciler.refused("k")), (1, 1));
}

fn readiness() -> impl Strategy<Value = Readiness> {
    prop_oneof![3 => Just(Readiness::Ready), 1 => Just(Readiness::Terminating), 1 => Just(Readiness::NotReady)]
}

/// Few addresses and few pods, so that they meet in every way.
fn endpoint() -> impl Strategy<Value = Endpoint<u8>> {
    (0..5u8, proptest::option::of(0..4u8), readiness(), 0..2u8, 0..3u8).prop_map(|(address, uid, readiness, options, label)| Endpoint {
        address: format!("h:{address}"),
        identity: uid.map(|uid| format!("u{uid}")),
        label: format!("e{label}"),
        readiness,
        options,
    })
}

/// A source names nobody twice.
fn set() -> impl Strategy<Value = Vec<Endpoint<u8>>> {
    proptest::collection::vec(endpoint(), 0..6).prop_map(|endpoints| {
        let by_key = endpoints.into_iter().map(|endpoint| ((endpoint.address.clone(), endpoint.identity.clone()), endpoint));
        by_key.collect::<BTreeMap<_, _>>().into_values().collect()
    })
}

fn messages() -> impl Strategy<Value = Vec<(usize, Vec<Endpoint<u8>>)>> {
    proptest::collection::vec((0..SOURCES.len(), set()), 1..24)
}

fn configured(statics: &BTreeSet<u8>) -> Reconciler<u8> {
    let mut reconciler = Reconciler::default();
    let statics = statics.iter().map(|address| (format!("h:{address}"), Some(format!("e{address}"))));
    reconciler.configure(SOURCES.map(|source| (source.to_owned(), 100)), statics);
    reconciler
}

fn usable(sets: &BTreeMap<usize, Vec<Endpoint<u8>>>) -> Vec<Endpoint<u8>> {
    sets.values().flatten().filter(|endpoint| endpoint.readiness != Readiness::NotReady).cloned().collect()
}

/// What the order of messages must not change.
fn outcome(reconciler: &Reconciler<u8>) -> BTreeSet<(String, String, bool, u8)> {
    reconciler.members().map(|member| (member.address.clone(), member.source.clone(), member.draining, member.options)).collect()
}

proptest! {
    /// The fleet is the union of the last sets and the configured engines: all that is named is there, nothing else is, and nothing twice.
    #[test]
    fn the_fleet_is_the_union_of_the_last_sets(messages in messages(), statics in proptest::collection::btree_set(0..5u8, 0..3)) {
        let mut reconciler = configured(&statics);
        let mut sets = BTreeMap::new();
        for (source, set) in messages {
            reconciler.handle(SOURCES[source], set.clone());
            sets.insert(source, set);
            let named = usable(&sets);
            let is_static = |address: &str| statics.iter().any(|own| address == format!("h:{own}"));
            let static_pods: BTreeSet<&String> =
                named.iter().filter(|endpoint| is_static(&endpoint.address)).filter_map(|endpoint| endpoint.identity.as_ref()).collect();
            for endpoint in &named {
                let is_here = |member: &Member<u8>| {
                    member.address == endpoint.address || (endpoint.identity.is_some() && member.identity == endpoint.identity)
                };
                let by_statics = is_static(&endpoint.address) || endpoint.identity.as_ref().is_some_and(|uid| static_pods.contains(uid));
                prop_assert!(by_statics || reconciler.members().any(is_here), "{endpoint:?} is missing in {:?}", shown(&reconciler));
            }
            let mut addresses = BTreeSet::new();
            let mut names = BTreeSet::new();
            let mut identities = BTreeSet::new();
            for member in reconciler.members() {
                prop_assert!(named.iter().any(|endpoint| endpoint.address == member.address), "nobody names {member:?}");
                prop_assert!(!is_static(&member.address) && addresses.insert(&member.address), "twice {member:?}");
                prop_assert!(member.identity.is_none() || identities.insert(&member.identity), "twice {member:?}");
                prop_assert!(!statics.iter().any(|own| member.name == format!("e{own}")) && names.insert(&member.name), "{member:?}");
            }
        }
    }

    /// Only the last set of each source counts, not what came before, in which order they came or how often.
    #[test]
    fn order_and_repetition_change_nothing(messages in messages(), statics in proptest::collection::btree_set(0..5u8, 0..3), turned in any::<bool>()) {
        let mut reconciler = configured(&statics);
        let mut sets = BTreeMap::new();
        for (source, set) in messages {
            reconciler.handle(SOURCES[source], set.clone());
            prop_assert_eq!(reconciler.handle(SOURCES[source], set.iter().rev().cloned().collect()), none());
            sets.insert(source, set);
        }
        let mut other = configured(&statics);
        let mut last: Vec<_> = sets.into_iter().collect();
        if turned {
            last.reverse();
        }
        for (source, set) in last {
            other.handle(SOURCES[source], set);
        }
        prop_assert_eq!(outcome(&reconciler), outcome(&other));
    }

    /// Who is named without a break keeps its id and its name; another pod never gets them; ids are never used again. The changes say the whole
    /// difference.
    #[test]
    fn ids_are_of_engines_and_changes_tell_all(messages in messages()) {
        let mut reconciler = configured(&BTreeSet::new());
        let mut seen = BTreeSet::new();
        let mut sets = BTreeMap::new();
        for (source, set) in messages {
            let before: Vec<Member<u8>> = reconciler.members().cloned().collect();
            let changes = reconciler.handle(SOURCES[source], set.clone());
            sets.insert(source, set);
            let after: Vec<Member<u8>> = reconciler.members().cloned().collect();
            let added: BTreeSet<MemberId> = changes.iter().filter_map(added).collect();
            let removed: BTreeSet<MemberId> = changes.iter().filter_map(removed).collect();
            let ids = |members: &[Member<u8>]| members.iter().map(|member| member.id).collect::<BTreeSet<_>>();
            prop_assert_eq!(&(&ids(&before) - &removed) | &added, ids(&after));
            prop_assert!(added.iter().all(|id| seen.insert(*id)), "an id is used again");
            for old in &before {
                let same = after.iter().find(|member| member.id == old.id);
                if let Some(same) = same {
                    prop_assert_eq!(&same.name, &old.name);
                    prop_assert!(old.identity.is_none() || same.identity == old.identity, "another pod under an id");
                    let told = |change: &Change<u8>| change == &Change::Altered(old.id);
                    let differs = same.address != old.address || same.options != old.options || same.source != old.source;
                    prop_assert_eq!(differs, changes.iter().any(told));
                    let turned = if same.draining { Change::Drained(old.id) } else { Change::Undrained(old.id) };
                    prop_assert_eq!(same.draining != old.draining, changes.contains(&turned));
                }
                let by_uid = after.iter().find(|member| old.identity.is_some() && member.identity == old.identity);
                prop_assert!(by_uid.is_none_or(|member| member.id == old.id), "a pod under another id");
                let others_claim = usable(&sets).iter().any(|endpoint| endpoint.address == old.address && endpoint.identity.is_some());
                let named = usable(&sets).iter().any(|endpoint| endpoint.address == old.address);
                prop_assert!(!named || others_claim || same.is_some(), "removed while it is named: {old:?}");
            }
        }
    }

    /// However much a source says, no more than its bound comes in.
    #[test]
    fn no_source_exceeds_its_bound(messages in messages(), max in 0..3usize) {
        let mut reconciler = Reconciler::default();
        reconciler.configure(SOURCES.map(|source| (source.to_owned(), max)), []);
        for (source, set) in messages {
            let usable = set.iter().filter(|endpoint| endpoint.readiness != Readiness::NotReady).count();
            reconciler.handle(SOURCES[source], set);
            prop_assert_eq!(reconciler.refused(SOURCES[source]), usable.saturating_sub(max));
            prop_assert!(SOURCES.iter().all(|source| reconciler.count(source) <= max));
        }
    }
}
