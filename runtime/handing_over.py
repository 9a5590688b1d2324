# SPDX-License-Identifier: Apache-2.0
"""What a prefill engine hands over besides KV, and what a completion engine checks before it believes a peer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvrail.runtime.engine_protocol import StepOutput
from kvrail.runtime.messages import Sampling
from kvrail.transfer.checksums import page_checksums, unpack_checksums
from kvrail.transfer.memory import Pools
from kvrail.transfer.tickets import Landed
from kvrail.transfer.wire import HAND_OFF_VERSION, FirstSample, HandOff

__all__ = ["counts_of", "damage_of", "fault_of_hand_off", "hand_off_record"]


def hand_off_record(sampling: Sampling, prompt_tokens: int, outputs: Sequence[StepOutput]) -> HandOff:
    """The record of a prefill; `outputs` has the first token of each choice, in order."""
    firsts = [
        FirstSample(token=output.token, finish_reason=output.finish_reason, logprob=output.logprob)
        for output in outputs
        if output.token is not None
    ]
    assert len(firsts) == sampling.n
    return HandOff(
        first_token=firsts[0].token,
        finish_reason=firsts[0].finish_reason,
        logprob=firsts[0].logprob,
        seed=sampling.seed,
        next_position=prompt_tokens + 1,
        cached_tokens=outputs[0].cached_tokens,
        others=firsts[1:],
    )


def fault_of_hand_off(hand_off: HandOff, sampling: Sampling, prompt_tokens: int, vocab_size: int) -> str:
    """What is wrong with a peer's record for this request, or ""."""
    if hand_off.version != HAND_OFF_VERSION:
        return f"its record has version {hand_off.version}, not {HAND_OFF_VERSION}"
    if (hand_off.seed, hand_off.next_position) != (sampling.seed, prompt_tokens + 1):
        return "its sampler stands elsewhere"
    if not 0 <= hand_off.cached_tokens <= prompt_tokens:
        return f"{hand_off.cached_tokens} of {prompt_tokens} tokens from a cache"
    if len(hand_off.firsts) != sampling.n:
        return f"first tokens for {len(hand_off.firsts)} of {sampling.n} choices"
    for first in hand_off.firsts:
        if not 0 <= first.token < vocab_size:
            return f"{first.token} is no token of this model"
        if first.finish_reason not in (None, "stop", "length"):
            return f"{first.finish_reason[:40]!r} is no reason to finish"
        if first.finish_reason is None and sampling.max_tokens == 1:
            return "it does not end with its only token"
        if (first.logprob is None) != (sampling.logprobs is None):
            return "log-probabilities are missing, or were not asked for"
        if first.logprob is not None and not all(0 <= token < vocab_size for token, _ in first.logprob.top):
            return "log-probabilities of what is no token of this model"
    return ""


def counts_of(landed: Landed) -> dict[str, int]:
    """What a link has brought with one ticket, under the names of LinkBoard.count."""
    return {
        "pages": len(landed.pages),
        "states": int(landed.state_slot >= 0),
        "bytes": landed.bell.pushed_bytes,
        "tickets": 1,
    }


def damage_of(landed: Landed, pools: Pools) -> str:
    """What is wrong with the pages that arrived, by the checksums in their doorbell, or ""."""
    if landed.bell.checksums is not None:
        found = page_checksums(pools.pages, landed.pages)
        wanted = unpack_checksums(landed.bell.checksums)
        wrong = np.flatnonzero(found != wanted)
        if len(wrong):
            return f"checksum of page {int(wrong[0])} of {len(found)}, {len(wrong)} in all"
    if landed.bell.state_checksum is not None and pools.state is not None:
        slot = np.array([landed.state_slot], dtype=np.uint32)
        if int(page_checksums(pools.state, slot)[0]) != landed.bell.state_checksum:
            return "checksum of the state slot"
    return ""
