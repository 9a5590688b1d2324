# SPDX-License-Identifier: Apache-2.0
"""Who runs in the next step: pure policy over counts, without clocks, pages or tensors.

Decoding sequences come first, one token each, so that running answers never stall behind a long prompt; what is left
of the token budget goes to prompts in the order of their arrival, cut into chunks. Where decoding alone fills the
budget, the oldest prompt still gets a small chunk: neither side starves the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["LEAST_CHUNK", "Pending", "Turn", "plan_step", "victim"]

# Tokens of prompts in a step, whatever the budget says.
LEAST_CHUNK = 16


class Pending(NamedTuple):
    """A sequence that could run. `remaining`: tokens whose KV is not computed yet; 1 when it decodes.

    `tail`: how many tokens the last chunk of its prompt may have (0: any number).
    """

    sequence_id: str
    remaining: int
    tail: int = 0


class Turn(NamedTuple):
    """How many tokens of a sequence the step computes."""

    sequence_id: str
    tokens: int


def plan_step(running: Sequence[Pending], *, token_budget: int) -> list[Turn]:
    """Turns for running sequences (in the order of arrival); their counts sum to at most `token_budget`.

    More decoding sequences than the budget has tokens still get one token each, and prompts LEAST_CHUNK tokens (or
    the budget, if that is less): a step is never empty while something runs, and none of them starves. A prompt's last
    chunk of more than `tail` tokens leaves those for another one.
    """
    decoding = [Turn(one.sequence_id, 1) for one in running if one.remaining == 1]
    left = max(token_budget - len(decoding), min(token_budget, LEAST_CHUNK))
    chunks: list[Turn] = []
    for one in running:
        if one.remaining > 1 and left > 0:
            count = min(one.remaining, left)
            if 0 < one.tail < count == one.remaining:
                count -= one.tail
            chunks.append(Turn(one.sequence_id, count))
            left -= count
    return decoding + chunks


def victim(running: Sequence[tuple[str, bool]]) -> str | None:
    """Who gives its pages back when a running sequence cannot grow: the youngest that may be preempted.

    `running`: (sequence id, may be preempted) in the order of arrival.
    """
    return next((sequence_id for sequence_id, may in reversed(running) if may), None)
