# SPDX-License-Identifier: Apache-2.0
"""A shared system is started in one worker only, and a test that ends its worker is not run again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("xdist", reason="pytest-xdist deals tests out to several workers; here is one")

from kit.shares import Shares

TESTS = Path(__file__).parents[1]


@pytest.fixture
def shares(pytestconfig: pytest.Config) -> Shares:
    option = SimpleNamespace(tx=["2*popen"], loadscopereorder=True)
    config: Any = SimpleNamespace(option=option, getvalue=lambda name: getattr(option, name))
    return Shares(config)


def test_files_with_a_common_system_are_one_share(shares: Shares) -> None:
    files = [str(path.relative_to(TESTS.parent)) for path in sorted(TESTS.rglob("test_*.py"))]
    of_file = {file: shares._split_scope(f"{file}::test_it[a::b@c]") for file in files}
    assert of_file["tests/failures/test_peer_dies.py"] == of_file["tests/failures/test_pools_full.py"]
    assert of_file["tests/process/test_split_identity.py"] == of_file["tests/process/test_split_answers.py"]
    # All others are alone.
    alone = [share for share in of_file.values() if list(of_file.values()).count(share) == 1]
    assert len(set(of_file.values())) == len(alone) + 2
    assert of_file["tests/process/test_demo.py"] in alone


def test_what_ended_its_worker_is_not_run_again(shares: Shares) -> None:
    node: Any = object()
    shares.assigned_work[node] = {"one": {"a": True, "b": False, "c": False}, "two": {"d": False}}
    assert shares.remove_node(node) == "b"
    assert shares.workqueue == {"one": {"a": True, "b": True, "c": False}, "two": {"d": False}}
