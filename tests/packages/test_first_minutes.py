"""From a package to the first token on a new system: Debian and Ubuntu with nothing but their smallest set of packages."""

import json
import re
import subprocess
import time
import urllib.request

import pytest

from conftest import BINARIES, ROOT, SYSTEMS, unpacked
from test_deb import deb, install

NAME = "demo/tiny-stories"
CHECKPOINT = ROOT / "model_repository/tensorrt_llm/1"
# What the README promises.
MOST_SECONDS = 180


@pytest.fixture
def hub():
    """The address of a hub with one model."""
    server = subprocess.Popen([BINARIES / "examples/hub_server", NAME, CHECKPOINT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield server.stdout.readline().strip()
    server.stdin.close()
    server.wait(timeout=60)


@pytest.fixture(params=SYSTEMS)
def system(request, tmp_path):
    with unpacked(request.param, tmp_path) as root:
        yield request.param, root


def test_one_command_after_the_installation_serves_a_model_of_a_hub(packages, hub, system):
    (name, root), began = system, time.monotonic()
    install(root, deb(packages[0]))
    installed = time.monotonic()
    root.environment |= {"HF_ENDPOINT": hub, "XDG_RUNTIME_DIR": "/tmp"}
    # The hub and the client are outside, so the network is that of the machine.
    command = root.command("trireme", "serve", NAME, "--device=cpu", "--host=127.0.0.1", "--port=18600", own_network=False)
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        lines = lines_until(server, "  curl ")
        text, first_token = streamed("http://127.0.0.1:18600/v1/completions")
        total = first_token - began
        with urllib.request.urlopen("http://127.0.0.1:18600/", timeout=30) as page:
            assert "<title>" in page.read().decode() and page.headers.get_content_type() == "text/html"
        described = " ".join(lines)
        assert f"`{NAME}`" in described and "with a page at http://127.0.0.1:18600/" in described, lines
    finally:
        # `unshare` ignores other signals, and ends its process 1, and with that the namespace.
        server.kill()
        server.wait(timeout=60)
    assert len(text) > 10 and re.search("[a-z]{3}", text), text
    print(f"{name}: installed in {installed - began:.1f} s, first token after {total:.1f} s")
    assert total < MOST_SECONDS


def lines_until(server, start):
    """The lines that a server prints up to the one with this start."""
    lines = []
    for line in server.stdout:
        lines.append(line.rstrip())
        if line.startswith(start):
            return lines
    raise AssertionError("\n".join(lines))


def streamed(url):
    """The text of a streamed completion, and the time of its first piece."""
    body = {"model": NAME, "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0, "stream": True}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    text, first = "", None
    with urllib.request.urlopen(request, timeout=60) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                first = first or time.monotonic()
                text += json.loads(line[6:])["choices"][0]["text"] if b'"text"' in line else ""
    return text, first
