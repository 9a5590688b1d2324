# SPDX-License-Identifier: Apache-2.0
"""Which devices the demo takes, for machines of all kinds."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from kvrail.frontend import demo, demo_gpus
from kvrail.frontend.demo_gpus import NEED_BYTES, Devices, GpuFound, choose, look


def gpu(engines: float, *, in_reach: bool = True) -> GpuFound:
    """A GPU with room for so many engines."""
    return GpuFound("a GPU", int(engines * NEED_BYTES), in_reach)


@pytest.mark.parametrize(
    ("found", "devices"),
    [
        ([gpu(3)], ("cuda:0", "cuda:0")),
        ([gpu(1), gpu(2)], ("cuda:0", "cuda:1")),
        ([gpu(9), gpu(9), gpu(9)], ("cuda:0", "cuda:2")),
        # The last one is out of reach, or full: the one before it, at last the first one alone.
        ([gpu(9), gpu(9), gpu(9, in_reach=False)], ("cuda:0", "cuda:1")),
        ([gpu(9), gpu(1.5)], ("cuda:0", "cuda:0")),
    ],
)
def test_gpus_that_serve_are_taken(found: list[GpuFound], devices: tuple[str, str]) -> None:
    assert choose(found) == Devices(*devices)


@pytest.mark.parametrize(
    ("found", "mps", "reason"),
    [
        ([], "", "no GPU"),
        ([gpu(2.5)], "", "GPU 0 (a GPU) has 7.5 GiB free, and the demo wants 9 there"),
        ([gpu(0.5), gpu(9)], "", "GPU 0 (a GPU) has 1.5 GiB free, and the demo wants 3 there"),
        ([gpu(2), gpu(9, in_reach=False)], "", "GPU 0 (a GPU) has 6.0 GiB free, and the demo wants 9 there"),
        ([gpu(9)], "its pipe", "GPUs are shared through MPS (its pipe), which no lane between GPUs allows"),
    ],
)
def test_else_the_cpu_and_why(found: list[GpuFound], mps: str, reason: str) -> None:
    assert choose(found, mps) == Devices("cpu", "cpu", reason)


def test_without_a_gpu_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(subprocess, "run", None)
    assert look() == Devices("cpu", "cpu", "no GPU")


@pytest.mark.parametrize(
    ("program", "devices"),
    [
        (
            f'print(\'[{{"name":"a GPU","free_bytes":{3 * NEED_BYTES},"in_reach":true}}]\')',
            Devices("cuda:0", "cuda:0"),
        ),
        (
            "import sys; sys.exit('no driver')",
            Devices("cpu", "cpu", "the GPUs cannot be used: no driver"),
        ),
    ],
)
def test_what_the_look_says_is_believed(
    monkeypatch: pytest.MonkeyPatch, program: str, devices: Devices
) -> None:
    run = subprocess.run

    def instead(command: list[str], **options: Any) -> Any:
        assert command[-1] == "kvrail.frontend.demo_gpus"
        return run([sys.executable, "-c", program], **options)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(demo_gpus, "mps_sign", lambda: "")
    monkeypatch.setattr(subprocess, "run", instead)
    assert look() == devices


@pytest.mark.parametrize("wrong", [{"device": "foo"}, {"lane": "pigeon"}, {"dtype": "int3"}])
def test_what_the_demo_cannot_do_is_said_before_anything_is_fetched(
    wrong: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "_run", lambda *_: pytest.fail("it has begun"))
    with pytest.raises(SystemExit) as end:
        demo.main(**wrong)  # type: ignore[arg-type]
    assert end.value.code == 2
    (name, value), *_ = wrong.items()
    assert f"demo: --{name} {value}: must be" in capsys.readouterr().err
