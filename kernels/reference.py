# SPDX-License-Identifier: Apache-2.0
"""The plain meaning of every kernel, written to be read: the oracle that faster ones are tested against."""

from __future__ import annotations

import torch

__all__ = ["gather_pages", "paged_attention", "scatter_pages"]


def gather_pages(pool: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of some pages: pool [P, …], pages [n] int64 → [n, …]."""
    return pool[pages].contiguous()


def scatter_pages(pool: torch.Tensor, pages: torch.Tensor, slab: torch.Tensor) -> None:
    """The inverse of `gather_pages`: pool[pages[i]] = slab[i]. `pages` holds no index twice."""
    pool[pages] = slab


def paged_attention(
    pool: torch.Tensor,
    layer: int,
    pages: list[int],
    query: torch.Tensor,
    start: int,
    scaling: float,
) -> torch.Tensor:
    """Causal attention of one sequence's new tokens over its pages, in float32.

    pool [P, layers, 2, page_tokens, kv_heads, head_dim] holds K and V of the tokens before `start` and of the
    new ones; query [T, heads, head_dim] are the tokens at positions start … start + T - 1, heads grouped by KV
    head. Returns [T, heads, head_dim].
    """
    tokens, heads, _ = query.shape
    length = start + tokens
    page_tokens, kv_heads = pool.shape[3], pool.shape[4]
    result = torch.empty_like(query)
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        keys = torch.stack(
            [pool[pages[t // page_tokens], layer, 0, t % page_tokens, kv_head] for t in range(length)]
        )
        values = torch.stack(
            [pool[pages[t // page_tokens], layer, 1, t % page_tokens, kv_head] for t in range(length)]
        )
        for token in range(tokens):
            seen = start + token + 1
            scores = keys[:seen].float() @ query[token, head].float() * scaling
            result[token, head] = (scores.softmax(0) @ values[:seen].float()).to(query.dtype)
    return result
