//! HTTP/1.1 requests whose responses are read as they arrive.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use client::ClientError;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A server; clones share its idle connections.
#[derive(Clone)]
pub(crate) struct HttpClient {
    /// `HOST:PORT`
    address: Arc<str>,
    connections: Client<HttpConnector, Full<Bytes>>,
}

impl HttpClient {
    /// A client of `HOST:PORT` or `http://HOST:PORT`. It connects with the first request.
    ///
    /// # Errors
    /// For an `https` address.
    pub(crate) fn new(address: &str) -> Result<Self, ClientError> {
        if address.starts_with("https://") {
            return Err(ClientError::Usage(format!(
                "`{address}`: servers are measured without TLS; give an http:// address"
            )));
        }
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        Ok(Self {
            address: address.trim_start_matches("http://").trim_end_matches('/').into(),
            connections: Client::builder(TokioExecutor::new()).build(connector),
        })
    }

    /// Sends `GET path` and returns the JSON of the response.
    ///
    /// # Errors
    /// When the request fails, or the response is not JSON.
    pub(crate) async fn get(&self, path: &str) -> Result<Value, ClientError> {
        self.send("GET", path, String::new()).await?.json().await
    }

    /// Sends `POST path` with JSON and waits for the head of the response.
    ///
    /// # Errors
    /// When the request fails, or the status is not 200.
    pub(crate) async fn post(&self, path: &str, body: &Value) -> Result<HttpResponse, ClientError> {
        self.send("POST", path, body.to_string()).await
    }

    async fn send(&self, method: &str, path: &str, body: String) -> Result<HttpResponse, ClientError> {
        let head = Request::builder().method(method).uri(format!("http://{}{path}", self.address));
        let head = head.header("host", &*self.address).header("content-type", "application/json");
        let request = head
            .header("user-agent", "trireme-bench")
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| ClientError::Usage(format!("`{path}` is no path: {error}")))?;
        let response = self.connections.request(request).await.map_err(|error| match error.is_connect() {
            true => ClientError::Unreachable { url: self.address.to_string(), source: std::io::Error::other(error) },
            false => self.broken(error.source().unwrap_or(&error)),
        })?;
        let answer = HttpResponse { client: self.clone(), response, buffer: BytesMut::new() };
        if answer.response.status() == StatusCode::OK { Ok(answer) } else { Err(answer.refusal(path).await) }
    }

    fn broken(&self, error: &dyn Error) -> ClientError {
        let source = std::io::Error::other(error.to_string());
        ClientError::Io { what: format!("talking HTTP with `{}`", self.address), source }
    }
}

/// A response whose body is not read yet.
pub(crate) struct HttpResponse {
    client: HttpClient,
    response: Response<Incoming>,
    buffer: BytesMut,
}

impl HttpResponse {
    /// The whole body as JSON.
    pub(crate) async fn json(mut self) -> Result<Value, ClientError> {
        while self.more().await? {}
        serde_json::from_slice(&self.buffer).map_err(|error| {
            let start = String::from_utf8_lossy(&self.buffer[..self.buffer.len().min(80)]).into_owned();
            ClientError::Protocol(format!("`{start}` is not JSON: {error}"))
        })
    }

    /// The data of the next server-sent event; `None` at the end.
    pub(crate) async fn event(&mut self) -> Result<Option<String>, ClientError> {
        loop {
            while let Some(end) = self.buffer.iter().position(|&byte| byte == b'\n') {
                let line = self.buffer.split_to(end + 1);
                let line = String::from_utf8_lossy(&line);
                if let Some(data) = line.strip_prefix("data:") {
                    return Ok(Some(data.trim().to_owned()));
                }
            }
            if !self.more().await? {
                return Ok(None);
            }
        }
    }

    async fn more(&mut self) -> Result<bool, ClientError> {
        match self.response.body_mut().frame().await {
            Some(Ok(frame)) => {
                if let Some(data) = frame.data_ref() {
                    self.buffer.extend_from_slice(data);
                }
                Ok(true)
            }
            Some(Err(error)) => Err(self.client.broken(&error)),
            None => Ok(false),
        }
    }

    async fn refusal(mut self, path: &str) -> ClientError {
        let status = self.response.status();
        while let Ok(true) = self.more().await {}
        let body = String::from_utf8_lossy(&self.buffer).into_owned();
        ClientError::Protocol(format!("`{path}` answered {status}: {}", body.trim()))
    }
}
