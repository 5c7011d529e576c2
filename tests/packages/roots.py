"""Commands in the root folder of another system, with namespaces of their own. Nothing of them outlives a command."""

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

# Arguments: the root, the user, whether there is a network of its own, then the command.
ENTER = """
root=$1 user=$2 own_network=$3
shift 3
if [ "$own_network" = yes ]; then
    ip link set lo up
    # Two addresses that are not of the loopback, which MPI does not use.
    ip link add one type veth peer name two
    for host in 1 2; do ip address add "10.77.0.$host/24" dev one; done
    ip link set one up && ip link set two up
fi
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
exec chroot --userspec="$user" "$root" "$@"
"""


@dataclass
class Root:
    """A root folder, and how commands in it run."""

    path: Path
    user: str = "0:0"
    environment: dict = field(default_factory=lambda: {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"})

    def command(self, *words: str, own_network: bool = True) -> list:
        """The command line that runs a command in the root, as process 1 of its own namespace."""
        spaces = ["--mount", "--pid", "--ipc", "--fork", "--kill-child"] + (["--net"] if own_network else [])
        network = "yes" if own_network else "no"
        inside = ["env", "-i", *(f"{name}={value}" for name, value in self.environment.items()), *words]
        return ["unshare", *spaces, "sh", "-ec", ENTER, "enter", str(self.path), self.user, network, *inside]

    def run(self, *words: str, timeout: float = 120) -> str:
        """The output of a command, which must succeed."""
        done = subprocess.run(self.command(*words), capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def files(self) -> set:
        """Every path in the root, but for folders that are mounted when commands run."""
        mounted = {self.path / name for name in ("proc", "sys", "dev", "tmp")}
        return {str(path.relative_to(self.path)) for path in self.path.rglob("*") if not mounted & {path, *path.parents}}
