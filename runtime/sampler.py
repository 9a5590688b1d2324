# SPDX-License-Identifier: Apache-2.0
"""Logits → tokens. A token depends on its logits, its request's seed and its position, on nothing else in the batch.

Randomness is one uniform number for each token, from Philox(seed, position), turned into a token by the inverse of
the cumulative distribution. So a sequence that moves to another engine carries two integers and no generator.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvrail.runtime.errors import BadRequest
from kvrail.runtime.messages import Sampling
from kvrail.transfer.wire import TokenLogprob

__all__ = ["check_sampling", "sample", "uniform"]

# Enough of the likeliest tokens to cover most top-p cuts without sorting a whole vocabulary.
_HEAD = 1024


def check_sampling(sampling: Sampling) -> None:
    """Raise BadRequest for parameters that mean nothing."""
    if sampling.max_tokens < 1:
        raise BadRequest("max_tokens must be at least 1", param="max_tokens")
    if not 0.0 <= sampling.temperature < float("inf"):
        raise BadRequest("temperature must be a number from 0 up", param="temperature")
    if not 0.0 < sampling.top_p <= 1.0:
        raise BadRequest("top_p must be above 0 and at most 1", param="top_p")
    if sampling.top_k < 0:
        raise BadRequest("top_k must be at least 0 (0: all tokens)", param="top_k")
    if sampling.logprobs is not None and sampling.logprobs < 0:
        raise BadRequest("logprobs must be at least 0", param="logprobs")


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of one token: 53 bits of Philox(seed, position)."""
    bits = np.random.Philox(key=seed % (1 << 64), counter=position).random_raw()
    return float(int(bits) >> 11) * 2.0**-53


def sample(
    logits: torch.Tensor, requests: Sequence[tuple[Sampling, int]]
) -> list[tuple[int, TokenLogprob | None] | None]:
    """One token for each row of logits [n, vocabulary]; `requests` has each row's (sampling, position).

    A row whose logits are not finite numbers gives None. Log-probabilities are those of the model, before
    temperature and cuts.
    """
    best = logits.argmax(dim=-1).tolist()
    finite = torch.isfinite(logits.sum(dim=-1)).tolist()
    result: list[tuple[int, TokenLogprob | None] | None] = []
    for row, (sampling, position) in enumerate(requests):
        if not finite[row]:
            result.append(None)
            continue
        token = best[row]
        if sampling.temperature > 0.0:
            token = _draw(logits[row], sampling, uniform(sampling.seed, position))
        logprob = None if sampling.logprobs is None else _logprob(logits[row], token, sampling.logprobs)
        result.append((token, logprob))
    return result


def _draw(logits: torch.Tensor, sampling: Sampling, u: float) -> int:
    """Inverse CDF at `u` over the tokens that top-k and top-p leave, likeliest first when either cuts."""
    scaled = logits.double()
    scaled = (scaled - scaled.max()) / sampling.temperature
    weights = scaled.exp()
    vocabulary = len(weights)
    top_k = min(sampling.top_k or vocabulary, vocabulary)
    if top_k == vocabulary and sampling.top_p >= 1.0:
        return _pick(weights.cumsum(0), u)
    # top-p is a share of what top-k leaves. Sort only the head unless the cut lies behind it.
    count = top_k if top_k < vocabulary else min(_HEAD, vocabulary)
    order, cumulative = _likeliest(weights, count)
    total = cumulative[-1] if top_k < vocabulary else weights.sum()
    if cumulative[-1] < sampling.top_p * total:
        order, cumulative = _likeliest(weights, vocabulary)
        total = cumulative[-1]
    kept = int(torch.searchsorted(cumulative, sampling.top_p * total)) + 1
    return int(order[_pick(cumulative[:kept], u)])


def _likeliest(weights: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest weights' indices (equal ones by index, so that the order is one) and their running sum."""
    if count < len(weights):
        threshold = weights.topk(count).values[-1]
        candidates = torch.nonzero(weights >= threshold).view(-1)
    else:
        candidates = torch.arange(len(weights))
    order = candidates[weights[candidates].argsort(descending=True, stable=True)][:count]
    return order, weights[order].cumsum(0)


def _pick(cumulative: torch.Tensor, u: float) -> int:
    """First index whose running sum exceeds u of the total."""
    index = int(torch.searchsorted(cumulative, u * float(cumulative[-1]), right=True))
    return min(index, len(cumulative) - 1)


def _logprob(logits: torch.Tensor, token: int, count: int) -> TokenLogprob:
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    top = logprobs.topk(min(count, len(logprobs))) if count else None
    likeliest = [] if top is None else list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return TokenLogprob(logprob=float(logprobs[token]), top=likeliest)
