# SPDX-License-Identifier: Apache-2.0
"""Compiles and runs native_parts.cpp: message order, copying and heartbeats, apart from UCX."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "transfer" / "csrc"


def test_the_parts_that_need_no_ucx(tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler on the path")
    program = tmp_path / "native_parts"
    sources = [Path(__file__).with_name("native_parts.cpp"), CSRC / "stream_copy.cpp", CSRC / "control.cpp"]
    subprocess.run(
        [compiler, "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-I", CSRC, "-o", program, *sources],
        check=True,
    )
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stdout
