# SPDX-License-Identifier: Apache-2.0
"""The receiving side of transfer-bench with GPUs: its pool, and every way opened that can be."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from kvrail.frontend.bench_gpu_lanes import GpuLane
from kvrail.frontend.bench_gpu_memory import GpuMemory
from kvrail.frontend.bench_gpu_nccl import NcclWay
from kvrail.frontend.bench_gpu_tcp import StagedTcp
from kvrail.frontend.bench_nixl import NixlReceiver
from kvrail.frontend.bench_rank import Pages, Way

__all__ = ["open_ways"]


def open_ways(command: dict[str, Any]) -> tuple[Pages, dict[str, Way], dict[str, Any]]:
    """(memory, ways, what the sender must know of each: its transport and card, or the error that kept it closed)."""
    memory = GpuMemory(command["kind"], command["device"], command["page_bytes"], command["pool_pages"])
    ways: dict[str, Way] = {}
    opened: dict[str, Any] = {}

    def attempt(name: str, make: Callable[[], dict[str, Any]]) -> None:
        try:
            opened[name] = make()
        except Exception as error:  # one way that cannot be opened must not keep the others from it
            opened[name] = {"error": f"{type(error).__name__}: {error}"}

    # First: both processes join at the same time.
    if command["nccl_port"]:

        def nccl() -> dict[str, Any]:
            ways["nccl"] = NcclWay(memory, 1, command["nccl_port"])
            return {"transport": "nccl"}

        attempt("nccl", nccl)
    for lane, card in command["lanes"].items():

        def link(lane: str = lane, card: dict[str, Any] = card) -> dict[str, Any]:
            way = GpuLane(memory, lane, spin_us=command["spin_us"])
            ways[lane] = way
            way.connect(card, into=False)
            return {"transport": way.transport, "peer": way.card()}

        attempt(lane, link)
    if command["tcp_port"]:

        def tcp() -> dict[str, Any]:
            ways["tcp"] = StagedTcp(memory, socket.create_connection(("127.0.0.1", command["tcp_port"])))
            return {"transport": "pinned host memory"}

        attempt("tcp", tcp)
    if command["nixl"]:

        def nixl() -> dict[str, Any]:
            way = NixlReceiver(memory.pool)
            ways["nixl"] = way
            return {"transport": "ucx", "peer": way.card}

        attempt("nixl", nixl)
    return memory, ways, opened
