//! Stacks of the threads of a process. Each thread writes its own in a signal handler, after a fault or on request.
//!
//! A handler may neither allocate nor wait for a lock, so it writes only addresses, one line for each thread in one system call.
//! The reader of the line resolves them to names ([`with_names`]), which needs the same program.

use std::ffi::{CStr, c_int, c_void};
use std::fs;
use std::io::{self, Write as _};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The start of each line.
pub const STACK_LINE: &str = "stack of thread ";

/// Largest number of frames that are written.
const MAX_FRAMES: usize = 48;
/// A write of at most this size to a pipe is atomic (pipe(7)).
const LINE_BYTES: usize = 4096;
/// Address of this program in memory; offsets from it are the same in every process of the program.
static PROGRAM_BASE: AtomicUsize = AtomicUsize::new(0);

const FAULTS: [c_int; 5] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGABRT];
const ON_REQUEST: c_int = libc::SIGUSR2;

/// Installs the handlers: a thread that faults writes its stack to standard error before the fault ends the process, and every
/// thread writes its stack after [`ask_for_stacks`].
pub fn write_stacks_on_faults() -> io::Result<()> {
    PROGRAM_BASE.store(program_base(), Ordering::Relaxed);
    // The first use of the unwinder may allocate, which no handler may.
    std::hint::black_box(frames());
    for signal in FAULTS {
        // One time: the fault occurs again when the handler returns, and then ends the process as usual.
        set_handler(signal, libc::SA_RESETHAND)?;
    }
    set_handler(ON_REQUEST, libc::SA_RESTART)
}

/// Requests the stack of every thread of `pid`, which must have called [`write_stacks_on_faults`]; returns the number of threads.
pub fn ask_for_stacks(pid: u32) -> usize {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let tids = tasks.filter_map(|task| task.file_name().to_str()?.parse::<c_int>().ok());
    // SAFETY: the call takes three numbers; a thread that has ended is an error and not counted.
    tids.filter(|&tid| unsafe { libc::syscall(libc::SYS_tgkill, pid as c_int, tid, ON_REQUEST) } == 0).count()
}

/// Resolves the addresses of a line that another process of this program wrote to function names, one frame a line.
pub fn with_names(line: &str) -> String {
    let Some((head, frames)) = line.split_once(": ") else { return line.to_owned() };
    let base = program_base();
    let name = |frame: &str| match frame.strip_prefix("trireme+0x").and_then(|hex| usize::from_str_radix(hex, 16).ok())
    {
        // The address is a return address; the byte before it belongs to the call.
        Some(offset) => format!("    {} ({frame})", name_of(base + offset - 1)),
        None => format!("    {frame}"),
    };
    std::iter::once(format!("{head}:")).chain(frames.split(' ').map(name)).collect::<Vec<_>>().join("\n")
}

fn name_of(address: usize) -> String {
    let mut name = None;
    backtrace::resolve(address as *mut c_void, |symbol| {
        if let (None, Some(found)) = (&name, symbol.name()) {
            let place = symbol.filename().and_then(|path| path.file_name()).zip(symbol.lineno());
            let place = place.map(|(file, line)| format!(" at {}:{line}", file.to_string_lossy()));
            name = Some(format!("{found:#}{}", place.unwrap_or_default()));
        }
    });
    name.unwrap_or_else(|| "?".to_owned())
}

fn set_handler(signal: c_int, flags: c_int) -> io::Result<()> {
    // SAFETY: all zeroes are a valid `sigaction`; the handler has the signature that SA_SIGINFO requires and makes only
    // async-signal-safe calls (see `handle`). The old action is not returned.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handle as *const () as usize;
        // On the thread's own stack: std's alternate stack is too small for the unwinder. So no stack is written after a stack
        // overflow.
        action.sa_flags = libc::SA_SIGINFO | flags;
        libc::sigaction(signal, &action, std::ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Formats into an array, unwinds with tables that are already mapped, and writes once. It allocates nothing and takes no lock.
extern "C" fn handle(signal: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: errno belongs to this thread and is restored below for the interrupted code.
    let errno = unsafe { *libc::__errno_location() };
    let mut line = [0; LINE_BYTES];
    let mut rest = &mut line[..LINE_BYTES - 1];
    let (name, tid) = this_thread();
    let name = CStr::from_bytes_until_nul(&name).unwrap_or_default().to_str().unwrap_or("?");
    let _ = write!(rest, "{STACK_LINE}{tid} {name}");
    let _ = match signal {
        ON_REQUEST => Ok(()),
        fault => write!(rest, ", ended by signal {fault}"),
    };
    let _ = rest.write_all(b":");
    let (addresses, count) = frames();
    for address in &addresses[..count] {
        if write_frame(&mut rest, *address).is_err() {
            break;
        }
    }
    let len = LINE_BYTES - 1 - rest.len();
    line[len] = b'\n';
    // SAFETY: the buffer holds `len + 1` bytes. A failed write is ignored.
    unsafe {
        libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), len + 1);
        *libc::__errno_location() = errno;
    }
    // SAFETY: the kernel hands a valid `siginfo_t` to a handler set with SA_SIGINFO.
    if signal != ON_REQUEST && unsafe { (*info).si_code } <= 0 {
        // Sent by a process, so that it would not occur again by itself.
        // SAFETY: raising a signal whose action is the default again.
        unsafe { libc::raise(signal) };
    }
}

