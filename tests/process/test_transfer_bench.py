# SPDX-License-Identifier: Apache-2.0
"""transfer-bench runs with tiny sizes, measures every way, and notices when bytes do not arrive."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from kit.cluster import wait_until
from kvrail.frontend import bench_rank, bench_session
from kvrail.frontend.bench_measure import Plan, measure
from kvrail.frontend.bench_nixl import nixl_version
from kvrail.frontend.bench_record import Record

pytestmark = pytest.mark.process

FIELDS = {
    "lane",
    "transport",
    "memory",
    "page_bytes",
    "pages",
    "median_us",
    "p99_us",
    "gb_per_s",
    "us_per_page",
    "verified",
}


def test_command_writes_table_and_records(tmp_path: Path) -> None:
    out = tmp_path / "records.json"
    command = [
        sys.executable,
        "-P",
        "-m",
        "kvrail.frontend.transfer_bench",
        "--page-bytes",
        "4096",
        "--pages",
        "8",
    ]
    done = subprocess.run(
        [*command, "--rounds", "2", "--no-latency", "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    records = json.loads(out.read_text())
    ways = {(record["lane"], record["transport"]) for record in records}
    expected = {("shm", "memcpy"), ("put", "cma"), ("put", "tcp"), ("stream", "tcp"), ("socket", "tcp")}
    assert ways - {("nixl", "ucx")} == expected | {("memcpy", "memcpy")}
    awake = {record["lane"] for record in records if record["mode"] == "awake"}
    assert awake - {"nixl"} == {"shm", "put", "stream"}, (
        "ways that know one manner of waiting are not measured again"
    )
    for record in records:
        assert record.keys() >= FIELDS
        assert record["verified"] is True
        assert (record["page_bytes"], record["pages"], record["rounds"]) == (4096, 8, 2)
        lane, mode = record["lane"], record["mode"]
        ours = {"asleep": "sleep", "awake": "spin" if (os.cpu_count() or 1) <= 2 else "poll"}[mode]
        assert record["threads"] == {"nixl": "poll", "shm": ours, "put": ours, "stream": ours}.get(
            lane, "sleep"
        )
        assert 0 < record["median_us"] <= record["p99_us"]
        # Both are rounded.
        assert record["gb_per_s"] == pytest.approx(8 * 4096 / record["median_us"] / 1000, rel=0.05, abs=1e-3)
    for words in ("put/cma", "nccl: not measured: no GPU"):
        assert words in done.stdout
    if nixl_version() is None:
        assert "nixl: not measured: not installed" in done.stdout


def test_wrong_bytes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A way that leaves one page out: the poison stays there, and the record says so."""
    push = bench_rank.LinkWay.push

    def forgetful(
        self: bench_rank.LinkWay, number: int, source: bench_rank.Indices, target: bench_rank.Indices
    ) -> None:
        push(self, number, source[:-1], target[:-1])

    monkeypatch.setattr(bench_session.LinkWay, "push", forgetful)
    asleep, awake = measure(Plan({"host->host": ((4096, 4),)}, ("shm",), 1, latency=False), say=print)
    for record, mode in ((asleep, "asleep"), (awake, "awake")):
        assert isinstance(record, Record)
        assert (record.verified, record.mode) == (False, mode)


@pytest.mark.parametrize("way", ["stream", "socket"])
def test_ctrl_c_does_not_wait_for_a_batch_that_it_kept_back(
    way: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Between a receiver that waits for it and its first byte; nothing of that receiver stays."""

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    clock = SimpleNamespace(sleep=interrupt, monotonic=time.monotonic)
    monkeypatch.setattr(bench_session, "time", clock)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        next(iter(measure(Plan({"host->host": ((4096, 4),)}, (way,), 1, latency=False), say=print)))
    # The receiver would wait for 60 s, and be killed 10 s after it was told to leave.
    assert time.monotonic() - begun < 8
    assert "Traceback" not in capfd.readouterr().err


def test_ctrl_c_is_no_traceback() -> None:
    """It reaches the whole group of a terminal; nothing of the receiving process stays, either."""
    command = [sys.executable, "-P", "-m", "kvrail.frontend.transfer_bench", "--rounds", "100000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as bench:
        started: list[psutil.Process] = []
        wait_until(
            lambda: bool(started.extend(psutil.Process(bench.pid).children()) or started), 60, "it measures"
        )
        time.sleep(3)
        os.killpg(bench.pid, signal.SIGINT)
        said, _ = bench.communicate(timeout=60)
    assert bench.returncode not in (0, None)
    assert "Traceback" not in said, said
    assert not psutil.wait_procs(started, timeout=10)[1]


def test_bad_arguments_are_refused() -> None:
    command = [sys.executable, "-P", "-m", "kvrail.frontend.transfer_bench"]
    for wrong, word in ((["--page-bytes", "5000"], "multiple of 4096"), (["--way", "pigeon"], "pigeon")):
        done = subprocess.run([*command, *wrong], capture_output=True, text=True, timeout=60)
        assert done.returncode != 0
        assert word in done.stderr
