"""Fault injection under load, with a table of results. See `scripts/chaos`."""

import argparse
import contextlib
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import cases
import faults
import hybrid
import soak
from world import BINARIES, ROOT

HOST_MEMORY = "64MiB"
# Positions of the KV cache: the requests of a case take up to 2 400 with long prompts.
DEVICE_TOKENS = 2560


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("--short", action="store_true", help="one fault of each kind, in about a minute")
    parser.add_argument("--keep-connections", action="store_true", help="worlds with a relay, which is killed and stopped as well")
    parser.add_argument("--model", choices=("demo", "hybrid"), default="demo", help="the demo model, or one whose layers have recurrent states")
    parser.add_argument("--host-tier", action="store_true", help="a small KV cache on the device, with host memory below it")
    parser.add_argument("--only", default="", metavar="WORDS", help="only cases whose name holds all of these words")
    parser.add_argument("--rounds", type=int, default=1, help="times that every case is run")
    parser.add_argument("--soak", type=int, metavar="REQUESTS", help="instead of the cases, one world for so many requests")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the table there, in Markdown")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    return parser.parse_args()


def repository_of(asked: argparse.Namespace, scratch: Path) -> Path:
    """The repository of the chosen model. With a host tier, its device has room for about the requests of one case."""
    repository = scratch / "repository"
    if asked.model == "hybrid":
        hybrid.make_repository(repository)
    elif asked.host_tier:
        shutil.copytree(ROOT / "model_repository", repository)
    else:
        return ROOT / "model_repository"
    if asked.host_tier:
        config = repository / "tensorrt_llm" / "config.pbtxt"
        tokens = re.compile(r'("max_tokens_in_paged_kv_cache" value: \{ string_value: )"\d+"')
        text, count = tokens.subn(rf'\1"{DEVICE_TOKENS}"', config.read_text())
        assert count == 1, f"{config} does not set the size of the KV cache"
        config.write_text(text)
    return repository


def all_cases(short: bool, keeps_connections: bool):
    for name, case in cases.OTHERS.items():
        if not short or name in ("corrupted plan", "rolling restart"):
            yield name, case
    processes = [(t, f, p) for p in cases.PHASES for f in faults.ON_PROCESSES for t in cases.TARGETS]
    for target, fault, phase in cases.SHORT if short else processes:
        if target == "relay" and not keeps_connections:
            continue
        yield f"{fault} · {target} · {phase}", lambda chaos, t=target, f=fault, p=phase: cases.on_process(chaos, t, f, p)


def why_not(name: str) -> str | None:
    """The reason why a case cannot run on this machine, if any."""
    if name in ("full /dev/shm", "full disk") and os.environ.get("CHAOS_NO_MOUNTS"):
        return "this user may not mount file systems"
    if name == "clock jump" and not faults.faketime():
        return "libfaketime is not installed"
    return None


def run_case(chaos: cases.Chaos, name: str, case) -> cases.Result:
    try:
        result = case(chaos)
    except (TimeoutError, AssertionError, OSError, subprocess.TimeoutExpired) as error:
        result = cases.Result(name, faults=(f"{type(error).__name__}: {error}",))
    if not result.is_survived and chaos.world:
        show_log(chaos.world)
        with contextlib.suppress(Exception):
            chaos.world.kill()
        chaos.world = None
    return result


def show_log(world) -> None:
    lines = world.log.read_text(errors="replace").splitlines() if world.log.exists() else []
    print("\n".join("   | " + line[:240] for line in lines[-40:]))


def seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def row(result: cases.Result) -> str:
    cells = [result.name, result.requests, result.same, result.errors, result.lost, seconds(result.pause)]
    cells += [seconds(result.ended), seconds(result.service), result.left, "yes" if result.is_survived else "NO"]
    return "| " + " | ".join(map(str, cells)) + " |"


HEAD = """| fault · process · phase | requests | same tokens | one error | lost | pause, s | old world ended, s | served again, s | left | survived |
|---|---|---|---|---|---|---|---|---|---|"""


def percentile(values: list[float], share: int) -> str:
    if len(values) < 2:
        return seconds(values[0] if values else None)
    return f"{statistics.quantiles(values, n=100, method='inclusive')[share - 1]:.2f}"


