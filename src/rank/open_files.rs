//! The limit of open files of this process, and the limits of connections and regions that follow from it.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Least number of files reserved for models, workers, logs and everything else but connections.
const LEAST_RESERVED: u64 = 256;
/// Number of ports with many connections: HTTP and gRPC.
const NUM_PORTS: u64 = 2;

/// Raises the limit of open files to the hard limit and returns the new limit. Many systems start processes with 1024, too few for
/// many connections.
pub(crate) fn raise_limit() -> u64 {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let is_raised = current != maximum && setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).is_ok();
    let allowed = if is_raised { maximum } else { current };
    match (is_raised, current) {
        (true, Some(before)) => tracing::debug!("may open {} files, raised from {before}", words(allowed)),
        _ => tracing::debug!("may open {} files", words(allowed)),
    }
    allowed.unwrap_or(u64::MAX)
}

fn words(limit: Option<u64>) -> String {
    limit.map_or_else(|| "any number of".to_owned(), |limit| limit.to_string())
}

/// Most connections of a port: `requested`, or fewer if only `max_files` may be open. A quarter of the files is reserved.
pub(crate) fn max_connections(requested: u32, max_files: u64) -> u32 {
    let reserved = (max_files / 4).max(LEAST_RESERVED.min(max_files / 2));
    let room = (max_files - reserved) / NUM_PORTS;
    u32::try_from(room).unwrap_or(u32::MAX).clamp(1, requested)
}

/// Most regions of clients' shared memory: `requested`, or fewer, so that they take at most half of the reserved files.
pub(crate) fn max_regions(requested: usize, max_files: u64) -> usize {
    usize::try_from(max_files / 8).unwrap_or(usize::MAX).clamp(1, requested)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_a_reserve_of_files() {
        for (max_files, expected) in [(1024, 384), (1 << 20, 16_384), (u64::MAX, 16_384), (300, 75), (1, 1)] {
            assert_eq!(max_connections(16_384, max_files), expected, "{max_files} files");
        }
        assert_eq!((max_regions(4096, 1024), max_regions(4096, 1 << 20)), (128, 4096));
    }

    #[test]
    fn the_limit_is_raised_to_the_hard_limit() {
        let maximum = getrlimit(Resource::Nofile).maximum;
        assert_eq!(raise_limit(), maximum.unwrap_or(u64::MAX));
        assert_eq!(getrlimit(Resource::Nofile).current, maximum);
    }
}
