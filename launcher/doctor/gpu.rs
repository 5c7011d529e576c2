//! Checks of GPUs, through `nvidia-smi`, and of NCCL.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use settings::DeviceKind;

use super::finding::Finding;
use super::mpi::{find, output};
use super::nccl_rate;
use crate::flags::WorldFlags;

/// Usual directories of NCCL.
const LIBRARY_DIRS: [&str; 6] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/local/cuda/lib64",
    "/usr/local/nccl/lib",
];

/// Whether a world with these flags would use GPUs.
pub(super) fn are_wanted(flags: &WorldFlags) -> bool {
    match flags.device {
        DeviceKind::Cpu => false,
        DeviceKind::Cuda => true,
        DeviceKind::Auto => num_device_files() > 0,
    }
}

/// Checks the devices, peer access between them, and NCCL.
pub(super) fn check(flags: &WorldFlags) -> Vec<Finding> {
    if flags.device == DeviceKind::Cpu {
        return vec![Finding::ok("GPUs", "not used with --device=cpu")];
    }
    if !are_wanted(flags) {
        let none = Finding::ok("GPUs", "none; models run on the CPU");
        return vec![none, Finding::ok("NCCL rate", "not measured: no GPU")];
    }
    let query = ["--query-gpu=name,memory.total", "--format=csv,noheader"];
    let Some(list) = find("nvidia-smi").and_then(|path| output(Command::new(path).args(query))) else {
        let advice = match num_device_files() {
            0 => "install the driver; in a container, start it with GPUs (`docker run --gpus all`)",
            _ => "the devices are there but the driver does not answer: load it (`nvidia-smi`, `dmesg`), or update it",
        };
        return vec![Finding::fail("GPUs", "the driver shows none", advice)];
    };
    let mut findings = vec![visible(flags, &list)];
    if flags.world_size > 1 {
        findings.push(peers());
        let (found, library) = nccl(flags);
        findings.push(found);
        if library.is_some() {
            let size = flags.world_size.min(list.lines().filter(|line| !line.trim().is_empty()).count() as u32);
            findings.push(nccl_rate::measure(flags, size, library.as_deref().and_then(Path::parent)));
        }
    }
    findings
}

fn visible(flags: &WorldFlags, list: &str) -> Finding {
    let all: Vec<_> = list.lines().filter(|line| !line.trim().is_empty()).collect();
    let shown = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let num = shown.as_ref().map_or(all.len(), |shown| shown.split(',').filter(|id| !id.trim().is_empty()).count());
    let num = num.min(all.len());
    let limited = shown.map(|shown| format!(", of which CUDA_VISIBLE_DEVICES={shown} shows {num}")).unwrap_or_default();
    let found = format!("{} × {}{limited}", all.len(), all.first().map_or("none", |line| line.trim()));
    match num < flags.world_size as usize {
        true => Finding::fail("GPUs", found, format!("start with --world_size={}, or --device=cpu", num.max(1))),
        false => Finding::ok("GPUs", found),
    }
}

/// Checks peer access by `nvidia-smi topo -p2p r`, which prints a matrix of `OK` or a reason for each pair of GPUs.
fn peers() -> Finding {
    let Some(matrix) = output(Command::new("nvidia-smi").args(["topo", "-p2p", "r"])) else {
        return Finding::warn("peer access", "the driver does not report it", "see `nvidia-smi topo -p2p r`");
    };
    match pairs_without(&matrix) {
        0 => Finding::ok("peer access", "every GPU reads every other's memory"),
        pairs => Finding::warn(
            "peer access",
            format!("{pairs} pairs of GPUs cannot read each other's memory"),
            "sums go through the host, slowly: use GPUs joined by NVLink, or turn IOMMU and ACS off",
        ),
    }
}

/// Pairs of different GPUs in the matrix that are not `OK`.
fn pairs_without(matrix: &str) -> usize {
    let cells = matrix.lines().filter(|line| line.trim_start().starts_with("GPU")).flat_map(|line| {
        let cells: Vec<_> = line.split_ascii_whitespace().skip(1).map(str::to_owned).collect();
        // The header line consists of names only.
        if cells.iter().all(|cell| cell.starts_with("GPU")) { Vec::new() } else { cells }
    });
    cells.filter(|cell| cell != "X" && cell != "OK").count() / 2
}

fn nccl(flags: &WorldFlags) -> (Finding, Option<PathBuf>) {
    let given = flags.rank_flag("--library-dir").map(PathBuf::from);
    let given = given.into_iter().chain(std::env::var_os("TRIREME_LIBRARY_DIR").map(PathBuf::from));
    let given = given.flat_map(|dir| [dir.clone(), dir.join("lib"), dir.join("nvidia/nccl/lib")]);
    let found =
        given.chain(LIBRARY_DIRS.map(PathBuf::from)).map(|dir| dir.join("libnccl.so.2")).find(|path| path.exists());
    let finding = match &found {
        Some(path) => Finding::ok("NCCL", path.display().to_string()),
        None => Finding::warn(
            "NCCL",
            "libnccl.so.2 is not in the usual places",
            "install it (`pip install nvidia-nccl-cu13`), and name its folder with `-- --library-dir=DIR`",
        ),
    };
    (finding, found)
}

fn num_device_files() -> usize {
    let is_gpu = |name: &str| {
        name.strip_prefix("nvidia").is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()))
    };
    let entries = fs::read_dir(Path::new("/dev")).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_name().to_str().is_some_and(is_gpu)).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_without_peer_access_are_counted_once() {
        let matrix =
            " \tGPU0\tGPU1\tGPU2\n GPU0\tX\tOK\tCNS\n GPU1\tOK\tX\tOK\n GPU2\tCNS\tOK\tX\n\nLegend:\n  X = Self\n";
        assert_eq!(pairs_without(matrix), 1);
        assert_eq!(pairs_without(" \tGPU0\tGPU1\n GPU0\tX\tOK\n GPU1\tOK\tX\n"), 0);
    }
}
