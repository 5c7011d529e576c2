#!/usr/bin/env python3
"""Compares a served model with and without drafts of a head or of another model: the tokens, and the speed at a forced acceptance.

    check_gpu_drafts.py [--drafter mtp|eagle3|draft_model] [--shape qwen35moe] [--layers 8] [--num-tokens 3] [--tp 1] [--adapters]
                        [--wrong] [--device cuda] [--bin DIR] [--port N]
    check_gpu_drafts.py --checkpoint DIR [--forced 2.5] [--drafter eagle3 --path DIR] [--num-tokens 2] [--batches 1 8 32] [--out FILE.json]

Without --checkpoint, the model is one of make_checkpoint.py whose tokens follow each other in an order that the drafter knows, too, so that
drafts are right and no two tokens are nearly as likely, with noise in the drafter. A draft model has one layer of the shape `small`. Greedy and
drawn requests, one by one and together, must have the same tokens with drafts and without, and some drafts must be accepted. With --adapters,
two of three requests have an adapter (LoRA). With --wrong, the drafter is random, so nearly none is right, and it does not run behind most steps.

With --checkpoint, the script prints tokens a second with and without drafts at each batch size, both from one run. With --forced, drafts of
a checkpoint with any weights are accepted at that rate (`launch --benchmark-forced-acceptance`); without it those that are right. Needs torch and transformers for --shape.
"""
import argparse, concurrent.futures, json, pathlib, random, subprocess, sys, tempfile, urllib.request

from serving_bench import Bench, gpu_name

NUM_OUTPUT = 120
# The layers that adapters change: those of attention, of recurrent states and of a feed-forward that is no expert.
ADAPTED = "q_proj,k_proj,v_proj,o_proj,in_proj_qkv,in_proj_z,in_proj_b,in_proj_a,out_proj,gate_proj,up_proj,down_proj"


def change(folder, how):
    """Changes the tensors of a checkpoint."""
    from safetensors.torch import load_file, save_file
    tensors = load_file(folder / "model.safetensors")
    how(tensors)
    for name in tensors:
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")):
            tensors[name] = tensors[name] * 0.3
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def make_predictable(folder, likeliest=24, knows_next=True):
    """Makes token `t + 7` follow token `t`: logits depend on the last token most, `likeliest` is about that of the next one, and an MTP
    head passes the embedding on if it `knows_next`. Returns the embeddings."""
    import torch

    def how(tensors):
        nonlocal embedding
        embedding = torch.randn_like(tensors["model.embed_tokens.weight"], dtype=torch.float32)
        width = embedding.shape[1]
        tensors["model.embed_tokens.weight"] = embedding.bfloat16()
        tensors["lm_head.weight"] = (embedding.roll(7, 0) * likeliest / width).bfloat16()
        if "mtp.fc.weight" in tensors:
            joining = 6 * torch.randn(width, 2 * width) * width ** -0.5 + knows_next * torch.eye(width, 2 * width)
            tensors["mtp.fc.weight"] = joining.bfloat16()

    embedding = None
    change(folder, how)
    return embedding


def make_predicting_head(folder, embedding):
    """Makes an EAGLE-3 head predict token `t + 14` from the embedding of token `t`, which the hidden states are close to."""
    import torch

    def how(tensors):
        width = embedding.shape[1]
        tensors["fc.weight"] = (torch.eye(width).repeat(1, 3) / 3).bfloat16()
        ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        tensors["lm_head.weight"] = (embedding.roll(14, 0)[ids] * 24 / width).bfloat16()

    change(folder, how)


def make(script, *arguments):
    command = [sys.executable, pathlib.Path(__file__).parent / script, *arguments]
    subprocess.run([str(part) for part in command], check=True, capture_output=True)


def make_drafter(args, folder, checkpoint, embedding, is_wrong=False):
    """The checkpoint of what guesses for another one, if it has one of its own."""
    if args.drafter == "eagle3":
        make("make_eagle3_head.py", checkpoint, folder)
        if not is_wrong:
            make_predicting_head(folder, embedding)
    elif args.drafter == "draft_model":
        vocab = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
        make("make_checkpoint.py", "small", folder, "--layers", 1, "--vocab", vocab)
        if not is_wrong:
            make_predictable(folder)
    return folder


def parameters(args, num_tokens, path):
    """Those of the model for so many drafts."""
    own = {} if args.drafter == "mtp" or num_tokens == 0 else {f"{args.drafter}_path": path.resolve()}
    return {f"{args.drafter}_num_tokens": num_tokens} | own


def requests(vocab, names):
    """Greedy and drawn ones with prompts of several lengths, each with the name of its model or adapter."""
    source = random.Random(3)
    for index, length in enumerate((5, 40, 130, 700, 17, 64, 300, 90)):
        prompt = [source.randrange(10, vocab) for _ in range(length)]
        sampling = {"temperature": 0.7, "runtime_top_p": 0.9, "random_seed": index} if index % 2 else {}
        yield names[index % len(names)], {"input_ids": prompt, "input_lengths": length, "request_output_len": NUM_OUTPUT, "end_id": -1,
               "exclude_input_in_output": True} | sampling


