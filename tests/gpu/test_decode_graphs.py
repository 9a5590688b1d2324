# SPDX-License-Identifier: Apache-2.0
"""Decoding steps as CUDA graphs: equal to the same steps launched kernel by kernel, and careful about every page."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from engine.conftest import greedy
from gpu.cuda_rig import CudaRig
from kit.tiny_families import FAMILIES, tiny_random_model
from kit.tiny_model import END, byte_level_tokenizer
from kit.tiny_prompts import VOCABULARY, prompt, same_values
from kvrail.kernels.attention import Slice, StepPlan
from kvrail.kernels.decode_tables import DecodeTables
from kvrail.kernels.flashinfer_attention import FlashInferAttention
from kvrail.kernels.flashinfer_fixed import FixedAttention
from kvrail.kernels.kv_store import KvStore
from kvrail.kernels.reference import gather_pages, scatter_pages, store_tokens
from kvrail.runtime.checkpoint import open_checkpoint
from kvrail.runtime.grammar import Grammars
from kvrail.runtime.model import PagedModel

PAGE_TOKENS = 16


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every decoding step that is replayed. Chunks of prompts are launched (test_prefill_graphs.py)."""
    from kvrail.runtime.step_graphs import StepGraphs

    seen: list[int] = []
    real = StepGraphs.run

    def run(self: StepGraphs, pool: Any, tokens: Any, slices: Any, wanted: Any) -> Any:
        if len(tokens) != len(slices):
            return None
        found = real(self, pool, tokens, slices, wanted)
        if found is not None:
            seen.append(len(slices))
        return found

    monkeypatch.setattr(StepGraphs, "run", run)
    return seen


# --- the pieces -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 5, 64])
@pytest.mark.parametrize(("kv_heads", "dim"), [(2, 64), (8, 128), (3, 8), (5, 256)])
@pytest.mark.parametrize("sliced", [False, True])
def test_store_writes_what_it_should_and_nothing_else(gpu, tmp_path, tokens, kv_heads, dim, sliced) -> None:
    store = KvStore(0, tmp_path)
    pool = torch.full((20, 3, 2, PAGE_TOKENS, kv_heads, dim), torch.nan, dtype=torch.bfloat16, device=gpu)
    key, value = torch.randn(2, tokens, kv_heads * 2, dim, device=gpu).bfloat16()[:, :, :kv_heads]
    if not sliced:
        key, value = key.contiguous(), value.contiguous()
    rng = np.random.default_rng(tokens)
    places = (
        rng.integers(0, 20, tokens) * 3 * 2 * PAGE_TOKENS + rng.permutation(PAGE_TOKENS * 4)[:tokens] % 16
    )
    _, first = np.unique(places, return_index=True)
    lonely = np.full(tokens, -1)
    lonely[first] = places[first]
    lonely[::3] = -1
    expected = pool.cpu()
    store_tokens(expected, 1, key.cpu(), value.cpu(), torch.from_numpy(lonely))
    store(pool, 1, key, value, torch.from_numpy(lonely).to(gpu))
    assert same_values(pool.cpu(), expected)


