//! Sends the requests of a recording.

use std::path::Path;
use std::time::{Duration, Instant};

use bytes::Bytes;
use client::ClientError;
use client::grpc::{Connection, code_number, frame_bytes};
use futures::future::join_all;
use http::HeaderValue;
use record::Request;

use super::messages::method;
use crate::http::{HttpClient, PostParts};
use crate::target_grpc::CONNECTIONS;

/// The answer to a request that was sent again.
#[derive(Debug, Clone, Default)]
pub(crate) struct Replayed {
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
    /// From sending to the first part of the body.
    pub(crate) first: Option<Duration>,
    /// From sending to the end.
    pub(crate) last: Duration,
    /// Why there is no answer.
    pub(crate) failure: Option<String>,
}

/// Where a server answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Addresses {
    /// `HOST:PORT` of HTTP.
    pub(crate) http: String,
    /// `HOST:PORT` of gRPC.
    pub(crate) grpc: String,
}

impl Addresses {
    /// The address of HTTP, and that of gRPC, which has the next port unless it is given.
    pub(crate) fn new(http: &str, grpc: Option<&str>) -> Self {
        let next = || {
            let host_and_port = http.trim_start_matches("http://").trim_end_matches('/').rsplit_once(':');
            let parsed = host_and_port.and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?.checked_add(1)?)));
            parsed.map_or_else(|| format!("{http}:8001"), |(host, port)| format!("{host}:{port}"))
        };
        Self { http: http.to_owned(), grpc: grpc.map_or_else(next, str::to_owned) }
    }
}

/// A client with the settings of all requests.
pub(crate) struct Sender {
    client: HttpClient,
    grpc_address: String,
    key: Option<String>,
    timeout: Duration,
}

/// The connections of gRPC, which requests share in turn; none if no request needs them.
type Connections = Vec<Connection>;

impl Sender {
    /// A client of a server.
    ///
    /// # Errors
    /// When the key cannot be read, or the address cannot be used.
    pub(crate) fn new(addresses: &Addresses, key_file: Option<&Path>, timeout: Duration) -> Result<Self, ClientError> {
        let key = key_file.map(crate::files::read).transpose()?;
        let key = key.and_then(|keys| keys.lines().next().map(|key| format!("Bearer {}", key.trim())));
        let client = HttpClient::new(&addresses.http)?;
        Ok(Self { client, grpc_address: addresses.grpc.clone(), key, timeout })
    }

    async fn connect(&self, requests: &[Request]) -> Result<Connections, ClientError> {
        let mut connections = Connections::new();
        if !requests.iter().any(Request::is_grpc) {
            return Ok(connections);
        }
        for _ in 0..CONNECTIONS {
            let opened = Connection::open(&self.grpc_address).await;
            let connection = opened.map_err(|error| {
                ClientError::Usage(format!("{error}; `--grpc-url` names the address for requests over gRPC"))
            })?;
            connections.push(match &self.key {
                Some(key) => {
                    let value = HeaderValue::from_str(key);
                    let wrong = |error| ClientError::Usage(format!("the key cannot be sent: {error}"));
                    connection.with_authorization(value.map_err(wrong)?)
                }
                None => connection,
            });
        }
        Ok(connections)
    }

    /// Sends each request at its time; `None` for those without a body.
    ///
    /// # Errors
    /// When no server answers.
    pub(crate) async fn send_all(
        &self,
        requests: &[Request],
        speed: f64,
    ) -> Result<Vec<Option<Replayed>>, ClientError> {
        self.client.get("/v2").await?;
        let connections = self.connect(requests).await?;
        let began = Instant::now();
        let first = requests.first().map_or(0, |request| request.at_us);
        let send = async |request: &Request| {
            let body = request.body.as_ref()?.bytes()?;
            let at = Duration::from_micros(request.at_us - first).div_f64(speed);
            tokio::time::sleep_until((began + at).into()).await;
            let sent = async {
                match connections.get(request.id as usize % CONNECTIONS) {
                    Some(connection) if request.is_grpc() => call(connection, request, &body).await,
                    _ => self.send(request, body).await,
                }
            };
            Some(tokio::time::timeout(self.timeout, sent).await.unwrap_or_else(|_| Replayed {
                failure: Some(format!("no whole answer within {:?}", self.timeout)),
                last: self.timeout,
                ..Replayed::default()
            }))
        };
        Ok(join_all(requests.iter().map(send)).await)
    }

    async fn send(&self, request: &Request, body: Bytes) -> Replayed {
        let json_bytes = request.json_bytes.map(|bytes| bytes.to_string());
        let headers = [
            ("content-type", request.content_type.as_deref()),
            ("inference-header-content-length", json_bytes.as_deref()),
            ("authorization", self.key.as_deref()),
        ];
        let (began, mut replayed) = (Instant::now(), Replayed::default());
        let headers = headers.into_iter().filter_map(|(name, value)| Some((name, value?)));
        let answered = match self.client.post_bytes(&request.path, headers, body).await {
            Ok(PostParts { status, mut response }) => {
                replayed.status = status;
                loop {
                    match response.part().await {
                        Ok(Some(part)) => {
                            replayed.first.get_or_insert_with(|| began.elapsed());
                            replayed.body.extend_from_slice(&part);
                        }
                        Ok(None) => break Ok(()),
                        Err(error) => break Err(error),
                    }
                }
            }
            Err(error) => Err(error),
        };
        replayed.last = began.elapsed();
        replayed.failure = answered.err().map(|error| error.to_string());
        replayed
    }
}

/// Sends a message in a call of its own.
async fn call(connection: &Connection, request: &Request, message: &[u8]) -> Replayed {
    let (began, mut replayed) = (Instant::now(), Replayed::default());
    let received = async {
        let mut replies = connection.call(method(&request.path), frame_bytes(message)).await?;
        while let Some(reply) = replies.next_bytes().await? {
            replayed.first.get_or_insert_with(|| began.elapsed());
            replayed.body.extend_from_slice(&frame_bytes(&reply));
        }
        Ok(())
    };
    match received.await {
        Err(ClientError::Refused { code, message }) => {
            replayed.status = code_number(code).unwrap_or(u16::MAX);
            replayed.body = message.into_bytes();
        }
        received => replayed.failure = received.err().map(|error| error.to_string()),
    }
    replayed.last = began.elapsed();
    replayed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grpc_has_the_port_after_that_of_http_unless_it_is_given() {
        let grpc = |http: &str, grpc: Option<&str>| Addresses::new(http, grpc).grpc;
        assert_eq!(grpc("localhost:8000", None), "localhost:8001");
        assert_eq!(grpc("http://[::1]:9100/", None), "[::1]:9101");
        assert_eq!(grpc("server", None), "server:8001");
        assert_eq!(grpc("server:9100", Some("other:7")), "other:7");
    }
}
