//! What child processes do not inherit: descriptors, secrets, the OOM score.

use std::ffi::CStr;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Mutex;

use rustix::process::{Resource, getrlimit};

use crate::lock;

/// Added to the OOM score of a child, so that the kernel kills it before the process that started it.
const OOM_SCORE_STEP: i32 = 500;
const MAX_OOM_SCORE: i32 = 1000;
const OOM_SCORE: &CStr = c"/proc/self/oom_score_adj";

/// The first descriptor above standard error.
const FIRST_OTHER: libc::c_int = 3;
/// Number of descriptors that are marked one by one where `close_range` is missing; the kernel assigns the lowest first.
const MAX_MARKED: u64 = 1 << 16;

/// The child inherits only standard input, output and error, even where other descriptors lack `FD_CLOEXEC`, as those of MPI do.
pub fn close_descriptors(command: &mut Command) -> &mut Command {
    let closing = Closing::new();
    // SAFETY: `Closing::run` makes only system calls and allocates nothing.
    unsafe {
        command.pre_exec(move || {
            closing.run();
            Ok(())
        })
    }
}

/// Marks every descriptor above standard error to be closed at exec. Created before fork, run after it.
#[derive(Clone, Copy)]
pub(crate) struct Closing {
    end: libc::c_int,
}

impl Closing {
    pub(crate) fn new() -> Self {
        let most = getrlimit(Resource::Nofile).current.unwrap_or(MAX_MARKED);
        Self { end: most.min(MAX_MARKED) as libc::c_int }
    }

    /// Async-signal-safe. Descriptors stay open until exec, because the standard library needs one of its own until then.
    pub(crate) fn run(self) {
        // SAFETY: the call takes three numbers and marks descriptors; it closes none.
        let marked = unsafe {
            libc::syscall(
                libc::SYS_close_range,
                FIRST_OTHER,
                libc::c_uint::MAX,
                libc::CLOSE_RANGE_CLOEXEC as libc::c_uint,
            )
        };
        if marked == 0 {
            return;
        }
        // Before Linux 5.11, or forbidden in a container.
        mark_each(FIRST_OTHER, self.end);
    }
}

