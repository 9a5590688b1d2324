# SPDX-License-Identifier: Apache-2.0
"""What a request does to its logits before a token is chosen: grammar, least length, bias, penalties, in this order.

Each works on all rows of a batch that want it at once, on whatever device the logits are; a row is changed by its
own request alone. All but the grammar touch a few tokens of a row and are written sparsely.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvrail.kernels.upload import upload
from kvrail.runtime.messages import Sampling

__all__ = ["Row", "TokenHistory", "process"]

_INF = float("inf")


class TokenHistory:
    """How often each token was emitted; tokens of the prompt count 0 times, and are there all the same."""

    def __init__(self, prompt: npt.ArrayLike, emitted: Iterable[int] = ()) -> None:
        known = np.unique(np.asarray(prompt, dtype=np.int64))
        self._place = {token: place for place, token in enumerate(known.tolist())}
        self._size = len(known)
        self._tokens = known
        self._counts = np.zeros(len(known), dtype=np.float32)
        for token in emitted:
            self.add(token)

    def add(self, token: int) -> None:
        """One more token of the answer."""
        place = self._place.setdefault(token, self._size)
        if place == self._size:
            if self._size == len(self._tokens):
                room = max(64, self._size)
                self._tokens = np.concatenate([self._tokens, np.zeros(room, dtype=np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.float32)])
            self._tokens[place] = token
            self._size += 1
        self._counts[place] += 1

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """Each token once, in no particular order."""
        return self._tokens[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often each of `tokens` was emitted."""
        return self._counts[: self._size]


class Row(NamedTuple):
    """One row of logits: whose it is, and where in its answer.

    `position`: tokens before it; `emitted`: those of them that are answer. `history` is needed for penalties only.
    `mask`: the tokens that a grammar allows, one bit each, the lowest first; None: all.
    """

    sampling: Sampling
    position: int
    emitted: int = 0
    history: TokenHistory | None = None
    mask: npt.NDArray[np.uint8] | None = None


def process(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Logits [n, vocabulary] as the rows' requests want them; the same tensor when they want nothing."""
    masked = [place for place, row in enumerate(rows) if row.mask is not None]
    young = [
        (place, row)
        for place, row in enumerate(rows)
        if row.emitted < row.sampling.min_tokens and row.sampling.stop_token_ids
    ]
    biased = [(place, row) for place, row in enumerate(rows) if row.sampling.logit_bias]
    penalised = [(place, row) for place, row in enumerate(rows) if row.history is not None]
    if not (masked or young or biased or penalised):
        return logits
    logits = logits.clone()
    if masked:
        _mask(logits, masked, [row.mask for row in rows if row.mask is not None])
    if young:
        places, tokens = _sparse([(place, row.sampling.stop_token_ids) for place, row in young], logits)
        logits[places, tokens] = -_INF
    if biased:
        pairs = [(place, [token for token, _ in row.sampling.logit_bias]) for place, row in biased]
        places, tokens = _sparse(pairs, logits)
        bias = [value for _, row in biased for _, value in row.sampling.logit_bias]
        (added,) = upload(logits.device, (np.array(bias, dtype=np.float32),))
        logits[places, tokens] += added
    if penalised:
        _penalise(logits, penalised)
    return logits


def _mask(logits: torch.Tensor, places: list[int], masks: list[npt.NDArray[np.uint8]]) -> None:
    """-inf for all that the grammars of these rows do not allow (also for ids that they do not know)."""
    vocabulary = logits.shape[1]
    bits = np.unpackbits(np.stack(masks), axis=1, bitorder="little", count=vocabulary)
    forbidden, index = upload(logits.device, (bits == 0, np.array(places, dtype=np.int64)))
    logits[index] = logits[index].masked_fill(forbidden, -_INF)


def _penalise(logits: torch.Tensor, penalised: list[tuple[int, Row]]) -> None:
    histories = [row.history for _, row in penalised if row.history is not None]
    places, tokens = _sparse(
        [(place, row.history.tokens) for place, row in penalised if row.history is not None], logits
    )
    lengths = [len(history.tokens) for history in histories]
    (counts,) = upload(logits.device, (np.concatenate([history.counts for history in histories]),))

    def each(values: list[float]) -> torch.Tensor:
        return upload(logits.device, (np.repeat(np.array(values, dtype=np.float32), lengths),))[0]

    samplings = [row.sampling for _, row in penalised]
    repetition = each([one.repetition_penalty for one in samplings])
    values = logits[places, tokens]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - each([one.frequency_penalty for one in samplings]) * counts
    values = values - each([one.presence_penalty for one in samplings]) * (counts > 0)
    logits[places, tokens] = values


def _sparse(
    entries: Sequence[tuple[int, Sequence[int] | npt.NDArray[np.int64]]], logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, its tokens) … as two index tensors of one length, on the device of `logits`."""
    places = np.repeat([place for place, _ in entries], [len(tokens) for _, tokens in entries])
    tokens = np.concatenate([np.asarray(tokens, dtype=np.int64) for _, tokens in entries])
    there, what = upload(logits.device, (places, tokens))
    return there, what
