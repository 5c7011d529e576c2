#!/usr/bin/env python3
"""Compares served adapters (LoRA) with transformers that adds PEFT's products, while more adapters are used than there are slots.

    check_gpu_adapters.py [--shape gqa] [--layers 4] [--quantize fp8] [--world-size N] [--batch-invariant] [--device cuda] [--bin DIR] [--port N]

Makes a checkpoint of make_checkpoint.py and four adapters, and serves the model with three of them and two slots, with drafts of prompt
look-up. Greedy requests with each adapter and with none are sent one by one, all at once, all at once while the fourth adapter is loaded,
used and unloaded, after a sleep, and all at once while a worker is killed. Their log-probabilities must be as near to fp32's as those of transformers'
bf16, and each token must be the likeliest or nearly so; without the adapters' products they must be far off. With --batch-invariant, all
runs must have the same tokens and the same log-probabilities. Prints one line per check; exits with 1 if one fails. Needs torch and
transformers.
"""
import argparse, concurrent.futures, json, os, pathlib, random, re, signal, subprocess, sys, tempfile, time, urllib.error, urllib.request

if {"-h", "--help"} & set(sys.argv[1:]):  # Before imports that may be missing.
    sys.exit(print(__doc__))

from serving_bench import Bench

MODEL = "tensorrt_llm"
NUM_OUTPUT = 48
# The linear layers that adapters may change, under the names of all shapes.
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Rank, seed and layers of each adapter. The last one is loaded while the server runs.
ADAPTERS = {"a": (16, 1, MODULES), "b": (5, 2, ["q_proj", "v_proj", "down_proj"]), "c": (16, 3, MODULES), "late": (8, 4, MODULES)}


def make(script, *arguments):
    command = [sys.executable, pathlib.Path(__file__).parent / script, *arguments]
    subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)


def expect(status, text, wanted):
    if status != wanted:
        sys.exit(f"FAIL {status}, expected {wanted}: {text}")


