# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's KV blocks lie: its tensors, read by their strides, as ranges of equal units that can be pushed.

A segment is what one tensor holds: for each block a run of `unit_bytes` bytes, all blocks the same distance apart.
Segments side by side in one allocation make a range, in which a unit is found by arithmetic. Layers of different KV
cache groups share segments: a block belongs to one group at a time, so moving a block means moving its unit in every
segment.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvrail.transfer.errors import LinkRefused

__all__ = ["Geometry", "Range", "TensorView", "geometry_of"]

_U32 = npt.NDArray[np.uint32]
Order = Literal["tensor", "block"]


class TensorView(NamedTuple):
    """One layer's KV tensor. `storage`: address of the allocation; `strides` in bytes; `itemsize` in bytes."""

    layer: str
    storage: int
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


class Range(NamedTuple):
    """`tensors` segments from `address` on; `layers`: which layers each of them holds."""

    address: int
    tensors: int
    layers: tuple[tuple[str, ...], ...]


class Geometry(NamedTuple):
    """All ranges of one engine. `blocks`: how many each segment has (the other engine may have more or fewer)."""

    blocks: int
    unit_bytes: int
    order: Order
    ranges: tuple[Range, ...]

    def units(self, blocks: _U32, tensors: int, of: int, which: Sequence[int] | None = None) -> _U32:
        """Units of `blocks` in a range of `tensors` segments whose engine has `of` blocks; tensor by tensor.

        `which`: in these segments only.
        """
        tensor = np.array(range(tensors) if which is None else which, dtype=np.uint32)[:, None]
        found = (
            tensor * np.uint32(of) + blocks
            if self.order == "tensor"
            else blocks * np.uint32(tensors) + tensor
        )
        return found.reshape(-1).astype(np.uint32, copy=False)


class _Segment(NamedTuple):
    storage: int
    address: int
    stride: int
    unit: int


def geometry_of(views: Iterable[TensorView], blocks: int) -> Geometry:
    """The geometry of vLLM's KV tensors. Raises LinkRefused saying which layer lies in a way that cannot be pushed."""
    holders: dict[_Segment, list[str]] = {}
    for view in views:
        for segment in _segments(view, blocks):
            holders.setdefault(segment, []).append(view.layer)
    if not holders:
        raise LinkRefused("vLLM has no KV cache tensors to push")
    first, *others = holders
    for other in others:
        if (other.stride, other.unit) != (first.stride, first.unit):
            raise LinkRefused(
                f"KV blocks of different sizes: {holders[first][0]} has {first.unit} bytes every {first.stride}, "
                f"{holders[other][0]} has {other.unit} bytes every {other.stride}"
            )
    order: Order = "tensor" if first.stride == first.unit else "block"
    ranges = (_by_tensor if order == "tensor" else _by_block)(list(holders), blocks)
    return Geometry(
        blocks,
        first.unit,
        order,
        tuple(
            Range(members[0].address, len(members), tuple(tuple(holders[member]) for member in members))
            for members in ranges
        ),
    )


def _segments(view: TensorView, blocks: int) -> list[_Segment]:
    dims = [dim for dim in range(len(view.shape)) if view.shape[dim] != 1 or dim == 0]
    at = next((dim for dim in dims[:2] if view.shape[dim] % blocks == 0), None)
    if at is None:
        raise LinkRefused(f"{view.layer}: shape {view.shape} has no dimension of {blocks} blocks")
    kernel_blocks = view.shape[at] // blocks
    inner = [dim for dim in dims if dim != at and view.strides[dim] < view.strides[at]]
    outer = [dim for dim in dims if dim != at and dim not in inner]
    size = view.itemsize
    for dim in sorted(inner, key=lambda dim: view.strides[dim]):
        if view.strides[dim] != size:
            raise LinkRefused(
                f"{view.layer}: a block is not contiguous (shape {view.shape}, strides {view.strides})"
            )
        size *= view.shape[dim]
    if kernel_blocks > 1 and view.strides[at] != size:
        raise LinkRefused(
            f"{view.layer}: the kernel's blocks of one block are not neighbours ({view.strides})"
        )
    unit, stride = size * kernel_blocks, view.strides[at] * kernel_blocks
    if stride % unit:
        raise LinkRefused(f"{view.layer}: blocks of {unit} bytes stand {stride} bytes apart (padded blocks)")
    places = itertools.product(*(range(view.shape[dim]) for dim in outer))
    offsets = (sum(i * view.strides[dim] for i, dim in zip(place, outer, strict=True)) for place in places)
    return [_Segment(view.storage, view.address + offset, stride, unit) for offset in offsets]


def _by_tensor(segments: Sequence[_Segment], blocks: int) -> list[list[_Segment]]:
    """Runs of segments of one allocation that follow each other without a gap, in the order of their first layers."""
    runs: list[list[_Segment]] = []
    for segment in sorted(segments, key=lambda one: (one.storage, one.address)):
        last = runs[-1][-1] if runs else None
        if last and last.storage == segment.storage and last.address + blocks * last.unit == segment.address:
            runs[-1].append(segment)
        else:
            runs.append([segment])
    place = {segment: at for at, segment in enumerate(segments)}
    return sorted(runs, key=lambda run: min(place[segment] for segment in run))


def _by_block(segments: Sequence[_Segment], blocks: int) -> list[list[_Segment]]:
    """One range for each allocation: a block is its segments' units, side by side."""
    runs: list[list[_Segment]] = []
    for storage in dict.fromkeys(segment.storage for segment in segments):
        run = sorted((one for one in segments if one.storage == storage), key=lambda one: one.address)
        offsets = [segment.address - run[0].address for segment in run]
        if offsets != list(range(0, run[0].stride, run[0].unit)):
            raise LinkRefused(
                f"blocks of {run[0].unit} bytes stand {run[0].stride} bytes apart, and {len(run)} layers do not fill "
                "the distance"
            )
        runs.append(run)
    return runs