/// Name and thread id of the calling thread.
fn this_thread() -> ([u8; 17], i64) {
    let mut name = [0; 17];
    // SAFETY: PR_GET_NAME writes at most 16 bytes.
    let tid = unsafe {
        libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr());
        libc::syscall(libc::SYS_gettid)
    };
    (name, tid)
}

/// Return addresses of the calling thread, innermost first.
fn frames() -> ([usize; MAX_FRAMES], usize) {
    let (mut addresses, mut count) = ([0; MAX_FRAMES], 0);
    // SAFETY: unsynchronized calls must not resolve symbols in two threads at once; none is resolved here.
    unsafe {
        backtrace::trace_unsynchronized(|frame| {
            addresses[count] = frame.ip() as usize;
            count += 1;
            count < MAX_FRAMES
        });
    }
    (addresses, count)
}

/// ` trireme+0x1234`, ` libc.so.6+0x99`, or the bare address.
fn write_frame(out: &mut &mut [u8], address: usize) -> io::Result<()> {
    let Some((file, base)) = module_of(address) else { return write!(out, " {address:#x}") };
    if base == PROGRAM_BASE.load(Ordering::Relaxed) {
        // Not by the name of its file, which the process title overwrites.
        return write!(out, " trireme+{:#x}", address - base);
    }
    let name = file.to_bytes().rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    write!(out, " {}+{:#x}", std::str::from_utf8(name).unwrap_or("?"), address - base)
}

/// The file that is mapped at `address`, and its base address.
fn module_of(address: usize) -> Option<(&'static CStr, usize)> {
    // SAFETY: all zeroes are a valid `Dl_info`; `dladdr` only reads the loader's list of files, and the name it points
    // to lives as long as the file stays loaded. This program unloads no file.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        let found = libc::dladdr(address as *const c_void, &mut info) != 0 && !info.dli_fname.is_null();
        found.then(|| (CStr::from_ptr(info.dli_fname), info.dli_fbase as usize))
    }
}

fn program_base() -> usize {
    module_of(program_base as *const () as usize).map_or(0, |(_, base)| base)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Output, Stdio};

    use super::*;

    /// Not inlined, so that its name appears in a stack.
    #[inline(never)]
    fn a_function_that_waits() {
        std::thread::sleep(std::time::Duration::from_secs(60));
        std::hint::black_box(());
    }

    /// A process of this test program with the role `part`.
    fn child(part: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["stacks::tests::the_process_with_a_role", "--exact", "--nocapture"]);
        command.env("STACKS_PART", part).stdout(Stdio::null()).stderr(Stdio::piped());
        command
    }

    fn named_stacks(output: &Output) -> String {
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        text.lines().filter(|line| line.starts_with(STACK_LINE)).map(with_names).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn the_process_with_a_role() {
        let Ok(part) = std::env::var("STACKS_PART") else { return };
        write_stacks_on_faults().unwrap();
        let waiting = std::thread::Builder::new().name("waiting".to_owned()).spawn(a_function_that_waits).unwrap();
        if part == "asked" {
            let start = std::time::Instant::now();
            while !crate::thread_states(std::process::id()).contains("waiting: S") {
                assert!(start.elapsed().as_secs() < 20);
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            assert!(ask_for_stacks(std::process::id()) >= 2);
            std::thread::sleep(std::time::Duration::from_millis(200));
            std::process::exit(0);
        }
        // SAFETY: none: a null pointer is read to cause a fault, in a process of its own.
        unsafe { std::ptr::null::<u8>().read_volatile() };
        waiting.join().unwrap();
    }

    #[test]
    fn every_thread_writes_its_stack_on_request() {
        let output = child("asked").output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let stacks = named_stacks(&output);
        assert!(stacks.contains("a_function_that_waits"), "{stacks}");
        assert!(stacks.contains(" waiting:"), "{stacks}");
    }

    #[test]
    fn a_fault_writes_its_stack_and_still_ends_the_process() {
        let output = child("fault").output().unwrap();
        assert_eq!(output.status.signal(), Some(libc::SIGSEGV), "{output:?}");
        let stacks = named_stacks(&output);
        assert!(stacks.contains("ended by signal 11") && stacks.contains("the_process_with_a_role"), "{stacks}");
    }
}
