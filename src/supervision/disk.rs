//! The file of a worker's disk tier: its rank copies slots between host memory and the file, in a thread beside the steps.
//!
//! Host memory belongs to the rank, so copies go on while the worker restarts, and the file outlives it. The file has no name, so that
//! the system frees it whatever ends the rank. The checksum of each slot is kept in memory: a slot that reads as something else than
//! what was written last fails. After an error of the system the file is given up, and every later copy fails.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::{Arc, mpsc};

use engine::{DiskCopy, DiskDirection, SlotKind};
use ipc::{SharedMemory, essential_thread};
use serde::{Deserialize, Serialize};

use crate::messages::FromAgent;

/// The slots of a worker in host memory and in its file. Each pair is that of KV blocks, then of recurrent states.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskLayout {
    /// The directory of the file.
    pub directory: PathBuf,
    /// The rank of the worker, for messages.
    pub rank: u32,
    /// Bytes of a slot.
    pub slot_bytes: [u64; 2],
    /// Numbers of slots in host memory.
    pub num_host: [usize; 2],
    /// Numbers of slots in the file.
    pub num_disk: [usize; 2],
}

/// What a rank says of its file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum DiskEvent {
    /// It exists.
    Opened,
    /// It cannot be used, or not any more.
    Failed {
        /// What, where and why.
        reason: String,
    },
    /// A copy has ended.
    Copied {
        /// The copy.
        copy: DiskCopy,
        /// Whether the slot that was to be written has the content of the other.
        is_done: bool,
    },
}

/// Where the first slot of each kind begins, and how many there are.
#[derive(Debug, Clone, Copy)]
struct Slots {
    start: u64,
    bytes: u64,
    count: usize,
}

impl Slots {
    fn of_kinds(bytes: [u64; 2], count: [usize; 2]) -> [Self; 2] {
        [0, bytes[0] * count[0] as u64]
            .into_iter()
            .zip(bytes.into_iter().zip(count))
            .map(|(start, (bytes, count))| Self { start, bytes, count })
            .collect::<Vec<_>>()
            .try_into()
            .expect("there are two kinds")
    }

    /// The first byte of a slot.
    fn find(&self, slot: u32) -> io::Result<u64> {
        match (slot as usize) < self.count {
            true => Ok(self.start + u64::from(slot) * self.bytes),
            false => Err(io::Error::new(io::ErrorKind::InvalidInput, format!("slot {slot} of {}", self.count))),
        }
    }
}

/// Why a copy fails.
#[derive(Debug)]
enum CopyError {
    /// The content of the slot in the file is not what was written there.
    Checksum,
    /// The system refuses.
    System { action: &'static str, error: io::Error },
}

/// The thread of a file. It ends when this is dropped, and the file with it.
#[derive(Debug)]
pub(crate) struct DiskFile {
    jobs: mpsc::Sender<(Arc<SharedMemory>, Vec<DiskCopy>)>,
}

impl DiskFile {
    /// Starts the thread, which creates the file and says so, with the id of the host memory.
    ///
    /// # Errors
    /// When the system has no thread for it.
    pub(crate) fn start(id: u64, layout: DiskLayout, events: mpsc::Sender<FromAgent>) -> io::Result<Self> {
        let (jobs, received) = mpsc::channel::<(Arc<SharedMemory>, Vec<DiskCopy>)>();
        essential_thread("kv-disk", move || {
            let say = |event| drop(events.send(FromAgent::Disk { id, event }));
            let mut file = match Contents::create(&layout) {
                Ok(contents) => {
                    say(DiskEvent::Opened);
                    Some(contents)
                }
                Err(error) => {
                    say(DiskEvent::Failed { reason: layout.reason("cannot create", &error) });
                    None
                }
            };
            for (memory, copies) in received {
                for copy in copies {
                    let copied = file.as_mut().map(|file| file.copy(&memory, copy));
                    if let Some(Err(CopyError::System { action, error })) = &copied {
                        file = None;
                        say(DiskEvent::Failed { reason: layout.reason(action, error) });
                    }
                    say(DiskEvent::Copied { copy, is_done: matches!(copied, Some(Ok(()))) });
                }
            }
        })?;
        Ok(Self { jobs })
    }

