# SPDX-License-Identifier: Apache-2.0
"""The sending side of transfer-bench with GPUs: both processes' pools of one page size, and every way between them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvrail.frontend.bench_gpu_lanes import GPU_LANES, GpuLane
from kvrail.frontend.bench_gpu_limits import DriverCopies
from kvrail.frontend.bench_gpu_memory import GpuMemory, Kind, digest_of_sums
from kvrail.frontend.bench_gpu_nccl import NcclWay
from kvrail.frontend.bench_gpu_tcp import StagedTcp
from kvrail.frontend.bench_nixl import NixlSender, nixl_version
from kvrail.frontend.bench_peer import Receiver
from kvrail.frontend.bench_rank import Indices
from kvrail.frontend.bench_session import Session
from kvrail.transfer.errors import TransferError

__all__ = ["GpuSession", "kinds_of"]

# The number of the first page, before any batch.
_TRIAL = 10**6


class GpuSession(Session):
    """The sender's GPU is number 0, the receiver's the next one, or the same where there is only one."""

    def __init__(
        self,
        receiver: Receiver,
        ways: tuple[str, ...],
        kinds: tuple[Kind, Kind],
        page_bytes: int,
        pages: int,
        spin_us: int,
        nccl_port: int,
    ) -> None:
        self._receiver = receiver
        self.threads = "spin" if spin_us else "sleep"
        self.memory = f"{kinds[0]}->{kinds[1]}"
        there = 1 if torch.cuda.device_count() > 1 else 0
        units = max(2 * pages, 16)
        self._pages = memory = GpuMemory(kinds[0], 0, page_bytes, units)
        memory.fill()
        self._sums = memory.sums(np.arange(units, dtype=np.uint32))
        self._ways = {}
        self.facts = {}
        self.missing = {}
        self._limits: DriverCopies | None = None
        wanted = list(ways)
        if "nccl" in wanted and (kinds != ("gpu", "gpu") or there == 0):
            wanted.remove("nccl")
            self.missing["nccl"] = "NCCL moves data between two different GPUs only"
        if "nixl" in wanted and nixl_version() is None:
            wanted.remove("nixl")
        lanes = {way: GpuLane(memory, way, spin_us=spin_us) for way in wanted if way in GPU_LANES}
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
            receiver.tell(
                do="open_gpu",
                kind=kinds[1],
                device=there,
                page_bytes=page_bytes,
                pool_pages=units,
                spin_us=spin_us,
                nccl_port=nccl_port if "nccl" in wanted else 0,
                lanes={name: lane.card() for name, lane in lanes.items()},
                tcp_port=listener.getsockname()[1] if "tcp" in wanted else 0,
                nixl="nixl" in wanted,
            )
            if "nccl" in wanted:
                self._ways["nccl"] = NcclWay(memory, 0, nccl_port)
            opened = receiver.answer()["ways"]
            if "tcp" in wanted and "error" not in opened["tcp"]:
                self._ways["tcp"] = StagedTcp(memory, listener.accept()[0])
        self._ways.update(lanes)
        for name, fact in opened.items():
            if "error" not in fact:
                self._try(name, fact, lambda name=name, fact=fact: self._finish(name, fact))  # type: ignore[misc]
            else:
                self.missing[name] = fact["error"]
        if {"memcpy", "memcpy-batch"} & set(wanted):
            self._limits = DriverCopies(memory, kinds[1], there)
            if "memcpy" in wanted:
                self.facts["memcpy"] = {"transport": "one block"}
            if "memcpy-batch" in wanted and self._limits.batch_refusal:
                self.missing["memcpy-batch"] = self._limits.batch_refusal
            elif "memcpy-batch" in wanted:
                self.facts["memcpy-batch"] = {"transport": "one call"}

    def _try(self, name: str, fact: dict[str, Any], act: Callable[[], None]) -> None:
        try:
            act()
            self.facts[name] = fact
        except Exception as error:  # told as "not measured", and the others go on
            self.missing[name] = f"{type(error).__name__}: {error}"

    def _finish(self, name: str, fact: dict[str, Any]) -> None:
        """Join this way's two ends, and see one page through: a way that fails later would end the whole run."""
        if name == "nixl":
            self._ways["nixl"] = NixlSender(self._pages.pool, fact.pop("peer"))
        elif name in GPU_LANES:
            lane = self._ways[name]
            assert isinstance(lane, GpuLane)
            lane.connect(fact.pop("peer"), into=True)
            fact["transport"] = lane.transport
        self._try_a_page(name)

    def _try_a_page(self, name: str) -> None:
        one, way = np.zeros(1, dtype=np.uint32), self._ways[name]
        self._receiver.tell(do="take", way=name, number=_TRIAL, target=[0])
        self._receiver.answer()
        try:
            way.push(_TRIAL, one, one)
            way.settle()
        except Exception:
            if isinstance(way, GpuLane):
                way.release(_TRIAL)
            with contextlib.suppress(TransferError):
                self._receiver.answer()
            raise
        if self._receiver.answer()["digest"] != self._expected(one):
            raise TransferError("a page arrived damaged")

    def _expected(self, source: Indices) -> str:
        return digest_of_sums(self._sums[source.astype(np.int64)])

    def _by_itself(self, way: str, source: Indices, target: Indices) -> tuple[float, bool] | None:
        if self._limits is None or way not in ("memcpy", "memcpy-batch"):
            return None
        return self._limits.block(len(source)) if way == "memcpy" else self._limits.batch(source, target)

    def close(self) -> None:
        for way in self._ways.values():
            way.close()
        if self._limits is not None:
            self._limits.close()
        self._close_receiver()
        self._pages.close()


def kinds_of(memory: str) -> tuple[Kind, Kind]:
    """The sender's and the receiver's kind of memory in "gpu->host" and the like."""
    one, _, two = memory.partition("->")
    return "gpu" if one == "gpu" else "host", "gpu" if two == "gpu" else "host"
