"""Clients that stream text in every way, and record the outcomes."""

import http.client
import queue
import threading
import time
from dataclasses import dataclass, field

from tritonclient.utils import InferenceServerException

from ways import OTHER_WAYS, TIMEOUT, WAYS, Refused

NUM_TOKENS = 200
SHORT = ["Once upon a time", "The captain", "A little dog", "Q: What is 7 plus 8?\nA:"]
LONG = [" ".join([prompt] + ["and then they went to the big red house"] * 40) for prompt in SHORT]
# Which way the first of four prompts takes; the others take the following ones. In turn they cover all ways.
TURNS = [0, 4]


@dataclass
class Outcome:
    """The outcome of one request."""

    prompt: str
    way: str
    pieces: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str | None = None
    has_ended: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def longest_pause(self) -> float:
        """The longest time between two pieces, in seconds."""
        return max((later - earlier for earlier, later in zip(self.times, self.times[1:])), default=0.0)


class Request(threading.Thread):
    """One request on its own connection."""

    def __init__(self, world, prompt: str, way: str, num_tokens: int = NUM_TOKENS):
        super().__init__(daemon=True)
        self.world, self.num_tokens = world, num_tokens
        self.outcome = Outcome(prompt, way)
        self.first_pieces = threading.Event()
        self.start()

    def run(self) -> None:
        outcome = self.outcome
        try:
            for piece in (WAYS | OTHER_WAYS)[outcome.way](self.world, outcome.prompt, self.num_tokens):
                self.add_piece(piece)
        except queue.Empty:
            return  # It hangs.
        except Refused as error:
            outcome.error = str(error)
        except (OSError, http.client.HTTPException, InferenceServerException) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.has_ended = True
        self.first_pieces.set()

    def add_piece(self, piece: str) -> None:
        self.outcome.pieces.append(piece)
        self.outcome.times.append(time.monotonic())
        if len(self.outcome.pieces) == 5:
            self.first_pieces.set()


def ways(prompts: list[str], turn: int) -> list[tuple[str, str]]:
    """The way of each prompt in a turn, and the prompt."""
    names = list(WAYS)
    return [(names[(TURNS[turn % len(TURNS)] + i) % len(names)], prompt) for i, prompt in enumerate(prompts)]


def send(world, prompts: list[str], num_tokens: int = NUM_TOKENS, turn: int = 0) -> list[Request]:
    """Sends one request per prompt, each in the way of the turn."""
    return [Request(world, prompt, way, num_tokens) for way, prompt in ways(prompts, turn)]


def wait(requests: list[Request], timeout: float = TIMEOUT) -> list[Outcome]:
    end = time.monotonic() + timeout
    for request in requests:
        request.join(max(0.0, end - time.monotonic()))
    return [request.outcome for request in requests]
