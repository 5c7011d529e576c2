//! Transfer of open files, mainly sockets, from one process to another over a Unix socket.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

/// Most files in one message.
pub const MAX_FILES: usize = 4;

/// Sends `bytes`, which must not be empty, and at most [`MAX_FILES`] files, which stay open in this process.
///
/// # Errors
/// When the peer has closed its end, or there are more than [`MAX_FILES`] files.
pub fn send_files(socket: &UnixStream, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "more files than one message can carry"));
    }
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives a message of [`send_files`]: returns the number of bytes written to `bytes`, and the files. Zero bytes mean that the peer
/// has closed its end.
///
/// # Errors
/// When the socket fails or its read timeout has passed.
pub fn receive_files(socket: &UnixStream, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let files = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    let files = files.flatten().collect();
    Ok((received.bytes, files))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_listener_that_was_handed_over_accepts_what_came_before() {
        let (here, there) = UnixStream::pair().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        client.write_all(b"hello").unwrap();
        send_files(&here, b"h", &[listener.as_fd()]).unwrap();
        drop(listener);

        let mut bytes = [0; 8];
        let (len, mut files) = receive_files(&there, &mut bytes).unwrap();
        assert_eq!((&bytes[..len], files.len()), (&b"h"[..], 1));
        let (mut accepted, _) = TcpListener::from(files.remove(0)).accept().unwrap();
        let mut words = [0; 5];
        accepted.read_exact(&mut words).unwrap();
        assert_eq!(&words, b"hello");

        drop(here);
        assert_eq!(receive_files(&there, &mut bytes).unwrap().0, 0);
    }
}
