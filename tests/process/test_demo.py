# SPDX-License-Identifier: Apache-2.0
"""The demo as people run it, with a tiny model in its cache: what it says, its exit status, and what it leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from kit.cluster import wait_until

if TYPE_CHECKING:
    from conftest import Cluster

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

# On the CPU, whatever this machine has.
_DEMO = [sys.executable, "-P", "-m", "kvrail.frontend.demo", "--device", "cpu"]


@pytest.fixture
def environment(cluster: Cluster, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Folders of its own for all that the demo keeps; they also tell its processes from others."""
    models = tmp_path / "cache" / "kvrail" / "models"
    models.mkdir(parents=True)
    (models / "SmolLM2-135M-Instruct").symlink_to(cluster.model("llama"))
    (tmp_path / "tmp").mkdir()
    # Paths of Unix sockets are short.
    with tempfile.TemporaryDirectory(prefix="kvrail-test-", dir="/tmp") as runtime:
        yield {
            **os.environ,
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "XDG_RUNTIME_DIR": runtime,
            "TMPDIR": str(tmp_path / "tmp"),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }


def processes(environment: dict[str, str]) -> list[psutil.Process]:
    """All that carry this test's environment, except what is dead already."""
    found = []
    for process in psutil.process_iter():
        try:
            mine = process.environ().get("XDG_CACHE_HOME") == environment["XDG_CACHE_HOME"]
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.fixture(autouse=True)
def _nothing_stays(environment: dict[str, str]) -> object:
    yield
    left = processes(environment)
    for process in left:
        process.kill()
    assert not left, f"left behind: {left}"


def test_it_proves_itself_and_keeps_running_when_asked(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [*_DEMO, "--keep"], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    said = done.stdout
    assert done.returncode == 0, said + done.stderr
    for line in (
        r"prompt prefilled +│ remote",
        r"pages pushed +│ 1 ",
        r"lane +│ shm \(memcpy, host memory\)",
        r"all held: .* \(pages: 1\).* 4 of 4 answers are identical",
    ):
        assert re.search(line, said), f"{line}\n{said}"
    assert done.stderr == ""

    # A PE and a CE, each with one rank; the lines that it printed work as they are.
    assert len(processes(environment)) == 4
    (curl,) = re.findall(r"^  (curl .*)$", said, re.MULTILINE)
    (kill,) = re.findall(r"^  (kill .*)$", said, re.MULTILINE)
    answer = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(answer.stdout)["choices"][0]["message"]["content"]
    subprocess.run(["bash", "-c", kill], timeout=10, check=True)
    wait_until(lambda: not processes(environment), 10, "both have stopped")


def test_ctrl_c_leaves_nothing(environment: dict[str, str]) -> None:
    demo = subprocess.Popen(
        _DEMO,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    # The demo, two fronts and two ranks.
    wait_until(lambda: len(processes(environment)) >= 5, 60, "the servers are starting")
    time.sleep(0.5)
    os.killpg(demo.pid, signal.SIGINT)
    said, _ = demo.communicate(timeout=30)
    assert demo.returncode not in (0, None), said
    assert "Traceback" not in said
    assert not processes(environment)


def test_killed_it_leaves_nothing(environment: dict[str, str]) -> None:
    demo = subprocess.Popen(
        _DEMO, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    wait_until(lambda: len(processes(environment)) >= 5, 60, "the servers are starting")
    time.sleep(0.5)
    demo.kill()
    demo.wait(5)
    wait_until(lambda: not processes(environment), 10, "what it had started is gone")


def test_an_answer_without_pushed_pages_is_a_failure(environment: dict[str, str]) -> None:
    code = """
import typer
from kvrail.frontend import demo

class Local(demo.Launched):
    def __init__(self, role, port, logs, *flags, **options):
        more = ["--local-prefill", "always"] if role == "ce" else []
        super().__init__(role, port, logs, *flags, *more, **options)

demo.Launched = Local
typer.run(demo.main)
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "--device", "cpu"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "demo failed: the prompt was prefilled local, 0 pages were pushed" in done.stdout
    assert "all held" not in done.stdout
