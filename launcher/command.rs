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
    /// Nothing: there is one rank.
    Local,
    /// `mpirun`, of this family.
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
    /// As one would type it into a shell.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&quoted(&self.program.to_string_lossy()))?;
        self.args.iter().try_for_each(|arg| write!(f, " {}", quoted(arg)))
    }
}

/// `word` as a shell reads it back; a plain word stays as it is.
pub(crate) fn quoted(word: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_=,./:@%+".contains(&byte);
    if !word.is_empty() && word.bytes().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// `--model_repo=a_b` → `--model-repo=a_b`; what is no flag stays.
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
