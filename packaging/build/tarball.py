"""The tarball: unpack it anywhere and run `bin/launch`."""
import pathlib

import archive, glibc
from release import PROGRAMS, copy, scratch_folder

# Compressed. A build with kernels for more architectures must stay below it.
MAX_BYTES = 60_000_000


def build(release, out):
    name = f"trireme-{release.version}-{release.machine}-linux"
    with scratch_folder() as scratch:
        folder = pathlib.Path(scratch) / name
        for program in PROGRAMS:
            copy(release.bin / program, folder / "bin" / program, 0o755)
        release.write_shares(folder / "share")
        own = folder / "share/trireme"
        release.write_service(own / "trireme.service", own / "trireme.conf", "/opt/trireme")
        target = out / f"{name}.tar.gz"
        archive.write_tar_gz(target, folder, name, release.epoch, release.level)
    size = target.stat().st_size
    print(f"{target.name}: {size / 1e6:.1f} MB, {glibc.report([release.bin / program for program in PROGRAMS])}")
    if size > MAX_BYTES:
        raise SystemExit(f"error: {target.name} has {size / 1e6:.1f} MB, and at most {MAX_BYTES / 1e6:.0f} are allowed")
