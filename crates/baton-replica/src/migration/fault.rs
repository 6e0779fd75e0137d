//! Faults for tests of whole fleets: a replica that kills or stops itself when its first move reaches a point. Nothing happens without
//! [`VARIABLE`] in its environment.

use std::sync::{
    OnceLock,
    atomic::{AtomicBool, Ordering},
};

use rustix::process::{Signal, getpid, kill_process};

use super::MigrationError;

/// Holds `POINT:kill` or `POINT:stop`.
const VARIABLE: &str = "BATON_FAULT";

static FAULT: OnceLock<Fault> = OnceLock::new();

/// A point of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Point {
    /// The source begins to copy.
    SourceCopying,
    /// The request stands still; its state is not on its way.
    SourceFrozen,
    /// `COMMIT_TARGET` is on its way.
    SourceAsked,
    /// The target has made room.
    TargetPreparing,
    /// `PREPARED` is on its way.
    TargetPrepared,
    /// `START` was heard; no output is on its way.
    TargetOwning,
    /// The first block of a copied prefix is on its way.
    PrefixCopying,
}

#[derive(Debug)]
struct Fault {
    point: Point,
    signal: Signal,
    happened: AtomicBool,
}

/// Takes in what the environment orders.
pub(super) fn arm() -> Result<(), MigrationError> {
    let Some(ordered) = std::env::var_os(VARIABLE) else { return Ok(()) };
    let fault = ordered.to_str().and_then(Fault::parse).ok_or_else(|| MigrationError::Fault(ordered.to_string_lossy().into_owned()))?;
    tracing::warn!(?fault, "this replica will fail on purpose, as {VARIABLE} wants");
    FAULT.get_or_init(|| fault);
    Ok(())
}

/// Comes back after a stop, once the process is continued.
pub(super) fn reached(point: Point) {
    if let Some(fault) = FAULT.get().filter(|fault| fault.point == point)
        && !fault.happened.swap(true, Ordering::Relaxed)
    {
        kill_process(getpid(), fault.signal).expect("a process may signal itself");
    }
}

impl Fault {
    fn parse(text: &str) -> Option<Self> {
        let (point, signal) = text.split_once(':')?;
        let point = match point {
            "source-copying" => Point::SourceCopying,
            "source-frozen" => Point::SourceFrozen,
            "source-asked" => Point::SourceAsked,
            "target-preparing" => Point::TargetPreparing,
            "target-prepared" => Point::TargetPrepared,
            "target-owning" => Point::TargetOwning,
            "prefix-copying" => Point::PrefixCopying,
            _ => return None,
        };
        let signal = match signal {
            "kill" => Signal::KILL,
            "stop" => Signal::STOP,
            _ => return None,
        };
        Some(Self { point, signal, happened: AtomicBool::new(false) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_a_point_and_a_signal() {
        let parsed = |text| Fault::parse(text).map(|fault| (fault.point, fault.signal));
        assert_eq!(parsed("source-asked:kill"), Some((Point::SourceAsked, Signal::KILL)));
        assert_eq!(parsed("target-owning:stop"), Some((Point::TargetOwning, Signal::STOP)));
        for bad in ["", "source-asked", "source-asked:term", "asked:kill"] {
            assert_eq!(parsed(bad), None, "{bad}");
        }
    }
}
