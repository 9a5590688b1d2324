# SPDX-License-Identifier: Apache-2.0
"""Attention of one step with torch: a flat batch of prefill chunks and single tokens over pages and rings.

What is the same for every layer (where new KV goes, what is read, masks) is worked out once a step in `StepPlan`; a
layer then costs two row copies into memory and, for each group of sequences, a gather and one call of torch's fused
attention. Heads that share a KV head are never expanded in memory: for a single token they become the rows of its
query, for a chunk a batch dimension of stride 0. All tensors live where the pool lives: on a CPU, or on a GPU for what
the compiled attention (flashinfer_attention.py) does not cover.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from kvrail.kernels.paged_kv import PagedKV
from kvrail.kernels.ring_kv import RingKV
from kvrail.kernels.step_parts import QUERY_BLOCK, Slice
from kvrail.kernels.upload import upload

__all__ = ["QUERY_BLOCK", "AttentionPlan", "Planner", "Slice", "StepPlan"]


class AttentionPlan(Protocol):
    """What is the same for every layer of one step, however attention is computed."""

    positions: torch.Tensor

    def store(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, *, sliding_window: int | None = None
    ) -> None:
        """See StepPlan.store."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        *,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See StepPlan.attend."""


# (pool, slices, dtype of queries, rings) → the plan of one step, as StepPlan(…).
Planner = Callable[[torch.Tensor, list[Slice], torch.dtype, torch.Tensor | None], AttentionPlan]


class StepPlan:
    """One step over `pool` [P, full layers, 2, page_tokens, kv_heads, head_dim]; slices in the order of the batch.

    `rings` [slots, windowed layers, 2, window, kv_heads, head_dim]: state of sliding-window layers, for models that
    have them. Queries, keys and values come in `dtype`, which may be wider than the pool's.
    """

    def __init__(
        self, pool: torch.Tensor, slices: list[Slice], dtype: torch.dtype, rings: torch.Tensor | None = None
    ) -> None:
        positions = np.concatenate([np.arange(s.start, s.start + s.length) for s in slices])
        like = torch.empty(0, dtype=dtype, device=pool.device)
        (self.positions,) = upload(pool.device, (positions,))
        self._pages = PagedKV(pool, slices, positions, like)
        self._rings = None if rings is None else RingKV(rings, slices, positions, like)

    @property
    def tokens(self) -> int:
        """Tokens in the flat batch."""
        return len(self.positions)

    def store(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, *, sliding_window: int | None = None
    ) -> None:
        """Store K and V of the new tokens, as `attend` does."""
        self._memory(sliding_window).store(layer, key, value)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        *,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store K and V of the new tokens, then attend.

        query [heads, T, dim], key [kv_heads, T, dim], value [kv_heads, T, value_dim] → [T, heads, value_dim].
        `layer` counts within its kind: full layers in the pool, those with a `sliding_window` in the rings.
        `softcap`: scores become softcap * tanh(score / softcap). `s_aux` [heads]: a logit beside the scores of each
        query that takes its share of the softmax and gives nothing (an attention sink).
        """
        memory = self._memory(sliding_window)
        if memory is self._pages:
            memory.store(layer, key, value)
        heads, tokens, head_dim = query.shape
        kv_heads = key.shape[0]
        groups = heads // kv_heads
        sinks = None if s_aux is None else s_aux.view(kv_heads, groups)
        out = query.new_empty(tokens, heads, value.shape[2])
        for chunk in memory.chunks:
            k, v = (x.to(query.dtype) for x in memory.of_chunk(layer, chunk, key, value))
            k, v = k.expand(groups, -1, -1, -1), v.expand(groups, -1, -1, -1)
            part = query[:, chunk.first : chunk.last]
            q = part.view(kv_heads, groups, -1, head_dim).transpose(0, 1)
            o = out[chunk.first : chunk.last].view(-1, kv_heads, groups, out.shape[2]).permute(2, 1, 0, 3)
            sink = None if sinks is None else sinks.t()[:, :, None, None]
            for first, last, low, high, mask in chunk.blocks:
                o[:, :, first:last] = _attention(
                    q[:, :, first:last], k[:, :, low:high], v[:, :, low:high], mask, scaling, softcap, sink
                )
        if memory is self._rings:
            memory.store(layer, key, value)
        for group in memory.singles:
            batch = len(group.rows)
            k, v = memory.of_singles(layer, group, key, value)
            q = query.index_select(1, group.rows).view(kv_heads, groups, batch, head_dim).permute(2, 0, 1, 3)
            sink = None if sinks is None else sinks[None, :, :, None]
            # Narrowing a few queries costs less than widening what they read.
            o = _attention(q.to(k.dtype), k, v, group.mask, scaling, softcap, sink)
            out.index_copy_(0, group.rows, o.reshape(batch, heads, -1).to(out.dtype))
        return out

    def _memory(self, sliding_window: int | None) -> PagedKV | RingKV:
        if sliding_window is None:
            return self._pages
        if self._rings is None or self._rings.window != sliding_window:
            held = "none" if self._rings is None else f"rings of {self._rings.window} tokens"
            raise ValueError(f"a layer has a window of {sliding_window} tokens, and there are {held}")
        return self._rings


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[…, rows, dim] over […, keys, dim]; `sinks` broadcasts over […, rows, 1]. Sums in float32."""
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    scores = (query.float() @ key.float().transpose(-1, -2)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        top = torch.maximum(scores.amax(-1, keepdim=True), sinks.float())
        weights = (scores - top).exp()
        weights = weights / (weights.sum(-1, keepdim=True) + (sinks.float() - top).exp())
    return (weights @ value.float()).to(query.dtype)
