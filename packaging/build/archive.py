"""Archives that have the same bytes whenever the same files go in: sorted names, one time, one owner."""
import gzip, os, stat, tarfile


def add_tree(archive, folder, prefix, epoch, owners={}):
    """Adds a folder. `owners` gives paths in the archive an owner other than root; their content belongs to root."""
    for path in sorted([folder, *folder.rglob("*")]):
        inside = path.relative_to(folder)
        name = os.path.normpath(os.path.join(prefix, inside))
        if name == ".":
            continue
        entry = archive.gettarinfo(path, name)
        entry.uid = entry.gid = owners.get(name, 0)
        entry.uname = entry.gname = "root" if entry.uid == 0 else ""
        entry.mtime = epoch
        entry.mode = stat.S_IMODE(entry.mode)
        # Each file is written whole: a hard link would depend on the order of the build.
        if entry.islnk():
            entry.type, entry.size = tarfile.REGTYPE, path.stat().st_size
        if entry.isreg():
            with path.open("rb") as file:
                archive.addfile(entry, file)
        else:
            archive.addfile(entry)


def write_tar(target, folder, prefix, epoch, owners={}):
    """Writes a plain archive to a file object."""
    with tarfile.open(fileobj=target, mode="w", format=tarfile.GNU_FORMAT) as archive:
        add_tree(archive, folder, prefix, epoch, owners)


def write_tar_gz(target, folder, prefix, epoch, level):
    with target.open("wb") as file, gzip.GzipFile("", "wb", level, file, mtime=0) as packed:
        write_tar(packed, folder, prefix, epoch)
