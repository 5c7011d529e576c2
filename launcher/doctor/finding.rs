//! Results of checks.

use serde::Serialize;

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Level {
    Ok,
    /// It works, but slowly or not with every model.
    Warn,
    /// A world with these flags cannot start, or will not serve.
    Fail,
}

/// One line of the report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    pub(crate) check: &'static str,
    pub(crate) level: Level,
    /// What was found.
    pub(crate) found: String,
    /// What to do about it; empty if nothing is wrong.
    pub(crate) advice: String,
}

impl Finding {
    pub(super) fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self { check, level: Level::Ok, found: found.into(), advice: String::new() }
    }

    pub(super) fn warn(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { check, level: Level::Warn, found: found.into(), advice: advice.into() }
    }

    pub(super) fn fail(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { check, level: Level::Fail, found: found.into(), advice: advice.into() }
    }

    /// A failure for an error of the form `what; what to do`. `otherwise` is the advice for one without the second part.
    pub(super) fn of_error(check: &'static str, error: impl AsRef<str>, otherwise: &str) -> Self {
        let (found, advice) = error.as_ref().split_once("; ").unwrap_or((error.as_ref(), otherwise));
        Self::fail(check, found, advice)
    }

    /// Like [`Self::of_error`], for what does not keep a world from serving.
    pub(super) fn of_warning(check: &'static str, error: impl AsRef<str>, otherwise: &str) -> Self {
        Self { level: Level::Warn, ..Self::of_error(check, error, otherwise) }
    }
}

/// `1.5 GiB`.
pub(super) fn size(bytes: u64) -> String {
    match bytes {
        0..0x10_0000 => format!("{} KiB", bytes >> 10),
        0x10_0000..0x4000_0000 => format!("{} MiB", bytes >> 20),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_shown_with_its_own_advice_or_else_the_given_one() {
        let own = Finding::of_error("ports", "port 8000 is in use; end it; or give another", "see the log");
        assert_eq!((own.found.as_str(), own.advice.as_str()), ("port 8000 is in use", "end it; or give another"));
        let given = Finding::of_error("ports", "port 8000 is in use", "see the log");
        assert_eq!((given.level, given.advice.as_str()), (Level::Fail, "see the log"));
    }

    #[test]
    fn sizes_are_formatted_with_one_unit() {
        assert_eq!([2048, 3 << 20, 3 << 29].map(size), ["2 KiB", "3 MiB", "1.5 GiB"]);
    }
}
