"""The cases: which fault is injected into which process in which phase, and how the result is judged."""

import contextlib
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import faults
import load
import rolling
from ways import TIMEOUT
from world import PYTHON_MODEL, World, is_alive, until

TARGETS = ["launch", "relay", "mpirun", "rank 0", "rank n", "worker 0", "worker n"]
MODELS = Path(__file__).parent / "models"
# The way of which short requests have the text, over HTTP and gRPC.
ROLLING_WAY = "generate"
PHASES = ["load", "idle", "prefill", "decode", "drain"]
# Time limits in seconds: for a world to end after one of its processes has died, and for its leftovers to disappear.
END = 2.0
# Generous, for busy machines. The table contains the measured times.
TOO_SLOW = 10.0


@dataclass
class Result:
    """The result of one case."""

    name: str
    requests: int = 0
    same: int = 0
    errors: int = 0
    lost: int = 0
    pause: float | None = None
    service: float | None = None
    ended: float | None = None
    left: int = 0
    faults: tuple[str, ...] = ()

    @property
    def is_survived(self) -> bool:
        return not self.faults


class Chaos:
    """Runs cases on one world after another. Knows the texts of undisturbed requests."""

    def __init__(self, scratch: Path, repository: Path, keeps_connections: bool, rank_flags: list[str]):
        self.scratch, self.repository = scratch, repository
        self.keeps_connections, self.rank_flags = keeps_connections, rank_flags
        self.world: World | None = None
        self.turn = 0
        # By way and prompt.
        self.texts: dict[tuple[str, str], str] = {}

    def fresh_world(self, repository: Path | None = None, folder: Path | None = None, **options) -> World:
        """Starts a world, without waiting until it is ready."""
        self.end_world()
        folder = folder or Path(tempfile.mkdtemp(dir=self.scratch))
        options |= {"keeps_connections": self.keeps_connections, "rank_flags": self.rank_flags}
        self.world = World(folder, repository or self.repository, **options)
        return self.world

    def whole_world(self) -> World:
        """A ready world: that of the previous case if it has recovered, else a new one."""
        if self.world is None or not self.world.find("launch"):
            self.fresh_world().start_ready()
        until("the world is whole", self.world.is_whole)
        return self.world

    def end_world(self) -> list[str]:
        if self.world is None:
            return []
        world, self.world = self.world, None
        try:
            world.terminate()
            return until_nothing_is_left(world)
        finally:
            world.kill()
            shutil.rmtree(world.scratch, ignore_errors=True)

    def learn(self) -> None:
        """Records the texts of undisturbed requests, sent one at a time."""
        world = self.whole_world()
        turns = [load.ways(prompts, turn) for prompts in (load.SHORT, load.LONG) for turn in range(len(load.TURNS))]
        # Rolling restarts send short requests in the first way.
        for way, prompt in [*sum(turns, []), *((ROLLING_WAY, prompt) for prompt in load.SHORT)]:
            (outcome,) = load.wait([load.Request(world, prompt, way)])
            assert outcome.error is None and outcome.text, f"an undisturbed request by {way} fails: {outcome.error}"
            self.texts[way, prompt] = outcome.text

    def send(self, prompts: list[str]) -> list[load.Request]:
        """Sends a request per prompt, in other ways than the call before."""
        self.turn += 1
        return load.send(self.world, prompts, turn=self.turn)

    def judge(self, result: Result, outcomes: list[load.Outcome], may_fail: bool) -> list[str]:
        """Counts the outcomes of requests. Returns those that are faults."""
        wrong = []
        for outcome in outcomes:
            result.requests += 1
            if not outcome.has_ended:
                wrong.append(f"a request by {outcome.way} hangs after {len(outcome.pieces)} pieces")
            elif outcome.error is not None:
                result.errors += 1
                if not may_fail:
                    wrong.append(f"a request by {outcome.way} failed: {outcome.error[:200]}")
                continue
            elif outcome.text == self.texts[outcome.way, outcome.prompt]:
                result.same += 1
                continue
            else:
                wrong.append(f"a stream by {outcome.way} differs after {len(outcome.pieces)} pieces")
            result.lost += 1
        return wrong


def until_nothing_is_left(world: World) -> list[str]:
    """The leftovers of a world two seconds after its launcher has ended."""
    end = time.monotonic() + END
    while (left := world.leftovers()) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def answers(world: World, texts: dict[tuple[str, str], str]) -> bool:
    """Whether a new, short request gets the expected text."""
    (outcome,) = load.wait(load.send(world, [load.SHORT[0]], num_tokens=8), 20)
    return outcome.error is None and bool(outcome.pieces) and texts[outcome.way, outcome.prompt].startswith(outcome.text)


