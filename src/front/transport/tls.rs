//! TLS of a port, with or without certificates of clients.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};
use tokio_rustls::server::TlsStream;
use tokio_rustls::{TlsAcceptor, rustls};

/// Files in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tls {
    /// The prefix of the port's flags, such as `http` in `--http-server-cert`.
    pub port: &'static str,
    /// The server's certificate and the intermediate certificates.
    pub certificate: PathBuf,
    /// The private key of the certificate.
    pub key: PathBuf,
    /// Root certificates for client certificates; `None` requires no client certificate.
    pub client_roots: Option<PathBuf>,
}

/// Why TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Fields are named by their messages.
pub enum TlsError {
    #[error("--{flag}: cannot read {what} from {}: {reason}", .path.display())]
    Read { flag: String, what: &'static str, path: PathBuf, reason: String },
    #[error(
        "--{port}-server-cert, --{port}-server-key: the certificate in {} and the key in {} cannot serve: {reason}",
        .certificate.display(), .key.display()
    )]
    Pair { port: &'static str, certificate: PathBuf, key: PathBuf, reason: String },
    #[error("--{port}-root-cert: client certificates cannot be checked against {}: {reason}", .path.display())]
    Roots { port: &'static str, path: PathBuf, reason: String },
}

impl Tls {
    /// Reads the files; `protocol` is the ALPN name.
    ///
    /// # Errors
    /// When a file cannot be read or has invalid content.
    pub(crate) fn acceptor(&self, protocol: &[u8]) -> Result<TlsAcceptor, TlsError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let certificates = certificates(&self.certificate, self.flag("server-cert"), "a certificate")?;
        let key = PrivateKeyDer::from_pem_file(&self.key).map_err(|error| TlsError::Read {
            flag: self.flag("server-key"),
            what: "a private key",
            path: self.key.clone(),
            reason: error.to_string(),
        })?;
        let pair = |error: rustls::Error| TlsError::Pair {
            port: self.port,
            certificate: self.certificate.clone(),
            key: self.key.clone(),
            reason: error.to_string(),
        };
        let builder = ServerConfig::builder_with_provider(provider.clone());
        let builder = builder.with_safe_default_protocol_versions().map_err(pair)?;
        let builder = match &self.client_roots {
            None => builder.with_no_client_auth(),
            Some(path) => builder.with_client_cert_verifier(self.verifier(path, provider)?),
        };
        let mut config = builder.with_single_cert(certificates, key).map_err(pair)?;
        config.alpn_protocols = vec![protocol.to_vec()];
        Ok(TlsAcceptor::from(Arc::new(config)))
    }

    fn flag(&self, name: &str) -> String {
        format!("{}-{name}", self.port)
    }

    fn verifier(
        &self,
        path: &Path,
        provider: Arc<rustls::crypto::CryptoProvider>,
    ) -> Result<Arc<dyn rustls::server::danger::ClientCertVerifier>, TlsError> {
        let failed = |reason: String| TlsError::Roots { port: self.port, path: path.to_owned(), reason };
        let mut roots = RootCertStore::empty();
        for certificate in certificates(path, self.flag("root-cert"), "root certificates")? {
            roots.add(certificate).map_err(|error| failed(error.to_string()))?;
        }
        let built = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
        built.map_err(|error| failed(error.to_string()))
    }
}

fn certificates(path: &Path, flag: String, what: &'static str) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let unreadable = |reason: String| TlsError::Read { flag: flag.clone(), what, path: path.to_owned(), reason };
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let certificates = read.map_err(|error| unreadable(error.to_string()))?;
    if certificates.is_empty() {
        return Err(unreadable("it holds no PEM section CERTIFICATE".to_owned()));
    }
    Ok(certificates)
}

/// The connection of a client: TCP with or without TLS, or through the relay.
pub enum Socket {
    /// Without TLS.
    Plain(TcpStream),
    /// Within TLS.
    Tls(Box<TlsStream<TcpStream>>),
    /// From the relay, which has the client's own connection.
    Relayed(UnixStream),
}

/// A connection that was accepted.
pub enum Accepted {
    /// From a client.
    Tcp(TcpStream),
    /// From the relay.
    Relayed(UnixStream),
}

impl Socket {
    /// Performs the TLS handshake if there is an acceptor. The caller sets the timeout.
    ///
    /// # Errors
    /// When the handshake fails.
    pub async fn accept(stream: Accepted, acceptor: Option<&TlsAcceptor>) -> io::Result<Self> {
        match (stream, acceptor) {
            (Accepted::Relayed(stream), _) => Ok(Socket::Relayed(stream)),
            (Accepted::Tcp(stream), None) => Ok(Socket::Plain(stream)),
            (Accepted::Tcp(stream), Some(acceptor)) => Ok(Socket::Tls(Box::new(acceptor.accept(stream).await?))),
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Socket::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            Socket::Tls(stream) => Pin::new(stream).poll_read(context, buffer),
            Socket::Relayed(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Socket::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Socket::Tls(stream) => Pin::new(stream).poll_write(context, bytes),
            Socket::Relayed(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Socket::Plain(stream) => Pin::new(stream).poll_flush(context),
            Socket::Tls(stream) => Pin::new(stream).poll_flush(context),
            Socket::Relayed(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Socket::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Socket::Tls(stream) => Pin::new(stream).poll_shutdown(context),
            Socket::Relayed(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Socket::Plain(stream) => Pin::new(stream).poll_write_vectored(context, pieces),
            Socket::Tls(stream) => Pin::new(stream).poll_write_vectored(context, pieces),
            Socket::Relayed(stream) => Pin::new(stream).poll_write_vectored(context, pieces),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Socket::Plain(stream) => stream.is_write_vectored(),
            Socket::Tls(stream) => stream.is_write_vectored(),
            Socket::Relayed(stream) => stream.is_write_vectored(),
        }
    }
}