class Server:
    """A world, and the requests that are sent to it."""

    def __init__(self, args, bench):
        self.args, self.bench = args, bench
        pick = random.Random(5)
        # The second half repeats the first, so that prompt look-up finds drafts.
        halves = [[pick.randrange(10, bench.vocab) for _ in range(length)] for length in (3, 20, 65, 150)]
        self.rows = [(name, half + half) for half in halves for name in (MODEL, "a", "b", "c")]

    def post(self, path, body):
        request = urllib.request.Request(f"http://localhost:{self.args.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return 200, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def send(self, row):
        """The tokens and their log-probabilities."""
        name, prompt = row
        body = {"input_ids": prompt, "input_lengths": len(prompt), "request_output_len": NUM_OUTPUT, "end_id": -1,
                "exclude_input_in_output": True, "return_log_probs": True}
        status, text = self.post(f"/v2/models/{name}/generate", body)
        if status != 200:
            raise RuntimeError(f"a request of `{name}` gets {status}: {text}")
        answer = json.loads(text)
        return answer["output_ids"], answer["output_log_probs"]

    def at_once(self, meanwhile=lambda: None):
        with concurrent.futures.ThreadPoolExecutor(len(self.rows)) as pool:
            answers = [pool.submit(self.send, row) for row in self.rows]
            meanwhile()
            return [answer.result() for answer in answers]

    def load_late(self, folder, found):
        """Loads an adapter while others run, uses it and unloads it."""
        prompt = self.rows[-1][1]
        expect(*self.post("/v1/load_lora_adapter", {"lora_name": "late", "lora_path": str(folder)}), 200)
        found.append((("late", prompt), self.send(("late", prompt))))
        expect(*self.post("/v1/unload_lora_adapter", {"lora_name": "late"}), 200)
        expect(*self.post("/v2/models/late/generate", {"input_ids": prompt, "input_lengths": len(prompt), "request_output_len": 1}), 404)

    def kill_a_worker(self):
        """Kills the last worker once tokens are generated."""
        before, deadline = self.bench.metric("output_tokens_total"), time.monotonic() + 60
        while self.bench.metric("output_tokens_total") == before:
            if time.monotonic() > deadline:
                sys.exit("FAIL no token was generated within 60 s")
            time.sleep(0.002)
        text = urllib.request.urlopen(f"http://localhost:{self.args.port + 2}/metrics", timeout=30).read().decode()
        os.kill(max(int(pid) for pid in re.findall(r'^trireme_llm_worker_ready\{.*pid="(\d+)"', text, re.M)), signal.SIGKILL)


def serve(args, checkpoint, folders, scratch):
    """The answers of each run, as pairs of a request and its answer."""
    flags = ["--enable-sleep-mode"] + (["--batch-invariant"] if args.batch_invariant else [])
    bench = Bench(checkpoint, args.device, scratch, args.bin, args.port, rows=128, flags=flags)
    bench.set_parameters(
        lora_modules=",".join(f"{name}={folders[name]}" for name in ("a", "b", "c")), max_loras=2, max_lora_rank=16, prompt_lookup_num_tokens=3,
        max_tokens_in_paged_kv_cache=16384, enable_kv_cache_reuse="false")
    bench.start(args.world_size)
    try:
        server, late = Server(args, bench), []
        paired = lambda answers: list(zip(server.rows, answers))
        runs = {"one by one": paired([server.send(row) for row in server.rows]), "at once": paired(server.at_once())}
        runs["while one is loaded"] = paired(server.at_once(lambda: server.load_late(folders["late"], late))) + late
        for path in ("/sleep?level=1", "/wake_up"):
            expect(*server.post(path, {}), 200)
        runs["after a sleep"] = paired(server.at_once())
        runs["while a worker is killed"] = paired(server.at_once(server.kill_a_worker))
        if (restarts := bench.metric("worker_restarts_total")) != 1:
            sys.exit(f"FAIL workers were restarted {restarts:.0f} times, expected 1")
        if not bench.metric("drafted_tokens_total"):
            sys.exit("FAIL no draft was made")
    finally:
        bench.stop()
    return runs


def compare(args, checkpoint, folders, runs):
    import torch
    import check_gpu_model as reference

    torch.backends.cuda.matmul.allow_tf32 = False
    answers = [pair for run in runs.values() for pair in run]
    distinct = {(name, tuple(prompt), tuple(tokens)): None for (name, prompt), (tokens, _) in answers}
    rows = {}
    for kind, dtype in (("exact", torch.float32), ("rounded", torch.bfloat16)):
        model = reference.load(checkpoint, dtype)
        for name, prompt, tokens in distinct:
            for of, folder in ((kind, folders.get(name)), ("plain", None)):
                if of == "plain" and kind != "exact":
                    continue
                hooks = reference.with_adapter(model, folder)
                row = reference.log_probs(model, [*prompt, *tokens][:-1], None)[len(prompt) - 1:]
                rows[of, name, prompt, tokens] = (row.gather(1, torch.tensor(tokens)[:, None])[:, 0].double(), row.max(-1).values.double())
                for hook in hooks:
                    hook.remove()
        del model
        torch.cuda.empty_cache()
    good = True
    for run, pairs in runs.items():
        gaps = {"ours": [], "bf16": [], "without": []}
        behind = 0.0
        for (name, prompt), (tokens, log_probs) in pairs:
            of = lambda kind: rows[kind, name, tuple(prompt), tuple(tokens)]
            exact, likeliest = of("exact")
            gaps["ours"].append(torch.tensor(log_probs).flatten().double() - exact)
            gaps["bf16"].append(of("rounded")[0] - exact)
            if name != MODEL:
                gaps["without"].append(of("plain")[0] - exact)
            behind = max(behind, (likeliest - exact).max().item())
        gaps = {kind: torch.cat(parts) for kind, parts in gaps.items()}
        rms = {kind: gap.pow(2).mean().sqrt().item() for kind, gap in gaps.items()}
        worst = {kind: gap.abs().max().item() for kind, gap in gaps.items()}
        is_near = rms["ours"] <= 1.25 * rms["bf16"] and worst["ours"] <= 2 * worst["bf16"] and behind <= 2 * worst["bf16"]
        is_good = is_near and rms["without"] > 5 * rms["ours"]
        good &= is_good
        print(f"{'ok  ' if is_good else 'FAIL'} {run}: error rms {rms['ours']:.2e} worst {worst['ours']:.2e} (transformers bf16 {rms['bf16']:.2e} "
              f"{worst['bf16']:.2e}; without the products {rms['without']:.2e}), tokens behind fp32's by at most {behind:.2e}", flush=True)
    first = runs["one by one"]
    for run, pairs in runs.items():
        same = sum(a == b for a, b in zip(first, pairs))
        if args.batch_invariant:
            good &= same == len(first)
            print(f"{'ok  ' if same == len(first) else 'FAIL'} {run}: {same} of {len(first)} requests have the bits of requests one by one")
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="gqa")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--quantize", help="a form of make_checkpoint.py")
    parser.add_argument("--world-size", type=int, default=1, help="ranks, which share the model")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--bin", default="target/release", help="folder of `launch` and `trireme`")
    parser.add_argument("--port", type=int, default=8780)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        made = pathlib.Path(made)
        form = ["--quantize", args.quantize] if args.quantize else []
        make("make_checkpoint.py", args.shape, made / "model", "--layers", args.layers, *form)
        folders = {name: made / name for name in ADAPTERS}
        make_one = lambda name, rank, seed, modules: make(
            "make_adapter.py", made / "model", folders[name], "--rank", rank, "--seed", seed, "--modules", ",".join(modules))
        with concurrent.futures.ThreadPoolExecutor(len(ADAPTERS)) as pool:
            list(pool.map(lambda entry: make_one(entry[0], *entry[1]), ADAPTERS.items()))
        runs = serve(args, made / "model", folders, made / "scratch")
        sys.exit(0 if compare(args, made / "model", folders, runs) else 1)


main()
