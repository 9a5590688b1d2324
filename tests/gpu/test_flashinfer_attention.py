# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's attention over our pool against the torch plan in float32, and the engine on top of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.conftest import greedy
from kvrail.kernels.attention import Slice, StepPlan
from kvrail.kernels.flashinfer_attention import AttentionUnavailable, FlashInferAttention
from kvrail.runtime.checkpoint import open_checkpoint
from kvrail.runtime.embedded import EmbeddedEngine
from kvrail.runtime.model import PagedModel, pool_tensor
from kvrail.transfer.pages import PagePool

LAYERS, KV_HEADS = 3, 2
TOLERANCE = {torch.bfloat16: 0.02, torch.float16: 0.003}


@pytest.fixture(scope="session")
def attention() -> Any:
    if not torch.cuda.is_available():
        pytest.skip(f"no CUDA device (torch {torch.__version__})")
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("FlashInfer is not installed")
    made: dict[Any, FlashInferAttention] = {}

    def make(dtype: torch.dtype, head_dim: int, groups: int = 4) -> FlashInferAttention:
        key = (dtype, head_dim, groups)
        if key not in made:
            made[key] = FlashInferAttention(
                torch.device("cuda", 0),
                heads=KV_HEADS * groups,
                kv_heads=KV_HEADS,
                head_dim=head_dim,
                dtype=dtype,
            )
            made[key].compile()
            assert made[key].compiled
        return made[key]

    return make


def _step(page_tokens: int, kinds: str, rng: np.random.Generator) -> tuple[list[Slice], int]:
    """Slices over scattered pages: s a single token, c a chunk; how many pages there are in all."""
    pages = rng.permutation(400).tolist()
    slices = []
    for kind in kinds:
        start = int(rng.integers(0, 3 * page_tokens + 5))
        length = 1 if kind == "s" else int(rng.integers(2, 2 * page_tokens + 3))
        count = -(-(start + length) // page_tokens)
        slices.append(Slice([pages.pop() for _ in range(count)], start, length))
    return slices, 400


@pytest.mark.parametrize("page_tokens", [16, 128])
@pytest.mark.parametrize("kinds", ["s", "c", "ssss", "ccc", "sssccc", "cscs", "s" * 40 + "cc"])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "groups"),
    [(torch.bfloat16, 128, 4), (torch.bfloat16, 64, 3), (torch.bfloat16, 64, 1), (torch.float16, 64, 4)],
)
def test_equals_the_torch_plan(attention, dtype, head_dim, groups, page_tokens, kinds) -> None:
    rng = np.random.default_rng([page_tokens, len(kinds), head_dim])
    torch.manual_seed(len(kinds))
    slices, count = _step(page_tokens, kinds, rng)
    pool = torch.full(
        (count, LAYERS, 2, page_tokens, KV_HEADS, head_dim), torch.nan, dtype=dtype, device="cuda"
    )
    for part in slices:
        # As the engine leaves them: what stands before `start`, and zeros behind it.
        flat = torch.randn(len(part.pages), *pool.shape[1:], device="cuda").to(dtype)
        for page in range(len(part.pages)):
            flat[page, :, :, max(0, part.start - page * page_tokens) :] = 0
        pool[part.pages] = flat
    before = pool.clone()
    oracle = pool.float().nan_to_num(nan=torch.inf).cpu()
    oracle[oracle.isinf()] = torch.nan
    tokens = sum(part.length for part in slices)
    shape = {"query": KV_HEADS * groups, "key": KV_HEADS, "value": KV_HEADS}
    plan = attention(dtype, head_dim, groups).plan(pool, slices, dtype)
    expected_plan = StepPlan(oracle, slices, torch.float32)
    assert plan.positions.tolist() == expected_plan.positions.tolist()
    for layer in (2, 0):
        # Strides as transformers leaves them: [T, heads, dim] in memory, seen as [heads, T, dim].
        given = {
            n: torch.randn(tokens, h, head_dim, device="cuda").to(dtype).transpose(0, 1)
            for n, h in shape.items()
        }
        found = plan.attend(layer, **given, scaling=0.11)
        wide = {name: value.float().cpu() for name, value in given.items()}
        expected = expected_plan.attend(layer, **wide, scaling=0.11)
        assert found.shape == expected.shape
        assert float((found.float().cpu() - expected).abs().max()) <= TOLERANCE[dtype]
    # Exactly the new rows of these layers have changed.
    assert torch.equal(pool.float().cpu(), oracle) or bool(
        ((pool.float().cpu() == oracle) | (pool.float().cpu().isnan() & oracle.isnan())).all()
    )
    unchanged = torch.equal(pool[:, 1].nan_to_num(nan=7.0), before[:, 1].nan_to_num(nan=7.0))
    assert unchanged, "a layer that had no turn was written to"


