"""The container image: an OCI archive with two layers, the libraries and the programs. No daemon and no root are needed.

The image has no distribution inside: only Debian's packages that a world needs (MPI to start ranks, SSH to reach other
hosts, BusyBox as shell), and the libraries that these and our programs are linked with.
"""
import gzip, hashlib, io, json, pathlib

import archive
from base import write_base
from release import PROGRAMS, copy, scratch_folder

# The user of the image, and the folders in which it may write.
USER = 10001
HOME = "var/lib/trireme"
OWN_FOLDERS = [HOME, "var/cache/trireme", "run/trireme"]
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": f"/{HOME}",
    "HF_HOME": f"/{HOME}/huggingface",
    "TRIREME_CACHE_DIR": "/var/cache/trireme",
    "XDG_RUNTIME_DIR": "/run/trireme",
    # NVIDIA's container runtime mounts the driver's libraries.
    "NVIDIA_VISIBLE_DEVICES": "all",
    "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
}
PORTS = [8000, 8001, 8002]
# cuBLASLt computes wide products, and NCCL joins GPUs that do not reach each other's memory. The names are those that workers load.
CUDA_LIBRARIES = ["libcublasLt.so.13", "libnccl.so.2"]
# Compressed, as registries count; without NVIDIA's libraries, which are larger.
MAX_BYTES = 150_000_000


def build(release, out):
    with scratch_folder() as scratch:
        scratch = pathlib.Path(scratch)
        base, own, layout = scratch / "base", scratch / "own", scratch / "layout"
        write_base(base, [release.bin / program for program in PROGRAMS], USER, HOME)
        for folder in OWN_FOLDERS:
            (own / folder).mkdir(parents=True)
        for program in PROGRAMS:
            copy(release.bin / program, own / "usr/bin" / program, 0o755)
        release.write_shares(own / "usr/share")
        blobs = layout / "blobs/sha256"
        blobs.mkdir(parents=True)
        owners = {folder: USER for folder in OWN_FOLDERS}
        layers = [layer(blobs, base, release), layer(blobs, own, release, owners)]
        if release.cuda_libs:
            layers.insert(1, layer(blobs, cuda_folder(scratch / "cuda", release.cuda_libs), release))
        write_manifest(layout, blobs, release, layers)
        target = out / f"trireme-{release.version}-{release.debian_machine}.oci.tar"
        with target.open("wb") as file:
            archive.write_tar(file, layout, "", release.epoch)
    size = target.stat().st_size
    print(f"{target.name}: {size / 1e6:.1f} MB in {len(layers)} layers, {sum(entry['unpacked'] for entry in layers) / 1e6:.0f} MB unpacked")
    if size > MAX_BYTES and not release.cuda_libs:
        raise SystemExit(f"error: {target.name} has {size / 1e6:.1f} MB, and at most {MAX_BYTES / 1e6:.0f} are allowed")


def cuda_folder(folder, source):
    """Writes the libraries of NVIDIA that workers load, from a CUDA installation or a Python environment."""
    for library in CUDA_LIBRARIES:
        found = sorted(source.rglob(library))
        if not found:
            raise SystemExit(f"error: there is no {library} under {source}")
        copy(found[0].resolve(), folder / "usr/local/cuda/lib64" / library, 0o644)
    return folder


def layer(blobs, folder, release, owners={}):
    """Writes a folder as a layer. The manifest names the packed bytes, the configuration the plain ones."""
    plain = io.BytesIO()
    archive.write_tar(plain, folder, "", release.epoch, owners)
    packed = gzip.compress(plain.getvalue(), release.level, mtime=0)
    entry = blob(blobs, packed, "application/vnd.oci.image.layer.v1.tar+gzip")
    return {"descriptor": entry, "diff_id": digest(plain.getvalue()), "unpacked": len(plain.getvalue())}


def write_manifest(layout, blobs, release, layers):
    text = json.dumps(configuration(release, layers), indent=1).encode()
    config = blob(blobs, text, "application/vnd.oci.image.config.v1+json")
    manifest = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": config}
    manifest["layers"] = [entry["descriptor"] for entry in layers]
    entry = blob(blobs, json.dumps(manifest, indent=1).encode(), manifest["mediaType"])
    entry["platform"] = {"architecture": release.debian_machine, "os": "linux"}
    entry["annotations"] = {"org.opencontainers.image.ref.name": release.version}
    index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [entry]}
    (layout / "index.json").write_text(json.dumps(index, indent=1))
    (layout / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))


def configuration(release, layers):
    label = "org.opencontainers.image."
    return {
        "created": release.time("%Y-%m-%dT%H:%M:%SZ"),
        "architecture": release.debian_machine,
        "os": "linux",
        "config": {
            "User": f"{USER}:{USER}",
            "ExposedPorts": {f"{port}/tcp": {} for port in PORTS},
            "Env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
            "Entrypoint": ["/usr/bin/launch"],
            "Cmd": ["--model_repo=/usr/share/trireme/model_repository"],
            "WorkingDir": f"/{HOME}",
            "StopSignal": "SIGTERM",
            "Labels": {
                label + "title": "trireme",
                label + "description": "Serves language models behind the protocols of Triton, OpenAI and Anthropic",
                label + "version": release.version,
                label + "licenses": "Apache-2.0",
            },
        },
        "rootfs": {"type": "layers", "diff_ids": [entry["diff_id"] for entry in layers]},
        "history": [
            {"created": release.time("%Y-%m-%dT%H:%M:%SZ"), "created_by": f"scripts/package oci: {what}"}
            for what in ["libraries, MPI, SSH, BusyBox", *(["CUDA libraries"] if release.cuda_libs else []), "trireme"]
        ],
    }


def blob(blobs, content, media_type):
    """Writes a blob and returns its descriptor."""
    name = digest(content)
    (blobs / name.removeprefix("sha256:")).write_bytes(content)
    return {"mediaType": media_type, "digest": name, "size": len(content)}


def digest(content):
    return "sha256:" + hashlib.sha256(content).hexdigest()
