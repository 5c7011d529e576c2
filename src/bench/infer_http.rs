//! One kept-alive HTTP connection that sends the same infer request, with binary tensors both ways.
//!
//! Own code over a socket: hyper's client takes 9.3 instead of 6.6 µs of CPU a request, and the load generator shares its cores
//! with the server.

use bytes::{Buf, BytesMut};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use client::ClientError;
use client::proto::ModelInferRequest;

/// The connection, and its request as bytes.
pub struct HttpConnection {
    url: String,
    stream: TcpStream,
    request: Vec<u8>,
    buffer: BytesMut,
}

impl HttpConnection {
    /// Connects to `HOST:PORT` to send `request`.
    ///
    /// # Errors
    /// When nothing listens there.
    pub async fn open(url: &str, request: &ModelInferRequest) -> Result<Self, ClientError> {
        let stream =
            TcpStream::connect(url).await.map_err(|source| ClientError::Unreachable { url: url.to_owned(), source })?;
        let _ = stream.set_nodelay(true); // A failure only costs latency.
        Ok(Self { url: url.to_owned(), stream, request: http_request(url, request), buffer: BytesMut::new() })
    }

    /// Sends the request once and reads the response.
    ///
    /// # Errors
    /// When the connection breaks, or the status is not 200.
    pub async fn send(&mut self) -> Result<(), ClientError> {
        let broken = |url: &str, source| ClientError::Io { what: format!("talking HTTP with `{url}`"), source };
        self.stream.write_all(&self.request).await.map_err(|source| broken(&self.url, source))?;
        loop {
            if let Some(length) = response_len(&self.buffer)?
                && self.buffer.len() >= length
            {
                self.buffer.advance(length);
                return Ok(());
            }
            let count = self.stream.read_buf(&mut self.buffer).await.map_err(|source| broken(&self.url, source))?;
            if count == 0 {
                return Err(broken(&self.url, std::io::ErrorKind::UnexpectedEof.into()));
            }
        }
    }
}

fn http_request(url: &str, request: &ModelInferRequest) -> Vec<u8> {
    let tensors = request.inputs.iter().zip(&request.raw_input_contents);
    let inputs: Vec<_> = tensors
        .map(|(input, data)| {
            json!({
                "name": input.name, "datatype": input.datatype, "shape": input.shape,
                "parameters": {"binary_data_size": data.len()},
            })
        })
        .collect();
    let head = json!({"inputs": inputs, "parameters": {"binary_data_output": true}}).to_string();
    let tail = request.raw_input_contents.concat();
    let mut text = format!(
        "POST /v2/models/{}/infer HTTP/1.1\r\nHost: {url}\r\nContent-Type: application/octet-stream\r\n\
         Inference-Header-Content-Length: {}\r\nContent-Length: {}\r\n\r\n{head}",
        request.model_name,
        head.len(),
        head.len() + tail.len()
    )
    .into_bytes();
    text.extend(tail);
    text
}

/// Length of the response at the start of `buffer`; `None` until its head is complete.
fn response_len(buffer: &[u8]) -> Result<Option<usize>, ClientError> {
    let Some(head_len) = buffer.windows(4).position(|window| window == b"\r\n\r\n") else { return Ok(None) };
    let head = std::str::from_utf8(&buffer[..head_len])
        .map_err(|_| ClientError::Protocol("an HTTP head that is not text".into()))?;
    let length = head
        .lines()
        .find_map(|line| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
        })
        .ok_or_else(|| ClientError::Protocol("an HTTP answer without Content-Length".into()))?;
    let whole = head_len + 4 + length;
    if !head.starts_with("HTTP/1.1 200") {
        if buffer.len() < whole {
            return Ok(None);
        }
        let status = head.lines().next().unwrap_or_default();
        let body = String::from_utf8_lossy(&buffer[head_len + 4..whole]);
        return Err(ClientError::Protocol(format!("{status}: {body}")));
    }
    Ok(Some(whole))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_of_a_response_follows_from_its_head() {
        let text = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabcHTTP";
        assert_eq!(response_len(&text[..20]).unwrap(), None);
        assert_eq!(response_len(text).unwrap(), Some(text.len() - 4));
        let error = response_len(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno").unwrap_err();
        assert!(error.to_string().contains("404 Not Found: no"));
    }
}
