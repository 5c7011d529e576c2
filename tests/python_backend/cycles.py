#!/usr/bin/env python3
"""Loads and unloads a Python model repeatedly, and checks for leaks.

    tests/python_backend/cycles.py [--cycles 1000]

Each cycle loads the model, sends it a request of 64 KiB and unloads it. Every tenth cycle kills the model's process instead of
sending a request, and every seventh one loads a model whose file cannot be imported. The server's child processes, threads and open
files, its entries in /dev/shm and its temporary folders must be as many after the last cycle as before the first. Uses the
environment variables of the tests in this folder.
"""
import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpcclient
from infer import infer
from conftest import repository_of, start, stop


def resources(server):
    """Numbers of resources that a server uses now, by name."""
    proc = Path(f"/proc/{server.process.pid}")
    children = [pid for task in proc.glob("task/*/children") for pid in task.read_text().split()]
    scratch = Path(tempfile.gettempdir()).glob(f"trireme-python-{server.process.pid}-*")
    return {
        "processes": len(children),
        "files": len(os.listdir(proc / "fd")),
        "threads": len(os.listdir(proc / "task")),
        "shared memory": len(server.shared_memory()),
        "folders": sum(len(os.listdir(folder)) for folder in scratch),
    }


def wait_and_compare(server, before, timeout=20):
    """Waits until the counts no longer decrease, and returns those that are larger than `before`."""
    deadline = time.monotonic() + timeout
    while True:
        now = resources(server)
        # The async runtime starts threads on demand. They are idle and belong to no model.
        more = {name: now[name] - count for name, count in before.items() if now[name] > count + 4 * (name == "threads")}
        if not more or time.monotonic() > deadline:
            return more
        time.sleep(0.05)


def run(directory, cycles):
    """Runs `cycles` cycles; returns the counts that have grown, empty if there is no leak."""
    repository = repository_of(directory, "phases", "add_sub")
    (repository / "add_sub/1/model.py").write_text("import no_such_module\n")
    server = start(repository, directory, "--model-control-mode=explicit")
    values = np.arange(1 << 16, dtype=np.uint32).astype(np.uint8)
    with grpcclient.InferenceServerClient(f"localhost:{server.grpc_port}") as client:
        for cycle in range(-2, cycles):
            if cycle == 0:
                # The first two cycles create everything that is created only once.
                before = resources(server)
            client.load_model("phases")
            if cycle % 10 == 5:
                os.kill(server.model_pids("phases_0_0")[0], signal.SIGKILL)
            else:
                assert (infer(client, "phases", {"INPUT": values}).as_numpy("OUTPUT") == values).all()
            if cycle % 7 == 3:
                try:
                    client.load_model("add_sub")
                    raise AssertionError("a model that cannot be imported was loaded")
                except grpcclient.InferenceServerException as error:
                    assert "no_such_module" in str(error), error
            client.unload_model("phases")
        more = wait_and_compare(server, before)
    assert stop(server) == 0
    return {**more, **({"after the end": server.shared_memory()} if server.shared_memory() else {})}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=1000)
    args = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        more = run(Path(directory), args.cycles)
    print(f"{args.cycles} cycles in {time.monotonic() - begun:.0f} s; left behind: {more or 'nothing'}")
    sys.exit(bool(more))


if __name__ == "__main__":
    main()
