# SPDX-License-Identifier: Apache-2.0
"""Which of the running sequences can run in this step, and which prompts an engine takes at all."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, wait

import numpy as np
import numpy.typing as npt

from kvrail.runtime.errors import BadRequest, TooLong
from kvrail.runtime.prefix_caches import PrefixCaches
from kvrail.runtime.sequence import EngineSequence

__all__ = ["check_prompt", "ready_sequences"]

# Nothing else is to be done meanwhile, but messages and links want to be heard.
_GRAMMAR_WAIT_S = 0.005


def check_prompt(tokens: npt.NDArray[np.uint32], max_model_len: int, vocab_size: int) -> None:
    """Raise BadRequest or TooLong for a prompt that can never run."""
    if len(tokens) == 0:
        raise BadRequest("the prompt is empty", param="prompt")
    if len(tokens) >= max_model_len:
        raise TooLong(
            f"the prompt has {len(tokens)} tokens; at most {max_model_len - 1} fit "
            f"(max_model_len {max_model_len}, and one token of answer)",
            param="prompt",
        )
    if int(tokens.max()) >= vocab_size:
        raise BadRequest(f"token ids must be below {vocab_size}", param="prompt")


def ready_sequences(
    running: list[EngineSequence], prefixes: PrefixCaches
) -> tuple[list[EngineSequence], list[tuple[EngineSequence, str]]]:
    """(sequences whose copies have come in and whose grammars are there, those that must fail with the reason).

    When only grammars are missing it waits for one, but only for a moment.
    """
    here, faulty = prefixes.ready(running)
    waited = [one.compiling for one in here if one.compiling is not None and not one.ready]
    if waited and len(waited) == len(here):
        wait(waited, timeout=_GRAMMAR_WAIT_S, return_when=FIRST_COMPLETED)
    faulty = [*faulty, *_uncompiled(here)]
    failed = {id(one) for one, _ in faulty}
    return [one for one in here if one.ready and id(one) not in failed], faulty


def _uncompiled(sequences: Sequence[EngineSequence]) -> list[tuple[EngineSequence, str]]:
    """Those whose grammar is refused by the compiler, which says why."""
    found = []
    for one in sequences:
        if one.compiling is not None and one.ready:
            fault = one.compiling.exception()
            if fault is not None:
                found.append((one, str(fault)))
    return found
