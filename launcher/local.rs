//! Worlds of one rank, started without MPI.

use crate::command::CommandLine;

/// The command of the only rank.
pub(crate) fn command(mut ranks: Vec<CommandLine>) -> CommandLine {
    assert_eq!(ranks.len(), 1, "a local world has one rank");
    ranks.remove(0)
}
