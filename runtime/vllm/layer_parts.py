# SPDX-License-Identifier: Apache-2.0
"""Which parts of a push belong to which layer: for pushes that go out layer by layer while the step still computes.

A block is a unit in each segment of vLLM's KV tensors, and in each segment it is one layer's: that of the block's own
KV cache group. So a part of a push is (range, segment, group): the units of the group's blocks in that segment. They
are final when that layer is computed; parts of no layer hold nothing, and go out with the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvrail.runtime.vllm.kv_tensors import Geometry

__all__ = ["Part", "Parts", "Run"]


class Part(NamedTuple):
    """`tensor`: number of the segment in its range."""

    range: int
    tensor: int
    group: int


class Run(NamedTuple):
    """Parts of one range: each of `groups` in each of `tensors`."""

    range: int
    tensors: tuple[int, ...]
    groups: tuple[int, ...]


class Parts:
    """All parts of an engine's KV tensors. `groups`: names of the layers of each KV cache group."""

    def __init__(self, geometry: Geometry, groups: Sequence[Sequence[str]]) -> None:
        self.geometry = geometry
        self.groups = len(groups)
        group_of = {layer: number for number, layers in enumerate(groups) for layer in layers}
        self._of: dict[str, set[Part]] = {}
        for at, part in enumerate(geometry.ranges):
            for tensor, layers in enumerate(part.layers):
                for layer in layers:
                    if layer in group_of:
                        self._of.setdefault(layer, set()).add(Part(at, tensor, group_of[layer]))
        self._runs: dict[frozenset[Part], tuple[Run, ...]] = {}
        self.all = frozenset(
            Part(at, tensor, group)
            for at, part in enumerate(geometry.ranges)
            for tensor in range(part.tensors)
            for group in range(self.groups)
        )

    def of(self, layers: Iterable[str]) -> frozenset[Part]:
        """The parts of these layers; of others than those of the KV tensors, none."""
        return frozenset().union(*(self._of.get(layer, ()) for layer in layers))

    def runs(self, parts: frozenset[Part]) -> tuple[Run, ...]:
        """The same parts, together where they are alike."""
        if parts not in self._runs:  # What is asked for are layers and all up to a layer: not many sets.
            self._runs[parts] = tuple(_runs(parts))
        return self._runs[parts]


def _runs(parts: frozenset[Part]) -> Iterator[Run]:
    segments: dict[tuple[int, int], list[int]] = {}
    for part in sorted(parts):
        segments.setdefault((part.range, part.tensor), []).append(part.group)
    alike: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for (at, tensor), groups in segments.items():
        alike.setdefault((at, tuple(groups)), []).append(tensor)
    for (at, found), tensors in alike.items():
        yield Run(at, tuple(tensors), found)