    /// Queues copies, which are carried out in order. `memory` is what the slots of the host are in now.
    pub(crate) fn copy(&self, memory: Arc<SharedMemory>, copies: Vec<DiskCopy>) {
        let _ = self.jobs.send((memory, copies)); // The thread ends after this.
    }
}

impl DiskLayout {
    fn reason(&self, action: &str, error: &io::Error) -> String {
        format!("rank {} {action} its file in `{}`: {error}", self.rank, self.directory.display())
    }
}

/// The file, and the checksums of its slots.
#[derive(Debug)]
struct Contents {
    file: File,
    rank: u32,
    directory: PathBuf,
    host: [Slots; 2],
    disk: [Slots; 2],
    /// Of each slot in the file that was written.
    checksums: [Vec<Option<u32>>; 2],
    bytes: Vec<u8>,
    has_logged: bool,
}

impl Contents {
    fn create(layout: &DiskLayout) -> io::Result<Self> {
        let path = layout.directory.join(format!("trireme-kv-cache-{}-{}", std::process::id(), layout.rank));
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
        std::fs::remove_file(&path)?;
        let disk = Slots::of_kinds(layout.slot_bytes, layout.num_disk);
        check_size_limit(disk.iter().map(|slots| slots.bytes * slots.count as u64).sum())?;
        Ok(Self {
            file,
            rank: layout.rank,
            directory: layout.directory.clone(),
            host: Slots::of_kinds(layout.slot_bytes, layout.num_host),
            disk,
            checksums: layout.num_disk.map(|count| vec![None; count]),
            bytes: Vec::new(),
            has_logged: false,
        })
    }

    fn copy(&mut self, memory: &SharedMemory, copy: DiskCopy) -> Result<(), CopyError> {
        let system = |action| move |error| CopyError::System { action, error };
        let kind = match copy.kind {
            SlotKind::Block => 0,
            SlotKind::State => 1,
        };
        let host = self.host[kind].find(copy.host.0).map_err(system("cannot find a slot of host memory for"))? as usize;
        let disk = self.disk[kind].find(copy.disk.0).map_err(system("cannot find a slot in"))?;
        self.bytes.resize(self.disk[kind].bytes as usize, 0);
        let checksum = &mut self.checksums[kind][copy.disk.0 as usize];
        match copy.direction {
            DiskDirection::Store => {
                *checksum = None;
                memory.read(host, &mut self.bytes).map_err(system("cannot read host memory for"))?;
                self.file.write_all_at(&self.bytes, disk).map_err(system("cannot write"))?;
                *checksum = Some(crc32fast::hash(&self.bytes));
                Ok(())
            }
            DiskDirection::Load => {
                self.file.read_exact_at(&mut self.bytes, disk).map_err(system("cannot read"))?;
                if *checksum != Some(crc32fast::hash(&self.bytes)) {
                    self.log_wrong_checksum(disk);
                    return Err(CopyError::Checksum);
                }
                memory.write(host, &self.bytes).map_err(system("cannot write to host memory from"))
            }
        }
    }

