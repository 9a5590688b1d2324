# SPDX-License-Identifier: Apache-2.0
"""One step's flat batch: which tokens of which sequences go in, and what the logits that come out are for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvrail.kernels.attention import Slice
from kvrail.kernels.upload import upload
from kvrail.runtime.sampler import sample, token_logprobs
from kvrail.runtime.sequence import EngineSequence
from kvrail.transfer.wire import TokenLogprob

__all__ = ["Batch", "Drawn"]


class Drawn(NamedTuple):
    """The next token of a sequence, or the first one of a choice (a sequence of its own from then on)."""

    sequence: EngineSequence
    token: int
    logprob: TokenLogprob | None


class _Note(NamedTuple):
    """Logits from row `row` on are about tokens first … last - 1 of the prompt."""

    sequence: EngineSequence
    row: int
    first: int
    last: int


class Batch:
    """The next `count` tokens of each sequence. `wanted`: places in `tokens` whose logits are needed, a row each."""

    def __init__(self, parts: Sequence[tuple[EngineSequence, int]]) -> None:
        self.tokens = np.empty(sum(count for _, count in parts), dtype=np.int64)
        self.slices: list[Slice] = []
        self.wanted: list[int] = []
        self._notes: list[_Note] = []
        # Sequences of which all tokens are computed with this step, and their rows.
        self._ends: list[tuple[EngineSequence, int]] = []
        place = 0
        for sequence, count in parts:
            start = sequence.computed
            if sequence.wants_prompt_logprobs:
                self._note(sequence, count, place)
            if count == 1:
                self.tokens[place] = sequence.token(start)
            else:
                self.tokens[place : place + count] = sequence.tokens(start, start + count)
            place += count
            self.slices.append(Slice(sequence.pages, start, count, sequence.state_slot))
            if count == sequence.remaining:
                self._ends.append((sequence, len(self.wanted)))
                self.wanted.append(place - 1)

    def _note(self, sequence: EngineSequence, count: int, place: int) -> None:
        # The logits behind token i are about token i + 1.
        first = sequence.noted - 1
        last = min(sequence.computed + count, sequence.prompt_tokens - 1)
        if last > first:
            offset = place - sequence.computed
            self._notes.append(_Note(sequence, len(self.wanted), first + 1, last + 1))
            self.wanted += range(offset + first, offset + last)

    def prompt_logprobs(self, logits: torch.Tensor) -> list[tuple[EngineSequence, list[TokenLogprob]]]:
        """What the logits [len(wanted), vocabulary] say about prompts; each token's is told once."""
        found = []
        for sequence, row, first, last in self._notes:
            count = sequence.sampling.prompt_logprobs or 0
            rows = logits[row : row + last - first]
            tokens = sequence.tokens(first, last).tolist()
            found.append((sequence, token_logprobs(rows, tokens, [count] * (last - first))))
            sequence.noted = last
        return found

    def draw(self, logits: torch.Tensor) -> list[tuple[EngineSequence, list[Drawn] | str]]:
        """For each sequence whose tokens are all computed: the token of each of its choices, or what is wrong.

        No tokens for a sequence whose first ones are known already.
        """
        drawing: list[tuple[EngineSequence, list[EngineSequence]]] = []
        rows: list[int] = []
        for sequence, row in self._ends:
            choices = sequence.choices() if sequence.firsts is None else []
            drawing.append((sequence, choices))
            rows += [row] * len(choices)
        if not rows:
            return [(sequence, []) for sequence, _ in drawing]
        if rows != list(range(len(logits))):
            logits = logits[upload(logits.device, (np.array(rows, dtype=np.int64),))[0]]
        drawn = iter(sample(logits, [choice.row() for _, choices in drawing for choice in choices]))
        result: list[tuple[EngineSequence, list[Drawn] | str]] = []
        for sequence, choices in drawing:
            found = [(choice, next(drawn)) for choice in choices]
            fault = next((one for _, one in found if isinstance(one, str)), None)
            good = [Drawn(choice, *one) for choice, one in found if not isinstance(one, str)]
            result.append((sequence, good if fault is None else fault))
        return result
