# SPDX-License-Identifier: Apache-2.0
"""Text that is made behind the end of a prompt is the text that vLLM makes behind all of it."""

from __future__ import annotations

import itertools
import random
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    # Those of torch, with which vLLM compiles as it is imported.
    warnings.simplefilter("ignore")
    pytest.importorskip(
        "vllm.v1.engine.detokenizer", reason="vLLM is not installed (scripts/test_vllm makes an environment)"
    )

from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from kvrail.runtime.vllm.compat import text_from_the_end

_WORDS = ["the", "", "übung", "\n\n", "木漏れ日", ",", "don't", "a.b", "🙂🏽", "é", "<b>", "12", "."]


def _detokenizer(tokenizer: Any, prompt: list[int], **sampling: Any) -> FastIncrementalDetokenizer:
    params = SamplingParams(**sampling)
    request = SimpleNamespace(request_id="r", sampling_params=params, prompt_token_ids=prompt)
    return FastIncrementalDetokenizer(tokenizer, request)  # type: ignore[arg-type]


def _shortened(detokenizer: FastIncrementalDetokenizer, prompt: list[int]) -> bool:
    client = SimpleNamespace(
        output_processor=SimpleNamespace(request_states={"r": SimpleNamespace(detokenizer=detokenizer)})
    )
    before = detokenizer.stream
    text_from_the_end(client, "r", prompt)
    text_from_the_end(client, "unknown", prompt)
    return detokenizer.stream is not before


def _bytes_fall_back() -> Any:
    """A tokenizer of Llama's older kind: words with a mark for the space, and bytes for what it has no word for."""
    tokens = [f"<0x{n:02X}>" for n in range(256)] + ["▁", "▁a", "b", "▁word", "é", "</s>"]
    inner = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, [], byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["</s>"])
    return SimpleNamespace(_tokenizer=inner)


@pytest.mark.parametrize("kind", ["of the model", "bytes fall back"])
@pytest.mark.parametrize("skip", [True, False])
def test_the_same_text(vllm_model: Path, kind: str, skip: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(vllm_model) if kind == "of the model" else _bytes_fall_back()
    vocabulary = tokenizer._tokenizer.get_vocab_size()
    # Words more often than bytes.
    weights = list(itertools.accumulate([1] * 256 + [100] * (vocabulary - 256)))
    shortened = 0
    for seed in range(200):
        rng = random.Random(seed)
        if kind == "of the model" and seed % 2:
            prompt = tokenizer.encode(" ".join(rng.choices(_WORDS, k=rng.randrange(1, 200))))
            prompt = prompt[: rng.randrange(1, len(prompt) + 1)]
        else:
            prompt = rng.choices(range(vocabulary), cum_weights=weights, k=rng.randrange(1, 200))
        answer = rng.choices(range(vocabulary), cum_weights=weights, k=12)
        texts = []
        for short in (False, True):
            detokenizer = _detokenizer(tokenizer, prompt, skip_special_tokens=skip)
            shortened += short and _shortened(detokenizer, prompt)
            texts.append([(detokenizer.update([token], False), detokenizer.output_text) for token in answer])
        assert texts[0] == texts[1], (seed, prompt[-5:])
    assert shortened > 50


def test_what_is_left_alone(vllm_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(vllm_model)
    part = tokenizer.encode("🙂")[:-1]
    for prompt in ([300] * 64, [300] * 100 + part, [300] * 100 + [tokenizer.eos_token_id] * 64):
        assert not _shortened(_detokenizer(tokenizer, prompt), prompt)
    begun = _detokenizer(tokenizer, [300] * 100)
    begun.update([301], False)
    assert not _shortened(begun, [300] * 100)


def test_a_long_prompt_costs_nothing(vllm_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(vllm_model)
    prompt = [random.Random(1).randrange(300, 40_000) for _ in range(32_768)]
    took = {}
    for short in (False, True):
        detokenizer = _detokenizer(tokenizer, prompt)
        if short:
            assert _shortened(detokenizer, prompt)
        began = time.perf_counter()
        detokenizer.update([400], False)
        took[short] = time.perf_counter() - began
    assert took[True] < took[False] / 10
