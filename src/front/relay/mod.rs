//! The relay: holds the ports and the connections of clients while rank 0 dies and is started again.
//!
//! ```text
//! clients ── TCP, TLS ──► relay ── Unix sockets ──► rank 0 of the world that serves
//!                           ▲
//!                        launch, which says where rank 0 is
//! ```
//!
//! It forwards each request. When rank 0 dies, it waits for the next one, sends unfinished requests again and leaves out what their
//! clients already have (`events`). Answers repeat because tokens do not depend on what runs beside a request, and because the relay
//! chooses the numbers that a request draws (`api::request_key`).

mod demand;
mod event_id;
mod events;
mod exchange;
mod forwarder;
mod grpc;
mod grpc_upstream;
mod http;
mod idempotency;
mod journal;
mod kept;
mod request;
mod stream_infer;
mod upstream;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tokio_rustls::TlsAcceptor;

pub use self::upstream::{RankZero, RelayedPort};

use self::demand::Demand;
use self::forwarder::Forwarder;
use self::grpc_upstream::GrpcUpstream;
use self::http::HttpForwarder;
use self::idempotency::Idempotency;
use self::kept::KeptBytes;
use self::upstream::Upstream;
use crate::config::{Address, Config};
use crate::running::{acceptor, grpc_keep_alive, grpc_limits, http_limits, serve_http1};
use crate::transport::http2::{self, Call, GrpcConnection};
use crate::transport::listener::{Listener, Port, StartError, bind};

/// How long a port may be in use: by a relay that has just died.
const BIND_TIMEOUT: Duration = Duration::from_secs(5);

/// Time for answers to reach their clients after the last world has ended.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// How requests are forwarded.
#[derive(Debug, Clone)]
pub struct Options {
    /// How long a request waits for a rank 0.
    pub wait: Duration,
    /// The directory of answers that outlive the relay; `None`: none do.
    pub journals: Option<PathBuf>,
    /// Time without a request after which [`Event::Idle`] is reported; `None`: never.
    pub idle: Option<Duration>,
}

/// What the relay reports to its launcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The ports are bound.
    Listens,
    /// A world serves, and no request has come for the time of [`Options::idle`]. It is reported again after that time.
    Idle,
    /// The world sleeps, and a request waits for it.
    Wanted,
}

/// Binds the ports of `config` and forwards their requests to the rank 0 of `rank_zero`, until its sender is dropped. `report` is called
/// with each event.
///
/// # Errors
/// When a setting is invalid or a port cannot be bound; the message names it.
pub async fn run(
    config: Config,
    options: Options,
    mut rank_zero: watch::Receiver<RankZero>,
    report: impl Fn(Event) + Copy + Send + 'static,
) -> Result<(), StartError> {
    config.validate()?;
    let mut demand = Demand::default();
    if let Some(idle) = options.idle {
        let (counted, open) = Demand::counted();
        demand = counted;
        tokio::spawn(demand::watch(open, rank_zero.clone(), idle, move |change| {
            report(match change {
                demand::Change::Idle => Event::Idle,
                demand::Change::Wanted => Event::Wanted,
            });
        }));
    }
    let forwarder = Arc::new(Forwarder {
        demand,
        upstream: Upstream::new(rank_zero.clone(), options.wait),
        kept: Arc::new(KeptBytes::default()),
    });
    let idempotency = Idempotency::new(&config.http_restrictions, options.journals);
    let http = HttpForwarder::new(Arc::clone(&forwarder), idempotency);
    let mut ports = Vec::new();
    let http_ports = [
        (RelayedPort::Http, "HTTP service", &config.http, &config.http_tls, config.reuse_http_port),
        (RelayedPort::Metrics, "metrics service", &config.metrics, &config.metrics_tls, false),
    ];
    for (port, service, address, tls, is_shared) in http_ports {
        let Some(address) = address else { continue };
        let listener = listen(service, address, is_shared).await?;
        let acceptor = acceptor(service, tls.as_ref(), b"http/1.1")?;
        let http = Arc::clone(&http);
        let opened = serve_http1(listener, http_limits(&config), acceptor, &config, move |request| {
            let answer = Arc::clone(&http).forward(port, request);
            async move { Ok(answer.await) }
        });
        ports.push(opened.map_err(|source| StartError::Listen { service, address: address.clone(), source })?);
    }
    if let Some(address) = &config.grpc {
        let service = "gRPC service";
        let listener = listen(service, address, config.reuse_grpc_port).await?;
        let acceptor = acceptor(service, config.grpc_tls.as_ref(), b"h2")?;
        let opened = serve_grpc(listener, acceptor, &config, &forwarder);
        ports.push(opened.map_err(|source| StartError::Listen { service, address: address.clone(), source })?);
    }
    report(Event::Listens);
    if rank_zero.wait_for(|state| state.is_last).await.is_ok() {
        // New clients shall find the ports closed, and answers that are here shall reach their clients.
        let closing = futures::future::join_all(ports.into_iter().map(Port::close));
        let ended = async { while rank_zero.changed().await.is_ok() {} };
        let mut closing = std::pin::pin!(closing);
        let mut ended = std::pin::pin!(ended);
        tokio::select! {
            _ = &mut closing => ended.await,
            () = &mut ended => drop(tokio::time::timeout(CLOSE_TIMEOUT, closing).await),
        }
    }
    Ok(())
}

fn serve_grpc(
    listener: Listener,
    acceptor: Option<TlsAcceptor>,
    config: &Config,
    forwarder: &Arc<Forwarder>,
) -> io::Result<Port> {
    let (forwarder, write_timeout) = (Arc::clone(forwarder), config.write_timeout);
    let keep_alive = grpc_keep_alive(config);
    Port::open(listener, grpc_limits(config), acceptor, move |stream, activity| {
        let upstream = GrpcUpstream::new(Arc::clone(&forwarder));
        GrpcConnection::new(stream, activity, keep_alive, move |request, respond| {
            let answer = grpc::forward(Arc::clone(&upstream), request);
            Some(Box::new(http2::send(answer, respond, write_timeout).boxed()) as Box<dyn Call>)
        })
    })
}

async fn listen(service: &'static str, address: &Address, is_shared: bool) -> Result<Listener, StartError> {
    let deadline = Instant::now() + BIND_TIMEOUT;
    loop {
        match bind(service, address, is_shared).await {
            Err(StartError::InUse { .. }) if Instant::now() < deadline => sleep(Duration::from_millis(20)).await,
            bound => return bound.map(Listener::Tcp),
        }
    }
}
