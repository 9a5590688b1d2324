# SPDX-License-Identifier: Apache-2.0
"""The engine with steps at fixed addresses, on a CPU: tables, rows too many, fallbacks; tokens as without.

FlashInfer's module and the graphs themselves are stood for by plain code that reads the same tables in the same order;
tests/gpu/test_decode_graphs.py and test_prefill_graphs.py have the real ones.
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
from kvrail.kernels import flashinfer_fixed
from kvrail.kernels.flashinfer_fixed import NotFixed
from kvrail.kernels.prefill_tables import PREFILL_SEQUENCES
from kvrail.kernels.reference import causal_attention, store_tokens
from kvrail.kernels.step_parts import Slice
from kvrail.runtime.sampler import choice_seed
from kvrail.runtime.step_graphs import StepGraphs


class PlainModule:
    """FlashInfer's module of kernels: which arguments mean what, and what is computed of them."""

    def __init__(self, most: int = 1000) -> None:
        self.most = most
        self.rows: list[int] = []

    def plan(self, *arguments: Any) -> list[int]:
        queries, indptr, lengths, rows, sequences = arguments[3:8]
        assert queries.tolist() == sorted(queries.tolist())
        assert (int(queries[0]), int(queries[-1])) == (0, rows)
        assert len(queries) == len(indptr) == sequences + 1
        assert len(lengths) == sequences
        if rows > self.most:
            raise RuntimeError("too little work space")
        return [rows, sequences]

    def paged_run(self, *arguments: Any) -> None:
        shape, query, keys, values, queries, indptr, indices, last, out, _, mask = arguments[2:13]
        assert shape == [len(query), len(last)]
        assert mask == int(len(last) == PREFILL_SEQUENCES + 1)
        scaling = arguments[23]
        for n, (first, end) in enumerate(zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)):
            rows = slice(int(queries[n]), int(queries[n + 1]))
            assert mask or rows.stop == rows.start + 1
            if first == end:
                out[rows] = 0
                continue
            pages = indices[first:end].long()
            seen = (end - first - 1) * keys.shape[1] + int(last[n])
            k, v = (side[pages].flatten(0, 1)[:seen] for side in (keys, values))
            out[rows] = causal_attention(k, v, query[rows], scaling)


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


class PlainGraphs(StepGraphs):
    """Graphs that do again, launch by launch, what they would have captured."""

    def __init__(self, model: Any, module: PlainModule, decodes: bool) -> None:
        config = model._model.config
        attention: Any = SimpleNamespace(
            device=model.device,
            workspace=None,
            module=module,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
        )
        super().__init__(attention, model._captured, model.vocab_size, None, decodes=decodes)
        # (sequences, rows) of decoding steps, (tokens, rows) of the others.
        self.replayed: list[tuple[int, int]] = []
        self.read: list[tuple[int, int]] = []

    def _capture(self, kind: Any, pool: Any, size: int, stream: Any, shared: Any) -> Any:
        step, shape = self._step(kind, pool, size)
        before = pool.clone()
        step()
        assert torch.equal(before.nan_to_num(nan=7.0), pool.nan_to_num(nan=7.0)), "nobody's rows were stored"
        return Replayed(step), shape

    def run(self, pool: Any, tokens: Any, slices: Any, wanted: Any) -> Any:
        found = super().run(pool, tokens, slices, wanted)
        if found is not None:
            decodes = len(tokens) == len(slices) and bool(self.batches)
            seen, sizes = (self.replayed, self.batches) if decodes else (self.read, self.chunks)
            seen.append((len(tokens), next(size for size in sizes if size >= len(tokens))))
        return found


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch, models) -> Callable[..., tuple[Any, PlainGraphs]]:
    """graphs(kind="llama", most=…, decodes=…) → (a model of its own, its graphs)."""
    nothing = {name: lambda *_: None for name in ("synchronize", "empty_cache", "graph_pool_handle")}
    more = {
        "mem_get_info": lambda *_: (1, 1),
        "stream": contextlib.nullcontext,
        "Event": Done,
        "Stream": Done,
    }
    for name, value in (nothing | more).items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(flashinfer_fixed, "KvStore", lambda *_: store_tokens)

    def make(kind: str = "llama", most: int = 1000, decodes: bool = True) -> tuple[Any, PlainGraphs]:
        model = models._load(kind)
        model._graphs = PlainGraphs(model, PlainModule(most), decodes)
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


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_short_prompts_are_replayed_whole(models, prompt, greedy, graphs, kind) -> None:
    """Alone, together, beside decoding ones, and behind pages that were there; NaN where nobody has written."""
    model, made = graphs(kind)
    rig = Rig(model, 80)
    rig.memory[:] = b"\xff" * len(rig.memory)
    first = [prompt(length) for length in (1, 2, 33, 130)]
    for n, one in enumerate(first):
        rig.engine.add(str(n), one, greedy(12))
    rig.step()
    assert made.read == [(166, 192)]
    later = np.concatenate([prompt(130)[:70], prompt(20, 7)])
    rig.engine.add("later", later, greedy(12))
    rig.step()
    # 64 tokens of it were there already.
    assert made.read[1:] == [(4 + 26, 32)]
    rig.drain()
    for name, one in [*((str(n), one) for n, one in enumerate(first)), ("later", later)]:
        assert rig.tokens[name] == models.expected(one, 12, kind)
    rig.assert_idle()
    assert len(made.read) == 2


