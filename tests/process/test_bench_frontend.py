# SPDX-License-Identifier: Apache-2.0
"""The bench of the front runs, and its figures add up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.process
def test_a_small_bench(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-P", "-m", "kvrail.frontend.bench_frontend", "--json", str(out)]
    subprocess.run([*command, "--streams", "4", "--rate", "50", "--seconds", "2"], check=True, timeout=100)
    figures = json.loads(out.read_text())
    assert figures["streams"] == 4
    assert 0.8 * 200 <= figures["tokens_per_s"] <= 1.2 * 200
    # Far above what it should be (60 µs with many streams): this only finds what is badly wrong.
    assert 1 < figures["cpu_us_per_token"] < 1000
    for name in ("added_latency_ms", "added_first_byte_ms"):
        assert 0 <= figures[name]["p50"] <= figures[name]["p99"]
    failed = subprocess.run([*command, "--streams", "2", "--seconds", "1", "--most-us", "0.1"], timeout=100)
    assert failed.returncode == 1
