use std::fs;
use std::io;

use rustix::process::{Pid, getpid};

/// Sets the command name of this process (`ps -o comm`, `pgrep -x`), cut to 15 bytes.
///
/// Threads started later inherit it.
pub fn set_process_name(name: &str) -> io::Result<()> {
    // Unlike prctl, this sets the name of the process from any thread.
    fs::write("/proc/self/comm", &name.as_bytes()[..name.len().min(15)])
}

/// Replaces the command line that `ps -f` and `pgrep -f` show, for example by `trireme: worker 3 llama`.
///
/// The title overwrites the arguments of this process and is cut at their length.
/// Read `std::env::args` before; afterwards it returns parts of the title.
pub fn set_process_title(title: &str) -> io::Result<()> {
    let (start, end) = argument_range(getpid())?;
    let room = usize::try_from(end - start).map_err(io::Error::other)?;
    // The last byte stays NUL, or the kernel would read the environment as part of the title.
    let kept = title.len().min(room - 1);
    let mut bytes = vec![0; room];
    bytes[..kept].copy_from_slice(&title.as_bytes()[..kept]);
    // Written by the kernel, not through a pointer: the memory belongs to the C start-up code, which no longer reads it.
    let memory = fs::OpenOptions::new().write(true).open("/proc/self/mem")?;
    std::os::unix::fs::FileExt::write_all_at(&memory, &bytes, start)
}

/// The addresses of this process's arguments: fields 48 and 49 of proc(5).
fn argument_range(pid: Pid) -> io::Result<(u64, u64)> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()))?;
    let fields = stat.rfind(')').and_then(|at| stat.get(at + 1..)).unwrap_or("");
    let mut fields = fields.split_ascii_whitespace().skip(45);
    let mut next = || fields.next().and_then(|field| field.parse::<u64>().ok());
    match (next(), next()) {
        (Some(start), Some(end)) if start > 0 && end > start => Ok((start, end)),
        _ => Err(io::Error::new(io::ErrorKind::Unsupported, "/proc does not contain the address of the arguments")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_and_title_show_in_proc() {
        set_process_title("trireme: worker 3 llama").unwrap();
        let shown = fs::read_to_string("/proc/self/cmdline").unwrap();
        assert_eq!(shown.trim_end_matches('\0'), "trireme: worker 3 llama");

        set_process_name("trireme-launch-and-more").unwrap();
        assert_eq!(fs::read_to_string("/proc/self/comm").unwrap(), "trireme-launch-\n");
    }
}
