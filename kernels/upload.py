# SPDX-License-Identifier: Apache-2.0
"""The small arrays of one step on their way to a device and back: one pinned buffer, one asynchronous copy.

A copy from ordinary memory makes CUDA wait for everything that is queued on the stream. One from pinned memory is
queued like a kernel; torch keeps the buffer until the stream has passed the copy. A copy into ordinary memory is worse
still: until it is done it holds a lock of the driver, and another thread can neither record an event nor ask for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["Staged", "fetch", "stage", "upload"]

# Every array starts at a multiple of this, whatever its type.
_ALIGNMENT = 16


class Staged(NamedTuple):
    """The same arrays on both sides. `host` must not be written to again."""

    host: list[torch.Tensor]
    device: list[torch.Tensor]


def stage(device: torch.device, arrays: Sequence[np.ndarray[Any, Any]]) -> Staged:
    """Copy `arrays` to `device` in the order of its current stream. On a CPU nothing is copied."""
    if device.type == "cpu":
        here = [torch.from_numpy(array) for array in arrays]
        return Staged(here, here)
    firsts, size = [], 0
    for array in arrays:
        firsts.append(size)
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    bytes_of = pinned.numpy()
    for first, array in zip(firsts, arrays, strict=True):
        bytes_of[first : first + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return Staged(*(_split(side, firsts, arrays) for side in (pinned, pinned.to(device, non_blocking=True))))


def upload(device: torch.device, arrays: Sequence[np.ndarray[Any, Any]]) -> list[torch.Tensor]:
    """The device side of `stage`."""
    return stage(device, arrays).device


def fetch(there: torch.Tensor) -> torch.Tensor:
    """`there` on the host, when all that is queued on the current stream is done; other threads go on meanwhile."""
    if there.device.type == "cpu":
        return there
    here = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
    here.copy_(there, non_blocking=True)
    torch.cuda.current_stream(there.device).record_event().synchronize()
    return here


def _split(
    side: torch.Tensor, firsts: list[int], arrays: Sequence[np.ndarray[Any, Any]]
) -> list[torch.Tensor]:
    parts = []
    for first, array in zip(firsts, arrays, strict=True):
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        parts.append(side[first : first + array.nbytes].view(dtype).view(array.shape))
    return parts
