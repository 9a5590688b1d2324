# SPDX-License-Identifier: Apache-2.0
"""Logits → tokens. A token depends on its logits, its request's seed and its position, on nothing else in the batch.

Randomness is one uniform number for each token, from Philox(seed, position), turned into a token by the inverse of
the cumulative distribution. So a sequence that moves to another engine carries two integers and no generator.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvrail.kernels.upload import fetch, upload
from kvrail.runtime.processors import Row, process
from kvrail.transfer.wire import TokenLogprob

__all__ = ["choice_seed", "sample", "token_logprobs", "uniform"]

# Enough of the likeliest tokens to cover most top-p cuts without sorting a whole vocabulary.
_HEAD = 1024
_SEEDS = 1 << 64


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of one token: 53 bits of Philox(seed, position)."""
    bits = np.random.Philox(key=seed % _SEEDS, counter=position).random_raw()
    return float(int(bits) >> 11) * 2.0**-53


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of several answers to a prompt; that of the first is the request's own."""
    if choice == 0:
        return seed % _SEEDS
    # Positions fill the lowest word of the counter, so this draws from elsewhere.
    return int(np.random.Philox(key=seed % _SEEDS, counter=choice << 64).random_raw())


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[tuple[int, TokenLogprob | None] | str]:
    """One token for each row of logits [n, vocabulary]; instead of it, what is wrong with the row.

    Log-probabilities are those of the model, before anything that the request does to them.
    """
    wanted = process(logits, rows)
    highest, tokens = wanted.max(dim=-1)
    drawn = [place for place, row in enumerate(rows) if row.sampling.temperature > 0.0]
    if drawn:
        index = _there(drawn, logits)
        tokens[index] = _draw(wanted[index], [rows[place] for place in drawn])
    possible_there = torch.isfinite(highest)
    # What is no number is the highest of its row, unless a mask has hidden it.
    sound_there = possible_there if wanted is logits else torch.isfinite(logits.amax(dim=-1))
    # One transfer: from a GPU each of them is a wait.
    sound, possible, chosen = fetch(torch.stack((sound_there, possible_there, tokens))).tolist()
    noted = [place for place, row in enumerate(rows) if row.sampling.logprobs is not None]
    logprobs: dict[int, TokenLogprob] = {}
    if noted:
        counts = [rows[place].sampling.logprobs or 0 for place in noted]
        found = token_logprobs(logits[_there(noted, logits)], [chosen[place] for place in noted], counts)
        logprobs = dict(zip(noted, found, strict=True))
    result: list[tuple[int, TokenLogprob | None] | str] = []
    for place in range(len(rows)):
        if not sound[place]:
            result.append("the model gave logits that are not numbers")
        elif not possible[place]:
            result.append("grammar, logit_bias and min_tokens together leave no token to choose from")
        else:
            result.append((chosen[place], logprobs.get(place)))
    return result


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """Log-probability of one token in each row of logits [n, vocabulary], and the row's `counts` likeliest."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = fetch(logprobs.gather(1, _there(tokens, logits)[:, None])[:, 0]).tolist()
    top = logprobs.topk(min(max(counts, default=0), logprobs.shape[1]))
    likeliest = zip(fetch(top.indices).tolist(), fetch(top.values).tolist(), strict=True)
    return [
        TokenLogprob(logprob=logprob, top=list(zip(ids[:count], values[:count], strict=True)))
        for logprob, count, (ids, values) in zip(own, counts, likeliest, strict=True)
    ]


def _there(
    values: Sequence[float], beside: torch.Tensor, dtype: type[np.int64 | np.float64] = np.int64
) -> torch.Tensor:
    """The numbers on the device of `beside`, without waiting for what is queued on it: the logits themselves."""
    return upload(beside.device, (np.array(values, dtype=dtype),))[0]


def _draw(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Tokens [n] by inverse CDF over what min-p, top-k and top-p leave of logits [n, vocabulary]."""

    def column(values: list[float]) -> torch.Tensor:
        return _there(values, logits, np.float64)[:, None]

    samplings = [row.sampling for row in rows]
    weights = logits.double()
    weights = (weights - weights.amax(dim=-1, keepdim=True)) / column([one.temperature for one in samplings])
    weights = weights.exp()
    if any(one.min_p > 0.0 for one in samplings):
        weights.masked_fill_(weights < column([one.min_p for one in samplings]), 0.0)
    vocabulary = weights.shape[1]
    cut = [place for place, one in enumerate(samplings) if 0 < one.top_k < vocabulary or one.top_p < 1.0]
    if cut:
        index = _there(cut, logits)
        limits = [min(samplings[place].top_k or vocabulary, vocabulary) for place in cut]
        shares = column([samplings[place].top_p for place in cut])
        weights[index] = _likeliest(weights[index], limits, shares)
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    at = column([uniform(row.sampling.seed, row.position) for row in rows]) * total
    # Rounded up to the total it would lie behind every token.
    at = torch.minimum(at, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, at, right=True)[:, 0].clamp_(max=vocabulary - 1)


def _likeliest(weights: torch.Tensor, limits: list[int], shares: torch.Tensor) -> torch.Tensor:
    """weights [n, vocabulary] with 0 for all but the `limits` largest, and of those all that lie behind `shares` [n, 1]
    of their sum. Of equal ones the first are kept.
    """
    vocabulary = weights.shape[1]
    # Sort only the head, unless a cut lies behind it.
    head = min(max([_HEAD, *(limit for limit in limits if limit < vocabulary)]), vocabulary)
    limit = _there(limits, weights)[:, None]
    whole = limit >= vocabulary
    while True:
        values = weights.topk(head).values
        values = values.masked_fill(torch.arange(head, device=weights.device) >= limit, 0.0)
        cumulative = values.cumsum(dim=-1)
        total = torch.where(whole, weights.cumsum(dim=-1)[:, -1:], cumulative[:, -1:])
        if head == vocabulary or not bool(fetch((whole & (cumulative[:, -1:] < shares * total)).any())):
            break
        head = vocabulary
    kept = torch.minimum(torch.searchsorted(cumulative, shares * total) + 1, limit.clamp(max=head))
    threshold = values.gather(1, kept - 1)
    above, equal = weights > threshold, weights == threshold
    equal &= equal.cumsum(dim=-1) <= kept - above.sum(dim=-1, keepdim=True)
    return weights.masked_fill_(~(above | equal), 0.0)
