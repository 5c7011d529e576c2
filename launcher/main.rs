//! Binary `launch`: see the library.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    ipc::end_with_the_reader();
    launcher::main(std::env::args_os().collect())
}
