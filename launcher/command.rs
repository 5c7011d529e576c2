//! Command lines, and the words they are made of.

use std::fmt;
use std::path::PathBuf;

use crate::mpi::MpiKind;

/// A program and its arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandLine {
    /// What to run.
    pub program: PathBuf,
    /// Its arguments, without its name.
    pub args: Vec<String>,
}

/// What starts the ranks of a world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Starter {
    /// The launcher itself starts the only rank.
    Local,
    /// `mpirun` of this implementation.
    Mpirun(MpiKind),
    /// `srun`, with a step of this name in this job.
    Srun {
        /// Number of the job.
        job: u32,
        /// Name of the step.
        step: String,
    },
}

impl fmt::Display for CommandLine {
    /// The command, quoted for a shell.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&quoted(&self.program.to_string_lossy()))?;
        self.args.iter().try_for_each(|arg| write!(f, " {}", quoted(arg)))
    }
}

/// Quotes a word for a shell where it needs that.
pub(crate) fn quoted(word: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_=,./:@%+".contains(&byte);
    if !word.is_empty() && word.bytes().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// `--model_repo=a_b` → `--model-repo=a_b`; a word that is no flag is unchanged.
pub(crate) fn text_with_dashes(word: &str) -> String {
    if !word.starts_with("--") {
        return word.to_owned();
    }
    let (name, value) = word.split_at(word.find('=').unwrap_or(word.len()));
    format!("{}{value}", name.replace('_', "-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_for_the_shell() {
        let line = CommandLine { program: "a b".into(), args: vec!["it's".into(), String::new(), "--x=1".into()] };
        assert_eq!(line.to_string(), r"'a b' 'it'\''s' '' --x=1");
    }
}
