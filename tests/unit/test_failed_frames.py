# SPDX-License-Identifier: Apache-2.0
"""A failed test lets go of what it held before its fixtures are taken down, and its report still shows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CASE = """
import weakref
import pytest

class Held:
    pass

@pytest.fixture
def pool():
    found = []
    yield found
    assert [each() for each in found] == [None], "still viewed"

def look(view):
    assert view is None, "what failed"

def test_it(pool):
    view = Held()
    pool.append(weakref.ref(view))
    {body}
"""
BODIES = {
    "assert": "look(view)",
    "in another": "try:\n        look(view)\n    except AssertionError:\n        raise ValueError('what failed')",
    "skip": "pytest.skip('what failed')",
    "pass": "print('what failed')",
}


@pytest.mark.parametrize("body", BODIES)
def test_a_view_does_not_outlive_its_failed_test(tmp_path: Path, body: str) -> None:
    (tmp_path / "test_case.py").write_text(CASE.format(body=BODIES[body]))
    (tmp_path / "conftest.py").write_text("from kit.failed_frames import pytest_runtest_makereport\n")
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-rA",
            "-l",
            "--rootdir",
            ".",
            "test_case.py",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "what failed" in run.stdout, run.stdout + run.stderr
    assert "still viewed" not in run.stdout
    expected = {"skip": "1 skipped", "pass": "1 passed"}.get(body, "1 failed")
    assert expected in run.stdout
    assert "error" not in run.stdout.splitlines()[-1]
