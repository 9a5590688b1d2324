# SPDX-License-Identifier: Apache-2.0
"""Paged attention of one step in plain torch: a flat batch of prefill chunks and single tokens over one pool.

What is the same for every layer (where new KV goes, which pages are read, masks) is worked out once a step in
`StepPlan`; a layer then costs two row copies into the pool and, for each group of sequences, a gather and one
call of torch's fused attention. Heads that share a KV head are never expanded in memory: for a single token they
become the rows of its query, for a chunk a batch dimension of stride 0. It runs where the pool is: on a CPU, or on a
GPU for what the compiled attention (flashinfer_attention.py) does not cover.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from kvrail.kernels.upload import upload

__all__ = ["AttentionPlan", "Planner", "Slice", "StepPlan"]

# Rows of a chunk that attend together: keys behind the last of them are not read, which saves half of the work.
QUERY_BLOCK = 128


class Slice(NamedTuple):
    """The part of one sequence that a step computes: tokens start … start + length - 1, over `pages`.

    `pages` covers at least the tokens up to start + length; its KV before `start` is complete.
    """

    pages: list[int]
    start: int
    length: int


class AttentionPlan(Protocol):
    """What is the same for every layer of one step, however attention is computed."""

    positions: torch.Tensor

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """See StepPlan.attend."""


# (pool, slices, dtype of queries) → the plan of one step, as StepPlan(…).
Planner = Callable[[torch.Tensor, list[Slice], torch.dtype], AttentionPlan]


class _Singles(NamedTuple):
    """Sequences of similar length with one new token each."""

    rows: torch.Tensor  # [B] index of each token in the flat batch
    pages: torch.Tensor  # [B * n] page tables, short ones filled up with their own first page
    mask: torch.Tensor  # [B, 1, 1, n * page_tokens] 0 where a token sees a position, else -inf


class _Block(NamedTuple):
    """Some rows of a chunk, relative to it, and the keys that they see."""

    first: int
    last: int
    keys: int
    mask: torch.Tensor  # [last - first, keys]


class _Chunk(NamedTuple):
    """One sequence with several new tokens."""

    first: int
    last: int
    pages: torch.Tensor
    blocks: list[_Block]


class StepPlan:
    """One step over `pool` [P, layers, 2, page_tokens, kv_heads, head_dim]; slices in the order of the batch.

    Queries, keys and values come in `dtype`, which may be wider than the pool's.
    """

    def __init__(self, pool: torch.Tensor, slices: list[Slice], dtype: torch.dtype) -> None:
        self._pool = pool
        self._rows = pool.view(-1, pool.shape[4], pool.shape[5])
        page_tokens = pool.shape[3]
        positions = np.concatenate([np.arange(s.start, s.start + s.length) for s in slices])
        written = np.concatenate(
            [np.asarray(s.pages)[np.arange(s.start, s.start + s.length) // page_tokens] for s in slices]
        )
        # Row of (page, layer, k or v, token) in the pool seen as [rows, kv_heads, head_dim].
        first = written * (pool.shape[1] * 2 * page_tokens) + positions % page_tokens
        self.positions, start = upload(pool.device, (positions, first))
        steps = torch.arange(pool.shape[1] * 2, device=pool.device)[:, None] * page_tokens
        self._targets = start + steps
        self._singles, self._chunks = _group(slices, pool, dtype)

    @property
    def tokens(self) -> int:
        """Tokens in the flat batch."""
        return len(self.positions)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Store K and V of the new tokens, then attend.

        query [heads, T, head_dim], key and value [kv_heads, T, head_dim] → [T, heads, head_dim].
        """
        self._rows.index_copy_(0, self._targets[2 * layer], key.transpose(0, 1).to(self._pool.dtype))
        self._rows.index_copy_(0, self._targets[2 * layer + 1], value.transpose(0, 1).to(self._pool.dtype))
        keys, values = self._pool[:, layer, 0], self._pool[:, layer, 1]
        heads, tokens, head_dim = query.shape
        kv_heads = key.shape[0]
        groups = heads // kv_heads
        out = query.new_empty(tokens, heads, head_dim)
        for chunk in self._chunks:
            k, v = (_read(side, chunk.pages, 1).to(query.dtype) for side in (keys, values))
            k, v = k.expand(groups, -1, -1, -1), v.expand(groups, -1, -1, -1)
            part = query[:, chunk.first : chunk.last]
            q = part.view(kv_heads, groups, -1, head_dim).transpose(0, 1)
            o = out[chunk.first : chunk.last].view(-1, kv_heads, groups, head_dim).permute(2, 1, 0, 3)
            for first, last, seen, mask in chunk.blocks:
                o[:, :, first:last] = F.scaled_dot_product_attention(
                    q[:, :, first:last], k[:, :, :seen], v[:, :, :seen], attn_mask=mask, scale=scaling
                )
        for group in self._singles:
            batch = len(group.rows)
            k, v = _read(keys, group.pages, batch), _read(values, group.pages, batch)
            q = query.index_select(1, group.rows).view(kv_heads, groups, batch, head_dim).permute(2, 0, 1, 3)
            # Narrowing a few queries costs less than widening what they read.
            o = F.scaled_dot_product_attention(q.to(k.dtype), k, v, attn_mask=group.mask, scale=scaling)
            out.index_copy_(0, group.rows, o.reshape(batch, heads, head_dim).to(out.dtype))
        return out


