# SPDX-License-Identifier: Apache-2.0
"""The engine with decoding steps at fixed addresses, on a CPU: tables, rows too many, fallbacks; tokens as without.

FlashInfer's module and the graphs themselves are stood for by plain code that reads the same tables in the same order;
tests/gpu/test_decode_graphs.py has the real ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine.conftest import Rig
from kvrail.kernels import flashinfer_decode
from kvrail.kernels.flashinfer_decode import FixedDecode, NotFixed
from kvrail.kernels.reference import causal_attention, store_tokens
from kvrail.kernels.step_parts import Slice
from kvrail.runtime.decode_graphs import DecodeGraphs
from kvrail.runtime.sampler import choice_seed


class PlainModule:
    """FlashInfer's module of kernels: which arguments mean what, and what is computed of them."""

    def __init__(self, most: int = 1000) -> None:
        self.most = most
        self.rows: list[int] = []

    def plan(self, *arguments: Any) -> list[int]:
        query_rows, indptr, lengths, rows = arguments[3], arguments[4], arguments[5], arguments[6]
        assert query_rows.tolist() == list(range(rows + 1))
        assert len(indptr) == rows + 1
        assert len(lengths) == rows
        if rows > self.most:
            raise RuntimeError("too little work space")
        return [rows]

    def paged_run(self, *arguments: Any) -> None:
        shape, query, keys, values, _, indptr, indices, last, out = arguments[2:11]
        assert shape == [len(query)] == [len(last)]
        scaling = arguments[23]
        for row, (first, end) in enumerate(zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)):
            if first == end:
                out[row] = 0
                continue
            pages = indices[first:end].long()
            seen = (end - first - 1) * keys.shape[1] + int(last[row])
            k, v = (side[pages].flatten(0, 1)[:seen] for side in (keys, values))
            out[row] = causal_attention(k, v, query[row : row + 1], scaling)[0]


class Done:
    """An event or a stream that nobody waits for."""

    def __init__(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record(self) -> None:
        pass


class Replayed:
    def __init__(self, step: Callable[[], None]) -> None:
        self.replay = step


class PlainGraphs(DecodeGraphs):
    """Graphs that do again, launch by launch, what they would have captured."""

    def __init__(self, model: Any, module: PlainModule) -> None:
        config = model._model.config
        attention: Any = SimpleNamespace(
            device=model.device,
            workspace=None,
            module=module,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
        )
        super().__init__(attention, model._decode, model.vocab_size, None)
        self.replayed: list[tuple[int, int]] = []

    def _capture(self, fixed: FixedDecode, pool: Any, size: int, stream: Any, shared: Any) -> Any:
        shape = fixed.begin(np.zeros(0, dtype=np.int64), [], size)
        assert shape is not None
        plan = fixed.plan(pool, size, shape)

        def step() -> None:
            self._logits[:size].copy_(self._compute(plan.tokens, plan))

        before = pool.clone()
        step()
        assert torch.equal(before.nan_to_num(nan=7.0), pool.nan_to_num(nan=7.0)), "nobody's rows were stored"
        return Replayed(step), shape

    def run(self, pool: Any, tokens: Any, slices: Any, wanted: Any) -> Any:
        found = super().run(pool, tokens, slices, wanted)
        if found is not None:
            self.replayed.append((len(slices), next(size for size in self.sizes if size >= len(slices))))
        return found


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch, models) -> Callable[..., tuple[Any, PlainGraphs]]:
    """graphs(kind="llama", most=…) → (a model of its own, its graphs)."""
    nothing = {name: lambda *_: None for name in ("synchronize", "empty_cache", "graph_pool_handle")}
    more = {
        "mem_get_info": lambda *_: (1, 1),
        "stream": contextlib.nullcontext,
        "Event": Done,
        "Stream": Done,
    }
    for name, value in (nothing | more).items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(flashinfer_decode, "KvStore", lambda *_: store_tokens)

    def make(kind: str = "llama", most: int = 1000) -> tuple[Any, PlainGraphs]:
        model = models._load(kind)
        model._graphs = PlainGraphs(model, PlainModule(most))
        return model, model._graphs

    return make


@pytest.mark.parametrize("kind", ["llama", "qwen3", "granite"])
def test_tokens_are_those_of_generate(models, prompt, greedy, graphs, kind) -> None:
    """Sequences that end at different times, over page borders, beside chunks; NaN where nobody has written."""
    model, made = graphs(kind)
    rig = Rig(model, 60, max_num_batched_tokens=24)
    rig.memory[:] = b"\xff" * len(rig.memory)
    prompts = [prompt(length) for length in (1, 15, 16, 17, 33)]
    for n, one in enumerate(prompts):
        rig.engine.add(str(n), one, greedy(10 + 4 * n))
    rig.drain()
    for n, one in enumerate(prompts):
        assert rig.tokens[str(n)] == models.expected(one, 10 + 4 * n, kind)
    rig.assert_idle()
    used = set(made.replayed)
    assert {count for count, _ in used} >= {1, 2, 3}
    assert (3, 4) in used, "no batch was filled up"


