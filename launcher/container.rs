//! Runs ranks in a container image, through Slurm's plugin pyxis or through Apptainer.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use settings::DeviceKind;

use crate::command::{CommandLine, Starter};
use crate::flags::{ContainerRuntime, WorldFlags};

/// An image and the paths of this machine that are mounted into it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Container {
    runtime: ContainerRuntime,
    image: String,
    /// `FROM:TO`, or one path that is the same inside.
    mounts: Vec<String>,
    work_dir: PathBuf,
    needs_gpus: bool,
}

impl Container {
    /// The container that the flags describe; None if they name no image. Always mounted are the model repository, the working
    /// directory with its logs, and `run_dir` with the launcher's sockets; the flags may add more.
    ///
    /// # Errors
    /// If `starter` cannot start ranks in the image.
    pub(crate) fn of(flags: &WorldFlags, starter: &Starter, work_dir: &Path, run_dir: &Path) -> Result<Option<Self>> {
        let Some(image) = &flags.container_image else {
            if !flags.container_mounts.is_empty() {
                bail!("--container-mounts needs --container-image");
            }
            return Ok(None);
        };
        let runtime = flags.container_runtime;
        if runtime == ContainerRuntime::Pyxis && !matches!(starter, Starter::Srun { .. }) {
            bail!(
                "pyxis is a part of Slurm's srun, which does not start this world; start it in a batch job (`launch \
                 sbatch`), or with --container-runtime=apptainer"
            );
        }
        let own = [work_dir.join(&flags.model_repo), work_dir.to_owned(), run_dir.to_owned()];
        let mut mounts: Vec<String> = own.map(|path| path.display().to_string()).into();
        mounts.extend(flags.container_mounts.iter().cloned());
        mounts.dedup();
        let needs_gpus = flags.device != DeviceKind::Cpu;
        Ok(Some(Self { runtime, image: image.clone(), mounts, work_dir: work_dir.to_owned(), needs_gpus }))
    }

    /// The options of `srun` by which pyxis starts the container; empty with Apptainer.
    pub(crate) fn srun_options(&self) -> Vec<String> {
        if self.runtime != ContainerRuntime::Pyxis {
            return Vec::new();
        }
        let mount = |mount: &String| if mount.contains(':') { mount.clone() } else { format!("{mount}:{mount}") };
        vec![
            format!("--container-image={}", self.image),
            format!("--container-mounts={}", self.mounts.iter().map(mount).collect::<Vec<_>>().join(",")),
            format!("--container-workdir={}", self.work_dir.display()),
        ]
    }

    /// `command` with Apptainer in front of it; unchanged with pyxis.
    pub(crate) fn wrap(&self, command: CommandLine) -> CommandLine {
        if self.runtime != ContainerRuntime::Apptainer {
            return command;
        }
        let mut args = vec!["exec".to_owned()];
        if self.needs_gpus {
            args.push("--nv".to_owned());
        }
        args.push(format!("--bind={}", self.mounts.join(",")));
        args.push(format!("--pwd={}", self.work_dir.display()));
        args.extend([self.image.clone(), command.program.display().to_string()]);
        args.extend(command.args);
        CommandLine { program: "apptainer".into(), args }
    }
}
