//! What a client wants of its request's times, by headers.

use std::{ops::RangeInclusive, time::Duration};

use baton_policy::Slo;
use baton_units::DurationMs;
use baton_wire::openai::ErrorBody;
use http::HeaderMap;

use crate::refusal::Refusal;

/// To the first token. Nothing is computed and sent in less than a millisecond, and nobody waits for an hour.
const TTFT: (&str, RangeInclusive<f64>) = ("x-slo-ttft-ms", 1.0..=3_600_000.0);
/// Between tokens.
const TPOT: (&str, RangeInclusive<f64>) = ("x-slo-tpot-ms", 0.1..=60_000.0);

/// Reads `x-slo-ttft-ms` and `x-slo-tpot-ms`; the error is what the client gets.
pub(crate) fn asked(headers: &HeaderMap) -> Result<Slo, Refusal> {
    Ok(Slo { ttft: read(headers, &TTFT)?, tpot: read(headers, &TPOT)? })
}

fn read(headers: &HeaderMap, (name, bounds): &(&'static str, RangeInclusive<f64>)) -> Result<Option<Duration>, Refusal> {
    let Some(value) = headers.get(*name) else { return Ok(None) };
    let ms = value.to_str().ok().and_then(|text| text.trim().parse::<f64>().ok()).filter(|ms| bounds.contains(ms));
    let complaint = || {
        let (least, most) = (bounds.start(), bounds.end());
        let message = format!("{name} must be a number of milliseconds from {least} to {most}, got {value:?}");
        Refusal::Body(ErrorBody::new(400, "BadRequestError", Some(*name), message))
    };
    ms.map(|ms| Some(Duration::from_ms(ms))).ok_or_else(complaint)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(headers: &[(&'static str, &str)]) -> Result<Slo, String> {
        let headers = headers.iter().map(|(name, value)| (http::HeaderName::from_static(name), value.parse().unwrap())).collect();
        asked(&headers).map_err(|refusal| {
            let Refusal::Body(error) = refusal else { panic!("{refusal:?}") };
            error.message
        })
    }

    #[test]
    fn times_are_milliseconds_within_bounds() {
        let slo = of(&[("x-slo-ttft-ms", "250"), ("x-slo-tpot-ms", " 12.5 ")]).unwrap();
        assert_eq!(slo, Slo { ttft: Some(Duration::from_millis(250)), tpot: Some(Duration::from_micros(12_500)) });
        assert_eq!(of(&[]), Ok(Slo::default()));
        for value in ["", "0", "-5", "4000000", "soon", "NaN", "inf"] {
            let message = of(&[("x-slo-ttft-ms", value)]).unwrap_err();
            assert_eq!(message, format!("x-slo-ttft-ms must be a number of milliseconds from 1 to 3600000, got {value:?}"));
        }
        assert!(of(&[("x-slo-tpot-ms", "0.01")]).unwrap_err().contains("from 0.1 to 60000"));
    }
}
