"""The lower layer of the container image: files of Debian's packages, and the libraries that programs are linked with."""
import os, pathlib, re, subprocess

from release import copy, run, scratch_folder, write

# Files of these packages are in the image. One that is not installed here is downloaded by apt, which checks its signature.
PACKAGES = ["busybox-static", "ibverbs-providers", "openmpi-bin", "openmpi-common", "openssh-client", "openssh-server"]
# Libraries of MPI, which load modules. Their names have the number of their version.
MODULES = re.compile(r"lib(openmpi|pmix|ucx|fabric)\d\S*$")
# Of the programs in these packages.
CHOSEN = {"busybox", "orted", "orterun", "ssh", "ssh-keygen", "sshd"}
LINKS = {"usr/bin/mpirun": "orterun", "usr/bin/mpiexec": "orterun", "bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
# Commands that scripts and people in the container need.
BUSYBOX = "awk cat chmod cp cut date df echo env false find free grep head hostname id kill less ln ls mkdir mktemp mv nc nslookup pidof ps pwd readlink rm sed seq sh sha256sum sleep sort tail test top touch tr true uname wc wget which".split()
# Where Debian's packages have what programs read at run time: modules, texts of errors, configuration.
KEPT = re.compile(r"/(usr/)?lib/[^/]*-linux-gnu/.*\.so[.\d]*$|/usr/share/(openmpi|pmix2?)/|/etc/(openmpi|libibverbs\.d|pmix)/|/usr/share/doc/[^/]*/copyright$")
# Bindings of other languages, and headers.
DROPPED = re.compile(r"oshmem|mpi_(cxx|java|mpifh|usempi|usempif08|usempi_ignore_tkr)|mca_common_monitoring|fortran|/include/|/pmix2/lib/python")


def write_base(base, programs, user, home):
    with scratch_folder() as scratch:
        sources = Sources(pathlib.Path(scratch))
        wanted = list(sources.files())
        for path, source in wanted:
            place(base, path, source)
        write_links(base)
        sources.add_libraries(base, [*programs, *(source for _, source in wanted)])
    write_settings(base, user, home)


class Sources:
    """Debian's packages: installed ones, and the others unpacked in a folder."""

    def __init__(self, scratch):
        self.unpacked = scratch / "unpacked"
        self.unpacked.mkdir()
        self.packages = PACKAGES + [name for name in dependencies("openmpi-bin") if MODULES.match(name)]
        missing = [name for name in self.packages if not installed(name)]
        if missing:
            download(missing, scratch, self.unpacked)
        libraries = [self.unpacked / folder for folder in ["lib", "usr/lib"]]
        folders = [str(path) for one in libraries for path in one.glob("*-linux-gnu")]
        self.environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(folders), "LC_ALL": "C"}

    def files(self):
        """Path in the image and source of each file of the packages that belongs into the image."""
        names = set()
        for package in filter(installed, self.packages):
            names.update((path, pathlib.Path(path)) for path in run("dpkg-query", "-L", package).split("\n"))
        names.update(("/" + str(path.relative_to(self.unpacked)), path) for path in self.unpacked.rglob("*"))
        for path, source in sorted(names):
            is_program = re.match(r"/(usr/)?s?bin/", path) and source.name in CHOSEN
            if (is_program or KEPT.match(path) and not DROPPED.search(path)) and source.is_file():
                yield path, source

    def add_libraries(self, base, programs):
        """Copies what the dynamic linker loads for the programs, with the licences of the packages."""
        binaries = [str(path) for path in programs if path.suffix != ".txt" and is_elf(path)]
        output = subprocess.run(["ldd", *binaries], capture_output=True, text=True, env=self.environment).stdout
        if missing := sorted(set(re.findall(r"(\S+) => not found", output))):
            raise SystemExit(f"error: libraries of the image are missing: {', '.join(missing)}")
        # The dynamic linker's own path is a part of every program.
        found = set(re.findall(r"=> (/\S+)", output)) | set(re.findall(r"^\s+(/\S+) \(", output, re.M))
        for path in sorted(found):
            inside = path.removeprefix(str(self.unpacked))
            place(base, inside, pathlib.Path(path))
            if inside == path:
                add_license(base, path)


