# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens over pages equal transformers' own generate: families, page sizes, chunks, concurrency."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from kit.tiny_families import FAMILIES, WINDOWED


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("page_tokens", [16, 128])
@pytest.mark.parametrize("budget", [2048, 24])
def test_alone_and_together(models, prompt, greedy, kind, page_tokens, budget) -> None:
    lengths = (1, 15, 16, 17, 31, 32, 33, 40, 129, 200) if kind in WINDOWED else (1, 15, 16, 17, 40, 129)
    prompts = [prompt(length) for length in lengths]
    rig = models.rig(kind, page_tokens, max_num_batched_tokens=budget, slots=len(lengths))
    expected = [models.expected(one, 20, kind) for one in prompts]
    assert rig.generate(prompts, greedy(20)) == expected
    assert {output.finish_reason for output in rig.finished.values()} == {"length"}
    if budget == 24:
        sizes = [sum(1 for o in step if o.token is None) for step in rig.steps]
        assert sum(sizes) > 4, "nothing was cut into chunks"
    rig.assert_idle()


def test_sequences_that_join_later(models, prompt, greedy) -> None:
    rig = models.rig(max_num_batched_tokens=32, max_num_seqs=3)
    prompts = [prompt(5 + 13 * n, n) for n in range(6)]
    for n, one in enumerate(prompts):
        rig.engine.add(f"r{n}", one, greedy(12 + n))
        rig.step()
        assert rig.engine.load["running"] <= 3
    rig.drain()
    for n, one in enumerate(prompts):
        assert rig.tokens[f"r{n}"] == models.expected(one, 12 + n)
    rig.assert_idle()


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_agrees_with_the_model_in_16_bit(models, prompt, greedy, dtype, native) -> None:
    """Near ties may flip in 16 bits, so only the first token is compared, over many prompts."""
    folder = models.checkpoint("llama").folder
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    rig = models.rig(dtype=dtype, native=native)
    assert ("float32 activations" in rig.model.arithmetic) is not native
    prompts = [prompt(3 + 2 * n, n) for n in range(20)]
    found = rig.generate(prompts, greedy(1))
    same = 0
    for one, tokens in zip(prompts, found, strict=True):
        with torch.inference_mode():
            logits = reference(torch.from_numpy(one.astype("int64"))[None]).logits[0, -1].float()
        gap = float(logits.max() - logits[tokens[0]])
        assert gap <= 0.05 * float(logits.std()), f"logit gap {gap}"
        same += gap == 0.0
    assert same >= 15


@pytest.mark.parametrize("native", [False, True])
def test_16_bit_decoding_follows_its_own_prefill(models, prompt, greedy, native) -> None:
    """Tokens decoded one by one are the likeliest, or nearly so, when the whole text is read at once."""
    rig = models.rig(dtype="bfloat16", native=native)
    reference = models.reference("llama")
    prompts = [prompt(20 + n, n) for n in range(4)]
    for one, tokens in zip(prompts, rig.generate(prompts, greedy(40)), strict=True):
        text = torch.tensor([*one.astype(int).tolist(), *tokens])[None]
        with torch.inference_mode():
            logits = reference(text).logits[0, len(one) - 1 : -1]
        gaps = logits.max(dim=-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert float(gaps.max()) <= 0.15 * float(logits.std())
