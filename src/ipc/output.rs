//! Standard output whose reader has closed the pipe.

use std::panic;
use std::process;

/// The exit status that a shell reports for a process that SIGPIPE ended.
const SIGPIPE_STATUS: i32 = 128 + libc::SIGPIPE;

/// Makes this process exit with status 141, without a message, when it prints to a pipe whose reader has closed it: `… | head`.
///
/// For commands that print and end. SIGPIPE stays ignored, because sockets could raise it, too.
pub fn end_with_the_reader() {
    let others = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        // The message of the standard library's `print!`.
        let words = info.payload().downcast_ref::<String>().map_or("", String::as_str);
        if words.starts_with("failed printing to stdout") && words.contains("Broken pipe") {
            process::exit(SIGPIPE_STATUS);
        }
        others(info);
    }));
}
