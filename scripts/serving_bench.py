"""Shared code of the scripts that measure or check a served model: starts a world and measures it with `trireme bench core`."""
import json, os, pathlib, random, re, signal, subprocess, threading, time, urllib.request

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent / "model_repository"


class Bench:
    """Serves one checkpoint from a generated repository, and measures."""

    def __init__(self, checkpoint, device, scratch, bin, port, rows=256, flags=()):
        self.checkpoint, self.device, self.scratch, self.port = pathlib.Path(checkpoint).resolve(), device, scratch, port
        self.vocab = json.loads((self.checkpoint / "config.json").read_text())["vocab_size"]
        self.bin, self.flags = pathlib.Path(bin).resolve(), flags
        self.random = random.Random(0)
        self.repository = scratch / "repository"
        self.write_repository(rows)

    def write_repository(self, rows):
        """Writes a repository with only the shipped LLM, for this checkpoint, with all free memory for KV blocks."""
        model = self.repository / "tensorrt_llm"
        (model / "1").mkdir(parents=True)
        text = (REPOSITORY / "tensorrt_llm" / "config.pbtxt").read_text()
        text = text.replace("max_batch_size: 64", f"max_batch_size: {rows}")
        text = re.sub(r'parameters \{\s*key: "max_tokens_in_paged_kv_cache".*?\}\s*\}', "", text, flags=re.S)
        (model / "config.pbtxt").write_text(text)
        self.set_parameters(gpt_model_path=self.checkpoint)

    def set_parameters(self, **values):
        """Adds parameters to the model's configuration; call it before `start`."""
        with (self.repository / "tensorrt_llm" / "config.pbtxt").open("a") as config:
            for key, value in values.items():
                config.write('parameters { key: "%s" value: { string_value: "%s" } }\n' % (key, value))

    def requests(self, count, tokens_in, tokens_out):
        line = lambda: {"prompt_token_ids": [self.random.randrange(10, self.vocab) for _ in range(tokens_in)],
                        "max_tokens": tokens_out}
        return "".join(json.dumps(line()) + "\n" for _ in range(count))

    def launch(self, size, *flags):
        ports = [f"--http_port={self.port}", f"--grpc_port={self.port + 1}", f"--metrics_port={self.port + 2}"]
        return run([self.bin / "launch", f"--world_size={size}", f"--model_repo={self.repository}", f"--device={self.device}",
                    *ports, *flags, *self.flags], 180)

    def planned_mib(self, size):
        """The memory that each worker takes of its device according to `launch --plan`: the sum of the row, without free memory."""
        rows = re.findall(r"^ *\d+  .*?[0-9.]+ [KMGT]iB  (.*)$", self.launch(size, "--plan"), re.M)
        units = {"K": 2 ** -10, "M": 1, "G": 2 ** 10, "T": 2 ** 20}
        return [round(sum(float(amount) * units[unit] for amount, unit in re.findall(r"([0-9.]+) ([KMGT])iB", row))) for row in rows]

    def start(self, size):
        started = time.perf_counter()
        self.launch(size, "--detach")
        return time.perf_counter() - started

    def stop(self):
        subprocess.run([self.bin / "launch", "stop", f"--http_port={self.port}"], timeout=60, capture_output=True)

    def serve(self, name, workload, concurrency):
        file, out = self.scratch / f"{name}.jsonl", self.scratch / f"{name}.json"
        file.write_text(workload)
        command = [self.bin / "trireme", "bench", "core", "-u", f"localhost:{self.port + 1}",
                   "--json", out]
        pace = ["--concurrency", str(concurrency)] if concurrency else []
        run(command + pace + ["file", file], 240)
        return json.loads(out.read_text())

    def ask(self, prompt, num_tokens):
        """Streams one greedy answer. Returns the seconds to its first token, and its tokens."""
        body = {"input_ids": prompt, "input_lengths": len(prompt), "request_output_len": num_tokens, "end_id": -1, "streaming": True,
                "exclude_input_in_output": True}
        url = f"http://localhost:{self.port}/v2/models/tensorrt_llm/generate_stream"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        started, first, tokens = time.perf_counter(), None, []
        with urllib.request.urlopen(request, timeout=300) as stream:
            for line in stream:
                if line.startswith(b"data:"):
                    first = first or time.perf_counter() - started
                    found = json.loads(line[5:])["output_ids"]
                    tokens += found if isinstance(found, list) else [found]
        return first, tokens

    def metric(self, name):
        """The sum over its labels of a metric `trireme_llm_NAME`."""
        text = urllib.request.urlopen(f"http://localhost:{self.port + 2}/metrics", timeout=30).read().decode()
        return sum(float(value) for value in re.findall(rf"^trireme_llm_{name}(?:{{.*}})? ([0-9.e+]+)$", text, re.M))

    def kill_a_worker(self):
        """The longest pause, in seconds, of a stream whose worker is killed: its maximum inter-token latency."""
        def kill():
            time.sleep(0.7)
            pids = subprocess.run(["pgrep", "-f", "^trireme: worker"], capture_output=True, text=True).stdout.split()
            if pids:
                os.kill(int(pids[-1]), signal.SIGKILL)
        killer = threading.Thread(target=kill)
        killer.start()
        run_ = self.serve("killed", self.requests(1, 128, 600), 1)
        killer.join()
        return run_["inter_token_latency_ms"].get("max", 0) / 1000


def run(command, timeout):
    done = subprocess.run([str(part) for part in command], timeout=timeout, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed ({done.returncode}): {done.stdout}{done.stderr}")
    return done.stdout


def gpu_name():
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.strip().splitlines()


def gpu_memory_used():
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.run(query, capture_output=True, text=True).stdout.split()]


def commit():
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


def print_table(columns, corner):
    """Prints a table with one column per key of `columns` and one line per figure."""
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    def show(value):
        if isinstance(value, dict):
            return f"{value['p50']:.1f} / {value['p99']:.1f}"
        return f"{value:.2f}" if isinstance(value, float) else "-" if value is None else str(value)
    print(f"{corner:36}" + "".join(f"{key:>22}" for key in columns))
    for name in names:
        print(f"{name:36}" + "".join(f"{show(column.get(name)):>22}" for column in columns.values()))
