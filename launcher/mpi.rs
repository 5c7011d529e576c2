//! Detects which MPI implementation an `mpirun` belongs to.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Result, bail};

/// Implementations of `mpirun`, which take different options.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MpiKind {
    /// Open MPI up to 4.
    OpenMpi,
    /// Open MPI from 5 on, whose launcher is PRRTE.
    OpenMpi5,
    /// Hydra, the launcher of MPICH, Intel MPI and MVAPICH.
    Mpich,
}

/// An `mpirun`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mpirun {
    /// The program.
    pub program: PathBuf,
    /// Its implementation.
    pub kind: MpiKind,
}

impl Default for Mpirun {
    /// The `mpirun` in PATH, taken to be Open MPI's.
    fn default() -> Self {
        Self { program: "mpirun".into(), kind: MpiKind::OpenMpi }
    }
}

impl Mpirun {
    /// Detects the kind of `program` from its `--version`. A program without an answer counts as Open MPI's.
    pub fn of(program: &Path) -> Self {
        let kind = version(program).as_deref().map_or(MpiKind::OpenMpi, kind_of);
        Self { program: program.to_owned(), kind }
    }

    /// The `mpirun` that was named, else the one in PATH. The latter is queried for its kind only if `is_needed`.
    pub(crate) fn named(program: Option<&Path>, is_needed: bool) -> Self {
        match program {
            Some(program) => Self::of(program),
            None if is_needed => Self::of(Path::new("mpirun")),
            None => Self::default(),
        }
    }

    /// Returns an error with installation advice if the program is not on this machine.
    pub(crate) fn check_installed(&self) -> Result<()> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let is_named = self.program.components().count() > 1;
        if is_named && self.program.is_file()
            || std::env::split_paths(&path).any(|dir| dir.join(&self.program).is_file())
        {
            return Ok(());
        }
        let name = self.program.display();
        let place = if is_named { "not there" } else { "not in PATH" };
        bail!(
            "`{name}` is {place}, and a world of more than one rank needs it; install Open MPI (Debian, Ubuntu: \
             `apt-get install openmpi-bin`) or MPICH (`mpich`), name it with --mpirun, or use --world_size=1"
        )
    }
}

/// The output of `program --version`.
pub(crate) fn version(program: &Path) -> Option<String> {
    let output = Command::new(program).arg("--version").stdin(Stdio::null()).output().ok()?;
    Some(String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

fn kind_of(version: &str) -> MpiKind {
    if ["HYDRA", "Intel(R) MPI", "MPICH"].iter().any(|name| version.contains(name)) {
        return MpiKind::Mpich;
    }
    let number = version.split_once("Open MPI)").and_then(|(_, rest)| rest.trim().split('.').next()?.parse().ok());
    match number {
        Some(5u32..) => MpiKind::OpenMpi5,
        None if version.contains("PRRTE") || version.contains("prterun") => MpiKind::OpenMpi5,
        _ => MpiKind::OpenMpi,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_of_mpirun_is_detected_from_its_version() {
        let outputs = [
            ("mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n", MpiKind::OpenMpi),
            (
                "mpirun (Open MPI) 5.0.10\n\nReport bugs to https://www.open-mpi.org/community/help/\n",
                MpiKind::OpenMpi5,
            ),
            ("prterun (PRRTE) 3.0.7\n", MpiKind::OpenMpi5),
            ("HYDRA build details:\n    Version:                                 4.0.2\n", MpiKind::Mpich),
            ("Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307\n", MpiKind::Mpich),
            ("", MpiKind::OpenMpi),
        ];
        for (text, kind) in outputs {
            assert_eq!(kind_of(text), kind, "{text}");
        }
    }

    #[test]
    fn a_missing_mpirun_is_named_with_what_to_install() {
        let error = Mpirun { program: "/nowhere/mpirun".into(), kind: MpiKind::OpenMpi }.check_installed();
        assert!(error.unwrap_err().to_string().contains("`/nowhere/mpirun` is not there"));
        let error = Mpirun { program: "no-such-mpirun".into(), kind: MpiKind::OpenMpi }.check_installed();
        assert!(error.unwrap_err().to_string().contains("`no-such-mpirun` is not in PATH"));
    }
}
