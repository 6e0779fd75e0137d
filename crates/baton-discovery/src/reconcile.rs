//! The pure heart: what the sources say last, turned into engines that come, are drained and go.
//!
//! The fleet is a function of the last good set of each source and of the engines that are configured beside them, whatever the order
//! in which the sets came and however often each was said. Only names and [`MemberId`]s remember: who stays keeps both.

use std::collections::{BTreeMap, BTreeSet};

/// Longest name that an engine gets: that of a pod.
const NAME_BYTES_MAX: usize = 253;

/// Where an engine is, as one source says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint<T> {
    /// Its URL. What is at one address is one engine, whoever names it.
    pub address: String,
    /// What it is apart from where: a pod's uid with its port. `None` from a source that knows addresses only.
    pub identity: Option<String>,
    /// What it would like to be called.
    pub label: String,
    pub readiness: Readiness,
    /// What its source says of how to use it.
    pub options: T,
}

/// Whether an endpoint may be used. Of several words on one engine the greatest counts: who is ready anywhere is ready, and who
/// terminates never comes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Readiness {
    /// It is no part of the fleet.
    NotReady,
    Ready,
    /// It finishes what it has and takes nothing new.
    Terminating,
}

/// An engine for as long as a source names it without a break; never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(pub u64);

/// An engine that is in the fleet since a source names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member<T> {
    pub id: MemberId,
    /// Unlike that of any other member and of any configured engine; ASCII letters, digits and `.-_:[]~`, at most 253 bytes (and a
    /// number behind it, where another one had the name before).
    pub name: String,
    /// The source whose word counts, where several name it.
    pub source: String,
    pub address: String,
    pub identity: Option<String>,
    /// It takes no new requests.
    pub draining: bool,
    pub options: T,
}

/// What follows for the fleet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change<T> {
    Added(MemberId),
    /// It has another address, name, source or other options; it is the same engine.
    Altered(MemberId),
    Drained(MemberId),
    /// It was drained, and is not any more.
    Undrained(MemberId),
    /// As it was.
    Removed(Member<T>),
}

/// The last good sets of all sources, and the members that follow from them.
#[derive(Debug)]
pub struct Reconciler<T> {
    statics: Statics,
    /// By label: of two words of equal weight that of the first source counts, wherever it stands in the configuration.
    sources: BTreeMap<String, Source<T>>,
    members: BTreeMap<MemberId, Member<T>>,
    next: u64,
}

/// Engines of the configuration. They are in the fleet whatever a source says of their addresses.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Statics {
    addresses: BTreeSet<String>,
    names: BTreeSet<String>,
}

#[derive(Debug)]
struct Source<T> {
    max: usize,
    /// Those that may be used, at most `max`.
    endpoints: Vec<Endpoint<T>>,
    refused: usize,
}

/// One endpoint's claim to a place in the fleet.
struct Claim<'a, T> {
    source: &'a str,
    endpoint: &'a Endpoint<T>,
    readiness: Readiness,
}

impl<T> Default for Reconciler<T> {
    fn default() -> Self {
        Self { statics: Statics::default(), sources: BTreeMap::new(), members: BTreeMap::new(), next: 0 }
    }
}

impl<T: Clone + PartialEq> Reconciler<T> {
    /// Other sources, each with the most endpoints that are taken from it, and other configured engines by address and name. The sets
    /// of sources that stay are kept, those of the others dropped.
    pub fn configure(
        &mut self,
        sources: impl IntoIterator<Item = (String, usize)>,
        statics: impl IntoIterator<Item = (String, Option<String>)>,
    ) -> Vec<Change<T>> {
        let mut former = std::mem::take(&mut self.sources);
        for (label, max) in sources {
            let (kept, refused_before) = former.remove(&label).map_or((Vec::new(), 0), |source| (source.endpoints, source.refused));
            let (endpoints, refused) = self.bounded(max, kept);
            self.sources.insert(label, Source { max, endpoints, refused: refused_before + refused });
        }
        self.statics = Statics::default();
        for (address, name) in statics {
            self.statics.addresses.insert(address);
            self.statics.names.extend(name);
        }
        self.settle()
    }

    /// A source says all that it finds, nothing of it twice (by address and identity). Of a source that is not configured, or not any more, nothing is taken.
    pub fn handle(&mut self, source: &str, endpoints: Vec<Endpoint<T>>) -> Vec<Change<T>> {
        let Some(max) = self.sources.get(source).map(|source| source.max) else { return Vec::new() };
        let (endpoints, refused) = self.bounded(max, endpoints);
        self.sources.insert(source.to_owned(), Source { max, endpoints, refused });
        self.settle()
    }

