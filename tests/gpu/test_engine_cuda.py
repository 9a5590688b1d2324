# SPDX-License-Identifier: Apache-2.0
"""The embedded engine on a GPU: equal to transformers' generate in float32, and careful about work still queued."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from engine.conftest import Rig, greedy
from kit.tiny_families import FAMILIES
from kvrail.kernels.reference import gather_pages, scatter_pages
from kvrail.runtime.checkpoint import open_checkpoint
from kvrail.runtime.errors import ConfigError
from kvrail.runtime.model import PagedModel
from kvrail.runtime.random_model import make_model

VOCABULARY = 997
# Cycles that keep the stream busy for about a second.
LONG = 2_000_000_000


@pytest.fixture(scope="session")
def prompt() -> Callable[..., Any]:
    def make(length: int, seed: int = 0) -> Any:
        return np.random.default_rng([seed, length]).integers(4, VOCABULARY, length).astype(np.uint32)

    return make


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize(("page_tokens", "budget"), [(16, 24), (128, 2048)])
def test_equals_generate(models, prompt, kind, page_tokens, budget) -> None:
    """Alone and together, in chunks beside decoding ones, over pages that held NaN."""
    prompts = [prompt(length) for length in (1, 15, 16, 17, 40, 129)]
    rig = models.rig(kind, page_tokens, max_num_batched_tokens=budget)
    assert rig.model.arithmetic.startswith("float32 on")
    assert rig.generate(prompts, greedy(12)) == [models.expected(one, 12, kind) for one in prompts]
    rig.assert_idle()


def test_tf32_is_off(models) -> None:
    models.load("llama")
    assert torch.get_float32_matmul_precision() == "highest"
    a = torch.full((64, 64), 1.0 + 2.0**-12, device="cuda")
    assert float((a @ a)[0, 0]) == pytest.approx(64 * (1.0 + 2.0**-12) ** 2, rel=1e-6)


def test_prefix_hits_and_poisoned_free_pages(models, prompt) -> None:
    rig = models.rig(pages=40, max_num_batched_tokens=40)
    shared = prompt(64)
    prompts = [np.concatenate([shared, prompt(5 + n, n)]) for n in range(4)]
    expected = [models.expected(one, 10) for one in prompts]
    for _ in range(3):
        assert rig.generate(prompts, greedy(10)) == expected
        rig.poison_free_pages()
    assert [o.cached_tokens for o in rig.finished.values()][-4:] == [64] * 4
    rig.assert_idle()


def test_preemption(models, prompt) -> None:
    rig = models.rig(pages=9, max_num_batched_tokens=24, prefix_cache=False)
    prompts = [prompt(20 + n, n) for n in range(5)]
    chunks = sum(len(one) // 24 for one in prompts)
    assert rig.generate(prompts, greedy(40)) == [models.expected(one, 40) for one in prompts]
    again = sum(output.token is None for step in rig.steps for output in step)
    assert again > chunks, "nothing was computed again"
    rig.assert_idle()


@pytest.mark.parametrize("length", [1, 33, 64])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_adopt_equals_the_single_engine(models, prompt, length, temperature) -> None:
    one, sampling = prompt(length), greedy(24, temperature=temperature)
    expected = models.rig().generate([one], sampling)[0]
    prefill, decode = models.rig(max_num_batched_tokens=16), models.rig()
    prefill.engine.add("p", one, sampling, prefill_only=True)
    prefill.drain()
    state = prefill.engine.sequence("p")
    pages = decode.pool.allocate("ticket", len(state.pages))
    slab = gather_pages(prefill.tensor, torch.tensor(state.pages, device="cuda"))
    scatter_pages(decode.tensor, torch.tensor(pages, device="cuda"), slab)
    if length % 16:
        decode.tensor[pages[-1], :, :, length % 16 :] = torch.nan
    torch.cuda.synchronize()
    decode.engine.adopt("d", one, sampling, owner="ticket", first_tokens={0: expected[0]}, cached_tokens=0)
    prefill.engine.release("p")
    decode.drain()
    assert decode.tokens["d"] == expected[1:]
    for rig in (prefill, decode):
        rig.assert_idle()


@pytest.fixture
def slow_stream() -> Iterator[Callable[[Any], torch.cuda.Stream]]:
    """Keeps an engine's stream busy for a while, so that what is queued next stays queued."""

    def slow(engine: Any) -> torch.cuda.Stream:
        stream = torch.cuda.ExternalStream(engine.stream)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG)
        return stream

    yield slow
    torch.cuda.synchronize()


