# SPDX-License-Identifier: Apache-2.0
"""The 64-bit checksum of a page in torch, equal to transfer/csrc/checksum.h bit for bit.

int64 tensors hold the uint64 values; additions and products wrap, as they must.
"""

from __future__ import annotations

import torch

__all__ = ["finish_sums", "word_sums"]


def _wrapped(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_STEP = _wrapped(0x9E3779B97F4A7C15)
_FACTOR = _wrapped(0x9FB21C651E98DF25)


def word_sums(words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """What each 64-bit word (int64) adds to the sum of its page; `places` are word indices within the page."""
    return _mix(words + (places + 1) * _STEP)


def finish_sums(sums: torch.Tensor, page_bytes: int) -> torch.Tensor:
    """Checksums of pages from the sums (int64) over all of their words."""
    return _mix(sums + page_bytes)


def _mix(x: torch.Tensor) -> torch.Tensor:
    z = (x ^ _shifted(x, 32)) * _FACTOR
    return z ^ _shifted(z, 29)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Right shift without the sign, which int64's own shift would drag along."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
