use baton_link::ConnectionError;

/// Why a case is not `ok`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unmet {
    /// The replica does what the protocol forbids, or not what it demands.
    #[error("{0}")]
    Failed(String),
    /// The case says nothing of this replica, as where it has no KV to move or what the case needs was not given.
    #[error("{0}")]
    Skipped(String),
}

/// What a case, or a part of one, came to.
pub type Checked<T = ()> = Result<T, Unmet>;

impl From<ConnectionError> for Unmet {
    fn from(error: ConnectionError) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<std::io::Error> for Unmet {
    fn from(error: std::io::Error) -> Self {
        Self::Failed(format!("the connection broke: {error}"))
    }
}

/// Ends the case as failed.
pub(crate) fn failed<T>(why: impl Into<String>) -> Checked<T> {
    Err(Unmet::Failed(why.into()))
}

/// Ends the case as one that says nothing.
pub(crate) fn skipped<T>(why: impl Into<String>) -> Checked<T> {
    Err(Unmet::Skipped(why.into()))
}

/// Ends the case as failed where a demand of the protocol is not met.
macro_rules! demand {
    ($met:expr, $($why:tt)+) => {
        if !$met {
            return Err($crate::Unmet::Failed(format!($($why)+)));
        }
    };
}
pub(crate) use demand;
