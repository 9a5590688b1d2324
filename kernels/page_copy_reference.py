# SPDX-License-Identifier: Apache-2.0
"""The plain meaning of the page-copy kernels in torch: their tests' oracle, and what runs without a GPU."""

from __future__ import annotations

import torch

from kvrail.kernels.checksum import finish_sums, word_sums
from kvrail.kernels.page_copy import Stride

__all__ = ["copy_pages", "page_checksums", "sum_pages"]

_WORD_BYTES = 8


def copy_pages(
    source: torch.Tensor,
    source_index: torch.Tensor,
    source_stride: Stride,
    target: torch.Tensor,
    target_index: torch.Tensor,
    target_stride: Stride,
    *,
    unit_bytes: int,
    segments: int = 1,
    sums: torch.Tensor | None = None,
) -> None:
    """As `PageKernels.copy`, for pools that are contiguous 1-D uint8 tensors on one device.

    `sums` is int64 [entries] here (uint64 arithmetic, wrapped). Raises IndexError for a page outside its pool.
    """
    taken = _units(source, source_stride, unit_bytes, segments)[_rows(source_index, source_stride)]
    _units(target, target_stride, unit_bytes, segments)[_rows(target_index, target_stride)] = taken
    if sums is not None:
        sums += _worth(taken, target_stride)


def sum_pages(
    pages: torch.Tensor,
    index: torch.Tensor,
    stride: Stride,
    *,
    unit_bytes: int,
    sums: torch.Tensor,
    segments: int = 1,
) -> None:
    """As `PageKernels.sum`, for a pool as in `copy_pages`."""
    sums += _worth(_units(pages, stride, unit_bytes, segments)[_rows(index, stride)], stride)


def page_checksums(pages: torch.Tensor, index: torch.Tensor, page_bytes: int) -> torch.Tensor:
    """Checksums, int64 [entries] holding uint64 values, of the listed whole pages of a pool."""
    sums = torch.zeros(index.numel(), dtype=torch.int64, device=pages.device)
    sum_pages(pages, index, Stride(page_bytes), unit_bytes=page_bytes, sums=sums)
    return finish_sums(sums, page_bytes)


def _units(pool: torch.Tensor, stride: Stride, unit_bytes: int, segments: int) -> torch.Tensor:
    """View of the pool as words [pages, segments, words of a unit]; pages may overlap when the stride is small."""
    words = pool.view(torch.int64)
    page, offset, segment = _page_words(stride), stride.offset // _WORD_BYTES, stride.segment // _WORD_BYTES
    unit = unit_bytes // _WORD_BYTES
    room = words.numel() - offset - (segments - 1) * segment - unit
    return words.as_strided((max(0, room // page + 1), segments, unit), (page, segment, 1), offset)


def _page_words(stride: Stride) -> int:
    return 1 if stride.page == 1 else stride.page // _WORD_BYTES


def _rows(index: torch.Tensor, stride: Stride) -> torch.Tensor:
    rows = index.long()
    return rows // _WORD_BYTES if stride.page == 1 else rows


def _worth(units: torch.Tensor, stride: Stride) -> torch.Tensor:
    """What units [entries, segments, words] add to the sums of their pages."""
    _, segments, words = units.shape
    first = torch.arange(segments, device=units.device) * (stride.segment // _WORD_BYTES)
    places = first[:, None] + stride.offset // _WORD_BYTES + torch.arange(words, device=units.device)
    return word_sums(units, places).sum((1, 2))
