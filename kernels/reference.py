# SPDX-License-Identifier: Apache-2.0
"""The plain meaning of every kernel, written to be read: the oracle that faster ones are tested against."""

from __future__ import annotations

import torch

__all__ = [
    "apply_gate",
    "apply_norm",
    "apply_rotation",
    "causal_attention",
    "gather_pages",
    "paged_attention",
    "scatter_pages",
    "store_tokens",
]


def gather_pages(pool: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of some pages: pool [P, …], pages [n] int64 → [n, …]."""
    return pool[pages].contiguous()


def scatter_pages(pool: torch.Tensor, pages: torch.Tensor, slab: torch.Tensor) -> None:
    """The inverse of `gather_pages`: pool[pages[i]] = slab[i]. `pages` holds no index twice."""
    pool[pages] = slab


def store_tokens(
    pool: torch.Tensor, layer: int, key: torch.Tensor, value: torch.Tensor, places: torch.Tensor
) -> None:
    """Put K and V of tokens into pages, those with a negative place nowhere.

    pool [P, layers, 2, page_tokens, kv_heads, dim]; key and value [T, kv_heads, dim]; places [T] int64: token t of page
    p has place p * layers * 2 * page_tokens + t.
    """
    _, layers, _, page_tokens = pool.shape[:4]
    for k, v, place in zip(key, value, places.tolist(), strict=True):
        if place >= 0:
            page, token = divmod(place, layers * 2 * page_tokens)
            pool[page, layer, 0, token] = k
            pool[page, layer, 1, token] = v


def apply_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight.float()


def apply_rotation(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """x [T, heads, dim] turned by the angles of its positions [T, dim], halves of a head against each other."""
    first, second = x.float().chunk(2, dim=-1)
    return x.float() * cosines.float()[:, None] + torch.cat((-second, first), dim=-1) * sines.float()[:, None]


def apply_gate(x: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half of the last dimension, in float32."""
    gates, values = x.float().chunk(2, dim=-1)
    return gates * torch.sigmoid(gates) * values


def causal_attention(
    keys: torch.Tensor,
    values: torch.Tensor,
    query: torch.Tensor,
    scaling: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a sequence's last T tokens over all of its tokens, in float32.

    keys [n, kv_heads, dim], values [n, kv_heads, value_dim]; query [T, heads, dim] belongs to the last T of the n
    tokens, heads grouped by KV head. A token sees itself and those before it: the last `window` of them, or all.
    `softcap` bends scores to softcap * tanh(score / softcap); `sinks` [heads] is a further logit of each head, whose
    share of the softmax goes nowhere. Returns [T, heads, value_dim].
    """
    tokens, heads, _ = query.shape
    result = query.new_empty(tokens, heads, values.shape[2])
    for head in range(heads):
        kv_head = head // (heads // keys.shape[1])
        for token in range(tokens):
            end = len(keys) - tokens + token + 1
            first = 0 if window is None else max(0, end - window)
            scores = keys[first:end, kv_head].float() @ query[token, head].float() * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head].float()[None]))
            weights = scores.softmax(0)[: end - first]
            result[token, head] = (weights @ values[first:end, kv_head].float()).to(query.dtype)
    return result


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
    length = start + len(query)
    keys, values = pool[pages, layer].transpose(0, 1).flatten(1, 2)[:, :length]
    return causal_attention(keys, values, query, scaling)
