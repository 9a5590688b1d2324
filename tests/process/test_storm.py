# SPDX-License-Identifier: Apache-2.0
"""check_storm against real splits: they come through it, and the check can say no."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from kit.cluster import Server
from kit.split import ask
from kit.tiny_checkpoint import MAX_LENGTH

if TYPE_CHECKING:
    from conftest import Cluster

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]


def run(ref: Server, split: Server, *flags: str) -> tuple[int, str]:
    command = [
        sys.executable,
        "-P",
        "-m",
        "kvrail.frontend.check_storm",
        "--ref",
        ref.url,
        "--split",
        split.url,
    ]
    command += ["--max-tokens", "8", "--concurrency", "4", "--longest", str(MAX_LENGTH // 2)]
    done = subprocess.run(
        [*command, *flags],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "COLUMNS": "200"},
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("lane", ["shm", "put/tcp"])
def test_a_split_comes_through(cluster: Cluster, lane: str) -> None:
    split, single = cluster.split(lane), cluster.single(lane)
    cut = split.ce.metric("kvrail_requests_total", outcome="cancelled")
    status, said = run(single, split.ce, "--cancels", "40", "--normals", "12", "--expect-lane", lane)
    assert status == 0, said
    assert "12 compared afterwards" in said
    assert "clean: equal answers, nothing held" in said
    assert split.ce.metric("kvrail_requests_total", outcome="cancelled") > cut


def test_it_can_say_no(cluster: Cluster) -> None:
    """The wrong lane, and a single engine in place of a split."""
    split, single = cluster.split("shm"), cluster.single("shm")
    few = ("--cancels", "12", "--normals", "2")
    status, said = run(single, split.ce, *few, "--expect-lane", "put/tcp")
    assert status == 1, said
    assert "received over lane put/tcp" in said
    status, said = run(split.ce, single, *few)
    assert status == 2, said
    assert "has no link to a prefill engine" in said


def test_what_is_held_is_told(cluster: Cluster) -> None:
    """Somebody else's request is still there when the storm is over: its pages are held, and that is said."""
    split, single = cluster.split("shm"), cluster.single("shm")
    stop = threading.Event()

    def keep_busy(max_tokens: int) -> None:
        while not stop.is_set():
            ask(split.ce.url, prompt=list(range(300, 400)), max_tokens=max_tokens, ignore_eos=True)

    # Of different lengths, so that they do not all end at once.
    busy = [threading.Thread(target=keep_busy, args=(length,)) for length in (530, 470, 390, 310, 230)]
    for one in busy:
        one.start()
    try:
        status, said = run(single, split.ce, "--cancels", "12", "--normals", "2", "--within", "0.5")
    finally:
        stop.set()
        for one in busy:
            one.join(60)
    assert status == 1, said
    assert "still holds {" in said, said
