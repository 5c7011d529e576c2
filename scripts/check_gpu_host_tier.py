#!/usr/bin/env python3
"""Measures conversations by turns with and without a host tier of the prefix cache, and compares their tokens.

    check_gpu_host_tier.py [--shape gqa] [--layers 32] [--conversations 4] [--tokens 24000] [--turns 3] [--kv-tokens 40000]
                           [--host-memory 24GiB] [--batch-invariant] [--workers 1] [--device cuda] [--bin DIR] [--checkpoint DIR] [--port N]

The KV cache holds `--kv-tokens`, fewer than all conversations have, so each turn has evicted the others. Two worlds serve the same
turns, one without host memory and one with it. Prints the time to first token of the turns after the first, what came back from the host
and how fast at least, and the number of turns whose tokens differ. With --batch-invariant none may; otherwise chunks of other sizes
round differently, so those of random weights may. Exits with 1 where nothing came back, or where tokens differ that may not.

The checkpoint is written by make_checkpoint.py unless --checkpoint has one. Needs torch and transformers for that.
"""
import argparse, json, pathlib, random, statistics, subprocess, sys, tempfile

from serving_bench import Bench

OUTPUT_LEN = 24
NEW_TOKENS = 200  # of each turn


def conversations(args, bench):
    """Runs all turns, one request after the other. Returns the times to first token of each turn, and the tokens."""
    source = random.Random(1)
    new = lambda count: [source.randrange(10, bench.vocab) for _ in range(count)]
    texts = [new(args.tokens) for _ in range(args.conversations)]
    times, outputs = [], []
    for turn in range(args.turns):
        times.append([])
        for text in texts:
            first, tokens = bench.ask(text, OUTPUT_LEN)
            times[-1].append(first)
            outputs.append(tokens)
            # The same texts in both worlds, whatever the tokens are.
            text += new(NEW_TOKENS)
    return times, outputs


def run(args, checkpoint, host_memory):
    with tempfile.TemporaryDirectory() as scratch:
        flags = [f"--kv-cache-host-memory={host_memory or 0}"]
        flags += ["--", "--batch-invariant"] if args.batch_invariant else []
        bench = Bench(checkpoint, args.device, pathlib.Path(scratch), args.bin, args.port, rows=8, flags=flags)
        length = args.tokens + args.turns * (OUTPUT_LEN + NEW_TOKENS) + 64
        bench.set_parameters(max_tokens_in_paged_kv_cache=args.kv_tokens, max_sequence_len=length)
        start = bench.start(args.workers)
        try:
            times, outputs = conversations(args, bench)
            names = ("prefix_cache_host_tokens_total", "host_cache_loaded_blocks_total", "host_cache_stored_blocks_total",
                     "host_cache_limit_bytes", "host_cache_used_bytes", "kv_block_tokens")
            found = {name: bench.metric(name) for name in names}
        finally:
            bench.stop()
        return start, times, outputs, found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="gqa")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=24000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--kv-tokens", type=int, default=40000)
    parser.add_argument("--host-memory", default="24GiB")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--bin", default="target/release")
    parser.add_argument("--checkpoint", type=pathlib.Path)
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        checkpoint = args.checkpoint or pathlib.Path(made)
        if not (checkpoint / "config.json").exists():
            script = pathlib.Path(__file__).with_name("make_checkpoint.py")
            subprocess.run([sys.executable, script, args.shape, checkpoint, "--layers", str(args.layers)], check=True)
            config = json.loads((checkpoint / "config.json").read_text())
            # For long conversations of random weights any length serves.
            config.get("text_config", config)["max_position_embeddings"] = 65536
            (checkpoint / "config.json").write_text(json.dumps(config))
        start, off, plain, _ = run(args, checkpoint, None)
        start_on, on, hosted, found = run(args, checkpoint, args.host_memory)
    ms = lambda turns: f"{statistics.median(1000 * time for turn in turns for time in turn):.0f} ms"
    print(f"{args.shape}, {args.layers} layers, {args.conversations} conversations of {args.tokens} tokens, {args.kv_tokens} fit"
          f"{', batch-invariant' if args.batch_invariant else ''}"
          f"{f', {args.workers} workers' if args.workers > 1 else ''}")
    print(f"start to ready: {start:.1f} s, with {found['host_cache_limit_bytes'] / 2**30:.1f} GiB of host memory {start_on:.1f} s")
    print(f"time to first token, median: turn 1 {ms(off[:1])} without, {ms(on[:1])} with; later turns {ms(off[1:])} without, {ms(on[1:])} with")
    num_later = args.conversations * (args.turns - 1)
    tokens = found["prefix_cache_host_tokens_total"]
    print(f"of the host: {tokens:.0f} tokens of {num_later} turns, {found['host_cache_loaded_blocks_total']:.0f} blocks came back, "
          f"{found['host_cache_stored_blocks_total']:.0f} were stored")
    stored, used = found["host_cache_stored_blocks_total"], found["host_cache_used_bytes"]
    if stored and used < 0.95 * found["host_cache_limit_bytes"]:
        # Nothing was dropped, so what is used is what was stored, recurrent states included.
        loaded, seconds = found["host_cache_loaded_blocks_total"] * used / stored, sum(time for turn in on[1:] for time in turn)
        print(f"a block takes {used / stored / 2**20:.2f} MiB; {loaded / 1e9:.1f} GB came back in {seconds:.2f} s of waits for first tokens: "
              f"{loaded / seconds / 1e9:.1f} GB/s at least")
    differing = sum(a != b for a, b in zip(plain, hosted))
    print(f"turns with other tokens: {differing} of {len(plain)}")
    sys.exit(tokens == 0 or (args.batch_invariant and differing > 0))


main()