class Probe(threading.Thread):
    """Sends requests until one succeeds. Restarts the launcher if it has ended, like a service manager."""

    def __init__(self, chaos: Chaos, world: World, start: float):
        super().__init__(daemon=True)
        self.chaos, self.world, self.begun = chaos, world, start
        self.service: float | None = None
        self.start()

    def run(self) -> None:
        end = time.monotonic() + TIMEOUT
        while time.monotonic() < end:
            if not self.world.find("launch"):
                self.world.start()
            if answers(self.world, self.chaos.texts):
                self.service = time.monotonic() - self.begun
                return
            time.sleep(0.05)

    def faults(self, result: Result) -> list[str]:
        self.join()
        result.service = self.service
        return [] if self.service is not None else ["does not serve again"]


def begin(chaos: Chaos, world: World, phase: str) -> list[load.Request]:
    """Brings a ready world into a phase. Returns the requests in flight."""
    if phase == "idle":
        return []
    requests = chaos.send(load.LONG if phase == "prefill" else load.SHORT)
    if phase == "prefill":
        time.sleep(0.015)
        return requests
    for request in requests:
        request.first_pieces.wait(TIMEOUT)
    if phase == "drain":
        world.launcher.terminate()
        time.sleep(0.02)
    return requests


def on_process(chaos: Chaos, target: str, fault: str, phase: str) -> Result:
    """Injects one fault into one process."""
    result = Result(f"{fault} · {target} · {phase}")
    if phase == "load":
        world = chaos.fresh_world()
        world.start()
        victim = until(f"{target} runs", lambda: world.find(target), look=0.002)
        requests = []
    else:
        world = chaos.whole_world()
        victim = world.find(target)
        requests = begin(chaos, world, phase)
        # The world has drained already, so there is nothing to disturb.
        victim = victim if is_alive(victim) else None
    # The relay goes on when a world ends, and ends with the launcher.
    stays = world.find("relay") if target != "launch" else None
    others = [pid for pid in world.processes() if pid not in (victim, stays, world.launcher.pid)]
    start = time.monotonic()
    if victim is not None:
        faults.ON_PROCESSES[fault](victim)
    if fault == "SIGSTOP" and target.startswith("rank") and victim is not None and phase != "drain":
        # Its worker continues until the failure is detected.
        with contextlib.suppress(TimeoutError):
            until(f"the stopped {target} is found out", lambda: not is_alive(victim), 20)
    wrong = after(chaos, world, result, target, fault, phase, victim, requests, others, start)
    result.faults = tuple(wrong)
    return result


def may_fail(chaos: Chaos, target: str, fault: str, phase: str) -> bool:
    """Whether requests in flight may end with an error."""
    if fault == "memory" or target in ("launch", "relay"):
        return True
    if target.startswith("worker"):
        return False
    ends_world = fault != "SIGSTOP" or target != "mpirun"
    # A world that drains has no successor to which the relay could send its requests.
    return ends_world and (phase == "drain" or not chaos.keeps_connections)


def after(chaos, world, result, target, fault, phase, victim, requests, others, start) -> list[str]:
    wrong: list[str] = []
    is_worker = target.startswith("worker")
    ends_world = fault in ("SIGKILL", "SIGSEGV") and not is_worker and target != "relay"
    if ends_world and victim is not None and not (target == "launch" and phase == "drain"):
        try:
            until("the old world has ended", lambda: not any(map(is_alive, others)), 20)
            result.ended = time.monotonic() - start
        except TimeoutError:
            wrong.append("the old world does not end")
    # Probes only now, because the old world may still answer while it ends.
    probe = Probe(chaos, world, start) if phase != "drain" else None
    if fault == "SIGSTOP" and target in ("launch", "mpirun"):
        # Serving does not need these processes, so they are continued.
        time.sleep(1.0)
        load.wait(requests)
        if phase not in ("load", "drain"):
            wrong += [f"{words} while {target} is stopped" for words in probe.faults(result)]
        faults.proceed(victim)
    outcomes = load.wait(requests)
    wrong += chaos.judge(result, outcomes, may_fail(chaos, target, fault, phase))
    went_on = [outcome.longest_pause() for outcome in outcomes if outcome.error is None]
    if (is_worker or chaos.keeps_connections) and went_on:
        result.pause = max(went_on)
    if phase == "drain":
        world.launcher.wait(TIMEOUT)
    else:
        wrong += probe.faults(result)
    if phase == "drain" and ends_world and target == "launch":
        # The next launcher ends the leftovers of a killed one.
        world.start_ready()
    # The memory limit lasts as long as the process, and a dead launcher is not restarted by itself.
    if fault == "memory" or phase in ("drain", "load") or not world.find("launch"):
        left = chaos.end_world()
        result.left = len(left)
        wrong += [f"left behind: {left[:5]}"] if left else []
    if result.ended is not None and result.ended > TOO_SLOW:
        wrong.append(f"the world took {result.ended:.1f} s to end")
    return wrong


