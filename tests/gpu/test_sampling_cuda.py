# SPDX-License-Identifier: Apache-2.0
"""What requests do to their logits, on a GPU: the same tokens as on a CPU, by the sampler alone and in the engine."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from engine.conftest import Models, Rig, greedy
from gpu.cuda_rig import CudaModels
from kit.tiny_model import END, byte_level_tokenizer
from kit.tiny_prompts import VOCABULARY, prompt
from kvrail.runtime.grammar import Grammars
from kvrail.runtime.messages import Sampling
from kvrail.runtime.processors import Row, TokenHistory
from kvrail.runtime.sampler import sample

TOKENIZER = byte_level_tokenizer()
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}},
    "required": ["kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="session")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("cpu-models"))


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(TOKENIZER.to_str, VOCABULARY)
    yield made
    made.close()


def rows() -> list[Row]:
    """Each parameter by itself, and all of them together."""
    some = {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "presence_penalty": 0.5, "frequency_penalty": 0.3}
    bias = {"logit_bias": [(5, 4.0), (6, -100.0)], "min_tokens": 9, "stop_token_ids": [1, 2]}
    asked: list[dict[str, Any]] = [{}, {"temperature": 0.7}, *({name: some[name]} for name in some)]
    asked += [{"repetition_penalty": 1.3}, bias, {**some, **bias, "repetition_penalty": 1.2, "logprobs": 5}]
    found = []
    for number, more in enumerate(asked):
        sampling = Sampling(**{"max_tokens": 20, "seed": number, "temperature": 0.9, **more})
        penalised = any("penalty" in name for name in more)
        history = TokenHistory(prompt(30, number), [5, 5, 8]) if penalised else None
        allowed = np.random.default_rng(number).random(VOCABULARY) < 0.5
        mask = np.packbits(allowed, bitorder="little") if number % 3 == 0 else None
        # As long as the grammar's own: whole words of 32 bits.
        mask = None if mask is None else np.concatenate([mask, np.zeros(-len(mask) % 4, np.uint8)])
        found.append(Row(sampling, 40 + number, 3, history, mask))
    return found


@pytest.mark.gpu
def test_the_sampler_draws_what_it_draws_on_a_cpu(models: CudaModels) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        logits = torch.randn(len(rows()), VOCABULARY, generator=generator) * 3
        here, there = sample(logits, rows()), sample(logits.to(models.device), rows())
        for one, other in zip(here, there, strict=True):
            assert not isinstance(one, str)
            assert not isinstance(other, str)
            assert one[0] == other[0]
            if one[1] is not None:
                assert other[1] is not None
                assert other[1].logprob == pytest.approx(one[1].logprob, abs=1e-4)
                assert [token for token, _ in other[1].top] == [token for token, _ in one[1].top]


@pytest.mark.gpu
def test_a_row_that_cannot_be_drawn_says_why(models: CudaModels) -> None:
    logits = torch.zeros(3, VOCABULARY, device=models.device)
    logits[1, 7] = torch.nan
    nothing = np.zeros(-(-VOCABULARY // 32) * 4, np.uint8)
    found = sample(logits, [Row(greedy(1), 1), Row(greedy(1), 1), Row(greedy(1), 1, mask=nothing)])
    assert not isinstance(found[0], str)
    assert "not numbers" in found[1]
    assert "no token to choose from" in found[2]


def run(rig: Rig) -> tuple[dict[tuple[str, int], list[int]], dict[str, list[Any]]]:
    """(tokens of each choice of each request, log-probabilities of each prompt)."""
    tokens, prompts = defaultdict(list), defaultdict(list)
    while rig.engine.has_work:
        for output in rig.engine.step():
            assert output.error is None
            prompts[output.sequence_id] += output.prompt_logprobs
            if output.token is not None:
                tokens[output.sequence_id, output.choice].append(output.token)
        rig.pool.check()
    return dict(tokens), dict(prompts)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_choices_and_prompt_logprobs_side_by_side(models: CudaModels, on_cpu: Models, kind: str) -> None:
    """Forked pages and rings, and logits of whole prompts, beside plain requests."""

    def ask(rig: Rig) -> tuple[dict[tuple[str, int], list[int]], dict[str, list[Any]]]:
        rig.engine.add("choices", prompt(45), greedy(20, n=4, temperature=1.0, top_p=0.95))
        rig.engine.add("told", prompt(150, 1), greedy(6, prompt_logprobs=3, logprobs=2))
        rig.engine.add("plain", prompt(33, 2), greedy(12))
        found = run(rig)
        rig.assert_idle()
        return found

    (tokens, told), (wanted, wanted_told) = (
        ask(one.rig(kind, max_num_batched_tokens=64)) for one in (models, on_cpu)
    )
    assert len({tuple(tokens["choices", choice]) for choice in range(4)}) > 1
    assert tokens == wanted
    assert len(told["told"]) == 149
    for one, other in zip(told["told"], wanted_told["told"], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_follow_their_grammars(models: CudaModels, grammars: Grammars, temperature: float) -> None:
    def asked(grammar: str, **more: Any) -> Sampling:
        end = {"eos_ids": [END], "stop_token_ids": [END], "temperature": temperature}
        return greedy(60, grammar=grammar, **end, **more)

    compact = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
    rig = models.rig(grammars=grammars)
    rig.engine.add("json", prompt(20), asked(compact))
    rig.engine.add("number", prompt(21), asked(LLMatcher.grammar_from_regex(r"[0-9]{3,6}"), n=2))
    rig.engine.add("free", prompt(30), greedy(30))
    tokens, _ = run(rig)
    texts = {
        key: TOKENIZER.decode([token for token in found if token != END]) for key, found in tokens.items()
    }
    assert json.loads(texts["json", 0])["kind"] in ("cat", "dog")
    for choice in range(2):
        assert re.fullmatch(r"[0-9]{3,6}", texts["number", choice])
    assert tokens["free", 0] == models.expected(prompt(30), 30)
    rig.assert_idle()


@pytest.mark.gpu
def test_what_is_cut_leaves_nothing(models: CudaModels) -> None:
    """Requests that are aborted in every state, while others go on and get their tokens."""
    rig = models.rig(pages=40, max_num_batched_tokens=32)
    tokens: list[int] = []
    rig.engine.add("stays", prompt(40, 9), greedy(40))
    random: Callable[[int], int] = np.random.default_rng(4).integers
    for turn in range(30):
        sampling = greedy(20, n=1 + int(random(3)), temperature=1.0)
        rig.engine.add(f"r{turn}", prompt(1 + int(random(90)), turn), sampling)
        tokens += [
            one.token for one in rig.engine.step() if one.sequence_id == "stays" and one.token is not None
        ]
        rig.engine.abort(f"r{int(random(turn + 1))}")
        rig.pool.check()
    for turn in range(30):
        rig.engine.abort(f"r{turn}")
    found, _ = run(rig)
    assert tokens + found.get(("stays", 0), []) == models.expected(prompt(40, 9), 40)
    rig.assert_idle()


def test_while_a_token_is_waited_for_other_threads_use_the_device() -> None:
    """The pages of the step are pushed meanwhile: what waits must not hold the driver's lock."""
    if not torch.cuda.is_available():
        pytest.skip(f"no CUDA device (torch {torch.__version__})")
    logits = torch.randn(1, VOCABULARY, device="cuda")
    asked = [Row(Sampling(max_tokens=2, seed=1, temperature=0.9, top_p=0.9, logprobs=2), 3)]
    sample(logits, asked)
    looks: list[float] = []
    stop = threading.Event()

    def beside() -> None:
        stream = torch.cuda.Stream()
        while not stop.is_set():
            event = stream.record_event()
            while not event.query():
                pass
            looks.append(time.monotonic())
            time.sleep(0.001)

    thread = threading.Thread(target=beside)
    thread.start()
    while not looks:
        time.sleep(0.01)
    torch.cuda._sleep(1_000_000_000)  # about half a second
    began = time.monotonic()
    sample(logits, asked)
    ended = time.monotonic()
    stop.set()
    thread.join()
    times = [began, *(look for look in looks if began < look < ended), ended]
    longest = max(later - earlier for earlier, later in itertools.pairwise(times))
    assert ended - began > 0.2
    assert longest < 0.1, f"for {longest:.2f} s of {ended - began:.2f} nobody else could look at an event"
