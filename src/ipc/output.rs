//! Standard output that nobody reads any more.

use std::panic;
use std::process;

/// What the shell reports of a process that SIGPIPE ended.
const SIGPIPE_STATUS: i32 = 128 + libc::SIGPIPE;

/// From now on this process ends in silence, with status 141, when it prints to a pipe whose reader has left: `… | head`.
///
/// For commands that print and end. SIGPIPE itself stays ignored, since sockets of a process that gets it could end it, too.
pub fn end_with_the_reader() {
    let others = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        // The words of the standard library's `print!`.
        let words = info.payload().downcast_ref::<String>().map_or("", String::as_str);
        if words.starts_with("failed printing to stdout") && words.contains("Broken pipe") {
            process::exit(SIGPIPE_STATUS);
        }
        others(info);
    }));
}
