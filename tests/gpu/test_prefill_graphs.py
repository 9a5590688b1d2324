# SPDX-License-Identifier: Apache-2.0
"""Short steps with chunks of prompts as CUDA graphs, and the last layer without rows that nobody reads, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from engine.conftest import greedy
from gpu.cuda_rig import CudaRig
from kit.tiny_prompts import VOCABULARY, prompt, same_values
from kvrail.kernels.attention import Slice, StepPlan
from kvrail.kernels.flashinfer_attention import FlashInferAttention
from kvrail.kernels.flashinfer_fixed import FixedAttention
from kvrail.kernels.prefill_tables import PREFILL_SEQUENCES, PrefillTables
from kvrail.runtime.model import PagedModel
from kvrail.runtime.step_graphs import StepGraphs

PAGE_TOKENS = 16


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every step with chunks that is replayed."""
    seen: list[int] = []
    real = StepGraphs.run

    def run(self: StepGraphs, pool: Any, tokens: Any, slices: Any, wanted: Any) -> Any:
        found = real(self, pool, tokens, slices, wanted)
        if found is not None and len(tokens) != len(slices):
            seen.append(len(tokens))
        return found

    monkeypatch.setattr(StepGraphs, "run", run)
    return seen


def _slices(rng: np.random.Generator, lengths: list[int], page_tokens: int, pages: list[int]) -> list[Slice]:
    starts = [int(rng.choice([0, 1, page_tokens - 1, page_tokens, 3 * page_tokens + 5])) for _ in lengths]
    return [
        Slice([pages.pop() for _ in range(-(-(start + length) // page_tokens))], start, length)
        for start, length in zip(starts, lengths, strict=True)
    ]


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ([], 32),
        ([1], 32),
        ([20], 32),
        ([32], 32),
        ([128], 128),
        ([100], 128),
        ([1, 1, 60, 30], 96),
        ([5] * PREFILL_SEQUENCES, 96),
        ([1] * 15 + [400], 448),
        ([512], 512),
        ([200, 200], 512),
    ],
)
@pytest.mark.parametrize("page_tokens", [16, 128])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 128), (8, 2, 64), (4, 4, 64)])
def test_attention_equals_the_torch_plan(
    gpu, tmp_path_factory, lengths, rows, page_tokens, heads, kv_heads, head_dim
) -> None:
    rng = np.random.default_rng([rows, len(lengths)])
    torch.manual_seed(rows)
    attention = FlashInferAttention(
        gpu, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=torch.bfloat16
    )
    attention.compile()
    count = 260
    slices = _slices(rng, lengths, page_tokens, rng.permutation(count).tolist())
    real = sum(lengths)
    pool = torch.full((count, 3, 2, page_tokens, kv_heads, head_dim), torch.nan, device=gpu).bfloat16()
    for part in slices:
        flat = torch.randn(len(part.pages), *pool.shape[1:], device=gpu).bfloat16()
        for page in range(len(part.pages)):
            # What stands behind the sequence is anything.
            flat[page, :, :, max(0, part.start - page * page_tokens) :] = torch.nan
        pool[part.pages] = flat
    oracle = pool.float().cpu()
    shape = {"query": heads, "key": kv_heads, "value": kv_heads}
    given = {
        n: torch.randn(rows, h, head_dim, device=gpu).bfloat16().transpose(0, 1) for n, h in shape.items()
    }
    cache = tmp_path_factory.getbasetemp()
    fixed = FixedAttention(attention, pool, PrefillTables(gpu, 512, 220), cache)
    empty = fixed.begin(np.zeros(0, np.int64), [], [], rows)
    planned = fixed.begin(np.zeros(real, np.int64), slices, [], rows)
    assert planned == empty, "a plan depends on more than the number of rows"
    found = fixed.plan(pool, rows, planned).attend(2, **given, scaling=0.11)
    assert found.shape == (rows, heads, head_dim)
    assert not bool(found[real:].any()), "a row too many saw something"
    if lengths:
        wide = {name: value[:, :real].float().cpu() for name, value in given.items()}
        zeroed = torch.nan_to_num(oracle, nan=0.0)
        expected = StepPlan(zeroed, slices, torch.float32).attend(2, **wide, scaling=0.11)
        # Parts over different keys are rounded before they are put together.
        assert float((found[:real].float().cpu() - expected).abs().max()) <= 0.04
        # Exactly the new rows of this layer have changed.
        StepPlan(oracle, slices, torch.float32).store(2, wide["key"], wide["value"])
    assert same_values(pool.cpu(), oracle.bfloat16())


