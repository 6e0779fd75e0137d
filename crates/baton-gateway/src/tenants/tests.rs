use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::{config::ClassConfig, reserved::PRIORITY_MAX};

fn tenant(name: &str, keys: &[&str]) -> TenantConfig {
    TenantConfig { keys: keys.iter().map(|key| KeyHash::of(key.as_bytes())).collect(), ..TenantConfig::new(name) }
}

fn tenants(former: &Tenants, configs: Vec<TenantConfig>) -> Tenants {
    former.replaced_by(&GatewayConfig { tenants: configs, ..GatewayConfig::default() }, Time::ZERO)
}

fn bearer(key: &str) -> HeaderMap {
    HeaderMap::from_iter([(header::AUTHORIZATION, format!("Bearer {key}").parse().unwrap())])
}

fn name_of(tenants: &Tenants, headers: &HeaderMap) -> Option<String> {
    tenants.of(headers).unwrap().map(|tenant| tenant.name.clone())
}

#[test]
fn a_key_names_its_tenant_and_nothing_else_does() {
    let tenants = tenants(&Tenants::default(), vec![tenant("a", &["key-a", "other-a"]), tenant("b", &["key-b"])]);
    assert_eq!(name_of(&tenants, &bearer("other-a")).unwrap(), "a");
    assert_eq!(name_of(&tenants, &HeaderMap::from_iter([("x-api-key".parse().unwrap(), "key-b".parse().unwrap())])).unwrap(), "b");
    for headers in [bearer("key-c"), bearer(&KeyHash::of(b"key-a").to_string()), bearer("")] {
        assert_eq!(tenants.of(&headers).unwrap_err(), Refusal::UnknownKey { given: true });
    }
    assert_eq!(tenants.of(&HeaderMap::new()).unwrap_err(), Refusal::UnknownKey { given: false });
    assert_eq!(tenants.strangers(), 4);
}

#[test]
fn without_tenants_the_gateway_is_open() {
    assert_eq!(name_of(&Tenants::default(), &HeaderMap::new()), None);
}

#[test]
fn a_tenant_that_stays_goes_on_with_what_it_used() {
    let limited = |concurrency| TenantConfig { concurrency: Some(concurrency), ..tenant("a", &["key-a"]) };
    let first = tenants(&Tenants::default(), vec![limited(1)]);
    let running = first.of(&bearer("key-a")).unwrap().unwrap().enter(Clock::new()).unwrap();
    let second = tenants(&first, vec![TenantConfig { keys: vec![KeyHash::of(b"new")], ..limited(1) }]);
    assert!(second.of(&bearer("key-a")).is_err(), "its key is another one");
    let tenant = second.of(&bearer("new")).unwrap().unwrap();
    assert!(matches!(tenant.enter(Clock::new()), Err(Refusal::TenantLimit { limit: Limit::Concurrency, .. })));
    let third = tenants(&second, vec![limited(2)]);
    let tenant = third.of(&bearer("key-a")).unwrap().unwrap();
    drop(tenant.enter(Clock::new()).unwrap());
    drop(running);
    let usage = third.usage().next().unwrap();
    assert_eq!((usage.requests, usage.running, usage.refused), (2, 0, [0, 0, 1]));
}

#[test]
fn what_was_set_aside_and_not_used_is_there_again() {
    let limited = TenantConfig { tokens_per_minute: Some(1), ..tenant("a", &["key-a"]) };
    let tenants = tenants(&Tenants::default(), vec![limited]);
    let (tenant, clock) = (tenants.of(&bearer("key-a")).unwrap().unwrap(), Clock::new());
    // A token comes in a minute: the time that this test takes changes nothing.
    let owed = || match tenant.enter(clock).unwrap().reserve(1) {
        Err(Refusal::TenantLimit { limit: Limit::Tokens, retry_after }) => retry_after.as_secs().div_ceil(60),
        other => panic!("{other:?}"),
    };
    let mut grant = tenant.enter(clock).unwrap();
    grant.reserve(80).unwrap();
    assert_eq!(owed(), 80);
    grant.used(50);
    assert_eq!(owed(), 80, "that much was set aside");
    grant.used(90);
    assert_eq!(owed(), 90);
    grant.end(10, 20);
    assert_eq!(owed(), 30);
    let mut grant = tenant.enter(clock).unwrap();
    grant.used(40);
    assert_eq!(owed(), 70);
    drop(grant);
    assert_eq!(owed(), 30, "of one that came to nothing all goes back");
    let usage = tenants.usage().next().unwrap();
    assert_eq!((usage.prompt_tokens, usage.output_tokens, usage.running), (10, 20, 0));
}

proptest! {
    /// A tenant's requests are never more important than it may be, always of a class that it may use, and as asked for where that is so.
    #[test]
    fn a_priority_is_one_that_the_tenant_may_use(
        starts in prop::collection::btree_set(-900i32..900, 1..5),
        allowed in prop::collection::vec(any::<bool>(), 5),
        most in prop::option::of(-PRIORITY_MAX..PRIORITY_MAX),
        asked in -PRIORITY_MAX..=PRIORITY_MAX,
    ) {
        let class = |(place, from): (usize, &i32)| ClassConfig {
            name: place.to_string(),
            from: if place == 0 { i32::MIN } else { *from },
            start_within: Duration::from_secs(1),
            slo_ttft: None,
        };
        let classes: Vec<ClassConfig> = starts.iter().enumerate().map(class).collect();
        let names: Vec<String> = (0..classes.len()).filter(|place| allowed[*place]).map(|place| place.to_string()).collect();
        let config = TenantConfig { classes: names.clone(), priority_max: most, ..tenant("a", &[]) };
        let terms = Terms { priorities: config.priorities(&classes), salts: None, share: Share { tenant: 0, weight: 1.0 }, padding: None };
        prop_assume!(!terms.priorities.is_empty());
        let may_use = |priority: i32| {
            let class = classes.iter().rposition(|class| class.from <= priority).unwrap_or(0);
            (names.is_empty() || names.contains(&class.to_string())) && most.is_none_or(|most| priority >= most)
        };
        let given = terms.priority(Priority(asked)).0;
        prop_assert!(may_use(given), "{} for {}", given, asked);
        prop_assert_eq!(given == asked, may_use(asked));
    }
}
