use std::path::{Path, PathBuf};

use baton_wire::migration::handshake::FleetKey;

/// Why a file gives no fleet key.
#[derive(Debug, thiserror::Error)]
pub enum FleetKeyError {
    #[error("cannot read the fleet key in {path}: {error}")]
    Unreadable { path: PathBuf, error: std::io::Error },
    #[error("the fleet key in {0} is empty")]
    Empty(PathBuf),
}

/// The key is all of the file's bytes but blanks around them, so that an editor's last newline makes no other key. Blocks while it reads.
pub fn read_fleet_key(path: &Path) -> Result<FleetKey, FleetKeyError> {
    let bytes = std::fs::read(path).map_err(|error| FleetKeyError::Unreadable { path: path.to_owned(), error })?;
    match bytes.trim_ascii() {
        [] => Err(FleetKeyError::Empty(path.to_owned())),
        key => Ok(FleetKey::new(key)),
    }
}
