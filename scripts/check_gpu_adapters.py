#!/usr/bin/env python3
"""Compares served adapters (LoRA) with transformers that adds PEFT's products, while more adapters are used than there are slots.

    check_gpu_adapters.py [--shape gqa] [--layers 4] [--quantize fp8] [--world-size N] [--pp N] [--batch-invariant] [--guided]
                          [--drafter mtp|eagle3|draft_model] [--kv-cache fp8|int8] [--host-tier] [--device cuda] [--bin DIR] [--port N]

Makes a checkpoint of make_checkpoint.py and four adapters, and serves the model with three of them and two slots, with drafts of prompt
look-up. Greedy requests with each adapter and with none are sent one by one, all at once, all at once while the fourth adapter is loaded,
used and unloaded, after a sleep of each level, and all at once while a worker is killed. Their log-probabilities must be as near to fp32's as those of transformers'
bf16, and each token must be the likeliest or nearly so; without the adapters' products they must be far off. With --batch-invariant, all
runs must have the same tokens and the same log-probabilities. An adapter of a layer that takes none must be refused by name. Prints one
line per check; exits with 1 if one fails. Needs torch and transformers.

With --drafter, that one guesses, and knows the order in which the checkpoint's tokens follow each other (check_gpu_drafts.py), so some guesses
must be accepted. With --guided, half of the requests are held to lower-case letters. With --kv-cache, keys and values have 8 bits, also those of
transformers. With --host-tier, the prefix cache is on and smaller than the prompts, and blocks must come back from host memory.
"""
import argparse, concurrent.futures, json, math, os, pathlib, random, re, shutil, signal, subprocess, sys, tempfile, time
import typing, urllib.error, urllib.request

if {"-h", "--help"} & set(sys.argv[1:]):  # Before imports that may be missing.
    sys.exit(print(__doc__))

import check_gpu_drafts as drafts
from serving_bench import REPOSITORY, Bench

MODEL = "tensorrt_llm"
NUM_OUTPUT = 48
# The linear layers that adapters may change, under the names of all shapes: those of attention, also over latent vectors, of recurrent
# states and of feed-forward.
MODULES = ["q_proj", "k_proj", "v_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "in_proj_qkv", "in_proj_z", "in_proj_b",
           "in_proj_a", "in_proj_qkvz", "in_proj_ba", "out_proj", "gate_proj", "up_proj", "down_proj"]
# Rank, seed and layers of each adapter. The last one is loaded while the server runs.
ADAPTERS = {"a": (16, 1, MODULES), "b": (5, 2, ["q_proj", "v_proj", "q_b_proj", "in_proj_b", "in_proj_ba", "down_proj"]), "c": (16, 3, MODULES), "late": (8, 4, MODULES)}
# A layer that takes no adapters, in shapes that have it.
REFUSED = {"deepseek": "kv_b_proj"}
LETTERS = "[a-z]{2000}"