def test_a_chunk_is_queued_and_its_abort_waits(models, prompt, slow_stream) -> None:
    rig = models.rig(pages=64, max_num_batched_tokens=64)
    rig.generate([prompt(200, 1)], greedy(2))
    rig.engine.add("long", prompt(400, 2), greedy(2), prefill_only=True)
    stream = slow_stream(rig.engine)
    outputs = rig.step()
    assert [(o.computed, o.token) for o in outputs] == [(64, None)]
    assert not stream.query(), "step waited for a chunk that it does not sample"
    held = rig.pool.owned
    rig.engine.abort("long")
    assert stream.query(), "pages went back while work on them was queued"
    assert rig.pool.owned < held
    rig.assert_idle()


def test_release_does_not_wait_for_others(models, prompt, slow_stream) -> None:
    rig = models.rig(pages=64, max_num_batched_tokens=64)
    rig.engine.add("done", prompt(40), greedy(2), prefill_only=True)
    rig.drain()
    rig.engine.add("long", prompt(400, 2), greedy(2), prefill_only=True)
    stream = slow_stream(rig.engine)
    rig.step()
    rig.engine.release("done")
    assert not stream.query()
    rig.engine.abort("long")
    rig.assert_idle()


def test_adopted_and_ended_at_once_waits_for_its_zeroes(models, prompt, slow_stream) -> None:
    rig = models.rig()
    rig.pool.allocate("ticket", 1)
    stream = slow_stream(rig.engine)
    rig.engine.adopt("d", prompt(5), greedy(1), owner="ticket", first_tokens={0: 9}, cached_tokens=0)
    assert stream.query()
    rig.drain()
    rig.assert_idle()


def test_preemption_waits(models, prompt, slow_stream) -> None:
    """Pages are taken from a sequence whose chunk is still queued."""
    rig = models.rig(pages=8, max_num_batched_tokens=16, prefix_cache=False)
    rig.engine.add("young", prompt(100, 2), greedy(3))
    rig.step()
    stream = slow_stream(rig.engine)
    rig.step()
    assert not stream.query()
    rig.engine._roster._preempt_one()
    assert stream.query(), "pages went back while work on them was queued"
    rig.drain()
    assert rig.tokens["young"] == models.expected(prompt(100, 2), 3)
    rig.assert_idle()


def test_queued_chunks_compute_the_same(models, prompt, slow_stream) -> None:
    """Many steps are given to a stream that is behind: nothing that the host reuses may be read too late."""
    for attention, dtype in (("torch", "float32"), ("auto", "float32")):
        rig = models.rig(dtype=dtype, attention=attention, max_num_batched_tokens=24)
        slow_stream(rig.engine)
        assert rig.generate([prompt(300, 3)], greedy(6)) == [models.expected(prompt(300, 3), 6)]
        rig.assert_idle()


