//! Who a request belongs to, from headers and body. Everything here is a claim of the client: it steers affinity and order among
//! requests, and opens nothing.

use baton_units::Priority;
use http::HeaderMap;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::{body::JsonBody, reserved::PRIORITY_MAX};

/// Longest `x-request-id` that is echoed; a longer one is replaced.
const REQUEST_ID_BYTES_MAX: usize = 256;

/// What a client says of a request's context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Identity {
    /// Requests that share a growing prefix: `x-session-id`, else the body's `prompt_cache_key`, else its `user`.
    pub(crate) session: Option<u64>,
    /// Requests of one program (an agent's task): `x-program-id`.
    pub(crate) program: Option<u64>,
    /// The body's `priority`, else `x-priority`; lower is more important.
    pub(crate) priority: Priority,
}

impl Identity {
    pub(crate) fn read(headers: &HeaderMap, body: &JsonBody) -> Self {
        let text = |field| body.read::<String>(field).ok().flatten().filter(|text| !text.is_empty());
        let told = Self::of_headers(headers);
        let session = || text("prompt_cache_key").or_else(|| text("user")).map(|session| xxh3_64(session.as_bytes()));
        let priority = body.read::<i64>("priority").ok().flatten().map_or(told.priority, clamped);
        Self { session: told.session.or_else(session), priority, ..told }
    }

    /// Of a request whose body is not understood.
    pub(crate) fn of_headers(headers: &HeaderMap) -> Self {
        let hash = |name| header(headers, name).map(|value| xxh3_64(value.as_bytes()));
        let priority = header(headers, "x-priority").and_then(|priority| priority.parse().ok()).map_or(Priority(0), clamped);
        Self { session: hash("x-session-id"), program: hash("x-program-id"), priority }
    }

    /// Within a tenant: no client can name the session or program of another one's, and so learn where that runs.
    pub(crate) fn belong_to(&mut self, tenant: &str) {
        let seed = xxh3_64(tenant.as_bytes());
        for name in [&mut self.session, &mut self.program].into_iter().flatten() {
            *name = xxh3_64_with_seed(&name.to_le_bytes(), seed);
        }
    }
}

fn clamped(priority: i64) -> Priority {
    let bound = i64::from(PRIORITY_MAX);
    Priority(priority.clamp(-bound, bound) as i32)
}

/// The client's `x-request-id`, where it is fit to be echoed.
pub(crate) fn client_request_id(headers: &HeaderMap) -> Option<&str> {
    header(headers, "x-request-id").filter(|id| id.len() <= REQUEST_ID_BYTES_MAX)
}

fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok().map(str::trim).filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(headers: &[(&'static str, &str)], body: &str) -> Identity {
        let headers = headers.iter().map(|(name, value)| (http::HeaderName::from_static(name), value.parse().unwrap())).collect();
        Identity::read(&headers, &JsonBody::parse(body.to_owned().into(), None).unwrap())
    }

    #[test]
    fn a_session_is_named_by_header_then_cache_key_then_user() {
        let body = r#"{"prompt_cache_key":"k","user":"u"}"#;
        let named = |text: &str| Some(xxh3_64(text.as_bytes()));
        assert_eq!(identity(&[("x-session-id", "s")], body).session, named("s"));
        assert_eq!(identity(&[], body).session, named("k"));
        assert_eq!(identity(&[], r#"{"user":"u"}"#).session, named("u"));
        assert_eq!(identity(&[], r#"{"user":""}"#).session, None);
        assert_eq!(identity(&[("x-program-id", "p")], "{}").program, named("p"));
    }

    #[test]
    fn tenants_do_not_share_sessions() {
        let of = |tenant: &str| {
            let mut identity = identity(&[("x-session-id", "s"), ("x-program-id", "s")], "{}");
            identity.belong_to(tenant);
            (identity.session.unwrap(), identity.program.unwrap())
        };
        assert_eq!(of("a"), of("a"));
        assert!(of("a").0 != of("b").0 && of("a").1 != of("b").1);
    }

    #[test]
    fn a_priority_is_kept_within_bounds() {
        assert_eq!(identity(&[], r#"{"priority":-5}"#).priority, Priority(-5));
        assert_eq!(identity(&[("x-priority", "7")], "{}").priority, Priority(7));
        assert_eq!(identity(&[], r#"{"priority":-99999999999}"#).priority, Priority(-PRIORITY_MAX));
        assert_eq!(identity(&[("x-priority", "high")], "{}").priority, Priority(0));
    }
}