def python_model(chaos: Chaos, fault: str) -> Result:
    """The process of a Python model is lost while it has a request and others wait for it, beside streams of the language model."""
    result = Result(f"{fault} · python model · execute")
    repository = Path(shutil.copytree(chaos.repository, Path(tempfile.mkdtemp(dir=chaos.scratch)) / "repository"))
    shutil.copytree(MODELS / PYTHON_MODEL, repository / PYTHON_MODEL)
    world = chaos.fresh_world(repository, python=sys.executable)
    world.start_ready()
    victim = world.find(PYTHON_MODEL)
    streams = begin(chaos, world, "decode")
    chaos.texts[PYTHON_MODEL, "number"] = "7"
    requests = [load.Request(world, "number", PYTHON_MODEL, 7) for _ in range(4)]
    time.sleep(0.25)
    start = time.monotonic()
    faults.ON_PROCESSES[fault](victim)
    wrong = chaos.judge(result, load.wait(streams), may_fail=False)
    if fault == "SIGSTOP":
        # It is no fault to be slow: the requests wait until it goes on.
        faults.proceed(victim)
    wrong += chaos.judge(result, load.wait(requests), may_fail=fault != "SIGSTOP")
    result.pause = max(request.outcome.longest_pause() for request in streams)

    def answers_again() -> bool:
        (outcome,) = load.wait([load.Request(world, "number", PYTHON_MODEL, 7)])
        return outcome.error is None

    until("the Python model answers again", answers_again)
    result.service = time.monotonic() - start
    left = chaos.end_world()
    result.left, result.faults = len(left), tuple(wrong + left)
    return result


def full_shared_memory(chaos: Chaos) -> Result:
    """A worker dies while shared memory is full, so that its successor gets none."""
    result = Result("full /dev/shm · worker 0 killed · decode")
    world = chaos.whole_world()
    requests = begin(chaos, world, "decode")
    start = time.monotonic()
    filler = faults.fill(faults.SHM)
    faults.kill(world.find("worker 0"))
    time.sleep(1.0)
    filler.unlink()
    return finish(chaos, result, requests, start, may_fail=False)


def full_disk(chaos: Chaos) -> Result:
    """A worker dies while the disk of the log is full."""
    result = Result("full disk for logs · worker n killed · decode")
    folder = Path(tempfile.mkdtemp(dir=chaos.scratch))
    disk = faults.SmallFileSystem(folder, "8m")
    try:
        # mpirun's session directory is elsewhere: without one it starts nothing.
        variables = {"TMPDIR": tempfile.mkdtemp(dir=chaos.scratch)}
        world = chaos.fresh_world(folder=folder, variables=variables)
        world.start_ready()
        filler = faults.fill(folder)
        requests = begin(chaos, world, "decode")
        start = time.monotonic()
        faults.kill(world.find("worker n"))
        result = finish(chaos, result, requests, start, may_fail=False)
        faults.kill(world.find("rank n"))
        result.faults += tuple(Probe(chaos, world, time.monotonic()).faults(Result("")))
        filler.unlink()
        left = chaos.end_world()
        result.left, result.faults = len(left), result.faults + tuple(left)
    finally:
        disk.close()
    return result


def corrupted_plan(chaos: Chaos) -> Result:
    """Bits flip in the step plans on their way to a worker."""
    result = Result("corrupted plans · worker 0 · decode")
    world = chaos.whole_world()
    before = world.find("worker 0")
    requests = begin(chaos, world, "decode")
    start = time.monotonic()
    corruptor = faults.PlanCorruptor(faults.newest_ring(world, "plan"))
    try:
        until("the worker has noticed", lambda: not is_alive(before), 20)
    finally:
        corruptor.done.set()
    return finish(chaos, result, requests, start, may_fail=False)