def test_preemption_and_aborts_between_steps(models, prompt, greedy, graphs) -> None:
    model, made = graphs()
    rig = Rig(model, 12, max_num_batched_tokens=64, prefix_cache=False)
    prompts = [prompt(20 + n, n) for n in range(6)]
    for n, one in enumerate(prompts):
        rig.engine.add(str(n), one, greedy(30))
    for count in range(1000):
        if not rig.engine.has_work:
            break
        rig.step()
        if count in (8, 15):
            rig.engine.abort("1" if count == 8 else "4")
    assert sum(output.token is None for step in rig.steps for output in step) > 0, (
        "nothing was computed again"
    )
    for n in (0, 2, 3, 5):
        assert rig.tokens[str(n)] == models.expected(prompts[n], 30)
    rig.assert_idle()
    assert len({count for count, _ in made.replayed}) > 1


def test_several_answers_and_all_that_sampling_does(models, prompt, greedy, graphs) -> None:
    model, made = graphs()
    one = prompt(37)
    sampling = {"temperature": 0.9, "repetition_penalty": 1.2, "logprobs": 2}
    rig = Rig(model, 60)
    rig.engine.add("all", one, greedy(12, n=3, **sampling))
    found: dict[int, list[Any]] = {}
    while rig.engine.has_work:
        for output in rig.engine.step():
            found.setdefault(output.choice, []).append((output.token, output.logprob.logprob))
    for choice in range(3):
        other = models.rig()
        alone = greedy(12, **sampling)
        alone = msgspec.structs.replace(alone, seed=choice_seed(alone.seed, choice))
        other.engine.add("one", one, alone)
        outputs = [output for _ in range(12) for output in other.engine.step()]
        assert [token for token, _ in found[choice]] == [output.token for output in outputs]
        assert [noted for _, noted in found[choice]] == pytest.approx(
            [output.logprob.logprob for output in outputs], abs=1e-4
        )
    assert set(made.replayed) == {(3, 4)}


def test_what_has_no_graph_is_computed_all_the_same(models, prompt, greedy, graphs) -> None:
    model, made = graphs()
    expected = models.expected(prompt(40), 12)
    first, second = Rig(model, 20, max_num_seqs=2), Rig(model, 20, max_num_seqs=2)
    assert made.sizes == [1, 2]
    assert first.generate([prompt(40)], greedy(12)) == [expected]
    assert not made.replayed, "the graphs are those of the other pool"
    assert second.generate([prompt(40)], greedy(12)) == [expected]
    assert set(made.replayed) == {(1, 1)}
    # Fewer pages than a step of this engine may need: as many sequences, but longer ones.
    made.replayed.clear()
    model.prepare_decoding(second.engine._memory.pages, 2, 1)
    assert second.generate([prompt(40)], greedy(12)) == [expected]
    assert not made.replayed


def test_sizes_without_work_space_are_left_out(models, prompt, greedy, graphs, caplog) -> None:
    model, made = graphs(most=4)
    rig = Rig(model, 60, max_num_seqs=16)
    assert made.sizes == [1, 2, 4]
    assert "decoding lacks some CUDA graphs: FlashInfer cannot plan" in caplog.text
    prompts = [prompt(10 + n, n) for n in range(6)]
    assert rig.generate(prompts, greedy(8)) == [models.expected(one, 8) for one in prompts]
    assert not made.replayed
    assert rig.generate(prompts[:3], greedy(8)) == [models.expected(one, 8) for one in prompts[:3]]
    assert set(made.replayed) == {(3, 4)}


@pytest.mark.parametrize("kind", [RuntimeError, TypeError])
def test_a_failing_capture_leaves_the_engine_as_it_was(
    models, prompt, greedy, graphs, caplog, monkeypatch, kind
) -> None:
    model, made = graphs()

    def fail(*_: Any) -> Any:
        raise kind("operation not permitted when stream is capturing\nCUDA kernel errors might be …")

    monkeypatch.setattr(made, "_capture", fail)
    for _ in range(2):
        rig = Rig(model, 20)
        assert rig.generate([prompt(20)], greedy(5)) == [models.expected(prompt(20), 5)]
    assert made.sizes == []
    told = [
        one.message for one in caplog.records if "CUDA graphs" in one.message and one.levelname == "WARNING"
    ]
    assert told == ["decoding is without CUDA graphs: operation not permitted when stream is capturing"]


@torch.inference_mode()
def test_layers_of_another_kind_have_none(graphs) -> None:
    model, made = graphs()
    pool = torch.zeros(4, *model.layout.shape)
    model.prepare_decoding(pool, 2, 2)
    fixed = made._fixed
    assert fixed is not None
    shape = fixed.begin(np.array([3]), [Slice([1], 0, 1)], 1)
    assert shape is not None
    plan = fixed.plan(pool, 1, shape)
    heads = (torch.zeros(4, 1, 16), torch.zeros(2, 1, 16), torch.zeros(2, 1, 16))
    for variant in ({"sliding_window": 5}, {"softcap": 3.0}, {"s_aux": torch.zeros(4)}):
        with pytest.raises(NotFixed, match="a window, capped scores, sinks"):
            plan.attend(0, *heads, 1.0, **variant)
