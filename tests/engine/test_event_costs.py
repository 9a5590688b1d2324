# SPDX-License-Identifier: Apache-2.0
"""What a long prompt costs the Python of both ranks, by event: all of it stands between two steps, that is two tokens.

CPU time of the thread; the model computes nothing. `pytest -s` shows the table of doc/numbers.md.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kit.split_world import CE, PE, SplitWorld
from kvrail.runtime import messages
from kvrail.runtime.messages import Prefill, Submit
from kvrail.runtime.prefix import extend_keys
from kvrail.runtime.sequence_memory import SequenceMemory
from kvrail.transfer import wire
from kvrail.transfer.link_events import Received

_STREAMS, _ROUNDS = 16, 9


class Stopwatch:
    def __init__(self) -> None:
        self.ms: dict[str, list[float]] = defaultdict(list)

    def __call__(self, event: str, work: Callable[..., Any], *arguments: Any) -> Any:
        began = time.thread_time()
        result = work(*arguments)
        self.ms[event].append(1e3 * (time.thread_time() - began))
        return result

    def median(self, event: str) -> float:
        return float(np.median(self.ms[event]))


def one_prompt(world: SplitWorld, name: str, tokens: Any, sampling: Any, time_of: Stopwatch) -> None:
    """From the front's message at the completion rank to the end of its second token."""
    now = world.now
    data = messages.encode(
        Submit(request_id=name, tokens=tokens.tobytes(), sampling=sampling, peer=tuple(PE))
    )

    def submit() -> Submit:
        message = messages.decode_to_rank(data)
        assert isinstance(message, Submit)
        world.completion.handle(now, message)
        return message

    world.tokens[name], world.reasons[name], world.closed[name] = {}, {}, set()
    message = world.open[name] = time_of("CE: submit", submit)
    time_of("CE: match, reserve, grant", world.completion.tick, now)
    grant = wire.encode(world.to_pe.pop()[1])
    request_id, _, ticket = world.calls.popleft()
    call = messages.encode(
        Prefill(request_id=request_id, ticket=ticket, tokens=message.tokens, sampling=sampling)
    )
    time_of("PE: call", lambda: world.prefilling.handle(now, messages.decode_to_rank(call)))
    time_of("PE: grant", lambda: world.prefilling.on_link(now, Received(CE, wire.decode(grant))))
    first = "PE: first step"
    while world.pe.engine.has_work:
        outputs = time_of(first, world.pe.engine.step)
        time_of("PE: push a chunk", world.prefilling.on_step, now, outputs)
        first = "PE: later step"
    for writer in world.writers:
        writer.run(1 << 20)

    def end() -> None:
        while world.pe_events:
            world.prefilling.on_link(now, world.pe_events.popleft())

    time_of("PE: doorbell is out, pages released", end)
    while world.to_ce:
        said = wire.encode(world.to_ce.popleft()[1])
        event = f"CE: {type(wire.decode(said)).__name__}"
        time_of(event, lambda said=said: world.completion.on_link(now, Received(PE, wire.decode(said))))
    world.completion.tick(now)
    while name in world.open:
        world.completion.on_step(now, world.ce.engine.step())


@pytest.mark.parametrize("length", [16_384, 32_768])
def test_hearing_of_many_pages_costs_less_than_naming_them(
    models: Any, greedy: Any, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    # With the arguments that the rigs give, for it is the same one then.
    model = models.load("llama", 128, "float32", False)
    monkeypatch.setattr(model, "max_model_len", 2 * length)
    monkeypatch.setattr(
        model, "forward", lambda *step: torch.zeros(len(step[3]), model.vocab_size, dtype=torch.float32)
    )
    # Zeroing the pages of a chunk is part of computing it, as the forward pass is.
    monkeypatch.setattr(SequenceMemory, "_zero", lambda *pages: None)
    rigs = [models.rig("llama", 128, 1400, max_num_seqs=24, max_num_batched_tokens=8192) for _ in "cp"]
    world = SplitWorld(*rigs, np.random.default_rng(0), seats=24, share=0.9, verify=0.0)
    monkeypatch.setattr(world, "copy", lambda *page: None)
    draw = np.random.default_rng(1)

    def prompt(tokens: int) -> Any:
        return draw.integers(4, model.vocab_size, tokens).astype(np.uint32)

    for number in range(_STREAMS):
        one_prompt(world, f"warm{number}", prompt(512), greedy(2), Stopwatch())
    time_of = Stopwatch()
    for number in range(_ROUNDS):
        tokens = prompt(length)
        time_of("naming the pages", extend_keys, [], b"", tokens, 128)
        one_prompt(world, f"long{number}", tokens, greedy(2), time_of)
    print(f"\n{length} tokens, {length // 128} pages, ms of CPU (median):")
    for event in time_of.ms:
        print(f"  {event:36} {time_of.median(event):6.2f}")
    naming = time_of.median("naming the pages")
    assert time_of.median("CE: Doorbell") < 2 * naming
    assert time_of.median("PE: grant") < 2 * naming
    assert time_of.median("PE: later step") < 2 * naming
    world.settle()
    world.assert_idle()
