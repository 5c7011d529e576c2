//! A log file of bounded size. A full file is renamed to `log.txt.1`, in place of the previous one.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ipc::lock;
use tracing_subscriber::fmt::MakeWriter;

/// How often the file is checked: other processes may move or remove it, or write to it as well.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The log file; any thread may write.
pub(super) struct LogFile(Mutex<Open>);

struct Open {
    path: PathBuf,
    file: File,
    /// Size of the file at the last check, and the bytes written since.
    len: u64,
    /// 0: no bound, as for pipes and devices.
    max_bytes: u64,
    checked: Instant,
}

impl LogFile {
    /// Opens the file for appending. With `max_bytes` above 0 it is kept below that, and one old file beside it.
    pub(super) fn open(path: &Path, max_bytes: u64) -> io::Result<Self> {
        let file = append_to(path)?;
        let found = file.metadata()?;
        let max_bytes = if found.is_file() { max_bytes } else { 0 };
        Ok(Self(Mutex::new(Open { path: path.into(), len: found.len(), file, max_bytes, checked: Instant::now() })))
    }
}

impl<'a> MakeWriter<'a> for LogFile {
    type Writer = Guard<'a>;

    fn make_writer(&'a self) -> Guard<'a> {
        Guard(lock(&self.0))
    }
}

/// The locked file, for one line.
pub(super) struct Guard<'a>(MutexGuard<'a, Open>);

impl Write for Guard<'_> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let open = &mut *self.0;
        open.check(line.len() as u64, Instant::now());
        let written = open.file.write(line)?;
        open.len += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.file.flush()
    }
}

fn append_to(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

fn is_same(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

impl Open {
    /// Opens a new file if the old one was moved away, and rotates it if `more` bytes would make it too long.
    fn check(&mut self, more: u64, now: Instant) {
        let is_full = |len: u64, max: u64| max > 0 && len > 0 && len.saturating_add(more) > max;
        if now.duration_since(self.checked) < CHECK_INTERVAL && !is_full(self.len, self.max_bytes) {
            return;
        }
        self.checked = now;
        // A failed check is repeated later; until then lines go to the open file.
        let Ok(mine) = self.file.metadata() else { return };
        if mine.is_file() && !std::fs::metadata(&self.path).is_ok_and(|there| is_same(&there, &mine)) {
            self.reopen();
            return;
        }
        self.len = mine.len();
        if is_full(self.len, self.max_bytes) {
            self.rotate(&mine);
        }
    }

    fn reopen(&mut self) {
        if let Ok(file) = append_to(&self.path) {
            self.len = file.metadata().map_or(0, |metadata| metadata.len());
            self.file = file;
        }
    }

    /// Several processes may write to the same file: one of them renames it, the others reopen it.
    fn rotate(&mut self, mine: &Metadata) {
        if self.file.try_lock().is_err() {
            return;
        }
        if std::fs::metadata(&self.path).is_ok_and(|there| is_same(&there, mine)) {
            let mut old = self.path.clone().into_os_string();
            old.push(".1");
            if std::fs::rename(&self.path, &old).is_err() {
                // The file cannot be renamed, so it is truncated: a full disk would do more harm than a lost log.
                let _ = self.file.set_len(0);
            }
        }
        let _ = self.file.unlock();
        self.reopen();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("trireme-log-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    fn lines(path: &Path) -> usize {
        fs::read_to_string(path).unwrap().lines().count()
    }

    #[test]
    fn a_full_file_is_moved_aside_and_both_stay_below_the_bound() {
        let folder = folder("full");
        let (path, old) = (folder.join("log.txt"), folder.join("log.txt.1"));
        // Several processes may write to one file; each counts its own bytes until it looks at the file.
        for num_writers in [1, 3] {
            let writers: Vec<_> = (0..num_writers).map(|_| LogFile::open(&path, 1000).unwrap()).collect();
            for number in 0..500 {
                let line = format!("line {number:044}\n");
                writers[number % num_writers].make_writer().write_all(line.as_bytes()).unwrap();
                for file in [&path, &old] {
                    let bytes = fs::metadata(file).map_or(0, |found| found.len());
                    assert!(bytes <= 1000 * num_writers as u64, "{bytes} in {}", file.display());
                }
            }
            let all = [fs::read_to_string(&old).unwrap(), fs::read_to_string(&path).unwrap()].concat();
            assert!(all.contains("0499\n"), "the last line is there");
            assert!(lines(&old) >= 10);
        }
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_file_that_was_moved_away_is_made_again() {
        let folder = folder("moved");
        let (path, moved) = (folder.join("log.txt"), folder.join("archived"));
        let log = LogFile::open(&path, 0).unwrap();
        let write = |text: &str| log.make_writer().write_all(text.as_bytes()).unwrap();
        write("one\n");
        fs::rename(&path, &moved).unwrap();
        lock(&log.0).checked -= CHECK_INTERVAL;
        write("two\n");
        assert_eq!(fs::read_to_string(&moved).unwrap(), "one\n");
        assert_eq!(fs::read_to_string(&path).unwrap(), "two\n");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn existing_bytes_count_and_devices_are_not_rotated() {
        let folder = folder("there");
        let path = folder.join("log.txt");
        fs::write(&path, "x".repeat(990)).unwrap();
        LogFile::open(&path, 1000).unwrap().make_writer().write_all(&[b'y'; 20]).unwrap();
        assert_eq!(fs::read(&path).unwrap(), [b'y'; 20]);
        assert_eq!(fs::metadata(folder.join("log.txt.1")).unwrap().len(), 990);

        let null = LogFile::open(Path::new("/dev/null"), 10).unwrap();
        (0..10).for_each(|_| null.make_writer().write_all(b"more than that\n").unwrap());
        assert!(fs::metadata("/dev/null").is_ok() && fs::metadata("/dev/null.1").is_err());
        fs::remove_dir_all(folder).unwrap();
    }
}
