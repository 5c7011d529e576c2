//! Sends the requests of a recording.

use std::path::Path;
use std::time::{Duration, Instant};

use bytes::Bytes;
use client::ClientError;
use futures::future::join_all;
use record::Request;

use crate::http::{HttpClient, PostParts};

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

/// A client with the settings of all requests.
pub(crate) struct Sender {
    client: HttpClient,
    key: Option<String>,
    timeout: Duration,
}

impl Sender {
    /// A client of a server.
    ///
    /// # Errors
    /// When the key cannot be read, or the address cannot be used.
    pub(crate) fn new(address: &str, key_file: Option<&Path>, timeout: Duration) -> Result<Self, ClientError> {
        let key = key_file.map(crate::files::read).transpose()?;
        let key = key.and_then(|keys| keys.lines().next().map(|key| format!("Bearer {}", key.trim())));
        Ok(Self { client: HttpClient::new(address)?, key, timeout })
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
        let began = Instant::now();
        let first = requests.first().map_or(0, |request| request.at_us);
        let send = async |request: &Request| {
            let body = request.body.as_ref()?.bytes()?;
            let at = Duration::from_micros(request.at_us - first).div_f64(speed);
            tokio::time::sleep_until((began + at).into()).await;
            let sent = self.send(request, body);
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
