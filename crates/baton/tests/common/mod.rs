//! A running `baton`, and HTTP and processes as a test sees them.

#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, reason = "helpers of tests panic like tests")]

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    os::fd::{FromRawFd, OwnedFd},
    process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio},
    time::{Duration, Instant},
};

use serde_json::Value;

/// Far beyond what anything here takes; only a hang reaches it.
pub(crate) const PATIENCE: Duration = Duration::from_mins(2);

pub(crate) fn baton() -> Command {
    Command::new(env!("CARGO_BIN_EXE_baton"))
}

/// Runs to the end.
pub(crate) fn run(args: &[&str]) -> Output {
    baton().args(args).stdin(Stdio::null()).output().unwrap()
}

/// A server that has said where it listens; killed when dropped.
pub(crate) struct Server {
    pub(crate) child: Child,
    pub(crate) url: String,
    /// Kept open, so that the server can go on writing.
    _stdout: BufReader<ChildStdout>,
}

impl Server {
    pub(crate) fn start(args: &[&str]) -> Self {
        let mut command = baton();
        command.args(args);
        Self::spawn(&mut command)
    }

    /// Starts this command; gives the server, and what it has written to stderr once it is killed by the second part.
    pub(crate) fn start_command(mut command: Command) -> (Self, impl FnOnce() -> String) {
        let mut server = Self::spawn(command.stderr(Stdio::piped()));
        let mut stderr = server.child.stderr.take().unwrap();
        let pid = server.pid();
        let read = move || {
            signal(pid, libc::SIGKILL);
            let mut text = String::new();
            stderr.read_to_string(&mut text).unwrap();
            text
        };
        (server, read)
    }

    pub(crate) fn spawn(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let Some(url) = line.trim().strip_prefix("listening on ") else { panic!("{command:?} said {line:?} and {:?}", child.wait()) };
        Self { url: url.to_owned(), child, _stdout: stdout }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the end, with a bound.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        Handle::of(self.pid()).wait_for_end();
        self.child.wait().unwrap()
    }

    pub(crate) fn get(&self, path: &str) -> (u16, String) {
        http(&self.url, "GET", path, "")
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> (u16, String) {
        http(&self.url, "POST", path, &body.to_string())
    }

    /// The admin API's replicas.
    pub(crate) fn replicas(&self) -> Vec<Value> {
        let (status, body) = self.get("/baton/v1/fleet");
        assert_eq!(status, 200, "{body}");
        serde_json::from_str::<Value>(&body).unwrap()["replicas"].as_array().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One request on a connection of its own; the whole answer, chunk framing removed.
pub(crate) fn http(url: &str, method: &str, path: &str, body: &str) -> (u16, String) {
    http_as(url, "", method, path, body)
}

/// With more headers, each with its line end.
pub(crate) fn http_as(url: &str, headers: &str, method: &str, path: &str, body: &str) -> (u16, String) {
    let host = url.strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(host).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-type: application/json\r\n{headers}content-length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body.as_bytes()).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    (status, if chunked { unchunk(body) } else { body.to_owned() })
}

fn unchunk(mut text: &str) -> String {
    let mut body = String::new();
    while let Some((size, rest)) = text.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        body.push_str(&rest[..size]);
        text = rest[size..].strip_prefix("\r\n").unwrap();
    }
    body
}

/// Repeats until it gives something; the check itself is what takes time.
pub(crate) fn until<T>(what: &str, mut check: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = check() {
            return found;
        }
        assert!(begun.elapsed() < PATIENCE, "no {what} in {PATIENCE:?}");
        std::thread::yield_now();
    }
}

/// Processes whose parent is `pid`.
pub(crate) fn children(pid: u32) -> Vec<u32> {
    let pids = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|child| {
        let stat = fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
        // The name in parentheses may hold spaces; state and parent follow it.
        stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse::<u32>().ok()) == Some(pid)
    })
    .collect()
}

/// The process's command line.
pub(crate) fn command_line(pid: u32) -> Vec<String> {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    bytes.split(|&byte| byte == 0).map(|arg| String::from_utf8_lossy(arg).into_owned()).collect()
}

pub(crate) fn signal(pid: u32, signal: i32) {
    // SAFETY: takes its arguments by value; the pid is of a process that this test started.
    assert_eq!(unsafe { libc::kill(pid.cast_signed(), signal) }, 0);
}

/// Sleeps until the child stands still.
pub(crate) fn wait_for_stop(child: u32) {
    // SAFETY: a `siginfo_t` is plain numbers, and is written to only here.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is valid for the call; `WNOWAIT` leaves the child's end to who waits for that.
    let waited = unsafe { libc::waitid(libc::P_PID, child, &raw mut info, libc::WSTOPPED | libc::WNOWAIT) };
    assert_eq!(waited, 0, "process {child}: {}", std::io::Error::last_os_error());
}

/// A process, whatever becomes of its pid.
pub(crate) struct Handle(OwnedFd);

impl Handle {
    pub(crate) fn of(pid: u32) -> Self {
        // SAFETY: takes its arguments by value and gives a new descriptor or an error.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, libc::c_long::from(pid), 0) };
        assert!(fd >= 0, "process {pid}: {}", std::io::Error::last_os_error());
        // SAFETY: the descriptor is open and nobody else has it.
        Self(unsafe { OwnedFd::from_raw_fd(i32::try_from(fd).unwrap()) })
    }

    /// Sleeps until the process has ended.
    pub(crate) fn wait_for_end(&self) {
        use std::os::fd::AsRawFd;
        let mut poll = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid pollfd, as the count says.
        let ready = unsafe { libc::poll(&raw mut poll, 1, i32::try_from(PATIENCE.as_millis()).unwrap()) };
        assert_eq!(ready, 1, "the process still runs after {PATIENCE:?}");
    }
}
