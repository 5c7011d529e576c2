//! The cores that threads run on.

use std::io;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::cpu::Pool;

/// The numbers of the cores that this thread may run on; empty if the system does not report them.
pub fn allowed_cores() -> Vec<usize> {
    let set = sched_getaffinity(None).unwrap_or_default();
    (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect()
}

impl Pool {
    /// Pins each thread to its own core, `cores[i]` for thread `i`. The first is the caller's thread; threads that it
    /// starts later inherit its core.
    ///
    /// # Errors
    /// Returns an error if the system refuses a core; other threads may be pinned already.
    ///
    /// # Panics
    /// Panics if there are fewer cores than threads.
    pub fn pin(&mut self, cores: &[usize]) -> io::Result<()> {
        assert!(cores.len() >= self.threads(), "each thread has a core");
        let errors = self.map_threads(|thread| {
            let mut set = CpuSet::new();
            set.set(cores[thread]);
            sched_setaffinity(None, &set).err()
        });
        errors.into_iter().flatten().next().map_or(Ok(()), |error| Err(error.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thread_of_a_pinned_pool_has_its_core() {
        let cores = allowed_cores();
        let mut pool = Pool::new(cores.len());
        pool.pin(&cores).unwrap();
        let found = pool.map_threads(|_| allowed_cores());
        assert!(found.iter().map(|cores| cores[..].to_vec()).eq(cores.iter().map(|&core| vec![core])), "{found:?}");
    }
}
