# SPDX-License-Identifier: Apache-2.0
"""The page-copy benchmark runs, checks what it copied, and writes its rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvrail.kernels.page_copy import PageKernels

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_page_copy"


@pytest.mark.gpu
def test_small_sizes(kernels: PageKernels, tmp_path: Path) -> None:
    assert kernels.device == 0, "the benchmark's device"
    rows = tmp_path / "rows.json"
    command = [
        sys.executable,
        "-P",
        str(SCRIPT),
        "--pages-kib",
        "4",
        "64",
        "--blocks",
        "4",
        "--batch-mib",
        "8",
    ]
    options = ["--repeats", "1", "--routes", "same-gpu", "gpu-to-host", "--json", str(rows)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(rows.read_text())
    assert {(row["route"], row["unit_bytes"]) for row in found["rows"] if row["what"] == "page"} == {
        (route, size) for route in ("same-gpu", "gpu-to-host") for size in (4096, 65536)
    }
    assert all(row["gb_s"] > 0 for row in found["rows"])