def dependencies(package):
    hidden = [f"--no-{kind}" for kind in ["recommends", "suggests", "conflicts", "breaks", "replaces", "enhances"]]
    lines = run("apt-cache", "depends", "--recurse", *hidden, package).splitlines()
    return sorted({line for line in lines if re.match(r"[a-z0-9]", line)})


def installed(package):
    query = subprocess.run(["dpkg-query", "-W", "-f=${Status}", package], capture_output=True, text=True)
    return query.stdout.endswith("ok installed")


def download(packages, scratch, unpacked):
    """Unpacks packages that are not installed, and those that they depend on, without installing them."""
    plan = run("apt-get", "-qq", "--simulate", "--no-install-recommends", "install", *packages)
    names = re.findall(r"^Inst (\S+)", plan, re.M)
    # A user of its own downloads, where apt runs as root.
    scratch.chmod(0o755)
    run("apt-get", "-qq", "download", *names, cwd=scratch, stderr=subprocess.DEVNULL)
    for archive in sorted(scratch.glob("*.deb")):
        run("dpkg-deb", "--extract", archive, unpacked)


def place(base, path, source):
    """Copies a file to where the image, whose `/lib` is `/usr/lib`, has it."""
    inside = re.sub(r"^/(bin|sbin|lib|lib64)/", r"/usr/\1/", path).lstrip("/")
    inside = inside.replace("usr/sbin/", "usr/bin/") if inside.startswith("usr/sbin/") else inside
    target, real = base / inside, source.resolve()
    if real.name != target.name and not target.is_symlink() and real.parent.name == target.parent.name:
        place(base, str(pathlib.Path(path).with_name(real.name)), real)
        target.symlink_to(real.name)
    elif not target.exists():
        copy(real, target, 0o755 if real.stat().st_mode & 0o100 else 0o644)


def is_elf(path):
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def add_license(base, library):
    for path in {library, re.sub(r"^/usr(?=/lib)", "", library), os.path.realpath(library)}:
        owner = subprocess.run(["dpkg-query", "-S", path], capture_output=True, text=True).stdout
        name = owner.split(":")[0]
        text = pathlib.Path(f"/usr/share/doc/{name}/copyright")
        if name and text.is_file():
            return copy(text, base / f"usr/share/doc/{name}/copyright", 0o644)


def write_links(base):
    for name, target in [*LINKS.items(), *((f"usr/bin/{command}", "busybox") for command in BUSYBOX)]:
        path = base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_symlink():
            path.symlink_to(target)
    (base / "usr/lib64").mkdir(exist_ok=True)
    (base / "usr/sbin").mkdir(exist_ok=True)


def write_settings(base, user, home):
    write(base / "etc/passwd", f"root:x:0:0:root:/:/bin/sh\nsshd:x:100:65534::/run/sshd:/bin/false\ntrireme:x:{user}:{user}:Trireme:/{home}:/bin/sh\n")
    write(base / "etc/group", f"root:x:0:\nnogroup:x:65534:\ntrireme:x:{user}:\n")
    # Where a container runtime does not write its own.
    write(base / "etc/hosts", "127.0.0.1 localhost\n::1 localhost\n")
    write(base / "etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n")
    certificates = pathlib.Path("/etc/ssl/certs/ca-certificates.crt")
    if certificates.is_file():
        copy(certificates, base / "etc/ssl/certs/ca-certificates.crt", 0o644)
    for folder, mode in [("tmp", 0o1777), ("var/tmp", 0o1777), ("proc", 0o755), ("sys", 0o755), ("dev", 0o755), ("run", 0o755), ("root", 0o700)]:
        (base / folder).mkdir(parents=True, exist_ok=True)
        (base / folder).chmod(mode)
