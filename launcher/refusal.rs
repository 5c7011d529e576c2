//! The replies to clients while no world serves: 503 or UNAVAILABLE, the reason, and when to retry.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

/// The value of `retry-after`.
const RETRY_AFTER_SECS: u32 = 1;
/// Timeout of each read and write.
const IO_TIMEOUT: Duration = Duration::from_secs(1);
/// Time limit of the exchange on one connection, and again of closing it.
const MAX_DURATION: Duration = Duration::from_secs(5);
/// Limit of an HTTP request's head, and of the bytes that are read and dropped while the connection closes.
const MAX_READ_BYTES: usize = 1 << 20;
/// First byte of a TLS handshake record.
const TLS_HANDSHAKE: u8 = 0x16;
/// The first bytes of an HTTP/2 connection, and so of a gRPC connection.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Answers a connection in its protocol, HTTP/1 or gRPC, and closes it. A TLS connection is closed without an answer, since the
/// launcher has no certificate.
///
/// # Errors
/// If the client leaves, sends nothing in time, or sends neither protocol.
pub(crate) fn refuse(stream: TcpStream, reason: &str) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(IO_TIMEOUT))?;
    stream.set_write_timeout(Some(IO_TIMEOUT))?;
    let deadline = Instant::now() + MAX_DURATION;
    let mut head = Vec::new();
    while !head.starts_with(PREFACE) {
        let is_http2 = PREFACE.starts_with(&head[..head.len().min(PREFACE.len())]);
        if !is_http2 && (head.windows(4).any(|end| end == b"\r\n\r\n") || head.first() == Some(&TLS_HANDSHAKE)) {
            break;
        }
        // Reads no further than the preface: the frames after it are read one by one.
        let wanted = if is_http2 { PREFACE.len() - head.len() } else { 4096 };
        let mut bytes = [0; 4096];
        let count = (&stream).read(&mut bytes[..wanted])?;
        head.extend_from_slice(&bytes[..count]);
        if count == 0 || head.len() > MAX_READ_BYTES || Instant::now() > deadline {
            return Err(ErrorKind::InvalidData.into());
        }
    }
    match head.first() {
        Some(&TLS_HANDSHAKE) => return Ok(()),
        _ if head.starts_with(PREFACE) => refuse_grpc(&stream, reason, deadline)?,
        _ => (&stream).write_all(&http_response(reason))?,
    }
    close(&stream)
}

fn http_response(reason: &str) -> Vec<u8> {
    let body = serde_json::json!({ "error": reason }).to_string();
    let head = format!(
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: {RETRY_AFTER_SECS}\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    (head + &body).into_bytes()
}

/// Closes the connection without losing the reply. Closing a socket with unread input resets the connection, and the reset may
/// discard the reply. So this reads until the client closes, within limits.
fn close(mut stream: &TcpStream) -> io::Result<()> {
    stream.shutdown(Shutdown::Write)?;
    stream.set_read_timeout(Some(IO_TIMEOUT))?;
    let (deadline, mut bytes, mut num_read) = (Instant::now() + MAX_DURATION, [0; 4096], 0);
    while Instant::now() < deadline && num_read < MAX_READ_BYTES {
        match stream.read(&mut bytes) {
            Ok(0) => break,
            Ok(count) => num_read += count,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Frames of HTTP/2 (RFC 9113, section 6).
mod frame {
    pub(super) const HEADERS: u8 = 1;
    pub(super) const RST_STREAM: u8 = 3;
    pub(super) const SETTINGS: u8 = 4;
    pub(super) const PING: u8 = 6;
    pub(super) const GOAWAY: u8 = 7;
    pub(super) const ACK: u8 = 1;
    pub(super) const END_STREAM_AND_HEADERS: u8 = 1 | 4;
}

/// Answers every call with UNAVAILABLE. When no more calls come, sends GOAWAY, after which the client reconnects.
fn refuse_grpc(mut stream: &TcpStream, reason: &str, deadline: Instant) -> io::Result<()> {
    write_frame(stream, frame::SETTINGS, 0, 0, &[])?;
    let trailers = grpc_trailers(reason);
    let mut last_stream = 0;
    while Instant::now() < deadline {
        let mut head = [0; 9];
        if stream.read_exact(&mut head).is_err() {
            break;
        }
        let len = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
        let (kind, flags) = (head[3], head[4]);
        let id = u32::from_be_bytes([head[5], head[6], head[7], head[8]]) & (u32::MAX >> 1);
        // The default limit of a frame's size.
        if len > 1 << 14 {
            return Err(ErrorKind::InvalidData.into());
        }
        let mut payload = vec![0; len];
        stream.read_exact(&mut payload)?;
        match kind {
            frame::SETTINGS if flags & frame::ACK == 0 => write_frame(stream, frame::SETTINGS, frame::ACK, 0, &[])?,
            frame::PING if flags & frame::ACK == 0 => write_frame(stream, frame::PING, frame::ACK, 0, &payload)?,
            frame::HEADERS if id > last_stream => {
                last_stream = id;
                write_frame(stream, frame::HEADERS, frame::END_STREAM_AND_HEADERS, id, &trailers)?;
                // NO_ERROR: asks the client not to send the rest of its request.
                write_frame(stream, frame::RST_STREAM, 0, id, &[0; 4])?;
                stream.set_read_timeout(Some(IO_TIMEOUT / 10))?;
            }
            frame::GOAWAY => break,
            _ => {}
        }
    }
    let goaway = [last_stream.to_be_bytes(), [0; 4]].concat();
    write_frame(stream, frame::GOAWAY, 0, 0, &goaway)
}

fn write_frame(mut stream: &TcpStream, kind: u8, flags: u8, id: u32, payload: &[u8]) -> io::Result<()> {
    let len = (payload.len() as u32).to_be_bytes();
    let mut bytes = vec![len[1], len[2], len[3], kind, flags];
    bytes.extend(id.to_be_bytes());
    bytes.extend(payload);
    stream.write_all(&bytes)
}

/// A block of headers that ends a call, without additions to the dynamic table (RFC 7541, section 6.2.2).
fn grpc_trailers(reason: &str) -> Vec<u8> {
    // Entry 8 of the static table: `:status: 200`.
    let mut block = vec![0x88];
    let percent = |byte: u8| match byte {
        b' '..=b'~' if byte != b'%' => (byte as char).to_string(),
        _ => format!("%{byte:02X}"),
    };
    let message: String = reason.bytes().map(percent).collect();
    let retry_after = RETRY_AFTER_SECS.to_string();
    let headers = [
        ("content-type", "application/grpc"),
        ("grpc-status", "14"),
        ("grpc-message", &message),
        ("retry-after", &retry_after),
    ];
    for (name, value) in headers {
        block.push(0);
        for text in [name, value] {
            push_length(&mut block, text.len());
            block.extend(text.as_bytes());
        }
    }
    block
}

/// Appends an integer with a prefix of 7 bits (RFC 7541, section 5.1).
fn push_length(block: &mut Vec<u8>, mut len: usize) {
    if len < 127 {
        return block.push(len as u8);
    }
    block.push(127);
    len -= 127;
    while len >= 128 {
        block.push(len as u8 | 128);
        len >>= 7;
    }
    block.push(len as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_encoded_as_in_the_examples_of_rfc_7541() {
        let length = |len| {
            let mut block = Vec::new();
            push_length(&mut block, len);
            block
        };
        assert_eq!([length(10), length(126), length(127)], [vec![10], vec![126], vec![127, 0]]);
        assert_eq!(length(127 + 1337 - 31), [127, 0b1001_1010, 0b0000_1010]);
    }
}
