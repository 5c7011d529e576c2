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

    /// Sends `POST path` with these headers and this body, and waits for the head of the response, whatever its status.
    ///
    /// # Errors
    /// When the request fails.
    pub(crate) async fn post_bytes<'a>(
        &self,
        path: &str,
        headers: impl Iterator<Item = (&'a str, &'a str)>,
        body: Bytes,
    ) -> Result<PostParts, ClientError> {
        let response = self.request("POST", path, headers, body).await?;
        Ok(PostParts { status: response.response.status().as_u16(), response })
    }

    async fn send(&self, method: &str, path: &str, body: String) -> Result<HttpResponse, ClientError> {
        let headers = [("content-type", "application/json")].into_iter();
        let response = self.request(method, path, headers, body.into()).await?;
        if response.response.status() == StatusCode::OK { Ok(response) } else { Err(response.into_error(path).await) }
    }

    async fn request<'a>(
        &self,
        method: &str,
        path: &str,
        headers: impl Iterator<Item = (&'a str, &'a str)>,
        body: Bytes,
    ) -> Result<HttpResponse, ClientError> {
        let head = Request::builder().method(method).uri(format!("http://{}{path}", self.address));
        let head = head.header("host", &*self.address).header("user-agent", "trireme-bench");
        let request = headers
            .fold(head, |head, (name, value)| head.header(name, value))
            .body(Full::new(body))
            .map_err(|error| ClientError::Usage(format!("`{path}` is no path: {error}")))?;
        let response = self.connections.request(request).await.map_err(|error| match error.is_connect() {
            true => ClientError::Unreachable {
                url: self.address.to_string(),
                source: std::io::Error::other(root_cause(&error).to_string()),
            },
            false => self.broken(error.source().unwrap_or(&error)),
        })?;
        Ok(HttpResponse { client: self.clone(), response, buffer: BytesMut::new() })
    }

    fn broken(&self, error: &dyn Error) -> ClientError {
        let source = std::io::Error::other(error.to_string());
        ClientError::Io { what: format!("talking HTTP with `{}`", self.address), source }
    }
}

/// The error at the end of a chain of sources.
fn root_cause<'a>(mut error: &'a (dyn Error + 'static)) -> &'a (dyn Error + 'static) {
    while let Some(source) = error.source() {
        error = source;
    }
    error
}

/// A response of any status.
pub(crate) struct PostParts {
    pub(crate) status: u16,
    pub(crate) response: HttpResponse,
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
        while self.read_frame().await? {}
        serde_json::from_slice(&self.buffer).map_err(|error| {
            let start = String::from_utf8_lossy(&self.buffer[..self.buffer.len().min(80)]).into_owned();
            ClientError::Protocol(format!("`{start}` is not JSON: {error}"))
        })
    }

    /// The next part of the body as it arrived; `None` at the end.
    pub(crate) async fn part(&mut self) -> Result<Option<Bytes>, ClientError> {
        match self.read_frame().await? {
            true => Ok(Some(self.buffer.split().freeze())),
            false => Ok(None),
        }
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
            if !self.read_frame().await? {
                return Ok(None);
            }
        }
    }

    /// Reads the next part of the body into the buffer; `false` at its end.
    async fn read_frame(&mut self) -> Result<bool, ClientError> {
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

    async fn into_error(mut self, path: &str) -> ClientError {
        let status = self.response.status();
        while let Ok(true) = self.read_frame().await {}
        let body = String::from_utf8_lossy(&self.buffer).into_owned();
        ClientError::Protocol(format!("`{path}` answered {status}: {}", body.trim()))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn requests_reuse_a_connection_and_a_refused_one_is_unreachable() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        // Serves one connection only.
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            drop(listener);
            for _ in 0..2 {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(stream.read_u8().await.unwrap());
                }
                stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n7").await.unwrap();
            }
        });
        let client = HttpClient::new(&address).unwrap();
        assert_eq!(client.get("/a").await.unwrap(), 7);
        assert_eq!(client.get("/b").await.unwrap(), 7);
        server.await.unwrap();
        let error = HttpClient::new(&address).unwrap().get("/").await.unwrap_err();
        let source = Error::source(&error).unwrap().to_string();
        assert!(error.to_string().starts_with("nothing answers at `127.0.0.1:"), "{error}");
        assert!(source.starts_with("Connection refused"), "{source}");
    }
}