    /// In order of their ids.
    pub fn members(&self) -> impl Iterator<Item = &Member<T>> {
        self.members.values()
    }

    pub fn member(&self, id: MemberId) -> Option<&Member<T>> {
        self.members.get(&id)
    }

    /// Endpoints of the source's last set that found no room under its bound.
    pub fn refused(&self, source: &str) -> usize {
        self.sources.get(source).map_or(0, |source| source.refused)
    }

    /// Members in which the source's word counts.
    pub fn count(&self, source: &str) -> usize {
        self.members.values().filter(|member| member.source == source).count()
    }

    /// The endpoints that may be used, as far as there is room, and how many found none.
    fn bounded(&self, max: usize, mut endpoints: Vec<Endpoint<T>>) -> (Vec<Endpoint<T>>, usize) {
        endpoints.retain(|endpoint| endpoint.readiness != Readiness::NotReady);
        let refused = endpoints.len().saturating_sub(max);
        if refused > 0 {
            // Who is in stays in: what there is no room for must not push others out.
            let addresses: BTreeSet<&str> = self.members().map(|member| member.address.as_str()).collect();
            let identities: BTreeSet<&str> = self.members().filter_map(|member| member.identity.as_deref()).collect();
            let is_in = |endpoint: &Endpoint<T>| match &endpoint.identity {
                Some(identity) => identities.contains(identity.as_str()),
                None => addresses.contains(endpoint.address.as_str()),
            };
            endpoints.sort_by_cached_key(|endpoint| (!is_in(endpoint), endpoint.address.clone(), endpoint.identity.clone()));
            endpoints.truncate(max);
        }
        (endpoints, refused)
    }

    /// Makes the members those that the sets ask for.
    fn settle(&mut self) -> Vec<Change<T>> {
        let mut former = std::mem::take(&mut self.members);
        let claims = wanted(&self.sources, &self.statics);
        let known = matched(&claims, &former);
        let mut names = self.statics.names.clone();
        // Who has a name keeps it, so these go first.
        let kept: Vec<Option<String>> = known
            .iter()
            .map(|known| {
                let name = &former.get(known.as_ref()?)?.name;
                names.insert(name.clone()).then(|| name.clone())
            })
            .collect();
        let mut changes = Vec::new();
        for ((claim, known), kept) in claims.iter().zip(known).zip(kept) {
            let before = known.and_then(|id| former.remove(&id));
            let id = before.as_ref().map_or_else(
                || {
                    self.next += 1;
                    MemberId(self.next)
                },
                |member| member.id,
            );
            let after = Member {
                id,
                name: kept.unwrap_or_else(|| free_name(&claim.endpoint.label, &claim.endpoint.address, &mut names)),
                source: claim.source.to_owned(),
                address: claim.endpoint.address.clone(),
                // An engine that a source without identities goes on to name is still the one that it was.
                identity: claim.endpoint.identity.clone().or_else(|| before.as_ref().and_then(|member| member.identity.clone())),
                draining: claim.readiness == Readiness::Terminating,
                options: claim.endpoint.options.clone(),
            };
            changes.extend(changes_between(before.as_ref(), &after));
            self.members.insert(id, after);
        }
        changes.extend(former.into_values().map(Change::Removed));
        changes
    }
}

