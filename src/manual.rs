//! Shell completions and man pages of `trireme` and `launch`, made from the descriptions that `--help` prints.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Arg, ArgMatches, Command, CommandFactory, value_parser};
use clap_complete::Shell;
use launcher::flags::Flags;

/// The sub-command that prints a completion script.
pub(crate) fn completions_command() -> Command {
    let shell = Arg::new("shell").required(true).value_name("SHELL").value_parser(value_parser!(Shell));
    let program = Arg::new("program").value_name("PROGRAM").default_value("trireme");
    Command::new("completions")
        .about("Prints the completions of a shell: `source <(trireme completions bash)`")
        .arg(shell.help("The shell"))
        .arg(program.value_parser(["trireme", "launch"]).help("The program to complete"))
}

/// The sub-command that writes man pages; packages call it.
pub(crate) fn man_command() -> Command {
    Command::new("man")
        .about("Writes the man pages of `trireme` and `launch` into a folder")
        .hide(true)
        .arg(Arg::new("folder").required(true).value_name("DIR").value_parser(value_parser!(PathBuf)))
}

/// Prints the completions that `matches` ask for. `trireme` is the description of that program.
pub(crate) fn print_completions(matches: &ArgMatches, trireme: Command) -> anyhow::Result<()> {
    let shell = *matches.get_one::<Shell>("shell").expect("it is required");
    let program = matches.get_one::<String>("program").expect("it has a default");
    let script = completions(shell, program, trireme);
    io::stdout().write_all(&script).context("cannot write the completions")
}

fn completions(shell: Shell, program: &str, trireme: Command) -> Vec<u8> {
    let mut command = match program {
        "launch" => Flags::command(),
        _ => trireme.mut_subcommand(launcher::SUB_COMMAND, |_| Flags::command()),
    };
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, program, &mut script);
    script
}

/// Writes a page for each program and each of its sub-commands that help lists.
pub(crate) fn write_pages(matches: &ArgMatches, trireme: Command) -> anyhow::Result<()> {
    let folder = matches.get_one::<PathBuf>("folder").expect("it is required");
    pages(folder, trireme).with_context(|| format!("cannot write man pages to {}", folder.display()))
}

fn pages(folder: &Path, trireme: Command) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    clap_mangen::generate_to(trireme, folder)?;
    clap_mangen::generate_to(Flags::command(), folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_completions_of_every_shell_know_the_flags_of_both_programs() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            for (program, flags) in [("trireme", ["model-repository", "world-size"]), ("launch", ["hosts", "rolling"])]
            {
                let script = String::from_utf8(completions(shell, program, crate::command())).unwrap();
                for flag in flags {
                    assert!(script.contains(flag), "{shell} of {program} lacks --{flag}");
                }
            }
        }
    }

    #[test]
    fn every_listed_sub_command_has_a_man_page_and_hidden_ones_have_none() {
        let folder = tempfile::tempdir().unwrap();
        pages(folder.path(), crate::command()).unwrap();
        for (program, command) in [("trireme", crate::command()), ("launch", Flags::command())] {
            assert!(folder.path().join(format!("{program}.1")).is_file());
            for one in command.get_subcommands() {
                let page = folder.path().join(format!("{program}-{}.1", one.get_name()));
                assert_eq!(page.is_file(), !one.is_hide_set(), "{}", page.display());
            }
        }
    }
}
