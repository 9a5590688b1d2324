# SPDX-License-Identifier: Apache-2.0
"""The torch meaning of the page-copy kernels against loops over bytes, and its checksum against numpy and C++."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvrail.kernels import page_copy_reference as reference
from kvrail.kernels.page_copy import PageList, Stride
from kvrail.transfer.ucx import checksum_pages

U64 = npt.NDArray[np.uint64]
STEP, FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0x9FB21C651E98DF25)


def mix(x: U64) -> U64:
    z = (x ^ (x >> np.uint64(32))) * FACTOR
    return z ^ (z >> np.uint64(29))


def checksum(page: bytes) -> int:
    """The definition, written once more."""
    words = np.frombuffer(page, dtype="<u8").astype(np.uint64)
    places = np.arange(1, len(words) + 1, dtype=np.uint64)
    total = mix(words + places * STEP).sum(dtype=np.uint64, keepdims=True)
    return int(mix(total + np.uint64(len(page)))[0])


def unsigned(sums: torch.Tensor) -> list[int]:
    return [value % 2**64 for value in sums.tolist()]


def pool(pages: int, page_bytes: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (pages * page_bytes,), dtype=torch.uint8, generator=random)


@pytest.mark.parametrize("page_bytes", [16, 48, 4096, 4112])
def test_checksums_equal_numpy(page_bytes: int) -> None:
    pages = pool(9, page_bytes, 1)
    index = torch.tensor([4, 0, 8, 8])
    got = unsigned(reference.page_checksums(pages, index, page_bytes))
    rows = pages.view(9, page_bytes)
    assert got == [checksum(rows[page].numpy().tobytes()) for page in index.tolist()]


def test_known_checksums() -> None:
    """Fixed for all time: engines of different builds compare them."""
    assert checksum(bytes(16)) == 0x8A959D43702C925B
    assert checksum(bytes(range(256)) * 16) == 0x970CB2588230FFDF


def test_checksums_equal_the_native_ones() -> None:
    page_bytes = 4096 + 16
    pages = pool(11, page_bytes, 2)
    index = torch.tensor([10, 3, 7])
    got = unsigned(reference.page_checksums(pages, index, page_bytes))
    assert got == checksum_pages(pages.data_ptr(), page_bytes, index.numpy().astype(np.uint32)).tolist()


def test_parts_add_up_to_the_checksums_of_whole_pages() -> None:
    layers, unit = 3, 64
    page_bytes = 2 * layers * unit
    source, target = pool(7, page_bytes, 3), pool(7, page_bytes, 4)
    from_index, to_index = torch.tensor([6, 0, 3]), torch.tensor([1, 5, 2])
    sums = torch.zeros(3, dtype=torch.int64)
    for layer in range(layers):
        # K at the front of the page's first half, V of its second: two segments.
        stride = Stride(page_bytes, offset=layer * unit, segment=layers * unit)
        reference.copy_pages(
            source,
            from_index,
            stride,
            target,
            to_index,
            stride,
            unit_bytes=unit,
            segments=2,
            sums=sums,
        )
    assert torch.equal(target.view(7, -1)[to_index], source.view(7, -1)[from_index])
    whole = torch.zeros(3, dtype=torch.int64)
    reference.sum_pages(target, to_index, Stride(page_bytes), unit_bytes=page_bytes, sums=whole)
    assert torch.equal(sums, whole)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint32], ids=str)
def test_copy_equals_a_loop_over_bytes(dtype: torch.dtype) -> None:
    unit, segments = 48, 2
    source_stride = Stride(page=4 * unit, offset=unit, segment=2 * unit)
    target_stride = Stride(page=3 * unit + 32, offset=16, segment=unit + 16)
    source, target = pool(6, source_stride.page, 5), pool(8, target_stride.page, 6)
    from_index, to_index = torch.tensor([5, 1, 2]).to(dtype), torch.tensor([0, 7, 3]).to(dtype)
    expected = target.tolist()
    for from_page, to_page in zip(from_index.tolist(), to_index.tolist(), strict=True):
        for segment in range(segments):
            for byte in range(unit):
                into = to_page * target_stride.page + target_stride.offset + segment * target_stride.segment
                out_of = (
                    from_page * source_stride.page + source_stride.offset + segment * source_stride.segment
                )
                expected[into + byte] = int(source[out_of + byte])
    reference.copy_pages(
        source,
        from_index,
        source_stride,
        target,
        to_index,
        target_stride,
        unit_bytes=unit,
        segments=segments,
    )
    assert target.tolist() == expected


def test_a_page_stride_of_one_takes_byte_offsets() -> None:
    source, target = pool(1, 4096, 7), torch.zeros(4096, dtype=torch.uint8)
    reference.copy_pages(
        source,
        torch.tensor([16, 2048]),
        Stride(1),
        target,
        torch.tensor([4096 - 64, 0]),
        Stride(1),
        unit_bytes=64,
    )
    assert torch.equal(target[-64:], source[16:80])
    assert torch.equal(target[:64], source[2048 : 2048 + 64])
    assert int(target[64:-64].sum()) == 0


def test_a_page_outside_the_pool_is_refused() -> None:
    pages = pool(4, 64, 8)
    with pytest.raises(IndexError):
        reference.page_checksums(pages, torch.tensor([4]), 64)


def test_indices_must_be_flat_integers_that_a_gpu_can_read() -> None:
    pages = pool(4, 64, 9)
    with pytest.raises(ValueError, match="int64, uint32 or int32"):
        PageList.of(pages, torch.zeros(2, dtype=torch.int16), Stride(64))
    with pytest.raises(ValueError, match="contiguous"):
        PageList.of(pages, torch.arange(8)[::2], Stride(64))
    with pytest.raises(ValueError, match="pinned host memory"):
        PageList.of(pages, torch.arange(2), Stride(64))
