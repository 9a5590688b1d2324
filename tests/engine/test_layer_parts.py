# SPDX-License-Identifier: Apache-2.0
"""Pages of a step go out by layers while it is being computed: what is told of a layer is true, and told in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kvrail.kernels.step_parts import Slice
from kvrail.runtime import embedded
from kvrail.runtime.layer_parts import Stored


@pytest.mark.parametrize("kind", ["llama", "smollm3", "qwen3_moe", "deepseek_v2", "glm4_moe", "qwen2-window"])
def test_a_layer_that_is_told_of_is_stored_and_the_next_is_not_begun(models, kind: str) -> None:
    model = models.load(kind)
    layers = model.layout.layers
    pool = torch.zeros(8, *model.layout.shape)
    rings = torch.zeros(2, *model.layout.ring_shape) if model.layout.window_layers else None
    tokens = np.random.default_rng(3).integers(4, 997, 60)
    slices = [Slice([5, 2], 0, 20, 0), Slice([7, 1, 4], 0, 40, 1)]
    seen: list[tuple[int, torch.Tensor]] = []

    def tell(count: int) -> None:
        assert not pool[:, count:].any(), "somebody waits for a layer that was stored before"
        seen.append((count, pool[:, :count].clone()))

    model.forward(pool, tokens, slices, [19, 59], rings, Stored(range(1, layers), tell))
    assert [count for count, _ in seen] == list(range(1, layers))
    for count, then in seen:
        assert torch.equal(then, pool[:, :count])
        assert then[[5, 2, 7, 1, 4]].flatten(2).any(dim=2).all()


class Watcher:
    """Notes what an engine tells, and wants to know of layers 1 and 3 where a prompt ends."""

    def __init__(self, rig: Any) -> None:
        self._rig = rig
        self.told: list[Any] = []
        self.pages: dict[str, list[bytes]] = {}

    def step_begins(self, ending: Mapping[str, int]) -> Sequence[int]:
        self.told.append(ending)
        return [1, 3]

    def layers_queued(self, layers: int) -> None:
        self.told.append(layers)

    def step_queued(self, computed: Mapping[str, int]) -> None:
        self.told.append(dict(computed))
        for name, tokens in computed.items():
            whole = self._rig.engine.sequence(name).pages[: tokens // 16]
            size = self._rig.model.layout.page_bytes
            self.pages[name] = [bytes(self._rig.memory[page * size : (page + 1) * size]) for page in whole]


def _watched(models: Any) -> tuple[Any, Watcher]:
    rig = models.rig("smollm3", max_num_batched_tokens=64, prefix_cache=False)
    watcher = Watcher(rig)
    rig.engine.watch(watcher)
    return rig, watcher


def test_an_engine_tells_of_prompts_that_are_pushed_before_it_waits_for_a_step(
    models, prompt, greedy, monkeypatch
) -> None:
    """And of their layers where the prompt ends, which is a short chunk: the others are pushed beside later ones."""
    rig, watcher = _watched(models)
    draw = embedded.Batch.draw

    def noted(self: Any, logits: Any) -> Any:
        watcher.told.append("draw")
        return draw(self, logits)

    monkeypatch.setattr(embedded.Batch, "draw", noted)
    rig.engine.add("pushed", prompt(100), greedy(9), prefill_only=True)
    rig.drain()
    last = [{"pushed": 16}, 1, 3, {"pushed": 100}, "draw"]
    assert watcher.told == [{"pushed": 64}, "draw", {"pushed": 84}, "draw", *last]
    state = rig.engine.sequence("pushed")
    size = rig.model.layout.page_bytes
    assert len(watcher.pages["pushed"]) == 6
    for page, then in zip(state.pages, watcher.pages["pushed"], strict=False):
        assert bytes(rig.memory[page * size : (page + 1) * size]) == then
    # Nothing is told of what is not pushed.
    watcher.told.clear()
    rig.engine.add("mine", prompt(100), greedy(2))
    rig.drain()
    assert {"draw"} == set(watcher.told)
    rig.engine.release("pushed")
    rig.assert_idle()


def test_what_was_told_of_a_step_that_fails_is_not_computed_again(
    models, prompt, greedy, monkeypatch
) -> None:
    """Its pages may be on their way: a second time they would be written under the copy."""
    rig, watcher = _watched(models)
    forward, draw, fails = rig.engine._model.forward, embedded.Batch.draw, ["draw"]

    def failing(*arguments: Any) -> Any:
        if fails and fails[0] == "forward":
            fails.clear()
            raise torch.OutOfMemoryError("of a test")
        return forward(*arguments)

    def drawing(self: Any, logits: Any) -> Any:
        if fails:
            fails.clear()
            raise torch.OutOfMemoryError("of a test")
        return draw(self, logits)

    monkeypatch.setattr(rig.engine._model, "forward", failing)
    monkeypatch.setattr(embedded.Batch, "draw", drawing)
    monkeypatch.setattr(embedded, "out_of_memory", lambda *_: "no memory")
    rig.engine.add("pushed", prompt(20), greedy(9), prefill_only=True)
    rig.engine.add("mine", prompt(30), greedy(4))
    rig.drain()
    assert rig.finished["pushed"].finish_reason == "abort"
    assert rig.finished["pushed"].error == "no memory"
    rig.engine.release("pushed")
    assert rig.tokens["mine"] == models.rig("smollm3").generate([prompt(30)], greedy(4))[0]
    # Where nobody was told, all comes again.
    fails.append("forward")
    rig.engine.add("again", prompt(60), greedy(9), prefill_only=True)
    rig.drain()
    assert rig.tokens["again"]
    assert watcher.told[-1] == {"again": 60}
    rig.engine.release("again")
    rig.assert_idle()
