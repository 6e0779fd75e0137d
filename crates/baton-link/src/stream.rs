use std::io;

use rustix::{net::sockopt::set_socket_send_buffer_size, process::geteuid};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream, tcp, unix};
use tokio_util::either::Either;

pub(crate) type ReadHalf = Either<tcp::OwnedReadHalf, unix::OwnedReadHalf>;
pub(crate) type WriteHalf = Either<tcp::OwnedWriteHalf, unix::OwnedWriteHalf>;

/// Bytes on their way that a Unix socket is asked to hold; the system may hold fewer.
const SEND_BUFFER: usize = 4 << 20;

/// Bytes to and from another process.
#[derive(Debug)]
pub enum Stream {
    Tcp(TcpStream),
    /// Of the same user, on the same host and in the same network namespace.
    Local(UnixStream),
}

/// Where others connect to.
#[derive(Debug)]
pub struct Listener {
    tcp: TcpListener,
    local: Option<UnixListener>,
}

impl From<TcpListener> for Listener {
    fn from(tcp: TcpListener) -> Self {
        Self { tcp, local: None }
    }
}

impl From<TcpStream> for Stream {
    fn from(stream: TcpStream) -> Self {
        Self::Tcp(stream)
    }
}

impl Listener {
    /// Is found over a Unix socket as well, by processes of the same user that dial the same address on this host, which spares them
    /// TCP. Where the system has no such sockets it is found over TCP alone.
    pub fn with_local(tcp: TcpListener) -> io::Result<Self> {
        let address = tcp.local_addr()?;
        let local = local_name(&address.to_string()).and_then(|name| {
            let bound = UnixListener::bind(name);
            bound.inspect_err(|error| tracing::warn!(%address, %error, "others on this host reach it over TCP alone")).ok()
        });
        Ok(Self { tcp, local })
    }

    /// The next one that connects, and from where.
    pub(crate) async fn accept(&self) -> io::Result<(Stream, String)> {
        let local = async {
            match &self.local {
                Some(local) => local.accept().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            accepted = self.tcp.accept() => accepted.map(|(stream, peer)| (Stream::Tcp(stream), peer.to_string())),
            accepted = local => accepted.map(|(stream, _)| (Stream::Local(stream), "this host".to_owned())),
        }
    }
}

impl Stream {
    /// Over a Unix socket where there is one for this address, or else over TCP.
    pub(crate) async fn connect(address: &str) -> io::Result<Self> {
        if let Some(name) = local_name(address)
            && let Ok(stream) = UnixStream::connect(name).await
            && is_ours(&stream)
        {
            return Ok(Self::Local(stream));
        }
        TcpStream::connect(address).await.map(Self::Tcp)
    }

    /// Its two directions.
    pub(crate) fn split(self) -> io::Result<(ReadHalf, WriteHalf)> {
        match self {
            Self::Tcp(stream) => {
                // A token must not wait for the acknowledgement of the one before.
                stream.set_nodelay(true)?;
                let (read, write) = stream.into_split();
                Ok((Either::Left(read), Either::Left(write)))
            }
            Self::Local(stream) => {
                if !is_ours(&stream) {
                    return Err(io::Error::new(
                        io::ErrorKind::PermissionDenied,
                        "a process of another user is not heard over a Unix socket",
                    ));
                }
                // A sender that fills what is held by default, less than one block of KV, stands until the other side has been woken and has read
                // it: neither works while the other does, and a copy takes half as long again.
                let _ = set_socket_send_buffer_size(&stream, SEND_BUFFER);
                let (read, write) = stream.into_split();
                Ok((Either::Right(read), Either::Right(write)))
            }
        }
    }
}

/// Anybody on the host may take a name, or connect to one.
fn is_ours(stream: &UnixStream) -> bool {
    stream.peer_cred().is_ok_and(|peer| peer.uid() == geteuid().as_raw())
}

/// In the abstract namespace, which is one for each network namespace, as addresses are, and forgets a name with its socket (unix(7)).
fn local_name(address: &str) -> Option<String> {
    cfg!(target_os = "linux").then(|| format!("\0baton/{address}"))
}
