//! What the launcher says to the relay, in lines on its standard input.

use std::path::PathBuf;

/// The name of the relay's sub-command of `trireme`.
pub const RELAY: &str = "relay";

/// The line that the relay writes once its ports are open.
pub const RELAY_LISTENS: &str = "listening";

/// A line of the launcher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RelayCommand {
    /// A world serves: `serve DIRECTORY` of its sockets.
    Serve(PathBuf),
    /// No world serves: `away REASON`. Requests wait for the next one.
    Away(String),
    /// The last world ends: `end`. No request is sent again.
    End,
}

impl RelayCommand {
    /// The line, without its end.
    pub fn line(&self) -> String {
        match self {
            Self::Serve(directory) => format!("serve {}", directory.display()),
            Self::Away(reason) => format!("away {}", reason.replace(['\n', '\r'], " ")),
            Self::End => "end".to_owned(),
        }
    }

    /// Reads a line; `None` if it is no command.
    pub fn parse(line: &str) -> Option<Self> {
        match line.split_once(' ') {
            Some(("serve", directory)) => Some(Self::Serve(directory.into())),
            Some(("away", reason)) => Some(Self::Away(reason.to_owned())),
            None if line == "end" => Some(Self::End),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_read_as_they_are_written() {
        for command in
            [RelayCommand::Serve("/run/a b".into()), RelayCommand::Away("rank 0 died".to_owned()), RelayCommand::End]
        {
            assert_eq!(RelayCommand::parse(&command.line()), Some(command));
        }
        assert_eq!(RelayCommand::Away("two\nlines".to_owned()).line(), "away two lines");
        assert_eq!(RelayCommand::parse("ended"), None);
    }
}
