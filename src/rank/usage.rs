//! The response to a wrong command line: the error, and exit code 1 as tritonserver's.

use std::process::ExitCode;

use clap::error::{ContextKind, ErrorKind};

/// Prints the error. Requested help is no error.
pub fn usage_error(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        let _ = error.print(); // The reader may have closed the pipe.
        return ExitCode::SUCCESS;
    }
    eprint!("{}", words(error));
    ExitCode::FAILURE
}

fn words(error: &clap::Error) -> String {
    let rendered = error.render().to_string();
    let first = match (error.kind(), error.get(ContextKind::InvalidArg)) {
        (ErrorKind::UnknownArgument, Some(option)) => {
            // clap's own hint, such as a similar name, follows.
            let hint = rendered.lines().find(|line| line.trim_start().starts_with("tip:"));
            let hint = hint.map(|line| format!("{}\n", line.trim())).unwrap_or_default();
            format!("trireme rank: error: unrecognized option '{option}'\n{hint}")
        }
        _ => rendered.split("\nUsage:").next().unwrap_or_default().trim_end().to_owned() + "\n",
    };
    // The list of all options is longer than the part of a log that people are shown.
    format!("{first}`trireme rank --help` lists the options\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_option_is_named_with_where_the_options_are() {
        let error = crate::args::command()
            .try_get_matches_from(["rank", "--model-repository=/m", "--no-such-flag=1"])
            .unwrap_err();
        let words = words(&error);
        assert!(words.starts_with("trireme rank: error: unrecognized option '--no-such-flag'\n"), "{words}");
        assert!(words.ends_with("`trireme rank --help` lists the options\n"), "{words}");
    }

    #[test]
    fn a_wrong_value_is_named_with_where_the_options_are() {
        let error = crate::args::command()
            .try_get_matches_from(["rank", "--model-repository=/m", "--http-port=x"])
            .unwrap_err();
        let words = words(&error);
        assert!(words.starts_with("error: invalid value 'x' for '--http-port"), "{words}");
        assert!(words.ends_with("`trireme rank --help` lists the options\n"), "{words}");
    }
}