@pytest.mark.parametrize("compiled", [True, False])
def test_offsets_beyond_32_bits(attention, compiled) -> None:
    """A pool of more than 2^32 elements, used at its far end."""
    page_tokens, dtype, head_dim = 128, torch.bfloat16, 128
    page = LAYERS * 2 * page_tokens * KV_HEADS * head_dim
    count = (1 << 32) // page + 40
    pool = torch.zeros(count, LAYERS, 2, page_tokens, KV_HEADS, head_dim, dtype=dtype, device="cuda")
    slices = [Slice([count - 1, 3], 130, 1), Slice([5, count - 2, count - 7], 250, 60)]
    used = sorted({page for part in slices for page in part.pages})
    pool[used] = torch.randn(len(used), *pool.shape[1:], device="cuda").to(dtype)
    # The same step over a small pool in float32.
    small = pool[used].float().cpu()
    renamed = [part._replace(pages=[used.index(page) for page in part.pages]) for part in slices]
    given = {
        n: torch.randn(61, h, head_dim, device="cuda").to(dtype).transpose(0, 1)
        for n, h in (("query", 8), ("key", KV_HEADS), ("value", KV_HEADS))
    }
    plan = attention(dtype, head_dim).plan(pool, slices, dtype) if compiled else StepPlan(pool, slices, dtype)
    found = plan.attend(2, **given, scaling=0.1)
    wide = {name: value.float().cpu() for name, value in given.items()}
    expected = StepPlan(small, renamed, torch.float32).attend(2, **wide, scaling=0.1)
    assert float((found.float().cpu() - expected).abs().max()) <= TOLERANCE[dtype]
    assert torch.equal(pool[used].float().cpu(), small)
    del pool
    torch.cuda.empty_cache()


def test_plans_that_follow_each_other_on_a_slow_stream(attention) -> None:
    """A plan is made while the stream still has to copy the last one's tables: they must not be mixed up."""
    rng = np.random.default_rng(5)
    made = attention(torch.bfloat16, 64)
    pool = torch.randn(400, LAYERS, 2, 16, KV_HEADS, 64, device="cuda").bfloat16()
    steps = [_step(16, kinds, rng)[0] for kinds in ("sss", "cc", "ssc", "c", "ssssc", "ccc")]
    outs: list[list[torch.Tensor]] = []
    for slow in (False, True):
        memory = pool.clone()
        generator = torch.Generator("cuda").manual_seed(1)
        outs.append([])
        if slow:
            torch.cuda._sleep(1_000_000_000)
        for slices in steps:
            tokens = sum(part.length for part in slices)
            given = {
                n: torch.randn(h, tokens, 64, device="cuda", generator=generator).bfloat16()
                for n, h in (("query", 8), ("key", KV_HEADS), ("value", KV_HEADS))
            }
            outs[-1].append(made.plan(memory, slices, torch.bfloat16).attend(1, **given, scaling=0.1))
    for quick, late in zip(*outs, strict=True):
        assert torch.equal(quick, late)


def test_the_next_step_is_planned_while_the_one_before_waits_for_the_device(attention) -> None:
    """A long chunk plans twice: at its begin, and for its last layer, which the device reaches at its end."""
    rng = np.random.default_rng(6)
    made = attention(torch.bfloat16, 64)
    pool = torch.zeros(400, LAYERS, 2, 16, KV_HEADS, 64, device="cuda").bfloat16()
    step, last = _step(16, "c", rng)[0], _step(16, "s", rng)[0]
    for slices in 2 * (step, last):
        made.plan(pool, slices, torch.bfloat16)
    torch.cuda.synchronize()
    made.plan(pool, step, torch.bfloat16)
    torch.cuda._sleep(1_500_000_000)
    made.plan(pool, last, torch.bfloat16)
    behind = torch.cuda.current_stream().record_event()
    for slices in (step, last):
        made.plan(pool, slices, torch.bfloat16)
    assert not behind.query(), "planning waited for the end of the step before"


def test_what_it_does_not_cover_is_said(attention) -> None:
    with pytest.raises(AttentionUnavailable, match="not in float32"):
        attention(torch.float32, 64)
    with pytest.raises(AttentionUnavailable, match="heads of 80"):
        attention(torch.bfloat16, 80)


