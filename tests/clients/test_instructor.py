"""Instructor against a launched world; its cases are in `frameworks/instructor_cases.py`."""

import pytest

from frameworks_environment import cases, run

FILE = "instructor_cases.py"


@pytest.fixture(scope="module")
def results(world, tmp_path_factory):
    return run(FILE, world, tmp_path_factory.mktemp("instructor") / "report.xml")


@pytest.mark.parametrize("case", cases(FILE))
def test_instructor(results, case):
    assert not results[case], "\n".join(results[case])
