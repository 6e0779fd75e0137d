use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, Result};

const PROXY_CORE: &str = "0";
/// Of this process's core, which the engines share.
const LOAD_CORE: &str = "1";
/// `USER_HZ`, which Linux fixes at 100 on every architecture that this runs on.
const TICKS_PER_S: f64 = 100.0;

/// A process on a core of its own, ended when dropped.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    folder: Option<PathBuf>,
}

impl Process {
    /// Engines on the load's core.
    pub(super) fn engines(port: u16, count: u16) -> Result<Self> {
        let lab = std::env::current_exe()?;
        let mut command = on_core(LOAD_CORE, &lab);
        command.args(["engine", "--port", &port.to_string(), "--count", &count.to_string()]);
        Self::start(command, None)
    }

    /// One worker, kept-alive upstream connections, nothing buffered and nothing logged.
    pub(super) fn nginx(address: &str, port: u16, count: u16) -> Result<Self> {
        let folder = folder("nginx")?;
        let servers = (port..port + count).fold(String::new(), |mut text, port| {
            writeln!(text, "    server 127.0.0.1:{port};").expect("a string takes it");
            text
        });
        let path = folder.display();
        let text = format!(
            "worker_processes 1;\ndaemon off;\nmaster_process off;\npid {path}/pid;\nerror_log {path}/error.log;\n\
             events {{ worker_connections 4096; }}\n\
             http {{\n  access_log off;\n  client_body_temp_path {path}/body;\n  proxy_temp_path {path}/proxy;\n\
             fastcgi_temp_path {path}/f;\n  uwsgi_temp_path {path}/u;\n  scgi_temp_path {path}/s;\n\
             keepalive_requests 100000000;\n  client_body_buffer_size 128k;\n\
             upstream engines {{\n{servers}    keepalive 512;\n    keepalive_requests 100000000;\n  }}\n\
             server {{\n    listen {address};\n    location / {{\n      proxy_pass http://engines;\n      proxy_http_version 1.1;\n\
             proxy_set_header Connection \"\";\n      proxy_buffering off;\n    }}\n  }}\n}}\n"
        );
        let file = folder.join("nginx.conf");
        fs::write(&file, text)?;
        let mut command = on_core(PROXY_CORE, Path::new("nginx"));
        command.arg("-c").arg(&file).arg("-p").arg(&folder);
        Self::start(command, Some(folder))
    }

    /// The gateway with its defaults, in front of engines that pass for vLLM, with the tokenizer of a real model.
    pub(super) fn baton(program: &Path, address: &str, port: u16, count: u16) -> Result<Self> {
        let folder = folder("baton")?;
        let engines = (port..port + count).fold(String::new(), |mut text, port| {
            writeln!(text, "[[engines]]\nurl = \"http://127.0.0.1:{port}\"\nkind = \"vllm\"").expect("a string takes it");
            text
        });
        let file = folder.join("gateway.toml");
        fs::write(&file, format!("[gateway]\nbind = \"{address}\"\n{engines}"))?;
        let mut command = on_core(PROXY_CORE, program);
        command.arg("serve").arg("--config").arg(&file).arg("--tokenizer").arg(baton_testkit::smollm2());
        Self::start(command, Some(folder))
    }

    fn start(mut command: Command, folder: Option<PathBuf>) -> Result<Self> {
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let child = child.with_context(|| format!("{command:?} does not start; taskset and nginx must be installed"))?;
        Ok(Self { child, folder })
    }

    /// utime and stime of all threads, ended ones included.
    pub(super) fn cpu_s(&self) -> Result<f64> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        // Fields 14 and 15; the second field is in parentheses and may have spaces.
        let (_, rest) = stat.rsplit_once(')').context("a stat line")?;
        let ticks: f64 = rest.split_ascii_whitespace().skip(11).take(2).filter_map(|field| field.parse::<f64>().ok()).sum();
        Ok(ticks / TICKS_PER_S)
    }

    pub(super) fn resident_mb(&self) -> Result<f64> {
        resident_mb(self.child.id())
    }
}

/// Resident memory of a process.
pub(crate) fn resident_mb(pid: u32) -> Result<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let kb = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix("kB")?.trim().parse::<f64>().ok());
    Ok(kb.context("a VmRSS line")? / 1024.0)
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself; then there is nothing to end and nothing to tell.
        _ = self.child.kill();
        _ = self.child.wait();
        if let Some(folder) = &self.folder {
            _ = fs::remove_dir_all(folder);
        }
    }
}

/// taskset replaces itself by the program, so the child's id is the program's.
fn on_core(core: &str, program: &Path) -> Command {
    let mut command = Command::new("taskset");
    command.args(["-c", core]).arg(program);
    command
}

fn folder(name: &str) -> Result<PathBuf> {
    let folder = std::env::temp_dir().join(format!("baton-lab-{}-{name}", std::process::id()));
    fs::create_dir_all(&folder)?;
    Ok(folder)
}
