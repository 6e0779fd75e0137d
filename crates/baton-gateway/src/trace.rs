//! The trace that a client's request is part of, by W3C Trace Context: the gateway's own part of it is the parent of what engines do.

use http::HeaderMap;

/// Longest `tracestate` that is passed on; the recommendation asks for 512 bytes.
const STATE_BYTES_MAX: usize = 1024;

/// A trace and the gateway's place in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Trace {
    /// 32 hexadecimal digits.
    pub(crate) id: String,
    /// The gateway's part, of 16 digits: the parent of each attempt at an engine.
    pub(crate) span: String,
    flags: String,
    state: Option<String>,
}

impl Trace {
    /// Of the client's `traceparent` and `tracestate`; `None` where it names no trace. None is begun here: nobody would look for it.
    pub(crate) fn read(headers: &HeaderMap) -> Option<Self> {
        let mut parents = headers.get_all("traceparent").iter();
        let (parent, None) = (parents.next()?.to_str().ok()?.trim(), parents.next()) else { return None };
        let mut fields = parent.split('-');
        let (version, id, caller, flags) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
        let is_hex = |text: &str, digits: usize| text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let is_id = |text: &str, digits| is_hex(text, digits) && text.bytes().any(|byte| byte != b'0');
        // Versions to come may have more fields.
        let is_known = is_hex(version, 2) && version != "ff" && (version != "00" || fields.next().is_none());
        if !is_known || !is_id(id, 32) || !is_id(caller, 16) || !is_hex(flags, 2) {
            return None;
        }
        let states: Option<Vec<&str>> = headers.get_all("tracestate").iter().map(|state| state.to_str().ok()).collect();
        let state = states.map(|states| states.join(",")).filter(|state| !state.is_empty() && state.len() <= STATE_BYTES_MAX);
        let span = format!("{:016x}", fastrand::u64(1..));
        Some(Self { id: id.to_owned(), span, flags: flags.to_owned(), state })
    }

    /// Lines of a request's head for an engine.
    pub(crate) fn headers(&self) -> String {
        let Self { id, span, flags, state } = self;
        let state = state.as_ref().map(|state| format!("tracestate: {state}\r\n")).unwrap_or_default();
        format!("traceparent: 00-{id}-{span}-{flags}\r\n{state}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn read(headers: &[(&'static str, &str)]) -> Option<Trace> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, value.parse().unwrap());
        }
        Trace::read(&map)
    }

    #[test]
    fn an_engine_s_parent_is_the_gateway() {
        let trace = read(&[("traceparent", PARENT), ("tracestate", "a=1"), ("tracestate", "b=2")]).unwrap();
        assert_eq!(trace.id, "4bf92f3577b34da6a3ce929d0e0e4736");
        assert!(trace.span.len() == 16 && trace.span != "00f067aa0ba902b7");
        let lines = format!("traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-{}-01\r\ntracestate: a=1,b=2\r\n", trace.span);
        assert_eq!(trace.headers(), lines);
        assert!(!read(&[("traceparent", PARENT)]).unwrap().headers().contains("tracestate"));
        assert_ne!(read(&[("traceparent", PARENT)]).unwrap().span, trace.span);
    }

    #[test]
    fn what_names_no_trace_is_left_out() {
        for parent in [
            "",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-1",
        ] {
            assert_eq!(read(&[("traceparent", parent)]), None, "{parent}");
        }
        assert_eq!(read(&[("tracestate", "a=1")]), None);
        assert_eq!(read(&[("traceparent", PARENT), ("traceparent", PARENT)]), None, "two parents are none");
        assert!(read(&[("traceparent", "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more")]).is_some());
    }
}