def test_who_never_decodes_has_chunks_only(models, prompt, greedy, graphs) -> None:
    model, made = graphs(decodes=False)
    rig = Rig(model, 60, prefix_cache=False)
    assert (made.batches, made.chunks[0], made.chunks[-1]) == ([], 32, 512)
    for n, length in enumerate((1, 40, 600)):
        rig.engine.add(str(n), prompt(length), greedy(5), prefill_only=True)
        rig.drain()
        assert rig.tokens[str(n)] == models.expected(prompt(length), 1)
        rig.engine.release(str(n))
    assert made.read == [(1, 32), (40, 64)], "600 tokens are more than any graph has"
    rig.assert_idle()


def test_chunks_without_room_in_the_tables_are_launched(models, prompt, greedy, graphs, monkeypatch) -> None:
    model, made = graphs()
    prompts = [prompt(3, n) for n in range(20)]
    rig = Rig(model, 80, max_num_seqs=20)
    assert rig.generate(prompts, greedy(4)) == [models.expected(one, 4) for one in prompts]
    assert not made.read, "more sequences than the tables have"
    rig = Rig(model, 80)
    rig.engine.add("noted", prompt(40), greedy(4, logprobs=1, prompt_logprobs=1))
    rig.drain()
    assert rig.tokens["noted"] == models.expected(prompt(40), 4)
    assert not made.read, "more logits than the graphs give"
    monkeypatch.setattr("kvrail.runtime.step_graphs._CHUNK_CONTEXT", -15 * 16)
    rig = Rig(model, 80, prefix_cache=False)
    assert rig.generate([prompt(16), prompt(17)], greedy(4)) == [
        models.expected(prompt(n), 4) for n in (16, 17)
    ]
    assert not made.read, "more pages than the tables have"
    assert rig.generate([prompt(16)], greedy(4)) == [models.expected(prompt(16), 4)]
    assert made.read == [(16, 32)]


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
    assert made.batches == [1, 2]
    assert first.generate([prompt(40)], greedy(12)) == [expected]
    assert not made.replayed, "the graphs are those of the other pool"
    assert second.generate([prompt(40)], greedy(12)) == [expected]
    assert set(made.replayed) == {(1, 1)}
    # Fewer pages than a step of this engine may need: as many sequences, but longer ones.
    made.replayed.clear()
    model.prepare_steps(second.engine._memory.pages, 2, 1)
    assert second.generate([prompt(40)], greedy(12)) == [expected]
    assert not made.replayed


def test_sizes_without_work_space_are_left_out(models, prompt, greedy, graphs, caplog) -> None:
    model, made = graphs(most=4)
    rig = Rig(model, 60, max_num_seqs=16)
    assert made.batches == [1, 2, 4]
    assert "the engine lacks some CUDA graphs: FlashInfer cannot plan" in caplog.text
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
    assert made.batches == []
    told = [
        one.message for one in caplog.records if "CUDA graphs" in one.message and one.levelname == "WARNING"
    ]
    assert told == ["the engine is without CUDA graphs: operation not permitted when stream is capturing"]


@torch.inference_mode()
def test_layers_of_another_kind_have_none(graphs) -> None:
    model, made = graphs()
    pool = torch.zeros(4, *model.layout.shape)
    model.prepare_steps(pool, 2, 2)
    assert made._decoding is not None
    fixed = made._decoding.fixed
    shape = fixed.begin(np.array([3]), [Slice([1], 0, 1)], [0], 1)
    assert shape is not None
    plan = fixed.plan(pool, 1, shape)
    heads = (torch.zeros(4, 1, 16), torch.zeros(2, 1, 16), torch.zeros(2, 1, 16))
    for variant in ({"sliding_window": 5}, {"softcap": 3.0}, {"s_aux": torch.zeros(4)}):
        with pytest.raises(NotFixed, match="a window, capped scores, sinks"):
            plan.attend(0, *heads, 1.0, **variant)
