//! Another configuration while the gateway serves.

use super::{FrontConfig, GatewayConfig, PolicyConfig};

/// What a new configuration changed; all else of it is in force from the next request on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reloaded {
    /// Engines that are new, or whose configuration is.
    pub engines_started: usize,
    /// Engines that are not there any more.
    pub engines_gone: usize,
    /// Options with another value that take effect with the next start only: sockets are open and memory is laid out.
    pub at_next_start: Vec<&'static str>,
}

impl GatewayConfig {
    /// The new configuration as far as a running gateway can take it, and the options whose change has to wait.
    pub(crate) fn replaced_by(&self, new: &Self) -> (Self, Vec<&'static str>) {
        let (old_front, old_policy) = (&self.gateway, &self.policy);
        let kept = Self {
            gateway: FrontConfig {
                bind: old_front.bind,
                connect_timeout: old_front.connect_timeout,
                idle_connections: old_front.idle_connections,
                text_cache_bytes: old_front.text_cache_bytes,
                admin_bind: old_front.admin_bind,
                fleet_key_file: old_front.fleet_key_file.clone(),
                ..new.gateway.clone()
            },
            policy: PolicyConfig {
                seed: old_policy.seed,
                decisions: old_policy.decisions,
                index_bytes: old_policy.index_bytes,
                index_snapshot: old_policy.index_snapshot.clone(),
                quiet_from: old_policy.quiet_from,
                ..new.policy.clone()
            },
            ..new.clone()
        };
        let (front, policy) = (&new.gateway, &new.policy);
        let waits = [
            ("gateway.bind", front.bind != old_front.bind),
            ("gateway.connect_timeout", front.connect_timeout != old_front.connect_timeout),
            ("gateway.idle_connections", front.idle_connections != old_front.idle_connections),
            ("gateway.text_cache_bytes", front.text_cache_bytes != old_front.text_cache_bytes),
            ("gateway.admin_bind", front.admin_bind != old_front.admin_bind),
            ("gateway.fleet_key_file", front.fleet_key_file != old_front.fleet_key_file),
            ("policy.seed", policy.seed != old_policy.seed),
            ("policy.decisions", policy.decisions != old_policy.decisions),
            ("policy.index_bytes", policy.index_bytes != old_policy.index_bytes),
            ("policy.index_snapshot", policy.index_snapshot != old_policy.index_snapshot),
            ("policy.quiet_from", policy.quiet_from != old_policy.quiet_from),
        ];
        (kept, waits.into_iter().filter_map(|(option, changed)| changed.then_some(option)).collect())
    }
}