def _read(side: torch.Tensor, pages: torch.Tensor, batch: int) -> torch.Tensor:
    """[P, page_tokens, kv_heads, head_dim] of one layer's K or V → [batch, kv_heads, positions, head_dim]."""
    return side.index_select(0, pages).view(batch, -1, side.shape[2], side.shape[3]).transpose(1, 2)


def _group(
    slices: list[Slice], pool: torch.Tensor, dtype: torch.dtype
) -> tuple[list[_Singles], list[_Chunk]]:
    page_tokens, device = pool.shape[3], pool.device
    chunks: list[_Chunk] = []
    by_length: dict[int, list[tuple[int, Slice]]] = {}
    row = 0
    for part in slices:
        pages = -(-(part.start + part.length) // page_tokens)
        if part.length == 1:
            # Tables of one group differ by less than a factor of two, so that little padding is read.
            by_length.setdefault(pages.bit_length(), []).append((row, part))
        else:
            chunks.append(_chunk(part, row, pages, dtype, device))
        row += part.length
    return [_single(group, pool) for group in by_length.values()], chunks


def _single(group: list[tuple[int, Slice]], pool: torch.Tensor) -> _Singles:
    page_tokens, device = pool.shape[3], pool.device
    lengths = np.array([part.start + 1 for _, part in group])
    width = -(-int(lengths.max()) // page_tokens)
    table = np.empty((len(group), width), dtype=np.int64)
    for line, (_, part) in zip(table, group, strict=True):
        used = part.pages[:width]
        line[: len(used)] = used
        line[len(used) :] = used[0]
    rows, ends, pages = upload(device, (np.array([row for row, _ in group]), lengths, table.reshape(-1)))
    hidden = torch.arange(width * page_tokens, device=device) >= ends[:, None]
    mask = torch.zeros(len(group), 1, 1, width * page_tokens, dtype=pool.dtype, device=device)
    mask.masked_fill_(hidden[:, None, None, :], float("-inf"))
    return _Singles(rows, pages, mask)


def _chunk(part: Slice, row: int, pages: int, dtype: torch.dtype, device: torch.device) -> _Chunk:
    blocks = []
    for first in range(0, part.length, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, part.length)
        keys = part.start + last
        mask = torch.zeros(last - first, keys, dtype=dtype, device=device)
        mask[:, part.start + first :].fill_(float("-inf")).triu_(1)
        blocks.append(_Block(first, last, keys, mask))
    (table,) = upload(device, (np.asarray(part.pages[:pages]),))
    return _Chunk(row, row + part.length, table, blocks)
