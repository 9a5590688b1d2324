# SPDX-License-Identifier: Apache-2.0
"""The parts into which a step's attention falls: single new tokens side by side, and chunks cut into blocks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from kvrail.kernels.upload import upload

__all__ = ["QUERY_BLOCK", "Block", "Chunk", "Singles", "Slice", "blocks_of", "hidden_mask"]

# Rows of a chunk that attend together: keys behind the last of them are not read, which saves half of the work. With
# half as many rows, calls cost as much as is saved.
QUERY_BLOCK = 64


class Slice(NamedTuple):
    """The part of one sequence that a step computes: tokens start … start + length - 1, over `pages`.

    `pages` covers at least the tokens up to start + length; its KV before `start` is complete, and pages behind those
    of these tokens may hold anything: they are not read. `state_slot`: where
    the sequence's ring lies, for models with sliding-window layers. No two slices of a step share a page that is
    written, or a slot.
    """

    pages: list[int]
    start: int
    length: int
    state_slot: int = -1


class Singles(NamedTuple):
    """Sequences of similar length with one new token each."""

    rows: torch.Tensor  # [B] index of each token in the flat batch
    units: torch.Tensor  # [B * n] pages (short tables filled up with their own first page), or one slot each
    mask: torch.Tensor  # [B, 1, 1, n * tokens of a unit] 0 where a token sees a position, else -inf


class Block(NamedTuple):
    """Some rows of a chunk, relative to it, and the keys [low, high) that they see, relative to those read."""

    first: int
    last: int
    low: int
    high: int
    mask: torch.Tensor  # [last - first, high - low]


class Chunk(NamedTuple):
    """One sequence with several new tokens: rows first … last - 1 of the flat batch.

    `units`: what is read of memory: pages, or rows of the sequence's ring (in token order) behind its `slot`.
    """

    first: int
    last: int
    units: torch.Tensor
    slot: int
    blocks: list[Block]


def blocks_of(earlier: int, length: int, window: int | None, like: torch.Tensor) -> list[Block]:
    """Blocks of a chunk of `length` tokens behind `earlier` keys; each row sees `window` keys with its own (None: all).

    Masks have the type and device of `like`.
    """
    blocks = []
    for first in range(0, length, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, length)
        high = earlier + last
        low = 0 if window is None else max(0, earlier + first + 1 - window)
        mask = like.new_zeros(last - first, high - low)
        own = torch.full((last - first, last - first), float("-inf"), dtype=mask.dtype, device=mask.device)
        mask[:, earlier + first - low :] = own.triu_(1)
        if window is not None:
            # Row r sees keys above earlier + first + r - window.
            far = torch.full_like(mask, float("-inf")).tril_(earlier + first - low - window)
            mask += far
        blocks.append(Block(first, last, low, high, mask))
    return blocks


def hidden_mask(lengths: np.ndarray, width: int, like: torch.Tensor) -> torch.Tensor:
    """[B, 1, 1, width]: 0 below each length, else -inf."""
    (ends,) = upload(like.device, (lengths,))
    hidden = torch.arange(width, device=like.device) >= ends[:, None]
    mask = like.new_zeros(len(lengths), 1, 1, width)
    return mask.masked_fill_(hidden[:, None, None, :], float("-inf"))
