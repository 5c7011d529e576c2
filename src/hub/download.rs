//! Downloads one file: continues a part of it, repeats what fails, and keeps only what has the announced hash.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use ring::digest::Context;
use ureq::http::header::CONTENT_RANGE;

use crate::HubError;
use crate::cache::ModelCache;
use crate::digest::hex_of;
use crate::http::{Client, Failure, MAX_ATTEMPTS};
use crate::listing::RemoteFile;
use crate::progress::Progress;

/// Bytes of one read.
const CHUNK_BYTES: usize = 256 << 10;

/// Number of bytes from which an attempt counts as progress, so that many attempts may download a large file.
const PROGRESS_BYTES: u64 = 1 << 20;

/// Downloads `file` to its blob, if it is not there. Waits for another process that downloads it.
///
/// # Errors
/// When the attempts fail, the content has another hash or size, or the disk cannot be written.
pub(crate) fn download(
    client: &Client,
    cache: &ModelCache,
    file: &RemoteFile,
    progress: &Progress,
) -> Result<(), HubError> {
    let blob = cache.blob(&file.digest);
    let _lock =
        cache.lock(&file.digest, || progress.say(&format!("another process downloads {}; waiting", file.name)))?;
    if is_there(&blob, file.size) {
        progress.add(file.size);
        return Ok(());
    }
    let mut part = Part::open(part_of(&blob), file, progress)?;
    let had_part = part.len > 0;
    part.fetch_all(client)?;
    match part.mismatch() {
        None => part.keep(&blob),
        // The part of an earlier process was damaged.
        Some(_) if had_part => {
            part.restart()?;
            part.fetch_all(client)?;
            match part.mismatch() {
                None => part.keep(&blob),
                Some(error) => part.discard(error),
            }
        }
        Some(error) => part.discard(error),
    }
}

/// Whether a blob is complete. A file system that was full or lost power may have cut it.
pub(crate) fn is_there(blob: &Path, size: u64) -> bool {
    fs::metadata(blob).is_ok_and(|found| found.is_file() && found.len() == size)
}

/// Bytes of a file without a blob that are still to be written.
pub(crate) fn missing_bytes(cache: &ModelCache, file: &RemoteFile) -> u64 {
    let part = fs::metadata(part_of(&cache.blob(&file.digest)));
    file.size.saturating_sub(part.map_or(0, |found| found.len()))
}

fn part_of(blob: &Path) -> PathBuf {
    blob.with_extension("incomplete")
}

/// The beginning of a file, and the hash of it.
struct Part<'a> {
    path: PathBuf,
    file: File,
    remote: &'a RemoteFile,
    progress: &'a Progress,
    len: u64,
    hash: Context,
}

impl<'a> Part<'a> {
    /// Opens what an earlier process has left, or an empty file.
    fn open(path: PathBuf, remote: &'a RemoteFile, progress: &'a Progress) -> Result<Self, HubError> {
        let opened = File::options().create(true).truncate(false).read(true).write(true).open(&path);
        let file = opened.map_err(HubError::io(format!("write {}", path.display())))?;
        let mut part = Self { path, file, remote, progress, len: 0, hash: remote.digest.start(remote.size) };
        let mut buffer = vec![0; CHUNK_BYTES];
        loop {
            let count = part.file.read(&mut buffer).map_err(HubError::io(format!("read {}", part.path.display())))?;
            part.note(&buffer[..count]);
            if count == 0 {
                break;
            }
        }
        if part.len > remote.size {
            part.restart()?;
        }
        Ok(part)
    }

    fn note(&mut self, bytes: &[u8]) {
        self.hash.update(bytes);
        self.len += bytes.len() as u64;
        self.progress.add(bytes.len() as u64);
    }

    /// Drops all bytes.
    fn restart(&mut self) -> Result<(), HubError> {
        self.progress.subtract(self.len);
        (self.len, self.hash) = (0, self.remote.digest.start(self.remote.size));
        let emptied = self.file.set_len(0).and_then(|()| self.file.seek(SeekFrom::Start(0)));
        emptied.map(drop).map_err(HubError::io(format!("write {}", self.path.display())))
    }

    /// Downloads the rest, in as many attempts as make progress.
    fn fetch_all(&mut self, client: &Client) -> Result<(), HubError> {
        let mut attempt = 1;
        while self.len < self.remote.size {
            let before = self.len;
            let Err(failure) = self.fetch(client) else { continue };
            if self.len >= before + PROGRESS_BYTES {
                attempt = 1;
            }
            if !failure.is_passing() || attempt >= MAX_ATTEMPTS {
                return Err(failure.into_error(&self.remote.url));
            }
            std::thread::sleep(failure.pause(attempt, client.retry_pause()));
            attempt += 1;
        }
        Ok(())
    }

    /// One attempt, from the first missing byte on.
    fn fetch(&mut self, client: &Client) -> Result<(), Failure> {
        let response = match client.get(&self.remote.url, self.len) {
            // The server has fewer bytes than were found here.
            Err(Failure::Status(refusal)) if refusal.status == 416 && self.len > 0 => {
                self.restart().map_err(Failure::Final)?;
                client.get(&self.remote.url, 0)?
            }
            response => response?,
        };
        if self.len > 0 {
            let range = response.headers().get(CONTENT_RANGE).and_then(|range| range.to_str().ok());
            let is_rest = range.is_some_and(|range| range.starts_with(&format!("bytes {}-", self.len)));
            if response.status().as_u16() != 206 || !is_rest {
                // The server sends the whole file.
                self.restart().map_err(Failure::Final)?;
            }
        }
        let written = |error| Failure::Final(HubError::io(format!("write {}", self.path.display()))(error));
        let (mut body, mut buffer) = (response.into_body().into_reader(), vec![0; CHUNK_BYTES]);
        loop {
            let count = body.read(&mut buffer).map_err(|error| Failure::Connection(error.to_string()))?;
            if count == 0 {
                break;
            }
            if self.progress.is_stopped() {
                return Err(Failure::Final(HubError::Stopped));
            }
            let bytes = &buffer[..count];
            self.file.write_all(bytes).map_err(&written)?;
            self.hash.update(bytes);
            self.len += count as u64;
            self.progress.add(count as u64);
            if self.len > self.remote.size {
                // The rest is not read: its size is the server's choice.
                return Ok(());
            }
        }
        match self.len < self.remote.size {
            true => Err(Failure::Connection(format!("it ended after {} of {} bytes", self.len, self.remote.size))),
            false => Ok(()),
        }
    }

    /// How the bytes differ from those that were announced.
    fn mismatch(&self) -> Option<HubError> {
        let RemoteFile { name, size, digest, .. } = self.remote;
        let (what, found, expected) = match (self.len == *size, hex_of(&self.hash)) {
            (true, hex) if hex == digest.hex() => return None,
            (true, hex) => (digest.algorithm(), hex, digest.hex().to_owned()),
            (false, _) => ("size", format!("of {} bytes", self.len), format!("{size} bytes")),
        };
        Some(HubError::Mismatch { file: name.clone(), what, found, expected })
    }

    /// The part becomes the blob.
    fn keep(self, blob: &Path) -> Result<(), HubError> {
        let kept = self.file.sync_data().and_then(|()| fs::rename(&self.path, blob));
        kept.map_err(HubError::io(format!("write {}", blob.display())))
    }

    fn discard(self, error: HubError) -> Result<(), HubError> {
        fs::remove_file(&self.path).map_err(HubError::io(format!("remove {}", self.path.display())))?;
        Err(error)
    }
}
