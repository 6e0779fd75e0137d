//! Which engines there are, as sources outside of the configuration say: a name in DNS, a file, a Kubernetes service.
//!
//! A source watches one place and tells, each time that it changes, the whole set of [`Endpoint`]s that it finds there. The
//! [`Reconciler`] keeps the last set of each source and says what follows for the fleet: which engine comes, which is drained, which
//! goes. It does no IO and reads no clock.
//!
//! Nothing here connects to an engine or knows how one is asked for its health: that a source names an endpoint says where it is, not
//! that it serves.

mod dns;
mod file;
mod kubernetes;
mod reconcile;

use std::{io, path::PathBuf};

pub use dns::Dns;
pub use file::File;
pub use kubernetes::{Access, Kubernetes, Named, Pace, Port};
pub use reconcile::{Change, Endpoint, Member, MemberId, Readiness, Reconciler};

/// What a source says: all that it finds, or why it could not look. In the latter case nothing is known to have changed.
pub type Answer<T> = Result<Vec<Endpoint<T>>, SourceError>;

/// Why a source has no answer.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    #[error("{host} cannot be resolved: {error}")]
    Unresolved { host: String, error: io::Error },
    /// A resolver that has lost its zone answers like this; a fleet without engines is nobody's wish.
    #[error("{host} has no address")]
    NoAddress { host: String },
    #[error("{} cannot be read: {error}", path.display())]
    Unreadable { path: PathBuf, error: io::Error },
    #[error("{} has more than {max} bytes", path.display())]
    TooLarge { path: PathBuf, max: usize },
    #[error("{} is no list of engines: {why}", path.display())]
    Malformed { path: PathBuf, why: String },
    /// The Kubernetes API refused, broke off or could not be reached.
    #[error("the Kubernetes API: {0}")]
    Kubernetes(String),
    /// Which port an engine listens on must be said where there is a choice.
    #[error("{object} has {count} ports; name one with `port`")]
    Ports { object: String, count: usize },
}
