# SPDX-License-Identifier: Apache-2.0
"""Which device is opened, and that it becomes the current one: shown without a GPU."""

from __future__ import annotations

import pytest
import torch

from kvrail.runtime.device import open_device
from kvrail.runtime.errors import ConfigError


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> list[int]:
    """Let torch see so many GPUs; the list tells which of them were made the current one."""
    current = [0]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


def test_the_gpu_that_is_opened_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current = gpus(monkeypatch, 2)
    assert open_device("cuda:1") == torch.device("cuda", 1)
    assert current[-1] == 1
    # Without a number it is the current one, whichever that is.
    assert open_device("cuda") == torch.device("cuda", 1)


def test_a_gpu_that_is_not_there_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    current = gpus(monkeypatch, 2)
    with pytest.raises(ConfigError, match="there are 2 CUDA devices"):
        open_device("cuda:2")
    assert current == [0]


def test_the_cpu_needs_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    current = gpus(monkeypatch, 0)
    assert open_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="no usable CUDA device"):
        open_device("cuda:0")
    assert current == [0]