class Request(typing.NamedTuple):
    name: str
    prompt: tuple
    is_guided: bool


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
        is_guided = lambda row, name: args.guided and (row + "abc".find(name)) % 2 == 0
        self.rows = [Request(name, (*half, *half), is_guided(row, name)) for row, half in enumerate(halves) for name in (MODEL, "a", "b", "c")]

    def post(self, path, body):
        request = urllib.request.Request(f"http://localhost:{self.args.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return 200, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def send(self, row):
        """The tokens and their log-probabilities."""
        body = {"input_ids": row.prompt, "input_lengths": len(row.prompt), "request_output_len": NUM_OUTPUT, "end_id": -1,
                "exclude_input_in_output": True, "return_log_probs": True}
        if row.is_guided:
            body |= {"guided_decoding_guide_type": "regex", "guided_decoding_guide": LETTERS}
        status, text = self.post(f"/v2/models/{row.name}/generate", body)
        if status != 200:
            raise RuntimeError(f"a request of `{row.name}` gets {status}: {text}")
        answer = json.loads(text)
        return answer["output_ids"], answer["output_log_probs"]

    def at_once(self, meanwhile=lambda: None):
        with concurrent.futures.ThreadPoolExecutor(len(self.rows)) as pool:
            answers = [pool.submit(self.send, row) for row in self.rows]
            meanwhile()
            return [answer.result() for answer in answers]

    def load_late(self, folder, found):
        """Loads an adapter while others run, uses it and unloads it."""
        row = self.rows[-1]._replace(name="late")
        expect(*self.post("/v1/load_lora_adapter", {"lora_name": "late", "lora_path": str(folder)}), 200)
        found.append((row, self.send(row)))
        expect(*self.post("/v1/unload_lora_adapter", {"lora_name": "late"}), 200)
        expect(*self.post("/v2/models/late/generate", {"input_ids": row.prompt, "input_lengths": len(row.prompt), "request_output_len": 1}), 404)

    def refuse(self, folder, module):
        """Loads an adapter of a layer that takes none."""
        status, text = self.post("/v1/load_lora_adapter", {"lora_name": "refused", "lora_path": str(folder)})
        if status != 400 or module not in text or "are not served; in this layer they may change" not in text:
            sys.exit(f"FAIL an adapter of {module} gets {status}: {text}")
        print(f"ok   an adapter of {module} is refused: {json.loads(text)}")

    def kill_a_worker(self):
        """Kills the last worker once tokens are generated."""
        before, deadline = self.bench.metric("output_tokens_total"), time.monotonic() + 60
        while self.bench.metric("output_tokens_total") == before:
            if time.monotonic() > deadline:
                sys.exit("FAIL no token was generated within 60 s")
            time.sleep(0.002)
        text = urllib.request.urlopen(f"http://localhost:{self.args.port + 2}/metrics", timeout=30).read().decode()
        os.kill(max(int(pid) for pid in re.findall(r'^trireme_llm_worker_ready\{.*pid="(\d+)"', text, re.M)), signal.SIGKILL)


def drafter_parameters(args, drafter):
    return drafts.parameters(args, 3, drafter) if args.drafter else {"prompt_lookup_num_tokens": 3}


def serve(args, checkpoint, drafter, folders, refused, scratch):
    """The answers of each run, as pairs of a request and its answer."""
    flags = ["--enable-sleep-mode"] + (["--batch-invariant"] if args.batch_invariant else [])
    flags += [f"--kv-cache-dtype={args.kv_cache}"] if args.kv_cache else []
    flags += ["--kv-cache-host-memory=1GiB"] if args.host_tier else []
    bench = Bench(checkpoint, args.device, scratch, args.bin, args.port, rows=128, flags=flags)
    bench.set_parameters(
        lora_modules=",".join(f"{name}={folders[name]}" for name in ("a", "b", "c")), max_loras=2, max_lora_rank=16, pp=args.pp,
        max_tokens_in_paged_kv_cache=1536 if args.host_tier else 16384, enable_kv_cache_reuse=str(args.host_tier).lower(),
        **drafter_parameters(args, drafter))
    bench.start(args.world_size)
    try:
        server, late = Server(args, bench), []
        for module, folder in refused.items():
            server.refuse(folder, module)
        paired = lambda answers: list(zip(server.rows, answers))
        runs = {"one by one": paired([server.send(row) for row in server.rows]), "at once": paired(server.at_once())}
        runs["while one is loaded"] = paired(server.at_once(lambda: server.load_late(folders["late"], late))) + late
        for level in (1, 2):
            for path in (f"/sleep?level={level}", "/wake_up"):
                expect(*server.post(path, {}), 200)
            runs[f"after a sleep of level {level}"] = paired(server.at_once())
        runs["while a worker is killed"] = paired(server.at_once(server.kill_a_worker))
        if (restarts := bench.metric("worker_restarts_total")) != 1:
            sys.exit(f"FAIL workers were restarted {restarts:.0f} times, expected 1")
        for metric in ["drafted_tokens_total"] + ["accepted_draft_tokens_total"] * bool(args.drafter) + ["prefix_cache_host_tokens_total"] * args.host_tier:
            print(f"{metric}: {bench.metric(metric):.0f}")
            if not bench.metric(metric):
                sys.exit(f"FAIL {metric} is 0")
    finally:
        bench.stop()
    return runs


def guided_tokens(checkpoint):
    """The tokens that consist of lower-case letters."""
    path = checkpoint / "tokenizer.json"
    vocab = json.loads(path.read_text())["model"]["vocab"] if path.exists() else {}
    return [token for text, token in vocab.items() if re.fullmatch("[a-z]+", text)]


def compare(args, checkpoint, folders, runs):
    import torch
    import check_gpu_model as reference

    torch.backends.cuda.matmul.allow_tf32 = False
    answers = [pair for run in runs.values() for pair in run]
    distinct = dict.fromkeys((request, tuple(tokens)) for request, (tokens, _) in answers)
    letters, rows = guided_tokens(checkpoint), {}
    for kind, dtype in (("exact", torch.float32), ("rounded", torch.bfloat16)):
        model = reference.load(checkpoint, dtype)
        for request, tokens in distinct:
            for of, folder in ((kind, folders.get(request.name)), ("plain", None)):
                if of == "plain" and kind != "exact":
                    continue
                hooks = reference.with_adapter(model, folder)
                row = reference.log_probs(model, [*request.prompt, *tokens][:-1], args.kv_cache)[len(request.prompt) - 1:]
                allowed = row[:, letters] if request.is_guided else row
                rows[of, request, tokens] = (row.gather(1, torch.tensor(tokens)[:, None])[:, 0].double(), allowed.max(-1).values.double())
                for hook in hooks:
                    hook.remove()
        del model
        torch.cuda.empty_cache()
    good = True
    for run, pairs in runs.items():
        gaps = {"ours": [], "bf16": [], "without": []}
        behind = 0.0
        for request, (tokens, log_probs) in pairs:
            if request.is_guided and not set(tokens) <= set(letters):
                sys.exit(f"FAIL {run}: tokens that the guide does not allow: {tokens}")
            of = lambda kind: rows[kind, request, tuple(tokens)]
            exact, likeliest = of("exact")
            gaps["ours"].append(torch.tensor(log_probs).flatten().double() - exact)
            gaps["bf16"].append(of("rounded")[0] - exact)
            if request.name != MODEL:
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
    parser.add_argument("--pp", type=int, default=1, help="stages, of which each has a part of the ranks")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--guided", action="store_true")
    parser.add_argument("--drafter", choices=["mtp", "eagle3", "draft_model"])
    parser.add_argument("--kv-cache", choices=["fp8", "int8"])
    parser.add_argument("--host-tier", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--bin", default="target/release", help="folder of `launch` and `trireme`")
    parser.add_argument("--port", type=int, default=8780)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        made = pathlib.Path(made)
        form = ["--quantize", args.quantize] if args.quantize else []
        make("make_checkpoint.py", args.shape, made / "model", "--layers", args.layers, *form)
        drafter = made / "drafter"
        if args.drafter:
            vocab = json.loads((made / "model" / "config.json").read_text())["vocab_size"]
            # Tokens less sure than those of check_gpu_drafts.py and larger products, so that log-probabilities tell what adapters change.
            embedding = drafts.make_predictable(made / "model", math.log(vocab) + 2)
            drafts.make_drafter(args, drafter, made / "model", embedding)
        if args.guided:
            shutil.copy(REPOSITORY / "tensorrt_llm" / "1" / "tokenizer.json", made / "model")
        refused = {module: made / module for shape, module in REFUSED.items() if args.shape.startswith(shape)}
        adapters = ADAPTERS | {module: (4, 5, [module]) for module in refused}
        folders = {name: made / name for name in adapters}
        make_one = lambda name, rank, seed, modules: make(
            "make_adapter.py", made / "model", folders[name], "--rank", rank, "--seed", seed, "--modules", ",".join(modules),
            "--scale", 6 if args.drafter else 1.5)
        with concurrent.futures.ThreadPoolExecutor(len(adapters)) as pool:
            list(pool.map(lambda entry: make_one(entry[0], *entry[1]), adapters.items()))
        runs = serve(args, made / "model", drafter, folders, refused, made / "scratch")
        sys.exit(0 if compare(args, made / "model", folders, runs) else 1)


main()
