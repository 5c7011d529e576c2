"""LlamaIndex's client of Triton against a launched world; its cases are in `frameworks/llama_index_cases.py`."""

import pytest

from frameworks_environment import cases, run

FILE = "llama_index_cases.py"


@pytest.fixture(scope="module")
def results(world, tmp_path_factory):
    return run(FILE, world, tmp_path_factory.mktemp("llama_index") / "report.xml")


@pytest.mark.parametrize("case", cases(FILE))
def test_llama_index(results, case):
    assert not results[case], "\n".join(results[case])