def lost_checkpoint(chaos: Chaos) -> Result:
    """A worker dies while the checkpoint is missing; later the checkpoint is back."""
    result = Result("checkpoint pulled away · worker 0 killed · decode")
    repository = Path(shutil.copytree(chaos.repository, Path(tempfile.mkdtemp(dir=chaos.scratch)) / "repository"))
    world = chaos.fresh_world(repository)
    world.start_ready()
    version = repository / "tensorrt_llm" / "1"
    requests = begin(chaos, world, "decode")
    start = time.monotonic()
    version.rename(version.with_name("away"))
    faults.kill(world.find("worker 0"))
    load.wait(requests)
    version.with_name("away").rename(version)
    result = finish(chaos, result, requests, start, may_fail=True)
    left = chaos.end_world()
    result.left, result.faults = len(left), result.faults + tuple(left)
    return result


def clock_jumps(chaos: Chaos) -> Result:
    """The wall clock is set forward by a day, and back by two."""
    result = Result("clock jumps · whole world · decode")
    clock = faults.Clock(chaos.scratch / "clock")
    world = chaos.fresh_world(variables=clock.variables())
    world.start_ready()
    requests = begin(chaos, world, "decode")
    start = time.monotonic()
    for offset in ("+1d", "-1d"):
        clock.jump(offset)
        time.sleep(0.2)
    result = finish(chaos, result, requests, start, may_fail=False)
    # Waits longer than every timeout of the world.
    time.sleep(4.0)
    if not answers(world, chaos.texts):
        result.faults += ("does not serve on after the jumps",)
    result.pause = None
    left = chaos.end_world()
    result.left, result.faults = len(left), result.faults + tuple(left)
    return result


def rolling_restart(chaos: Chaos, *flags: str) -> Result:
    """A second world takes over from the first while clients send requests continuously."""
    result = Result(" ".join(["rolling restart", *flags]) + " · whole world · under load")
    # The exit timeout allows streams in flight to finish on slow machines.
    world = chaos.fresh_world(exit_timeout=60)
    world.start_ready()
    ways = ["http", "kept http", "grpc"]
    clients = [rolling.LoadClient(world, prompt, chaos.texts[ROLLING_WAY, prompt], way) for way, prompt in zip(ways, load.SHORT)]
    probe = rolling.ConnectionProbe([world.http_port, world.grpc_port, world.metrics_port])
    streams = chaos.send(load.SHORT)
    before = world.find("rank 0")
    start = time.monotonic()
    restarted = world.launch("restart", "--rolling", *flags, f"--http_port={world.http_port}", "--wait-ready=60")
    result.service = time.monotonic() - start
    time.sleep(1.0)
    for thread in (probe, *clients):
        thread.done.set()
        thread.join()
    wrong = chaos.judge(result, load.wait(streams), may_fail=False)
    result.requests += sum(client.answered + len(client.wrong) for client in clients)
    result.same += sum(client.answered for client in clients)
    result.lost += sum(len(client.wrong) for client in clients) + probe.refused
    result.pause = max(client.longest for client in clients)
    wrong += [words for client in clients for words in client.wrong[:3]]
    wrong += [f"{probe.refused} of {probe.opened} connections were refused"] if probe.refused else []
    if restarted.returncode != 0 or world.find("rank 0") == before:
        wrong.append(f"did not restart: {restarted.stdout}{restarted.stderr}")
    left = chaos.end_world()
    result.left, result.faults = len(left), tuple(wrong + left)
    return result


def finish(chaos: Chaos, result: Result, requests, start: float, may_fail: bool) -> Result:
    probe = Probe(chaos, chaos.world, start)
    outcomes = load.wait(requests)
    wrong = chaos.judge(result, outcomes, may_fail)
    result.pause = max(outcome.longest_pause() for outcome in outcomes)
    result.faults += tuple(wrong + probe.faults(result))
    return result


OTHERS = {
    "full /dev/shm": full_shared_memory,
    "full disk": full_disk,
    "corrupted plan": corrupted_plan,
    "lost checkpoint": lost_checkpoint,
    "clock jump": clock_jumps,
    "python model killed": lambda chaos: python_model(chaos, "SIGKILL"),
    "python model stopped": lambda chaos: python_model(chaos, "SIGSTOP"),
    "rolling restart": rolling_restart,
    "rolling restart --after": lambda chaos: rolling_restart(chaos, "--after"),
}
# One case of each kind, for --short.
SHORT = [
    ("worker 0", "SIGKILL", "decode"),
    ("worker n", "SIGSEGV", "prefill"),
    ("worker n", "SIGSTOP", "decode"),
    ("rank n", "SIGKILL", "decode"),
    ("rank 0", "SIGKILL", "idle"),
    ("rank n", "SIGSTOP", "idle"),
    ("mpirun", "SIGKILL", "decode"),
    ("worker 0", "SIGKILL", "drain"),
    ("launch", "SIGKILL", "load"),
    ("relay", "SIGKILL", "decode"),
    ("relay", "SIGSTOP", "idle"),
]