    /// Logs the first slot with a wrong checksum; the metric counts all.
    fn log_wrong_checksum(&mut self, start: u64) {
        if !std::mem::replace(&mut self.has_logged, true) {
            let directory = self.directory.display();
            tracing::warn!(
                rank = self.rank,
                "a block in the file of the KV cache in `{directory}`, {start} bytes from its begin, is not what was written there; it is \
                 computed again. Further ones are counted by `trireme_llm_disk_cache_failed_loads_total`; check the disk"
            );
        }
    }
}

/// Compares a size with the limit of the process: a write beyond it would end the process.
fn check_size_limit(bytes: u64) -> io::Result<()> {
    let (limit, _) = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_FSIZE)?;
    match bytes > limit {
        true => Err(io::Error::other(format!(
            "it may have {bytes} bytes, and the limit of a file is {limit} (`ulimit -f`)"
        ))),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use engine::{DiskSlot, HostSlot};

    use super::*;

    const SLOT_BYTES: [u64; 2] = [100, 300];

    fn layout(directory: PathBuf) -> DiskLayout {
        DiskLayout { directory, rank: 3, slot_bytes: SLOT_BYTES, num_host: [4, 2], num_disk: [8, 4] }
    }

    fn memory() -> Arc<SharedMemory> {
        Arc::new(SharedMemory::new("test", 4 * 100 + 2 * 300).unwrap())
    }

    fn copy(kind: SlotKind, direction: DiskDirection, host: u32, disk: u32) -> DiskCopy {
        DiskCopy { number: u64::from(host), kind, direction, host: HostSlot(host), disk: DiskSlot(disk) }
    }

    /// The events of some copies.
    fn run(
        file: &DiskFile,
        memory: &Arc<SharedMemory>,
        events: &mpsc::Receiver<FromAgent>,
        copies: &[DiskCopy],
    ) -> Vec<DiskEvent> {
        file.copy(Arc::clone(memory), copies.to_vec());
        let mut found = Vec::new();
        while found.iter().filter(|event| matches!(event, DiskEvent::Copied { .. })).count() < copies.len() {
            match events.recv_timeout(Duration::from_secs(20)).unwrap() {
                FromAgent::Disk { id: 7, event } => found.push(event),
                other => panic!("{other:?}"),
            }
        }
        found
    }

    fn open(layout: DiskLayout) -> (DiskFile, mpsc::Receiver<FromAgent>, DiskEvent) {
        let (sender, events) = mpsc::channel();
        let file = DiskFile::start(7, layout, sender).unwrap();
        let FromAgent::Disk { event, .. } = events.recv_timeout(Duration::from_secs(20)).unwrap() else { panic!() };
        (file, events, event)
    }

    #[test]
    fn blocks_and_states_come_back_as_they_were_and_others_stay() {
        let (directory, memory) = (tempfile::tempdir().unwrap(), memory());
        let (file, events, opened) = open(layout(directory.path().to_owned()));
        assert_eq!(opened, DiskEvent::Opened);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "the file has no name");
        let bytes: Vec<u8> = (0..1000).map(|i| (i * 7 % 251) as u8).collect();
        memory.write(0, &bytes).unwrap();
        let (block, state) = (SlotKind::Block, SlotKind::State);
        let done = |copy| DiskEvent::Copied { copy, is_done: true };
        let stores = [copy(block, DiskDirection::Store, 1, 6), copy(state, DiskDirection::Store, 0, 3)];
        assert_eq!(run(&file, &memory, &events, &stores), stores.map(done));
        let loads = [copy(block, DiskDirection::Load, 3, 6), copy(state, DiskDirection::Load, 1, 3)];
        assert_eq!(run(&file, &memory, &events, &loads), loads.map(done));
        let mut found = vec![0; 1000];
        memory.read(0, &mut found).unwrap();
        let mut expected = bytes.clone();
        expected.copy_within(100..200, 300);
        expected.copy_within(400..700, 700);
        assert_eq!(found, expected);
        // Nothing was written there.
        let empty = copy(block, DiskDirection::Load, 0, 2);
        assert_eq!(run(&file, &memory, &events, &[empty]), [DiskEvent::Copied { copy: empty, is_done: false }]);
    }

    #[test]
    fn any_wrong_byte_of_the_file_is_a_miss_and_the_file_stays_in_use() {
        let directory = tempfile::tempdir().unwrap();
        let mut contents = Contents::create(&layout(directory.path().to_owned())).unwrap();
        let memory = memory();
        memory.write(0, &[5; 1000]).unwrap();
        let [store, load] = [DiskDirection::Store, DiskDirection::Load].map(|it| copy(SlotKind::Block, it, 0, 1));
        contents.copy(&memory, store).unwrap();
        for byte in [0, 57, 99] {
            let file = contents.file.try_clone().unwrap();
            file.write_all_at(&[6], 100 + byte).unwrap();
            assert!(matches!(contents.copy(&memory, load), Err(CopyError::Checksum)), "byte {byte}");
            file.write_all_at(&[5], 100 + byte).unwrap();
            contents.copy(&memory, load).unwrap();
        }
    }

    #[test]
    fn after_an_error_every_copy_fails_and_the_reason_says_where() {
        let directory = tempfile::tempdir().unwrap();
        let absent = directory.path().join("absent");
        let (file, events, failed) = open(layout(absent.clone()));
        let DiskEvent::Failed { reason } = failed else { panic!("{failed:?}") };
        assert!(reason.starts_with("rank 3 cannot create its file in `"), "{reason}");
        assert!(reason.contains(absent.to_str().unwrap()), "{reason}");
        let store = copy(SlotKind::Block, DiskDirection::Store, 0, 0);
        assert_eq!(run(&file, &memory(), &events, &[store]), [DiskEvent::Copied { copy: store, is_done: false }]);
        // A slot that is not there.
        let (file, events, _) = open(layout(directory.path().to_owned()));
        let wrong = copy(SlotKind::State, DiskDirection::Store, 0, 4);
        let found = run(&file, &memory(), &events, &[wrong, store]);
        assert!(matches!(&found[0], DiskEvent::Failed { reason } if reason.contains("slot 4 of 4")), "{found:?}");
        assert_eq!(found[1..], [wrong, store].map(|copy| DiskEvent::Copied { copy, is_done: false }));
    }
}
