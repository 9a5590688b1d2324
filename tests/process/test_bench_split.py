# SPDX-License-Identifier: Apache-2.0
"""bench_split on CPUs: real engines, every part, figures that hold together, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest

from kit.cluster import wait_until
from kit.tiny_checkpoint import tiny_checkpoint

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

_COMMAND = (sys.executable, "-P", "-m", "kvrail.frontend.bench_split")
# Without the single engines: each costs a core five seconds to start.
_ONLY_THE_SPLIT = """
import typer
from kvrail.frontend import bench_split

plans = bench_split.plans
bench_split.plans = lambda pe, ce: plans(pe, ce)[:1]
typer.run(bench_split.main)
"""
# Answers long enough that a client that waits for a core sees more than their ends.
_SMALL = "--in 64 --out 40 --concurrency 1,2 --push-in 256 --push-requests 4 --mixed-s 2 --mixed-streams 2"
_SMALL += (
    " --mixed-in 32 --mixed-out 16 --mixed-long-in 400 --mixed-every 0.4 --handover-in 32,300 --rounds 2"
)
_SMALL += " --conversations 2 --turns 3 --shared-words 20 --task-words 20 --turn-words 10 --answer-tokens 4"
_SMALL += " --routing least-loaded --host-cache-gb 0"


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    model = tiny_checkpoint(tmp_path_factory.mktemp("bench") / "tiny", "llama")
    engines = "--dtype float32 --page-tokens 16 --max-num-batched-tokens 128"
    places = ["--pe-gpus", "cpu", "--ce-gpus", "cpu", "--model", str(model)]
    return [*places, "--launch-flags", engines, *_SMALL.split()]


def start(*flags: str, command: tuple[str, ...] = _COMMAND) -> tuple[subprocess.Popen[str], dict[str, str]]:
    """The benchmark, and an environment by which all processes that it starts can be found."""
    environment = {**os.environ, "COLUMNS": "200", "BENCH_SPLIT_TEST": uuid.uuid4().hex}
    process = subprocess.Popen(
        [*command, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    return process, environment


def left(environment: dict[str, str]) -> list[int]:
    """Processes that have this environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("BENCH_SPLIT_TEST") == environment["BENCH_SPLIT_TEST"]:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def test_every_part(flags: list[str], tmp_path: Path) -> None:
    out, plot, table = tmp_path / "found.json", tmp_path / "found.html", tmp_path / "found.md"
    files = ["--json", str(out), "--plot", str(plot), "--markdown", str(table)]
    process, environment = start(*flags, *files)
    said, _ = process.communicate(timeout=250)
    assert process.returncode == 0, said
    assert not left(environment)
    whole = json.loads(out.read_text())
    assert whole["trouble"] == ""
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in whole["rows"]:
        assert (row["errors"], row["cut"]) == (0, False), row
        rows.setdefault(row["part"], []).append(row)
    engines = ["split 1+1", "single 1", "single 2"]
    assert [row["devices"] for row in rows["load"][:3]] == [2, 1, 2]
    assert [row["engine"] for row in rows["load"]] == 2 * engines
    assert all(row["tok_per_s_device"] > 0 and row["tok_per_s_user"] > 0 for row in rows["load"])
    assert all(row["kinds"]["long"]["good"] >= 1 for row in rows["mixed"])
    # Four prompts of 256 tokens: 16 pages each, pushed by the split and by nobody else.
    assert [row.get("carried", {}).get("prompts") for row in rows["push"]] == [4, None, None]
    (link,) = rows["push"][0]["carried"]["links"]
    assert (link["lane"], link["pages"], link["tickets"]) == ("shm", 64, 4)
    assert link["probed_gb_per_s"] > 0
    assert link["unhidden_s"] > 0
    assert rows["push"][0]["carried"]["fairness"] == 1
    assert [(row["engine"], row["in"]) for row in rows["handover"]] == [
        (name, length) for length in (32, 300) for name in engines
    ]
    for row in rows["handover"]:
        assert row["rounds"] == 2
        assert ("carried" in row) == (row["engine"] == "split 1+1") != bool(row.get("split_takes_longer_ms"))
    assert [row["engine"] for row in rows["replay"]] == engines
    for row in rows["replay"]:
        assert (row["requests"], len(row["ttft_ms_by_turn"])) == (6, 3)
        assert row["prompt_tokens_last_turn"] > 60
        # What a turn has in common with the one before is in a cache of some engine.
        assert row["cached_share"] > 0.2
    text = table.read_text()
    assert text in said or text.partition("\n\n")[2] in said
    for words in (
        "## 64 tokens in, 40 out",
        "| PE 0 → CE 0 | shm, host |",
        "## Hand-over",
        "3 turns side by side",
    ):
        assert words in text
    assert plot.read_text().count("<svg") == 3


def test_a_part_stops_when_its_time_is_over(flags: list[str], tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    launch = ("--routing", "affinity", "--host-cache-gb", "0.05")
    # No engine writes 350 tokens in that time.
    limits = ("--limits", "replay=0.2", "--answer-tokens", "350")
    command = (sys.executable, "-P", "-c", _ONLY_THE_SPLIT)
    process, environment = start(
        *flags, *launch, "--parts", "replay", *limits, "--json", str(out), command=command
    )
    said, _ = process.communicate(timeout=200)
    # No engine failed: that all is not measured is in the table.
    assert process.returncode == 0, said
    assert not left(environment)
    rows = json.loads(out.read_text())["rows"]
    assert [(row["routing"], row["host_cache_gb"], row["cut"]) for row in rows] == [
        ("affinity", "0.05", True)
    ]
    assert said.count("cut: its time was over") == 1


def test_ctrl_c_leaves_nothing_behind(flags: list[str], tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    process, environment = start(*flags, "--json", str(out))
    # The benchmark, and at least the fronts of its three engines.
    wait_until(lambda: len(left(environment)) >= 5, 60, "the engines are starting")
    os.kill(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode not in (0, None), said
    assert not left(environment)
    assert json.loads(out.read_text())["trouble"] == "interrupted"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--pe-gpus", "0", "--ce-gpus", "cpu"], "both on GPUs or both cpu"),
        (["--pe-gpus", "0,2", "--ce-gpus", "4"], "GPUs in a row"),
        (["--pe-gpus", "0", "--ce-gpus", "2"], "together GPUs in a row"),
        (["--parts", "load,lod"], "--parts lod"),
        (["--limits", "load=soon"], "--limits load=soon"),
        (["--plot", "found.pdf"], "ends in .html or .png"),
    ],
)
def test_what_cannot_work_is_said(wrong: list[str], words: str) -> None:
    base = ["--model", "m", "--pe-gpus", "cpu", "--ce-gpus", "cpu"]
    done = subprocess.run(
        [*_COMMAND, *base, *wrong],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "COLUMNS": "200"},
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert words in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
