#!/usr/bin/env python3
"""Checks tensors in a client's GPU memory, with a server, an identity model, and this process as the client.

    scripts/check_gpu_client_memory.py [--bin DIR] [--port 8780] [--device 0]

This process allocates GPU memory through the driver (libcuda and ctypes) and registers it with the server by its IPC handle, over HTTP.
If tritonclient with its CUDA module is installed, it also tests gRPC. Needs a GPU, and only Python's standard library. The last line has
the totals.
"""
import argparse, base64, ctypes, json, os, pathlib, random, signal, subprocess, sys, tempfile, time, urllib.error, urllib.request

CONFIG = """name: "echo" backend: "identity" max_batch_size: 0
input [ { name: "INPUT0" data_type: TYPE_UINT8 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_UINT8 dims: [ -1 ] } ]
"""
ALLOCATION = 32 << 20


class Driver:
    """The functions of CUDA's driver API that a client needs."""

    def __init__(self, device):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        number, self.context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(number), device)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), number)
        self.call("cuCtxSetCurrent", self.context)

    def call(self, name, *args):
        code = getattr(self.cuda, name)(*args)
        if code:
            raise RuntimeError(f"{name}: CUDA error {code}")

    def alloc(self, size):
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address

    def free(self, address):
        self.call("cuMemFree_v2", address)

    def write(self, address, data, offset=0):
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address.value + offset), data, ctypes.c_size_t(len(data)))
        self.call("cuCtxSynchronize")

    def read(self, address, size, offset=0):
        data = ctypes.create_string_buffer(size)
        self.call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address.value + offset), ctypes.c_size_t(size))
        return data.raw

    def handle(self, address):
        handle = (ctypes.c_char * 64)()
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(bytearray(handle))

    def free_bytes(self):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value


