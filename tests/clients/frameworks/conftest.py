"""What the cases of all frameworks share. They run in an environment of their own, see `../frameworks_environment.py`."""

import os

import pytest

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 10},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
QUESTION = "What is the opposite of hot?"
ANSWER = " The opposite of hot is cold."
MESSAGES = [{"role": "user", "content": QUESTION}]


def check_weather(arguments):
    assert set(arguments) == {"city", "unit", "days"}
    assert isinstance(arguments["city"], str) and arguments["unit"] in ("celsius", "fahrenheit") and 1 <= arguments["days"] <= 9


@pytest.fixture(scope="session")
def server():
    """The HTTP address of a running server."""
    return f"http://{os.environ['TRIREME_HTTP']}"


@pytest.fixture(scope="session")
def grpc_address():
    """The gRPC address of the same server."""
    return os.environ["TRIREME_GRPC"]
