//! A world of one rank: its own process, no MPI.

use crate::command::CommandLine;

/// The command of the one rank.
pub(crate) fn command(mut ranks: Vec<CommandLine>) -> CommandLine {
    assert_eq!(ranks.len(), 1, "a local world has one rank");
    ranks.remove(0)
}