class Server:
    def __init__(self, bin, port, scratch):
        self.port = port
        model = pathlib.Path(scratch) / "repository" / "echo"
        (model / "1").mkdir(parents=True)
        (model / "config.pbtxt").write_text(CONFIG)
        self.log = open(pathlib.Path(scratch) / "rank.log", "w")
        command = [f"{bin}/trireme", "rank", f"--model-repository={model.parent}", "--allow-client-shm=true",
                   f"--http-port={port}", f"--grpc-port={port + 1}", f"--metrics-port={port + 2}"]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)
        deadline = time.time() + 60
        while self.ask("GET", "/v2/health/ready")[0] != 200:
            if self.process.poll() is not None or time.time() > deadline:
                self.stop()
                sys.exit("error: the server did not become ready:\n" + open(self.log.name).read()[-2000:])
            time.sleep(0.1)

    def ask(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://localhost:{self.port}{path}", data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")
        except OSError as error:
            return 0, str(error)

    def register(self, name, handle, size, device=0):
        body = {"raw_handle": {"b64": base64.b64encode(handle).decode()}, "device_id": device, "byte_size": size}
        return self.ask("POST", f"/v2/cudasharedmemory/region/{name}/register", body)

    def unregister(self, name=None):
        return self.ask("POST", f"/v2/cudasharedmemory/{f'region/{name}/' if name else ''}unregister")

    def status(self):
        return self.ask("GET", "/v2/cudasharedmemory/status")[1]

    def infer(self, source, target, size):
        """`source` and `target` are (region, offset)."""
        place = lambda region, offset: {"shared_memory_region": region, "shared_memory_offset": offset, "shared_memory_byte_size": size}
        body = {"inputs": [{"name": "INPUT0", "datatype": "UINT8", "shape": [size], "parameters": place(*source)}],
                "outputs": [{"name": "OUTPUT0", "parameters": place(*target)}]}
        return self.ask("POST", "/v2/models/echo/infer", body)

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


class Checks:
    def __init__(self):
        self.passed = self.failed = 0

    def __call__(self, good, what, seen=""):
        self.passed, self.failed = self.passed + bool(good), self.failed + (not good)
        print(f"{'ok  ' if good else 'FAIL'} {what}" + ("" if good else f": {seen}"), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default="target/release", help="folder of `trireme`")
    parser.add_argument("--port", type=int, default=8780, help="first of three ports")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--client-that-dies", metavar="REGION", help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        gpu = Driver(args.device)
    except (OSError, RuntimeError) as error:
        sys.exit(f"skipped: no CUDA device ({error})")
    if args.client_that_dies:
        memory = gpu.alloc(ALLOCATION)
        gpu.write(memory, b"\7" * 4096)
        print(gpu.handle(memory).hex(), flush=True)
        time.sleep(60)
        return
    checks = Checks()
    with tempfile.TemporaryDirectory() as scratch:
        server = Server(args.bin, args.port, scratch)
        try:
            copies(server, gpu, args.device, checks)
            refusals(server, gpu, args.device, checks)
            context(server, gpu, args.device, checks)
            dead_client(server, gpu, args, checks)
            with_tritonclient(args, checks)
            checks(server.process.poll() is None, "the server still runs")
        finally:
            server.unregister()
            code = server.stop()
        checks(code == 0, "it exits with status 0", code)
    print(f"{checks.passed} passed, {checks.failed} failed")
    sys.exit(checks.failed > 0)


def copies(server, gpu, device, checks):
    """Data of several sizes and at several offsets is returned unchanged."""
    source, target = gpu.alloc(ALLOCATION), gpu.alloc(ALLOCATION)
    first = server.register("in", gpu.handle(source), ALLOCATION, device)
    second = server.register("out", gpu.handle(target), ALLOCATION, device)
    checks(first[0] == 200 and second[0] == 200, "two regions are registered", (first, second))
    names = sorted((region["name"], region["device_id"], region["byte_size"]) for region in server.status())
    checks(names == [("in", device, ALLOCATION), ("out", device, ALLOCATION)], "status lists them", names)
    checks(server.ask("GET", "/v2/systemsharedmemory/status")[1] == [], "system shared memory has none")
    for size, read_at, write_at in [(1, 0, 0), (16, 3, 5), (65536, 4096, 1), (16 << 20, 12345, 1 << 20)]:
        data = random.Random(size).randbytes(size)
        gpu.write(source, data, read_at)
        gpu.write(target, b"\0" * (size + 2), write_at - (write_at > 0))
        began = time.perf_counter()
        status, answer = server.infer(("in", read_at), ("out", write_at), size)
        took = time.perf_counter() - began
        found = gpu.read(target, size, write_at)
        checks(status == 200 and found == data, f"{size} bytes are returned ({took * 1e3:.2f} ms)", (status, answer))
        edge = gpu.read(target, 1, write_at + size)
        checks(edge == b"\0", "and nothing after them", edge)
    status, answer = server.infer(("in", 0), ("in", 64), 64)
    checks(status == 200 and gpu.read(source, 64, 64) == gpu.read(source, 64), "a region serves as input and output", answer)
    server.unregister()
    gpu.free(source), gpu.free(target)


def refusals(server, gpu, device, checks):
    memory = gpu.alloc(ALLOCATION)
    handle = gpu.handle(memory)
    for what, answer in [
        ("a handle of garbage", server.register("x", b"x" * 64, 16, device)),
        ("a device that is not there", server.register("x", handle, 16, 99)),
        ("more bytes than the allocation has", server.register("x", handle, ALLOCATION + 1, device)),
        ("no bytes", server.register("x", handle, 0, device)),
    ]:
        checks(answer[0] == 400 and "error" in answer[1], f"refused: {what}", answer)
    checks(server.register("x", handle, ALLOCATION, device)[0] == 200, "the same memory registers after them")
    again = server.register("x", handle, ALLOCATION, device)
    checks(again[0] == 400 and "already in manager" in again[1]["error"], "refused: a name twice", again)
    for what, source in [("an offset behind the region", ("x", ALLOCATION)), ("an end behind it", ("x", ALLOCATION - 8)),
                         ("an offset that wraps", ("x", 2**64 - 8)), ("a region nobody registered", ("y", 0))]:
        answer = server.infer(source, ("x", 0), 16)
        checks(400 <= answer[0] < 500, f"refused: {what}", answer)
    server.unregister("x")
    checks(server.status() == [], "unregistered")
    checks(server.infer(("x", 0), ("x", 64), 16)[0] >= 400, "and unusable after that")
    gpu.free(memory)


def context(server, gpu, device, checks):
    """The server releases its device memory with the last region."""
    memory = gpu.alloc(ALLOCATION)
    idle = gpu.free_bytes()
    server.register("x", gpu.handle(memory), ALLOCATION, device)
    held = idle - gpu.free_bytes()
    server.unregister("x")
    left = idle - gpu.free_bytes()
    checks(left < 16 << 20, f"a region costs {held >> 20} MiB of the device, and nothing after it is unregistered", f"{left >> 20} MiB")
    gpu.free(memory)


def dead_client(server, gpu, args, checks):
    """A client that is killed while its region is registered does not affect other clients."""
    command = [sys.executable, __file__, "--device", str(args.device), "--client-that-dies", "gone"]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    handle = bytes.fromhex(client.stdout.readline().strip())
    registered = server.register("gone", handle, ALLOCATION, args.device)
    target = gpu.alloc(ALLOCATION)
    server.register("out", gpu.handle(target), ALLOCATION, args.device)
    status, answer = server.infer(("gone", 0), ("out", 0), 4096)
    checks(status == 200 and gpu.read(target, 4096) == b"\7" * 4096, "another process's memory is read", (registered, answer))
    client.kill(), client.wait()
    status, answer = server.infer(("gone", 0), ("out", 0), 4096)
    checks(status == 200 or "error" in answer, f"its client killed, a request gets {status}", answer)
    server.unregister("gone"), server.unregister("out")
    data = os.urandom(4096)
    gpu.write(target, data)
    server.register("out", gpu.handle(target), ALLOCATION, args.device)
    status, answer = server.infer(("out", 0), ("out", 8192), 4096)
    checks(status == 200 and gpu.read(target, 4096, 8192) == data, "other clients can register and are served after that", answer)
    server.unregister()
    gpu.free(target)


def with_tritonclient(args, checks):
    """Tests with tritonclient's CUDA module, if it is installed."""
    try:
        import numpy as np
        import tritonclient.grpc as triton
        import tritonclient.utils.cuda_shared_memory as shared
    except ImportError as error:
        print(f"skip tritonclient over gRPC: {error}")
        return
    client = triton.InferenceServerClient(f"localhost:{args.port + 1}")
    data = np.arange(65536, dtype=np.uint32).view(np.uint8)
    region = shared.create_shared_memory_region("both", 2 * data.nbytes, args.device)
    shared.set_shared_memory_region(region, [data])
    client.register_cuda_shared_memory("both", shared.get_raw_handle(region), args.device, 2 * data.nbytes)
    status = client.get_cuda_shared_memory_status().regions
    checks([(key, value.byte_size) for key, value in status.items()] == [("both", 2 * data.nbytes)], "tritonclient: status", status)
    source, target = triton.InferInput("INPUT0", [data.nbytes], "UINT8"), triton.InferRequestedOutput("OUTPUT0")
    source.set_shared_memory("both", data.nbytes)
    target.set_shared_memory("both", data.nbytes, data.nbytes)
    client.infer("echo", [source], outputs=[target])
    found = shared.get_contents_as_numpy(region, np.uint8, [2 * data.nbytes])
    checks(np.array_equal(found[data.nbytes:], data), "tritonclient: its tensors are returned")
    client.unregister_cuda_shared_memory("both")
    shared.destroy_shared_memory_region(region)


if __name__ == "__main__":
    main()