/// Who is to be in the fleet, at most one for each address and one for each identity, in order of the addresses. Every endpoint that may be used
/// has its address or its identity among them, or among the configured engines.
fn wanted<'a, T>(sources: &'a BTreeMap<String, Source<T>>, statics: &Statics) -> Vec<Claim<'a, T>> {
    let named: Vec<(&str, &Endpoint<T>)> =
        sources.iter().flat_map(|(label, source)| source.endpoints.iter().map(move |endpoint| (label.as_str(), endpoint))).collect();
    let mut readiness: BTreeMap<&str, Readiness> = BTreeMap::new();
    let mut taken: BTreeSet<&str> = BTreeSet::new();
    for (_, endpoint) in &named {
        let Some(identity) = endpoint.identity.as_deref() else { continue };
        let said = readiness.entry(identity).or_insert(endpoint.readiness);
        *said = endpoint.readiness.max(*said);
        if statics.addresses.contains(&endpoint.address) {
            // It is in the fleet already, and under its other addresses too.
            taken.insert(identity);
        }
    }
    let readiness_of = |endpoint: &Endpoint<T>| {
        endpoint.identity.as_deref().and_then(|identity| readiness.get(identity).copied()).unwrap_or(endpoint.readiness)
    };
    let mut claims: Vec<Claim<'a, T>> =
        named.iter().map(|&(source, endpoint)| Claim { source, endpoint, readiness: readiness_of(endpoint) }).collect();
    // Who knows what is at an address knows more than who knows the address alone. Of two at one address that serves which has it: the other
    // one is on its way out and has given it back.
    claims.sort_by_key(|claim| {
        let Endpoint { address, identity, .. } = claim.endpoint;
        (identity.is_none(), claim.readiness == Readiness::Terminating, claim.source, address, identity)
    });
    let mut wanted: BTreeMap<&str, Claim<'a, T>> = BTreeMap::new();
    for claim in claims {
        let address = claim.endpoint.address.as_str();
        let identity = claim.endpoint.identity.as_deref();
        if statics.addresses.contains(address) || wanted.contains_key(address) || identity.is_some_and(|identity| taken.contains(identity))
        {
            continue;
        }
        taken.extend(identity);
        wanted.insert(address, claim);
    }
    wanted.into_values().collect()
}

/// For each claim the member that it is, where it is one already.
fn matched<T>(claims: &[Claim<'_, T>], members: &BTreeMap<MemberId, Member<T>>) -> Vec<Option<MemberId>> {
    let mut by_identity: BTreeMap<&str, MemberId> = BTreeMap::new();
    let mut by_address: BTreeMap<&str, MemberId> = BTreeMap::new();
    for member in members.values() {
        by_identity.extend(member.identity.as_deref().map(|identity| (identity, member.id)));
        by_address.insert(&member.address, member.id);
    }
    let mut found: Vec<Option<MemberId>> =
        claims.iter().map(|claim| claim.endpoint.identity.as_deref().and_then(|identity| by_identity.get(identity).copied())).collect();
    let taken: BTreeSet<MemberId> = found.iter().flatten().copied().collect();
    for (claim, found) in claims.iter().zip(&mut found) {
        if found.is_some() {
            continue;
        }
        let Some(there) = by_address.get(claim.endpoint.address.as_str()).filter(|id| !taken.contains(id)) else { continue };
        // Another identity at an address is another engine. Who knows addresses only goes on with whoever was there, and who had no
        // identity so far has now been told which one it has.
        let nameless = members.get(there).is_some_and(|member| member.identity.is_none());
        if nameless || claim.endpoint.identity.is_none() {
            *found = Some(*there);
        }
    }
    found
}

fn changes_between<T: Clone + PartialEq>(before: Option<&Member<T>>, after: &Member<T>) -> Vec<Change<T>> {
    let Some(before) = before else {
        let drained = after.draining.then_some(Change::Drained(after.id));
        return [Change::Added(after.id)].into_iter().chain(drained).collect();
    };
    let same = Member { draining: after.draining, identity: after.identity.clone(), ..before.clone() } == *after;
    let altered = (!same).then_some(Change::Altered(after.id));
    let turned = match (before.draining, after.draining) {
        (false, true) => Some(Change::Drained(after.id)),
        (true, false) => Some(Change::Undrained(after.id)),
        (true, true) | (false, false) => None,
    };
    altered.into_iter().chain(turned).collect()
}

/// A name that nobody has, as near as possible to the label.
fn free_name(label: &str, address: &str, names: &mut BTreeSet<String>) -> String {
    let wish = if label.is_empty() { address } else { label };
    let plain = |byte: u8| if byte.is_ascii_alphanumeric() || b".-_:[]".contains(&byte) { char::from(byte) } else { '-' };
    let stem: String = wish.bytes().take(NAME_BYTES_MAX).map(plain).collect();
    // `r0`, `r1`, … are what configured engines without a name are called.
    let reserved = stem.strip_prefix('r').is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()));
    let candidates = (1u64..).map(|number| if number == 1 { stem.clone() } else { format!("{stem}~{number}") });
    let free = candidates.skip(usize::from(reserved)).find(|name| !names.contains(name)).expect("there are more numbers than names");
    names.insert(free.clone());
    free
}

#[cfg(test)]
mod tests;
