use std::fmt::Write as _;
use std::fs;

/// The state of each thread of `pid` as the kernel reports it: name, state, system call, kernel function.
///
/// One line for each thread. It also works for a process that is stopped or stuck.
pub fn thread_states(pid: u32) -> String {
    let title = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let title = String::from_utf8_lossy(&title).replace('\0', " ");
    let mut out = format!("process {pid} ({}):\n", title.trim_end());
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    for task in tasks {
        let read = |name: &str| fs::read_to_string(task.path().join(name)).unwrap_or_default().trim().to_owned();
        let status = read("status");
        let state = status.lines().find_map(|line| line.strip_prefix("State:")).unwrap_or("?").trim().to_owned();
        let call = read("syscall");
        let call = match call.split_ascii_whitespace().next() {
            None | Some("running") => "in no system call".to_owned(),
            Some(number) => format!("in system call {number}"),
        };
        let wchan = read("wchan");
        let place = if matches!(wchan.as_str(), "" | "0") { String::new() } else { format!(", waits in {wchan}") };
        let tid = task.file_name().to_string_lossy().into_owned();
        let _ = writeln!(out, "  thread {tid} {}: {state}, {call}{place}", read("comm"));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_waits_says_where() {
        let (done, wait) = std::sync::mpsc::channel::<()>();
        let sleeper = std::thread::Builder::new().name("a-sleeper".to_owned());
        let handle = sleeper.spawn(move || wait.recv().unwrap_err()).unwrap();
        let start = std::time::Instant::now();
        let says_so = || {
            let states = thread_states(std::process::id());
            states.lines().any(|line| line.contains("a-sleeper: S (sleeping), in system call"))
        };
        while !says_so() {
            assert!(start.elapsed().as_secs() < 20, "{}", thread_states(std::process::id()));
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        drop(done);
        handle.join().unwrap();
    }
}