def test_store_refuses_what_it_cannot_do(gpu, tmp_path) -> None:
    store = KvStore(0, tmp_path)
    pool = torch.zeros(2, 1, 2, PAGE_TOKENS, 2, 64, dtype=torch.bfloat16, device=gpu)
    good = torch.zeros(3, 2, 64, dtype=torch.bfloat16, device=gpu)
    places = torch.zeros(3, dtype=torch.int64, device=gpu)
    for bad in (
        good.float(),
        good[:, :1],
        good[..., :32],
        torch.zeros(3, 2, 65, device=gpu).bfloat16()[..., 1:],
    ):
        with pytest.raises(ValueError, match="K"):
            store(pool, 0, bad, bad, places)


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (1, 8), (5, 8), (40, 48), (0, 2)])
@pytest.mark.parametrize("page_tokens", [16, 128])
def test_attention_equals_the_torch_plan(gpu, tmp_path, count, rows, page_tokens) -> None:
    rng = np.random.default_rng([count, rows])
    torch.manual_seed(count)
    attention = FlashInferAttention(gpu, heads=8, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    attention.compile()
    pages = rng.permutation(400).tolist()
    slices = []
    for _ in range(count):
        start = int(rng.integers(0, 3 * page_tokens + 5))
        slices.append(Slice([pages.pop() for _ in range(start // page_tokens + 1)], start, 1))
    pool = torch.full((400, 3, 2, page_tokens, 2, 64), torch.nan, dtype=torch.bfloat16, device=gpu)
    for part in slices:
        flat = torch.randn(len(part.pages), *pool.shape[1:], device=gpu).bfloat16()
        flat[-1, :, :, part.start % page_tokens :] = 0
        pool[part.pages] = flat
    oracle = pool.float().cpu()
    shape = {"query": 8, "key": 2, "value": 2}
    given = {n: torch.randn(rows, h, 64, device=gpu).bfloat16().transpose(0, 1) for n, h in shape.items()}
    fixed = FixedAttention(attention, pool, DecodeTables(gpu, 48, 48 * 8), tmp_path)
    planned = fixed.begin(np.zeros(count, dtype=np.int64), slices, [], rows)
    assert planned is not None
    found = fixed.plan(pool, rows, planned).attend(2, **given, scaling=0.11)
    assert found.shape == (rows, 8, 64)
    if count:
        wide = {name: value[:, :count].float().cpu() for name, value in given.items()}
        expected = StepPlan(oracle, slices, torch.float32).attend(2, **wide, scaling=0.11)
        assert float((found[:count].float().cpu() - expected).abs().max()) <= 0.02
    assert not bool(found[count:].any()), "a row too many saw something"
    # The plan of the oracle has stored its rows: exactly those have changed here as well.
    assert same_values(pool.cpu(), oracle.bfloat16())


# --- one step -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 13, 16])
def test_a_step_equals_the_launched_one(model, eager, gpu, count, replays) -> None:
    rng = np.random.default_rng(count)
    page_count, per = 200, 8
    pool = torch.full((page_count, *model.layout.shape), torch.nan, dtype=torch.bfloat16, device=gpu)
    tables = rng.permutation(page_count)[: count * per].reshape(count, per).tolist()
    starts = [int(one) for one in rng.choice([1, 15, 16, 17, 31, 40, 63, 64, 90], count)]
    pool[[page for table in tables for page in table]] = 0
    for table, start in zip(tables, starts, strict=True):
        text = rng.integers(0, VOCABULARY, start)
        eager.forward(pool, text, [Slice(table, 0, start)], [start - 1])
    copy = pool.clone()
    model.prepare_steps(pool, 16, per)
    assert same_values(pool, copy), "capturing has touched a page"
    assert model._graphs.batches == [1, 2, 4, 8, 16]
    for step in range(20):
        tokens = rng.integers(0, VOCABULARY, count)
        slices = [
            Slice(table[: (start + step) // PAGE_TOKENS + 1 + step % 2], start + step, 1)
            for table, start in zip(tables, starts, strict=True)
        ]
        # Some of the logits, in another order.
        wanted = list(range(count)) if step % 3 else list(range(count - 1, -1, -1))[: count // 2 + 1]
        expected = eager.forward(copy, tokens, slices, wanted)
        found = model.forward(pool, tokens, slices, wanted)
        assert found.shape == (len(wanted), VOCABULARY)
        # Products of the same shapes are the same kernels.
        if count in model._graphs.batches and len(wanted) == count:
            assert torch.equal(found, expected), f"step {step}: {float((found - expected).abs().max())}"
        assert float((found - expected).abs().max()) <= 0.1 * float(expected.std())
        # So that what differs does not add up.
        both = [one[[page for table in tables for page in table]].float() for one in (pool, copy)]
        assert float((both[0] - both[1]).abs().max()) <= 0.25
        pool.copy_(copy)
    assert replays == [count] * 20
    others = torch.ones(page_count, dtype=torch.bool)
    others[[page for table in tables for page in table]] = False
    assert bool(pool[others.to(gpu)].isnan().all()), "a page of nobody was written to"


def test_another_pool_is_computed_without_graphs(model, eager, gpu, replays) -> None:
    first, second = (torch.zeros(20, *model.layout.shape, dtype=torch.bfloat16, device=gpu) for _ in range(2))
    model.prepare_steps(first, 2, 3)
    slices, tokens = [Slice([5], 0, 1)], np.array([7])
    expected = eager.forward(first.clone(), tokens, slices, [0])
    assert torch.equal(model.forward(second, tokens, slices, [0]), expected)
    assert replays == []
    assert torch.equal(model.forward(first, tokens, slices, [0]), expected)
    assert replays == [1]
    # More sequences than were prepared for, longer ones, and chunks: launched, and right.
    many = [Slice([n], 0, 1) for n in range(3)]
    assert model.forward(first, np.array([1, 2, 3]), many, [0, 1, 2]).shape == (3, VOCABULARY)
    model.forward(first, np.array([1, 2]), [Slice(list(range(10)), 150, 1), Slice([12], 3, 1)], [0, 1])
    model.forward(first, np.array([1, 2]), [Slice([11], 0, 2)], [1])
    assert replays == [1]
    model.prepare_steps(second, 2, 3)
    assert torch.equal(model.forward(second, tokens, slices, [0]), expected)
    assert replays == [1, 1]


# --- the engine -----------------------------------------------------------------------------------------------------


def _answers(rig: CudaRig, asked: dict[str, tuple[Any, Any]]) -> dict[tuple[str, int], list[Any]]:
    """Tokens and log-probabilities of every choice."""
    for name, (one, sampling) in asked.items():
        rig.engine.add(name, one, sampling)
    found: dict[tuple[str, int], list[Any]] = {}
    while rig.engine.has_work:
        for output in rig.engine.step():
            assert output.error is None
            if output.token is not None:
                found.setdefault((output.sequence_id, output.choice), []).append(
                    (output.token, output.logprob)
                )
    rig.assert_idle()
    return found


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(byte_level_tokenizer().to_str, VOCABULARY)
    yield made
    made.close()


@pytest.mark.parametrize("kind", ["greedy", "drawn", "several", "noted", "penalised", "grammar"])
def test_answers_are_those_of_launched_steps(model, eager, grammars, kind, replays) -> None:
    """Four sequences that grow together over page borders: every batch has the size of a graph."""
    more: dict[str, Any] = {
        "greedy": {},
        "drawn": {"temperature": 0.9, "top_p": 0.95, "top_k": 50},
        "several": {"temperature": 1.1, "n": 2},
        "noted": {"logprobs": 3, "prompt_logprobs": 2},
        "penalised": {
            "repetition_penalty": 1.3,
            "presence_penalty": 0.4,
            "min_tokens": 50,
            "stop_token_ids": [9],
        },
        "grammar": {"grammar": LLMatcher.grammar_from_regex(r"[0-9]{200,300}"), "eos_ids": [END]},
    }[kind]
    names = ("a", "b") if kind == "several" else ("a", "b", "c", "d")
    asked = {name: (prompt(20, n), greedy(50, **more)) for n, name in enumerate(names)}
    if kind == "grammar":
        # Compiled beforehand, so that nobody waits for it.
        grammars.begin(more["grammar"], more["eos_ids"]).result()
    expected = _answers(CudaRig(eager, 60, prefix_cache=False, grammars=grammars), asked)
    assert not replays
    found = _answers(CudaRig(model, 60, prefix_cache=False, grammars=grammars), asked)
    assert len(replays) >= 49
    assert set(replays) == {4}
    assert len(found) == 4
    assert found == expected


def test_aborts_and_preemption_between_steps(model, eager, replays) -> None:
    """Nearly no pages, and every few steps somebody leaves. What is left is what the model finds likely."""
    rig = CudaRig(model, 14, max_num_batched_tokens=64)
    for n in range(9):
        rig.engine.add(str(n), prompt(20 + n, n), greedy(40))
    gone: list[str] = []
    for count in range(2000):
        if not rig.engine.has_work:
            break
        rig.step()
        if count % 11 == 10 and len(gone) < 4:
            gone.append(str(2 * len(gone)))
            rig.engine.abort(gone[-1])
            rig.poison_free_pages()
            torch.cuda.synchronize()
    rig.assert_idle()
    assert len(set(replays)) > 2
    for n in range(9):
        if str(n) in gone:
            continue
        tokens = rig.tokens[str(n)]
        assert len(tokens) == 40
        text = np.array([*prompt(20 + n, n).tolist(), *tokens], dtype=np.int64)
        pool = torch.zeros(8, *model.layout.shape, dtype=torch.bfloat16, device="cuda")
        places = list(range(19 + n, len(text) - 1))
        logits = eager.forward(pool, text, [Slice(list(range(8)), 0, len(text))], places)
        own = logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
        assert float((logits.amax(-1) - own).max()) <= 0.3 * float(logits.std())


@pytest.mark.parametrize("length", [1, 33, 64])
def test_adopted_pages_are_decoded(model, eager, length, replays) -> None:
    one, sampling = prompt(length), greedy(24)
    expected = CudaRig(eager, 20).generate([one], sampling)[0]
    prefill, decode = CudaRig(eager, 20), CudaRig(model, 20)
    prefill.engine.add("p", one, sampling, prefill_only=True)
    prefill.drain()
    state = prefill.engine.sequence("p")
    pages = decode.pool.allocate("ticket", len(state.pages))
    slab = gather_pages(prefill.tensor, torch.tensor(state.pages, device="cuda"))
    scatter_pages(decode.tensor, torch.tensor(pages, device="cuda"), slab)
    torch.cuda.synchronize()
    decode.engine.adopt("d", one, sampling, owner="ticket", first_tokens={0: expected[0]}, cached_tokens=0)
    prefill.engine.release("p")
    decode.drain()
    assert decode.tokens["d"] == expected[1:]
    assert replays == [1] * 23
    for rig in (prefill, decode):
        rig.assert_idle()


# --- what cannot be captured ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gemma2", "mixtral"])
def test_kinds_of_models_without_graphs(gpu, tmp_path, kind) -> None:
    assert kind in FAMILIES
    torch.manual_seed(1)
    tiny_random_model(kind, head_dim=64, vocab_size=VOCABULARY).save_pretrained(tmp_path)
    made = PagedModel.load(open_checkpoint(str(tmp_path)), "bfloat16", PAGE_TOKENS, device="cuda")
    assert made._graphs is None


@contextlib.contextmanager
def _changed(model: PagedModel, change: Callable[[Any], Any]) -> Iterator[None]:
    real = model._model.forward
    model._model.forward = lambda *a, **k: change(real(*a, **k))
    try:
        yield
    finally:
        model._model.forward = real


def test_what_waits_for_the_host_is_launched(load, eager, caplog, replays) -> None:
    made = load()
    # Loading has compared a replayed step with the model's own.
    assert replays == [2]
    replays.clear()

    def wait(output: Any) -> Any:
        output.logits.sum().item()
        return output

    caplog.set_level(logging.INFO)
    with _changed(made, wait):
        rig = CudaRig(made, 20)
        found = rig.generate([prompt(20)], greedy(10))
    assert "the engine is without CUDA graphs" in caplog.text
    assert "synchroniz" in caplog.text
    assert made._graphs.batches == []
    assert not replays
    assert found == CudaRig(eager, 20).generate([prompt(20)], greedy(10))
    # The allocator is as it was: a batch too large is an ordinary error.
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
