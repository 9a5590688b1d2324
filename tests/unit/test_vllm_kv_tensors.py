# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's KV blocks lie: units found by arithmetic are the bytes that numpy finds by strides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvrail.runtime.vllm.kv_tensors import Geometry, TensorView, geometry_of
from kvrail.transfer.errors import LinkRefused

BLOCKS, LAYERS, HEADS, TOKENS, CONTENT = 6, 3, 2, 4, 8
Made = tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]


def view(name: str, array: np.ndarray[Any, Any], storage: np.ndarray[Any, Any]) -> TensorView:
    return TensorView(
        name, storage.ctypes.data, array.ctypes.data, array.shape, array.strides, array.itemsize
    )


def by_layer(blocks: int) -> Made:
    """All layers in one allocation, layer after layer, as on CPUs."""
    whole = np.zeros((LAYERS, blocks, HEADS, TOKENS, CONTENT), dtype=np.int32)
    return [whole], list(whole)


def tokens_first(blocks: int) -> Made:
    """The same bytes in another order of dimensions: [blocks, heads, tokens, content] over tokens before heads."""
    whole = np.zeros((LAYERS, blocks, TOKENS, HEADS, CONTENT), dtype=np.int32)
    return [whole], [layer.transpose(0, 2, 1, 3) for layer in whole]


def each_its_own(blocks: int) -> Made:
    wholes = [np.zeros((blocks, HEADS, TOKENS, CONTENT), dtype=np.int32) for _ in range(LAYERS)]
    return wholes, wholes


def by_block(blocks: int) -> Made:
    """A block of all layers is one run."""
    whole = np.zeros((blocks, LAYERS, HEADS, TOKENS, CONTENT), dtype=np.int32)
    return [whole], [whole[:, layer] for layer in range(LAYERS)]


def keys_apart(blocks: int) -> Made:
    """Keys and values in two halves, as older versions have them: two segments a layer."""
    whole = np.zeros((LAYERS, 2, blocks, TOKENS, HEADS, CONTENT), dtype=np.int32)
    return [whole], list(whole)


def kernel_blocks(blocks: int) -> Made:
    """The attention kernel's blocks are half as long as the scheduler's."""
    whole = np.zeros((LAYERS, 2 * blocks, HEADS, TOKENS // 2, CONTENT), dtype=np.int32)
    return [whole], list(whole)


def geometry(made: Made, blocks: int) -> Geometry:
    storages, layers = made
    whole = storages * len(layers) if len(storages) == 1 else storages
    views = [view(f"l{at}", layer, whole[at]) for at, layer in enumerate(layers)]
    return geometry_of(views, blocks)


def bytes_of(made: Made) -> list[np.ndarray[Any, Any]]:
    return [storage.reshape(-1).view(np.uint8) for storage in made[0]]


def spans(found: Geometry, made: Made) -> Iterator[tuple[np.ndarray[Any, Any], int]]:
    """(bytes of each range, its tensors)."""
    for part in found.ranges:
        (storage,) = [
            one for one in made[0] if one.ctypes.data <= part.address < one.ctypes.data + one.nbytes
        ]
        whole = storage.reshape(-1).view(np.uint8)[part.address - storage.ctypes.data :]
        yield whole, part.tensors


@pytest.mark.parametrize("make", [by_layer, tokens_first, each_its_own, by_block, keys_apart, kernel_blocks])
def test_moving_the_units_of_blocks_moves_the_blocks_in_every_layer(make: Callable[[int], Made]) -> None:
    ours, theirs = make(BLOCKS), make(2 * BLOCKS)
    rng = np.random.default_rng(1)
    for whole in bytes_of(ours):
        whole[:] = rng.integers(1, 255, whole.size, dtype=np.uint8)
    here, there = geometry(ours, BLOCKS), geometry(theirs, 2 * BLOCKS)
    assert (here.unit_bytes, here.order) == (there.unit_bytes, there.order)
    source, target = np.array([5, 0, 2], np.uint32), np.array([11, 3, 7], np.uint32)
    for (from_bytes, tensors), (to_bytes, others) in zip(
        spans(here, ours), spans(there, theirs), strict=True
    ):
        assert tensors == others
        from_units = here.units(source, tensors, BLOCKS)
        # The other side's count of blocks is known from the size of its range.
        to_units = here.units(target, tensors, there.blocks)
        for one, other in zip(from_units, to_units, strict=True):
            size = here.unit_bytes
            to_bytes[other * size : (other + 1) * size] = from_bytes[one * size : (one + 1) * size]
    axis, scale = {"keys_apart": (1, 1), "kernel_blocks": (0, 2)}.get(make.__name__, (0, 1))
    for mine, other in zip(ours[1], theirs[1], strict=True):
        mine_by_block = np.moveaxis(mine, axis, 0).reshape(BLOCKS, scale, -1)
        other_by_block = np.moveaxis(other, axis, 0).reshape(2 * BLOCKS, scale, -1)
        assert (other_by_block[target] == mine_by_block[source]).all()
        untouched = np.setdiff1d(np.arange(2 * BLOCKS), target)
        assert not other_by_block[untouched].any()


def test_layers_of_several_groups_share_memory_once() -> None:
    whole = np.zeros((2, BLOCKS, HEADS, TOKENS, CONTENT), dtype=np.int32)
    names = ["full.0", "full.1", "window.0", "window.1"]
    found = geometry_of([view(name, whole[at % 2], whole) for at, name in enumerate(names)], BLOCKS)
    (part,) = found.ranges
    assert part.layers == (("full.0", "window.0"), ("full.1", "window.1"))
    assert found.units(np.array([4], np.uint32), part.tensors, BLOCKS).tolist() == [4, BLOCKS + 4]


def test_allocations_that_happen_to_be_neighbours_stay_apart() -> None:
    whole = np.zeros((2, BLOCKS, HEADS, TOKENS, CONTENT), dtype=np.int32)
    # In the order of the layers, wherever they lie.
    views = [view("l0", whole[1], whole[1]), view("l1", whole[0], whole[0])]
    assert [part.layers for part in geometry_of(views, BLOCKS).ranges] == [(("l0",),), (("l1",),)]


@pytest.mark.parametrize(
    ("shape", "cut", "word"),
    [
        ((BLOCKS, HEADS, TOKENS, CONTENT), np.s_[:, :, :, :5], "l0: a block is not contiguous"),
        ((BLOCKS, HEADS, TOKENS, CONTENT), np.s_[:, :1], "do not fill"),
        ((BLOCKS + 1, HEADS, TOKENS, CONTENT), np.s_[:], "no dimension of 6 blocks"),
        ((BLOCKS, 3 * TOKENS * CONTENT), np.s_[:, : 2 * TOKENS * CONTENT], "stand 384 bytes apart"),
    ],
    ids=["holes", "gap behind each block", "other count", "padded"],
)
def test_what_cannot_be_pushed_is_refused_by_name(shape: tuple[int, ...], cut: Any, word: str) -> None:
    whole = np.zeros(shape, dtype=np.int32)
    with pytest.raises(LinkRefused, match=word):
        geometry_of([view("l0", whole[cut], whole)], BLOCKS)


def test_blocks_of_several_sizes_are_refused() -> None:
    one, other = np.zeros((BLOCKS, 8), np.int32), np.zeros((BLOCKS, 16), np.int32)
    with pytest.raises(LinkRefused, match="l0 has 32 bytes every 32, l1 has 64"):
        geometry_of([view("l0", one, one), view("l1", other, other)], BLOCKS)
    with pytest.raises(LinkRefused, match="no KV cache"):
        geometry_of([], BLOCKS)