# --- the engine ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def loaded(attention, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("wide")
    torch.manual_seed(3)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=997,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    checkpoint = open_checkpoint(str(folder))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def load(dtype: str, page_tokens: int, device: str = "cuda:0") -> tuple[PagedModel, Any]:
        model = PagedModel.load(checkpoint, dtype, page_tokens, device=device, attention="flashinfer")
        assert "FlashInfer" in model.arithmetic
        return model, reference

    return load


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("page_tokens", "pages", "budget"), [(16, 300, 40), (16, 30, 64), (128, 40, 2048)])
def test_engine_decodes_the_likeliest_tokens(loaded, dtype, page_tokens, pages, budget) -> None:
    """Chunks beside decoding ones, prefix hits, preemption (30 pages), NaN in what is free."""
    model, reference = loaded(dtype, page_tokens)
    pool = PagePool(pages)
    memory = torch.full((pages * model.layout.page_bytes,), 255, dtype=torch.uint8, device="cuda")
    engine = EmbeddedEngine(model, pool, memory, max_num_batched_tokens=budget)
    assert bool(pool_tensor(memory, pages, model.layout).isnan().all())
    rng = np.random.default_rng(9)
    shared = rng.integers(0, 997, 150)
    prompts = [np.concatenate([shared, rng.integers(0, 997, 3 + 9 * n)]).astype(np.uint32) for n in range(4)]
    prompts += [rng.integers(0, 997, n).astype(np.uint32) for n in (1, 16, 130)]
    tokens: dict[str, list[int]] = {}
    for turn in range(2):
        for n, one in enumerate(prompts):
            engine.add(f"{turn}.{n}", one, greedy(30))
            for output in engine.step():
                if output.token is not None:
                    tokens.setdefault(output.sequence_id, []).append(output.token)
        while engine.has_work:
            for output in engine.step():
                assert output.error is None
                if output.token is not None:
                    tokens.setdefault(output.sequence_id, []).append(output.token)
            pool.check()
    assert (pool.owned, pool.quarantined) == (0, 0)
    for turn in range(2):
        for n, one in enumerate(prompts):
            answer = tokens[f"{turn}.{n}"]
            assert len(answer) == 30
            text = torch.tensor([*one.astype(int).tolist(), *answer])[None]
            with torch.inference_mode():
                logits = reference(text).logits[0, len(one) - 1 : -1]
            gaps = logits.max(dim=-1).values - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
            assert float(gaps.max()) <= (0.3 if dtype == "bfloat16" else 0.1) * float(logits.std())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_gpu_that_is_not_the_first(loaded) -> None:
    """An engine on the last GPU decodes as one on the first does."""
    answers = []
    try:
        for device in ("cuda:0", f"cuda:{torch.cuda.device_count() - 1}"):
            model, _ = loaded("bfloat16", 16, device)
            assert model.device == torch.device(device)
            memory = torch.full((100 * model.layout.page_bytes,), 255, dtype=torch.uint8, device=model.device)
            engine = EmbeddedEngine(model, PagePool(100), memory, max_num_batched_tokens=64)
            engine.add("r", np.arange(3, 203, dtype=np.uint32), greedy(8))
            found: list[int] = []
            while engine.has_work:
                found += [output.token for output in engine.step() if output.token is not None]
            answers.append(found)
    finally:
        torch.cuda.set_device(0)
    assert len(answers[0]) == 8
    assert answers[0] == answers[1]


def test_steps_are_queued_one_ahead(loaded) -> None:
    """A step that samples nothing returns at once; the one behind it waits for it and no longer."""
    model, _ = loaded("bfloat16", 16)
    pages = 100
    memory = torch.zeros(pages * model.layout.page_bytes, dtype=torch.uint8, device="cuda")
    pool = PagePool(pages)
    engine = EmbeddedEngine(model, pool, memory, max_num_batched_tokens=64, prefix_cache=False)
    stream = torch.cuda.ExternalStream(engine.stream)
    engine.add("p", np.arange(500, dtype=np.uint32), greedy(2), prefill_only=True)
    # What the first step has to load is loaded before anything is measured.
    engine.step()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_500_000_000)
    engine.step()
    assert not stream.query(), "a step that samples nothing waited"
    slept = stream.record_event()
    engine.step()
    assert slept.query(), "the host is more than one step ahead"
    engine.abort("p")
    assert stream.query()
    assert (pool.owned, pool.quarantined) == (0, 0)
