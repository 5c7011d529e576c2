//! The free memory of the host, as far as this process may use it.

use std::fs;
use std::path::{Path, PathBuf};

/// Bytes of memory that the system can give to this process without swapping, page cache included: `MemAvailable` of `/proc/meminfo`,
/// or less where a control group of the process, such as that of a container or of a Slurm job, has a limit; 0 if unknown.
pub fn available_memory() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let free = field(&text, "MemAvailable:").unwrap_or(0) * 1024;
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    group_room(&groups, Path::new("/sys/fs/cgroup")).map_or(free, |room| room.min(free))
}

/// The number behind a name at the beginning of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Names of the files of a version of control groups.
struct Names {
    limit: &'static str,
    usage: &'static str,
    /// Lines of `memory.stat`: pages of files, which the system takes back before the limit is reached.
    cache: [&'static str; 2],
}

const VERSION_1: Names = Names {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    cache: ["total_inactive_file ", "total_active_file "],
};
const VERSION_2: Names =
    Names { limit: "memory.max", usage: "memory.current", cache: ["inactive_file ", "active_file "] };

/// The least that a control group of a process and those above it leave, by the lines of its `/proc/PID/cgroup`, where `root` is
/// `/sys/fs/cgroup`; `None` without a limit.
fn group_room(groups: &str, root: &Path) -> Option<u64> {
    let rooms = groups.lines().filter_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let (root, names) = match controllers {
            "" => (root.to_owned(), VERSION_2),
            _ if controllers.split(',').any(|name| name == "memory") => (root.join("memory"), VERSION_1),
            _ => return None,
        };
        // In a container the root may be the group itself, and the path that of the host.
        let below = PathBuf::from(path.trim_start_matches('/'));
        below.ancestors().filter_map(|group| room(&root.join(group), &names)).min()
    });
    rooms.min()
}

/// What one group leaves.
fn room(group: &Path, names: &Names) -> Option<u64> {
    let number = |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
    let (limit, usage) = (number(names.limit)?, number(names.usage)?);
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let cache: u64 = names.cache.iter().filter_map(|name| field(&stat, name)).sum();
    Some(limit.saturating_sub(usage.saturating_sub(cache)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, files: &[(&str, &str)]) {
        fs::create_dir_all(folder).unwrap();
        files.iter().for_each(|(name, text)| fs::write(folder.join(name), text).unwrap());
    }

    #[test]
    fn the_smallest_room_of_a_group_and_those_above_it_counts() {
        let root = tempfile::tempdir().unwrap();
        let (job, step) = (root.path().join("job"), root.path().join("job/step"));
        write(
            &job,
            &[
                ("memory.max", "1000\n"),
                ("memory.current", "700\n"),
                ("memory.stat", "anon 1\ninactive_file 150\nactive_file 50\n"),
            ],
        );
        write(&step, &[("memory.max", "max\n"), ("memory.current", "600\n")]);
        let room = |groups: &str| group_room(groups, root.path());
        assert_eq!(room("0::/job/step\n"), Some(500));
        fs::write(step.join("memory.max"), "900\n").unwrap();
        assert_eq!(room("0::/job/step\n"), Some(300));
        assert_eq!(room("0::/\n"), None);
        // A container whose root is its own group.
        write(root.path(), &[("memory.max", "800\n"), ("memory.current", "799\n")]);
        assert_eq!(room("0::/docker/1234\n"), Some(1));
    }

    #[test]
    fn groups_of_version_1_count() {
        let root = tempfile::tempdir().unwrap();
        let stat = "inactive_file 5\ntotal_inactive_file 20\n";
        let files = [("memory.limit_in_bytes", "100\n"), ("memory.usage_in_bytes", "90\n"), ("memory.stat", stat)];
        write(&root.path().join("memory/a"), &files);
        assert_eq!(group_room("5:devices:/a\n4:cpu,memory:/a/b\n0::/\n", root.path()), Some(30));
    }

    #[test]
    fn this_process_has_memory() {
        assert!(available_memory() > 0);
    }
}