/// Async-signal-safe.
fn mark_each(first: libc::c_int, end: libc::c_int) {
    for descriptor in first..end {
        // SAFETY: sets one flag of a descriptor; one that is not open is refused.
        unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
}

/// Makes the kernel kill the child before its parent when memory runs out. Created before fork, run after it.
#[derive(Clone, Copy)]
pub(crate) struct OomScore {
    digits: [u8; 8],
    len: usize,
}

impl OomScore {
    /// A score above that of this process, which may have been set for its service or container.
    pub(crate) fn new() -> Self {
        let own = std::fs::read_to_string("/proc/self/oom_score_adj").ok();
        let own = own.and_then(|text| text.trim().parse::<i32>().ok()).unwrap_or(0);
        let text = own.saturating_add(OOM_SCORE_STEP).min(MAX_OOM_SCORE).to_string();
        let mut digits = [0; 8];
        let len = text.len().min(digits.len());
        digits[..len].copy_from_slice(&text.as_bytes()[..len]);
        Self { digits, len }
    }

    /// Async-signal-safe. Without `/proc` the child keeps the score of its parent.
    pub(crate) fn run(self) {
        // SAFETY: the path ends with a zero byte, and `len` bytes of `digits` are there to be written.
        unsafe {
            let file = libc::open(OOM_SCORE.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
            if file >= 0 {
                libc::write(file, self.digits.as_ptr().cast(), self.len);
                libc::close(file);
            }
        }
    }
}

/// Whether an environment variable has the name of a secret: a key, a token, a password, credentials of a cloud.
pub fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    ["TRIREME_API_KEYS", "AWS_", "AZURE_"].iter().any(|start| name.starts_with(start))
        || ["_TOKEN", "_PASSWORD", "_CREDENTIALS", "_API_KEY", "_API_KEYS"].iter().any(|end| name.ends_with(end))
        || name.contains("_SECRET")
        || SECRETS.contains(&&*name)
}

/// Names of secrets that match no pattern.
const SECRETS: [&str; 7] =
    ["MYSQL_PWD", "NOTIFY_SOCKET", "PGPASSWORD", "REDISCLI_AUTH", "SLURM_JWT", "SSHPASS", "SSH_AUTH_SOCK"];

/// Variables that hold secrets under other names.
static FURTHER_SECRETS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Adds variables that [`withhold_secrets`] removes beside those that [`is_secret`] matches.
pub fn withhold_also(names: impl IntoIterator<Item = String>) {
    lock(&FURTHER_SECRETS).extend(names);
}

/// Variables with which the launcher configures a rank; they are not for the rank's children.
const OF_THE_RANK: [&str; 4] = ["TRIREME_CONTROL", "TRIREME_CAUSE_FILE", "TRIREME_HAND_OVER", "TRIREME_TAKE_OVER"];

/// The child does not inherit the variables of the launcher for its rank, nor secrets, except those named in `passed`.
pub fn withhold_secrets<'a>(command: &'a mut Command, passed: &[String]) -> &'a mut Command {
    for name in OF_THE_RANK {
        command.env_remove(name);
    }
    let further = lock(&FURTHER_SECRETS);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        let is_further = further.iter().any(|further| *further == text);
        if (is_secret(&text) || is_further) && !passed.iter().any(|passed| *passed == text) {
            command.env_remove(&name);
        }
    }
    command
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::AsRawFd;
    use std::path::PathBuf;

    use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

    use super::*;
    use crate::bind_to_parent;

    /// A file that children inherit, unlike those of the standard library, and what its descriptor leads to.
    fn inheritable() -> (fs::File, PathBuf) {
        let file = fs::File::open("/proc/self/stat").unwrap();
        fcntl_setfd(&file, FdFlags::empty()).unwrap();
        (file, format!("/proc/{}/stat", std::process::id()).into())
    }

    #[test]
    fn a_child_inherits_no_descriptor_but_the_standard_ones() {
        let (_file, path) = inheritable();
        let children = [
            (Command::new("sleep").arg("60").spawn().unwrap(), true),
            (close_descriptors(Command::new("sleep").arg("60")).spawn().unwrap(), false),
            (bind_to_parent(Command::new("sleep").arg("60"), libc::SIGKILL).spawn().unwrap(), false),
        ];
        for (mut child, inherits) in children {
            let listed = fs::read_dir(format!("/proc/{}/fd", child.id())).unwrap().flatten();
            let found: Vec<PathBuf> = listed.filter_map(|entry| fs::read_link(entry.path()).ok()).collect();
            child.kill().unwrap();
            child.wait().unwrap();
            assert_eq!(found.contains(&path), inherits, "{found:?}");
        }
    }

    #[test]
    fn descriptors_are_marked_one_by_one_where_the_kernel_marks_no_range() {
        let file = fs::File::open("/proc/self/status").unwrap();
        fcntl_setfd(&file, FdFlags::empty()).unwrap();
        mark_each(file.as_raw_fd(), file.as_raw_fd() + 1);
        assert_eq!(fcntl_getfd(&file).unwrap(), FdFlags::CLOEXEC);
        assert!(Closing::new().end > FIRST_OTHER);
    }

    #[test]
    fn a_bound_child_is_killed_first_when_memory_runs_out() {
        let score = |pid: &str| -> i32 {
            fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap().trim().parse().unwrap()
        };
        let own = score("self");
        let mut child = bind_to_parent(Command::new("sleep").arg("60"), libc::SIGKILL).spawn().unwrap();
        let its = score(&child.id().to_string());
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(its, (own + OOM_SCORE_STEP).min(MAX_OOM_SCORE));
        assert_eq!(score("self"), own);
    }

    #[test]
    fn a_child_gets_no_variable_that_holds_keys_whatever_its_name() {
        // Cargo sets these variables for its tests.
        let variables = |passed: &[String]| {
            let output = withhold_secrets(&mut Command::new("env"), passed).output().unwrap();
            String::from_utf8(output.stdout).unwrap()
        };
        assert!(variables(&[]).contains("CARGO_PKG_DESCRIPTION="));
        withhold_also(["CARGO_PKG_DESCRIPTION".to_owned()]);
        let left = variables(&[]);
        assert!(!left.contains("CARGO_PKG_DESCRIPTION=") && left.contains("CARGO_PKG_NAME="), "{left}");
        assert!(variables(&["CARGO_PKG_DESCRIPTION".to_owned()]).contains("CARGO_PKG_DESCRIPTION="));
    }

    #[test]
    fn secrets_are_known_by_their_names() {
        let secrets = [
            "TRIREME_API_KEYS",
            "TRIREME_API_KEYS_2",
            "DB_PASSWORD",
            "HF_TOKEN",
            "hf_token",
            "CLIENT_SECRET",
            "MY_SECRET_KEY",
            "AWS_ACCESS_KEY_ID",
            "AZURE_TENANT_ID",
            "GOOGLE_APPLICATION_CREDENTIALS",
        ];
        for name in secrets {
            assert!(is_secret(name), "{name}");
        }
        for name in ["PATH", "HOME", "CUDA_VISIBLE_DEVICES", "TOKENIZERS_PARALLELISM", "TRIREME_API", "NCCL_DEBUG"] {
            assert!(!is_secret(name), "{name}");
        }
    }
}