@pytest.mark.parametrize("attention", ["torch", "auto"])
def test_layers_that_are_told_of_stand_behind_the_work_so_far(models, prompt, attention) -> None:
    """What a copy behind that work takes along is what the pages hold in the end; the step waits for none of it."""
    dtype = "float32" if attention == "torch" else "bfloat16"
    rig = models.rig(
        "smollm3", dtype=dtype, attention=attention, pages=64, max_num_batched_tokens=600, prefix_cache=False
    )
    rig.generate([prompt(600, 1)], greedy(2))
    side, taken, begin = torch.cuda.Stream(), [], [0]
    stream = torch.cuda.ExternalStream(rig.engine.stream)

    class Watcher:
        def step_begins(self, ending: Any) -> list[int]:
            assert ending == {"pushed": 600}
            return list(range(1, rig.model.layout.layers))

        def layers_queued(self, layers: int) -> None:
            side.wait_event(stream.record_event())
            with torch.cuda.stream(side):
                taken.append((begin[0], layers, rig.tensor[:, begin[0] : layers].clone()))
            begin[0] = layers

        def step_queued(self, computed: Any) -> None:
            assert not stream.query(), "the host waited for the step"
            self.layers_queued(rig.model.layout.layers)
            begin[0] = 0

    rig.engine.watch(Watcher())
    rig.engine.add("pushed", prompt(600, 2), greedy(2), prefill_only=True)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
    rig.drain()
    torch.cuda.synchronize()
    layers = rig.model.layout.layers
    assert [(first, last) for first, last, _ in taken] == [(n, n + 1) for n in range(layers)]
    pages = rig.engine.sequence("pushed").pages[: 600 // rig.model.layout.page_tokens]
    for first, last, then in taken:
        assert torch.equal(then[pages], rig.tensor[pages, first:last])
        assert then[pages].any()
    taken.clear()
    rig.engine.release("pushed")
    rig.assert_idle()


def test_out_of_memory_in_a_step_shrinks_it(models, prompt, caplog) -> None:
    rig = models.rig(pages=96, max_num_batched_tokens=600, prefix_cache=False)
    one = prompt(500, 4)
    expected = models.expected(one, 3)
    real = rig.model._model.forward
    asked: list[int] = []

    def forward(*args: Any, **more: Any) -> Any:
        tokens = more["input_ids"].shape[1]
        asked.append(tokens)
        if tokens > 200:
            # More than any GPU has: the allocator's own error.
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return real(*args, **more)

    rig.model._model.forward = forward
    try:
        assert rig.generate([one], greedy(3)) == [expected]
        assert "ran out of memory while computing 500 tokens" in caplog.text
        assert asked[0] == 500
        assert max(asked[2:]) <= 200
        rig.model._model.forward = lambda *a, **k: torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        rig.engine.add("none", prompt(30), greedy(3))
        rig.drain()
    finally:
        rig.model._model.forward = real
    assert rig.finished["none"].finish_reason == "abort"
    assert "--max-num-batched-tokens" in rig.finished["none"].error
    rig.assert_idle()


def test_out_of_memory_while_loading_is_told(models, tmp_path) -> None:
    # Larger than what the allocator may have left over.
    checkpoint = open_checkpoint(str(make_model(tmp_path / "m", "tiny")))
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-9)
    try:
        with pytest.raises(ConfigError, match="ran out of memory while loading the model"):
            PagedModel.load(checkpoint, "float32", 16, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_devices_that_are_not_there(models) -> None:
    with pytest.raises(ConfigError, match="there are"):
        PagedModel.load(models.checkpoint("llama"), "float32", 16, device="cuda:99")
    with pytest.raises(ConfigError, match=r"--attention flashinfer: .*not in float32"):
        PagedModel.load(models.checkpoint("llama"), "float32", 16, device="cuda", attention="flashinfer")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_agrees_with_the_model_in_float32(models, prompt, kind, dtype) -> None:
    """torch attention, 16 bits: each decoded token is the likeliest in float32, or nearly so."""
    _assert_nearly_greedy(models, models.rig(kind, dtype=dtype, attention="torch"), kind, prompt)


def _assert_nearly_greedy(models: Any, rig: Rig, kind: str, prompt: Any, bound: float = 0.3) -> None:
    prompts = [prompt(20 + 7 * n, n) for n in range(4)]
    for one, tokens in zip(prompts, rig.generate(prompts, greedy(24)), strict=True):
        text = torch.tensor([*one.astype(int).tolist(), *tokens])[None]
        with torch.inference_mode():
            logits = models.reference(kind)(text).logits[0, len(one) - 1 : -1]
        gaps = logits.max(dim=-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert float(gaps.max()) <= bound * float(logits.std())
    rig.assert_idle()
