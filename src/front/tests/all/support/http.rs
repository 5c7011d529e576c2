//! A client for one HTTP request.

use super::TestFront;

/// An HTTP response.
pub struct HttpAnswer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl HttpAnswer {
    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The value of the header `name`, which is in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

/// Sends one request and reads the response.
pub async fn http(front: &TestFront, method: &str, path: &str, body: &[u8]) -> HttpAnswer {
    http_with(front, method, path, "", body).await
}

/// As [`http`], with additional headers, each with a line break.
pub async fn http_with(front: &TestFront, method: &str, path: &str, headers: &str, body: &[u8]) -> HttpAnswer {
    http_to(front.http_address(), method, path, headers, body.to_vec()).await
}

/// As [`http_with`], to any address.
pub async fn http_to(
    address: std::net::SocketAddr,
    method: &str,
    path: &str,
    headers: &str,
    body: Vec<u8>,
) -> HttpAnswer {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut socket = tokio::net::TcpStream::connect(address).await.unwrap();
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n"
    );
    let sent = [head.as_bytes(), &body].concat();
    let _ = socket.write_all(&sent).await; // The server may refuse the request before it has read the body.
    let mut bytes = Vec::new();
    socket.read_to_end(&mut bytes).await.unwrap();
    parse(&bytes)
}

fn parse(bytes: &[u8]) -> HttpAnswer {
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").expect("an HTTP head");
    let head = std::str::from_utf8(&bytes[..end]).unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let headers: Vec<(String, String)> = head
        .lines()
        .filter_map(|line| line.split_once(": "))
        .map(|(key, value)| (key.to_lowercase(), value.to_owned()))
        .collect();
    let is_chunked = headers.contains(&("transfer-encoding".to_owned(), "chunked".to_owned()));
    let body = if is_chunked { unchunk(&bytes[end + 4..]) } else { bytes[end + 4..].to_vec() };
    HttpAnswer { status, headers, body }
}

fn unchunk(mut bytes: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    loop {
        let line = bytes.windows(2).position(|window| window == b"\r\n").expect("a chunk's length");
        let length = usize::from_str_radix(std::str::from_utf8(&bytes[..line]).unwrap(), 16).unwrap();
        if length == 0 {
            return body;
        }
        body.extend_from_slice(&bytes[line + 2..line + 2 + length]);
        bytes = &bytes[line + 4 + length..];
    }
}
