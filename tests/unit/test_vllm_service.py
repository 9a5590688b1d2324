# SPDX-License-Identifier: Apache-2.0
"""A transfer thread that fails must not leave vLLM waiting."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kit.vllm_pair import free_port
from kvrail.runtime.vllm import worker_side
from kvrail.runtime.vllm.kv_tensors import TensorView, geometry_of
from kvrail.runtime.vllm.meta import Call, Finished, Load, StepFacts
from kvrail.runtime.vllm.results import Outcome
from kvrail.runtime.vllm.service import Memory, Service
from kvrail.runtime.vllm.settings import Settings
from kvrail.runtime.vllm.worker_side import WorkerSide
from kvrail.transfer.layout import BlockLayout


def service(role: str, folder: Path) -> Service:
    memory = np.zeros((4, 64), np.float32)
    view = TensorView("l0", memory.ctypes.data, memory.ctypes.data, memory.shape, memory.strides, 4)
    geometry = geometry_of([view], 4)
    layout = BlockLayout(page_tokens=16, groups=1, unit_bytes=256, ranges=(1,), order="tensor", facts={})
    extra: dict[str, Any] = {"runtime_dir": str(folder), "kv_port": free_port(), "peers": ["127.0.0.1:9"]}
    settings = Settings.of(role, extra)
    return Service(
        settings,
        Memory(layout, geometry, [["l0"]], memory),
        token=b"t" * 32,
        rank=0,
        offset=0,
        ucx_overrides={},
    )


def outcomes(side: WorkerSide, done: Callable[[Outcome], bool]) -> Outcome:
    added, deadline = Outcome(), time.monotonic() + 20
    while not done(added):
        assert time.monotonic() < deadline, added
        one = side.outcome()
        added.sent |= one.sent
        added.received |= one.received
        added.failed |= one.failed
        time.sleep(0.01)
    return added


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_what_is_asked_of_a_thread_that_has_failed_is_answered(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = service(role, tmp_path)
    side = WorkerSide()
    side.start(made)
    ticket = os.urandom(16)
    load = Load("waits", ticket, ("127.0.0.1", 9), 0, 16, [1])
    side.before_forward(
        StepFacts(calls=[Call("waits", ticket, 16)], loads=[load] if role == "kv_consumer" else [])
    )

    def fail(_: float) -> None:
        raise RuntimeError("for this test")

    monkeypatch.setattr(made.role, "tick", fail)
    finished = [Finished(name, 1, 16, [1]) for name in ("waits", "comes")]
    other = Load("comes", os.urandom(16), ("127.0.0.1", 9), 0, 16, [2])
    if role == "kv_producer":
        side.before_forward(StepFacts(finished=finished, preempted=["waits"]))
        assert outcomes(side, lambda one: len(one.sent) == 2).sent == {"waits", "comes"}
    else:
        side.before_forward(StepFacts(loads=[other]))
        assert outcomes(side, lambda one: len(one.received) == 2).failed == {"waits", "comes"}
    assert "for this test" in caplog.text
    side.close()
    assert not made.alive


def test_a_step_without_a_forward_pass_waits_for_news(tmp_path: Path) -> None:
    """GPU runners call nothing behind a forward pass that there is none of; the core would spin on its reports."""
    made = service("kv_consumer", tmp_path)
    side = WorkerSide()
    side.start(made)
    begun = time.monotonic()
    for _ in range(20):
        side.before_forward(StepFacts(idle=True))
        side.outcome()
    assert time.monotonic() - begun > 20 * 0.001
    # What there is to tell is told at once.
    load = Load("r", os.urandom(16), ("127.0.0.1", 10), 0, 16, [1])
    side.before_forward(StepFacts(loads=[load], idle=True))
    assert outcomes(side, lambda one: bool(one.received)).failed == {"r"}
    side.close()


def test_the_step_behind_one_that_had_news_does_not_wait(tmp_path: Path) -> None:
    """vLLM has two steps under way: it hears what one of them told when the next one is done."""
    made = service("kv_consumer", tmp_path)
    side = WorkerSide()
    side.start(made)
    waited: list[float] = []
    made.results.wait = waited.append  # type: ignore[method-assign]

    def step() -> int:
        waited.clear()
        side.before_forward(StepFacts(idle=True))
        side.outcome()
        return len(waited)

    assert step() == 1
    made.results.received("r")
    assert [step(), step(), step()] == [1, 0, 1]
    side.close()


def test_the_longer_nothing_happens_the_less_often_vllm_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = service("kv_consumer", tmp_path)
    side = WorkerSide()
    side.start(made)
    now, waited = 100.0, 0.0
    monkeypatch.setattr(worker_side, "time", SimpleNamespace(monotonic=lambda: now))

    def wait(within_s: float) -> None:
        nonlocal waited
        waited = within_s

    made.results.wait = wait  # type: ignore[method-assign]

    def step(at: float, facts: StepFacts) -> float:
        nonlocal now, waited
        now, waited = at, 0.0
        side.before_forward(facts)
        side.outcome()
        return waited

    steps = [(100.0, 0.002), (100.01, 0.002), (100.04, 0.005), (101.0, 0.010), (160.0, 0.010)]
    for at, expected in steps:
        assert step(at, StepFacts(idle=True)) == pytest.approx(expected)
    # Something new, or a step that computes: what is waited for next may be short.
    assert step(161.0, StepFacts(cancelled=["nobody"], idle=True)) == 0.002
    assert step(162.0, StepFacts()) == 0.0
    assert step(163.0, StepFacts(idle=True)) == 0.002
    side.close()
