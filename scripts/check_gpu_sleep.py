#!/usr/bin/env python3
"""Lets a served model sleep and wake on GPUs: what stays in their memory, how soon it serves again, and that its tokens are the same.

    check_gpu_sleep.py CHECKPOINT [--workers 1] [--rounds 2] [--batch-invariant] [--bin DIR] [--port N]
                       [--launch-args=...]

Asks the same prompts before the first sleep and after every wake, at levels 1 and 2 by turns. Prints the time of each sleep and wake,
the memory of the GPUs that is in use meanwhile, and the time to the first token of the first request after it. While the model
sleeps, another request waits in the queue and must be answered after the wake. Returns 1 with --batch-invariant if an answer differs; without it,
answers beside others round differently. Needs only Python's standard library.
"""
import argparse, json, pathlib, sys, tempfile, threading, time, urllib.request

from serving_bench import Bench, commit, gpu_memory_used, gpu_name

NUM_TOKENS = 192
PROMPT_LENGTHS = [16, 128, 300]


def post(bench, path):
    started = time.perf_counter()
    request = urllib.request.Request(f"http://localhost:{bench.port}{path}", b"", method="POST")
    urllib.request.urlopen(request, timeout=300).read()
    return time.perf_counter() - started


def is_sleeping(bench):
    return json.loads(urllib.request.urlopen(f"http://localhost:{bench.port}/is_sleeping", timeout=30).read())["is_sleeping"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--bin", default="target/release", help="folder of `launch` and `trireme`")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--port", type=int, default=8700)
    parser.add_argument("--launch-args", default="", help="further flags of `launch`, such as --quantization=fp8")
    args = parser.parse_args()
    differing = 0
    with tempfile.TemporaryDirectory() as scratch:
        flags = ["--enable-sleep-mode", *args.launch_args.split(), *(["--", "--batch-invariant"] if args.batch_invariant else [])]
        bench = Bench(args.checkpoint, args.device, pathlib.Path(scratch), args.bin, args.port, rows=32, flags=flags)
        prompts = [[bench.random.randrange(10, bench.vocab) for _ in range(length)] for length in PROMPT_LENGTHS]
        print(f"{gpu_name()}, commit {commit()}, ready in {bench.start(args.workers):.2f} s")
        try:
            expected = [bench.ask(prompt, NUM_TOKENS)[1] for prompt in prompts]
            first = bench.ask(prompts[0], NUM_TOKENS)[0]
            print(f"awake: {gpu_memory_used()} MiB in use, first token after {1000 * first:.1f} ms")
            for level in [1, 2] * args.rounds:
                slept = post(bench, f"/sleep?level={level}")
                assert is_sleeping(bench)
                used = gpu_memory_used()
                queued = []
                waiting = threading.Thread(target=lambda: queued.append(bench.ask(prompts[1], NUM_TOKENS)[1]))
                waiting.start()
                time.sleep(0.5)
                asked, woke = time.perf_counter(), post(bench, "/wake_up")
                assert not is_sleeping(bench)
                first, tokens = bench.ask(prompts[0], NUM_TOKENS)
                served = time.perf_counter() - asked
                waiting.join()
                found = [tokens, *(bench.ask(prompt, NUM_TOKENS)[1] for prompt in prompts[1:]), *queued]
                wrong = sum(a != b for a, b in zip(found, [*expected, expected[1]], strict=True))
                differing += wrong
                print(f"level {level}: asleep after {slept:.2f} s with {used} MiB in use, awake after {woke:.2f} s, first token "
                      f"{1000 * first:.1f} ms later, {NUM_TOKENS} tokens {served:.2f} s after the wake was asked for; {wrong} of {len(found)} answers differ",
                      flush=True)
        finally:
            bench.stop()
    sys.exit(args.batch_invariant and differing > 0)


main()
