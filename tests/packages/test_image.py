"""The container image: its parts, and a world that runs in it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request

import pytest

from conftest import ROOT, needs_root
from roots import Root

sys.path.append(str(ROOT / "tests/support"))

from ports import free_ports  # noqa: E402 (needs the path above)


@pytest.fixture(scope="module")
def image(packages):
    (found,) = packages[0].glob("*.oci.tar")
    return found


@pytest.fixture(scope="module")
def bundle(image, tmp_path_factory):
    """The image unpacked by umoci, which checks every digest: a root folder and a configuration."""
    needs_root()
    folder = tmp_path_factory.mktemp("image")
    with tarfile.open(image) as archive:
        archive.extractall(folder / "layout", filter="tar")
    index = json.loads((folder / "layout/index.json").read_text())
    tag = index["manifests"][0]["annotations"]["org.opencontainers.image.ref.name"]
    command = ["umoci", "unpack", "--image", f"{folder}/layout:{tag}", folder / "bundle"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    yield folder / "bundle"
    shutil.rmtree(folder)


@pytest.fixture
def process(bundle):
    return json.loads((bundle / "config.json").read_text())["process"]


def root_of(bundle, process):
    environment = dict(entry.split("=", 1) for entry in process["env"])
    user = f"{process['user']['uid']}:{process['user']['gid']}"
    return Root(bundle / "rootfs", user, environment)


def test_skopeo_reads_the_image(image):
    done = subprocess.run(["skopeo", "inspect", f"oci-archive:{image}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["Os"] == "linux" and len(found["Layers"]) == 2
    assert found["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert image.stat().st_size < 150e6


def test_skopeo_copies_every_layer(image, tmp_path):
    done = subprocess.run(["skopeo", "--insecure-policy", "copy", f"oci-archive:{image}", f"dir:{tmp_path}/copy"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_image_has_a_user_ports_and_an_entry_point(image, process):
    done = subprocess.run(["skopeo", "inspect", "--config", f"oci-archive:{image}"], capture_output=True, text=True)
    config = json.loads(done.stdout)["config"]
    assert config["User"] == "10001:10001" and process["user"]["uid"] == 10001
    assert set(config["ExposedPorts"]) == {"8000/tcp", "8001/tcp", "8002/tcp"}
    assert process["args"][0] == "/usr/bin/launch"


def test_files_of_debian_have_their_licences(bundle):
    licences = bundle / "rootfs/usr/share/doc"
    for name in ["libc6", "openmpi-bin", "openssh-client", "busybox-static", "trireme"]:
        assert any((licences / name).iterdir()), name


def test_the_image_serves_as_it_is_and_ends_when_it_is_asked_to(bundle, process):
    http, grpc, metrics = free_ports(3)
    ports = [f"--http_port={http}", f"--grpc_port={grpc}", f"--metrics_port={metrics}", "--device=cpu"]
    command = root_of(bundle, process).command(*process["args"], *ports, own_network=False)
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        await_ready(http, started)
        body = json.dumps({"model": "ensemble", "prompt": "Once upon a time", "max_tokens": 8}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{http}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as response:
            assert json.load(response)["choices"][0]["text"]
        # `launch` is process 1 of its namespace, like in a container.
        os.kill(only_child(started.pid), signal.SIGTERM)
        _, log = started.communicate(timeout=60)
        assert started.returncode == 0, log
    finally:
        started.kill()


def await_ready(port, started):
    deadline = time.monotonic() + 60
    while True:
        assert started.poll() is None, started.stderr.read()
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5).close()
        except (urllib.error.URLError, ConnectionError):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def only_child(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        (child,) = file.read().split()
    return int(child)


def test_mpirun_starts_several_ranks_in_the_image(bundle, process):
    script = """
        launch --world_size=2 --model_repo=/usr/share/trireme/model_repository --device=cpu --oversubscribe --detach
        trireme client 'Once upon a time'
        launch status && launch stop
    """
    assert "ready, 2 rank(s)" in root_of(bundle, process).run("sh", "-ec", script)


def test_launch_reaches_another_host_through_the_image_s_ssh(bundle, process):
    """With the commands of the LeaderWorkerSet: the second name is an address of this host, but none of its names."""
    script = """
        mkdir -p /tmp/ssh && ssh-keygen -q -t ed25519 -N '' -f /tmp/ssh/id_ed25519
        /usr/bin/sshd -De -f/dev/null -p2222 -h/tmp/ssh/id_ed25519 -oAuthorizedKeysFile=/tmp/ssh/id_ed25519.pub \\
            -oStrictModes=no -oUsePAM=no -oPidFile=none &
        export OMPI_MCA_plm_rsh_agent='ssh -p 2222 -i /tmp/ssh/id_ed25519 -o BatchMode=yes -o StrictHostKeyChecking=accept-new -o UserKnownHostsFile=/tmp/ssh/known'
        until $OMPI_MCA_plm_rsh_agent 10.77.0.2 true; do sleep 0.1; done
        launch --world_size=2 --hosts=$(hostname):1,10.77.0.2:1 --model_repo=/usr/share/trireme/model_repository --device=cpu --oversubscribe --detach
        trireme client 'Once upon a time'
        launch stop
    """
    done = subprocess.run(root_of(bundle, process).command("sh", "-ec", script), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Accepted publickey for trireme" in done.stderr, done.stdout + done.stderr