@pytest.mark.parametrize(
    "lengths", [[1, 40], [2], [31], [32], [128], [100], [1, 1, 60, 30], [1] * 15 + [300], [512], [511]]
)
def test_a_step_equals_the_launched_one(model, eager, gpu, lengths, replays) -> None:
    rng = np.random.default_rng(sum(lengths))
    order = rng.permutation(260).tolist()
    slices = _slices(rng, lengths, PAGE_TOKENS, order)
    pool = torch.full((260, *model.layout.shape), torch.nan, dtype=torch.bfloat16, device=gpu)
    for part in slices:
        if part.start:
            text = rng.integers(0, VOCABULARY, part.start)
            eager.forward(pool, text, [Slice(part.pages, 0, part.start)], [part.start - 1])
    copy = pool.clone()
    model.prepare_steps(pool, 16, 40)
    assert same_values(pool, copy), "capturing has touched a page"
    assert model._graphs.chunks[-1] == 512
    tokens = rng.integers(0, VOCABULARY, sum(lengths))
    ends = (np.cumsum(lengths) - 1).tolist()
    for wanted in (ends, ends[::-1], [], [0, *ends[-1:]]):
        expected = eager.forward(copy, tokens, slices, wanted)
        found = model.forward(pool, tokens, slices, wanted)
        assert found.shape == expected.shape == (len(wanted), VOCABULARY)
        if wanted:
            difference = float((found - expected).abs().max())
            assert difference <= 0.1 * float(expected.std()), difference
        written = torch.cat([copy[part.pages].float().reshape(-1) for part in slices])
        own = torch.cat([pool[part.pages].float().reshape(-1) for part in slices])
        assert torch.equal(written.isnan(), own.isnan()), "other rows were stored"
        assert float((written - own).nan_to_num().abs().max()) <= 0.25
    assert replays == [sum(lengths)] * 4
    others = torch.ones(len(pool), dtype=torch.bool)
    others[[page for part in slices for page in part.pages]] = False
    assert bool(pool[others.to(gpu)].isnan().all()), "a page of nobody was written to"


def _assert_likely(eager: PagedModel, text: Any, first: int, tokens: list[int]) -> None:
    """Each token is what the launched model finds likeliest behind those before it, or nearly so."""
    whole = np.array([*text.tolist(), *tokens], dtype=np.int64)
    pages = list(range(-(-len(whole) // PAGE_TOKENS)))
    pool = torch.zeros(len(pages), *eager.layout.shape, dtype=torch.bfloat16, device="cuda")
    places = list(range(first - 1, len(whole) - 1))
    logits = eager.forward(pool, whole, [Slice(pages, 0, len(whole))], places)
    own = logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
    assert float((logits.amax(-1) - own).max()) <= 0.3 * float(logits.std())


def test_an_engine_with_both_kinds_of_graphs(model, eager, replays) -> None:
    """Prompts that join decoding ones, with prefix hits, preemption and NaN in what is free."""
    rig = CudaRig(model, 40, max_num_batched_tokens=200)
    shared = prompt(64, 1)
    prompts = [np.concatenate([shared, prompt(3 + 7 * n, n)]) for n in range(6)] + [prompt(150), prompt(1)]
    for turn in range(2):
        for n, one in enumerate(prompts):
            rig.engine.add(f"{turn}.{n}", one, greedy(20))
            rig.step()
            rig.step()
        rig.drain()
        rig.poison_free_pages()
    rig.assert_idle()
    assert len(set(replays)) > 4
    for turn in range(2):
        for n, one in enumerate(prompts):
            assert len(rig.tokens[f"{turn}.{n}"]) == 20
            _assert_likely(eager, one, len(one), rig.tokens[f"{turn}.{n}"])


def test_an_engine_that_only_prefills(load, eager, replays) -> None:
    rig = CudaRig(load(decodes=False), 60, prefix_cache=False)
    assert rig.model._graphs.batches == []
    for n, length in enumerate((1, 16, 33, 128, 512, 700)):
        rig.engine.add(str(n), prompt(length), greedy(4), prefill_only=True)
        rig.drain()
        _assert_likely(eager, prompt(length), length, rig.tokens[str(n)])
        rig.engine.release(str(n))
    assert replays == [*replays[:-4], 16, 33, 128, 512]
    rig.assert_idle()


@contextmanager
def _spared(model: PagedModel, least: int) -> Iterator[None]:
    before, model._least_spared = model._least_spared, least
    try:
        yield
    finally:
        model._least_spared = before


@pytest.mark.parametrize("lengths", [[600], [1, 1, 700], [300, 1, 400], [1, 40]])
@pytest.mark.parametrize("wanted", ["ends", "none", "some"])
def test_the_last_layer_without_unread_rows(eager, gpu, lengths, wanted) -> None:
    rng = np.random.default_rng(sum(lengths))
    slices = _slices(rng, lengths, PAGE_TOKENS, rng.permutation(200).tolist())
    pool = torch.full((200, *eager.layout.shape), torch.nan, dtype=torch.bfloat16, device=gpu)
    for part in slices:
        if part.start:
            text = rng.integers(0, VOCABULARY, part.start)
            eager.forward(pool, text, [Slice(part.pages, 0, part.start)], [part.start - 1])
    tokens = rng.integers(0, VOCABULARY, sum(lengths))
    ends = (np.cumsum(lengths) - 1).tolist()
    asked = {"ends": ends, "none": [], "some": [*range(sum(lengths) - 20, sum(lengths) - 10)]}[wanted]
    copy = pool.clone()
    with _spared(eager, 1 << 40):
        expected = eager.forward(copy, tokens, slices, asked).clone()
    rows: list[int] = []
    norm = eager._model.get_decoder().norm
    handle = norm.register_forward_hook(lambda _, given, __: rows.append(given[0].shape[1]))
    with _spared(eager, 1):
        found = eager.forward(pool, tokens, slices, asked)
    handle.remove()
    assert rows == [{"ends": len(ends), "none": 1, "some": 20}[wanted]]
    assert found.shape == expected.shape == (len(asked), VOCABULARY)
    if asked:
        assert float((found - expected).abs().max()) <= 0.1 * float(expected.std())
    assert torch.equal(pool.isnan(), copy.isnan())
    assert float((pool.float() - copy.float()).nan_to_num().abs().max()) <= 0.25
