# SPDX-License-Identifier: Apache-2.0
"""The page checksum: equal to its written definition, and sensitive to what goes wrong with pages."""

from __future__ import annotations

import numpy as np
import pytest

from kvrail.transfer.ucx import checksum_pages

MASK = 2**64 - 1


def mix(x: int) -> int:
    z = (x ^ (x >> 32)) * 0x9FB21C651E98DF25 & MASK
    return z ^ (z >> 29)


def defined(page: np.ndarray) -> int:
    """The definition of csrc/checksum.h, word by word."""
    words = [int(word) for word in page]
    total = sum(mix(word + (i + 1) * 0x9E3779B97F4A7C15 & MASK) for i, word in enumerate(words))
    return mix((total + 8 * len(words)) & MASK)


def of(pages: np.ndarray) -> list[int]:
    order = np.arange(len(pages), dtype=np.uint32)
    return checksum_pages(pages.ctypes.data, pages.strides[0], order).tolist()


@pytest.mark.parametrize("words", [1, 2, 7, 8, 9, 64, 1000])
def test_it_is_what_the_definition_says(words: int) -> None:
    pages = np.random.default_rng(words).integers(0, 2**64, (4, words), dtype=np.uint64)
    assert of(pages) == [defined(page) for page in pages]


def test_pages_are_found_by_index() -> None:
    pages = np.random.default_rng(5).integers(0, 2**64, (6, 16), dtype=np.uint64)
    order = np.array([5, 0, 3, 3], dtype=np.uint32)
    assert checksum_pages(pages.ctypes.data, 128, order).tolist() == [defined(pages[i]) for i in order]
    assert checksum_pages(pages.ctypes.data, 128, order[:0]).tolist() == []


def test_every_small_fault_shows() -> None:
    page = np.random.default_rng(6).integers(0, 2**64, 512, dtype=np.uint64)
    faults = [page.copy() for _ in range(8)]
    faults[0][0] ^= np.uint64(1)
    faults[1][511] ^= np.uint64(1 << 63)
    faults[2][[3, 4]] = faults[2][[4, 3]]
    faults[3] = np.roll(page, 1)
    faults[4][256:] = 0
    faults[5][8:16] = faults[5][0:8]
    faults[6][:] = 0
    faults[7][:] = 1
    assert len({defined(page), *of(np.stack(faults))}) == 9


def test_a_page_of_half_words_is_refused() -> None:
    page = np.zeros(16, dtype=np.uint8)
    with pytest.raises(ValueError, match="multiple of 8"):
        checksum_pages(page.ctypes.data, 12, np.zeros(1, dtype=np.uint32))
