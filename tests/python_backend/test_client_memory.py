"""Tensors in shared memory of a client: they are not copied, and the client cannot harm the server through them."""

import os
import queue
import uuid
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from infer import text
from conftest import REAL, repository_of, start, stop
from test_failures import wait_for

SIZE = 1 << 20


@pytest.fixture(scope="module")
def memory_server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("memory")
    flags = [] if REAL else ["--allow-client-shm=true"]
    server = start(repository_of(directory, "in_place"), directory, *flags)
    yield server
    assert stop(server) == 0, server.log.read_text()[-4000:]
    assert REAL or server.shared_memory() == []


@pytest.fixture(params=["grpc", "http"])
def client(request, memory_server):
    kind = {"grpc": grpcclient, "http": httpclient}[request.param]
    port = {"grpc": memory_server.grpc_port, "http": memory_server.http_port}[request.param]
    with kind.InferenceServerClient(f"localhost:{port}") as client:
        client.kind = kind
        yield client
        client.unregister_system_shared_memory()


@pytest.fixture
def region():
    """A shared-memory object of `SIZE` bytes, and its name."""
    name = f"client_{uuid.uuid4().hex}"
    handle = shm.create_shared_memory_region("region", f"/{name}", SIZE)
    yield name, handle
    if os.path.exists(f"/dev/shm/{name}"):
        shm.destroy_shared_memory_region(handle)


def ask(client, count, how="", input_at=0, output_at=SIZE // 2, output_bytes=None, callback=None):
    """Requests INPUT + 1, with input and output in the region."""
    made = client.kind.InferInput("INPUT", [count], "FP32")
    made.set_shared_memory("region", count * 4, offset=input_at)
    named = client.kind.InferInput("HOW", [1], "BYTES")
    named.set_data_from_numpy(text(how))
    output = client.kind.InferRequestedOutput("OUTPUT")
    output.set_shared_memory("region", output_bytes or count * 4, offset=output_at)
    outputs = [output, client.kind.InferRequestedOutput("MAPPED")]
    if callback:
        return client.async_infer("in_place", [made, named], callback, outputs=outputs)
    return client.infer("in_place", [made, named], outputs=outputs)


def values_at(handle, count, offset):
    return shm.get_contents_as_numpy(handle, np.float32, [count], offset)


@pytest.mark.parametrize("count, input_at, output_at", [(4, 0, 64), (50_000, 0, SIZE // 2), (70_001, 4096 + 12, 600_004)])
def test_tensors_are_read_and_written_in_place(client, memory_server, region, count, input_at, output_at):
    name, handle = region
    client.register_system_shared_memory("region", f"/{name}", SIZE)
    for step in range(3):
        values = np.arange(count, dtype=np.float32) * (step + 1)
        shm.set_shared_memory_region(handle, [values], offset=input_at)
        answer = ask(client, count, input_at=input_at, output_at=output_at)
        np.testing.assert_array_equal(values_at(handle, count, output_at), values + 1)
        np.testing.assert_array_equal(values_at(handle, count, input_at), values)
    if not REAL:
        assert answer.as_numpy("MAPPED").tolist() == [f"/dev/shm/{name}".encode()]
        # The server creates its own shared memory for the first large tensor; there must be none.
        maps = Path(f"/proc/{memory_server.model_pids('in_place_0_0')[0]}/maps").read_text()
        assert memory_server.prefix not in maps


def test_a_model_that_writes_into_its_input_does_not_touch_the_clients(client, region):
    name, handle = region
    client.register_system_shared_memory("region", f"/{name}", SIZE)
    values = np.arange(5000, dtype=np.float32)
    for _ in range(2):
        shm.set_shared_memory_region(handle, [values])
        ask(client, 5000, "overwrite")
        np.testing.assert_array_equal(values_at(handle, 5000, SIZE // 2), values + 1)
        np.testing.assert_array_equal(values_at(handle, 5000, 0), values)
        values = values * 3


def test_an_output_may_overwrite_its_input(client, region):
    name, handle = region
    client.register_system_shared_memory("region", f"/{name}", SIZE)
    values = np.arange(5000, dtype=np.float32)
    shm.set_shared_memory_region(handle, [values])
    ask(client, 5000, output_at=8)
    np.testing.assert_array_equal(values_at(handle, 5000, 8), values + 1)


def test_an_output_that_does_not_fit_is_refused(client, region):
    name, handle = region
    client.register_system_shared_memory("region", f"/{name}", SIZE)
    with pytest.raises(Exception, match="should be at least 20000 bytes to hold the results"):
        ask(client, 5000, output_bytes=19_996)


@pytest.mark.skipif(bool(REAL), reason="the real server copies first")
def test_a_region_removed_while_in_use_stays_valid_until_the_request_ends(memory_server, region, tmp_path):
    name, handle = region
    values = np.arange(5000, dtype=np.float32)
    shm.set_shared_memory_region(handle, [values])
    mark, heard = tmp_path / "mark", queue.Queue()
    with grpcclient.InferenceServerClient(f"localhost:{memory_server.grpc_port}") as client:
        client.kind = grpcclient
        client.register_system_shared_memory("region", f"/{name}", SIZE)
        ask(client, 5000, f"wait {mark}", callback=lambda result, error: heard.put(error or result))
        wait_for(mark.exists)
        client.unregister_system_shared_memory("region")
        os.unlink(f"/dev/shm/{name}")
        mark.unlink()
        answer = heard.get(timeout=20)
    assert not isinstance(answer, Exception), answer
    np.testing.assert_array_equal(values_at(handle, 5000, SIZE // 2), values + 1)
    # No process keeps the removed object open after that.
    pids = memory_server.model_pids("in_place_0_0") + [memory_server.process.pid]
    wait_for(lambda: not any(name in link for pid in pids for link in open_files(pid)))


def open_files(pid):
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(descriptor))
        except OSError:
            pass
    return links


@pytest.mark.skipif(bool(REAL), reason="it ends the real server")
def test_a_client_that_truncates_its_memory_affects_no_other_client(client, memory_server, region, tmp_path):
    name, handle = region
    client.register_system_shared_memory("region", f"/{name}", SIZE)
    os.truncate(f"/dev/shm/{name}", 4096)
    with pytest.raises(Exception, match="shared memory region 'region' cannot be used any more"):
        ask(client, 50_000)
    # The error comes from the model, which continues.
    os.truncate(f"/dev/shm/{name}", SIZE)
    ask(client, 50_000)

    # Truncated while the model uses it: its process faults and is replaced.
    mark, heard = tmp_path / "mark", queue.Queue()
    with grpcclient.InferenceServerClient(f"localhost:{memory_server.grpc_port}") as other:
        other.kind = grpcclient
        ask(other, 50_000, f"wait {mark}", callback=lambda result, error: heard.put(error or result))
        wait_for(mark.exists)
        os.truncate(f"/dev/shm/{name}", 4096)
        mark.unlink()
        assert "SIGBUS" in str(heard.get(timeout=20))
        os.truncate(f"/dev/shm/{name}", SIZE)
        wait_for(lambda: memory_server.is_ready("v2/models/in_place/ready"))
        ask(other, 50_000)
