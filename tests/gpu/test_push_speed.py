# SPDX-License-Identifier: Apache-2.0
"""How fast pages go from GPU to GPU through the native writer, against the driver's own copy of one block."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from kit.remote import Remote
from kvrail.transfer.ucx import EventKind

pytestmark = pytest.mark.gpu

POOL, ROUNDS = 0, 9
GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10
Make = Callable[..., tuple[Any, Remote]]


def push_all(end: Any, key: int, order: list[np.ndarray[Any, Any]], way: str) -> float:
    """Seconds from the push to the doorbell."""
    writer = end.link.writer(key, ttl_s=60.0)
    began = time.monotonic_ns()
    writer.push(POOL, end.pool.address, order[0], order[1], way=way)
    writer.ring(b"bell")
    call_us = (time.monotonic_ns() - began) / 1e3
    if key == 0:
        print(f"{way}: the calls took {call_us:.0f} us for {len(order[0])} pages")
    return (int(end.take(EventKind.RUNG)[0][4]) - began) / 1e9


def driver_copy(source: torch.Tensor, target: torch.Tensor) -> float:
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    target.copy_(source)
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


@pytest.mark.parametrize(
    ("total", "page_bytes"),
    [(GIB, size) for size in (4 * KIB, 16 * KIB, 64 * KIB, 512 * KIB, 4 * MIB)]
    + [(256 * MIB, size) for size in (4 * KIB, 16 * KIB, 64 * KIB, 2 * MIB)],
)
def test_pages_reach_the_peer_near_the_speed_of_the_link(
    make_gpu_pair: Make, total: int, page_bytes: int
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pages = total // page_bytes
    here, _ = make_gpu_pair(1, pages=pages, page_bytes=page_bytes, spin_us=1000)
    random = np.random.default_rng(0)
    order = [random.permutation(pages).astype(np.uint32) for _ in range(2)]
    blocks = [torch.empty(GIB, dtype=torch.uint8, device=f"cuda:{device}") for device in (0, 1)]
    took: dict[str, list[float]] = {"driver": [], "kernel": [], "engine": [], "put": []}
    for key in range(ROUNDS):
        took["driver"].append(driver_copy(*blocks))
        took["kernel"].append(push_all(here, 3 * key, order, "kernel"))
        if page_bytes >= 512 << 10:
            took["engine"].append(push_all(here, 3 * key + 1, order, "engine"))
            took["put"].append(push_all(here, 3 * key + 2, order, "put"))
    rates = {
        name: (GIB if name == "driver" else total) / median(values[2:]) / 1e9
        for name, values in took.items()
        if values
    }
    told = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
    print(f"{total // MIB} MiB in pages of {page_bytes >> 10} KiB, GB/s: {told}")
    assert rates["kernel"] > 0.75 * rates["driver"]
