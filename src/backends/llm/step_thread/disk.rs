//! The disk tier of the KV cache: passes copies between host memory and files to the ranks, and their ends to the engine.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::{Duration, Instant};

use engine::{DiskCopy, Engine};
use supervision::{DiskEvent, DiskLayout};

use super::super::worker_group::{WorkerGroup, WorkerLoss};
use super::{End, POLL_INTERVAL, Running};

/// Timeout for creating the files: a network disk may hang.
const OPEN_TIMEOUT: Duration = Duration::from_secs(60);

/// After so long without an end of any copy the files are given up: the disk hangs, and requests may wait for it.
const COPY_TIMEOUT: Duration = Duration::from_secs(10);

/// The files of the ranks.
#[derive(Debug, Default)]
pub(super) struct Disk {
    /// Whether the ranks were asked to create them.
    is_open: bool,
    /// Ranks that have done so.
    num_opened: usize,
    /// Why the files cannot be used, or not any more.
    failure: Option<String>,
    /// Of each copy, the number of ranks that have not ended it, and whether the others could carry it out.
    copies: HashMap<DiskCopy, (usize, bool)>,
    /// When a copy last ended, or the first of `copies` was sent.
    last_progress: Option<Instant>,
}

impl Running {
    /// Lets the ranks create their files, at the first start. `slot_bytes` are those of each worker for a KV block and a recurrent
    /// state: as it has reported them, from which the number of slots follows, and as they are.
    ///
    /// # Errors
    /// When a file cannot be created, or slots have other sizes than reported.
    pub(super) fn open_disk(&mut self, group: &mut WorkerGroup, slot_bytes: &[[[u64; 2]; 2]]) -> Result<(), End> {
        let Some((lease, engine)) = self.host_memory.as_ref().zip(self.engine.as_ref()) else { return Ok(()) };
        let config = engine.config();
        let Some(directory) = self.thread.config.kv_disk.directory.clone().filter(|_| config.num_disk_blocks > 0)
        else {
            return Ok(());
        };
        if std::mem::replace(&mut self.disk.is_open, true) {
            return Ok(());
        }
        let (num_host, num_disk) =
            ([config.num_host_blocks, config.num_host_states], [config.num_disk_blocks, config.num_disk_states]);
        if let Some([reported, found]) = slot_bytes.iter().find(|[reported, found]| reported != found) {
            let message = format!(
                "slots of host memory have {found:?} bytes, and {reported:?} were reported, so `kv_cache_disk_bytes` cannot be \
                 used with this model on this device; remove it"
            );
            return Err(WorkerLoss::new(message).into());
        }
        let layouts = lease.ranks().zip(slot_bytes).map(|(rank, &[slot_bytes, _])| DiskLayout {
            directory: directory.clone(),
            rank,
            slot_bytes,
            num_host,
            num_disk,
        });
        lease.open_disk(layouts);
        let deadline = Instant::now() + OPEN_TIMEOUT;
        while self.disk.num_opened < group.num_workers() && self.disk.failure.is_none() && Instant::now() < deadline {
            self.handle_messages(group, POLL_INTERVAL)?;
        }
        let late = || format!("the ranks have not created files in `{}` after {OPEN_TIMEOUT:?}", directory.display());
        let failure = self.disk.failure.clone().or_else(|| (self.disk.num_opened < group.num_workers()).then(late));
        if let Some(reason) = failure {
            return Err(WorkerLoss::new(format!("{reason} (`--kv-cache-disk-dir`)")).into());
        }
        let [num_blocks, num_states] = num_disk;
        let name = &self.thread.config.name;
        tracing::info!(model = %name, num_blocks, num_states, ?directory, "KV blocks that leave host memory go to the disk");
        Ok(())
    }

    /// Sends the copies that the engine wants to the ranks, unless the ranks no longer carry them out.
    pub(super) fn send_disk_copies(&mut self) {
        let is_late = |last: Instant| last.elapsed() > COPY_TIMEOUT;
        if !self.disk.copies.is_empty() && self.disk.failure.is_none() && self.disk.last_progress.is_some_and(is_late) {
            let directory = self.thread.config.kv_disk.directory.clone().unwrap_or_default();
            let reason = format!("no block was copied to or from `{}` for {COPY_TIMEOUT:?}", directory.display());
            self.note_disk(DiskEvent::Failed { reason });
        }
        let Some(lease) = &self.host_memory else { return };
        let copies = self.engine.as_mut().map(Engine::take_disk_copies).unwrap_or_default();
        if copies.is_empty() {
            return;
        }
        if self.disk.copies.is_empty() {
            self.disk.last_progress = Some(Instant::now());
        }
        let num_ranks = lease.ranks().len();
        self.disk.copies.extend(copies.iter().map(|&copy| (copy, (num_ranks, true))));
        lease.copy_disk(copies);
    }

    /// Handles what a rank says of its file.
    pub(super) fn note_disk(&mut self, event: DiskEvent) {
        match event {
            DiskEvent::Opened => self.disk.num_opened += 1,
            DiskEvent::Failed { reason } => {
                if self.disk.failure.is_none() {
                    let name = &self.thread.config.name;
                    tracing::warn!(model = %name, "the disk tier of the KV cache is off until the model is loaded again: {reason}");
                }
                self.disk.failure.get_or_insert(reason);
                self.engine.as_mut().map(Engine::close_disk);
            }
            DiskEvent::Copied { copy, is_done } => {
                self.disk.last_progress = Some(Instant::now());
                let Entry::Occupied(mut waiting) = self.disk.copies.entry(copy) else { return };
                let (num_left, is_done_by_all) = waiting.get_mut();
                *num_left -= 1;
                *is_done_by_all &= is_done;
                if *num_left == 0 {
                    let (_, is_done) = waiting.remove();
                    if let Some(engine) = &mut self.engine {
                        engine.finish_disk_copy(copy, is_done);
                    }
                }
            }
        }
    }
}
