#!/usr/bin/env python3
"""Replaces the weights of a served model on GPUs: how long a change takes, and that its tokens are those of the other checkpoint.

    check_gpu_weights.py CHECKPOINT OTHER [--workers 1] [--bin DIR] [--port N] [--launch-args=...]

Serves OTHER and keeps its tokens, then serves CHECKPOINT with --batch-invariant, replaces its weights by those of OTHER and back by
`POST /update_weights_from_disk`, and compares the tokens before and after. A stream is open during each change; it must end with all its
tokens. Prints the time of each change. Returns 1 if an answer differs.
Needs only Python's standard library.
"""
import argparse, json, pathlib, sys, tempfile, threading, time, urllib.error, urllib.request

from serving_bench import Bench, commit, gpu_name

NUM_TOKENS = 96
PROMPT_LENGTHS = [16, 128, 300]


def update(bench, path):
    started = time.perf_counter()
    body = json.dumps({"model_path": str(path)}).encode()
    request = urllib.request.Request(f"http://localhost:{bench.port}/update_weights_from_disk", body, {"Content-Type": "application/json"})
    try:
        urllib.request.urlopen(request, timeout=300).read()
    except urllib.error.HTTPError as error:
        sys.exit(f"the weights were not replaced: {error}: {error.read().decode()}")
    return time.perf_counter() - started


class World:
    """A served checkpoint, for a `with` block."""

    def __init__(self, args, checkpoint, *flags):
        self.folder, self.workers = tempfile.TemporaryDirectory(), args.workers
        flags = [*args.launch_args.split(), *flags, "--", "--batch-invariant"]
        self.bench = Bench(checkpoint, args.device, pathlib.Path(self.folder.name), args.bin, args.port, rows=32, flags=flags)

    def __enter__(self):
        print(f"{self.bench.checkpoint.name}: ready in {self.bench.start(self.workers):.2f} s", flush=True)
        prompts = [[self.bench.random.randrange(10, self.bench.vocab) for _ in range(length)] for length in PROMPT_LENGTHS]
        self.ask = lambda: [self.bench.ask(prompt, NUM_TOKENS)[1] for prompt in prompts]
        self.long = lambda: self.bench.ask(prompts[0], 20 * NUM_TOKENS)[1]
        return self

    def __exit__(self, *_):
        self.bench.stop()
        self.folder.cleanup()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=pathlib.Path)
    parser.add_argument("other", type=pathlib.Path)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--bin", default="target/release", help="folder of `launch` and `trireme`")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--port", type=int, default=8750)
    parser.add_argument("--launch-args", default="", help="further flags of `launch`, such as --quantization=fp8")
    args = parser.parse_args()
    print(f"{gpu_name() if args.device == 'cuda' else args.device}, commit {commit()}")
    with World(args, args.other) as world:
        of_other = world.ask()
    wrong = 0
    with World(args, args.checkpoint, f"--weight-updates-dir={args.other.resolve().parent}") as world:
        of_first = world.ask()
        assert of_first != of_other, "the checkpoints give the same tokens"
        for path, expected in [(args.other, of_other), (args.checkpoint, of_first)] * 2:
            streamed = []
            stream = threading.Thread(target=lambda: streamed.append(len(world.long())))
            stream.start()
            time.sleep(0.3)
            took = update(world.bench, path.resolve())
            differing = sum(a != b for a, b in zip(world.ask(), expected, strict=True))
            stream.join()
            wrong += differing + (streamed != [20 * NUM_TOKENS])
            print(f"weights of {path.name} after {took:.2f} s; {differing} of {len(expected)} answers differ, {streamed} tokens streamed", flush=True)
    sys.exit(wrong > 0)


main()
