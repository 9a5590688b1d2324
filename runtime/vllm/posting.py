# SPDX-License-Identifier: Apache-2.0
"""Hands the ledger's pushes to native writers: whole blocks at once, or while a step computes them, layer by layer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from kvrail.runtime.vllm.layer_parts import Part, Parts
from kvrail.transfer.foreign_pool import ForeignPools
from kvrail.transfer.link_events import LinkKey, Way
from kvrail.transfer.links import Links
from kvrail.transfer.native_writers import NativeWriters
from kvrail.transfer.planner import Planner, count_runs
from kvrail.transfer.tickets import Push

if TYPE_CHECKING:
    from kvrail.transfer import _ucx

__all__ = ["Posting"]

_U32 = npt.NDArray[np.uint32]


@dataclass(slots=True, eq=False)
class _Begun:
    """A push of blocks that the running step computes. `left`: what has not gone out yet."""

    push: Push
    left: frozenset[Part]


class Posting:
    """The pushes of one PE worker; used by the service thread only. `planners`: of each link that is up."""

    def __init__(
        self, links: Links, writers: NativeWriters, pools: ForeignPools, parts: Parts, counters: Counter[str]
    ) -> None:
        self._links = links
        self._writers = writers
        self._pools = pools
        self._parts = parts
        self._counters = counters
        self._begun: list[_Begun] = []
        # Layers of the running step that are computed.
        self._layers: list[str] = []
        self.planners: dict[LinkKey, Planner] = {}

    def whole(self, push: Push, after: _ucx.CudaFence | None) -> None:
        """Blocks that are computed when `after` is done."""
        self._count(push)
        self._post(push, self._parts.all, after)

    def begin(self, push: Push) -> None:
        """Blocks that the running step computes: `layer` and `rest` follow."""
        self._count(push)
        self._begun.append(_Begun(push, self._parts.all))

    def layer(self, name: str, after: _ucx.CudaFence | None) -> None:
        """Of the running step this layer is computed, too, when `after` is done."""
        self._layers.append(name)
        ready = self._parts.of(self._layers)
        before = self._counters["bytes"]
        for begun in self._begun:
            self._post(begun.push, begun.left & ready, after)
            begun.left -= ready
        self._counters["bytes_ahead"] += self._counters["bytes"] - before

    def rest(self, after: _ucx.CudaFence | None) -> None:
        """The step is computed when `after` is done."""
        begun, self._begun, self._layers = self._begun, [], []
        for one in begun:
            self._post(one.push, one.left, after)

    def _count(self, push: Push) -> None:
        self._counters["blocks"] += int(np.count_nonzero(push.target))

    def _post(self, push: Push, parts: frozenset[Part], after: _ucx.CudaFence | None) -> None:
        writer, key = self._writers.get(push.writer), LinkKey(*push.link)
        if writer is None:
            return
        units, planner, geometry = self._links.peer_units(key), self.planners.get(key), self._parts.geometry
        groups = np.arange(len(push.target)) % self._parts.groups
        pools = list(self._pools.page_pools())
        # Where each layer has an allocation of its own, as on GPUs, all ranges have one shape, and so the same units.
        made: dict[object, tuple[_U32, _U32, Way | Literal[""]]] = {}
        for at, segments, own in self._parts.runs(parts):
            pool_id, pool = pools[at]
            tensors = geometry.ranges[at].tensors
            theirs = units[pool_id] // tensors
            if (shape := (tensors, theirs, segments, own)) not in made:
                wanted = (push.target != 0) & np.isin(groups, own)
                here = geometry.units(push.source[wanted], tensors, geometry.blocks, segments)
                there = geometry.units(push.target[wanted], tensors, theirs, segments)
                nbytes = len(here) * geometry.unit_bytes
                way = planner.choose(nbytes, count_runs(here, there)) if planner and nbytes else None
                made[shape] = here, there, way or ""
            here, there, chosen = made[shape]
            if len(here):
                writer.push(pool_id, pool.address, here, there, after=after, way=chosen)
                self._counters["bytes"] += len(here) * geometry.unit_bytes
