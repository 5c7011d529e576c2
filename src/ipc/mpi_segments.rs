//! Shared memory of Open MPI that killed worlds leave.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::prefix::SHM_DIR;
use crate::sees_all_processes;

/// Removes segments of Open MPI between ranks of this node, user and host name that no process has mapped. A world of several nodes that is
/// killed leaves them. Only a process that sees all others knows which are unused; in a container they stay.
pub fn sweep_mpi_segments() {
    if !sees_all_processes() {
        return;
    }
    let names = ["vader", "sm"].map(segment_names);
    let uid = rustix::process::getuid().as_raw();
    let is_segment = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        names.iter().any(|start| name.starts_with(start)) && fs::metadata(path).is_ok_and(|meta| meta.uid() == uid)
    };
    let entries = fs::read_dir(SHM_DIR).into_iter().flatten().flatten();
    let segments: Vec<_> = entries.map(|entry| entry.path()).filter(is_segment).collect();
    if segments.is_empty() {
        return;
    }
    let mapped = mapped_files(Path::new(SHM_DIR));
    for segment in segments.iter().filter(|segment| !mapped.contains(*segment)) {
        // It does not matter if it is gone already.
        let _ = fs::remove_file(segment);
    }
}

/// How the names of this user's segments begin.
fn segment_names(transport: &str) -> String {
    let (host, uid) = (rustix::system::uname(), rustix::process::getuid().as_raw());
    format!("{transport}_segment.{}.{uid}.", host.nodename().to_string_lossy())
}

/// The files below `dir` that any visible process has mapped.
fn mapped_files(dir: &Path) -> HashSet<PathBuf> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let maps = entries.filter_map(|entry| fs::read_to_string(entry.path().join("maps")).ok());
    let files = |maps: String| -> Vec<PathBuf> {
        let paths = maps.lines().filter_map(|line| line.find('/').map(|at| PathBuf::from(&line[at..])));
        paths.filter(|path| path.starts_with(dir)).collect()
    };
    maps.flat_map(files).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_segments_stay_and_unused_ones_are_removed() {
        let start = format!("{}test{}", segment_names("vader"), std::process::id());
        let (prefix, name) = (start.parse().unwrap(), ".0".to_owned());
        let made = crate::Region::create(&prefix, &name, 64).unwrap();
        // `create` maps the file before it has its name, so `/proc/<pid>/maps` shows the name only after `open`.
        let _used = crate::Region::open(&prefix, &name).unwrap();
        let unused = PathBuf::from(format!("{SHM_DIR}/{start}.1"));
        fs::write(&unused, "").unwrap();

        sweep_mpi_segments();
        assert!(made.path().exists() && unused.exists() != sees_all_processes());
        let _ = fs::remove_file(unused);
    }
}
