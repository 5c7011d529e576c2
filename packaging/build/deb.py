"""The Debian package: programs, man pages, a systemd unit with its user and settings."""
import email.utils, os, pathlib

from release import PROGRAMS, ROOT, compress, copy, run, scratch_folder, write

MAINTAINER = "Trireme maintainers <maintainers@trireme.invalid>"
CONTROL = """\
Package: trireme
Version: {version}
Section: net
Priority: optional
Architecture: {architecture}
Maintainer: {maintainer}
Installed-Size: {size}
Depends: {depends}
Recommends: ca-certificates, openmpi-bin | mpich
Suggests: openssh-client
Description: server for large language models on GPUs and CPUs
 Trireme serves language models behind the protocols of Triton, OpenAI and
 Anthropic. It reads checkpoints of Hugging Face as they are, and takes model
 repositories of Triton, LMDeploy and SGLang.
 .
 More than one rank needs MPI. GPUs need the driver of NVIDIA and cuBLASLt of
 CUDA 13, and NCCL if they do not reach each other's memory.
"""


def build(release, out):
    version = f"{release.version}-{release.revision}"
    with scratch_folder() as scratch:
        root = pathlib.Path(scratch) / "root"
        fill(release, root, version)
        write_control(release, root, version, depends(release, pathlib.Path(scratch)))
        set_times(root, release.epoch)
        target = out / f"trireme_{version}_{release.debian_machine}.deb"
        command = ["dpkg-deb", "--root-owner-group", "-Zxz", f"-z{release.level}", "--build", root, target]
        run(*command, env={"PATH": "/usr/bin:/bin", "SOURCE_DATE_EPOCH": str(release.epoch)})
    print(f"{target.name}: {target.stat().st_size / 1e6:.1f} MB")


def fill(release, root, version):
    """Writes the files of the package, where Debian's policy wants them."""
    share, doc = root / "usr/share", root / "usr/share/doc/trireme"
    for program in PROGRAMS:
        copy(release.bin / program, root / "usr/bin" / program, 0o755)
    release.write_shares(share)
    release.write_service(root / "lib/systemd/system/trireme.service", root / "etc/trireme/trireme.conf", "/usr")
    (share / "zsh/site-functions").rename(share / "zsh/vendor-completions")
    for page in (share / "man/man1").iterdir():
        compress(page)
    (doc / "LICENSE").unlink()
    (doc / "CHANGELOG.md").rename(doc / "changelog")
    write(doc / "changelog.Debian", changelog(release, version))
    compress(doc / "changelog")
    compress(doc / "changelog.Debian")
    copy(ROOT / "packaging/deb/copyright", doc / "copyright")
    copy(ROOT / "packaging/deb/lintian-overrides", share / "lintian/overrides/trireme")


def changelog(release, version):
    date = email.utils.formatdate(release.epoch)
    return f"trireme ({version}) unstable; urgency=medium\n\n  * Release {release.version}: see changelog.gz.\n\n -- {MAINTAINER}  {date}\n"


def depends(release, scratch):
    """The packages with the libraries that the programs are linked with, and `adduser` for the installation."""
    write(scratch / "debian/control", f"Source: trireme\n\nPackage: trireme\nArchitecture: {release.debian_machine}\n")
    found = run("dpkg-shlibdeps", "-O", *[f"-e{release.bin / program}" for program in PROGRAMS], cwd=scratch)
    return "adduser, " + found.strip().removeprefix("shlibs:Depends=")


def write_control(release, root, version, depends):
    files = [path for path in root.rglob("*") if path.is_file()]
    size = sum(-(-path.stat().st_size // 1024) for path in files)
    fields = {"version": version, "architecture": release.debian_machine, "maintainer": MAINTAINER, "size": size, "depends": depends}
    write(root / "DEBIAN/control", CONTROL.format(**fields))
    write(root / "DEBIAN/conffiles", "/etc/trireme/trireme.conf\n")
    for script in ["postinst", "prerm", "postrm"]:
        copy(ROOT / "packaging/deb" / script, root / "DEBIAN" / script, 0o755)
    names = sorted(str(path.relative_to(root)) for path in files if "etc" not in path.relative_to(root).parts[:1])
    write(root / "DEBIAN/md5sums", run("md5sum", *names, cwd=root))


def set_times(root, epoch):
    for path in [root, *root.rglob("*")]:
        if path.is_dir():
            path.chmod(0o755)
        os.utime(path, (epoch, epoch), follow_symlinks=False)