BY_PROCESS = """| process | fault | faults | survived | requests | same tokens | one error | lost | pause, s: p50 | p99 | served again, s: p50 | p99 | left |
|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


def by_process(results: list[cases.Result]) -> str:
    """A row for each kind of process and way to fail: what its clients saw, and for how long."""
    groups: dict[tuple[str, str], list[cases.Result]] = {}
    for result in results:
        fault, *words = result.name.split(" · ")
        if fault in faults.ON_PROCESSES:
            ways = {"SIGKILL": "killed", "SIGSEGV": "killed", "SIGSTOP": "stopped", "memory": "no memory"}
            groups.setdefault((words[0], ways[fault]), []).append(result)
        else:
            groups.setdefault((words[0], fault), []).append(result)
    order = {name: index for index, name in enumerate(cases.TARGETS)}
    lines = [BY_PROCESS]
    for (process, fault), mine in sorted(groups.items(), key=lambda item: (order.get(item[0][0], len(order)), item[0])):
        counts = [sum(getattr(result, key) for result in mine) for key in ("requests", "same", "errors", "lost")]
        pauses = [result.pause for result in mine if result.pause is not None]
        services = [result.service for result in mine if result.service is not None]
        times = [percentile(values, share) for values in (pauses, services) for share in (50, 99)]
        cells = [process, fault, len(mine), sum(result.is_survived for result in mine), *counts, *times, sum(result.left for result in mine)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def summary(results: list[cases.Result]) -> str:
    def line(words: str, values: list[float]) -> str:
        return f"{words}: p50 {percentile(values, 50)} s, p99 {percentile(values, 99)} s (n = {len(values)})"

    at_once = [r for r in results if r.name.startswith(("SIGKILL", "SIGSEGV"))]
    pauses = [r.pause for r in at_once if r.pause is not None and "worker" in r.name]
    services = [r.service for r in at_once if r.service is not None and ("rank" in r.name or "mpirun" in r.name)]
    stopped = [r.pause for r in results if r.name.startswith("SIGSTOP · worker") and r.pause is not None]
    ends = [r.ended for r in at_once if r.ended is not None and "launch" not in r.name]
    survived, requests = sum(r.is_survived for r in results), sum(r.requests for r in results)
    same, errors, lost = (sum(getattr(r, key) for r in results) for key in ("same", "errors", "lost"))
    return "\n".join(
        [
            f"faults injected: {len(results)}, survived: {survived}, left behind: {sum(r.left for r in results)}",
            f"requests in flight: {requests}, ended with the undisturbed tokens: {same}, with one clear error: {errors}, lost: {lost}",
            line("pause of streams, worker killed", pauses),
            line("pause of streams, worker stopped (with --step-timeout=5)", stopped),
            line("old world ended after a rank or mpirun was killed", ends),
            line("served again after a rank or mpirun was killed", services),
        ]
    )


def main() -> int:
    asked = arguments()
    chosen = [(name, case) for name, case in all_cases(asked.short, asked.keep_connections) if all(word in name for word in asked.only.split())]
    if asked.list:
        print("\n".join(name for name, _ in chosen))
        return 0
    if not (BINARIES / "launch").is_file():
        print(f"error: there is no `launch` in {BINARIES}; build it first", file=sys.stderr)
        return 2
    results, skipped = [], 0
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        repository = repository_of(asked, Path(scratch))
        rank_flags = [f"--kv-cache-host-memory={HOST_MEMORY}"] if asked.host_tier else []
        chaos = cases.Chaos(Path(scratch), repository, asked.keep_connections, rank_flags)
        if asked.soak:
            is_good = soak.run(chaos.whole_world(), asked.soak)
            left = chaos.end_world()
            for words in left:
                print(f"FAIL left behind: {words}")
            return int(not is_good or bool(left))
        chaos.learn()
        print(HEAD, flush=True)
        for name, case in chosen * asked.rounds:
            if reason := why_not(name):
                print(f"skipped: {name}: {reason}", flush=True)
                skipped += 1
                continue
            results.append(run_case(chaos, name, case))
            print(row(results[-1]), flush=True)
            for words in results[-1].faults:
                print(f"FAIL {name}: {words}", flush=True)
        left = chaos.end_world()
    text = f"{by_process(results)}\n\n{summary(results)}"
    print(f"\n{text}")
    if asked.table:
        asked.table.write_text(f"{HEAD}\n" + "\n".join(map(row, results)) + f"\n\n{text}\n")
    bad = sum(not result.is_survived for result in results) + bool(left)
    print(f"\n{len(results) - bad} passed, {bad} failed, {skipped} skipped")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
