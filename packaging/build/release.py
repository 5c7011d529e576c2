"""What a release consists of: the programs, and the files beside them."""
import datetime, gzip, hashlib, os, pathlib, re, shutil, subprocess, tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = ["trireme", "launch"]
DEMO = "model_repository"
TEXTS = ["README.md", "CHANGELOG.md", "LICENSE", "NOTICE", "THIRD_PARTY_LICENSES"]
# Each shell with the folder of its completions under `share`, and the name of a program's file there.
COMPLETIONS = {
    "bash": ("bash-completion/completions", "{}"),
    "zsh": ("zsh/site-functions", "_{}"),
    "fish": ("fish/vendor_completions.d", "{}.fish"),
}


class Release:
    """The programs without debug information, and what belongs into every package."""

    def __init__(self, binaries, scratch):
        self.version = re.search(r'^version = "(.+)"', (ROOT / "Cargo.toml").read_text(), re.M)[1]
        self.epoch = epoch()
        # What the command line may change: revision of the Debian package, compression, where NVIDIA's libraries are.
        self.revision, self.level, self.cuda_libs = 1, 6, None
        self.machine = os.uname().machine
        self.bin = pathlib.Path(scratch) / "bin"
        self.bin.mkdir()
        for name in PROGRAMS:
            if not (binaries / name).is_file():
                raise SystemExit(f"error: there is no `{name}` in {binaries}; build it, or leave --binaries out")
            # Names of functions stay: the reports of crashes print stacks.
            run("strip", "--strip-debug", "-o", self.bin / name, binaries / name)

    @property
    def debian_machine(self):
        return {"x86_64": "amd64", "aarch64": "arm64"}[self.machine]

    def time(self, form):
        """The time of the release, UTC."""
        return datetime.datetime.fromtimestamp(self.epoch, datetime.timezone.utc).strftime(form)

    def write_shares(self, share, doc="doc/trireme"):
        """Writes the files beside the programs to the folder `share`."""
        for name in [DEMO, "monitoring", "slurm"]:
            copy_tree(ROOT / name, share / "trireme" / name)
        for name in TEXTS:
            copy(ROOT / name, share / doc / name)
        for path in sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("docs/*.yaml"), *ROOT.glob("docs/images/*")]):
            copy(path, share / doc / path.relative_to(ROOT))
        self.write_completions(share)
        run(self.bin / "trireme", "man", share / "man/man1")

    def write_service(self, unit, conf, prefix):
        """Writes the systemd unit and its settings for programs that are installed under `prefix`."""
        for name, target in [("trireme.service", unit), ("trireme.conf", conf)]:
            text = (ROOT / "packaging" / name).read_text().replace("/opt/trireme/docs", "/opt/trireme/share/doc/trireme/docs")
            write(target, text.replace("/opt/trireme/", f"{prefix}/"))

    def write_completions(self, share):
        for shell, (folder, name) in COMPLETIONS.items():
            for program in PROGRAMS:
                script = run(self.bin / "trireme", "completions", shell, program)
                write(share / folder / name.format(program), script)


def epoch():
    """The time of every file: $SOURCE_DATE_EPOCH, else that of the commit."""
    if value := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(value)
    found = subprocess.run(["git", "-C", ROOT, "log", "-1", "--format=%ct"], capture_output=True, text=True)
    return int(found.stdout) if found.returncode == 0 else 1767225600


def run(*command, **options):
    """The output of a command, which must succeed."""
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, **options)
    if done.returncode:
        raise SystemExit(f"error: `{' '.join(map(str, command))}` ended with status {done.returncode}")
    return done.stdout


def write(path, text, mode=0o644):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def copy(source, target, mode=None):
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(mode or (0o755 if source.stat().st_mode & 0o100 else 0o644))


def copy_tree(source, target):
    """Copies the files of a folder, without what Python leaves in it."""
    for path in sorted(source.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            copy(path, target / path.relative_to(source))


def compress(path):
    """Replaces a file by its gzip, which has no name and no time in it."""
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes(), 9, mtime=0))
    path.unlink()


def sha256(path):
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def scratch_folder():
    return tempfile.TemporaryDirectory(prefix="trireme-package.")
