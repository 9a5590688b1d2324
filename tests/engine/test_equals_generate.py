# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens over pages equal transformers' own generate: families, page sizes, chunks, concurrency."""

from __future__ import annotations

import pytest

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("page_tokens", [16, 128])
@pytest.mark.parametrize("budget", [2048, 24])
def test_alone_and_together(models, prompt, greedy, kind, page_tokens, budget) -> None:
    lengths = (1, 15, 16, 17, 40, 129)
    prompts = [prompt(length) for length in lengths]
    rig = models.rig(kind, page_tokens, max_num_batched_tokens=budget)
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


def test_bfloat16_agrees_with_the_model_in_bfloat16(models, prompt, greedy) -> None:
    """Near ties may flip in bfloat16, so only the first token is compared, over many prompts."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = models.checkpoint("llama").folder
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    rig = models.rig(dtype="bfloat16")
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
