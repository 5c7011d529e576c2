"""The oldest glibc that programs start with, from the versions of the symbols that they import."""
import re

# Debian 11 and Ubuntu 20.04.
WANTED = (2, 31)


def needed(programs):
    """The newest version of glibc that any of the programs names, plugins that they embed included."""
    found = {(2, 0)}
    for program in programs:
        for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", program.read_bytes()):
            found.add((int(major), int(minor)))
    return max(found)


def report(programs):
    """One line on the version that is needed, and why it is newer than wanted."""
    version = needed(programs)
    line = f"needs glibc {version[0]}.{version[1]}"
    if version <= WANTED:
        return line + ", so it starts on Debian 11, Ubuntu 20.04, RHEL 9 and later"
    wanted = ".".join(map(str, WANTED))
    return f"{line}, not {wanted}: programs need the symbols of the glibc they are linked with; `scripts/build_dist` links with that of Debian 11"
