//! TLS on both sides: towards clients with a certificate of the gateway's own, towards engines with authorities that vouch for theirs.
//! By rustls, and ring's arithmetic.

use std::{
    fmt, io,
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use hyper_util::client::legacy::connect::{Connected, Connection};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::{
    TlsConnector,
    client::TlsStream,
    rustls::{
        self, ClientConfig, RootCertStore, ServerConfig,
        crypto::{CryptoProvider, ring},
        pki_types::{
            CertificateDer, PrivateKeyDer, ServerName,
            pem::{self, PemObject},
        },
    },
};

use crate::config::TlsConfig;

/// Why a file of a certificate or key is of no use. It tells nothing of what is in the file.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{} gives no certificate: {error}; it is to be a PEM file with the certificate first, then those that vouch for it", .path.display())]
    Certificate { path: PathBuf, error: pem::Error },
    #[error("{} gives no private key: {error}; it is to be a PEM file with the key of the certificate", .path.display())]
    Key { path: PathBuf, error: pem::Error },
    #[error("certificate and key do not go together: {0}; make them anew")]
    Pair(rustls::Error),
    #[error("{} holds a certificate that can vouch for nobody: {error}", .path.display())]
    Authority { path: PathBuf, error: rustls::Error },
}

/// Who may vouch for an engine's certificate. In the file of the configuration it is the path of a PEM file, which is read with it: so one
/// that has changed makes the engine another one.
#[derive(Clone)]
pub struct Authorities {
    path: PathBuf,
    certificates: Vec<CertificateDer<'static>>,
    roots: Arc<RootCertStore>,
}

impl Authorities {
    /// Reads them from a PEM file.
    pub fn read(path: impl Into<PathBuf>) -> Result<Self, TlsError> {
        let path = path.into();
        let certificates = certificates(&path)?;
        let mut roots = RootCertStore::empty();
        for certificate in &certificates {
            roots.add(certificate.clone()).map_err(|error| TlsError::Authority { path: path.clone(), error })?;
        }
        Ok(Self { path, certificates, roots: Arc::new(roots) })
    }
}

impl PartialEq for Authorities {
    fn eq(&self, other: &Self) -> bool {
        self.path == other.path && self.certificates == other.certificates
    }
}

impl Eq for Authorities {}

impl fmt::Debug for Authorities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.path.fmt(f)
    }
}

impl Serialize for Authorities {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.path.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Authorities {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::read(PathBuf::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

/// How clients are served; read anew each time, since certificates are renewed in place.
pub(crate) fn server(config: &TlsConfig) -> Result<Arc<ServerConfig>, TlsError> {
    let chain = certificates(&config.cert)?;
    let key = PrivateKeyDer::from_pem_file(&config.key).map_err(|error| TlsError::Key { path: config.key.clone(), error })?;
    let builder = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions().expect("ring speaks them");
    let mut server = builder.with_no_client_auth().with_single_cert(chain, key).map_err(TlsError::Pair)?;
    server.alpn_protocols = vec![HTTP_1_1.to_vec()];
    Ok(Arc::new(server))
}

/// How an engine is spoken to whose certificate these vouch for; without any, those that browsers trust (Mozilla's list).
pub(crate) fn client(authorities: Option<&Authorities>) -> Arc<ClientConfig> {
    let public = || Arc::new(RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() });
    let roots = authorities.map_or_else(public, |authorities| authorities.roots.clone());
    let builder = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions().expect("ring speaks them");
    let mut client = builder.with_root_certificates(roots).with_no_client_auth();
    client.alpn_protocols = vec![HTTP_1_1.to_vec()];
    Arc::new(client)
}

/// The name that a host's certificate must have; `None` for one that no certificate can.
pub(crate) fn server_name(host: &str) -> Option<ServerName<'static>> {
    // An IPv6 address has brackets in a URL and none in a certificate.
    ServerName::try_from(host.trim_start_matches('[').trim_end_matches(']').to_owned()).ok()
}

/// Bytes to and from an engine.
pub(crate) enum Transport {
    Clear(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Transport {
    /// Shakes hands with the engine of that name.
    pub(crate) async fn tls(stream: TcpStream, name: ServerName<'static>, client: Arc<ClientConfig>) -> io::Result<Self> {
        Ok(Self::Tls(Box::new(TlsConnector::from(client).connect(name, stream).await?)))
    }
}

impl From<TcpStream> for Transport {
    fn from(stream: TcpStream) -> Self {
        Self::Clear(stream)
    }
}

impl AsyncRead for Transport {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Clear(stream) => Pin::new(stream).poll_read(context, buffer),
            Self::Tls(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Transport {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Clear(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Tls(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_write_vectored(self: Pin<&mut Self>, context: &mut Context<'_>, slices: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Clear(stream) => Pin::new(stream).poll_write_vectored(context, slices),
            Self::Tls(stream) => Pin::new(stream).poll_write_vectored(context, slices),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Clear(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Clear(stream) => Pin::new(stream).poll_flush(context),
            Self::Tls(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Clear(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

/// For the client of what is rare.
impl Connection for Transport {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

/// As ALPN names it.
const HTTP_1_1: &[u8] = b"http/1.1";

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// At least one.
fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let read = || {
        let found = CertificateDer::pem_file_iter(path)?.collect::<Result<Vec<_>, _>>()?;
        if found.is_empty() { Err(pem::Error::NoItemsFound) } else { Ok(found) }
    };
    read().map_err(|error| TlsError::Certificate { path: path.to_owned(), error })
}
