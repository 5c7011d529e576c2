"""KServe's clients against a launched world; its cases are in `frameworks/kserve_cases.py`."""

import pytest

from frameworks_environment import cases, run

FILE = "kserve_cases.py"


@pytest.fixture(scope="module")
def results(world, tmp_path_factory):
    return run(FILE, world, tmp_path_factory.mktemp("kserve") / "report.xml")


@pytest.mark.parametrize("case", cases(FILE))
def test_kserve(results, case):
    assert not results[case], "\n".join(results[case])
