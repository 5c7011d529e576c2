//! Values of flags that are one of a few words.

use clap::ValueEnum;

/// The program that starts the processes of a world.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// One rank directly; more by `srun` in a Slurm allocation with a plugin for the MPI (PMIx, or PMI for MPICH), else by `mpirun`.
    Auto,
    /// `mpirun` of Open MPI or MPICH.
    Mpirun,
    /// Slurm's `srun`, in an allocation.
    Srun,
    /// The only rank directly.
    Local,
}

/// The program that runs container images.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ContainerRuntime {
    /// NVIDIA's plugin of Slurm's `srun`.
    Pyxis,
    /// Apptainer (formerly Singularity), in front of each rank's command.
    Apptainer,
}

/// The cores that each rank may run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Bind {
    /// Every core of its node.
    None,
    /// The cores and memory of one NUMA domain.
    Numa,
    /// An exclusive, equal share of its node's cores.
    Core,
}
