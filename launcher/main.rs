//! Binary `launch`: see the library.
#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::process::ExitCode;

use launcher::flags::Flags;

fn main() -> ExitCode {
    ipc::end_with_the_reader();
    let line: Vec<OsString> = std::env::args_os().collect();
    let flags = Flags::parse_from_line(line.iter().cloned()).unwrap_or_else(|error| error.exit());
    match launcher::run(&flags, &line[1..]) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("launch: error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