def answer(port, request):
    name, body = request
    request = urllib.request.Request(f"http://localhost:{port}/v2/models/{name}/generate", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.loads(response.read())["output_ids"]


def compare(args, checkpoint, path, adapters):
    found = {}
    for num_tokens in (0, args.num_tokens):
        with tempfile.TemporaryDirectory() as scratch:
            bench = Bench(checkpoint, args.device, pathlib.Path(scratch), args.bin, args.port, rows=48)
            bench.set_parameters(**parameters(args, num_tokens, path), max_tokens_in_paged_kv_cache=16000, enable_kv_cache_reuse="false")
            if adapters:
                bench.set_parameters(lora_modules=",".join(f"{name}={path}" for name, path in adapters.items()), max_loras=len(adapters))
            sent = list(requests(bench.vocab, ["tensorrt_llm", *adapters]))
            bench.start(args.tp)
            try:
                alone = [answer(args.port, request) for request in sent]
                with concurrent.futures.ThreadPoolExecutor(8) as threads:
                    together = list(threads.map(lambda request: answer(args.port, request), sent))
                counts = [bench.metric(name) for name in ("drafted_tokens_total", "accepted_draft_tokens_total")]
            finally:
                bench.stop()
            found[num_tokens] = (alone, together, counts)
    (alone, together, _), (alone_drafted, together_drafted, (drafted, accepted)) = found.values()
    same = {name: sum(a == b for a, b in zip(one, two))
            for name, one, two in (("alone", alone, alone_drafted), ("together", together, together_drafted))}
    count = len(alone)
    share = accepted / max(drafted, 1)
    good = all(equal == count for equal in same.values()) and drafted > 0 and (share > 0 or args.wrong)
    print(f"{'ok  ' if good else 'FAIL'} {'wrong ' if args.wrong else ''}{args.drafter} for {args.shape}, tp {args.tp}, {len(adapters)} adapters: {same['alone']} of {count} requests have the same tokens alone, {same['together']} together; "
          f"{accepted:.0f} of {drafted:.0f} drafts accepted ({100 * share:.0f} %)")
    return good


def measure(args):
    drafted = {}  # by batch size, in the last run
    figures = {"gpu": gpu_name(), "tp": args.tp, "drafter": args.drafter, "forced": args.forced, "num_tokens": args.num_tokens, "tokens_per_second": {}}
    for name, flags, num_tokens in (("plain", [], 0), ("drafts", [f"--benchmark-forced-acceptance={args.forced}"] if args.forced else [], args.num_tokens)):
        with tempfile.TemporaryDirectory() as scratch:
            bench = Bench(args.checkpoint, args.device, pathlib.Path(scratch), args.bin, args.port, flags=flags)
            bench.set_parameters(**parameters(args, num_tokens, args.path))
            bench.start(args.tp)
            try:
                speeds = figures["tokens_per_second"][name] = {}
                for batch in args.batches:
                    # The first run records graphs and measures products.
                    for repeat in range(2):
                        before = bench.metric("drafted_tokens_total")
                        run = bench.serve(f"{name}{batch}", bench.requests(batch, 64, args.output), batch)
                    speeds[batch] = run["output_tokens_per_second"]
                    drafted[batch] = bench.metric("drafted_tokens_total") - before
            finally:
                bench.stop()
    print(json.dumps(figures))
    plain, drafts = figures["tokens_per_second"].values()
    for batch in args.batches:
        print(f"batch {batch}: {plain[batch]:.1f} tokens/s without drafts, {drafts[batch]:.1f} with, {drafts[batch] / plain[batch]:.2f} x, {drafted[batch]:.0f} drafts")
    if args.out:
        pathlib.Path(args.out).write_text(json.dumps(figures, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", choices=["mtp", "eagle3", "draft_model"], default="mtp")
    parser.add_argument("--path", type=pathlib.Path, help="the checkpoint of the EAGLE-3 head or of the draft model")
    parser.add_argument("--shape", default="qwen35moe")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--checkpoint", type=pathlib.Path)
    parser.add_argument("--num-tokens", type=int, default=3)
    parser.add_argument("--tp", type=int, default=1, help="workers of the model, each on a GPU")
    parser.add_argument("--adapters", action="store_true")
    parser.add_argument("--wrong", action="store_true")
    parser.add_argument("--forced", type=float)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--output", type=int, default=256, help="tokens of each request of a measurement")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--bin", default="target/release")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.checkpoint:
        return measure(args)
    with tempfile.TemporaryDirectory() as made:
        checkpoint = pathlib.Path(made) / "model"
        make("make_checkpoint.py", args.shape, checkpoint, "--layers", args.layers)
        embedding = make_predictable(checkpoint, knows_next=not args.wrong)
        path = make_drafter(args, pathlib.Path(made) / "drafter", checkpoint, embedding, args.wrong)
        adapters = {name: pathlib.Path(made).resolve() / name for name in ("a", "b") if args.adapters}
        for seed, (name, folder) in enumerate(adapters.items()):
            make("make_adapter.py", checkpoint, folder, "--rank", 16, "--seed", seed, "--modules", ADAPTED)
        sys.exit(0 if compare(args, checkpoint, path, adapters) else 1)


if __name__ == "__main__":
    main()
