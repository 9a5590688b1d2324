# SPDX-License-Identifier: Apache-2.0
"""transfer-bench and the NCCL probe on real GPUs: every row is there, and every byte arrived."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvrail.kernels.page_copy import PageKernels

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]


def run(module: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", f"kvrail.frontend.{module}", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        ("gpu->gpu", {"peer/kernel", "peer/engine", "put", "tcp", "memcpy"}),
        ("host->gpu", {"peer/kernel", "peer/engine", "tcp", "memcpy"}),
        ("gpu->host", {"tcp", "memcpy"}),
    ],
)
def test_rows(kernels: PageKernels, tmp_path: Path, memory: str, expected: set[str]) -> None:
    assert kernels.device == 0
    out, picture = tmp_path / "records.json", tmp_path / "found.html"
    sizes = (
        "--page-bytes",
        "4096",
        "--page-bytes",
        "1048576",
        "--pages",
        "16",
        "--rounds",
        "2",
        "--no-latency",
    )
    done = run("transfer_bench", "--memory", memory, *sizes, "--json", str(out), "--plot", str(picture))
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads(out.read_text())
    for page_bytes in (4096, 1 << 20):
        found = {
            f"peer/{one['transport']}" if one["lane"] == "peer" else one["lane"]
            for one in records
            if one["page_bytes"] == page_bytes
        }
        assert found >= expected
    if torch.cuda.device_count() > 1 and memory == "gpu->gpu":
        (transport, _) = (one["transport"] for one in records if one["lane"] == "nccl")
        assert transport.startswith(("P2P", "SHM"))
    assert all(one["verified"] and one["memory"] == memory for one in records)
    assert "<svg" in picture.read_text()


def test_single_pages(kernels: PageKernels, tmp_path: Path) -> None:
    assert kernels.device == 0
    out = tmp_path / "records.json"
    flags = ("--memory", "gpu->gpu", "--way", "peer/kernel", "--pages", "16", "--rounds", "2")
    done = run("transfer_bench", *flags, "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = [(one["threads"], one["pace"]) for one in json.loads(out.read_text())]
    # Threads are kept awake through batches where there are cores for it.
    assert kinds[0] in (("sleep", ""), ("poll", ""))
    assert kinds[1:5] == [
        ("sleep", "paused"),
        ("sleep", "tight"),
        ("spin", "paused"),
        ("spin", "tight"),
    ]


def test_doctor_nccl(kernels: PageKernels, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    done = run("cli", "doctor", "--nccl", "--json", str(out))
    if torch.cuda.device_count() < 2:
        assert done.returncode == 1
        assert "NCCL refuses two ranks on one GPU" in done.stdout
        return
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["log"]["version"]
    assert found["log"]["transport"]
    assert {row["what"] for row in found["ranks"][1]["rows"]} == {"block", "pages"}
    assert all(row["verified"] for row in found["ranks"][1]["rows"])
