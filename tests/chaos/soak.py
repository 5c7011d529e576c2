"""One world for many requests in every way, with faults at first, and the memory of its processes meanwhile."""

import itertools
import statistics
import threading
import time
from pathlib import Path

import faults
import load
from ways import WAYS
from world import World, until

# Short answers, so that a minute has many requests. A tool call has no text until it is whole.
NUM_TOKENS = {"tools": load.NUM_TOKENS}
OTHERS_NUM_TOKENS = 24
NUM_CLIENTS = 6
# Of the requests, the share during which faults are injected, and the time between two faults in seconds. Deaths of worlds that follow
# each other within a minute make `launch` wait longer before each start.
WITH_FAULTS, PAUSE, BETWEEN_WORLDS = 0.5, 4.0, 65.0
WORKERS, WORLDS = ["worker n", "worker 0"], ["rank 0", "mpirun", "rank n"]
# Kinds of processes whose memory is read, and by how much it may grow from the first third of a stretch to the last.
KINDS = ["launch", "relay", "rank 0", "rank n", "worker 0", "worker n"]
MAX_GROWTH_MB = 16.0


class Clients:
    """Threads that send one request after the other, and compare each answer with that of an undisturbed request."""

    def __init__(self, world: World, texts: dict[tuple[str, str], str], most: int):
        self.world, self.texts, self.most = world, texts, most
        self.lock, self.num_begun, self.num_same, self.wrong = threading.Lock(), 0, 0, []
        self.threads = [threading.Thread(target=self.run, daemon=True) for _ in range(NUM_CLIENTS)]
        for thread in self.threads:
            thread.start()

    def run(self) -> None:
        choices = sorted(self.texts)
        while True:
            with self.lock:
                number, self.num_begun = self.num_begun, self.num_begun + 1
            if number >= self.most:
                return
            way, prompt = choices[number % len(choices)]
            outcome = ask(self.world, way, prompt)
            with self.lock:
                if outcome.has_ended and outcome.error is None and outcome.text == self.texts[way, prompt]:
                    self.num_same += 1
                else:
                    self.wrong.append(f"{way}: {outcome.error or outcome.text[:80] or 'no answer'}")

    def are_busy(self) -> bool:
        return any(thread.is_alive() for thread in self.threads)


def ask(world: World, way: str, prompt: str) -> load.Outcome:
    (outcome,) = load.wait([load.Request(world, prompt, way, NUM_TOKENS.get(way, OTHERS_NUM_TOKENS))], 120)
    return outcome


def learn(world: World) -> dict[tuple[str, str], str]:
    texts = {}
    for way in WAYS:
        for prompt in load.SHORT + load.LONG:
            outcome = ask(world, way, prompt)
            assert outcome.error is None and outcome.text, f"an undisturbed request by {way} fails: {outcome.error}"
            texts[way, prompt] = outcome.text
    return texts


def memory(world: World) -> dict[str, float]:
    """Resident memory of its processes in MB, without files that are mapped."""
    sizes = {}
    for kind in KINDS:
        pid = world.find(kind)
        status = Path(f"/proc/{pid}/status").read_text() if pid else ""
        own = [line.split()[1] for line in status.splitlines() if line.startswith(("RssAnon", "RssShmem"))]
        if own:
            sizes[kind] = sum(map(int, own)) / 1024
    return sizes


def growth(samples: list[dict[str, float]], kinds: list[str]) -> list[tuple[str, float, float]]:
    """Medians of the first and of the last third of the samples."""
    third = max(1, len(samples) // 3)
    found = []
    for kind in kinds:
        sizes = [sample[kind] for sample in samples if kind in sample]
        if sizes:
            found.append((kind, statistics.median(sizes[:third]), statistics.median(sizes[-third:])))
    return found


def run(world: World, num_requests: int) -> bool:
    """Prints the result; returns whether nothing was lost and memory did not grow."""
    texts = learn(world)
    clients, start = Clients(world, texts, num_requests), time.monotonic()
    workers, worlds, num_faults, world_ended = itertools.cycle(WORKERS), itertools.cycle(WORLDS), {}, start
    disturbed, undisturbed = [], []
    while clients.are_busy():
        time.sleep(PAUSE)
        if clients.num_begun > WITH_FAULTS * num_requests:
            undisturbed.append(memory(world))
            continue
        ends_world = time.monotonic() - world_ended > BETWEEN_WORLDS
        target = next(worlds if ends_world else workers)
        world_ended = time.monotonic() if ends_world else world_ended
        faults.kill(until(f"{target} runs", lambda: world.find(target)))
        num_faults[target] = num_faults.get(target, 0) + 1
        until("the world is whole", world.is_whole)
        disturbed.append(memory(world))
    minutes = (time.monotonic() - start) / 60
    # Others are started again by each fault.
    grown = [("with faults", *row) for row in growth(disturbed, KINDS[:2])] + [("without", *row) for row in growth(undisturbed, KINDS)]
    kills = ", ".join(f"{count} x {target}" for target, count in num_faults.items())
    print(f"{num_requests} requests in {minutes:.1f} minutes, killed {kills or 'nothing'}: {clients.num_same} had the undisturbed text")
    for words in clients.wrong[:10]:
        print(f"FAIL {words}")
    for stretch, kind, first, last in grown:
        print(f"{'ok  ' if last - first <= MAX_GROWTH_MB else 'FAIL'} {stretch}: {kind} had {first:.1f} MB in the first third and {last:.1f} in the last")
    return clients.num_same == num_requests and all(last - first <= MAX_GROWTH_MB for _, _, first, last in grown)
