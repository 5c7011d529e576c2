//! Panics: one line for each, and the end of the process after a panic of an essential thread.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::thread::{self, JoinHandle};

/// The exit status that a shell reports for a process that SIGABRT ended.
const EXIT_CODE: i32 = 128 + libc::SIGABRT;
/// Longest message of a panic in bytes; the rest is cut.
const MAX_WORDS: usize = 1 << 10;

type Ending = Box<dyn Fn(&str) + Send + Sync>;

/// Ends this process for the given reason.
static ENDING: OnceLock<Ending> = OnceLock::new();

/// Sets `end` as the function that ends this process when an [`essential_thread`] panics. Without it, or if it returns, the process
/// exits with status 134. Only the first call has an effect.
pub fn on_essential_panic(end: impl Fn(&str) + Send + Sync + 'static) {
    let _ = ENDING.set(Box::new(end));
}

/// Starts a thread without which this process would hang or give wrong results. A panic in it ends the process, with the reason.
///
/// # Errors
/// When the thread cannot be started.
pub fn essential_thread(name: impl Into<String>, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    let name = name.into();
    let thread_name = name.clone();
    thread::Builder::new().name(name).spawn(move || {
        // The process ends, so no inconsistent state of `body` is used again.
        if let Err(payload) = catch_unwind(AssertUnwindSafe(body)) {
            let reason = format!("the thread `{thread_name}` panicked: {}", panic_words(&*payload));
            match ENDING.get() {
                Some(end) => end(&reason),
                None => eprintln!("{reason}"),
            }
            std::process::exit(EXIT_CODE);
        }
    })
}

/// The message of a panic on one line: control characters are escaped, and a long message is cut.
pub fn panic_words(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str).or(payload.downcast_ref::<&str>().copied());
    let text = text.unwrap_or("without words");
    let mut words = String::new();
    for character in text.chars() {
        if words.len() >= MAX_WORDS {
            words.push('…');
            break;
        }
        match character.is_control()
            || matches!(character, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
        {
            true => words.extend(character.escape_default()),
            false => words.push(character),
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Output};

    use super::*;

    #[test]
    fn the_words_of_a_panic_are_one_line_and_not_too_long() {
        assert_eq!(panic_words(&"a\nE ends\u{85}\u{202e} ü"), "a\\nE ends\\u{85}\\u{202e} ü");
        assert_eq!(panic_words(&"x".repeat(5000)), "x".repeat(MAX_WORDS) + "…");
        assert_eq!(panic_words(&7), "without words");
    }

    /// Runs in the process that the test below starts.
    #[test]
    fn an_essential_thread_panics() {
        let Ok(part) = std::env::var("PANICS_PART") else { return };
        if part == "hook" {
            on_essential_panic(|reason| eprintln!("hook: {reason}"));
        }
        let _ = essential_thread("pump", || panic!("first\nsecond")).unwrap().join();
        unreachable!("the process has ended");
    }

    fn run(part: &str) -> Output {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["panics::tests::an_essential_thread_panics", "--exact", "--nocapture"]);
        command.env("PANICS_PART", part).output().unwrap()
    }

    #[test]
    fn a_panic_of_an_essential_thread_ends_the_process_with_a_reason() {
        for (part, expected) in [("no hook", "\nthe thread `pump`"), ("hook", "\nhook: the thread `pump`")] {
            let output = run(part);
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(EXIT_CODE), "{output:?}");
            assert!(stderr.contains(&format!("{expected} panicked: first\\nsecond\n")), "{stderr}");
        }
    }
}
