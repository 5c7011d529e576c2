//! What the launcher says to the relay, in lines on its standard input, and what the relay reports, in lines on its standard output.

use std::path::PathBuf;

/// The name of the relay's sub-command of `trireme`.
pub const RELAY: &str = "relay";

/// A line of the relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RelayReport {
    /// Its ports are open: `listening`.
    Listens,
    /// The answer to [`RelayCommand::Ping`]: `alive`.
    Alive,
    /// No request has come for the time of `--relay-idle`: `idle`.
    Idle,
    /// A request waits for a world, and none is started: `wanted`.
    Wanted,
}

const REPORTS: [(RelayReport, &str); 4] = [
    (RelayReport::Listens, "listening"),
    (RelayReport::Alive, "alive"),
    (RelayReport::Idle, "idle"),
    (RelayReport::Wanted, "wanted"),
];

impl RelayReport {
    /// The line, without its end.
    pub fn line(self) -> &'static str {
        REPORTS[self as usize].1
    }

    /// Reads a line; `None` if it is no report.
    pub fn parse(line: &str) -> Option<Self> {
        REPORTS.iter().find(|(_, known)| *known == line).map(|(report, _)| *report)
    }
}

/// A line of the launcher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RelayCommand {
    /// A world serves: `serve DIRECTORY` of its sockets.
    Serve(PathBuf),
    /// No world serves: `away REASON`. Requests wait for the next one.
    Away(String),
    /// No world serves until a request comes: `sleep`.
    Sleep,
    /// Asks whether the relay is alive: `ping`.
    Ping,
    /// The last world ends: `end`. No request is sent again.
    End,
}

impl RelayCommand {
    /// The line, without its end.
    pub fn line(&self) -> String {
        match self {
            Self::Serve(directory) => format!("serve {}", directory.display()),
            Self::Away(reason) => format!("away {}", reason.replace(['\n', '\r'], " ")),
            Self::Sleep => "sleep".to_owned(),
            Self::Ping => "ping".to_owned(),
            Self::End => "end".to_owned(),
        }
    }

    /// Reads a line; `None` if it is no command.
    pub fn parse(line: &str) -> Option<Self> {
        match line.split_once(' ') {
            Some(("serve", directory)) => Some(Self::Serve(directory.into())),
            Some(("away", reason)) => Some(Self::Away(reason.to_owned())),
            Some(_) => None,
            None => [Self::Sleep, Self::Ping, Self::End].into_iter().find(|command| command.line() == line),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_read_as_they_are_written() {
        let away = RelayCommand::Away("rank 0 died".to_owned());
        for command in
            [RelayCommand::Serve("/run/a b".into()), away, RelayCommand::Sleep, RelayCommand::Ping, RelayCommand::End]
        {
            assert_eq!(RelayCommand::parse(&command.line()), Some(command));
        }
        assert_eq!(RelayCommand::Away("two\nlines".to_owned()).line(), "away two lines");
        assert_eq!(RelayCommand::parse("ended"), None);
        assert_eq!(RelayCommand::parse("end now"), None);
    }

    #[test]
    fn reports_are_read_as_they_are_written() {
        for (report, line) in REPORTS {
            assert_eq!((report.line(), RelayReport::parse(line)), (line, Some(report)));
        }
        assert_eq!(RelayReport::parse(""), None);
    }
}
