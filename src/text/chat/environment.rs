//! The Jinja of chat templates: settings, filters, functions and limits.

use std::sync::LazyLock;

use jiff::ZonedDateTime;
use jiff::fmt::strtime::BrokenDownTime;
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind};

use super::{filters, json, methods, python};

/// Longest format of `strftime_now`.
const MAX_TIME_FORMAT: usize = 256;

/// The settings that all templates share, without a template.
pub(super) static JINJA: LazyLock<Environment<'static>> = LazyLock::new(|| {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("the delimiters are the usual ones"));
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_formatter(python::print);
    environment.set_unknown_method_callback(methods::call);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter("tojson", json::to_json);
    filters::add(&mut environment);
    environment
});

fn raise_exception(words: String) -> Result<String, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, words))
}

/// Date and time in the server's time zone.
fn strftime_now(format: &str) -> Result<String, Error> {
    strftime(&ZonedDateTime::now(), format)
}

fn strftime(time: &ZonedDateTime, format: &str) -> Result<String, Error> {
    let refused = |reason: &str| Error::new(ErrorKind::InvalidOperation, format!("`strftime_now`: {reason}"));
    if format.len() > MAX_TIME_FORMAT {
        return Err(refused(&format!("its format has more than {MAX_TIME_FORMAT} bytes")));
    }
    BrokenDownTime::from(time).to_string(format).map_err(|error| refused(&error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_python_writes_them() {
        let time: ZonedDateTime = "2026-02-03T16:05:09+01:00[+01:00]".parse().unwrap();
        let format = "%d %b %Y|%B %e|%A %a|%y-%m-%d|%H:%M:%S|%I %p|%j|%-d|100%%|%F %T";
        let expected = "03 Feb 2026|February  3|Tuesday Tue|26-02-03|16:05:09|04 PM|034|3|100%|2026-02-03 16:05:09";
        assert_eq!(strftime(&time, format).unwrap(), expected);
        assert!(strftime(&time, "%!").unwrap_err().to_string().contains("strftime_now"));
        assert!(strftime(&time, &"%Y".repeat(200)).is_err());
    }
}
